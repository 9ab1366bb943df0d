"""What organisations do alike that predict together with the model that they have trained over a network.

The same connections, alignment and confirmation as in training, then one phase: the trained roles run once
more on new records, whatever leaves an organisation passes its own gate, and the label holder writes the
scores. There are no checkpoints: when somebody is lost the prediction stops, and what was released until then
stays counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.data.share import OwnTable, read_outline, rows_of
from securevfl.errors import RunError
from securevfl.federation.folder import RunFolder
from securevfl.federation.run import counted
from securevfl.federation.trained import Trained
from securevfl.network.config import NodeConfig
from securevfl.network.greeting import PREDICT
from securevfl.network.node import Node
from securevfl.network.predicting_seat import PredictingSeat
from securevfl.privacy.ledger import AGREEMENT_FILE, read_agreement
from securevfl.settings.plan import Plan


def read_new_records(config: NodeConfig, file: Path) -> OwnTable | None:
    """An organisation's table of new records, with the columns that it trained with.

    Args:
        config: Its configuration.
        file: The table.

    Returns:
        The table; None for a helper without data.

    Raises:
        RunError: The run has not finished.
        DataError: The table lacks IDs or columns.
    """
    folder, name = RunFolder(config.folder), config.identity.name
    check_finished(folder)
    if config.data is None:
        return None
    data = Trained.load_share(folder, name).template
    columns = data.columns[data.parties.index(name)] if name in data.parties else ()
    return config.data.read_new(file, columns)


def check_finished(folder: RunFolder) -> None:
    """Raises `RunError` unless a folder holds a finished run over a network."""
    if not (folder.path / AGREEMENT_FILE).is_file():
        raise RunError(f"{folder.path} holds no run over a network; train first, without --predict")
    if not folder.result_file.is_file():
        raise RunError(
            f"the run in {folder.path} has not finished; finish the training first, without --predict"
        )


class Predicting(Node):
    """What the label holder and all others do alike when they predict.

    Attributes:
        plan: The resolved plan of the training.
        trained: What this organisation keeps of it.
        new: Its new records; None for a helper without data.
        digest: The training's agreement.
        organisations: Who took part in it, the coordinator first.
        label_holder: Who obtains the scores.
        normalise: How the training compared IDs.
        count: How many new records are common to all.
    """

    suffix = PREDICT
    plan: Plan
    trained: Trained
    new: OwnTable | None
    digest: str
    organisations: tuple[str, ...]
    label_holder: str
    normalise: str
    count = 0
    _settled = True

    def read_table(self) -> OwnTable | None:
        """The new records."""
        return self.new

    def open_run(self) -> None:
        """Takes up the finished run in the folder.

        Raises:
            RunError: There is none, or it is another.
        """
        check_finished(self.folder)
        self.digest = self.open_folder()
        content = read_agreement(self.folder.path)
        outline = read_outline(self.folder.path)
        if outline is None:
            raise RunError(f"{self.folder.path} is not the folder of {self.name}")
        self.organisations, self.label_holder = content["organisations"], outline.label_holder
        self.normalise = outline.normalise
        self.plan = self.folder.read_plan()
        self.trained = Trained.load_share(self.folder, self.name)

    def sit(self, ids: Sequence[str], numbers: Sequence[int], agreement: str) -> PredictingSeat:
        """Builds the roles that predict here; record numbers are on disk before anything is charged to them.

        Args:
            ids: The common IDs; empty at a helper.
            numbers: Their record numbers.
            agreement: Digest of the prediction that was agreed on.
        """
        own, block = self.own, None
        if own is not None and own.columns:
            block = own.block[rows_of(own, ids)]
        rows = self.trained.take_share(block, self.count)
        self.trained.save_records(self.folder)
        if self.seat is not None:
            self.seat.close()
            self.seat = None
        self.seat = seat = PredictingSeat(
            self.name,
            plan=self.plan,
            rows=rows,
            numbers=np.asarray(numbers, np.int64),
            trained=self.trained,
            folder=self.folder,
            mesh=self.mesh,
            agreement=agreement,
            builder=self.builder,
        )
        self._settled = False
        return seat

    def settle(self) -> None:
        """Writes down where the run stands, whether the prediction came to its end or not."""
        if self.seat is None or self._settled:
            return
        self._settled = True
        self.seat.finish()
        self.folder.write_result(self.folder.read_result() | self.spent())

    def spent(self) -> dict[str, Any]:
        """What this organisation has spent, this prediction included."""
        return counted(self.plan, self.records())

    def outcome(self, **more: Any) -> dict[str, Any]:
        """What `--json` prints."""
        figures = {"messages": self.mesh.messages, "bytes": self.mesh.bytes}
        return {
            "run": self.config.run,
            "organisation": self.name,
            "records": self.count,
            **more,
            **self.spent(),
            **figures,
        }

    async def close(self) -> None:
        """Closes connections and files."""
        try:
            self.settle()
        finally:
            await super().close()
