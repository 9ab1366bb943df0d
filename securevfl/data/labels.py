"""What kind of task the labels make, and the numbers that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securevfl.data.blocks import shorten
from securevfl.errors import DataError, nearest

Task: TypeAlias = Literal["binary", "multiclass", "regression"]
ClassValue: TypeAlias = str | int | float
TASKS: tuple[Task, ...] = ("binary", "multiclass", "regression")

# Whole-number labels with more distinct values than this are taken as a quantity, not as classes.
_MOST_CLASSES = 30


@dataclass(frozen=True, kw_only=True)
class Coding:
    """How raw labels turn into numbers: the task and, for classes, the original value of each code."""

    task: Task
    classes: tuple[ClassValue, ...]

    def encode(self, labels: NDArray[Any]) -> NDArray[Any]:
        """float32 0/1 (binary), int64 codes (multiclass) or float32 values (regression)."""
        if self.task == "regression":
            return labels.astype(np.float32)
        known = np.asarray(self.classes)
        # Strings against numbers would compare as unequal, never as an error: the types must agree first.
        if (labels.dtype.kind == "U") != (known.dtype.kind == "U"):
            raise DataError(f"labels and classes {shorten(self.classes)} are not of one type")
        order = np.argsort(known)
        places = np.searchsorted(known, labels, sorter=order)
        codes = order[np.where(places == len(known), 0, places)]
        strangers = np.flatnonzero(known[codes] != labels)
        if len(strangers):
            raise DataError(
                f"the label of row {strangers[0] + 1} is not a training label: {shorten(self.classes)}"
            )
        return codes.astype(np.float32 if self.task == "binary" else np.int64)


def raw_labels(values: Any) -> NDArray[Any]:
    """Labels as a flat array of int64, float64 or str; a missing label is NaN or the empty string."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"labels have shape {array.shape}; expected one label per row")
    if array.dtype.kind == "O":
        array = _from_objects(array)
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        return array.astype(np.float64)
    if array.dtype.kind == "U":
        return array
    raise DataError(f"labels of type {array.dtype} cannot be used; expected numbers or text")


def _from_objects(array: NDArray[Any]) -> NDArray[Any]:
    values = array.tolist()
    if any(isinstance(value, str) for value in values):
        return np.array(["" if value is None or value != value else str(value) for value in values])
    try:
        return np.array([np.nan if value is None else value for value in values])
    except ValueError:
        raise DataError("labels are not all numbers or text; expected one label per row") from None


def missing_labels(labels: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a row has no label."""
    if labels.dtype.kind == "U":
        return np.asarray(np.char.str_len(labels) == 0)
    with np.errstate(over="ignore"):
        return ~np.isfinite(labels.astype(np.float32))


def find_coding(labels: NDArray[Any], task: str | None, positive: ClassValue | None = None) -> Coding:
    """The coding of training labels that have no gaps.

    Args:
        labels: Raw labels.
        task: `binary`, `multiclass` or `regression`; None to infer it: text and up to 30 distinct whole
            numbers are classes, anything else is a quantity.
        positive: Binary: the label that counts as 1; the last in sorted order by default.
    """
    if task is not None and task not in TASKS:
        raise DataError(f"unknown task {task!r}; {nearest(task, TASKS)}")
    if task == "regression" and labels.dtype.kind == "U":
        raise DataError("task is regression but the labels are text")
    distinct = np.unique(labels)
    chosen = task or _infer(distinct)
    if len(distinct) < 2:
        raise DataError(f"all {len(labels)} labels are the same; expected at least two values")
    if chosen == "regression":
        return Coding(task="regression", classes=())
    if chosen == "binary" and len(distinct) > 2:
        raise DataError(
            f"task is binary but the labels have {len(distinct)} values{shown_classes(distinct.tolist())}"
        )
    classes = _values(distinct)
    if positive is not None:
        if chosen != "binary" or positive not in classes:
            raise DataError(
                f"positive is {positive!r}; expected one of two labels, found {len(classes)} values"
                f"{shown_classes(classes)}"
            )
        classes = (*(value for value in classes if value != positive), positive)
    return Coding(task="binary" if chosen == "binary" else "multiclass", classes=classes)


def shown_classes(values: Sequence[ClassValue]) -> str:
    """Names of classes; a quantity is a person's own value and is not shown."""
    return f": {shorten(values)}" if len(values) <= _MOST_CLASSES else ""


def _infer(distinct: NDArray[Any]) -> Task:
    whole = distinct.dtype.kind != "f" or bool(np.all(distinct == np.round(distinct)))
    if len(distinct) <= 2:
        return "binary"
    if distinct.dtype.kind == "U" or (whole and len(distinct) <= _MOST_CLASSES):
        return "multiclass"
    return "regression"


def _values(distinct: NDArray[Any]) -> tuple[ClassValue, ...]:
    if distinct.dtype.kind == "f" and np.all(distinct == np.round(distinct)):
        return tuple(int(value) for value in distinct)
    return tuple(distinct.tolist())


def parse_labels(cells: Sequence[str]) -> NDArray[Any]:
    """Labels from text cells: numbers if all filled cells are numbers, else text."""
    filled = [cell for cell in set(cells) if cell.strip().lower() not in ("", "na", "nan", "null")]
    try:
        known = {cell: float(cell) for cell in filled}
    except ValueError:
        return np.array([cell.strip() for cell in cells])
    return np.fromiter((known.get(cell, np.nan) for cell in cells), np.float64, len(cells))
