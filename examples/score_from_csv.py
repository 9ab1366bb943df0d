"""Scores people with a scorecard's CSV and plain Python, as the run itself does."""

import csv
import hashlib
import json
import math
import sys
from pathlib import Path

Line = dict[str, str]
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")


def score(card: list[Line], person: Line, label: str = "") -> tuple[float, float]:
    """Points and log odds of a positive label, or of one of several classes (`label`)."""
    columns: dict[str, list[Line]] = {}
    for line in card:
        if line["label"] == label:
            columns.setdefault(f"{line['party']} {line['column']}", []).append(line)
    chosen = [line for lines in columns.values() for line in bin_of(lines, person)]
    return sum(float(line["points"]) for line in chosen), sum(float(line["score"]) for line in chosen)


def bin_of(lines: list[Line], person: Line) -> list[Line]:
    """The line of a column that a person's cell, as the file has it, belongs to; none without a bin.

    Where two parties have a column of one name, the file calls them `bank.age` and `shop.age`.
    """
    column, kind = lines[0]["column"], lines[0]["kind"]
    cell = person.get(f"{lines[0]['party']}.{column}", person.get(column, "")).strip()
    if kind == "constant":
        return lines
    if cell.lower() in MISSING:
        return [line for line in lines if line["missing"] == "1"]
    if kind == "number":
        ranges = [line for line in lines if line["low"] != ""]
        return [line for line in ranges if float(line["low"]) <= float(cell) < float(line["high"])]
    # Flags are written small, categories without a list are hashed, and what a list lacks is "other".
    bucket = int.from_bytes(hashlib.sha256(cell.encode()).digest()[:8], "big") % 64
    readings = (cell, cell.lower(), f"bucket {bucket}", "other")
    found = [line for word in readings for line in lines if word in json.loads(line["values"] or "[]")]
    return found[:1]


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit("python examples/score_from_csv.py CARD.csv PEOPLE.csv")
    with Path(sys.argv[1]).open() as file:
        lines = list(csv.DictReader(file))
    with Path(sys.argv[2]).open() as file:
        for someone in csv.DictReader(file):
            points, odds = score(lines, someone)
            print(f"{points:.0f} points, chance {1 / (1 + math.exp(-odds)):.3f}")
