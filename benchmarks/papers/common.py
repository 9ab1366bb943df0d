"""What the reproductions share: arguments, small samples of large sets, tables, plots."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from securevfl import VerticalData

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def arguments(description: str, name: str, *, resumable: bool = False) -> argparse.Namespace:
    """The arguments of every reproduction."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-folder", type=Path, required=True, help="folder with one folder per data set")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), help=f"where {name}.md and plots go"
    )
    parser.add_argument("--quick", action="store_true", help="small samples and few passes, to try it out")
    if resumable:
        parser.add_argument("--raw", type=Path, help="keep what is measured here; a run goes on from there")
        parser.add_argument("--only", nargs="*", default=[], help="parts to make; all by default")
        parser.add_argument("--seconds", type=float, help="stop after so many seconds, to go on later")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen


def command(name: str, quick: bool) -> str:
    """The line of a report that says how to make it again."""
    return f"Made with `python -m benchmarks.papers.{name} --data-folder DATA{' --quick' if quick else ''}`."


def say(text: str) -> None:
    """Progress, to standard error."""
    print(text, file=sys.stderr, flush=True)


def sample(data: VerticalData, rows: int, test_rows: int) -> VerticalData:
    """A fixed random sample of a set's training and test part."""
    generator = np.random.default_rng(0)
    train = generator.permutation(data.n_train)[:rows]
    test = generator.permutation(data.n_test)[:test_rows]
    return VerticalData.from_arrays(
        dict(zip(data.parties, [block[train] for block in data.train], strict=True)),
        data.y_train[train],
        test=([block[test] for block in data.test], data.y_test[test]),
        name=data.name,
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def plot(path: Path, panels: Mapping[str, Curves], *, x: str, y: str, scale: str = "linear") -> None:
    """One panel of curves per title, side by side; a curve's label decides its dashes (`private`)."""
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False, layout="constrained"
    )
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for label, (xs, ys) in curves.items():
            dots = "." if len(xs) <= 60 else None  # more would hide the curves
            axis.plot(xs, ys, "--" if "private" in label else "-", marker=dots, linewidth=1.2, label=label)
        axis.set(title=title, xlabel=x, ylabel=y, yscale=scale)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    say(f"wrote {path}")


def write(path: Path, parts: Sequence[str]) -> None:
    """Writes the report."""
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    say(f"wrote {path}")


class Known:
    """What has been measured, in a file where there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """The value of a key, measured if it is not known."""
        if key not in self.found:
            self.found[key] = make()
            if self.path is not None:
                self.path.write_text(json.dumps(self.found), encoding="utf-8")
        return self.found[key]
