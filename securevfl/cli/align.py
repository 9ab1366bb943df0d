"""`securevfl align`: the rows that several parties' tables have in common."""

from __future__ import annotations

import csv
import io
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.errors import DataError, InputError
from securevfl.files import write_text

if TYPE_CHECKING:
    from securevfl.protocols.alignment import Alignment

REVEALED = {
    "private": "every party learns which of its own IDs all have, and the sizes of all lists; with three or"
    " more parties the first also how many IDs any of the lists have in common",
    "helper": "every party learns which of its own IDs all have, and the sizes of all lists; the helper the"
    " sizes, and how many IDs any of the lists have in common",
    "none": "every party learns whether all have the same IDs",
}

Rows = list[list[str]]


def align(
    files: Annotated[
        list[Path], typer.Argument(help="One CSV file with a header per party, leader first; or a data.toml.")
    ],
    id_column: Annotated[str, typer.Option("--id-column", help="Name of the column with the IDs.")] = "id",
    out: Annotated[
        Path, typer.Option("--out", help="Folder for each party's rows of the common IDs.")
    ] = Path("aligned"),
    normalise: Annotated[
        str, typer.Option("--normalise", help="How IDs are compared: exact, trim, trim-casefold.")
    ] = "exact",
    kind: Annotated[
        str,
        typer.Option("--kind", help="How: private, helper (a neutral one compares), none (all the same)."),
    ] = "private",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the IDs that all parties have, and keep those rows, in the same order, for each party.

    All parties run in this process: it tries out and tests an alignment. Organisations that may not see each
    other's IDs run the same roles on their own machines.
    """
    from securevfl.protocols.alignment import PrivateAlignment

    if len(files) == 1 and files[0].suffix.lower() == ".toml":
        files, ids, tables = _described(files[0])
    else:
        tables = [_read(path, id_column) for path in files]
        ids = [id_column] * len(files)
    if len(files) < 2:
        raise InputError(f"{len(files)} file was given; alignment needs one per party, at least 2")
    protocol = PrivateAlignment(parties=len(files), normalisation=normalise, kind=kind)
    columns = zip(tables, ids, strict=True)
    results = protocol.align([[row[header.index(own)] for row in rows] for (header, rows), own in columns])
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"folder {out} cannot be made: {error.strerror}") from None
    parties = [
        {"file": str(path), "rows": len(rows), "out": str(_write(out, index, path, header, rows, result))}
        for index, (path, (header, rows), result) in enumerate(zip(files, tables, results, strict=True))
    ]
    _report({"common": len(results[0].rows), "parties": parties, "revealed": REVEALED[kind]}, json)


def _described(path: Path) -> tuple[list[Path], list[str], list[tuple[list[str], Rows]]]:
    """The files, ID columns and tables of a description, which need not name the label yet."""
    from securevfl.data.described import read_source
    from securevfl.data.description import read_description

    described = read_description(path, complete=False)
    files, ids, tables = [], [], []
    for party in described.parties:
        table, libsvm = read_source(party.file, party.delimiter)
        own = "row" if libsvm else party.id
        if own not in table.header:
            raise DataError(f"{described.where('id')}: {party.file.name} has no ID column {own!r}")
        files.append(party.file)
        ids.append(own)
        tables.append((list(table.header), [list(row) for row in zip(*table.cells, strict=True)]))
    return files, ids, tables


def _read(path: Path, id_column: str) -> tuple[list[str], Rows]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
    except FileNotFoundError:
        from securevfl.data.readers import not_found

        raise not_found(path) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is no CSV file in UTF-8: {error}") from error
    if header.count(id_column) != 1:
        raise DataError(
            f"{path} has {header.count(id_column)} columns {id_column!r}; its columns are {header}"
        )
    rows = [row for row in rows if row]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(header):
            raise DataError(f"{path}: row {number} has {len(row)} fields, the header has {len(header)}")
    return header, rows


def _write(out: Path, index: int, path: Path, header: list[str], rows: Rows, result: Alignment) -> Path:
    # The number keeps two parties' files of the same name apart.
    target = out / f"p{index}-{path.stem}.csv"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows[row] for row in result.rows.tolist())
    write_text(target, text.getvalue())
    return target


def _report(facts: dict[str, Any], json: bool) -> None:
    if json:
        typer.echo(json_format.dumps(facts))
        return
    for party in facts["parties"]:
        typer.echo(f"{party['file']}: {facts['common']} of {party['rows']} rows -> {party['out']}")
    typer.echo(f"Revealed: {facts['revealed']}.")
