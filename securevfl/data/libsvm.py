"""Files in LIBSVM form: `label index:value index:value ...`, one record per line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from securevfl.errors import DataError

from .build import Rows, Settings, build
from .checks import Block
from .files import read_text
from .labels import raw_labels
from .split import ColumnSplit
from .vertical import VerticalData

# Up to this width dense rows are small and faster to train on; above it only thin data stays sparse.
_NARROW = 1024
_THIN = 0.2


def from_libsvm(
    train_file: Path | str,
    test_file: Path | str | None,
    *,
    n_features: int | None,
    parties: ColumnSplit,
    bounds: Any,
    keep_sparse: bool | None,
    name: str | None,
    **options: Any,
) -> VerticalData:
    """See `VerticalData.from_libsvm`."""
    parsed = [read_libsvm(file) for file in (train_file, test_file) if file is not None]
    found = max(columns for _, _, columns in parsed)
    total = found if n_features is None else n_features
    if total < max(found, 1):
        raise DataError(f"n_features is {total}, but {Path(train_file).name} has a feature {found}")
    matrices = [_with_columns(matrix, total) for _, matrix, _ in parsed]
    if keep_sparse is None:
        keep_sparse = total > _NARROW and matrices[0].nnz < _THIN * matrices[0].shape[0] * total
    rows: list[Rows] = []
    for (labels, _, _), matrix in zip(parsed, matrices, strict=True):
        first = len(rows[0].ids) if rows else 0
        block: Block = matrix if keep_sparse else matrix.toarray()
        rows.append(Rows(blocks=(block,), labels=labels, ids=np.arange(first, first + len(labels))))
    settings = Settings(
        parties=("p0",),
        columns=(tuple(f"f{i + 1}" for i in range(total)),),
        label_holder="p0",
        name=name or Path(train_file).name,
        bounds=bounds,
        **options,
    )
    return build(rows[0], rows[1] if len(rows) > 1 else None, settings).split(parties)


def read_libsvm(path: Path | str) -> tuple[NDArray[Any], Any, int]:
    """Labels, CSR matrix (float32) and the largest feature index of a file.

    Raises:
        DataError: A line is not of the form; the message names the line.
    """
    heads: list[str] = []
    tokens: list[str] = []
    lengths: list[int] = []
    lines: list[int] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        head, *features = line.partition("#")[0].split() or [""]
        if not head:
            continue
        heads.append(head)
        tokens += features
        lengths.append(len(features))
        lines.append(number)
    if not heads:
        raise DataError(f"{path} has no records")
    for head, number in zip(heads, lines, strict=True):
        if not _is_float(head):
            raise DataError(f"{path}, line {number}: expected a numeric label first, found {head!r}")
    try:
        matrix = _matrix(_pairs(tokens), lengths)
    except ValueError:
        raise DataError(_first_bad_line(path, tokens, lengths, lines)) from None
    return raw_labels(np.array(heads, dtype=np.float64)), matrix, matrix.shape[1]


def _pairs(tokens: list[str]) -> NDArray[np.float64]:
    # Joined and split again in one go, which is only right if every token has exactly one colon.
    if any(token.count(":") != 1 for token in tokens):
        raise ValueError("not index:value")
    cells = ":".join(tokens).split(":") if tokens else []
    return np.array(cells, dtype=np.float64).reshape(-1, 2)


def _matrix(pairs: NDArray[np.float64], lengths: list[int]) -> Any:
    index = pairs[:, 0]
    row = np.repeat(np.arange(len(lengths)), lengths)
    ascending = (np.diff(index) > 0) | (np.diff(row) > 0)
    whole = (index >= 1) & (index == np.floor(index))
    if not whole.all() or not ascending.all():
        raise ValueError("bad index")
    columns = int(index.max()) if len(index) else 0
    if columns > np.iinfo(np.int32).max:
        raise ValueError("index too large")
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    with np.errstate(over="ignore"):
        values = pairs[:, 1].astype(np.float32)
    return sparse.csr_array((values, (index - 1).astype(np.int32), starts), shape=(len(lengths), columns))


def _first_bad_line(path: Path | str, tokens: list[str], lengths: list[int], lines: list[int]) -> str:
    start = 0
    for number, length in zip(lines, lengths, strict=True):
        last = 0
        for token in tokens[start : start + length]:
            index, colon, value = token.partition(":")
            fine = bool(colon) and index.isdecimal() and last < int(index) < 2**31 and _is_float(value)
            if not fine:
                return f"{path}, line {number}: {token!r} is not index:value with indices that ascend from 1"
            last = int(index)
        start += length
    return f"{path} is not in LIBSVM form: label index:value ..."


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return ":" not in text


def _with_columns(matrix: Any, columns: int) -> Any:
    return sparse.csr_array((matrix.data, matrix.indices, matrix.indptr), shape=(matrix.shape[0], columns))
