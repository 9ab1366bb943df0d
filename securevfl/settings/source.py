"""Finds the data that a plan names. Loads no torch, so that a wrong name is told at once."""

from __future__ import annotations

from pathlib import Path

from securevfl.data import VerticalData
from securevfl.data.described import absent_parties, load_with_stand_ins
from securevfl.data.description import is_description
from securevfl.data.readers import is_file_name
from securevfl.errors import DataError
from securevfl.settings.families import DataSource
from securevfl.settings.plan import Plan


def load_planned(plan: Plan, folder: str | None = None) -> VerticalData:
    """Loads the data that a plan names: a known set, a description, or one CSV file per party.

    Args:
        plan: The plan.
        folder: Look for the files here instead of where the plan says; or another description (`.toml`).

    Raises:
        DataError: Nothing is named, or it cannot be read.
    """
    if folder is not None and is_description(folder):
        return VerticalData.from_description(folder, seed=plan.seed)
    if not plan.source.data:
        raise DataError("name the data: --data breast-cancer, --data data.toml, or --data a.csv --data b.csv")
    if any(is_description(name) for name in plan.source.data.split(",")):
        return _load_described(plan, folder)
    names = named_files(plan.source.data)
    if not names:
        where = folder or plan.source.data_folder or None
        return VerticalData.load(
            plan.source.data, parties=plan.source.parties or None, folder=where, seed=plan.seed
        )
    if plan.source.parties not in (0, len(names)):
        raise DataError(f"{len(names)} files are {len(names)} parties, not {plan.source.parties}")
    files = [Path(folder) / Path(name).name if folder else Path(name) for name in names]
    loaded = VerticalData.from_csv(
        files, id_column=plan.source.id_column, label_column=plan.source.label_column, seed=plan.seed
    )
    if loaded.task == "multiclass" and not isinstance(loaded.classes[0], str):
        raise DataError(
            f"column {plan.source.label_column!r} holds {len(loaded.classes)} different whole numbers, "
            f"classes or a quantity; say which: securevfl data draft {' '.join(names)} --out data.toml, "
            "and fill in its task"
        )
    return loaded


def rows_at_hand(plan: Plan, *, stand_ins: bool) -> tuple[VerticalData, tuple[str, ...]]:
    """The data that a plan names, and whose files were replaced by chance values, if they may be.

    Raises:
        DataError: It cannot be read.
    """
    if stand_ins and is_description(plan.source.data):
        absent = absent_parties(plan.source.data)
        if absent:
            return load_with_stand_ins(plan.source.data, seed=plan.seed), absent
    return load_planned(plan), ()


def _load_described(plan: Plan, folder: str | None) -> VerticalData:
    source = plan.source
    if not is_description(source.data):
        raise DataError(f"a description names all files itself; give it alone, not {source.data}")
    if source.parties:
        raise DataError(f"--parties is for named data sets; {source.data} says who the parties are")
    for name in ("id_column", "label_column"):
        if getattr(source, name) != getattr(DataSource(), name):
            raise DataError(f"{name} is for CSV files; {source.data} says it itself")
    path = Path(folder) / Path(source.data).name if folder else Path(source.data)
    return VerticalData.from_description(path, seed=plan.seed)


def named_files(data: str) -> list[str]:
    """The files that a plan's data is; none for the name of a data set."""
    names = data.split(",")
    return names if any(map(is_file_name, names)) else []


def shown_data(data: str) -> str:
    """The data as reports name it: files without the folders of whoever has them."""
    return ", ".join(Path(name).name for name in named_files(data)) or data
