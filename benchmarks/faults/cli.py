"""Seeded faults: code that breaks its promise, one fault at a time, and what the audit says of it.

    python -m benchmarks.faults [--only TEXT ...] [--raw FILE] [--out FILE] [--workers N] [--quick | --page]
    python -m benchmarks.faults --idle
    python -m benchmarks.faults --list
    python -m benchmarks.faults --clean N

Each fault is put into a process that trains and audits with it; then sound code audits the folder that it
left behind. Finished pairs are kept in FILE, one JSON object per line, and not repeated. With `--clean`, N
sound runs are audited instead, and every `violated` among them is a false alarm. With `--idle`, pairs that
nobody noticed are run twice with all entropy fixed, with the fault and without: where the same is left behind
the fault does nothing in that case, and the pair counts for nothing.
"""

from __future__ import annotations

import argparse
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import CASES, MORE
from benchmarks.faults.contract import FAULTS
from benchmarks.faults.page import SILENT, false_alarms, page, results, tables
from benchmarks.faults.work import WITHOUT, apart, idle, pair, sound
from benchmarks.papers.common import say

Pair = tuple[str, str, int]
TOGETHER = 10
"""Sound runs that one process makes."""


def main() -> None:
    chosen = _arguments()
    if chosen.list:
        for each in FAULTS.values():
            print(f"{each.room:13}{each.name:32}{', '.join(each.applies)}\n{'':13}{each.what}")
        return
    if chosen.clean:
        _clean(chosen)
        return
    if chosen.idle:
        _idle(chosen)
        return
    wanted = _wanted(chosen.only, quick=chosen.quick)
    cases = sorted({case for _, case, _ in wanted}, key=[*CASES, *MORE].index)
    everything = [(WITHOUT, case, 0) for case in cases] + wanted
    done = _measure([] if chosen.page else everything, chosen)
    found = [done[each] for each in everything if each in done]
    print(tables(found))
    if not chosen.only:
        chosen.out.write_text(page(found), encoding="utf-8")
        say(f"written to {chosen.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], help="faults, rooms or cases, by parts of their names"
    )
    parser.add_argument("--quick", action="store_true", help="each fault in its first case only")
    parser.add_argument("--page", action="store_true", help="run nothing; the tables of what is finished")
    parser.add_argument("--idle", action="store_true", help="look which unnoticed faults do nothing")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--clean", type=int, default=0, metavar="N", help="audit N sound runs instead")
    parser.add_argument("--raw", type=Path, default=Path("build/faults.jsonl"), help="finished pairs")
    parser.add_argument("--out", type=Path, default=Path("docs/results/faults.md"), help="the page")
    parser.add_argument("--workers", type=int, default=2, help="pairs at once")
    return parser.parse_args()


def _wanted(only: list[str], *, quick: bool) -> list[Pair]:
    """Pairs of faults and cases, every fault's first case before any second one."""
    pairs = [
        (place, each.name, case)
        for each in FAULTS.values()
        for place, case in enumerate(each.applies[:1] if quick else each.applies)
        if not only or any(part in name for part in only for name in (each.name, each.room, case))
    ]
    return [(name, case, 0) for _, name, case in sorted(pairs, key=lambda found: found[0])]


def _measure(wanted: list[Pair], chosen: argparse.Namespace) -> dict[Pair, dict[str, Any]]:
    """Runs what has not been run; every finished pair is written down at once."""
    done = _known(chosen.raw)
    missing = [each for each in wanted if each not in done]
    lock = threading.Lock()

    def run(each: Pair) -> None:
        found = pair(*each)
        with lock, chosen.raw.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
            done[each] = found
            say(f"{len(done):4} {each[0]} in {each[1]}: {_words(found)} ({found['seconds']} s)")

    with ThreadPoolExecutor(chosen.workers) as pool:
        list(pool.map(run, missing))
    return done


def _known(raw: Path) -> dict[Pair, dict[str, Any]]:
    """What was finished before."""
    raw.parent.mkdir(parents=True, exist_ok=True)
    lines = raw.read_text(encoding="utf-8").splitlines() if raw.exists() else []
    known: dict[Pair, dict[str, Any]] = {}
    for each in map(json.loads, lines):
        known.setdefault((each["fault"], each["case"], each["seed"]), {}).update(each)
    return known


def _idle(chosen: argparse.Namespace) -> None:
    """Asks of every pair that was silent whether the fault does anything."""
    done = _known(chosen.raw)
    silent = [
        (each["fault"].name, each["case"]) for each in results(list(done.values())) if each["clean"] == SILENT
    ]
    for name, case in silent:
        if "idle" not in done[name, case, 0]:
            line = {"fault": name, "case": case, "seed": 0, **idle(name, case)}
            with chosen.raw.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            say(f"{name} in {case}: {'does nothing' if line.get('idle') else 'does something'}")


def _words(found: dict[str, Any]) -> str:
    if "refused" in found:
        return "refused at run time"
    return f"{found['faulty']['verdict']}, sound audit: {found['clean']['verdict']}"


def _clean(chosen: argparse.Namespace) -> None:
    """Counts false alarms over sound runs of all cases in turn, each with a seed of its own."""
    names = [*CASES, *MORE]
    wanted = [(WITHOUT, names[number % len(names)], number // len(names)) for number in range(chosen.clean)]
    done = _known(chosen.raw)
    missing = [(case, seed) for name, case, seed in wanted if (name, case, seed) not in done]
    for start in range(0, len(missing), TOGETHER):
        found = apart(sound, missing[start : start + TOGETHER])
        if "broken" in found:
            say(f"runs {start} and following: {found['broken']}")
        with chosen.raw.open("a", encoding="utf-8") as file:
            for line in found.get("lines", []):
                file.write(json.dumps(line) + "\n")
                done[WITHOUT, line["case"], line["seed"]] = line
        say(false_alarms([done[each] for each in wanted if each in done]))
