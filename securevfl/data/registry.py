"""The data sets known by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from securevfl.data import schemas, sets
from securevfl.data.credit import credit
from securevfl.data.labels import Task
from securevfl.data.readers import find_files, is_file_name, not_found
from securevfl.data.split import ColumnSplit
from securevfl.data.synthetic import make_synthetic, parse_options
from securevfl.data.vertical import LOADERS, VerticalData
from securevfl.errors import DataError, nearest


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What is known about a set before it is loaded.

    Attributes:
        description: One line for people.
        task: Kind of task.
        rows: Number of records.
        test_rows: Number of records in the set's own test part; 0 where it has none.
        features: Number of columns.
        files: The set's own files, looked for in the folder; none for embedded sets.
        parties: The split used where the caller gives none; None keeps the set's natural views.
    """

    description: str
    task: Task
    rows: int
    features: int
    loader: Callable[..., VerticalData]
    test_rows: int = 0
    files: tuple[str, ...] = ()
    parties: ColumnSplit | None = 2

    @property
    def needs_folder(self) -> bool:
        """True if the set is read from local files."""
        return bool(self.files)


def _info(
    loader: Callable[..., VerticalData], task: Task, rows: int, features: int, description: str, **more: Any
) -> DatasetInfo:
    return DatasetInfo(
        loader=loader, task=task, rows=rows, features=features, description=description, **more
    )


def _sklearn(
    name: str, bounds: Any, task: Task, rows: int, features: int, text: str, **more: Any
) -> DatasetInfo:
    image = (8, 8) if name == "digits" else None
    loader = partial(sets.from_sklearn, name=name, bounds=bounds, task=task, image_size=image)
    return _info(loader, task, rows, features, text, **more)


def _fate(
    stem: str, id_column: str, label: str, task: Task, rows: int, features: int, what: str
) -> DatasetInfo:
    files = (f"{stem}_hetero_guest.csv", f"{stem}_hetero_host.csv")
    loader = partial(sets.fate, id_column=id_column, label=label, name=stem)
    text = f"FATE's guest and host of {what}"
    return _info(loader, task, rows, features, text, files=files, parties=None)


_INCOME = "income above 50K,"
_DEFAULT = "default of credit card clients"
_PIXELS: dict[str, Any] = {"test_rows": 10000, "files": schemas.MNIST_FILES, "parties": 7}

DATASETS: Mapping[str, DatasetInfo] = MappingProxyType(
    {
        "breast-cancer": _sklearn(
            "breast_cancer",
            [schemas.BREAST_CANCER_BOUNDS],
            "binary",
            569,
            30,
            "Wisconsin diagnostic breast cancer",
            parties=3,
        ),
        "digits": _sklearn(
            "digits", schemas.DIGITS_BOUNDS, "multiclass", 1797, 64, "handwritten digits, 8 x 8 pixels"
        ),
        "wine": _sklearn(
            "wine", [schemas.WINE_BOUNDS], "multiclass", 178, 13, "chemical analysis of three cultivars"
        ),
        "diabetes": _sklearn(
            "diabetes", schemas.DIABETES_BOUNDS, "regression", 442, 10, "disease progression after one year"
        ),
        "credit": _info(
            credit,
            "binary",
            20000,
            18,
            "synthetic people of a lender and a shop: heavy tails, gaps, text, effects that bend",
            parties=None,
        ),
        "synthetic": _info(
            make_synthetic,
            "binary",
            1000,
            20,
            "seeded generator; options as in synthetic:rows=1000,features=20,classes=2",
        ),
        "a9a": _info(
            sets.a9a,
            "binary",
            32561,
            123,
            f"{_INCOME} LIBSVM's binary form of Adult",
            test_rows=16281,
            files=("a9a", "a9a.t"),
            parties=(67, 56),
        ),
        "mnist": _info(sets.mnist, "multiclass", 60000, 784, "handwritten digits, 28 x 28 pixels", **_PIXELS),
        "fashion-mnist": _info(
            sets.mnist, "multiclass", 60000, 784, "pieces of clothing, 28 x 28 pixels", **_PIXELS
        ),
        "mfeat": _info(
            sets.mfeat,
            "multiclass",
            2000,
            sum(schemas.MFEAT_VIEWS.values()),
            "six views of the same handwritten digits",
            files=schemas.MFEAT_FILES,
            parties=None,
        ),
        "adult": _info(
            sets.adult,
            "binary",
            32561,
            105,
            f"{_INCOME} text columns as 0/1 columns",
            test_rows=16281,
            files=("adult.data", "adult.test"),
        ),
        "uci-credit": _info(sets.uci_credit, "binary", 30000, 23, _DEFAULT, files=("UCI_Credit_Card.csv",)),
        "uci-credit-one-hot": _info(
            partial(sets.uci_credit, codes=True),
            "binary",
            30000,
            93,
            f"{_DEFAULT}, codes as 0/1 columns",
            files=("UCI_Credit_Card.csv",),
        ),
        "give-me-some-credit": _info(
            sets.give_me_some_credit,
            "binary",
            150000,
            12,
            "serious delinquency within two years; gaps are marked by two 0/1 columns",
            files=("cs-training.csv",),
        ),
        "parkinson": _info(
            sets.parkinson,
            "binary",
            252,
            751,
            "Parkinson's disease from speech, one record per person, four groups of measurements",
            files=("pd_speech_252_subjects.csv",),
            parties=None,
        ),
        "fate-breast": _fate("breast", "id", "y", "binary", 569, 30, "breast cancer"),
        "fate-credit": _fate("default_credit", "id", "y", "binary", 30000, 23, "credit card default"),
        "fate-motor": _fate("motor", "idx", "motor_speed", "regression", 800, 11, "motor speed"),
    }
)


def find_info(name: str) -> DatasetInfo:
    """The entry of a set; options after a colon do not matter.

    Raises:
        DataError: Unknown name; the message suggests the nearest.
    """
    if not isinstance(name, str):
        raise DataError(f"data set name must be text, found {name!r}")
    base, colon, _ = name.partition(":")
    if is_file_name(base):
        if not Path(base).exists():
            raise not_found(Path(base))
        raise DataError(f"{base} is a file; describe it: securevfl data draft FILES... --out data.toml")
    if base and base not in DATASETS and Path(base).is_dir():
        raise DataError(
            f"{base} is a folder; name the data.toml in it, or a data set with --data-folder {base}"
        )
    if base not in DATASETS:
        raise DataError(f"unknown data set {base!r}; {nearest(base, DATASETS)}")
    if colon and base != "synthetic":
        raise DataError(f"data set {base!r} has no options; found {name!r}")
    return DATASETS[base]


def load(
    name: str, *, parties: ColumnSplit | None, folder: Path | str | None, seed: int, test_fraction: float
) -> VerticalData:
    """See `VerticalData.load`."""
    info = find_info(name)
    how = info.parties if parties is None else parties
    if info.loader is make_synthetic:
        options = {"seed": seed, **parse_options(name.partition(":")[2])}
        data = make_synthetic(**options, parties=1, test_fraction=test_fraction)
    elif info.needs_folder:
        data = info.loader(find_files(name, folder, info.files), seed, test_fraction)
    else:
        data = info.loader(seed, test_fraction)
    data = replace(data, name=name)
    return data if how is None else data.split(how)


LOADERS["name"] = load
