"""The tables: how many faults are caught, by room, and what is not."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from benchmarks.faults.contract import FAULTS
from benchmarks.faults.work import WITHOUT, outcome
from benchmarks.papers.common import table
from securevfl import __version__

SILENT, IDLE = "silent", "does nothing"
OUTCOMES = ("refused", "violated", "mentioned", "not tested", SILENT, IDLE)
CAUGHT = ("refused", "violated")
NOTES = Path(__file__).parent / "notes.md"
"""What somebody wrote down about runs: rates before and after a change, false alarms."""


def results(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per pair: fault, case and what came out, by faulty and by sound code."""
    sound = {each["case"]: each["clean"] for each in lines if each["fault"] == WITHOUT}
    found = []
    for each in lines:
        if each["fault"] == WITHOUT:
            continue
        said = {who: _said(each, who, sound[each["case"]]) for who in ("faulty", "clean")}
        if said["clean"] == SILENT and each.get("idle"):
            said["clean"] = IDLE
        found.append({"fault": FAULTS[each["fault"]], "case": each["case"], **said})
    return found


def _said(line: dict[str, Any], who: str, sound: dict[str, Any]) -> str:
    return "refused" if "refused" in line else outcome(line[who], sound)


def tables(lines: list[dict[str, Any]]) -> str:
    """Sound runs, the catch rate by room, and everything that leaves a trace and is not caught."""
    found = results(lines)
    return "\n".join(
        [
            _sound(lines),
            "## By room\n",
            _rooms([each for each in found if each["fault"].leaves_trace]),
            "## Left a trace and was not caught\n",
            _missed([each for each in found if each["fault"].leaves_trace]),
            "## Cannot be seen in the files of a run\n",
            _hidden([each for each in found if not each["fault"].leaves_trace]),
        ]
    )


def _sound(lines: list[dict[str, Any]]) -> str:
    rows = [
        [each["case"], each["clean"]["verdict"], _cells(each)] for each in lines if each["fault"] == WITHOUT
    ]
    return "## Sound runs\n\n" + table(["case", "verdict", "promises"], rows)


def _cells(line: dict[str, Any]) -> str:
    count = Counter(line["clean"]["cells"].values())
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(count.items()))


def _rooms(found: list[dict[str, Any]]) -> str:
    rooms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in found:
        rooms[each["fault"].room].append(each)
    rows = [_row(room, pairs) for room, pairs in rooms.items()] + [_row("all", found)]
    head = ["room", "faults", "pairs", *OUTCOMES, "caught", "caught by the faulty code itself"]
    return table(head, rows)


def _row(name: str, pairs: list[dict[str, Any]]) -> list[Any]:
    count = Counter(each["clean"] for each in pairs)
    own = sum(each["faulty"] in CAUGHT and each["clean"] != IDLE for each in pairs)
    caught = sum(count[each] for each in CAUGHT)
    of = max(1, len(pairs) - count[IDLE])
    return [
        name,
        len({each["fault"].name for each in pairs}),
        len(pairs),
        *(count[each] for each in OUTCOMES),
        f"{caught / of:.0%}",
        f"{own / of:.0%}",
    ]


def _missed(found: list[dict[str, Any]]) -> str:
    missed: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for each in found:
        if each["clean"] not in (*CAUGHT, IDLE):
            missed[each["fault"].name][each["clean"]].append(each["case"])
    rows = [
        [
            name,
            FAULTS[name].room,
            FAULTS[name].what,
            "; ".join(f"{o}: {', '.join(c)}" for o, c in said.items()),
        ]
        for name, said in missed.items()
    ]
    return table(["fault", "room", "what goes wrong", "what the sound audit says"], rows)


def compared(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """What the sound audit said of each pair in an earlier run and says now."""
    found = {}
    for number, lines in enumerate((before, after)):
        for each in results(lines):
            found.setdefault((each["fault"], each["case"]), {})[number] = each["clean"]
    rows = [
        [fault.room, fault.name, fault.what, case, said.get(0, "-"), said.get(1, "-")]
        for (fault, case), said in found.items()
    ]
    return table(["room", "fault", "what goes wrong", "case", "at first", "now"], rows)


def _hidden(found: list[dict[str, Any]]) -> str:
    said: dict[str, Counter[str]] = defaultdict(Counter)
    for each in found:
        said[each["fault"].name][each["clean"]] += 1
    rows = [
        [name, FAULTS[name].what, FAULTS[name].needs, ", ".join(f"{n} {o}" for o, n in count.items())]
        for name, count in said.items()
    ]
    return table(["fault", "what goes wrong", "what it would take", "audits"], rows)


def page(lines: list[dict[str, Any]]) -> str:
    """The page in the documentation."""
    pairs, broken = len(lines) - sum(each["fault"] == WITHOUT for each in lines), _broken(lines)
    every = sum(len(each.applies) for each in FAULTS.values())
    seconds = sum(each["seconds"] for each in lines)
    return f"""# Seeded faults

Made with `python -m benchmarks.faults` (securevfl {__version__}): {len(FAULTS)} faults,
{pairs} of {every} pairs of a fault and a case, {seconds / 60:.0f} minutes of processes. Each fault is put
into the code of a process that trains on at most 200 records and audits its own run (attacks `none`); then
sound code audits the folder that was left behind. *Refused*: the run, or the audit of it, stops with an
error. *Violated*: the verdict. *Mentioned*: the report has words or a lesser verdict that a sound run's has
not. *Not tested*: a promise is reported so. *Silent*: nothing. *Does nothing*: silent, and with all entropy
fixed the fault leaves what a sound run leaves (`--idle`); such a pair counts for nothing. Caught is refused
or violated, of all that do something. The columns are those of the sound audit but for the last.{broken}

{NOTES.read_text(encoding="utf-8")}
{tables(lines)}"""


def false_alarms(lines: list[dict[str, Any]]) -> str:
    """How many audits of sound runs say that something is wrong, and in which words."""
    seen = [each["clean"] for each in lines if "clean" in each]
    wrong = [look for look in seen if look["verdict"] in ("violated", "refused", "broken")]
    refused = [each["refused"] for each in lines if "refused" in each]
    verdicts = Counter(look["verdict"] for look in seen)
    said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    words = sorted({text for look in wrong for text in look["words"]} | {*refused})
    alarms = f"{len(wrong)} false alarms; {len(refused)} runs refused"
    return "\n  ".join([f"{len(seen)} audits of sound runs ({said}): {alarms}", *words])


def _broken(lines: list[dict[str, Any]]) -> str:
    names = sorted({each["fault"] for each in lines for who in ("faulty", "clean") if _is_broken(each, who)})
    return f" Ended with an unexpected error: {', '.join(names)}." if names else ""


def _is_broken(line: dict[str, Any], who: str) -> bool:
    return line.get(who, {}).get("verdict") == "broken"
