"""Scores people with a scorecard's CSV and plain Python, as the run itself does."""

import csv
import json
import math
import sys
from pathlib import Path


def score(card: list[dict[str, str]], person: dict[str, str], label: str = "") -> tuple[float, float]:
    """Points and log odds of a positive label, or of one of several classes (`label`)."""
    card = [line for line in card if line["label"] == label]
    chosen = [line for line in card if line["kind"] == "constant"]
    for line in card:
        cell, values = person.get(line["column"], ""), json.loads(line["values"] or "[]")
        if cell == "":
            inside = line["missing"] == "1"
        elif line["kind"] == "number":
            inside = line["low"] != "" and float(line["low"]) <= float(cell) < float(line["high"])
        else:
            inside = cell in values
        chosen += [line] if inside and line["column"] else []
    return sum(float(line["points"]) for line in chosen), sum(float(line["score"]) for line in chosen)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit("python examples/score_from_csv.py CARD.csv PEOPLE.csv")
    with Path(sys.argv[1]).open() as file:
        lines = list(csv.DictReader(file))
    with Path(sys.argv[2]).open() as file:
        for someone in csv.DictReader(file):
            points, odds = score(lines, someone)
            print(f"{points:.0f} points, chance {1 / (1 + math.exp(-odds)):.3f}")
