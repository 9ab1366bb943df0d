"""How long a party computes: constant, Poisson, exponential, or a trace from a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.errors import PlanError

Delay = Callable[[], float]
DELAYS = ("constant", "poisson", "exponential", "trace")


class StepDelay:
    """The duration of each step of one party, in time units.

    Args:
        kind: ``constant`` gives 1; ``poisson`` is Poisson(2m) / 2M and ``exponential`` has mean m, for the
            m-th of M parties counted from 1 (VAFL, appendix G); ``trace`` repeats given durations.
        party: Index of the party, from 0.
        parties: Number of parties.
        speed: Divides every duration; 2 is twice as fast.
        generator: Source of the random durations; its state is part of the role's state.
        trace: Durations for ``trace``.
    """

    def __init__(
        self,
        kind: str,
        *,
        party: int,
        parties: int,
        speed: float = 1.0,
        generator: np.random.Generator,
        trace: tuple[float, ...] = (),
    ) -> None:
        if kind not in DELAYS:
            raise PlanError(f"unknown delay {kind!r}; use one of {', '.join(DELAYS)}")
        self.kind = kind
        self.rank = party + 1
        self.parties = parties
        self.speed = speed
        self.generator = generator
        self.trace = trace
        self.steps = 0

    def draw(self) -> float:
        """The duration of the next step."""
        self.steps += 1
        match self.kind:
            case "poisson":
                duration = self.generator.poisson(2 * self.rank) / (2 * self.parties)
            case "exponential":
                duration = self.generator.exponential(self.rank)
            case "trace":
                duration = self.trace[(self.steps - 1) % len(self.trace)]
            case _:
                duration = 1.0
        return float(duration) / self.speed

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here."""
        return {"steps": self.steps, "generator": self.generator.bit_generator.state}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes back to a saved state."""
        self.steps = int(state["steps"])
        self.generator.bit_generator.state = state["generator"]


def read_trace(path: Path, parties: tuple[str, ...]) -> Mapping[str, tuple[float, ...]]:
    """Reads a trace: a JSON object, party name -> list of step durations.

    Raises:
        PlanError: The file is missing or not of that form.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        trace = {party: tuple(float(step) for step in content[party]) for party in parties}
    except OSError as error:
        raise PlanError(f"delay trace {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(f'delay trace {path} must be JSON like {{"p0": [1.0, 2.5], ...}}: {error}') from error
    except KeyError as error:
        raise PlanError(f"delay trace {path} has no durations for party {error.args[0]!r}") from error
    for party, steps in trace.items():
        if not steps or min(steps) < 0 or not np.isfinite(steps).all():
            raise PlanError(f"delay trace {path}: durations of {party!r} must be a list of numbers >= 0")
    return trace
