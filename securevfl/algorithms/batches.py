"""The order in which a role visits records: one permutation per pass, cut into batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from securevfl.privacy.rows import Rows


class Batches:
    """Endless batches without replacement within a pass; every record occurs once per pass."""

    def __init__(self, records: int, size: int, generator: np.random.Generator) -> None:
        self.records = records
        self.size = min(size, records)
        self.generator = generator
        self._order: Rows = np.empty(0, np.int64)
        self._position = 0

    @property
    def per_pass(self) -> int:
        """Batches in one pass through the records."""
        return -(-self.records // self.size)

    def next(self) -> Rows:
        """The next batch; the last one of a pass may be smaller."""
        if self._position >= len(self._order):
            self._order = self.generator.permutation(self.records).astype(np.int64)
            self._position = 0
        rows = self._order[self._position : self._position + self.size]
        self._position += len(rows)
        return rows

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here."""
        return {
            "order": self._order,
            "position": self._position,
            "generator": self.generator.bit_generator.state,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes back to a saved state."""
        self._order = np.asarray(state["order"], np.int64)
        self._position = int(state["position"])
        self.generator.bit_generator.state = state["generator"]


class Draws(Batches):
    """Batches drawn independently of each other, without repeats inside a batch.

    Estimators that remember each record's last gradient are unbiased only with these: within a pass without
    replacement, exactly the records with old memories are still to come.
    """

    def next(self) -> Rows:
        """The next batch."""
        return self.generator.choice(self.records, self.size, replace=False).astype(np.int64)
