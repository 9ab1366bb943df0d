"""A description of loaded data, ready for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

if TYPE_CHECKING:
    from .vertical import VerticalData


def describe(data: VerticalData) -> dict[str, Any]:
    """Rows, parties, labels, public bounds, scaling and notes."""
    return {
        "name": data.name,
        "task": data.task,
        "rows": {"train": data.n_train, "test": data.n_test},
        "features": sum(data.widths),
        "outputs": data.outputs,
        "label_holder": data.label_holder,
        "parties": [_party(data, number) for number in range(len(data.parties))],
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
