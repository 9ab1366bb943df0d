"""Scoring on request: what a service asks its roles for, and the roles of models with encoders and a head.

A `Dispatcher` hands out rounds, each a named request for some records; the label holder's role has it
answered and gives the outputs back. A round that is not answered when a phase ends comes again in the next
one, under the same name: whoever has released something for it releases the same again, and nobody pays
twice.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from securevfl.algorithms.base import SERVER, Algorithm, Role, Setup, expect
from securevfl.algorithms.messages import End, Predict, Prediction, ScoreRefused
from securevfl.algorithms.prediction import KIND, PredictingParty, PredictingServer
from securevfl.algorithms.sums import REQUEST, read_request
from securevfl.errors import BudgetExceeded, InputError, QuotaExceeded, RunError
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Inside, Released
from securevfl.privacy.rows import Rows

Outputs = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """One request between the organisations.

    Attributes:
        name: What it is called, however often it is repeated.
        rows: Record indices, all different.
    """

    name: str
    rows: Rows


class Refused(InputError):
    """An organisation does not score what it was asked for; nothing was released.

    Attributes:
        reason: One of `REFUSALS`.
        by: Which organisation.
    """

    def __init__(self, reason: str, by: str) -> None:
        self.reason, self.by = reason, by
        super().__init__(f"{by} refuses: {reason}")


class Dispatcher(ABC):
    """Where requests come in and outputs go out.

    Attributes:
        answering: Whether every organisation has taken up its part, so that a request would be answered now.
    """

    answering = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """While the block lasts every organisation answers."""
        self.answering = True
        try:
            yield
        finally:
            self.answering = False

    @abstractmethod
    async def next(self) -> Round | None:
        """The next round; None once the service ends and every round is answered."""

    @abstractmethod
    def settle(self, done: Round, found: Outputs | Exception) -> None:
        """Takes the outputs of a round, one row per record; or why there are none."""


def reason_of(error: BudgetExceeded | RunError) -> str:
    """What another organisation is told of why nothing is released."""
    if isinstance(error, RunError):
        return "disk"
    return "quota" if isinstance(error, QuotaExceeded) else "budget"


class RecordPlaces:
    """Finds the rows of records.

    Args:
        numbers: Record index of each row.
    """

    def __init__(self, numbers: Rows) -> None:
        self._order = np.argsort(numbers)
        self._sorted = numbers[self._order]

    def find(self, rows: Rows) -> npt.NDArray[np.intp] | None:
        """The rows of records; None where one of them is not there."""
        if not len(self._sorted):
            return None
        found = np.searchsorted(self._sorted, rows).clip(max=len(self._sorted) - 1)
        return self._order[found] if len(rows) and (self._sorted[found] == rows).all() else None


class ServingServer(PredictingServer):
    """The label holder: has embeddings, or their sum, released on request, and applies its model.

    Args:
        setup: What the run is built from; its training part holds everybody who may be scored.
        numbers: Record index of each of them.
        dispatcher: Where requests come in.
    """

    def __init__(self, setup: Setup, numbers: Rows, dispatcher: Dispatcher) -> None:
        super().__init__(setup, numbers)
        self.dispatcher = dispatcher

    async def evaluate(self) -> None:
        await self.sums.begin(everybody=True)
        self.setup.head.eval()
        for party in self.setup.data.parties:  # asked for nobody: the answer says that it is there
            await self.link.call(party, Predict(rows=np.empty(0, np.int64)))
        with self.dispatcher.open():
            while (asked := await self.dispatcher.next()) is not None:
                await self._serve(asked)
        await self._tell_all(End())

    async def _serve(self, asked: Round) -> None:
        self._name = asked.name
        try:
            fused = await self._fused(asked.rows)
        except Refused as refused:
            self.dispatcher.settle(asked, refused)
            return
        with torch.no_grad():
            outputs = self.setup.head(fused)
        self.dispatcher.settle(asked, outputs.double().numpy(force=True))

    async def _fused(self, rows: Rows) -> torch.Tensor:
        if not self.sums.channels:
            return await super()._fused(rows)
        request = await self.sums.announce(rows, KIND, channel=self.address, name=self._name)
        await self.sums.open(request)
        return self._tensor(SERVER, (await self.sums.obtain(request)).values, len(rows))

    async def _ask(self, party: str, rows: Rows, purpose: str = KIND) -> torch.Tensor:
        answer = await self.link.call(party, Predict(rows=rows, name=self._name))
        if answer.kind == ScoreRefused.kind:
            raise Refused(answer["reason"], self.setup.hosts[party])
        return self._tensor(party, answer["values"], len(rows))


class ServingParty(PredictingParty):
    """A party: lets embeddings out on request, through its gate, once for each name of a request."""

    def __init__(self, setup: Setup, party: str, numbers: Rows) -> None:
        super().__init__(setup, party, numbers, all_new=True)
        self._places = RecordPlaces(numbers)
        self.handlers = {**self.handlers, Predict.kind: self._predict}

    async def _predict(self, message: Packet) -> None:
        """Answers for nobody too, which tells that this party is there; on a sum for nobody else."""
        if not len(message.rows):
            await self.link.reply(message, ScoreRefused(round=0, reason="unknown"))
        elif self.sums.channels:
            expect(message, REQUEST)
        else:
            await self._answer(message)

    async def _join(self, message: Packet) -> None:
        request = read_request(message)
        channel = self.sums.channel(request.channel)
        vectors = self._embed(request.rows)
        given = channel.protect(
            self.gate, vectors, party=self.address, rows=request.rows, kind=KIND, name=request.name or ""
        )
        await self.sums.join(request, given)

    async def _answer(self, message: Packet) -> None:
        rows, name = message.rows, message.fields.get("name")
        released: Released | Inside
        try:
            vectors = self._embed(rows)
            released = Inside.of(vectors)
            if self.observers:
                released = self.gate.release(
                    vectors, rows=rows, kind=KIND, observers=self.observers, name=str(name or "")
                )
        except (BudgetExceeded, RunError) as error:
            await self.link.reply(message, ScoreRefused(round=0, reason=reason_of(error)))
            return
        await self.link.reply(message, Prediction(values=released))

    def _embed(self, rows: Rows) -> torch.Tensor:
        places = self._places.find(rows)
        if places is None:
            raise RunError(f"{self.address} was asked for records that it was not told to score")
        with torch.no_grad():
            features = self.records[places]
            self.gate.keep_predicted(features.numpy(force=True))
            vectors: torch.Tensor = self.encoder(features)
        return vectors


class Serving(Algorithm):
    """Scores on request with a federated model; nobody chooses it by name.

    Args:
        numbers: Record index of everybody who may be scored.
        dispatcher: At the label holder: where requests come in.
    """

    name = "score"
    summary = "applies a trained model on request"

    def __init__(self, numbers: Rows, dispatcher: Dispatcher | None) -> None:
        self.numbers, self.dispatcher = numbers, dispatcher

    def role(self, setup: Setup, address: str) -> Role:
        """The label holder, or a party."""
        if address != SERVER:
            return ServingParty(setup, address, self.numbers)
        return ServingServer(setup, self.numbers, dispatcher_of(self.dispatcher))


def dispatcher_of(dispatcher: Dispatcher | None) -> Dispatcher:
    """The label holder's dispatcher."""
    if dispatcher is None:
        raise InputError("the label holder serves without a dispatcher")
    return dispatcher


async def beside(listening: Any, work: Any) -> None:
    """Runs work while something listens; the listener ends with it, and its errors end the work."""
    async with asyncio.TaskGroup() as group:
        listener = group.create_task(listening)
        await work
        listener.cancel()
