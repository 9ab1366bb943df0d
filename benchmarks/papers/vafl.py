"""VAFL, Figures 2 to 8: accuracy and loss against time of asynchronous, t-synchronous, synchronous training.

python -m benchmarks.papers.vafl --data-folder DATA
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.papers.common import (
    Points,
    Section,
    arguments,
    plot,
    sample,
    sectioned,
    sections,
    table,
    write,
)
from benchmarks.papers.vafl_smoothing import smoothing
from securevfl import Plan, VerticalData, train

METHODS = {"async": "vafl", "t-sync": "vafl-tsync", "sync": "vafl-sync"}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of a figure."""

    title: str
    data: VerticalData
    metric: str
    epochs: int
    noise: float
    plan: dict[str, Any]
    hidden: tuple[float, ...] = ()  # c_l of eq. (11b), for the private curves
    seeds: int = 3


class Wins:
    """How often asynchronous and t-synchronous runs reach the target before the synchronous one."""

    def __init__(self) -> None:
        self.hits: dict[bool, dict[str, list[float | None]]] = {False: {}, True: {}}

    def add(self, label: str, private: bool, hits: list[float | None]) -> None:
        """The times of a method's runs; None where the target was not reached."""
        self.hits[private].setdefault(label, []).extend(hits)

    def said(self) -> str:
        """In words."""
        parts = []
        for private, found in self.hits.items():
            first = [math.inf if hit is None else hit for hit in found["sync"]]
            counts = [
                sum(
                    (math.inf if hit is None else hit) < other for hit, other in zip(hits, first, strict=True)
                )
                for label, hits in found.items()
                if label != "sync"
            ]
            words = "with noise" if private else "without noise"
            parts.append(f"{words} in {counts[0]} and {counts[1]} of {len(first)} pairs of runs")
        return (
            "The paper's claim: asynchronous and t-synchronous training need less time than synchronous "
            f"training. Here they reach the target first {'; '.join(parts)}."
        )


def curves_of(panel: Panel, points: Points, quick: bool, won: Wins) -> tuple[dict[str, Any], list[list[str]]]:
    """All curves of a panel, of its first seed, and a table row for each."""
    curves: dict[str, Any] = {}
    rows = []
    seeds = range(1 if quick else panel.seeds)
    levels = [central(panel, points, seed) for seed in seeds]
    for noise, (label, method) in itertools.product((0.0, panel.noise), METHODS.items()):
        name = f"{label}, private" if noise else label
        runs = [curve(panel, points, method, noise, seed) for seed in seeds]
        curves[name] = runs[0]["times"], runs[0]["values"]
        hits = [
            next((x for x, y in zip(each["times"], each["values"], strict=True) if y >= 0.95 * level), None)
            for each, level in zip(runs, levels, strict=True)
        ]
        won.add(label, bool(noise), hits)
        final = spread([each["values"][-1] for each in runs], 3)
        reached = ", ".join("not reached" if hit is None else f"{hit:.0f}" for hit in hits)
        worth = "infinite" if runs[0]["epsilon"] is None else f"{runs[0]['epsilon']:.2g}"
        rows.append([panel.title, name, final, reached, worth])
    end = max(xs[-1] for xs, _ in curves.values())
    curves["centralised"] = ((0.0, end), (levels[0], levels[0]))
    rows.append([panel.title, "centralised", spread(levels, 3), "", ""])
    return curves, rows


def spread(values: list[float], digits: int) -> str:
    """The mean, and the smallest and largest where there are several."""
    middle = f"{sum(values) / len(values):.{digits}f}"
    return middle if len(values) < 2 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def curve(panel: Panel, points: Points, method: str, noise: float, seed: int) -> dict[str, Any]:
    """Accuracy against time of one run, and what its noise is worth."""
    plan = {"algorithm": method, "epochs": panel.epochs, "evaluate_every": 1, "sigma": noise, "clip": 10.0}
    plan |= {"hidden_noise": list(panel.hidden) if noise else [], "unprotected": not noise, "seed": seed}
    plan |= panel.plan

    def run() -> dict[str, Any]:
        done = train(panel.data, Plan.from_flat(plan))
        times = [float(line["time"]) for line in done.metrics]
        values = [float(line["test"][panel.metric]) for line in done.metrics]
        epsilon = done.privacy[panel.data.parties[0]]["epsilon"]
        losses = [float(line["loss"]) for line in done.metrics]
        return {"times": times, "values": values, "epsilon": epsilon, "losses": losses}

    found: dict[str, Any] = points.get({"panel": panel.title, "rows": panel.data.n_train, **plan}, run)
    return found


def losses_of(panel: Panel, points: Points) -> tuple[dict[str, Any], list[list[str]]]:
    """The training loss against time of the same runs, of the first seed, and a table row for each."""
    curves, rows = {}, []
    for noise, (label, method) in itertools.product((0.0, panel.noise), METHODS.items()):
        name = f"{label}, private" if noise else label
        run = curve(panel, points, method, noise, 0)
        curves[name] = run["times"], run["losses"]
        rows.append([name, f"{run['losses'][0]:.3f}", f"{run['losses'][-1]:.3f}", f"{run['times'][-1]:.0f}"])
    return curves, rows


def central(panel: Panel, points: Points, seed: int) -> float:
    """What the same model reaches with all features in one place, by the same steps."""
    plan = {name: value for name, value in panel.plan.items() if name not in ("delays", "label_holder")}
    plan |= {"algorithm": "central", "epochs": panel.epochs, "seed": seed}

    def run() -> float:
        return float(train(panel.data, Plan.from_flat(plan)).test[panel.metric] or 0)

    return float(points.get({"panel": panel.title, "rows": panel.data.n_train, **plan}, run))


def printed_rate(panel: Panel, points: Points) -> str:
    """What the paper's own rate comes to, as the mean over a batch has it and as the sum."""
    found = {}
    for words, rate in (("mean", 1e-4), ("sum", 1e-4 * panel.plan["batch"])):
        slow = replace(panel, plan=panel.plan | {"learning_rate": rate})
        found[words] = curve(slow, points, "vafl", 0.0, 0)["values"][-1], central(slow, points, 0)
    return PRINTED.format(
        title=panel.title, passes=panel.epochs, **{k: f"{v[0]:.3f} ({v[1]:.3f})" for k, v in found.items()}
    )


def panels(folder: Path, quick: bool) -> dict[str, list[Panel]]:
    """The panels of each figure."""
    rows, passes = (600, 2) if quick else (6000, 6)
    linear = {"model": "linear", "learning_rate": 0.02, "l2": 1e-3, "batch": rows // 100, "delays": "poisson"}
    linear |= {"fusion": "sum", "head": "sum", "label_holder": "server"}
    second = [
        Panel(
            title=title,
            data=sample(VerticalData.load(name, folder=folder / at, parties=7), rows, 1000),
            metric="accuracy",
            epochs=passes,
            noise=0.1,
            plan=linear,
        )
        for title, name, at in (
            ("MNIST", "mnist", "mnist"),
            ("Fashion-MNIST", "fashion-mnist", "fashion_mnist"),
        )
    ]
    disease = VerticalData.load("parkinson", folder=folder / "parkinson_speech", parties=3)
    second.append(
        Panel(
            title="Parkinson",
            data=disease,
            metric="accuracy",
            epochs=3 * passes,
            noise=1.0,
            plan=linear | {"learning_rate": 0.01, "batch": 4},
        )
    )
    bands = VerticalData.load("mnist", folder=folder / "mnist", parties=4).images()
    deep = {"delays": "exponential", "label_holder": "server", "l2": 0.0, "batch": 32, "optimiser": "adam"}
    third = Panel(
        title="CNN, MNIST in 4 bands",
        seeds=1,
        data=sample(bands, rows // 4, 1000),
        metric="accuracy",
        epochs=2 * passes,
        noise=1.0,
        hidden=(0.1 / math.sqrt(3), 0.1 / math.sqrt(3)),  # U(-0.1, 0.1) in the first two convolutions
        plan=deep | {"model": "cnn", "embedding": 16, "head": "mlp", "learning_rate": 0.003},
    )
    fourth = Panel(
        title="LSTM, digits in 4 bands",
        seeds=1,
        data=VerticalData.load("digits", parties=4),
        metric="accuracy",
        epochs=2 * passes,
        noise=0.01,
        hidden=(0.01, 0.01),  # N(0, 10^-4) at the output of each layer
        plan=deep | {"model": "lstm", "embedding": 16, "steps": 8, "head": "linear", "learning_rate": 0.01},
    )
    return {"Figure 2": second, "Figure 3": [third], "Figure 4": [fourth]}


def main() -> None:
    """Runs everything and writes the report."""
    chosen = arguments(__doc__ or "", "vafl", resumable=True)
    points = Points.of("vafl", chosen)

    def figure(number: int, group: list[Panel]) -> list[str]:
        drawn, rows, won = {}, [], Wins()
        for panel in group:
            drawn[panel.title], more = curves_of(panel, points, chosen.quick, won)
            rows += more
        head = ("", "method", f"final {group[0].metric}", "time to target", "epsilon at delta 1e-5")
        rate = [printed_rate(group[0], points)] if number == 2 else []
        plot(chosen.out / f"vafl-{number}.png", drawn, x="time units", y=f"test {group[0].metric}")
        return [table(head, rows), f"![Figure {number}](vafl-{number}.png)", won.said(), *rate]

    def losses(number: int, panel: Panel) -> list[str]:
        curves, rows = losses_of(panel, points)
        plot(chosen.out / f"vafl-{number}.png", {panel.title: curves}, x="time units", y="training loss")
        head = ("method", "loss of the first pass", "of the last", "time units")
        return [LOSSES.format(title=panel.title), table(head, rows), f"![Figure {number}](vafl-{number}.png)"]

    groups = panels(chosen.data_folder, chosen.quick)
    made: dict[str, Section] = {
        name: functools.partial(figure, int(name[-1]), group) for name, group in groups.items()
    }
    made["Figure 5: training loss, CNN"] = lambda: losses(5, groups["Figure 3"][0])
    made["Figure 7: training loss, LSTM"] = lambda: losses(7, groups["Figure 4"][0])
    made["Does hidden noise help?"] = lambda: smoothing(points, chosen.quick)
    page = chosen.out / "vafl.md"
    write(
        page,
        ["# VAFL", sectioned("vafl", chosen.quick), TIME, *sections(page, points, made, chosen.only), NOTES],
    )


TIME = """Time is virtual: the paper's random delays (Poisson for Figure 2, exponential for 3 and 4) in its
units. The target is 95 % of the centralised figure of the same seed. Figure 2 has means of three seeds, with
the smallest and the largest, and all three times; 3 and 4 have one seed."""
PRINTED = """The paper's step size for {title} is 0.0001, without saying whether the loss is a mean over the
batch or a sum. After {passes} passes asynchronous training with it has accuracy {mean} with the mean (in
brackets: centralised) and {sum} with the sum; the table has 0.02 for the mean."""


LOSSES = """{title}: the loss of the training records as they were met in a pass, of the runs above. Private
curves have noise in it."""

NOTES = """## Differences
- The paper's curves are only plotted, so there are no figures to print beside ours.
- Times are those of the first evaluation at the target. Parkinson has 50 test records, so that its accuracy
  moves in steps of 0.02 and swings: its times say little. Noise is drawn afresh in every
  run and never from the seed: curves without noise come out the same again, private ones do not.
- The asynchronous server steps on every upload, several times as often per pass as the others.
- CNN and LSTM train with Adam for 12 passes (rates 0.003 and 0.01), the same for all methods; the paper has
  0.001 for the parties' CNNs and a part of it for the server. The rates were set beforehand and not tuned.
- The synchronous curve is `vafl-sync`.
- Samples of 6,000 rows (MNIST, Fashion-MNIST) and 1,500 rows (CNN) keep this to minutes; CIFAR-10,
  ModelNet40 and MIMIC-III are not at hand. MNIST in bands of 7 pixel rows stands in for views of an
  object, and the columns of 8 x 8 digits, read one after the other, for a clinical sequence. The CNN has
  2 convolutions, the paper's 7; the noise of its other layers is left out with them.
- Private curves have the paper's noise (std 0.1 for Figure 2, 1 for Parkinson and the CNN, 0.01 for the
  LSTM), here after clipping to 10, and test predictions are noisy too; those of Figures 3 and 4 have the
  noise of G.3.1 and G.3.2 in the hidden layers as well (field `hidden_noise`, eq. 10 and 11): U(-0.1, 0.1) in
  both convolutions, N(0, 0.0001) behind both LSTM layers. The last column says what the noise is worth when
  every release counts (mode `strict`). The paper's Theorem 6 claims far more than is true."""


if __name__ == "__main__":
    main()
