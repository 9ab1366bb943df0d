"""The processes of organisations that predict together with the model that they have trained over a network.

The same connections, alignment and confirmation as in training, then one phase: the trained roles run once
more on new records, whatever leaves an organisation passes its own gate, and the label holder writes the
scores. There are no checkpoints: when somebody is lost the prediction stops, and what was released until then
stays counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.data.share import OwnTable, read_outline, rows_of
from securevfl.errors import DataError, NetworkError, ProtocolError, RunError, SecureVFLError
from securevfl.folder import RunFolder
from securevfl.ledger import AGREEMENT_FILE
from securevfl.network.agreement import Understanding, commitment
from securevfl.network.conductor import Conductor
from securevfl.network.config import NodeConfig, PartyConfig, ServerConfig
from securevfl.network.greeting import PREDICT
from securevfl.network.member import Member
from securevfl.network.node import STAY, Node, Restarted
from securevfl.network.predicting_seat import PART, PredictingSeat
from securevfl.network.prediction import Prediction, Request, cost_in_words, numbers_commitment
from securevfl.network.scores import ScoresFile
from securevfl.plan import Plan
from securevfl.run import counted
from securevfl.trained import Trained


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
    """What the label holder and all others do alike when they predict."""

    suffix = PREDICT
    plan: Plan
    trained: Trained
    new: OwnTable | None
    digest: str
    organisations: tuple[str, ...]
    label_holder: str
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
        content = json.loads((self.folder.path / AGREEMENT_FILE).read_text(encoding="utf-8"))
        outline = read_outline(self.folder.path)
        if outline is None or self.name not in content["homes"]:
            raise RunError(f"{self.folder.path} is not the folder of {self.name}")
        self.organisations, self.label_holder = tuple(content["organisations"]), outline.label_holder
        self.plan = self.folder.read_plan()
        self.trained = Trained.load_share(self.folder, self.name)

    def sit(self, ids: Sequence[str], numbers: Sequence[int]) -> PredictingSeat:
        """Builds the roles that predict here; record numbers are on disk before anything is charged to them.

        Args:
            ids: The common IDs; empty at a helper.
            numbers: Their record numbers.
        """
        own, block = self.own, None
        if own is not None and own.columns:
            block = own.block[rows_of(own, ids)]
        rows = self.trained.take_share(block, self.count)
        self.trained.save_records(self.folder)
        if self.seat is not None:
            self.seat.close()
        self.seat = seat = PredictingSeat(
            self.name,
            plan=self.plan,
            rows=rows,
            numbers=np.asarray(numbers, np.int64),
            trained=self.trained,
            folder=self.folder,
            mesh=self.mesh,
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
        self._known = 0

    async def run(self) -> dict[str, Any]:
        """Leads the prediction to its end and writes the scores.

        Raises:
            NetworkError: Somebody has been away for too long, or has started anew in between.
            BudgetExceeded: A gate refuses; what others released until then stays counted.
            SecureVFLError: An organisation refuses or fails; the message says which and why.
        """
        check_finished(self.folder)
        with self.folder.locked():
            self.scores.reserve()
            try:
                return await super().run()
            finally:
                self.scores.release()

    def _open(self) -> None:
        self.open_run()
        if set(self.organisations) != {self.name, *self._members}:
            raise DataError(f"the run was of {', '.join(self.organisations)}; the configuration names others")

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
            self.mesh.tell(name, "records", numbers=self._numbers)

    async def _have_asked(self) -> PredictingSeat:
        """Has everybody confirm the same understanding of what is predicted."""
        self.part = "agreeing"
        request = Request(
            run=self.config.run,
            trained=self.digest,
            organisations=self.organisations,
            records=self.count,
            ids=commitment(self.session, self._ids),
            numbers=numbers_commitment(self.session, self._ids, self._numbers),
        )
        prediction = request.understood(self.plan, label_holder=self.label_holder, known=self._known)
        for line in prediction.summary():
            self.say(line)
        await self._propose(self._members, request.to_json(), prediction.digest)
        seat = self.sit(self._ids, self._numbers)
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
                    self.mesh.tell(peer, "stop", reason="the prediction is over", again=False)
        except SecureVFLError as error:
            self.say(f"the scores are written, but: {error}")
        self.mesh.tell_all("goodbye")
        await self.delivered()


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
        confirm: Callable[[Understanding], bool] = lambda prediction: False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.new = new
        super().__init__(config, confirm=confirm, say=say)
        self.prediction: Prediction | None = None
        self._numbers: list[int] = []
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
        with self.folder.locked():
            return await super().run()

    def _open(self) -> None:
        self.open_run()

    def _checkpoints(self) -> list[int]:
        return []

    def _keep_ids(self, ids: list[str]) -> None:
        """The common IDs of a prediction are kept with their record numbers, once it is confirmed."""
        self._numbers = []

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
            self._take_numbers(fields["numbers"])
            return None
        return await super()._handle(kind, fields)

    def _take_numbers(self, numbers: list[int]) -> None:
        """Takes up the record numbers, unless they contradict those under which records have paid here."""
        if self.own is None or not self._ids or len(numbers) != len(self._ids):
            raise ProtocolError("the coordinator numbers other records than were found to be common")
        self.trained = Trained.load_share(self.folder, self.name)
        self._known = self.trained.adopt(self._ids, numbers)
        self._numbers = numbers

    def _consider(self, fields: dict[str, Any]) -> None:
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
            self._decide(prediction, objection, "the prediction")
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
        self.count, cost = request.records, ""
        if self.own is not None:
            ids = self._ids or []
            asked = (request.records, request.ids, request.numbers)
            known = (
                len(self._numbers),
                commitment(self.session, ids),
                numbers_commitment(self.session, ids[: len(self._numbers)], self._numbers),
            )
            if asked != known:
                raise ProtocolError("the coordinator asks for other records than were found to be common")
            cost = cost_in_words(
                self.name,
                self.plan,
                np.asarray(self._numbers, np.int64),
                label_holder=self.label_holder,
                records=self.trained.records,
                folder=self.folder,
            )
        return request.understood(self.plan, label_holder=self.label_holder, known=self._known, cost=cost)

    def _take_seat(self, fields: dict[str, Any]) -> None:
        if self.prediction is None or fields["digest"] != self.prediction.digest or self._begun:
            raise ProtocolError("the coordinator announces a prediction that was not confirmed here")
        self.sit(self._ids or (), self._numbers)

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
