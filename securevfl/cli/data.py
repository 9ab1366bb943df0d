"""`securevfl data`: which data sets there are, and what is in one of them."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli import completion
from securevfl.cli.show import table, terminal
from securevfl.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from securevfl.data import DatasetInfo

# A narrow terminal leaves out the descriptions, never the name that one has to type.
_LEAST_DESCRIPTION = 24


def data(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME | data.toml | draft FILES...]",
            help="A data set, such as credit or synthetic:rows=500, or a description; none lists all. draft "
            "writes a first description of one file per party.",
            autocompletion=completion.data_sets_and_draft,
        ),
    ] = None,
    data_folder: Annotated[
        Path | None,
        typer.Option(
            "--data-folder",
            help="Folder with the set's own files (.gz accepted), or with a folder of its name.",
        ),
    ] = None,
    parties: Annotated[
        int | None, typer.Option("--parties", help="Split the columns over this many parties.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="draft: the description to write; it must not exist.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the data sets and what combines with what, describe one, or draft a description of files."""
    from securevfl.data import DATASETS, VerticalData
    from securevfl.data.description import is_description
    from securevfl.data.registry import find_info

    first, *files = names or [""]
    if first == "draft":
        _draft(files, out, json)
        return
    if files:
        raise InputError(f"found {len(files) + 1} names; describe one at a time, or write: draft FILES...")
    if out is not None:
        raise InputError("--out belongs to: securevfl data draft FILES... --out data.toml")
    name = first or None
    if name is None:
        facts: dict[str, Any] = {
            "datasets": [_facts(key, info) for key, info in DATASETS.items()],
            "algorithms": combinations(),
        }
    elif is_description(name):
        if parties is not None or data_folder is not None:
            raise InputError(f"{name} names its parties and files itself; give it alone")
        facts = _described(name)
    else:
        info = find_info(name)
        facts = _facts(name, info)
        # Without the folder the entry itself is the answer; with it the files are read.
        if data_folder is not None or parties is not None or not info.needs_folder:
            facts["loaded"] = VerticalData.load(name, parties=parties, folder=data_folder).describe()
    if json:
        typer.echo(json_format.dumps(facts, allow_nan=False))
        return
    console = terminal()
    if name is None:
        console.print(_listing(facts["datasets"], console.width))
        console.print(
            "Describe one with: securevfl data NAME [--data-folder DIR] [--parties M], your own files with: "
            "securevfl data draft FILES... --out data.toml",
            markup=False,
        )
        console.print(_combinations_table(facts["algorithms"]))
    else:
        _show(console, facts)


def _draft(files: list[str], out: Path | None, json: bool) -> None:
    from securevfl.data.draft import draft_description

    if out is None:
        raise InputError("say where the description goes: --out data.toml")
    draft_description(files, out)
    if json:
        typer.echo(json_format.dumps({"out": str(out)}))
        return
    typer.echo(f"{out} is a draft: fill in label, label_holder and task at its top")
    typer.echo("(for regression label_bounds, too), then")
    typer.echo(f"securevfl data {out}")


def _described(path: str) -> dict[str, Any]:
    """What a description says, and what its files hold."""
    from securevfl.data import VerticalData

    data = VerticalData.from_description(path)
    found = data.describe()
    return {
        "name": data.name,
        "description": f"described by {path}",
        "task": data.task,
        "rows": data.n_train + data.n_test,
        "test_rows": 0,
        "features": found["features"],
        "needs_folder": False,
        "files": [],
        "loaded": found,
    }


def combinations() -> dict[str, list[str]]:
    """Algorithm -> the protocols it runs on."""
    from securevfl.algorithms import ALGORITHMS

    return {name: list(algorithm.protocols) for name, algorithm in ALGORITHMS.items()}


def _combinations_table(algorithms: dict[str, list[str]]) -> Table:
    from securevfl.settings.protocols import PROTOCOLS

    shown = table("What combines with what (--algorithm, --protocol)")
    shown.add_column("algorithm", no_wrap=True)
    for protocol in PROTOCOLS:
        shown.add_column(protocol, justify="center", no_wrap=True)
    for name, protocols in algorithms.items():
        shown.add_row(name, *("yes" if protocol in protocols else "-" for protocol in PROTOCOLS))
    return shown


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
    shown = table("Data sets")
    columns = {
        "name": [entry["name"] for entry in entries],
        "task": [entry["task"] for entry in entries],
        "rows": [_rows(entry) for entry in entries],
        "features": [str(entry["features"]) for entry in entries],
        "folder": ["needed" if entry["needs_folder"] else "" for entry in entries],
    }
    for heading, cells in columns.items():
        least = max(len(cell) for cell in (heading, *cells))
        shown.add_column(heading, min_width=least)
        width -= least + 3
    lines = [list(cells) for cells in zip(*columns.values(), strict=True)]
    if width >= _LEAST_DESCRIPTION:
        shown.add_column("what", no_wrap=True, overflow="ellipsis", max_width=width - 4)
        for line, entry in zip(lines, entries, strict=True):
            line.append(entry["description"])
    for line in lines:
        shown.add_row(*line)
    return shown


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
    if found["columns"]:
        console.print(_columns(found["columns"]))
    console.print(_labels(found["labels"]))
    for note in found["notes"]:
        console.print(f"Note: {note}", markup=False)


def _parties(found: dict[str, Any]) -> Table:
    shown = table("Parties", "party", "features", "with public bounds", "labels")
    for party in found["parties"]:
        holds = "yes" if party["name"] == found["label_holder"] else ""
        shown.add_row(
            party["name"], str(party["features"]), f"{party['bounded']} of {party['features']}", holds
        )
    return shown


def _columns(columns: list[dict[str, Any]]) -> Table:
    shown = table("Columns", "party", "column", "kind", "public", "missing")
    for each in columns:
        public = "on a public grid" if each["kind"] == "number" else f"{each['codes']} values"
        if each["bounds"] is not None:
            public = f"{each['bounds'][0]:g} to {each['bounds'][1]:g}"
        kind = f"{each['kind']}, log" if each["scale"] == "log" else each["kind"]
        shown.add_row(each["party"], each["name"], kind, "" if kind == "flag" else public, each["missing"])
    return shown


def _share(count: int, counts: list[int]) -> str:
    return f"{count} ({count / sum(counts):.1%})"


def _labels(labels: dict[str, Any]) -> Table:
    if "classes" in labels:
        shown = table("Labels", "class", "counts as", "training", "test")
        counts = zip(labels["classes"], labels["train"], labels["test"], strict=True)
        for code, (value, *parts) in enumerate(counts):
            shares = (_share(part, labels[name]) for part, name in zip(parts, ("train", "test"), strict=True))
            shown.add_row(str(value), str(code), *shares)
        return shown
    shown = table("Labels", "part", "min", "mean", "max", "deviation")
    for part in ("train", "test"):
        spread = labels[part]
        shown.add_row(part, *(f"{spread[key]:.4g}" for key in ("min", "mean", "max", "deviation")))
    return shown
