"""Fixtures of attack tests."""

from __future__ import annotations

import pytest
from attack_cases import Runs
from sklearn.datasets import load_breast_cancer, load_digits

from securevfl import VerticalData


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def cancer() -> VerticalData:
    """Binary labels, three parties of ten columns, 200 records: small, for runs are synced to disk."""
    features, labels = load_breast_cancer(return_X_y=True)
    blocks = [features[:200, 10 * i : 10 * i + 10] for i in range(3)]
    return VerticalData.from_arrays(blocks, labels[:200])


@pytest.fixture(scope="session")
def digits() -> VerticalData:
    """Ten classes, two parties of 32 pixels, 400 records."""
    features, labels = load_digits(return_X_y=True)
    blocks = [features[:400, 32 * i : 32 * i + 32] / 16 for i in range(2)]
    return VerticalData.from_arrays(blocks, labels[:400])
