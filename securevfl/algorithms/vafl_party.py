"""VAFL's party role: uploads embeddings of its batches and answers requests for fresh ones."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from securevfl.algorithms.base import SERVER, Role, Setup
from securevfl.algorithms.batches import Batches
from securevfl.algorithms.local import build_local_model
from securevfl.algorithms.messages import Embedding, Ended
from securevfl.algorithms.pace import build_delay
from securevfl.errors import ProtocolError
from securevfl.models.seeds import numpy_generator
from securevfl.privacy.messages import Packet, Stop
from securevfl.privacy.rows import Rows

PURPOSES = ("initial", "refresh", "evaluation")
"""What a party lets the server ask for embeddings for."""


class VAFLParty(Role):
    """A party: works through its batches, and answers the server's requests for fresh embeddings."""

    def __init__(self, setup: Setup, party: str, *, shared_schedule: bool) -> None:
        self.address = party
        self.shared_schedule = shared_schedule
        self.setup = setup
        self.link = setup.links[party]
        self.observers = setup.observers(SERVER, party)
        self.training_observers = setup.observers_of_training(party)
        index = setup.data.parties.index(party)
        self.model = build_local_model(setup, party)
        self.batches = Batches(
            setup.data.n_train,
            setup.plan.batch,
            numpy_generator(setup.plan.seed, "batches", 0 if shared_schedule else index),
        )
        self.delay = build_delay(setup, party)
        self.ready_at: float | None = None
        self._ended = Stop()

    async def prepare(self) -> None:
        await self._serve()

    async def evaluate(self) -> None:
        await self._serve()

    async def epoch(self) -> None:
        self._ended = Stop()
        async with asyncio.TaskGroup() as tasks:  # a refusal in the listener ends the work too
            tasks.create_task(self._listen())
            await self._work()
        await self.link.send(SERVER, Ended())

    async def _serve(self) -> None:
        """Only answers requests, until the server ends the phase."""
        self._ended = Stop()
        await self._listen()
        await self.link.send(SERVER, Ended())

    async def _listen(self) -> None:
        while True:
            message = await self.link.receive()
            if message.kind == "end":
                self._ended.set()
                return
            if message.kind != "embed":
                raise ProtocolError(
                    f"{self.address} received {message.kind!r} from {message.sender}, not a request"
                )
            await self._answer(message)

    async def _answer(self, message: Packet) -> None:
        rows = self.model.check_rows(message["rows"])
        purpose = str(message["purpose"])
        if purpose not in PURPOSES:
            raise ProtocolError(f"{self.address} is asked for embeddings for {purpose!r}, not for training")
        observers = self.observers if purpose == "evaluation" else self.training_observers
        released = self.model.release(rows, kind=purpose, observers=observers, learning=False)
        await self.link.reply(message, Embedding(values=released))

    async def _work(self) -> None:
        """Algorithm 1, lines 3 to 7, until the server ends the epoch.

        On a shared schedule the party knows when that is, and releases nothing that would come too late.
        """
        clock = self.setup.clock
        left = self.batches.per_pass if self.shared_schedule else math.inf
        while not self._ended.is_set():
            if left <= 0:
                await self._ended.wait()
                return
            left -= 1
            if self.ready_at is None:
                self.ready_at = clock.now() + self.delay.draw()
            if not await clock.sleep_until(self.ready_at, self._ended):
                return
            self.ready_at = None
            await self._upload(self.batches.next())

    async def _upload(self, rows: Rows) -> None:
        released = self.model.release(
            rows, kind="embedding", observers=self.training_observers, learning=True
        )
        answer = await self.link.call(SERVER, Embedding(rows=rows, values=released))
        if answer.kind == "gradient":
            self.model.learn(released, answer["values"], rows)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state(),
            "batches": self.batches.state(),
            "delay": {"steps": self.delay.steps, "generator": self.delay.generator.bit_generator.state},
            "ready_at": self.ready_at,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load(state["model"])
        self.batches.load(state["batches"])
        self.delay.steps = int(state["delay"]["steps"])
        self.delay.generator.bit_generator.state = state["delay"]["generator"]
        self.ready_at = state["ready_at"]
