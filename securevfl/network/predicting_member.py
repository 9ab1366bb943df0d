"""Any other organisation in a prediction: checks what is asked, confirms it, and answers once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from securevfl.data.share import OwnTable
from securevfl.errors import NetworkError, ProtocolError
from securevfl.federation.trained import Trained
from securevfl.network.config import PartyConfig
from securevfl.network.member import Confirm, Member, refuse
from securevfl.network.node import STAY
from securevfl.network.predicting import Predicting, check_finished
from securevfl.network.predicting_agreement import Prediction, Request, commitments, cost_in_words
from securevfl.network.predicting_seat import PART


class PredictingMember(Predicting, Member):
    """Another organisation's process of a prediction.

    Args:
        config: Its configuration, as it was in training.
        new: Its new records; None for a helper without data.
        confirm: Asked whether a prediction is accepted, where the configuration has no rules for that.
        say: Called with what a person at the terminal should know.
    """

    parts = (PART,)

    def __init__(
        self,
        config: PartyConfig,
        *,
        new: OwnTable | None,
        confirm: Confirm = refuse,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.new = new
        super().__init__(config, confirm=confirm, say=say)
        self.prediction: Prediction | None = None
        self._numbers: list[int] = []
        self._salt = b""
        self._known = 0
        self._confirmed = ""
        self._begun = False

    async def run(self) -> dict[str, Any]:
        """Takes part in the prediction to its end.

        Raises:
            NetworkError: The coordinator has been away for too long, stops, or has started anew.
            SecureVFLError: This organisation refuses or fails.
        """
        check_finished(self.folder)
        return await super().run()

    def _open(self) -> None:
        self.open_run()

    def _checkpoints(self) -> list[int]:
        return []

    def _comparable(self, way: str) -> OwnTable:
        """IDs are compared as in training: spelt otherwise, a known person would pass for a new one."""
        if way != self.normalise:
            raise ProtocolError(
                f"the coordinator compares IDs by {way!r}; the run {self.config.run!r} did by "
                f"{self.normalise!r}"
            )
        return super()._comparable(way)

    def keep_ids(self, ids: list[str]) -> None:
        """The common IDs are kept with their record numbers, once a prediction of these is confirmed."""
        self._numbers, self.prediction = [], None

    async def _start_over(self) -> None:
        """Before anything is released it can join again; after that a person decides whether to pay again."""
        if self._begun:
            raise NetworkError(
                f"{self.config.coordinator} has started anew while predicting; what was released stays "
                "counted: start again"
            )
        await super()._start_over()

    async def _handle(self, kind: str, fields: dict[str, Any]) -> dict[str, Any] | None:
        if kind == "records":
            self._take_numbers(fields["numbers"], fields["salt"])
            return None
        return await super()._handle(kind, fields)

    def _take_numbers(self, numbers: list[int], salt: bytes) -> None:
        """Takes up the record numbers, unless they contradict those under which records have paid here."""
        if self.own is None or not self._ids or len(numbers) != len(self._ids):
            raise ProtocolError("the coordinator numbers other records than were found to be common")
        self.trained = Trained.load_share(self.folder, self.name)
        self._known = self.trained.adopt(self._ids, numbers)
        self._numbers, self._salt, self.prediction = numbers, salt, None

    async def _consider(self, fields: dict[str, Any]) -> None:
        """Compares what is asked with what is known here, and asks for confirmation."""
        prediction = self._understood_request(Request.from_json(str(fields["proposal"])))
        if prediction.digest != fields["digest"]:
            raise ProtocolError(
                f"{self.config.coordinator} understands the prediction as {fields['digest']}, {self.name} as "
                f"{prediction.digest}; are both on the same version, and the same run?"
            )
        if self._confirmed != prediction.digest:
            accept, count = self.config.accept, prediction.request.records
            objection = accept.objection_to_prediction(self.plan, self.digest, count) if accept else ""
            await self._decide(prediction, objection, "the prediction")
        self._confirmed, self.prediction = prediction.digest, prediction
        self._tell("confirmed", digest=prediction.digest)

    def _understood_request(self, request: Request) -> Prediction:
        if (request.run, request.trained) != (self.config.run, self.digest):
            raise ProtocolError(
                f"the coordinator predicts with the model of {request.trained}; {self.name} agreed on "
                f"{self.digest}"
            )
        if request.organisations != self.organisations or self.label_holder != self.config.coordinator:
            raise ProtocolError(f"the prediction is not of {', '.join(self.organisations)}")
        if request.token != self.mesh.sessions[self.config.coordinator].incarnation.hex():
            raise ProtocolError("the coordinator asks what another process of it asked")
        if self.own is not None:
            self._check_records(request)
        self.count = request.records
        cost = self._cost() if self.own is not None else ""
        return request.understood(self.plan, label_holder=self.label_holder, known=self._known, cost=cost)

    def _check_records(self, request: Request) -> None:
        """The records that are asked for are those that were found and numbered here, no others."""
        ids, numbers = self._ids or [], self._numbers
        numbered = len(ids) == len(numbers) == request.records
        if not numbered or (request.ids, request.numbers) != commitments(
            self.session, self._salt, ids, numbers
        ):
            raise ProtocolError("the coordinator asks for other records than were found to be common")

    def _cost(self) -> str:
        return cost_in_words(
            self.name,
            self.plan,
            np.asarray(self._numbers, np.int64),
            label_holder=self.label_holder,
            records=self.trained.records,
            folder=self.folder,
        )

    def _take_seat(self, fields: dict[str, Any]) -> None:
        if self.prediction is None or fields["digest"] != self.prediction.digest or self._begun:
            raise ProtocolError("the coordinator announces a prediction that was not confirmed here")
        self.sit(self._ids or (), self._numbers, self.prediction.digest)

    async def _begin(self, fields: dict[str, Any]) -> None:
        """One confirmation is for one prediction."""
        if self._begun or fields["epoch"] or fields["restore"] != STAY:
            raise ProtocolError("the coordinator begins a prediction again that was confirmed once")
        self._begun = True
        await super()._begin(fields)

    def _finish(self, fields: dict[str, Any]) -> None:
        if not self._begun:
            raise ProtocolError("the prediction ends before it began")
        self.settle()
        self.part = "finished"
        self._result = self.outcome(known=self._known)
        self._tell("finished")
