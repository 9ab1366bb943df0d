"""Pages: one self-contained HTML file each, which opens from disk, asks no network and prints well.

Nothing here is loaded before a page is made: jinja2 and matplotlib are imported by the functions that need
them. Templates lie beside the code that fills them, as ``*.html`` files of their packages.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    """Fills a template; everything that is not markup already is escaped.

    Args:
        template: Its path inside the package, such as ``auditing/report.html``.
        values: What the template calls by name.
    """
    return _environment().get_template(template).render(**values) + "\n"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    made = Environment(
        loader=FunctionLoader(lambda name: (files("securevfl") / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = number
    return made


def number(value: float | None, missing: str = "–") -> str:
    """A number as people read it; `missing` stands for None."""
    if value is None:
        return missing
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
