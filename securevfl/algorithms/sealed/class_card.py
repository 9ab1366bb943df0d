"""Scorecards of several classes: one table per column and class, and one weight per column.

The label histogram has a cell for each bin and class: a record is in one of them per column, whatever the
number of classes. A column's tables, one class against the rest, are shrunk as those of two classes. What the
fits learn is one weight for each column, the same for all classes, and one constant for each class: their
gradient is J'r with a record's Jacobian J of norm at most 1 and its residuals r, which are bounded together
(see `class_series`), so that more classes cost no more noise. There is no residual histogram.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.accountants.scorecard import TOTALS
from securevfl.algorithms.base import SERVER
from securevfl.algorithms.sealed import tables
from securevfl.algorithms.sealed.card import HISTOGRAMS, RATE, CardMember, bins_of, bins_state
from securevfl.algorithms.sealed.encoder import ClassCardEncoder
from securevfl.algorithms.sealed.rows import clip_to_integers, dense
from securevfl.algorithms.sealed.settings import BIAS
from securevfl.data.binning import CodeBins, NumberBins
from securevfl.data.columns import Column
from securevfl.errors import PlanError, ProtocolError
from securevfl.protocols.contract import Machine
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import OPERAND_BITS

Floats = npt.NDArray[np.float64]


@dataclass
class ClassFeature:
    """A party's column on its way through the recipe.

    Attributes:
        bins: Its bins.
        cells: Noisy records per bin and class; None before they were opened.
        spread: How many opened cells each bin was joined from.
        tables: Weights of evidence of each class against the rest.
        weight: Of all tables.
    """

    bins: NumberBins | CodeBins
    cells: Floats | None = None
    spread: Floats | None = None
    tables: list[tables.BinTable] = field(default_factory=list)
    weight: float = 0.0

    @property
    def used(self) -> bool:
        """Whether the column says anything about any class."""
        return any(table.used for table in self.tables)

    @property
    def information(self) -> float:
        """Of all classes together."""
        return math.fsum(table.information for table in self.tables)

    @property
    def values(self) -> Floats:
        """(bins, classes) of the tables."""
        return np.stack([table.values for table in self.tables], 1)

    def state(self) -> dict[str, Any]:
        """As explicit data."""
        return {
            "bins": bins_state(self.bins),
            "cells": self.cells,
            "spread": self.spread,
            "tables": {str(i): dict(vars(table)) for i, table in enumerate(self.tables)},
            "weight": self.weight,
        }

    @classmethod
    def of(cls, column: Column, state: Mapping[str, Any]) -> ClassFeature:
        """Reads what `state` gave."""
        found = state["tables"]
        return cls(
            bins=bins_of(column, state["bins"]),
            cells=None if state["cells"] is None else np.asarray(state["cells"], np.float64),
            spread=None if state["spread"] is None else np.asarray(state["spread"], np.float64),
            tables=[tables.BinTable(**found[str(i)]) for i in range(len(found))],
            weight=float(state["weight"]),
        )


class ClassCardMember(CardMember):
    """One member of a scorecard of several classes; roles say when."""

    features: list[ClassFeature]  # type: ignore[assignment]

    def _build(self) -> None:
        super()._build()
        self.biases = np.zeros(self.setup.data.outputs)

    def _feature(self, bins: NumberBins | CodeBins) -> Any:
        return ClassFeature(bins=bins)

    # -- label histogram ------------------------------------------------------------------------------------

    def _take_histogram(self, total: Floats) -> None:
        """Rates of the classes, and a table for each of them in every column."""
        std, records = self.settings.noise.std("labels", self.index), self.setup.data.n_train
        rest = self.setup.data.outputs - 1
        for start, feature in zip(self._starts(), self.features, strict=True):
            cells = total[start : start + feature.bins.size]
            counts = self._against_rest(feature, cells, 0)
            place = tables.join_weak_bins(counts, std * math.sqrt((rest + 1) / 2))
            feature.bins = feature.bins.joined(place)
            feature.cells = np.stack([np.bincount(place, each) for each in cells.T], 1)
            feature.spread = np.bincount(place).astype(np.float64)
        rates = self._rates(total, std)
        # Records of other classes weigh 1 / sqrt(rest) in the residuals.
        log_odds = np.log(rates / (1 - rates)) + 0.5 * math.log(rest)
        self.biases = log_odds if self._holds_labels else np.zeros_like(rates)
        for feature in self.features:
            counted = self._cells(feature)
            feature.tables = [
                tables.evidence(
                    self._against_rest(feature, counted, k), q=rate, records=records, std=std, rest=rest
                )
                for k, rate in enumerate(rates)
            ]
            feature.weight = tables.FIRST_START if feature.used else 0.0

    def _against_rest(self, feature: ClassFeature, cells: Floats, k: int) -> tables.Counts:
        mine = cells[:, k]
        return tables.Counts(
            positive=mine,
            negative=cells.sum(axis=1) - mine,
            ordered=feature.bins.ordered,
            own_missing=feature.bins.own_missing,
            spread=feature.spread,
        )

    def _cells(self, feature: ClassFeature) -> Floats:
        if feature.cells is None:
            raise ProtocolError(f"{self.address} has no card before the first opening")
        return feature.cells

    def _rates(self, total: Floats, std: float) -> Floats:
        """Shares of the classes, by all columns together, kept away from 0 and 1."""
        records = self.setup.data.n_train
        mine = [self._cells(f) for f in self.features] or [total[:1]]
        spreads = [float(np.sum(f.spread)) for f in self.features if f.spread is not None] or [1.0]
        weights = 1 / np.array(spreads)
        found = np.stack([cells.sum(axis=0) for cells in mine]).T @ weights / weights.sum() / records
        least = max(3 * std / math.sqrt(weights.sum()) / records, 1 / records)
        kept = np.clip(found, min(least, 0.5 / len(found)), 0.9)
        return np.asarray(kept / kept.sum())

    # -- fits -----------------------------------------------------------------------------------------------

    def _operand(self) -> npt.NDArray[np.int32] | None:  # type: ignore[override]
        if self.opening in HISTOGRAMS:
            return self._one_hot()
        if self.fit is None:
            self.fit = self._new_fit()
        self._rows = self._jacobians()
        return None  # of every round its own

    def _used(self) -> list[Any]:
        return [feature for feature in self.features if feature.used]

    def _scales(self) -> Floats:
        clip = math.sqrt(1 - BIAS**2) if self._holds_labels else 1.0
        scales = tables.column_scales(np.array([each.information for each in self._used()]), clip)
        classes = self.setup.data.outputs
        return np.append(scales, [BIAS / math.sqrt(classes)] * classes) if self._holds_labels else scales

    def _new_fit(self) -> tables.PartyFit:
        scales, noise, totals = self._scales(), self.settings.noise, TOTALS[self.opening]
        start = [each.weight for each in self._used()] + (list(self.biases) if self._holds_labels else [])
        records = self.setup.data.n_train
        return tables.PartyFit(
            start=np.array(start) / scales,
            pull=tables.ridge(
                scales, noise=noise.std(self.opening, self.index) / math.sqrt(totals), records=records
            ),
            records=records,
            totals=totals,
            rate=RATE[0] / sum(clip * clip for clip in noise.shifts[self.opening].clips),
        )

    def _jacobians(self) -> npt.NDArray[np.int32]:
        """(width, records * classes): what each weight adds to each of a record's scores, norm at most 1."""
        count, classes = self.setup.data.n_train, self.setup.data.outputs
        places = dict(zip(map(id, self.features), self._indices(), strict=True))
        columns = [each.values[places[id(each)]] for each in self._used()]
        if self._holds_labels:
            columns += [np.broadcast_to(row, (count, classes)) for row in np.eye(classes)]
        width = self._protocol().widths[self.index]
        operand = np.zeros((width, count * classes), np.int32)
        if columns:
            rows = np.stack(columns, 1) * self._scales()[:, None]  # records, weights, classes
            found = clip_to_integers(rows.reshape(count, -1), 1.0).reshape(rows.shape)
            operand[: len(columns)] = found.transpose(1, 0, 2).reshape(len(columns), -1)
        return operand

    def _train_scores(self) -> Floats:
        if self.fit is None:
            raise ProtocolError(f"{self.address} has scores before a fit")
        weights = np.zeros(len(self._rows))
        weights[: len(self.fit.weights)] = self.fit.weights
        found = (weights @ self._rows) * 2.0**-OPERAND_BITS
        bound = self.settings.score_bound(self.index)
        return np.clip(found.reshape(self.setup.data.n_train, -1), -bound, bound)

    def _round(self, party: SealedParty, rows: Any, chosen: Any) -> Machine:
        number, labels = self.exchange.next_round(), self.labels
        if self.opening in HISTOGRAMS:
            return party.round(round=number, labels=labels)
        scores = self._train_scores()
        if labels is not None:  # half a period for the record's own class
            scores, labels = scores + self.settings.series.period / 2 * labels, np.zeros_like(labels)
        return party.round(round=number, scores=scores, labels=labels, operand=self._rows)

    def _end_fit(self) -> None:
        if self.fit is not None:
            found = self.fit.result * self._scales()
            for feature, weight in zip(self._used(), found, strict=False):  # constants come last
                feature.weight = float(weight)
            if self._holds_labels:
                self.biases = found[-self.setup.data.outputs :]
        self.fit = None

    # -- the card -------------------------------------------------------------------------------------------

    def _encoder(self) -> Any:
        found = self.setup.encoders[self.address]
        if not isinstance(found, ClassCardEncoder):
            raise PlanError(f"{self.address} brings a model of its own; a scorecard makes its own")
        return found

    def _write_card(self) -> None:
        if self.fit is not None:  # a look in between
            kept, fit = [each.weight for each in self.features], self.fit
            biases = self.biases
            self._end_fit()
            self._fill()
            for feature, weight in zip(self.features, kept, strict=True):
                feature.weight = weight
            self.fit, self.biases = fit, biases
        else:
            self._fill()

    def _fill(self) -> None:
        if self.address == SERVER:
            self.setup.head.bias.data[:] = self.setup.head.bias.new_tensor(self.biases)  # type: ignore
            return
        encoder = self._encoder()
        encoder.take_constants(self.biases)
        for place, feature in enumerate(self.features):
            errors = np.stack([table.errors for table in feature.tables], 1)
            encoder.fill_classes(
                place,
                feature.bins,
                information=feature.information,
                values=feature.weight * feature.values,
                errors=abs(feature.weight) * errors,
                evidence=np.stack([table.evidence for table in feature.tables], 1),
                counts=self._cells(feature),
            )

    def _test_scores(self) -> tuple[Floats, float]:
        self._write_card()
        data = self.setup.data
        if self.address == SERVER:
            return np.tile(self.biases, (data.n_test, 1)), 0.0
        return self._encoder().score(dense(data.test[self.index])), 0.0

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but secrets."""
        return super().state() | {"biases": self.biases}

    def _load_feature(self, column: Column, state: Mapping[str, Any]) -> Any:
        return ClassFeature.of(column, state)

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state."""
        super().load(state)
        self.biases = np.asarray(state["biases"], np.float64)
