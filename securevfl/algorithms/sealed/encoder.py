"""A party's part of a scorecard as a module: bins of its columns, and what each bin adds to the score.

All sizes follow from the columns as everybody knows them, so that a saved card fits the module that the plan
describes; what a column does not use is filled up. Everything in it is a function of noisy counts and totals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from securevfl.data.binning import BINS, CodeBins, NumberBins, most_bins, raw_columns
from securevfl.data.columns import Column
from securevfl.transfers import OnHost, to_device

Floats = NDArray[np.float64]
PARTS = ("values", "errors", "evidence", "positive", "negative")
"""Per bin: what it adds to the score, its deviation, weight of evidence, noisy positives and negatives."""


class ScorecardEncoder(OnHost):
    """h(x) = constant + sum over columns of the value of the column's bin.

    Args:
        columns: The party's columns.

    Attributes:
        constant: Of the whole score; 0 but at the label holder.
        information: Noisy information value of each column.
    """

    edges: Tensor
    groups: Tensor
    missing: Tensor
    sizes: Tensor
    information: Tensor
    constant: Tensor

    def __init__(self, columns: Sequence[Column]) -> None:
        super().__init__()
        self.columns = tuple(columns)
        count, exact = len(self.columns), torch.float64
        self._most = max(most_bins(column) for column in self.columns)
        codes = max(column.codes or 2 for column in self.columns) + 1
        self.register_buffer("edges", torch.full((count, BINS), torch.inf, dtype=exact))
        self.register_buffer("groups", torch.zeros((count, codes), dtype=torch.int64))
        self.register_buffer("missing", torch.zeros(count, dtype=torch.int64))
        self.register_buffer("sizes", torch.ones(count, dtype=torch.int64))
        self.register_buffer("information", torch.zeros(count, dtype=exact))
        self.register_buffer("constant", torch.zeros((), dtype=exact))
        for part in PARTS:
            self.register_buffer(part, torch.zeros((count, self._most), dtype=exact))

    def fill(
        self, place: int, bins: NumberBins | CodeBins, *, information: float, **parts: NDArray[np.float64]
    ) -> None:
        """Writes the bins of one column, and what is known of each of them (`PARTS`)."""
        self.edges[place] = torch.inf
        self.groups[place] = 0
        if isinstance(bins, NumberBins):
            self.edges[place, : len(bins.edges)] = torch.tensor(bins.edges, dtype=torch.float64)
            self.missing[place] = bins.missing
        else:
            self.groups[place, : len(bins.groups)] = torch.tensor(bins.groups)
        self.sizes[place] = bins.size
        self.information[place] = information
        for part in PARTS:
            target: Tensor = getattr(self, part)
            target[place] = 0.0
            target[place, : bins.size] = torch.from_numpy(np.asarray(parts[part], np.float64))

    def bins(self, place: int) -> NumberBins | CodeBins:
        """The bins of one column."""
        column, size = self.columns[place], int(self.sizes[place])
        if column.kind == "number":
            edges = self.edges[place][torch.isfinite(self.edges[place])].tolist()
            counts = (self.positive + self.negative)[place, :size].tolist()  # type: ignore[operator]
            return NumberBins(edges=tuple(edges), missing=int(self.missing[place]), counts=tuple(counts))
        return CodeBins(groups=tuple(self.groups[place, : (column.codes or 2) + 1].tolist()))

    def part(self, name: str, place: int) -> Floats:
        """One of `PARTS`, for the bins of one column."""
        found: Tensor = getattr(self, name)
        return np.asarray(found[place, : int(self.sizes[place])].numpy(), np.float64)

    def split(self, rows: Floats) -> list[Floats]:
        """Raw values of every column from rows of features."""
        return raw_columns(self.columns, rows)

    def score(self, rows: Floats) -> Floats:
        """Scores of rows of features, one column."""
        total = np.full(len(rows), float(self.constant))
        for place, values in enumerate(self.split(rows)):
            total += self.part("values", place)[self.bins(place).assign(values)]
        return total[:, None]

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores (rows, features)."""
        rows = inputs.detach().cpu().double().numpy().reshape(len(inputs), -1)
        return to_device(self.score(rows), inputs.device)


CLASS_PARTS = ("values", "errors", "evidence", "counts")
"""Per bin and class: what it adds to the class's score, its deviation, weight of evidence, noisy records."""


class ClassCardEncoder(ScorecardEncoder):
    """A card of several classes: for each of them a constant and a value per bin.

    Args:
        columns: The party's columns.
        classes: How many there are.

    Attributes:
        constants: Of each class's score; 0 but at the label holder.
    """

    constants: Tensor

    def __init__(self, columns: Sequence[Column], classes: int) -> None:
        super().__init__(columns)
        self.classes = classes
        self.register_buffer("constants", torch.zeros(classes, dtype=torch.float64))
        shape = (len(self.columns), self._most, classes)
        for part in CLASS_PARTS:
            self.register_buffer(f"class_{part}", torch.zeros(shape, dtype=torch.float64))

    def take_constants(self, constants: Floats) -> None:
        """Writes the constant of each class."""
        self.constants[:] = torch.from_numpy(np.asarray(constants, np.float64))

    def fill_classes(
        self, place: int, bins: NumberBins | CodeBins, *, information: float, **parts: Floats
    ) -> None:
        """Writes the bins of one column, and what is known of each of them (`CLASS_PARTS`)."""
        nothing = dict.fromkeys(PARTS, np.zeros(bins.size))
        whole = {**nothing, "positive": parts["counts"].sum(axis=1)}
        self.fill(place, bins, information=information, **whole)
        for part in CLASS_PARTS:
            target: Tensor = getattr(self, f"class_{part}")
            target[place] = 0.0
            target[place, : bins.size] = torch.from_numpy(np.asarray(parts[part], np.float64))

    def class_part(self, name: str, place: int) -> Floats:
        """One of `CLASS_PARTS`, (bins, classes) of one column."""
        found: Tensor = getattr(self, f"class_{name}")
        return np.asarray(found[place, : int(self.sizes[place])].numpy(), np.float64)

    def score(self, rows: Floats) -> Floats:
        """Scores of rows of features, one column for each class."""
        total = np.tile(self.constants.numpy(), (len(rows), 1))
        for place, values in enumerate(self.split(rows)):
            total += self.class_part("values", place)[self.bins(place).assign(values)]
        return total
