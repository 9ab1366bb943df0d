"""The data sets known by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from securevfl.errors import DataError

from . import embedded, local_files
from .checks import nearest
from .files import find_files
from .labels import Task
from .schemas import MFEAT_VIEWS
from .split import ColumnSplit
from .synthetic import make_synthetic, parse_options
from .vertical import VerticalData


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


def _fate(label: str, id_column: str, stem: str, **info: Any) -> DatasetInfo:
    return DatasetInfo(
        loader=partial(local_files.fate, id_column=id_column, label=label, name=info.pop("name")),
        files=(f"{stem}_hetero_guest.csv", f"{stem}_hetero_host.csv"),
        parties=None,
        **info,
    )


DATASETS: Mapping[str, DatasetInfo] = MappingProxyType(
    {
        "breast-cancer": DatasetInfo(
            description="Wisconsin diagnostic breast cancer",
            task="binary",
            rows=569,
            features=30,
            loader=embedded.breast_cancer,
            parties=3,
        ),
        "digits": DatasetInfo(
            description="handwritten digits, 8 x 8 pixels",
            task="multiclass",
            rows=1797,
            features=64,
            loader=embedded.digits,
        ),
        "wine": DatasetInfo(
            description="chemical analysis of three cultivars",
            task="multiclass",
            rows=178,
            features=13,
            loader=embedded.wine,
        ),
        "diabetes": DatasetInfo(
            description="disease progression after one year",
            task="regression",
            rows=442,
            features=10,
            loader=embedded.diabetes,
        ),
        "synthetic": DatasetInfo(
            description="seeded generator; options as in synthetic:rows=1000,features=20,classes=2",
            task="binary",
            rows=1000,
            features=20,
            loader=make_synthetic,
        ),
        "a9a": DatasetInfo(
            description="income above 50K, LIBSVM's binary form of Adult",
            task="binary",
            rows=32561,
            test_rows=16281,
            features=123,
            loader=local_files.a9a,
            files=("a9a", "a9a.t"),
            parties=(67, 56),
        ),
        "mnist": DatasetInfo(
            description="handwritten digits, 28 x 28 pixels",
            task="multiclass",
            rows=60000,
            test_rows=10000,
            features=784,
            loader=local_files.mnist,
            files=local_files.MNIST_FILES,
            parties=7,
        ),
        "fashion-mnist": DatasetInfo(
            description="pieces of clothing, 28 x 28 pixels",
            task="multiclass",
            rows=60000,
            test_rows=10000,
            features=784,
            loader=local_files.mnist,
            files=local_files.MNIST_FILES,
            parties=7,
        ),
        "mfeat": DatasetInfo(
            description="six views of the same handwritten digits",
            task="multiclass",
            rows=2000,
            features=sum(MFEAT_VIEWS.values()),
            loader=local_files.mfeat,
            files=local_files.MFEAT_FILES,
            parties=None,
        ),
        "adult": DatasetInfo(
            description="income above 50K, text columns as 0/1 columns",
            task="binary",
            rows=32561,
            test_rows=16281,
            features=105,
            loader=local_files.adult,
            files=("adult.data", "adult.test"),
        ),
        "uci-credit": DatasetInfo(
            description="default of credit card clients",
            task="binary",
            rows=30000,
            features=23,
            loader=local_files.uci_credit,
            files=("UCI_Credit_Card.csv",),
        ),
        "uci-credit-one-hot": DatasetInfo(
            description="default of credit card clients, codes as 0/1 columns",
            task="binary",
            rows=30000,
            features=93,
            loader=local_files.uci_credit_one_hot,
            files=("UCI_Credit_Card.csv",),
        ),
        "give-me-some-credit": DatasetInfo(
            description="serious delinquency within two years; gaps are marked by two 0/1 columns",
            task="binary",
            rows=150000,
            features=12,
            loader=local_files.give_me_some_credit,
            files=("cs-training.csv",),
        ),
        "parkinson": DatasetInfo(
            description="Parkinson's disease from speech, one record per person, four groups of measurements",
            task="binary",
            rows=252,
            features=751,
            loader=local_files.parkinson,
            files=("pd_speech_252_subjects.csv",),
            parties=None,
        ),
        "fate-breast": _fate(
            "y",
            "id",
            "breast",
            name="fate-breast",
            description="FATE's guest and host of breast cancer",
            task="binary",
            rows=569,
            features=30,
        ),
        "fate-credit": _fate(
            "y",
            "id",
            "default_credit",
            name="fate-credit",
            description="FATE's guest and host of credit card default",
            task="binary",
            rows=30000,
            features=23,
        ),
        "fate-motor": _fate(
            "motor_speed",
            "idx",
            "motor",
            name="fate-motor",
            description="FATE's guest and host of motor speed",
            task="regression",
            rows=800,
            features=11,
        ),
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
    if base not in DATASETS:
        raise DataError(f"unknown data set {base!r}{nearest(base, DATASETS)}")
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
