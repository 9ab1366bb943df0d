"""Default rates: chosen on three sets by held-out training records, then compared with tuned ones on a9a.

Choosing looks at no test part, and neither at a9a nor at Adult, of which a9a is a form. Synchronous
algorithms take the steps of their model trained in one place, so that is what choosing trains for them: a
sum of linear models (FDML, AFSGD-VP) and linear embeddings under a linear head (VAFL, P-BCD). Flex-VFL's
local steps have no such form: there the algorithms themselves are run. So they are on a9a, all of them.

python -m benchmarks.papers.defaults --data-folder DATA
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.common import Points, Section, arguments, sectioned, sections, table, write
from benchmarks.papers.regulariser import regulariser
from securevfl import Plan, VerticalData, train
from securevfl.errors import TrainingDiverged
from securevfl.settings.families import ALGORITHM_FAMILIES, FAMILIES

FORMS: dict[str, dict[str, Any]] = {
    "sum": {"algorithm": "central", "fusion": "sum", "head": "sum", "embedding": 1},
    "head": {"algorithm": "central", "fusion": "concat", "head": "linear", "embedding": 1},
    "flex": {"algorithm": "flex"},
    "flex-adaptive": {"algorithm": "flex-adaptive"},
}
FORM_OF = {"fdml": "sum", "afsgd": "sum", "vafl": "head"}
STEPWISE = (*(name for family in FORM_OF for name in FAMILIES[family].algorithms), "p-bcd")
ROUNDS = tuple(name for name in FAMILIES["flex"].algorithms if name != "p-bcd")
STEPS = ("0.1 none", "0.3 none", "1 none", "0.3 sqrt", "1 sqrt", "3 sqrt", "0.3 inverse", "0.5 inverse")
GRIDS = dict.fromkeys(("sum", "head"), STEPS)
LOCAL = ("0.03 none", "0.1 none", "0.3 sqrt", "1 sqrt", "0.03 inverse 100", "0.1 inverse 100")
GRIDS |= dict.fromkeys(("flex", "flex-adaptive"), (*LOCAL, "0.3 inverse 100", "1 inverse 100"))
DECIDING = ("breast-cancer", "credit", "uci-credit")
STEADY = ("diabetes", "fate-motor")
"""Regressions on which a setting must not diverge."""
HELD_OUT = 0.2
EPOCHS = 10
TUNING, SEEDS = 100, (0, 1, 2)
SAME_STEPS = {"sync-min": "flex", "sync-max": "flex"}
"""What takes the very steps of another where all parties are equally fast."""
GOAL = 0.001


def load(name: str, folder: Path) -> VerticalData:
    """A set, between two parties where it does not say otherwise."""
    if name in ("breast-cancer", "credit", "diabetes"):
        return VerticalData.load(name, parties=None if name == "credit" else 2)
    if name == "fate-motor":
        return VerticalData.load(name, folder=folder / "fate_hetero")
    return VerticalData.load(name, folder=folder / name.replace("-", "_"), parties=2)


def validated(data: VerticalData) -> VerticalData:
    """Training records alone: a fifth of them, drawn once, takes the place of the test part."""
    order = np.random.default_rng(1).permutation(data.n_train)
    held, kept = np.split(order, [round(HELD_OUT * data.n_train)])
    blocks = dict(zip(data.parties, [block[kept] for block in data.train], strict=True))
    fresh = ([block[held] for block in data.train], data.y_train[held])
    return VerticalData.from_arrays(blocks, data.y_train[kept], test=fresh, name=data.name, task=data.task)


def reached(data: VerticalData, fields: dict[str, Any]) -> float | None:
    """The AUC, or r2, of one run; None where it diverges."""
    try:
        test = train(data, Plan.from_flat({"unprotected": True, **fields})).test
    except TrainingDiverged:
        return None
    found = test["r2" if data.task == "regression" else "auc"]
    return None if found is None else float(found)


def steps_of(setting: str) -> dict[str, Any]:
    """The fields of a plan that a setting names: rate, decay and perhaps its K."""
    rate, decay, *steps = setting.split()
    return {"learning_rate": float(rate), "decay": decay, **({"decay_steps": int(steps[0])} if steps else {})}


def usual(algorithm: str) -> str:
    """What an algorithm takes by itself, as the grid writes it."""
    plan = Plan(algorithm=algorithm)
    steps = f" {plan.decay_steps}" if plan.decay == "inverse" and plan.decay_steps != 1000 else ""
    return f"{plan.learning_rate:g} {plan.decay}{steps}"


class Bench:
    """Runs on prepared sets, each once."""

    def __init__(self, points: Points, folder: Path) -> None:
        self.points, self.folder = points, folder
        self.sets: dict[str, VerticalData] = {}

    def held_out(self, name: str) -> VerticalData:
        """Training records of a set, a fifth of them held out."""
        if name not in self.sets:
            self.sets[name] = validated(load(name, self.folder))
        return self.sets[name]

    def chosen_by(self, name: str, form: str, setting: str, **changes: Any) -> float | None:
        """What a setting reaches on the held-out records of a set."""
        epochs = EPOCHS if "credit" in name else 100
        fields = {**FORMS[form], **steps_of(setting), "epochs": epochs, **changes}
        what = {"held out": HELD_OUT, "set": name, **fields}
        return self.points.get(what, lambda: reached(self.held_out(name), fields))

    def tested(self, fields: dict[str, Any], seed: int) -> float | None:
        """What a plan reaches on the test part of a9a."""
        plan = {**fields, "epochs": EPOCHS, "seed": seed}

        def run() -> float | None:
            self.sets.setdefault("a9a", load("a9a", self.folder))
            return reached(self.sets["a9a"], plan)

        return self.points.get({"set": "a9a", **plan}, run)

    def by_itself(self, algorithm: str, seed: int) -> float:
        """What an algorithm reaches on a9a with its defaults, which are named."""
        return self.tested({"algorithm": algorithm, **steps_of(usual(algorithm))}, seed) or 0.5


def choice_table(bench: Bench, forms: Iterable[str]) -> str:
    """For every form and setting: what it loses on the sets that decide, and whether it diverges."""
    rows = []
    for form in forms:
        grid = GRIDS[form]
        found = {(name, each): bench.chosen_by(name, form, each) for name in DECIDING for each in grid}
        best = {name: max(found[name, each] or 0.5 for each in grid) for name in DECIDING}
        for setting in grid:
            values = [found[name, setting] for name in DECIDING]
            gaps = [best[name] - (value or 0.5) for name, value in zip(DECIDING, values, strict=True)]
            cells = ["diverges" if value is None else f"{value:.4f}" for value in values]
            lost = f"{np.mean(gaps):.4f}"
            default = setting == usual({"sum": "fdml", "head": "vafl"}.get(form, form))
            fled = wild(bench, form, setting, late=default and "flex" in form)
            shown = (f"**{setting}**", f"**{lost}**") if default else (setting, lost)
            rows.append([form, shown[0], *cells, shown[1], fled])
    return table(("model", "rate, decay", *DECIDING, "lost", "diverges on"), rows)


def wild(bench: Bench, form: str, setting: str, *, late: bool) -> str:
    """The regressions on which a setting diverges, also with exponential delays where `late`."""
    found = []
    for name in STEADY:
        if bench.chosen_by(name, form, setting) is None:
            found.append(name)
        elif late and bench.chosen_by(name, form, setting, delays="exponential") is None:
            found.append(f"{name} with exponential delays")
    return ", ".join(found) or "nowhere"


def a9a_table(bench: Bench, algorithms: Iterable[str]) -> tuple[str, list[str]]:
    """Defaults on a9a against the best of a grid, chosen on a seed of its own, and who misses the goal.

    The grid is an algorithm's own where it has local steps, and that of its model in one place elsewhere.
    """
    rows, missed = [], []
    for algorithm in algorithms:
        steps = SAME_STEPS.get(algorithm, algorithm)
        form = steps if algorithm in ROUNDS else FORM_OF.get(ALGORITHM_FAMILIES[algorithm].name, "head")
        tried = {each: bench.tested(FORMS[form] | steps_of(each), TUNING) or 0.5 for each in GRIDS[form]}
        best = max(tried, key=lambda each: tried[each])
        tuned = np.array([bench.tested(FORMS[form] | steps_of(best), seed) or 0.5 for seed in SEEDS])
        mine = np.array([bench.by_itself(steps, seed) for seed in SEEDS])
        if steps != algorithm and bench.by_itself(algorithm, 0) != mine[0]:
            raise ArithmeticError(f"{algorithm} does not take the steps of {steps}")
        missed += [algorithm] if np.mean(tuned - mine) > GOAL else []
        each = ", ".join(f"{value:+.4f}" for value in tuned - mine)
        rows.append([algorithm, usual(algorithm), f"{mine.mean():.4f}", best, f"{tuned.mean():.4f}", each])
    return table(("", "default", "its AUC", "tuned", "its AUC", "lost, seed by seed"), rows), missed


def main() -> None:
    """Measures what is not known yet, and writes the report."""
    chosen = arguments(__doc__ or "", "defaults", resumable=True)
    points = Points.of("defaults", chosen)
    bench = Bench(points, chosen.data_folder)

    def on_a9a() -> list[str]:
        stepwise, missed = a9a_table(bench, STEPWISE)
        rounds, also = a9a_table(bench, ROUNDS)
        missed += also
        verdict = f"Missed by {', '.join(missed)}." if missed else "All keep to it."
        return [f"{COMPARISON} {verdict}", stepwise, OWN, rounds]

    def choice() -> list[str]:
        local = choice_table(bench, ("flex", "flex-adaptive"))
        return [CHOICE, choice_table(bench, ("sum", "head")), LOCAL_STEPS, local, NOTES]

    made: dict[str, Section] = {
        "How they were chosen": choice,
        "On a9a": on_a9a,
        "Regulariser": lambda: regulariser(points, chosen.data_folder),
    }
    page = chosen.out / "defaults.md"
    write(page, ["# Default rates", sectioned("defaults", False), *sections(page, points, made, chosen.only)])


CHOICE = """On breast-cancer, credit and uci-credit: a fifth of the training records is held out, and the AUC
there decides, one seed, after ten epochs (breast-cancer: a hundred, which its plans take by themselves). No
test part was looked at, and neither a9a nor Adult, of which a9a is a form. Synchronous algorithms take the
steps of their model trained in one place, so that is what was trained: a *sum* of linear models (FDML,
AFSGD-VP), and linear embeddings under a linear *head* (VAFL, P-BCD). *lost* is what a setting is below the
best of its column, on average over the three. `inverse` halves the rate after 1,000 steps, or after as many
as follow it. What diverges on a regression (a hundred epochs) was left out. Bold: the defaults."""
LOCAL_STEPS = """Flex-VFL takes several local steps in a round, which no training in one place does: `flex`
and `flex-adaptive` were run themselves, two parties of the same speed, ten local steps a round. With equal
speeds `sync-min` and `sync-max` take the very steps of `flex`. A rate decays once a round. The defaults were
also run with exponential delays on both regressions."""
COMPARISON = """Two parties, ten epochs, means of three seeds. *tuned* is the best of the first table's
settings in one place by its *test* AUC on a fourth seed, which flatters it; nobody's own grid was run, and
algorithms that are not synchronous, or draw their records, might be tuned further. The goal is to lose at
most 0.001."""
OWN = """Algorithms with rounds: the same, but *tuned* is the best of their own grid, the second table's. With
its defaults and the first seed `sync-min` and `sync-max` come to the figure of `flex`, to the last digit, so
its other figures stand for theirs."""
NOTES = """- Breast-cancer has 91 records held out: its differences up to 0.005 are chance.
- The defaults of VAFL and FDML have the form that Theorems 2 and 4 and Proposition 1 ask for; networks of 32
  units on credit, breast-cancer, diabetes, FATE's motor set and Parkinson did not diverge with VAFL's when it
  was chosen, and some did with 2 and 3 and `sqrt`. That was not made again.
- That decaying rates do better on a9a had been seen when FDML got its decay, before any default was chosen
  here; the choice is clean of its figures, not of that knowledge.
- On a9a `flex-adaptive` had lost 0.0005 with a rate of 0.1; that was known when the table above, in which a9a
  has no part, gave it 1."""


if __name__ == "__main__":
    main()
