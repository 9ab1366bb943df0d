"""Does `securevfl suggest` tell the truth? Its forecast intervals beside what runs then reach.

Embedded sets, and, where SECUREVFL_DATA names the folder with one folder per set, four others. Nothing of the
forecast was chosen on any of them. Arguments: names of sets, --epsilons, --runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scorecards import described
from securevfl import Plan, train
from securevfl.settings.families import DataSource
from securevfl.settings.source import load_planned
from securevfl.sweeps.suggest import Suggestion, suggest

EMBEDDED = {
    "breast-cancer": 3,
    "wine": 2,
    "digits": 2,
    "credit": 0,
    "synthetic:rows=3000,features=12,informative=8": 3,
}
OTHERS = ("uci_credit", "adult", "magic", "bank_marketing")


@contextlib.contextmanager
def source_of(name: str) -> Iterator[DataSource]:
    """Where a set is; the four others are written as files with a description that gives no bounds."""
    if name in EMBEDDED:
        yield DataSource(data=name, parties=EMBEDDED[name])
        return
    with tempfile.TemporaryDirectory() as folder:
        yield DataSource(data=str(described(name, 0, 2, Path(folder))))


def compare(name: str, epsilon: float, runs: int) -> tuple[Suggestion, list[float]]:
    """A forecast, and the same metric of whole runs of what was proposed."""
    with source_of(name) as source:
        found = suggest(Plan(source=source, epsilon=epsilon))
        if found.fields is None:
            return found, []
        plan = Plan.from_flat({**found.fields, "parties": 0})
        data = load_planned(Plan(source=source))
        reached = [train(data, plan).test[found.metric] for _ in range(runs)]
    return found, [float(value or 0.0) for value in reached]


def main() -> None:
    others = OTHERS if "SECUREVFL_DATA" in os.environ else ()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*EMBEDDED, *others])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    inside = count = right = 0
    print("set, epsilon: metric, forecast (interval), runs; alone; worth it", flush=True)
    for name, epsilon in itertools.product(options.names, options.epsilons):
        found, reached = compare(name, epsilon, options.runs)
        if not reached or found.expected is None or found.low is None or found.high is None:
            print(f"{name}, {epsilon:g}: nothing fits: {found.reasons[0]}", flush=True)
            continue
        inside += sum(found.low <= value <= found.high for value in reached)
        best = found.best_alone
        right += sum(best is None or (value > best) == found.worth_it for value in reached)
        count += len(reached)
        shown = ", ".join(f"{value:.4f}" for value in reached)
        forecast = f"{found.metric} {found.expected:.4f} ({found.low:.4f} to {found.high:.4f})"
        print(
            f"{name}, {epsilon:g}: {forecast}, runs {shown}; "
            f"alone {best if best is None else round(best, 4)}; {found.worth_it}",
            flush=True,
        )
    print(f"{inside} of {count} runs inside their interval; advice right for {right} of {count}", flush=True)


if __name__ == "__main__":
    main()
