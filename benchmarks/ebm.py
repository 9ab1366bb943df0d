"""DP-EBM of the package `interpret` on splits that `benchmarks.scorecards --export` has written.

Stands alone, because `interpret` belongs into an environment of its own:

    python -m benchmarks.scorecards uci_credit --export splits --splits 1
    other-environment/bin/python benchmarks/ebm.py splits/uci_credit-0 --epsilon 1

All columns are in one place, and `interpret` counts by adding or removing a record, where the sealed card
counts by replacing one: at the same epsilon its noise is about half. Its bounds of numbers are ends or
quantiles of the rows of training, a release that its epsilon does not cover, or powers of two.
"""

from __future__ import annotations

import argparse
import csv
import math
import warnings
from pathlib import Path

import numpy as np
from sklearn.metrics import roc_auc_score


def read(folder: Path, part: str) -> tuple[list[list[str]], np.ndarray]:
    """Columns of all parties, and the labels."""
    columns: list[list[str]] = []
    labels = np.zeros(0)
    for number in range(len(list(folder.glob(f"{part}*.csv")))):
        rows = list(csv.reader((folder / f"{part}{number}.csv").open()))
        for name, *cells in zip(*rows, strict=True):
            if name == "y":
                labels = np.array(cells, float)
            elif name != "id":
                columns.append(list(cells))
    return columns, labels


def table(columns: list[list[str]], numbers: list[bool]) -> np.ndarray:
    """Numbers with zero for gaps, text as it is."""
    parts = [
        np.array([float(cell or 0) for cell in column]) if number else np.array(column, object)
        for column, number in zip(columns, numbers, strict=True)
    ]
    return np.stack([part.astype(object) for part in parts], 1)


def is_number(column: list[str]) -> bool:
    try:
        [float(cell or 0) for cell in column]
    except ValueError:
        return False
    return len(set(column)) > 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epsilon", type=float, default=1.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from interpret.privacy import DPExplainableBoostingClassifier  # of an environment of its own

    (train, y), (test, y_test) = read(options.folder, "train"), read(options.folder, "test")
    numbers = [is_number(column) for column in train]
    x, x_test = table(train, numbers), table(test, numbers)
    kinds = ["continuous" if number else "nominal" for number in numbers]
    for bounds in ("of the rows", "quantiles .01 and .99", "powers of two"):
        limits = {}
        for place, number in enumerate(numbers):
            if number:
                low, high = float(min(x[:, place])), float(max(x[:, place]))
                if bounds.startswith("quantiles"):
                    found = np.quantile(x[:, place].astype(float), [0.01, 0.99])
                    low, high = (float(found[0]), float(found[1])) if found[0] < found[1] else (low, high)
                if bounds == "powers of two":
                    reach = 2.0 ** math.ceil(math.log2(max(abs(low), abs(high), 1e-9)))
                    low, high = (-reach if low < 0 else 0.0), reach
                limits[place] = (low, high)
        model = DPExplainableBoostingClassifier(
            epsilon=options.epsilon,
            delta=1e-5,
            feature_types=kinds,
            privacy_bounds=limits,
            random_state=None,
            n_jobs=1,
        )
        auc = roc_auc_score(y_test, model.fit(x, y).predict_proba(x_test)[:, 1])
        print(
            f"{options.folder.name}, epsilon {options.epsilon:g}, bounds {bounds}: AUC {auc:.4f}", flush=True
        )


if __name__ == "__main__":
    main()
