"""An owner's private journal: the noisy values it made, and the totals it opened.

A replay of the run needs them to follow the same path, and the difference to what it computes is the noise
that was really added. Values are kept with their noise, never the noise itself: shares of distributed noise
and seeds are not written anywhere. A journal together with the data gives the noise away all the same, so it
is raw data: written only where views are recorded, readable by its owner alone, and deleted with the views.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl import __version__
from securevfl.privacy.views import MESSAGES, ViewWriter

Array = npt.NDArray[Any]

RELEASE, GRADIENT, UPDATE, STATISTIC, LABELS, TOTAL, MODEL, DATA, LOCK, PREDICTED, SCORED, ORIGIN, INNER = (
    "release",
    "gradient",
    "update",
    "statistic",
    "labels",
    "total",
    "model",
    "data",
    "lock",
    "predicted",
    "scored",
    "origin",
    "inner",
)
"""The lock is the dealer's: what locks the seeds of a checked session in the members' views. Predicted and
scored are the rows of new records, which are in no data of the run, and what was opened of them. An origin is
where a first model is from: the version of torch that made it as the plan says, or `GIVEN`. Inner is noise
inside an encoder, which hides nothing and is paid for by nobody: the one noise that is kept bare."""
ROWS, AS_GIVEN = "rows", f"given to {__version__}"
FILES = f"files read by {__version__}, numpy {np.__version__}"
"""Places of digests of rows: as trained on, as given, and of the files that the plan names; what it made of
those, a version makes again."""
GIVEN = "given"
"""Origin of a model that its owner brought."""


def fingerprint(arrays: Iterable[Any]) -> Array:
    """A digest of an owner's own rows, so that an audit can tell other data from a broken promise."""
    digest = hashlib.sha256()
    for array in arrays:
        parts = (
            (array.data, array.indices, array.indptr) if hasattr(array, "indptr") else (np.asarray(array),)
        )
        for part in parts:
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).tobytes())
    return np.frombuffer(digest.digest(), np.uint8)


class Journal:
    """Appends to one owner's journal, which has the form of a view.

    Attributes:
        new: False where the folder holds the journal of an earlier process.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self.owner = owner
        self.new = not (folder / MESSAGES).exists()
        self._writer = ViewWriter(folder, owner)

    def keep(self, kind: str, values: Array, *, std: float, where: str) -> Array:
        """Writes values down and returns them; a replay returns those that were written down instead.

        Args:
            kind: What they are, one of the kinds above.
            values: With their noise.
            std: Of the noise in each value; 0 where there is none.
            where: Names them within their kind: a position in the ledger, a round, a model.
        """
        self._writer.note(
            kind, {"where": where, "std": std, "values": np.asarray(values)}, address=self.owner, time=0.0
        )
        return values

    def flush(self) -> None:
        """Hands everything to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the files."""
        self._writer.close()
