"""The columns of Flex-VFL's Table III on data that is at hand, and their runs, each trained once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.papers.common import Points, sample
from securevfl import Plan, VerticalData, train
from securevfl.algorithms import Progress
from securevfl.errors import TrainingDiverged

METHODS = ("p-bcd", "vafl", "sync-min", "sync-max", "flex")
COMMUNICATION = (1, 10, 50)
COMMON = {"model": "mlp", "scaling": "standard", "l2": 0.0, "label_holder": "server", "evaluate_every": 1}
COMMON |= {"decay": "none"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Data, speeds and target of one column of Table III.

    Attributes:
        rate: Of all methods, one of the paper's grid.
        rates: The grid of each method's own rate.
        seeds: How many runs a figure is the mean of.
    """

    title: str
    data: VerticalData
    steps: Mapping[str, float]
    timeout: float
    target: float
    rate: float
    rates: tuple[float, ...]
    seeds: int
    most_epochs: int
    paper: Mapping[int, tuple[float | None, ...]]
    plan: Mapping[str, Any]

    @property
    def speeds(self) -> dict[str, float]:
        """Steps per time unit."""
        return {name: steps / self.timeout for name, steps in self.steps.items()}

    @property
    def rounds(self) -> int:
        """Rounds per pass."""
        return math.ceil(self.data.n_train / self.plan["batch"])

    def units(self, method: str, timeout: float | None = None) -> float:
        """Time units of local training per round; tests hold the virtual clock to these."""
        most = self.timeout if timeout is None else timeout
        slowest = 1 / min(self.speeds.values())
        steps = math.floor(most * max(self.speeds.values()) + 1e-9)
        return {"p-bcd": slowest, "sync-max": steps * slowest}.get(method, most)

    def pass_units(self, method: str, t_comm: int) -> float:
        """Time units of a pass; of VAFL's about."""
        mean = sum(1 / speed for speed in self.speeds.values()) / len(self.speeds)
        return self.rounds * ((mean if method == "vafl" else self.units(method)) + t_comm)


class Enough(Exception):
    """Ends a run whose target is reached."""


@dataclass
class Watch:
    """The accuracy after every pass, and the time of the last step before that evaluation."""

    target: float
    epoch: int = 0
    last: float = 0.0
    accuracies: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def __call__(self, progress: Progress) -> None:
        if progress.epoch > self.epoch:
            accuracy = progress.test.get("accuracy")
            if accuracy is not None:
                self.accuracies.append(float(accuracy))
                self.times.append(self.last)
                if accuracy >= self.target:
                    raise Enough
            self.epoch = progress.epoch
        self.last = progress.time


@dataclass(frozen=True)
class Took:
    """Time units to the target, or at least so many where it was not reached."""

    units: float
    reached: bool = True


class Runs:
    """Runs of the methods, by their points."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def curve(
        self, setting: Setting, method: str, rate: float, seed: int, most: int = 1_000_000, **changes: Any
    ) -> dict[str, list[float]]:
        """Accuracies and times pass by pass until the target is reached, or after so many passes."""
        plan: dict[str, Any] = {**COMMON, "timeout": setting.timeout, "speeds": setting.speeds, "seed": seed}
        plan |= {"unprotected": True, "algorithm": method, "learning_rate": rate, **setting.plan, **changes}
        if method == "vafl":
            # Local momentum starts anew at every exchange: with one step per exchange there is none. The
            # server's own lasts, as in the authors' code.
            plan |= {"optimisers": dict.fromkeys(setting.data.parties, "sgd")}
            del plan["timeout"]  # its rounds have one step
        plan["epochs"] = min(setting.most_epochs, most) + 1  # one more lets the watch see the last evaluation

        def run() -> dict[str, list[float]]:
            watch = Watch(setting.target)
            with contextlib.suppress(Enough, TrainingDiverged):
                train(setting.data, Plan.from_flat(plan), progress=watch)
            return {"accuracies": watch.accuracies, "times": watch.times}

        what = {"column": setting.title, "rows": setting.data.n_train, "target": setting.target, **plan}
        found: dict[str, list[float]] = self.points.get(what, run)
        return found

    def timed(
        self,
        setting: Setting,
        method: str,
        rate: float,
        seed: int,
        t_comm: int,
        until: float = math.inf,
        **changes: Any,
    ) -> tuple[list[float], list[float]]:
        """Time units and accuracy, pass by pass, at a communication time.

        Rounds do not depend on the time that messages take, so one run of a method with rounds serves all.
        VAFL is run for each; evaluations, its first upload and the ends of passes are left out of its time.
        """
        if until < math.inf:
            changes["most"] = max(1, math.ceil(until / setting.pass_units(method, t_comm)))
        if method == "vafl":
            found = self.curve(setting, method, rate, seed, latency=t_comm / 2, **changes)
            before = math.ceil(setting.data.n_train / 1024) + 1
            times = [time - t_comm * (before + 3 * i) for i, time in enumerate(found["times"])]
            return times, found["accuracies"]
        found = self.curve(setting, method, rate, seed, **changes)
        each = setting.rounds * (setting.units(method, changes.get("timeout")) + t_comm)
        return [each * (i + 1) for i in range(len(found["accuracies"]))], found["accuracies"]

    def took(
        self, setting: Setting, method: str, rate: float, seed: int, t_comm: int, **changes: Any
    ) -> Took:
        """Time units to the target; where it is not reached `until` then, about the time of giving up."""
        times, accuracies = self.timed(setting, method, rate, seed, t_comm, **changes)
        if accuracies and accuracies[-1] >= setting.target:
            return Took(times[-1])
        return Took(times[-1] if times else math.inf, reached=False)


def columns(folder: Path, quick: bool) -> list[Setting]:
    """Three columns, with the paper's speeds, timeouts and optimisers on data that is at hand."""
    views = VerticalData.load(
        "mfeat", folder=folder / "mfeat", parties={"p0": ["zer"], "p1": ["fou"], "p2": ["kar"]}
    )
    digits = VerticalData.load("mnist", folder=folder / "mnist", parties=4)
    fashion = VerticalData.load("fashion-mnist", folder=folder / "fashion_mnist", parties=12)
    small = 400 if quick else 800
    momentum = {"head": "linear", "optimiser": "momentum"}
    found = [
        Setting(
            title="mfeat, 3 views (MOSEI)",
            data=views,
            steps={"p0": 5, "p1": 10, "p2": 15, "server": 20},
            timeout=20.0,
            target=0.93,
            rate=0.01,
            rates=(0.003, 0.01, 0.03, 0.1, 0.3),
            seeds=5,
            most_epochs=120,
            paper=PAPER["MOSEI"],
            plan={"batch": 50, "hidden": [32], "embedding": 16, "head": "mlp"}
            | {"optimisers": {"p2": "momentum"}},
        ),
        Setting(
            title="MNIST, 4 bands (ImageNet100)",
            data=sample(digits, 2 * small, small),
            steps={"p0": 2, "p1": 4, "p2": 6, "p3": 8, "server": 10},
            timeout=10.0,
            target=0.80,
            rate=0.03,
            rates=(0.003, 0.008, 0.03, 0.08, 0.3),
            seeds=5,
            most_epochs=120,
            paper=PAPER["ImageNet100"],
            plan={"batch": 100, "hidden": [64, 32], "embedding": 16, **momentum},
        ),
        Setting(
            title="Fashion-MNIST, 12 bands (ModelNet40)",
            data=sample(fashion, small, small),
            steps={f"p{k}": (5, 10, 15, 20)[k // 3] for k in range(12)} | {"server": 20},
            timeout=20.0,
            target=0.70,
            rate=0.001,
            rates=(0.003, 0.01, 0.03, 0.1, 0.3),
            seeds=3,
            most_epochs=150,
            paper=PAPER["ModelNet40"],
            plan={"batch": 64, "hidden": [32, 16], "embedding": 8, **momentum},
        ),
    ]
    if not quick:
        return found
    return [replace(each, target=0.4, rates=each.rates[2:4], seeds=2, most_epochs=3) for each in found]


PAPER: dict[str, dict[int, tuple[float | None, ...]]] = {
    "MOSEI": {
        1: (5.22, 7.63, 13.69, 26.41, 6.85),
        10: (14.60, 29.60, 19.56, 29.34, 9.78),
        50: (56.33, 96.09, 45.64, 42.38, 22.82),
    },
    "ImageNet100": {
        1: (73.06, 89.59, 299.48, 520.05, 113.26),
        10: (182.66, None, 544.50, 611.82, 205.92),
        50: (669.74, None, 1633.50, 1019.70, 617.76),
    },
    "ModelNet40": {
        1: (44.51, 52.27, 32.34, 84.82, 25.23),
        10: (124.62, 161.02, 46.20, 94.25, 36.04),
        50: (480.66, None, 107.80, 136.14, 84.08),
    },
}
"""Thousands of time units to the target of the paper's Table III, in the order of `METHODS`."""
