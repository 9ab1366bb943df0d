"""The profile of a data set before any model: missing values, distributions, information values.

A run of model `profile` has opened noisy counts per bin and label, paid by the ledger; all that is shown here
is computed from them and costs nothing further. Each organisation has the file of its own columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.auditing.cards import Line, lines_of, open_cards, short_bin


@dataclass(frozen=True, kw_only=True)
class Bin:
    """A bin of a column: what it holds, its share of all records, and the share of positive labels in it."""

    bin: str
    share: float
    positive: float | None


@dataclass(frozen=True, kw_only=True)
class ColumnProfile:
    """What the noisy counts say about one column.

    Attributes:
        party: Whose column.
        column: Its name.
        kind: `number`, `category` or `flag`.
        information: Noisy information value; 0 where the noise hides whatever there is.
        missing: Share of missing values; None where they are too few to be told from none.
        bins: Its distribution.
    """

    party: str
    column: str
    kind: str
    information: float
    missing: float | None
    bins: tuple[Bin, ...]

    def to_mapping(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "bins": [dict(vars(each)) for each in self.bins]}


def read_profile(path: Path | str, *, party: str = "") -> list[ColumnProfile]:
    """The profile in a run's folder, most informative columns first.

    Args:
        path: The run's folder.
        party: Only this party's columns.

    Raises:
        RunError: The folder holds no profile, or not that party's part of it.
    """
    _, cards = open_cards(path, "profile", party=party)
    found = [
        _profile(lines_of(name, card, place))
        for name, card in cards.items()
        if party in ("", name)
        for place in range(len(card.columns))
    ]
    return sorted(found, key=lambda column: -column.information)


def _profile(lines: Sequence[Line]) -> ColumnProfile:
    counts = np.array([max(line.positives + line.negatives, 0.0) for line in lines])
    total = max(float(counts.sum()), 1.0)
    alone = [i for i, line in enumerate(lines) if line.bin == "missing"]
    return ColumnProfile(
        party=lines[0].party,
        column=lines[0].column,
        kind=lines[0].kind,
        information=lines[0].information,
        missing=float(counts[alone[0]] / total) if alone else None,
        bins=tuple(
            Bin(
                bin=line.bin,
                share=float(count / total),
                positive=min(max(line.positives / count, 0.0), 1.0) if count > 0 else None,
            )
            for line, count in zip(lines, counts, strict=True)
        ),
    )


def profile_page(columns: Sequence[ColumnProfile], *, title: str, spent: str) -> str:
    """One self-contained page: a ranking, then a chart and a table for each column."""
    from securevfl.pages import render

    ranking = [
        [each.party, each.column, f"{each.information:.3f}", missing_text(each), str(len(each.bins))]
        for each in columns
    ]
    sections = [
        {
            "column": each.column,
            "party": each.party,
            "information": each.information,
            "chart": _chart(each) if len(each.bins) > 1 else None,
            "rows": [
                [part.bin, f"{part.share:.1%}", "–" if part.positive is None else f"{part.positive:.1%}"]
                for part in each.bins
            ],
        }
        for each in columns
    ]
    return render("auditing/profile.html", title=title, spent=spent, ranking=ranking, sections=sections)


def missing_text(column: ColumnProfile) -> str:
    """The missing rate in words."""
    return "few or none" if column.missing is None else f"{column.missing:.1%}"


def _chart(column: ColumnProfile) -> Any:
    from securevfl.pages.charts import COLOURS, Chart

    chart = Chart(f"Share of records and of positive labels by bin of {column.column}", 6.0, 2.2)
    axes, places = chart.axes[0], list(range(len(column.bins)))
    axes.bar(places, [part.share for part in column.bins], color=COLOURS[0], width=0.8)
    rates = [(place, part.positive) for place, part in enumerate(column.bins) if part.positive is not None]
    axes.plot(*zip(*rates, strict=True), color=COLOURS[1], marker="o", markersize=3)
    axes.set_ylabel("share")
    step = max(1, len(places) // 6)
    axes.set_xticks(
        places[::step],
        [short_bin(part.bin) for part in column.bins[::step]],
        rotation=20,
        ha="right",
        fontsize=7,
    )
    return chart
