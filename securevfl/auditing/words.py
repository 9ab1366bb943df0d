"""A report in sentences that somebody without statistics can repeat: the worst fact first."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from securevfl.attacks.contract import METRICS
from securevfl.auditing.verdicts import Verdict
from securevfl.federation.run import warning_of

# What an epsilon is worth: the odds of any guess about one record change by at most e^epsilon.
STRENGTHS = ((1.0, "strong"), (4.0, "good"), (10.0, "moderate"), (50.0, "weak"), (float("inf"), "worthless"))
POOR = ("weak", "worthless")
GLOSSARY = {
    "epsilon": "how much one record can change what anybody may conclude: the odds of any guess about it "
    "change at most by the factor e^epsilon. Up to 1 is strong, above 50 worthless.",
    "delta": "the small probability with which even that may fail.",
    "mu": "the same promise as a distance: telling two values of a record apart is as hard as telling two "
    "bell curves apart whose centres lie mu standard deviations from each other.",
    "canary": "a made-up record. The audit lets it in or leaves it out and tries to tell which; whoever "
    "succeeds often has measured that something leaks.",
    "power": "how little noise the audit would have noticed: at 80 %, less than 80 % of the promised noise, "
    "nine times out of ten.",
    "AUC": "how well an attack ranks: 0.5 is guessing, 1 is always right.",
}
_GRAVEST = ("labels", "test labels", "gradient", "embedding")


def strength(epsilon: float | None) -> str:
    """One word for an epsilon; None is infinite."""
    if epsilon is None:
        return "none"
    return next(word for limit, word in STRENGTHS if epsilon <= limit)


def verdict_words(cell: dict[str, Any]) -> str:
    """The verdict on a pair with the level of its protection: what is kept may be worth nothing."""
    level = strength(cell["epsilon_upper"])
    if cell["verdict"] == Verdict.HOLDS.value:
        return f"holds, but the protection is {level}" if level in POOR else "holds"
    return str(cell["verdict"])


def headline(content: dict[str, Any]) -> str:
    """The first sentence of the report: the worst fact."""
    said = warning_of(content["run"]) + _first(content)
    lacking = content["attacks"] and content["run"]["truth"] != "at hand"
    return f"{said} Attacks were not run for lack of data." if lacking else said


def _first(content: dict[str, Any]) -> str:
    verdict = content["verdict"]
    if verdict == Verdict.VIOLATED.value:
        return f"A promise is broken: {_first_violation(content)}."
    cells = list(_cells(content))
    if not cells:
        return "Nothing left any organisation in this run, so there is nothing to promise."
    if verdict == Verdict.NO_GUARANTEE.value:
        return min((_exposed(*each) for each in cells if each[2]["exact_kinds"]), key=lambda said: said[0])[1]
    worst = max((cell["epsilon_upper"] or 0.0 for _, _, cell in cells), default=0.0)
    level = strength(worst)
    if verdict == Verdict.NOT_TESTED.value:
        level = level.capitalize()
        return f"{level} protection or better is promised, but not every promise was tested on this run."
    if level in POOR:
        return (
            f"Every promise was kept, but what is promised is {level} protection (epsilon up to {worst:.4g})."
        )
    return f"Every promise was tested on this run and stands: {level} protection or better."


AMOUNTS = {
    "strong": "hardly anything",
    "good": "little",
    "moderate": "something",
    "weak": "much",
    "worthless": "whatever there is to learn",
}
"""What an observer can learn under a promise, by its strength."""


def plain(content: dict[str, Any]) -> list[str]:
    """Who can learn what, without statistics, worst first; owners of whom the same is true together."""
    groups: dict[tuple[Any, ...], list[tuple[str, str, dict[str, Any]]]] = {}
    for owner, observer, cell in sorted(_cells(content), key=_rank):
        exact = cell["verdict"] == Verdict.NO_GUARANTEE.value
        same = _exposed("", observer, cell)[1] if exact else strength(cell["epsilon_upper"])
        groups.setdefault((observer, cell["verdict"], same), []).append((owner, observer, cell))
    told = [_learns(found) for found in _together(list(groups.values()))]
    holder, parties = content["run"]["label_holder"], content["run"]["parties"]
    others = _list([name for name in parties if name != holder])
    who = [f"{holder} holds the labels; {others} brought features."] if told and others else []
    trust = dict.fromkeys(t for _, _, cell in _cells(content) if _promises(cell) for t in cell["assumptions"])
    return [*who, *told, *(f"Besides noise promises rest on this: {_bare(text)}." for text in trust)]


def _bare(assumption: str) -> str:
    """What must be true, without the field's word for it."""
    return re.sub("^semi-honest[^:]*: ", "", assumption)


def _promises(cell: dict[str, Any]) -> bool:
    return cell["verdict"] in (Verdict.HOLDS.value, Verdict.NOT_TESTED.value)


def _together(groups: list[list[_Pair]]) -> list[list[_Pair]]:
    """Groups of observers one by one, or one group where the same is true of everybody towards all others."""
    names = {name for found in groups for owner, observer, _ in found for name in (owner, observer)}
    same = {(cell["verdict"], *_level(cell)) for found in groups for _, _, cell in found}
    complete = sum(map(len, groups)) == len(names) * (len(names) - 1) and len(groups) == len(names)
    told = not any(cell["exact_kinds"] for found in groups for _, _, cell in found)
    if len(names) > 2 and len(same) == 1 and complete and told:
        cell = max((c for found in groups for _, _, c in found), key=lambda c: c["epsilon_upper"] or 0.0)
        return [[("the others", f"each of {_list(sorted(names))}", cell)]]
    return groups


def _level(cell: dict[str, Any]) -> tuple[str, str]:
    return strength(cell["epsilon_upper"]), cell["covers"]


def _list(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def _learns(found: list[_Pair]) -> str:
    """One sentence or two about an observer and owners of whom the same is true."""
    owners, observer, cell = _list([owner for owner, _, _ in found]), found[0][1], found[0][2]
    verdict = Verdict(cell["verdict"])
    if verdict is Verdict.NO_GUARANTEE:
        return f"{_exposed(owners, observer, cell)[1]} Nothing is promised about that."
    observer = observer[0].upper() + observer[1:] if observer.startswith("each of ") else observer
    worst = max(each["epsilon_upper"] or 0.0 for _, _, each in found)
    promised = _odds(owners, observer, worst)
    if verdict is Verdict.VIOLATED:
        return (
            f"{observer} may have learnt more about {owners} than was promised: this run broke the promise."
        )
    covers = f" It covers {cell['covers']}." if cell["covers"] else ""
    if verdict is Verdict.NOT_TESTED:
        return f"{promised} That is the promise; not all of it was tested on this run.{covers}"
    if strength(worst) == "worthless":
        return f"{promised} That this run kept to it protects nobody.{covers}"
    return f"{promised} This run was tested, and kept to it.{covers}"


def _odds(owners: str, observer: str, epsilon: float) -> str:
    level = strength(epsilon)
    amount = f"{observer} can learn {AMOUNTS[level]} about any one record of {owners}"
    if level == "worthless":
        return f"{amount}: the promise rules out nothing in practice."
    times = float(f"{math.exp(epsilon):.2g}")
    shown = f"{times:,.0f}" if times >= 10 else f"{times:g}"
    seen = "what it saw" if observer.startswith("Each of ") else f"what {observer} saw"
    return f"{amount}: whatever one guesses about it, {seen} changes the odds at most {shown}-fold."


_Pair: TypeAlias = tuple[str, str, dict[str, Any]]


def _cells(content: dict[str, Any]) -> list[_Pair]:
    return [
        (owner, observer, cell)
        for owner, row in content["owners"].items()
        for observer, cell in row["observers"].items()
    ]


def _first_violation(content: dict[str, Any]) -> str:
    broken = [cell for _, _, cell in _cells(content) if cell["verdict"] == Verdict.VIOLATED.value]
    reasons = [reason for cell in broken for reason in cell["reasons"]]
    reasons += [
        reason
        for f in content["findings"]
        if f["verdict"] == Verdict.VIOLATED.value
        for reason in f["reasons"]
    ]
    return reasons[0] if reasons else "evidence contradicts it"


def _exposed(owner: str, observer: str, cell: dict[str, Any]) -> tuple[int, str]:
    """How grave it is that exact values left, and a sentence."""
    kinds = cell["exact_kinds"]
    place = next((i for i, kind in enumerate(_GRAVEST) if any(k.startswith(kind) for k in kinds)), 9)
    if place < 2:
        return place, f"{observer} can read every label of {owner}."
    if place == 2:
        return place, (
            f"{observer} can work out the labels of {owner}: with every record it got the exact gradient, a "
            "number that depends on the label."
        )
    if place == 3:
        return place, (
            f"{observer} got, without any noise, what {owner} computed from each of its records, and may "
            "work out what is in them."
        )
    return place, f"{observer} got from {owner} without any noise: {', '.join(kinds)}."


def sentences(content: dict[str, Any]) -> list[str]:
    """One sentence per owner and observer, worst first; then labels, predictions and attacks."""
    pairs: dict[str, list[str]] = {}
    for owner, observer, cell in sorted(_cells(content), key=_rank):
        pairs.setdefault(_pair(owner, observer, cell), []).append(f"{owner} towards {observer}")
    labels = content["run"].get("labels")
    spoken = [f"Labels: {labels}."] if labels else []
    found = [f"{', '.join(who)}: {said}" for said, who in pairs.items()]
    counted = _predictions(content["run"]["prediction"]) + _served(content["run"])
    spoken += [f"{said}." for said in content["run"].get("deviations", [])]
    return found + spoken + counted + _attack_words(content)


def _rank(pair: tuple[str, str, dict[str, Any]]) -> tuple[int, int, float]:
    owner, observer, cell = pair
    grave = _exposed(owner, observer, cell)[0] if cell["exact_kinds"] else 9
    return Verdict(cell["verdict"]).rank, grave, -(cell["epsilon_upper"] or float("inf"))


def _predictions(predictions: dict[str, dict[str, Any]]) -> list[str]:
    """Scores of single records, which mode sealed counts apart from training."""
    return [
        f"Counted apart from training: {owner} showed {', '.join(spend['observers'])} the scores of "
        f"{spend['scores']:,} predicted records, "
        + ("without noise." if spend["epsilon"] is None else f"at epsilon {spend['epsilon']:.3g} each.")
        for owner, spend in predictions.items()
    ]


def _served(run: dict[str, Any]) -> list[str]:
    """What a scoring service had the parties open."""
    return [
        f"The scoring service of {run['label_holder']} had {owner} open its part of "
        f"{served['people']:,} scores, by {served['requests']:,} requests."
        for owner, served in run["scoring"].items()
    ]


def _pair(owner: str, observer: str, cell: dict[str, Any]) -> str:
    """What is to be said about a pair, and perhaps about others too."""
    verdict = Verdict(cell["verdict"])
    if verdict is Verdict.VIOLATED:
        return f"VIOLATED; {'; '.join(cell['reasons'])}."
    if verdict is Verdict.NO_GUARANTEE:
        return f"no guarantee. {_exposed(owner, observer, cell)[1]}"
    level = strength(cell["epsilon_upper"])
    bound = f"epsilon {cell['epsilon_upper']:.4g} at delta {cell['delta']:g} ({level} protection)"
    text = f"{verdict_words(cell)}; {bound} is promised, mode {cell['mode']}"
    if verdict is Verdict.NOT_TESTED:
        text += f"; {cell['reasons'][0]}"
    if noticed := power_words(cell):
        text += f"; noise below {noticed} of the promised one would have been noticed"
    if cell["epsilon_lower"] is not None:
        low = cell["epsilon_lower"]
        text += f"; canaries measured at least {low:.3g}" if low else "; canaries could certify no leak"
    if cell["claimed"] is not None and cell["claimed"] < cell["epsilon_upper"]:
        text += f"; the paper would claim {cell['claimed']:.4g}, which is not sound"
    if cell["covers"]:
        text += f"; covers {cell['covers']}"
    return text + "."


def power_words(cell: dict[str, Any]) -> str:
    """Of each whole path, the share of the promised noise below which that would have been noticed."""
    whole = {path: power for path, power in cell["powers"].items() if "," not in path} or cell["powers"]
    return ", ".join(f"{power:.0%} ({path})" for path, power in whole.items())


def _attack_words(content: dict[str, Any]) -> list[str]:
    attacks = content["attacks"]
    if not attacks:
        return ["No attacks were asked for."]
    missing = content["run"]["truth"]
    lack = [] if missing == "at hand" else [f"Attacks that need the run's data were not run: {missing}."]
    scored = [a for a in attacks if a["status"] == "scored"]
    names = sorted({a["name"] for a in scored if beats_baseline(a)})
    if not scored:
        return lack or ["No attack could be run."]
    those = attacks_that_ran(content)
    if not names:
        return [*lack, f"None of {those} did better than guessing without the view."]
    better = sum(map(beats_baseline, scored))
    said = f"{better} of {those} did better than guessing: {', '.join(names)}."
    if content["verdict"] in (Verdict.HOLDS.value, Verdict.NOT_TESTED.value):
        said += " No promise rules that out: attacks also use what all records have in common."
    return [*lack, said]


def attacks_that_ran(content: dict[str, Any]) -> str:
    """How many attacks have a score; without the run's data they are those that need none."""
    scored = sum(attack["status"] == "scored" for attack in content["attacks"])
    return f"{scored} attacks" + ("" if content["run"]["truth"] == "at hand" else " that need no data")


def beats_baseline(attack: dict[str, Any]) -> bool:
    """True where the whole interval lies on the leaking side of the baseline."""
    if attack["status"] != "scored" or attack["low"] is None or attack["baseline"] is None:
        return False
    if METRICS[attack["metric"]].more_is_worse:
        return bool(attack["low"] > attack["baseline"])
    return attack["high"] is not None and bool(attack["high"] < attack["baseline"])
