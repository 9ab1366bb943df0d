"""The result of an audit: plain data, with the verdict in words on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securevfl.auditing.page import render
from securevfl.errors import InputError
from securevfl.files import write_json, write_text


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ``audit --json`` prints, and what the page shows.

    Attributes:
        content: Everything, ready for JSON: ``verdict``, ``owners``, ``attacks``, ``findings``, ``seen``,
            ``canaries``, ``run``, ``words``, ``environment``.
    """

    content: dict[str, Any]

    @property
    def owners(self) -> dict[str, Any]:
        """Owner -> observers -> claimed, epsilon_upper, epsilon_lower, verdict, tested, power, reasons."""
        return dict(self.content["owners"])

    @property
    def attacks(self) -> list[dict[str, Any]]:
        """One line per attack, owner and observer."""
        return list(self.content["attacks"])

    @property
    def verdict(self) -> str:
        """The worst verdict: violated, no guarantee, not tested, holds."""
        return str(self.content["verdict"])

    def cells(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(owner, observer, cell) of the whole matrix."""
        return [
            (owner, observer, cell)
            for owner, row in self.content["owners"].items()
            for observer, cell in row["observers"].items()
        ]

    def save(self, folder: Path, *, salt: str = "") -> None:
        """Writes ``report.json`` and ``report.html``.

        Args:
            folder: Where.
            salt: Goes into both, so that their digests tell nothing to whoever has not got them.
        """
        write_json(folder / "report.json", {**self.content, **({"salt": salt} if salt else {})})
        page = render(self.content)
        write_text(folder / "report.html", f"{page}<!-- {salt} -->\n" if salt else page)

    def over_limits(self, limits: Mapping[str, float]) -> list[str]:
        """Which limits are exceeded: ``epsilon``, ``mu``, or a metric of attacks such as ``auc``.

        Raises:
            InputError: Nothing in the report carries that name.
        """
        problems = []
        for name, limit in limits.items():
            found = self._figures(name)
            if found is None:
                known = sorted({a["metric"] for a in self.attacks} | {"epsilon", "mu"})
                raise InputError(f"--max {name}: unknown figure; this report has {', '.join(known)}")
            problems += [
                f"{what} is {value}, above {limit:g}" for what, value in found if _above(value, limit)
            ]
        return problems

    def _figures(self, name: str) -> list[tuple[str, float | None]] | None:
        if name in ("epsilon", "mu"):
            return [(f"{name} of {o} towards {v}", cell[f"{name}_upper"]) for o, v, cell in self.cells()]
        found = [
            (f"{a['metric']} of {a['name']} on {a['owner']} by {a['observer']}", a["score"])
            for a in self.attacks
            if name in (a["metric"], a["name"]) and a["status"] == "scored"
        ]
        known = any(name in (a["metric"], a["name"]) for a in self.attacks)
        return found if known else None


def _above(value: float | None, limit: float) -> bool:
    """True where the value exceeds the limit; None is infinite."""
    return value is None or value > limit
