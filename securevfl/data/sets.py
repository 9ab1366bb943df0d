"""Known public sets: those that come with scikit-learn, and local copies of other sets' own files."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securevfl.data.build import Construction, Rows, build
from securevfl.data.readers import numbers, one_hot, read_bytes, read_table, read_text
from securevfl.data.schemas import ADULT, MFEAT_VIEWS, UCI_CREDIT_BOUNDS, UCI_CREDIT_CODES, parkinson_view
from securevfl.data.vertical import VerticalData, pixel_names
from securevfl.errors import DataError, needed


def a9a(files: list[Path], seed: int, test_fraction: float) -> VerticalData:
    """123 binary columns; column 123 never occurs in the test part."""
    return VerticalData.from_libsvm(
        files[0], files[1], n_features=123, parties=1, bounds=(0, 1), task="binary", name="a9a"
    )


def mnist(files: list[Path], seed: int, test_fraction: float) -> VerticalData:
    """28 x 28 pixels in 0..255; MNIST, Fashion-MNIST and other sets of that form."""
    images, labels, test_images, test_labels = (read_idx(path) for path in files)
    for path, pixels, codes in ((files[0], images, labels), (files[2], test_images, test_labels)):
        if (
            pixels.ndim != 3
            or codes.ndim != 1
            or len(pixels) != len(codes)
            or pixels.shape[1:] != images.shape[1:]
        ):
            raise DataError(
                f"{path}: shapes {pixels.shape} and {codes.shape} are not images and their labels"
            )
    height, columns = images.shape[1:]
    settings = Construction(
        parties=("p0",),
        columns=(pixel_names(height, columns),),
        label_holder="p0",
        name="mnist",
        bounds=(0, 255),
        task="multiclass",
        extra={"image_size": (height, columns)},
    )
    return build(_image_rows(images, labels, 0), _image_rows(test_images, test_labels, len(images)), settings)


def _image_rows(images: NDArray[np.uint8], labels: NDArray[np.uint8], first: int) -> Rows:
    block = images.reshape(len(images), -1).astype(np.float32)
    return Rows(blocks=(block,), labels=labels.astype(np.int64), ids=np.arange(first, first + len(block)))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes.

    Raises:
        DataError: The header is not that of an IDX file of bytes, or the length does not match it.
    """
    content = read_bytes(path)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08" or not 1 <= content[3] <= 4:
        raise DataError(f"{path} is not an IDX file of unsigned bytes")
    start = 4 + 4 * content[3]
    shape = struct.unpack(f">{content[3]}I", content[4:start]) if len(content) >= start else ()
    if not shape or int(np.prod(shape, dtype=object)) != len(content) - start:
        raise DataError(f"{path} is cut or damaged: shape {shape} does not match {len(content)} bytes")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def mfeat(files: list[Path], seed: int, test_fraction: float) -> VerticalData:
    """Six views of the same digits, one per party; the last column of each file is the class."""
    views = [_read_view(path, width) for path, width in zip(files, MFEAT_VIEWS.values(), strict=True)]
    labels = views[0][:, -1]
    for path, table in zip(files, views, strict=True):
        if not np.array_equal(table[:, -1], labels):
            raise DataError(f"{path}: the classes differ from those in {files[0].name}")
    settings = Construction(
        parties=tuple(MFEAT_VIEWS),
        columns=tuple(tuple(f"{view}_{i}" for i in range(width)) for view, width in MFEAT_VIEWS.items()),
        label_holder="fac",
        name="mfeat",
        bounds=[(0, 6) if view == "pix" else None for view in MFEAT_VIEWS],
        task="multiclass",
        seed=seed,
        test_fraction=test_fraction,
    )
    blocks = tuple(np.ascontiguousarray(table[:, :-1], dtype=np.float32) for table in views)
    return build(
        Rows(blocks=blocks, labels=labels.astype(np.int64), ids=np.arange(len(labels))), None, settings
    )


def _read_view(path: Path, width: int) -> NDArray[np.float64]:
    lines = read_text(path).splitlines()[1:]
    try:
        table = np.loadtxt(lines, delimiter=",", ndmin=2) if lines else np.zeros((0, 0))
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    if table.shape[1:] != (width + 1,):
        raise DataError(
            f"{path}: expected {width} features and a class per line, found {table.shape[-1]} columns"
        )
    return table


def uci_credit(files: list[Path], seed: int, test_fraction: float, codes: bool = False) -> VerticalData:
    """23 columns as they stand, or with the coded ones spread into 0/1 columns."""
    return VerticalData.from_csv(
        files,
        id_column="ID",
        label_column="default.payment.next.month",
        one_hot=UCI_CREDIT_CODES if codes else None,
        bounds={
            name: pair for name, pair in UCI_CREDIT_BOUNDS.items() if not (codes and name in UCI_CREDIT_CODES)
        },
        task="binary",
        seed=seed,
        test_fraction=test_fraction,
        name="uci-credit",
    )


def parkinson(files: list[Path], seed: int, test_fraction: float) -> VerticalData:
    """One record per person; four groups of acoustic measurements as parties."""
    data = VerticalData.from_csv(
        files,
        id_column="rownames",
        label_column="class",
        task="binary",
        seed=seed,
        test_fraction=test_fraction,
        name="parkinson",
    )
    views: dict[str, list[str]] = {"baseline": [], "mfcc": [], "wavelet": [], "tqwt": []}
    for column in data.columns[0]:
        views[parkinson_view(column)].append(column)
    return data.split(views)


def give_me_some_credit(files: list[Path], seed: int, test_fraction: float) -> VerticalData:
    """Gaps become 0 with a 0/1 column that marks them, so that no row is lost and no statistic is fitted."""
    table = read_table(files[0])
    label = "SeriousDlqin2yrs"
    ids = table.column("")
    columns: list[str] = []
    parts: list[NDArray[Any]] = []
    for name in (name for name in table.header if name not in ("", label)):
        values = numbers(table.column(name), where=str(files[0]), column=name)
        gaps = np.isnan(values)
        columns.append(name)
        parts.append(np.where(gaps, 0.0, values))
        if name in ("MonthlyIncome", "NumberOfDependents"):
            columns.append(f"{name} missing")
            parts.append(gaps.astype(np.float64))
        elif gaps.any():
            raise DataError(f"{files[0]}: column {name!r} has no value in data row {np.argmax(gaps) + 1}")
    return VerticalData.from_arrays(
        [np.stack(parts, axis=1)],
        numbers(table.column(label), where=str(files[0]), column=label),
        ids,
        columns=[columns],
        task="binary",
        seed=seed,
        test_fraction=test_fraction,
        name="give-me-some-credit",
    )


def adult(files: list[Path], seed: int, test_fraction: float) -> VerticalData:
    """Text columns spread into 0/1 columns by the set's own list of values; an unknown value gives zeros."""
    columns: list[str] = []
    bounds: list[tuple[float, float]] = []
    for name, values in ADULT.items():
        if isinstance(values[0], str):
            columns += [f"{name}={value}" for value in values]
            bounds += [(0.0, 1.0)] * len(values)
        else:
            columns.append(name)
            bounds.append((float(values[0]), float(values[1])))
    train, test = (_adult_rows(path) for path in files)
    return VerticalData.from_arrays(
        [train[0]],
        train[1],
        test=([test[0]], test[1]),
        columns=[columns],
        bounds=[bounds],
        task="binary",
        name="adult",
    )


def _adult_rows(path: Path) -> tuple[NDArray[np.float32], NDArray[np.str_]]:
    lines = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("|")]
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    for number, row in enumerate(rows):
        if len(row) != len(ADULT) + 1:
            raise DataError(f"{path}: record {number + 1} has {len(row)} cells, expected {len(ADULT) + 1}")
    if not rows:
        raise DataError(f"{path} has no records")
    *cells, labels = zip(*rows, strict=True)
    parts: list[NDArray[Any]] = []
    for (name, values), column in zip(ADULT.items(), cells, strict=True):
        if isinstance(values[0], str):
            parts.append(one_hot(column, values, where=str(path), column=name, unknown="?"))
        else:
            parts.append(numbers(column, where=str(path), column=name)[:, None])
    return np.concatenate(parts, axis=1).astype(np.float32), np.array([label.rstrip(".") for label in labels])


def fate(
    files: list[Path], seed: int, test_fraction: float, *, id_column: str, label: str, name: str
) -> VerticalData:
    """FATE's ready-split pairs: the guest holds the label."""
    return VerticalData.from_csv(
        dict(zip(("guest", "host"), files, strict=True)),
        id_column=id_column,
        label_column=label,
        seed=seed,
        test_fraction=test_fraction,
        name=name,
    )


def from_sklearn(
    seed: int, test_fraction: float, *, name: str, bounds: Any, task: str, image_size: Any = None
) -> VerticalData:
    """A set that comes with scikit-learn, coded as there (breast cancer: 0 is malignant, 1 benign)."""
    datasets = needed("sklearn.datasets")

    bunch = getattr(datasets, f"load_{name}")()
    block = np.array(bunch.data, dtype=np.float32)
    names = bunch.feature_names if image_size is None else pixel_names(*image_size)
    settings = Construction(
        parties=("p0",),
        columns=(tuple(str(column) for column in names),),
        label_holder="p0",
        name=name,
        bounds=bounds,
        task=task,
        seed=seed,
        test_fraction=test_fraction,
        extra={"image_size": image_size},
    )
    data = build(Rows(blocks=(block,), labels=bunch.target, ids=np.arange(len(block))), None, settings)
    classes = bunch.get("target_names", ())
    return replace(data, classes=tuple(np.asarray(classes).tolist())) if len(classes) else data
