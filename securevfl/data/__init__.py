"""Vertical data: one block of features per party."""

from .registry import DATASETS, DatasetInfo
from .synthetic import make_synthetic
from .vertical import VerticalData

__all__ = ["DATASETS", "DatasetInfo", "VerticalData", "make_synthetic"]
