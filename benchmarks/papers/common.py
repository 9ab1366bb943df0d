"""What the reproductions share: arguments, small samples of large sets, tables, plots."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy import stats

matplotlib.use("Agg")
from matplotlib import pyplot

from securevfl import VerticalData

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]


ROOT = Path(__file__).resolve().parents[2]


def arguments(description: str, name: str, *, resumable: bool = False) -> argparse.Namespace:
    """The arguments of every reproduction."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-folder", type=Path, required=True, help="folder with one folder per data set")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), help=f"where {name}.md and plots go"
    )
    parser.add_argument("--quick", action="store_true", help="small samples and few passes, to try it out")
    if resumable:
        parser.add_argument("--seconds", type=float, help="measure for so long; go on with the same command")
        parser.add_argument("--only", nargs="*", default=[], help="sections to make, by how they begin")
        parser.add_argument("--older", action="store_true", help="take points of other code, and say so")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen


def command(name: str, quick: bool) -> str:
    """The line of a report that says how to make it again."""
    return f"Made with `python -m benchmarks.papers.{name} --data-folder DATA{' --quick' if quick else ''}`."


def sectioned(name: str, quick: bool) -> str:
    """That line of a report whose sections name the commits of their figures."""
    return f"{command(name, quick)[:-1]}, as it was at the commits that its sections name."


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
    """One panel of curves per title, four in a row; a curve's label decides its dashes (`private`)."""
    across = min(len(panels), 4)
    down = math.ceil(len(panels) / across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(4.6 * across, 3.6 * down), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
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


class OutOfTime(Exception):
    """A point is not known and may not be measured any more."""


Section = Callable[[], Sequence[str]]


def sections(path: Path, points: Points, made: Mapping[str, Section], only: Sequence[str] = ()) -> list[str]:
    """The sections of a page by their titles, each with the commits of its figures.

    One that is not asked for, or whose points are not all measured in time, stays as the page has it; a page
    that has none goes without.
    """
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    parts = []
    for title, make in made.items():
        points.commits.clear()
        try:
            if only and not title.startswith(tuple(only)):
                raise OutOfTime
            body = make()
            parts += [f"## {title}", points.figures_of(), *body]
        except OutOfTime:
            say(f"{title}: out of time; go on with the same command")
            name = re.escape(title.partition(":")[0])
            kept = re.search(rf"^## {name}(?::[^\n]*)?$.*?(?=^## |\Z)", old, re.MULTILINE | re.DOTALL)
            parts += [kept[0].strip()] if kept else []
    return parts


class Points:
    """Single measurements, each kept by everything that decides it, so that a run goes on where one stopped.

    A point is known by what was measured (plan, data, seed, in JSON) and by the code that trained. The tables
    of a page share their points.

    Args:
        name: Of the file in ``build/papers``.
        older: Take a point of other code, the last one, where there is none of this.
        seconds: After so many no point is measured any more.
    """

    def __init__(self, name: str, *, older: bool = False, seconds: float | None = None) -> None:
        self.path, self.older = ROOT / "build" / "papers" / f"{name}.jsonl", older
        self.end = time.monotonic() + (math.inf if seconds is None else seconds)
        self.code, self.commit = code_digest(), commit()
        self.commits: set[str] = set()
        self.known: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                self._keep(json.loads(line))

    @classmethod
    def of(cls, name: str, chosen: argparse.Namespace) -> Points:
        """The points of a page, by its arguments; trial runs have their own."""
        quick = "-quick" if chosen.quick else ""
        return cls(name + quick, older=chosen.older, seconds=chosen.seconds)

    def _keep(self, point: dict[str, Any]) -> None:
        key = json.dumps(point["what"], sort_keys=True)
        self.known[f"{point['code']} {key}"] = self.known[key] = point

    def get(self, what: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """The value of a point, measured if it is not known."""
        key = json.dumps(what, sort_keys=True)
        point = self.known.get(f"{self.code} {key}") or (self.known.get(key) if self.older else None)
        if point is None:
            if time.monotonic() > self.end:
                raise OutOfTime
            value = json.loads(json.dumps(make()))
            point = {"code": self.code, "commit": self.commit, "what": json.loads(key), "value": value}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(point) + "\n")
            self._keep(point)
            say(f"{key[:160]}: {str(value)[:80]}")
        self.commits.add(point["commit"])
        return point["value"]

    def figures_of(self) -> str:
        """The line of a page that says with which commits the points since the last such line were made."""
        made, self.commits = ", ".join(f"`{each}`" for each in sorted(self.commits)), set()
        return f"Figures of commit {made}."


def code_digest() -> str:
    """Of all code that takes part in training."""
    digest = hashlib.sha256()
    for name in ("algorithms", "data", "federation", "models", "privacy", "protocols", "settings"):
        folder = Path(importlib.import_module(f"securevfl.{name}").__file__ or "").parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{name}/{path.relative_to(folder)}".encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The last commit that changed the code, with a plus where it has been changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    code = ("--", "securevfl", "protocols")
    return git("log", "-1", "--format=%h", "--abbrev=7", *code) + (
        "+" if git("status", "--porcelain", *code) else ""
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of a 95 % t-interval."""
    if not all(map(math.isfinite, values)):
        return math.inf, math.inf
    spread = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(spread)


def ratio(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """How many times smaller, with a 95 % interval from the logarithms (Welch)."""
    first, second = np.log(before), np.log(after)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return math.nan, math.nan, math.nan
    parts = [np.var(each, ddof=1) / len(each) for each in (first, second)]
    freedom = sum(parts) ** 2 / sum(part**2 / (len(first) - 1) for part in parts) if sum(parts) else 1.0
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(parts))
    middle = float(first.mean() - second.mean())
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def times_faster(before: Sequence[float], after: Sequence[float]) -> str:
    """`ratio` as a table writes it."""
    middle, low, high = ratio(before, after)
    return "-" if math.isnan(middle) else f"{middle:.2f} ({low:.2f} to {high:.2f})"
