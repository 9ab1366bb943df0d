"""The result of an audit: plain data, with the verdict in words on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securevfl.errors import InputError
from securevfl.files import write_json, write_text

HOLDS, VIOLATED, NO_GUARANTEE = "holds", "violated", "no guarantee"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ``audit --json`` prints, and what the page shows.

    Attributes:
        content: Everything, ready for JSON: ``owners``, ``attacks``, ``checks``, ``seen``, ``canaries``,
            ``run``, ``words``, ``environment``.
    """

    content: dict[str, Any]

    @property
    def owners(self) -> dict[str, Any]:
        """Owner -> observers -> claimed, epsilon_upper, epsilon_lower, verdict."""
        return dict(self.content["owners"])

    @property
    def attacks(self) -> list[dict[str, Any]]:
        """One line per attack, owner and observer."""
        return list(self.content["attacks"])

    @property
    def verdict(self) -> str:
        """The worst verdict of all pairs; a failed check is a violation too."""
        verdicts = [cell["verdict"] for _, _, cell in self.cells()]
        if VIOLATED in verdicts or any(check["status"] == "failed" for check in self.content["checks"]):
            return VIOLATED
        return NO_GUARANTEE if NO_GUARANTEE in verdicts else HOLDS

    def cells(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(owner, observer, cell) of the whole matrix."""
        return [
            (owner, observer, cell)
            for owner, row in self.content["owners"].items()
            for observer, cell in row["observers"].items()
        ]

    def save(self, folder: Path) -> None:
        """Writes ``report.json`` and ``report.html``."""
        from securevfl.auditing.page import render

        write_json(folder / "report.json", self.content)
        write_text(folder / "report.html", render(self.content))

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


# -- the verdict in sentences that somebody who files the report can repeat ------------------------------

# What an epsilon is worth: the odds of any guess about one record change by at most e^epsilon.
STRENGTHS = ((1.0, "strong"), (4.0, "good"), (10.0, "moderate"), (50.0, "weak"), (float("inf"), "worthless"))


def strength(epsilon: float | None) -> str:
    """One word for an epsilon; None is infinite."""
    if epsilon is None:
        return "none"
    return next(word for limit, word in STRENGTHS if epsilon <= limit)


def headline(content: dict[str, Any], verdict: str) -> str:
    """The first sentence of the report."""
    if verdict == VIOLATED:
        return "A promise of this run is broken, or its books do not agree with what was seen."
    if not content["owners"]:
        return "Nothing left any organisation in this run, so there is nothing to promise."
    if verdict == NO_GUARANTEE:
        return "Some data left its owner without any guarantee."
    return "Every promise of this run stands up to the audit."


def sentences(content: dict[str, Any]) -> list[str]:
    """One sentence per owner and observer, and one about the labels."""
    found = [
        _pair(owner, observer, cell)
        for owner, row in content["owners"].items()
        for observer, cell in row["observers"].items()
    ]
    labels = content["run"].get("labels")
    spoken = [f"Labels: {labels}."] if labels else []
    return found + spoken + _predictions(content["run"]["prediction"]) + _attack_words(content["attacks"])


def _predictions(predictions: dict[str, dict[str, Any]]) -> list[str]:
    """Scores of single records, which mode sealed counts apart from training."""
    return [
        f"Counted apart from training: {owner} showed {', '.join(spend['observers'])} the scores of "
        f"{spend['evaluation']:,} test records and {spend['prediction']:,} predicted ones, "
        + ("without noise." if spend["epsilon"] is None else f"at epsilon {spend['epsilon']:.3g} each.")
        for owner, spend in predictions.items()
    ]


def _pair(owner: str, observer: str, cell: dict[str, Any]) -> str:
    who = f"{owner} towards {observer}"
    if cell["verdict"] == NO_GUARANTEE:
        return f"{who}: no guarantee; {cell['reasons'][0]}."
    if cell["verdict"] == VIOLATED:
        return f"{who}: VIOLATED; {'; '.join(cell['reasons'])}."
    bound = f"epsilon {cell['epsilon_upper']:.4g} at delta {cell['delta']:g}"
    text = f"{who}: holds; {bound} ({strength(cell['epsilon_upper'])} protection), mode {cell['mode']}"
    if cell["epsilon_lower"] is not None:
        text += f"; at least {cell['epsilon_lower']:.3g} was measured"
    if cell["claimed"] is not None and cell["claimed"] < cell["epsilon_upper"]:
        text += f"; the paper would claim {cell['claimed']:.4g}, which is not sound"
    return text + "."


def _attack_words(attacks: list[dict[str, Any]]) -> list[str]:
    scored = [a for a in attacks if a["status"] == "scored"]
    better = [a for a in scored if beats_baseline(a)]
    if not scored:
        return ["No attack could be run."]
    names = sorted({a["name"] for a in better})
    if not names:
        return [f"None of {len(scored)} attacks did better than guessing without the view."]
    return [f"{len(better)} of {len(scored)} attacks did better than guessing: {', '.join(names)}."]


def beats_baseline(attack: dict[str, Any]) -> bool:
    """True where the whole interval lies on the leaking side of the baseline."""
    from securevfl.attacks.contract import METRICS

    if attack["status"] != "scored" or attack["low"] is None or attack["baseline"] is None:
        return False
    if METRICS[attack["metric"]].more_is_worse:
        return bool(attack["low"] > attack["baseline"])
    return attack["high"] is not None and bool(attack["high"] < attack["baseline"])
