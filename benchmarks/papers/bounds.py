"""Gradient norms of real runs beside what VAFL's Theorems 1 and 7 and Flex-VFL's Theorem 1 promise.

python -m benchmarks.papers.bounds writes docs/results/bounds.md
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks.papers.common import Points, plot, sections, table, write
from securevfl import Plan, VerticalData
from securevfl.algorithms.constants import curvature
from securevfl.algorithms.resolve import resolve
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.virtual import VirtualCarrier
from securevfl.theory import flex, vafl

SEEDS, EPOCHS = 3, 20
COMMON: dict[str, Any] = {"model": "linear", "fusion": "sum", "head": "sum", "scaling": "standard"}
COMMON |= {"l2": 1e-3, "batch": 50, "decay": "none", "sampling": "draws", "unprotected": True}
COMMON |= {"label_holder": "server", "delays": "exponential"}
PARTIES, STEPS = 3, 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One theorem, and a run that keeps to its conditions."""

    theorem: str
    algorithm: str
    fields: dict[str, Any]
    delay: int = 0
    together: int = 1


CASES = (
    Case(theorem="VAFL, Theorem 1", algorithm="vafl", fields={"delay_bound": 2}, delay=2),
    Case(theorem="VAFL, Theorem 1", algorithm="vafl", fields={"delay_bound": 10}, delay=10),
    Case(
        theorem="VAFL, Theorem 7",
        algorithm="vafl-tsync",
        fields={"delay_bound": 10, "wait_for": 2},
        delay=10,
        together=2,
    ),
    Case(
        theorem="Flex-VFL, Theorem 1",
        algorithm="flex",
        fields={"timeout": float(STEPS), "delays": "constant"},
    ),
)


class Objective:
    """The regularised logistic loss of a sum of linear models, some of which have a bias."""

    def __init__(self, plan: Plan, data: VerticalData, biased: list[bool]) -> None:
        rows = [np.asarray(block, np.float64) for block in data.train]
        self.blocks = [
            np.hstack([block, np.ones((len(block), int(bias)))])
            for block, bias in zip(rows, biased, strict=True)
        ]
        self.signs = np.where(np.asarray(data.y_train) == 1, 1.0, -1.0)
        self.l2, self.batch = plan.l2, plan.batch
        widths = np.cumsum([block.shape[1] for block in self.blocks])
        self.cuts = widths[:-1]
        self.pulled = np.ones(widths[-1])
        self.pulled[(widths - 1)[biased]] = 0.0  # biases are not regularised

    def value(self, weights: Any) -> tuple[float, Any]:
        """F and its gradient at all weights in one vector."""
        own = self.pulled * weights
        margins = self.signs * (np.hstack(self.blocks) @ weights)
        slope = -self.signs / (1 + np.exp(margins)) / len(margins)
        loss = float(np.logaddexp(0, -margins).mean() + self.l2 / 2 * own @ own)
        return loss, np.hstack(self.blocks).T @ slope + self.l2 * own

    def variances(self, weights: Any) -> list[float]:
        """sigma_m^2 of every party's gradient of a batch; drawn without return it is a little less."""
        slope = -self.signs / (1 + np.exp(self.signs * (np.hstack(self.blocks) @ weights)))
        each = [slope[:, None] * block for block in self.blocks]
        return [float(np.square(g - g.mean(0)).sum(1).mean() / self.batch) for g in each]

    def lowest(self) -> float:
        """F*."""
        found = minimize(self.value, np.zeros(len(self.pulled)), jac=True, method="L-BFGS-B", tol=1e-12)
        return float(found.fun)


def observed(plan: Plan, data: VerticalData) -> dict[str, Any]:
    """Squared gradient norms at every report of the server, block by block, and the largest variances."""
    completed, scaled = resolve(plan, data)
    norms: list[list[float]] = []
    largest = np.zeros(len(data.parties))
    values: list[float] = []

    def look(_: Any) -> None:
        parameters = [each for layer in layers for each in (layer.weight, layer.bias) if each is not None]
        weights = np.concatenate([each.detach().numpy().ravel() for each in parameters]).astype(np.float64)
        value, gradient = objective.value(weights)
        values.append(value)
        norms.append([float(each @ each) for each in np.split(gradient, objective.cuts)])
        np.maximum(largest, objective.variances(weights), out=largest)

    carrier = VirtualCarrier(completed, scaled, progress=look)
    layers = [role.model.encoder.output for role in carrier.roles[1:]]  # type: ignore[attr-defined]
    objective = Objective(completed, scaled, [layer.bias is not None for layer in layers])
    look(None)
    drive(Schedule(carrier).train())
    gap = values[0] - objective.lowest()
    return {"norms": norms, "variances": largest.tolist(), "gap": gap}


def upload_shares(parties: int, together: int) -> list[float]:
    """q_m: how likely each party is among the next t uploads, with exponential delays of mean m.

    Such delays have no memory, so that who uploads is independent of who did, as Assumptions 3 and 6 ask.
    """
    speeds = [1 / m for m in range(1, parties + 1)]
    shares = [0.0] * parties
    for order in permutations(range(parties), together):
        chance, left = 1.0, sum(speeds)
        for party in order:
            chance, left = chance * speeds[party] / left, left - speeds[party]
        for party in order:
            shares[party] += chance
    return shares


def measured(points: Points, case: Case, data: VerticalData, seed: int, epochs: int) -> dict[str, Any]:
    """A run at the largest rate that the theorem admits, and the theorem's bound for it."""
    plan = {**COMMON, "algorithm": case.algorithm, "epochs": epochs, "seed": seed, **case.fields}
    completed, scaled = resolve(Plan.from_flat(plan), data)
    found = curvature(completed, scaled)
    if case.algorithm == "flex":
        rate = min(
            flex.rate_limit(smoothness=found.whole, block_smoothness=each, weights=(1.0,) * STEPS)
            for each in found.blocks.values()
        )
    else:
        few = vafl.Constants(smoothness=found.whole, shares=(1.0,), variances=(0.0,), gap=0.0)
        rate = vafl.bounded_delay(few, delay=case.delay, iterations=1).limit / case.together
    plan["learning_rate"] = rate
    run = points.get({"bounds": case.theorem, **plan}, lambda: observed(Plan.from_flat(plan), data))
    count = len(run["norms"]) - 1
    norms = np.array(run["norms"][:-1])  # where every iteration begins
    if case.algorithm == "flex":
        blocks = [flex.Block(rate=rate, weights=(1.0,) * STEPS, variance=each) for each in run["variances"]]
        bound = flex.bound([blocks] * count, smoothness=found.whole, gap=run["gap"])
        seen = norms.mean(axis=1)  # the theorem's mean over blocks of equal weight
    else:
        known = vafl.Constants(
            smoothness=found.whole,
            shares=upload_shares(PARTIES, case.together),
            variances=run["variances"],
            gap=run["gap"],
            together=case.together,
        )
        at = rate * case.together
        bound = vafl.bounded_delay(known, delay=case.delay, iterations=count, rate=at).bound
        seen = norms.sum(axis=1)
    mean = np.cumsum(seen) / np.arange(1, count + 1)
    return {"rate": rate, "iterations": count, "mean": mean, "bound": bound}


def page(points: Points, out: Path, epochs: int, seeds: int) -> list[str]:
    """The table and the picture."""
    data = VerticalData.load("breast-cancer", parties=PARTIES)
    rows, panels = [], {}
    for case in CASES:
        runs = [measured(points, case, data, seed, epochs) for seed in range(seeds)]
        first, ends = runs[0], [float(run["mean"][-1]) for run in runs]
        worst = max(end / run["bound"] for end, run in zip(ends, runs, strict=True))
        label = f"D = {case.delay}" if case.delay else f"{STEPS} local steps"
        label += f", t = {case.together}" if case.together > 1 else ""
        bound = min(run["bound"] for run in runs)
        figures = [f"{np.mean(ends):.3g}", f"{bound:.3g}", f"{worst:.2g}"]
        rows.append([case.theorem, label, f"{first['rate']:.2g}", first["iterations"], *figures])
        xs = list(range(1, first["iterations"] + 1))
        curves = {f"seed {seed}": (xs, run["mean"].tolist()) for seed, run in enumerate(runs)}
        curves["bound for all iterations"] = ([1, xs[-1]], [first["bound"]] * 2)
        panels[f"{case.theorem}, {label}"] = curves
    plot(out / "bounds.png", panels, x="iterations", y="mean squared gradient norm", scale="log")
    head = ("theorem", "", "rate", "iterations", "observed", "bound", "largest share of it")
    picture = "![Running means of squared gradient norms below their bounds](bounds.png)"
    return [SETTING, table(head, rows), picture, NOTES]


def main() -> None:
    """Runs everything and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="where bounds.md goes")
    out = parser.parse_args().out
    points = Points("bounds")
    made = {"Gradient norms": lambda: page(points, out, EPOCHS, SEEDS)}
    head = ["# Runs beside their theorems", "Made with `python -m benchmarks.papers.bounds`."]
    write(out / "bounds.md", [*head, *sections(out / "bounds.md", points, made)])


SETTING = f"""Breast-cancer, {PARTIES} parties, a sum of linear models, l2 = 0.001, batches of 50 drawn at
random, exponential delays (Flex-VFL: none, {STEPS} local steps a round), at the largest rate that the theorem
admits, {EPOCHS} passes, {SEEDS} seeds. *Observed* is the mean over iterations of the squared norm of the
objective's gradient (Flex-VFL: of a block's), computed from everybody's rows whenever the server has made a
step; *bound* is the theorem's for so many iterations (the smallest over seeds), with L from the rows, the
distance to the optimum of the first loss, the largest variance that was seen on the way, and the chances with
which parties upload: delays of mean m without latency have no memory, so that Assumptions 3 and 6 hold."""
NOTES = """Theorems are about the worst case: rates are small, and after so few iterations every bound is
above even the gradient at the start."""


if __name__ == "__main__":
    main()
