"""How a way of training looks in every picture: colour, marker and line, each telling it apart by itself.

The colours are those of Okabe and Ito without yellow, which are told apart with any kind of colour vision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
# matplotlib's marker, and the same as a path around 0 0 for SVG
MARKERS = (
    ("o", "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0Z"),
    ("s", "M-4.5-4.5h9v9h-9Z"),
    ("^", "M0-6L5.5 4.5H-5.5Z"),
    ("D", "M0-6L6 0L0 6L-6 0Z"),
    ("v", "M0 6L5.5-4.5H-5.5Z"),
    ("P", "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4Z"),
    ("X", "M-5.5-3L-3-5.5L0-2.5L3-5.5L5.5-3L2.5 0L5.5 3L3 5.5L0 2.5L-3 5.5L-5.5 3L-2.5 0Z"),
    ("*", "M0-6.5L1.8-2L6.5-1.8L2.8 1.2L4 6L0 3.3L-4 6L-2.8 1.2L-6.5-1.8L-1.8-2Z"),
)
DASHES = ("", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True, kw_only=True)
class Look:
    """Colour, marker and dashes of one series."""

    colour: str
    marker: str
    path: str
    dashes: str


def looks_of(names: Sequence[str]) -> dict[str, Look]:
    """A look for each series; the combination repeats only after 56 of them."""
    found = {}
    for number, name in enumerate(dict.fromkeys(names)):
        marker, path = MARKERS[number % len(MARKERS)]
        found[name] = Look(
            colour=COLOURS[number % len(COLOURS)],
            marker=marker,
            path=path,
            dashes=DASHES[number % len(DASHES)],
        )
    return found
