"""The file with the scores of new records: checked before anything leaves, written in one step."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from securevfl.data import VerticalData
from securevfl.errors import InputError, RunError
from securevfl.federation.prediction import Floats
from securevfl.files import PART, create, sync


class ScoresFile:
    """Where the label holder writes scores; readable by its owner alone.

    Args:
        path: The file, which must not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._part = self.path.with_name(self.path.name + PART)

    def reserve(self) -> None:
        """Makes sure that the scores can be written later: releases for scores that are lost are paid too.

        Raises:
            InputError: The file exists, or its folder does not or cannot be written.
        """
        if self.path.exists():
            raise InputError(f"{self.path} exists already; choose another file for the scores")
        try:
            self._part.unlink(missing_ok=True)
            create(self._part, b"")
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error.strerror}") from error

    def release(self) -> None:
        """Leaves nothing behind where there were no scores."""
        if self._part.exists() and not self._part.stat().st_size:
            self._part.unlink()

    def write(self, data: VerticalData, ids: Sequence[str], scores: Floats) -> None:
        """Writes one line per record: its ID, and its score or one score per class.

        Raises:
            RunError: The file cannot be written, or somebody has made it meanwhile; the message says where
                the scores are.
        """
        values = np.asarray(scores).reshape(len(ids), -1)
        several = data.task == "multiclass"
        titles = [f"score_{each}" for each in data.classes] if several else ["score"]
        try:
            with self._part.open("w", newline="", encoding="utf-8") as file:
                table = csv.writer(file)
                table.writerow(["id", *titles])
                table.writerows(
                    [each, *map(repr, row)] for each, row in zip(ids, values.tolist(), strict=True)
                )
                sync(file)
        except OSError as error:
            raise RunError(f"{self._part} cannot be written: {error.strerror}") from error
        if self.path.exists():
            raise RunError(f"{self.path} was made by somebody else meanwhile; the scores are in {self._part}")
        self._part.replace(self.path)
