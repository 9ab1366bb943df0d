"""Charts: one matplotlib figure for a page (inline SVG with links and texts) and for papers (PNG and SVG).

What a chart shows never depends on colour alone: series differ by marker and line too.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securevfl.files import replacing, write_text

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.artist import Artist

# The colours of Okabe and Ito without yellow, which can be distinguished with any kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 2)), (0, (6, 2, 1.5, 2)))
FAINT, SOFT = "#e6e6e6", "#5b5b5b"
# Names and dates in a file's head would differ from day to day and carry addresses of others.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
SETTINGS: Any = {"svg.hashsalt": "securevfl", "svg.fonttype": "none"}


@dataclass(frozen=True, kw_only=True)
class Style:
    """Colour, marker and line of one series, the same in every chart."""

    colour: str
    marker: str
    line: Any


def styles_for(names: Iterable[str]) -> dict[str, Style]:
    """A style for each series; the combination repeats only after 56 of them."""
    return {
        name: Style(
            colour=COLOURS[order % len(COLOURS)],
            marker=MARKERS[order % len(MARKERS)],
            line=LINES[order % len(LINES)],
        )
        for order, name in enumerate(dict.fromkeys(names))
    }


class Chart:
    """A figure, and what a page adds to its parts: links, texts, and attributes for scripts.

    Args:
        title: What the chart shows, for those who cannot see it.
        width: In inches.
        height: In inches.
        rows: Rows of axes.
        columns: Columns of axes.

    Attributes:
        axes: The axes, row by row.
    """

    def __init__(self, title: str, width: float, height: float, rows: int = 1, columns: int = 1) -> None:
        from matplotlib.figure import Figure

        self.title, self.width = title, width
        # A figure of its own: it needs no display and touches nobody else's pyplot.
        self.figure = Figure(figsize=(width, height), layout="constrained")
        grid = self.figure.subplots(rows, columns, squeeze=False)
        self.axes: list[Any] = [axes for line in grid for axes in line]
        for axes in self.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_axisbelow(True)
            axes.grid(color=FAINT)
        self._parts: dict[str, str] = {}

    def link(self, part: Artist, href: str, text: str, **attributes: str) -> None:
        """Makes a part a link that says what it is."""
        said = {"href": href, "aria-label": text, **attributes}
        part.set_url(self._key(said, f"<title>{escape(text)}</title>"))

    def tag(self, part: Artist, text: str = "", **attributes: str) -> None:
        """Gives a part attributes that scripts look for, and perhaps a text."""
        part.set_gid(self._key(attributes, f"<title>{escape(text)}</title>" if text else ""))

    def _key(self, attributes: dict[str, str], more: str) -> str:
        key = f"part-{len(self._parts)}"
        said = "".join(
            f' {name.strip("_").replace("_", "-")}="{escape(text)}"' for name, text in attributes.items()
        )
        self._parts[key] = f"{said}>{more}"
        return key

    def svg(self, name: str) -> Markup:
        """The chart as SVG to stand inside a page, in which no other chart has that name."""
        from markupsafe import Markup

        text = self._drawn()
        text = re.sub(r'<a xlink:href="(part-\d+)"[^>]*>', lambda m: f"<a{self._parts[m[1]]}", text)
        text = re.sub(r'<g id="(part-\d+)">', lambda m: f"<g{self._parts[m[1]]}", text)
        text = re.sub(r'( id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", text)
        text = re.sub(r">\s+<", "><", text)
        head = re.search(r'viewBox="[^"]*"', text)
        body = text[text.index("<g ") : text.rindex("</svg>")]
        role = "group" if "<a " in body else "img"
        kind = "chart wide" if self.width > 6.5 else "chart"
        return Markup(  # noqa: S704 - made above, and every text in it is escaped
            f'<div class="{kind}"><svg {head[0] if head else ""} style="max-width:{96 * self.width:.0f}px" '
            f'role="{role}" aria-label="{escape(self.title)}">{body}</svg></div>'
        )

    def save(self, path: Path) -> list[Path]:
        """Writes the chart without links as ``.png`` and ``.svg`` files; returns their paths."""
        picture, drawing = (path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg"))
        with self._drawing(), replacing(picture) as file:
            self.figure.savefig(file, format="png", dpi=160)
        write_text(drawing, re.sub(r"</?a\b[^>]*>", "", self._drawn()))
        return [picture, drawing]

    def _drawn(self) -> str:
        """The chart as an SVG file, the same for the same chart."""
        file = io.StringIO()
        with self._drawing():
            self.figure.savefig(file, format="svg", metadata=NO_METADATA)
        return file.getvalue()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Names that users gave are drawn as they are: a dollar is no formula, and any script will do."""
        from matplotlib import rc_context
        from matplotlib.text import Text

        for text in self.figure.findobj(Text):
            text.set_parse_math(False)
        with rc_context(SETTINGS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            yield
