"""The data of a vertical federation: one block of features per party, one label per record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data import sparse
from securevfl.data.blocks import Block, Bounds, flat, shorten, width
from securevfl.data.columns import Columns, toml_key
from securevfl.data.labels import ClassValue, Task
from securevfl.data.mapped import Mapped
from securevfl.data.scaling import SCALINGS, Scale, Scaling, joined_columns, public, standard, unscaled
from securevfl.data.split import ColumnSplit, Shares, divide_columns
from securevfl.errors import DataError, nearest


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerticalData:
    """Immutable vertically split data; build it with one of the `from_...` methods or `load`.

    All arrays are read-only. Row i of every block, of the labels and of the IDs is the same record. The
    object holds everybody's features in one place, as a simulation needs it; it protects nothing by itself.

    Attributes:
        parties: Names of the parties that hold features.
        train: One block per party: float32, rows first, or a scipy CSR array where sparse.
        test: The same for the test part.
        y_train: float32 0/1 (binary), int64 class codes (multiclass) or float32 values (regression).
        y_test: The same for the test part.
        task: `binary`, `multiclass` or `regression`.
        classes: Original label value of each class code; empty for regression.
        ids_train: Record IDs, int64 or text; no ID is in both parts.
        ids_test: The same for the test part.
        columns: Feature names per party, in the order of the flattened block.
        bounds: Public (low, high) per column and party, NaN where unknown; None for a party without any.
        label_holder: The party that holds the labels; not among `parties` if it has no features.
        name: What the data is called in reports.
        notes: What a reader should know, such as the rows that a join lost.
        rows_lost: Rows that each of `parties` lost in the join on IDs.
        scaling: `none`, `public` or `standard`. `standard` couples the records of a party.
        label_scaling: (mean, deviation) that regression labels were standardised with, or None.
        image_size: (height, width) where the columns of all parties together are the pixels of an image.
        scales: Per party, the scalings that its rows went through, in order; new rows must take the same way.
        absent: Parties whose features are elsewhere, in a federation over a network; their blocks are NaN.
        labels_absent: True where the labels are elsewhere.
        label_bounds: Public (low, high) of regression labels; None where unknown.
        described: Per party its columns as a description names them, with raw values; empty for data that was
            not described. `train` and `test` are coded from them.
    """

    parties: tuple[str, ...]
    train: tuple[Block, ...]
    test: tuple[Block, ...]
    y_train: NDArray[Any]
    y_test: NDArray[Any]
    task: Task
    classes: tuple[ClassValue, ...]
    ids_train: NDArray[Any]
    ids_test: NDArray[Any]
    columns: tuple[tuple[str, ...], ...]
    bounds: Bounds
    label_holder: str
    name: str
    notes: tuple[str, ...] = ()
    rows_lost: tuple[int, ...] = ()
    scaling: Scaling = "none"
    label_scaling: tuple[float, float] | None = None
    image_size: tuple[int, int] | None = None
    scales: tuple[tuple[Scale, ...], ...] = ()
    absent: tuple[str, ...] = ()
    labels_absent: bool = False
    label_bounds: tuple[float, float] | None = None
    described: tuple[Columns, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.parties)
        for what in (self.train, self.test, self.columns, self.bounds, self.described or self.parties):
            if len(what) != count:
                raise DataError(
                    f"{self.name}: {count} parties but {len(what)} blocks, column lists or bounds"
                )
        for blocks, labels, ids in self._parts():
            rows = {block.shape[0] for block in blocks} | {len(labels), len(ids)}
            if len(rows) != 1:
                raise DataError(f"{self.name}: blocks, labels and IDs differ in length: {sorted(rows)}")
        if [width(block) for block in self.train] != [len(names) for names in self.columns]:
            raise DataError(f"{self.name}: column names do not match the widths of the blocks")
        for blocks, labels, ids in self._parts():
            for array in (*blocks, labels, ids):
                _freeze(array)

    def _parts(self) -> tuple[tuple[tuple[Block, ...], NDArray[Any], NDArray[Any]], ...]:
        return (self.train, self.y_train, self.ids_train), (self.test, self.y_test, self.ids_test)

    @property
    def n_train(self) -> int:
        """Number of training records."""
        return len(self.y_train)

    @property
    def n_test(self) -> int:
        """Number of test records."""
        return len(self.y_test)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of features of each party."""
        return tuple(width(block) for block in self.train)

    @property
    def outputs(self) -> int:
        """Number of outputs a model needs: one per class for multiclass, else 1."""
        return len(self.classes) if self.task == "multiclass" else 1

    @property
    def tabular(self) -> bool:
        """False where rows are images or sequences."""
        return self.image_size is None and all(block.ndim == 2 for block in self.train)

    def __repr__(self) -> str:
        parties = ", ".join(
            f"{name}: {columns}" for name, columns in zip(self.parties, self.widths, strict=True)
        )
        return f"VerticalData({self.name}, {self.task}, {self.n_train} + {self.n_test} rows, {{{parties}}})"

    def describe(self) -> dict[str, Any]:
        """Everything worth knowing before training, ready for JSON."""
        return _describe(self)

    def split(self, parties: ColumnSplit) -> VerticalData:
        """The same records with the columns divided anew; blocks become two-dimensional.

        Args:
            parties: A number M (contiguous blocks whose sizes differ by at most one), a list of column
                counts, or a mapping from party names to column names, column indices or names of present
                parties. Columns that a mapping does not name are left out. The columns of described data are
                those of its description.

        Returns:
            New data whose first party holds the labels, unless the label holder has no features.
        """
        shares, described = self._shares(parties)
        names = [column for columns in self.columns for column in columns]
        limits = np.concatenate([_or_unknown(b, n) for b, n in zip(self.bounds, self.widths, strict=True)])
        used = sum(len(numbers) for _, numbers in shares)
        note = (
            (f"{len(names) - used} of {len(names)} columns left out by the split",)
            if used < len(names)
            else ()
        )
        tables = [limits[numbers] for _, numbers in shares]
        return replace(
            self,
            parties=tuple(name for name, _ in shares),
            train=_take_columns(self.train, shares),
            test=_take_columns(self.test, shares),
            columns=tuple(tuple(names[i] for i in numbers) for _, numbers in shares),
            bounds=tuple(None if np.isnan(table).all() else table for table in tables),
            label_holder=shares[0][0] if self.label_holder in self.parties else self.label_holder,
            notes=self.notes + note,
            rows_lost=(),
            described=described,
            scales=tuple(joined_columns(self.scales, numbers) for _, numbers in shares)
            if self.scales
            else (),
        )

    def _shares(self, parties: ColumnSplit) -> tuple[Shares, tuple[Columns, ...]]:
        """Numbers of the features that go to each party; features of one described column stay together."""
        if not self.described:
            return divide_columns(parties, dict(zip(self.parties, self.columns, strict=True))), ()
        views = {
            party: [column.name for column in mine.columns]
            for party, mine in zip(self.parties, self.described, strict=True)
        }
        joined = [column for mine in self.described for column in mine.columns]
        ends = np.cumsum([0, *(len(column.features) for column in joined)])
        train, test = (
            np.concatenate([getattr(mine, part) for mine in self.described], axis=1)
            for part in ("train", "test")
        )
        shares, described = [], []
        for name, numbers in divide_columns(parties, views):
            shares.append((name, np.concatenate([np.arange(ends[i], ends[i + 1]) for i in numbers])))
            described.append(
                Columns(
                    source=self.described[0].source,
                    columns=tuple(joined[i] for i in numbers),
                    train=train[:, numbers],
                    test=test[:, numbers],
                )
            )
        return shares, tuple(described)

    @property
    def unbounded(self) -> tuple[str, ...]:
        """Features without public bounds, as party.feature."""
        return tuple(
            f"{party}.{name}"
            for party, names, table in zip(self.parties, self.columns, self.bounds, strict=True)
            for name, low in zip(names, _or_unknown(table, len(names))[:, 0], strict=True)
            if np.isnan(low)
        )

    def bounds_to_add(self) -> str:
        """What to write into the description so that every feature has public bounds; empty if all have."""
        for party, mine in zip(self.parties, self.described, strict=False):
            for column in mine.columns:
                if mine.source and column.kind == "number" and column.bounds is None:
                    line = f", line {column.line}" if column.line else ""
                    return (
                        f"{mine.source}{line}: write bounds that everybody may know, under "
                        f"[parties.{party}.columns]: {toml_key(column.name)} = {{ bounds = [LOW, HIGH] }}"
                    )
        return ""

    def scaled(self, how: Scaling, *, label: bool = False) -> VerticalData:
        """Scale the features, and on request the labels of a regression.

        Args:
            how: `standard` fits mean and deviation per party on its own training rows; this couples the
                records of a party, so it rules out accounting per record. `public` maps the public bounds to
                [-1, 1] and clips values outside them; it looks at no row. `none` leaves the features alone.
            label: Standardise regression labels on the training part; kept in `label_scaling`.
        """
        if how not in SCALINGS:
            raise DataError(f"unknown scaling {how!r}; {nearest(how, SCALINGS)}")
        data = self._label_scaled() if label else self
        if how == "standard":
            fitted = [
                unscaled(columns) if party in data.absent else standard(block)
                for party, block, columns in zip(data.parties, data.train, data.widths, strict=True)
            ]
            return data._with_scales(fitted, bounds=tuple(None for _ in data.parties), scaling="standard")
        return data._public_scaled() if how == "public" else data

    def _public_scaled(self) -> VerticalData:
        tables = [_or_unknown(b, n) for b, n in zip(self.bounds, self.widths, strict=True)]
        if self.unbounded:
            hint = self.bounds_to_add()
            raise DataError(
                f"public scaling needs public bounds for every column; none for {shorten(self.unbounded)}"
                + (f". {hint}" if hint else "")
            )
        return self._with_scales(
            [
                unscaled(len(table)) if party in self.absent else public(block, table)
                for party, block, table in zip(self.parties, self.train, tables, strict=True)
            ],
            bounds=tuple(np.tile((-1.0, 1.0), (len(table), 1)) for table in tables),
            scaling="public" if self.scaling == "none" else self.scaling,
        )

    def _with_scales(self, steps: Sequence[Scale], **changes: Any) -> VerticalData:
        """Both parts scaled, and the scales noted."""
        before = self.scales or ((),) * len(self.parties)
        return replace(
            self,
            train=self._stepped(steps, self.train),
            test=self._stepped(steps, self.test),
            scales=tuple((*done, step) for done, step in zip(before, steps, strict=True)),
            **changes,
        )

    def _stepped(self, steps: Sequence[Scale], blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(
            block if party in self.absent else step(block)
            for party, step, block in zip(self.parties, steps, blocks, strict=True)
        )

    def _label_scaled(self) -> VerticalData:
        if self.task != "regression":
            raise DataError(f"labels of a {self.task} task are classes; only regression labels can be scaled")
        if self.label_scaling is not None or self.labels_absent:
            return self
        mean = float(self.y_train.mean(dtype=np.float64))
        deviation = float(self.y_train.std(dtype=np.float64)) or 1.0
        return replace(
            self,
            y_train=((self.y_train - mean) / deviation).astype(np.float32),
            y_test=((self.y_test - mean) / deviation).astype(np.float32),
            label_scaling=(mean, deviation),
        )

    def images(self) -> VerticalData:
        """Image data with each party's band of whole pixel rows as a block (records, 1, rows, width)."""
        if self.image_size is None:
            raise DataError(f"{self.name} is not an image data set")
        height, columns = self.image_size
        pixels = pixel_names(height, columns)
        for party, names in zip(self.parties, self.columns, strict=True):
            start = pixels.index(names[0])
            if start % columns or len(names) % columns or names != pixels[start : start + len(names)]:
                raise DataError(
                    f"party {party} holds {len(names)} pixels that are not whole rows of {columns}; choose a "
                    f"number of parties that divides {height}"
                )
        return replace(
            self,
            train=tuple(block.reshape(len(block), 1, -1, columns) for block in self.train),
            test=tuple(block.reshape(len(block), 1, -1, columns) for block in self.test),
        )

    @classmethod
    def from_arrays(
        cls,
        blocks: Sequence[Any] | Mapping[str, Any],
        labels: Any,
        ids: Any = None,
        *,
        test: Sequence[Any] | None = None,
        parties: Sequence[str] | None = None,
        columns: Sequence[Sequence[str]] | None = None,
        bounds: Any = None,
        label_holder: str | None = None,
        test_fraction: float = 0.2,
        seed: int = 0,
        task: str | None = None,
        missing: str = "error",
        name: str = "arrays",
    ) -> VerticalData:
        """Data from arrays in memory, which are copied; memory-mapped float32 stays in its file.

        Args:
            blocks: One array (or scipy sparse matrix) of features per party, or a mapping from party names.
            labels: One label per row of the label holder's block: numbers or text.
            ids: None (row numbers); one sequence of IDs for all parties; or a list with one sequence per
                party, in which case the blocks are joined on the common IDs.
            test: `(blocks, labels)` or `(blocks, labels, ids)` of a separate test part. Without it a seeded
                share `test_fraction` of the rows is set apart, stratified by class.
            parties: Party names; p0, p1, ... by default.
            columns: Feature names per party; x0, x1, ... by default.
            bounds: Public bounds: one `(low, high)` for all columns, a mapping column -> pair, or one entry
                per party (None, a pair, or one pair per column).
            label_holder: The party with the labels, the first by default; `server` stands for a label holder
                without features, and `ids` must then be common to all.
            test_fraction: Share of rows for the test part.
            seed: Seed of the train/test split.
            task: `binary`, `multiclass` or `regression`; inferred from the labels by default.
            missing: `error`, or `drop` to leave out rows with NaN or infinite values and say how many.
            name: What to call the data in reports.

        Raises:
            DataError: The input cannot be used; the message names the party, column or ID.
        """
        return LOADERS["arrays"](
            blocks,
            labels,
            ids,
            test=test,
            parties=parties,
            columns=columns,
            bounds=bounds,
            label_holder=label_holder,
            test_fraction=test_fraction,
            seed=seed,
            task=task,
            missing=missing,
            name=name,
        )

    @classmethod
    def from_csv(
        cls,
        files: Sequence[Path | str] | Mapping[str, Path | str],
        *,
        id_column: str | Sequence[str],
        label_column: str,
        test_files: Sequence[Path | str] | None = None,
        parties: Sequence[str] | None = None,
        leave_out: Sequence[str] = (),
        one_hot: Mapping[str, Sequence[str | int]] | None = None,
        bounds: Mapping[str, tuple[float, float]] | None = None,
        delimiter: str = ",",
        keep_in: Path | str | None = None,
        test_fraction: float = 0.2,
        seed: int = 0,
        task: str | None = None,
        missing: str = "error",
        name: str | None = None,
    ) -> VerticalData:
        """Data from one CSV file per party, rows in any order, joined on the common IDs.

        Exactly one file has the label column; its party is the label holder. If that file has no features its
        party holds the labels only and is not among `parties`.

        Args:
            files: One file per party (plain, .gz or .zip), or a mapping from party names to files.
            id_column: Name of the ID column, or one name per file.
            label_column: Name of the label column.
            test_files: The same columns for a separate test part, one file per party in the same order.
            parties: Party names in the order of the files; p0, p1, ... by default.
            leave_out: Columns to ignore, in whichever file they are.
            one_hot: Column -> its possible values, known in advance, for columns that hold text or codes.
            bounds: Public (low, high) of columns.
            delimiter: What separates the cells.
            keep_in: Folder for data larger than memory. The files, CSV (plain or .gz) or Parquet, are read in
                pieces, and the features stay there, in files that only you can read; delete them afterwards.
            test_fraction: Share of rows for the test part.
            seed: Seed of the train/test split.
            task: `binary`, `multiclass` or `regression`; inferred from the labels by default.
            missing: `error`, or `drop` to leave out rows with missing values and say how many.
            name: What to call the data in reports; the file names by default.
        """
        return LOADERS["csv"](
            files,
            id_column=id_column,
            label_column=label_column,
            test_files=test_files,
            parties=parties,
            leave_out=leave_out,
            one_hot=one_hot or {},
            bounds=bounds,
            delimiter=delimiter,
            keep_in=keep_in,
            test_fraction=test_fraction,
            seed=seed,
            task=task,
            missing=missing,
            name=name,
        )

    @classmethod
    def from_description(cls, path: Path | str, *, seed: int = 0) -> VerticalData:
        """Data from the files that a description (`data.toml`) names, joined on the common IDs.

        Categories become 0/1 features by public lists or buckets, missing values what the description says.
        A record's features depend on the description and on its own row alone.

        Args:
            path: The description; its files are looked for beside it.
            seed: Seed of the train/test split, where the description sets a share apart.

        Raises:
            DataError: The description or a file cannot be used; the message names the line.
        """
        return LOADERS["description"](path, seed=seed)

    @classmethod
    def from_libsvm(
        cls,
        train_file: Path | str,
        test_file: Path | str | None = None,
        *,
        n_features: int | None = None,
        parties: ColumnSplit = 2,
        bounds: Any = None,
        sparse: bool | None = None,
        test_fraction: float = 0.2,
        seed: int = 0,
        task: str | None = None,
        name: str | None = None,
    ) -> VerticalData:
        """Data from a file in LIBSVM form (`label index:value ...`, indices from 1), split by columns.

        Args:
            train_file: Plain, .gz or .zip.
            test_file: A separate test part, or None to set apart a share of the rows.
            n_features: Number of features; by default the largest index found in either file.
            parties: How to split the columns; see `split`.
            bounds: Public bounds, as in `from_arrays`, of the columns before the split.
            sparse: Keep CSR blocks (True) or make dense ones (False); by default sparse if wide and thin.
            test_fraction: Share of rows for the test part where there is no test file.
            seed: Seed of the train/test split.
            task: `binary`, `multiclass` or `regression`; inferred from the labels by default.
            name: What to call the data in reports; the file name by default.
        """
        return LOADERS["libsvm"](
            train_file,
            test_file,
            n_features=n_features,
            parties=parties,
            bounds=bounds,
            keep_sparse=sparse,
            test_fraction=test_fraction,
            seed=seed,
            task=task,
            name=name,
        )

    @classmethod
    def load(
        cls,
        name: str,
        *,
        parties: ColumnSplit | None = None,
        folder: Path | str | None = None,
        seed: int = 0,
        test_fraction: float = 0.2,
    ) -> VerticalData:
        """A data set by name; `securevfl.data.DATASETS` lists them.

        Args:
            name: Such as `breast-cancer`, `a9a` or `synthetic:rows=1000,features=20`.
            parties: How to split the columns; see `split`. The set's natural split by default.
            folder: The folder with the set's own files, for sets that are read from local copies.
            seed: Seed of the train/test split, and of the synthetic generator.
            test_fraction: Share of rows for the test part; a set with a test part of its own ignores it.
        """
        return LOADERS["name"](name, parties=parties, folder=folder, seed=seed, test_fraction=test_fraction)


LOADERS: dict[str, Callable[..., VerticalData]] = {}
"""The ways into the data. Modules that build it enter theirs when the package is imported, so that this one
does not import what imports it."""


def pixel_names(height: int, columns: int) -> tuple[str, ...]:
    """Names of an image's pixels, row by row; `images` relies on them."""
    return tuple(f"pixel_{row}_{column}" for row in range(height) for column in range(columns))


def _freeze(array: Any) -> None:
    if isinstance(array, Mapped):
        return
    parts = (array.data, array.indices, array.indptr) if sparse.issparse(array) else (array,)
    for part in parts:
        part.flags.writeable = False


def _or_unknown(table: NDArray[np.float64] | None, columns: int) -> NDArray[np.float64]:
    return np.full((columns, 2), np.nan) if table is None else table


def _take_columns(
    blocks: Sequence[Block], shares: Sequence[tuple[str, NDArray[np.intp]]]
) -> tuple[Block, ...]:
    if any(sparse.issparse(block) for block in blocks):
        joined = sparse.hstack([flat(block) for block in blocks], format="csc")
        return tuple(sparse.csr_array(joined[:, numbers]) for _, numbers in shares)
    joined = (
        flat(blocks[0]) if len(blocks) == 1 else np.concatenate([flat(block) for block in blocks], axis=1)
    )
    return tuple(np.ascontiguousarray(joined[:, numbers]) for _, numbers in shares)


def _describe(data: VerticalData) -> dict[str, Any]:
    """Rows, parties, labels, public bounds, scaling and notes."""
    return {
        "name": data.name,
        "task": data.task,
        "rows": {"train": data.n_train, "test": data.n_test},
        "features": sum(data.widths),
        "outputs": data.outputs,
        "label_holder": data.label_holder,
        "parties": [_party(data, number) for number in range(len(data.parties))],
        "columns": [
            {
                "party": party,
                "name": column.name,
                "kind": column.kind,
                "bounds": None if column.bounds is None else list(column.bounds),
                "scale": column.scale,
                "codes": column.codes,
                "missing": column.missing,
            }
            for party, mine in zip(data.parties, data.described, strict=False)
            for column in mine.columns
        ],
        "labels": _labels(data),
        "scaling": data.scaling,
        "image_size": list(data.image_size) if data.image_size else None,
        "notes": list(data.notes),
    }


def _party(data: VerticalData, number: int) -> dict[str, Any]:
    block, table = data.train[number], data.bounds[number]
    return {
        "name": data.parties[number],
        "features": data.widths[number],
        "shape": list(block.shape[1:]),
        "sparse": bool(sparse.issparse(block)),
        "bounded": 0 if table is None else int((~np.isnan(table[:, 0])).sum()),
        "rows_lost": data.rows_lost[number] if data.rows_lost else 0,
    }


def _labels(data: VerticalData) -> dict[str, Any]:
    if data.task == "regression":
        return {"train": _spread(data.y_train), "test": _spread(data.y_test)}
    return {
        "classes": list(data.classes),
        "train": np.bincount(data.y_train.astype(np.int64), minlength=len(data.classes)).tolist(),
        "test": np.bincount(data.y_test.astype(np.int64), minlength=len(data.classes)).tolist(),
    }


def _spread(labels: NDArray[Any]) -> dict[str, float]:
    values = labels.astype(np.float64)
    return {
        "min": float(values.min()),
        "mean": float(values.mean()),
        "max": float(values.max()),
        "deviation": float(values.std()),
    }
