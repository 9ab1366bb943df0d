"""`securevfl data`: which data sets there are, and what is in one of them."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from securevfl.data import DatasetInfo

# A narrow terminal leaves out the descriptions, never the name that one has to type.
_LEAST_DESCRIPTION = 24


def data(
    name: Annotated[
        str | None,
        typer.Argument(help="A data set, such as breast-cancer or synthetic:rows=500; none lists all."),
    ] = None,
    data_folder: Annotated[
        Path | None, typer.Option("--data-folder", help="Folder with the set's own files, .gz accepted.")
    ] = None,
    parties: Annotated[
        int | None, typer.Option("--parties", help="Split the columns over this many parties.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the data sets and what combines with what, or describe one data set."""
    from securevfl.data import DATASETS, VerticalData
    from securevfl.data.registry import find_info

    if name is None:
        facts: dict[str, Any] = {
            "datasets": [_facts(key, info) for key, info in DATASETS.items()],
            "algorithms": combinations(),
        }
    else:
        info = find_info(name)
        facts = _facts(name, info)
        # Without the folder the entry itself is the answer; with it the files are read.
        if data_folder is not None or parties is not None or not info.needs_folder:
            facts["loaded"] = VerticalData.load(name, parties=parties, folder=data_folder).describe()
    if json:
        typer.echo(json_format.dumps(facts, allow_nan=False))
        return
    console = Console()
    if name is None:
        console.print(_listing(facts["datasets"], console.width))
        console.print(
            "Describe one with: securevfl data NAME [--data-folder DIR] [--parties M]", markup=False
        )
        console.print(_combinations_table(facts["algorithms"]))
    else:
        _show(console, facts)


def combinations() -> dict[str, list[str]]:
    """Algorithm -> the protocols it runs on."""
    from securevfl.algorithms import ALGORITHMS

    return {name: list(algorithm.protocols) for name, algorithm in ALGORITHMS.items()}


def _combinations_table(algorithms: dict[str, list[str]]) -> Table:
    from securevfl.settings.plan import PROTOCOLS

    table = Table(title="What combines with what (--algorithm, --protocol)", box=SIMPLE_HEAD)
    table.add_column("algorithm", no_wrap=True)
    for protocol in PROTOCOLS:
        table.add_column(protocol, justify="center", no_wrap=True)
    for name, protocols in algorithms.items():
        table.add_row(name, *("yes" if protocol in protocols else "-" for protocol in PROTOCOLS))
    return table


def _facts(name: str, info: DatasetInfo) -> dict[str, Any]:
    return {
        "name": name,
        "description": info.description,
        "task": info.task,
        "rows": info.rows,
        "test_rows": info.test_rows,
        "features": info.features,
        "needs_folder": info.needs_folder,
        "files": list(info.files),
        "loaded": None,
    }


def _listing(entries: list[dict[str, Any]], width: int) -> Table:
    table = Table(title="Data sets", box=SIMPLE_HEAD)
    columns = {
        "name": [entry["name"] for entry in entries],
        "task": [entry["task"] for entry in entries],
        "rows": [_rows(entry) for entry in entries],
        "features": [str(entry["features"]) for entry in entries],
        "folder": ["needed" if entry["needs_folder"] else "" for entry in entries],
    }
    for heading, cells in columns.items():
        least = max(len(cell) for cell in (heading, *cells))
        table.add_column(heading, min_width=least)
        width -= least + 3
    lines = [list(cells) for cells in zip(*columns.values(), strict=True)]
    if width >= _LEAST_DESCRIPTION:
        table.add_column("what", no_wrap=True, overflow="ellipsis", max_width=width - 4)
        for line, entry in zip(lines, entries, strict=True):
            line.append(entry["description"])
    for line in lines:
        table.add_row(*line)
    return table


def _rows(entry: dict[str, Any]) -> str:
    return f"{entry['rows']} + {entry['test_rows']}" if entry["test_rows"] else str(entry["rows"])


def _show(console: Console, facts: dict[str, Any]) -> None:
    console.print(f"{facts['name']}: {facts['description']}", markup=False)
    found = facts["loaded"]
    if found is None:
        console.print(f"{facts['task']}, {_rows(facts)} rows x {facts['features']} features", markup=False)
        console.print(
            f"Give --data-folder with {', '.join(facts['files'])} (or .gz) to read it.", markup=False
        )
        return
    rows = found["rows"]
    console.print(
        f"{found['task']}, {rows['train']} training + {rows['test']} test rows, {found['features']} features"
    )
    console.print(_parties(found))
    console.print(_labels(found["labels"]))
    for note in found["notes"]:
        console.print(f"Note: {note}", markup=False)


def _parties(found: dict[str, Any]) -> Table:
    table = Table(title="Parties", box=SIMPLE_HEAD)
    for heading in ("party", "features", "with public bounds", "labels"):
        table.add_column(heading)
    for party in found["parties"]:
        holds = "yes" if party["name"] == found["label_holder"] else ""
        table.add_row(
            party["name"], str(party["features"]), f"{party['bounded']} of {party['features']}", holds
        )
    return table


def _labels(labels: dict[str, Any]) -> Table:
    table = Table(title="Labels", box=SIMPLE_HEAD)
    if "classes" in labels:
        for heading in ("class", "training", "test"):
            table.add_column(heading)
        total_train, total_test = sum(labels["train"]), sum(labels["test"])
        for value, train, test in zip(labels["classes"], labels["train"], labels["test"], strict=True):
            table.add_row(
                str(value), f"{train} ({train / total_train:.1%})", f"{test} ({test / total_test:.1%})"
            )
        return table
    for heading in ("part", "min", "mean", "max", "deviation"):
        table.add_column(heading)
    for part in ("train", "test"):
        spread = labels[part]
        table.add_row(part, *(f"{spread[key]:.4g}" for key in ("min", "mean", "max", "deviation")))
    return table
