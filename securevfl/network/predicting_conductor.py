"""The label holder in a prediction: finds the common new records, numbers them, asks, writes the scores."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.data.share import OwnTable, rows_of
from securevfl.errors import DataError, NetworkError, SecureVFLError
from securevfl.federation.trained import Trained
from securevfl.network.conductor import Conductor
from securevfl.network.config import ServerConfig
from securevfl.network.controls import SALT_BYTES
from securevfl.network.node import Restarted
from securevfl.network.predicting import Predicting, check_finished
from securevfl.network.predicting_agreement import Request, commitments
from securevfl.network.predicting_seat import PART, PredictingSeat
from securevfl.network.scores import ScoresFile


class PredictingConductor(Predicting, Conductor):
    """The label holder's process of a prediction.

    Args:
        config: Its configuration, as it was in training.
        new: Its new records.
        out: Where to write the scores; the file must not exist yet.
        say: Called with what a person at the terminal should know.
    """

    back_to = "the beginning; nothing was released yet"

    def __init__(
        self,
        config: ServerConfig,
        *,
        new: OwnTable | None,
        out: Path,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.new, self.scores = new, ScoresFile(out)
        super().__init__(config, say=say)
        self._numbers: list[int] = []
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._known = 0

    async def run(self) -> dict[str, Any]:
        """Leads the prediction to its end and writes the scores.

        Raises:
            NetworkError: Somebody has been away for too long, or has started anew in between.
            BudgetExceeded: A gate refuses; what others released until then stays counted.
            SecureVFLError: An organisation refuses or fails; the message says which and why.
        """
        check_finished(self.folder)
        self.scores.reserve()
        try:
            return await super().run()
        finally:
            self.scores.release()

    def _open(self) -> None:
        self.open_run()
        if set(self.organisations) != {self.name, *self._members}:
            raise DataError(f"the run was of {', '.join(self.organisations)}; the configuration names others")
        if self.config.normalise != self.normalise:
            raise DataError(
                f"the run compared IDs by {self.normalise!r}, the configuration says "
                f"{self.config.normalise!r}; known people would pass for new ones, so leave it as it was"
            )

    async def _lead(self) -> dict[str, Any]:
        await self._gather()
        await self._introduce()
        await self._align()
        seat = await self._have_asked()
        self._fresh.clear()
        try:
            await self._phase(seat, PART, 0)
        except Restarted as restarted:
            raise NetworkError(
                f"{restarted} while predicting; what was released stays counted: start everybody again"
            ) from None
        return await self._conclude(seat)

    async def _align(self) -> None:
        """Finds the new records that all have, and gives them numbers: whoever is known keeps the old one."""
        if self.own is None:
            raise DataError("the coordinator has no records to predict")
        self._ids = await self._common_ids(self._with_data())
        self.count, self.trained = len(self._ids), Trained.load_share(self.folder, self.name)
        self._known = sum(each in self.trained.numbers for each in self._ids)
        self._numbers = self.trained.number(self._ids, self.count).tolist()
        self.say(f"{self.count} of {len(self.own.ids)} records are common to all")
        for name in self._with_data():
            self.mesh.tell(name, "records", numbers=self._numbers, salt=self._salt)

    async def _have_asked(self) -> PredictingSeat:
        """Has everybody confirm the same understanding of what is predicted."""
        self.part = "agreeing"
        ids, numbers = commitments(self.session, self._salt, self._ids, self._numbers)
        request = Request(
            run=self.config.run,
            trained=self.digest,
            organisations=self.organisations,
            records=self.count,
            ids=ids,
            numbers=numbers,
            token=self.mesh.incarnation.hex(),
        )
        prediction = request.understood(self.plan, label_holder=self.label_holder, known=self._known)
        for line in prediction.summary():
            self.say(line)
        await self._propose(self._members, request.to_json(), prediction.digest)
        seat = self.sit(self._ids, self._numbers, prediction.digest)
        for name in self._members:
            self.mesh.tell(name, "agreed", digest=prediction.digest)
        return seat

    async def _conclude(self, seat: PredictingSeat) -> dict[str, Any]:
        """Writes the scores, in the order of the label holder's table, and lets everybody go."""
        if self.own is None:
            raise DataError("the coordinator has no records to predict")
        order = np.argsort(rows_of(self.own, self._ids))
        self.scores.write(seat.data, [self._ids[i] for i in order], seat.scores()[order])
        self.settle()
        self.mesh.tell_all("finish", epochs=0, stopped="")
        await self._let_go()
        self.part = "finished"
        return self.outcome(known=self._known, scores=str(self.scores.path))

    async def _let_go(self) -> None:
        """Waits until everybody has written what belongs to it; the scores do not depend on that any more."""
        waiting = set(self._members)
        try:
            while waiting:
                peer, kind, _ = await self.next_control()
                if kind in ("finished", "failed", "restarted"):
                    waiting.discard(peer)
                if kind == "restarted":
                    self.mesh.tell(peer, "stop", reason="the prediction is over", again=True)
        except SecureVFLError as error:
            self.say(f"the scores are written, but: {error}")
        self.mesh.tell_all("goodbye")
        await self.delivered()
