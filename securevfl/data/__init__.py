"""Vertical data: one block of features per party."""

from securevfl.data import build, described, sources  # noqa: F401 - they enter their ways into the data
from securevfl.data.registry import DATASETS, DatasetInfo
from securevfl.data.synthetic import make_synthetic
from securevfl.data.vertical import VerticalData

__all__ = ["DATASETS", "DatasetInfo", "VerticalData", "make_synthetic"]
