"""What commands share: tables, numbers as people read them, a progress bar on standard error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from securevfl.errors import readable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from securevfl.algorithms import Progress as RunProgress


LONGEST = 20_000
"""Letters of one paragraph."""


def terminal(*, stderr: bool = False) -> Console:
    """Where text for people goes; what draws it is loaded when there is something to draw."""
    from rich.console import Console

    return Console(stderr=stderr)


def say(console: Console, text: str) -> None:
    """A paragraph that may hold words of others: of folders that they bring, of ledgers that they wrote."""
    console.print(readable(text, LONGEST), markup=False, soft_wrap=True)


def cell(text: str) -> Text:
    """The same in a table; nothing in it is taken for markup."""
    from rich.text import Text

    return Text(readable(text))


def print_json(content: Mapping[str, Any]) -> None:
    """One object on standard output."""
    typer.echo(json.dumps(content, allow_nan=False))


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits; None is infinite."""
    if value is None or math.isinf(value):
        return "infinite"
    if value and (abs(value) >= 10**digits or abs(value) < 1e-3):
        return f"{value:,.0f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"
    return f"{value:.{digits}g}"


def table(title: str, *columns: str) -> Table:
    """A plain table that survives a pipe and a printer; where it is too wide, cells get more lines."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for column in columns:
        shown.add_column(column, overflow="fold")
    return shown


@contextmanager
def progress_bar(label: str, *, quiet: bool) -> Iterator[Callable[[RunProgress], None] | None]:
    """A bar with loss, metric, virtual time and privacy spent, on standard error."""
    console = terminal(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=1.0, figures="")

        def update(now: RunProgress) -> None:
            bar.update(task, completed=now.done, figures=_figures(now))

        yield update


def _figures(now: RunProgress) -> str:
    parts = [f"epoch {now.epoch}/{now.epochs}"]
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}")
    for name in ("auc", "r2"):
        value = now.test.get(name)
        if value is not None:
            parts.append(f"{name} {value:.4f}")
    parts.append(f"time {now.time:.0f}")
    if now.spent:
        parts.append(f"mu {number(max(now.spent.values()), 3)}")
    return "  ".join(parts)
