"""Sets that come with scikit-learn, and the public bounds that their descriptions print."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .build import Rows, Settings, build
from .checks import Pair
from .vertical import VerticalData, pixel_names

# Summary statistics (min, max) printed in scikit-learn's description of the set, rounded as printed there.
# A value just outside its rounded bound is clipped by public scaling.
BREAST_CANCER_BOUNDS: tuple[Pair, ...] = (
    (6.981, 28.11), (9.71, 39.28), (43.79, 188.5), (143.5, 2501.0), (0.053, 0.163),
    (0.019, 0.345), (0.0, 0.427), (0.0, 0.201), (0.106, 0.304), (0.05, 0.097),
    (0.112, 2.873), (0.36, 4.885), (0.757, 21.98), (6.802, 542.2), (0.002, 0.031),
    (0.002, 0.135), (0.0, 0.396), (0.0, 0.053), (0.008, 0.079), (0.001, 0.03),
    (7.93, 36.04), (12.02, 49.54), (50.41, 251.2), (185.2, 4254.0), (0.071, 0.223),
    (0.027, 1.058), (0.0, 1.252), (0.0, 0.291), (0.156, 0.664), (0.055, 0.208),
)  # fmt: skip
WINE_BOUNDS: tuple[Pair, ...] = (
    (11.0, 14.8), (0.74, 5.80), (1.36, 3.23), (10.6, 30.0), (70.0, 162.0), (0.98, 3.88), (0.34, 5.08),
    (0.13, 0.66), (0.41, 3.58), (1.3, 13.0), (0.48, 1.71), (1.27, 4.00), (278.0, 1680.0),
)  # fmt: skip
# The description says: centred, sum of squares 1 over 442 rows, so the deviation is 1/sqrt(442) = 0.048;
# 0.2 is a little over four deviations.
DIABETES_BOUNDS: Pair = (-0.2, 0.2)
DIGITS_BOUNDS: Pair = (0.0, 16.0)


def _one_party(
    bunch: Any, *, name: str, bounds: Any, task: str, seed: int, test_fraction: float, **extra: Any
) -> VerticalData:
    block = np.array(bunch.data, dtype=np.float32)
    settings = Settings(
        parties=("p0",),
        columns=(tuple(str(column) for column in bunch.feature_names),),
        label_holder="p0",
        name=name,
        bounds=bounds,
        task=task,
        seed=seed,
        test_fraction=test_fraction,
        extra=extra,
    )
    data = build(Rows(blocks=(block,), labels=bunch.target, ids=np.arange(len(block))), None, settings)
    names = bunch.get("target_names", ())
    return replace(data, classes=tuple(np.asarray(names).tolist())) if len(names) else data


def breast_cancer(seed: int, test_fraction: float) -> VerticalData:
    """Class 0 is malignant, 1 benign, as scikit-learn codes them."""
    from sklearn.datasets import load_breast_cancer

    return _one_party(
        load_breast_cancer(),
        name="breast-cancer",
        bounds=[BREAST_CANCER_BOUNDS],
        task="binary",
        seed=seed,
        test_fraction=test_fraction,
    )


def wine(seed: int, test_fraction: float) -> VerticalData:
    """Three cultivars."""
    from sklearn.datasets import load_wine

    return _one_party(
        load_wine(),
        name="wine",
        bounds=[WINE_BOUNDS],
        task="multiclass",
        seed=seed,
        test_fraction=test_fraction,
    )


def digits(seed: int, test_fraction: float) -> VerticalData:
    """8 x 8 pixels in 0..16."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    bunch.feature_names = pixel_names(8, 8)
    return _one_party(
        bunch,
        name="digits",
        bounds=DIGITS_BOUNDS,
        task="multiclass",
        seed=seed,
        test_fraction=test_fraction,
        image_size=(8, 8),
    )


def diabetes(seed: int, test_fraction: float) -> VerticalData:
    """Regression; the publisher has standardised the columns over all rows."""
    from sklearn.datasets import load_diabetes

    return _one_party(
        load_diabetes(),
        name="diabetes",
        bounds=DIABETES_BOUNDS,
        task="regression",
        seed=seed,
        test_fraction=test_fraction,
    )
