"""What one step of a role is: which records it takes, how long it lasts, and the optimiser's update."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from securevfl.algorithms.base import SERVER, Setup
from securevfl.errors import PlanError
from securevfl.models.seeds import numpy_generator
from securevfl.privacy.rows import Rows
from securevfl.settings.plan import Plan

MOMENTUM = 0.9
DELAYS = ("constant", "poisson", "exponential", "trace")


# -- records ------------------------------------------------------------------------------------------------


class Batches:
    """Endless batches without replacement within a pass; every record occurs once per pass.

    Args:
        records: How many records there are.
        size: Of a batch.
        generator: Draws the order.
        block: So many neighbours stay together, for data that is read in pieces; it divides the size.
    """

    def __init__(self, records: int, size: int, generator: np.random.Generator, *, block: int = 1) -> None:
        self.records, self.block = records, block
        self.size = min(size, records)
        self.generator = generator
        self._order: Rows = np.empty(0, np.int64)
        self._position = 0

    @property
    def per_pass(self) -> int:
        """Batches in one pass through the records."""
        return -(-self.records // self.size)

    def next(self) -> Rows:
        """The next batch; the last one of a pass may be smaller."""
        if self._position >= len(self._order):
            self._order = self.generator.permutation(-(-self.records // self.block)).astype(np.int64)
            self._position = 0
        drawn = self._order[self._position : self._position + self.size // self.block]
        self._position += len(drawn)
        if self.block == 1:
            return drawn
        rows = (np.sort(drawn)[:, None] * self.block + np.arange(self.block)).reshape(-1)
        return rows if rows[-1] < self.records else rows[rows < self.records]

    def upcoming(self, count: int) -> list[Rows]:
        """The batches that follow; `next` will give them again."""
        ahead = copy.deepcopy(self)
        return [ahead.next() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here."""
        return {
            "order": self._order,
            "position": self._position,
            "generator": self.generator.bit_generator.state,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes back to a saved state."""
        self._order = np.asarray(state["order"], np.int64)
        self._position = int(state["position"])
        self.generator.bit_generator.state = state["generator"]


class Draws(Batches):
    """Batches drawn independently of each other, without repeats inside a batch.

    One record at a time, they are the independent draws of VAFL's Algorithm 1 and AFSGD-VP's Algorithms 3 to
    5. Estimators that remember each record's last gradient are unbiased only with these: within a pass
    without replacement, exactly the records with old memories are still to come.
    """

    def next(self) -> Rows:
        """The next batch."""
        return self.generator.choice(self.records, self.size, replace=False).astype(np.int64)


def build_batches(setup: Setup, order: int = 0, records: int | None = None) -> Batches:
    """A role's batches of training records, as the plan samples them.

    Args:
        setup: What the run is built from.
        order: Roles of the same order visit the records together.
        records: How many of the first records there are to choose from; all by default.
    """
    plan, count = setup.plan, setup.data.n_train if records is None else records
    kind = Draws if plan.sampling == "draws" else Batches
    return kind(count, plan.batch, numpy_generator(plan.seed, "batches", order))


def most_visits(plan: Plan, records: int, passes: float) -> int:
    """How often one record is visited at most in so many passes: of draws, but for a chance of 1e-6.

    A record is in each batch with the same chance, independently, so its visits are binomial; the bound holds
    for all records at once. Whoever releases it more often than the budget allows is stopped by the gate.
    """
    if plan.sampling == "passes":
        return math.ceil(passes)
    size = min(plan.batch, records)
    batches = math.ceil(passes * records / size) + 1
    return int(stats.binom.isf(1e-6 / records, batches, size / records))


# -- durations ----------------------------------------------------------------------------------------------


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
        self.kind, self.rank, self.parties, self.speed = kind, party + 1, parties, speed
        self.generator, self.trace = generator, trace
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


def _traces(plan: Plan, parties: tuple[str, ...]) -> Mapping[str, tuple[float, ...]]:
    simulation = plan.simulation
    return read_trace(Path(simulation.delay_trace), parties) if simulation.delays == "trace" else {}


def speed_of(plan: Plan, name: str) -> float:
    """How fast a party or the server is; 1 unless the plan says otherwise."""
    return float(plan.simulation.speeds.get(name, 1.0))


def build_delay(setup: Setup, party: str) -> StepDelay:
    """How long a party's steps take."""
    plan, parties = setup.plan, setup.data.parties
    index = parties.index(party)
    return StepDelay(
        plan.simulation.delays,
        party=index,
        parties=len(parties),
        speed=speed_of(plan, party),
        generator=numpy_generator(plan.seed, "delays", index),
        trace=_traces(plan, parties).get(party, ()),
    )


def _mean_steps(plan: Plan, parties: tuple[str, ...]) -> dict[str, float]:
    """The mean duration of each party's steps."""
    traces = _traces(plan, parties)
    means = {}
    for rank, party in enumerate(parties, start=1):
        mean = {"poisson": rank / len(parties), "exponential": float(rank)}.get(plan.simulation.delays, 1.0)
        means[party] = float(np.mean(traces.get(party, (mean,)))) / speed_of(plan, party)
    return means


def step_shares(plan: Plan, parties: tuple[str, ...]) -> dict[str, float]:
    """Each party's expected share of all steps, from the mean duration of its steps."""
    way = 2 * plan.simulation.latency
    rates = {party: 1.0 / max(mean + way, 1e-9) for party, mean in _mean_steps(plan, parties).items()}
    slack = 1.25 if plan.simulation.delays in ("poisson", "exponential") else 1.0
    return {party: min(1.0, slack * rate / sum(rates.values())) for party, rate in rates.items()}


def known_steps(plan: Plan, parties: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    """The durations of each party's steps, and of the server's, as far as the plan fixes them."""
    traces = _traces(plan, parties)
    known = (1.0,) if plan.simulation.delays == "constant" else ()
    steps = {party: traces.get(party, known) for party in parties} | {SERVER: (1.0,)}
    return {name: tuple(each / speed_of(plan, name) for each in steps[name]) for name in steps}


def fastest_step(plan: Plan, parties: tuple[str, ...]) -> float:
    """The shortest duration that a step is expected to have; random ones count with half their mean."""
    if plan.simulation.delays in ("poisson", "exponential"):
        return min(_mean_steps(plan, parties).values()) / 2
    known = known_steps(plan, parties)
    return min(min((step for step in known[p] if step > 0), default=1 / speed_of(plan, p)) for p in parties)


# -- optimisers ---------------------------------------------------------------------------------------------


class PlainSGD(torch.optim.SGD):
    """Torch's SGD: the same updates bit for bit, without hooks.

    The blocks of vertical models are small: what torch wraps around each call (a profiler's record, hooks,
    the choice of an implementation) takes several times as long as the update itself. The first wrapped call
    would also load torch's compiler, which takes a second of every process, so these are taken unwrapped.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    before_step: Callable[[torch.optim.Optimizer], None] | None = None
    """Sets the rate of the step that follows."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients; they are never kept as zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step on the gradients that are there."""
        if self.before_step is not None:
            self.before_step(self)
        with torch.no_grad():
            for group in self.param_groups:
                decay, rate, momentum = group["weight_decay"], group["lr"], group["momentum"]
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is not None:
                        if decay:
                            gradient = gradient.add(parameter, alpha=decay)
                        if momentum:
                            gradient = self._remembered(parameter, gradient, momentum)
                        parameter.add_(gradient, alpha=-rate)

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps steps that do not say this

    def _remembered(self, parameter: torch.Tensor, gradient: torch.Tensor, momentum: float) -> torch.Tensor:
        memory = self.state[parameter]
        if "momentum_buffer" in memory:
            memory["momentum_buffer"].mul_(momentum).add_(gradient)
        else:
            memory["momentum_buffer"] = gradient.clone()
        kept: torch.Tensor = memory["momentum_buffer"]
        return kept


Groups = list[dict[str, Any]]


def regularised(named: Iterable[tuple[str, nn.Parameter]], plan: Plan, owner: str) -> Groups:
    """Those parameters that can learn, with the decay of each: the gradient of l2/2 * ||weights||^2.

    VAFL and FDML regularise the parties' models; biases and the server's model are left alone.
    """
    weights: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.requires_grad:
            # LSTMs call theirs bias_ih_l0 and bias_hh_l0.
            free = owner == SERVER or name.rpartition(".")[2].startswith("bias")
            (others if free else weights).append(parameter)
    groups: Groups = [{"params": weights, "weight_decay": plan.l2}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_optimiser(groups: Groups, plan: Plan, rate: float, name: str = SERVER) -> torch.optim.Optimizer:
    """The optimiser that the plan gives to `name`, for parameters as `regularised` groups them."""
    kind = plan.optimisers.get(name, plan.optimiser)
    momentum = MOMENTUM if kind == "momentum" else 0.0
    optimiser: torch.optim.Optimizer
    if kind == "adam":
        optimiser = torch.optim.Adam(groups, lr=rate)
    elif kind == "malicious":
        optimiser = torch.optim.SGD(groups, lr=rate)
        optimiser.register_step_pre_hook(enlarge_gradients)
    else:
        optimiser = PlainSGD(groups, lr=rate, momentum=momentum)
    if plan.decay != "none":
        _let_decay(optimiser, plan, rate)
    return optimiser


def _let_decay(optimiser: torch.optim.Optimizer, plan: Plan, rate: float) -> None:
    for group in optimiser.param_groups:
        group["steps"], group["first_rate"] = 0, rate

    def decay(optimiser: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimiser.param_groups:
            group["steps"] += 1
            group["lr"] = group["first_rate"] * decayed(plan, group["steps"])

    if isinstance(optimiser, PlainSGD):
        optimiser.before_step = decay
    else:
        optimiser.register_step_pre_hook(decay)


def decayed(plan: Plan, step: int) -> float:
    """The factor of the learning rate at the given step, counted from 1."""
    match plan.decay:
        case "sqrt":
            return 1 / math.sqrt(step)
        case "inverse":
            return plan.decay_steps / (step - 1 + plan.decay_steps)
        case "step":
            return float(0.5 ** ((step - 1) // plan.decay_steps))
    return 1.0


def enlarge_gradients(optimiser: torch.optim.Optimizer, *_: Any) -> None:
    """What an active attacker does to its own updates, so that the common model leans on its encoder.

    Each gradient is scaled by 1 + g_t / g_(t-1), within 1 and 5: steady steps grow. The idea is
    that of Fu et al., Label Inference Attacks Against Vertical Federated Learning, USENIX Security 2022; the
    constants are this implementation's own.
    """
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            slots, gradient = optimiser.state[parameter], parameter.grad
            if gradient is None:
                continue
            if "previous" in slots:
                ratio = 1 + gradient / (slots["previous"] + 1e-7)
                gradient.mul_(ratio.clamp(1.0, 5.0))
            slots["previous"] = gradient.detach().clone()


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimiser remembers: its slots, and how many steps have decayed its rate."""
    slots = {str(index): dict(slots) for index, slots in optimiser.state_dict()["state"].items()}
    return {"slots": slots, "steps": optimiser.param_groups[0].get("steps", 0)}


def load_optimiser_state(optimiser: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Reverses `optimiser_state`."""
    full = optimiser.state_dict()
    full["state"] = {int(index): slots for index, slots in state["slots"].items()}
    optimiser.load_state_dict(full)
    for group in optimiser.param_groups:
        if "steps" in group:
            group["steps"] = int(state["steps"])
