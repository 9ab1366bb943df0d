"""Parties that should have the same IDs already make sure of it, and learn nothing else."""

from __future__ import annotations

import numpy as np

from securevfl.protocols.alignment.blinded import BlindingMachine, NotTheSame
from securevfl.protocols.alignment.script import Rows, Script


class SameIdsMachine(BlindingMachine):
    """A party that expects everybody to have exactly its IDs."""

    def _play(self) -> Script[Rows]:
        greeted = yield from self._hello(len(self._texts))
        if len(set(greeted.counts.values())) > 1:
            raise NotTheSame("the parties do not have the same number of IDs; find the common ones")
        rows = self._sorted_by_text(np.arange(len(self._texts)))
        yield from self._confirm(greeted.salt, rows)
        return rows
