"""Roles that apply a trained model to new records: embeddings leave through the gates, nothing is learned.

They serve every algorithm whose model is encoders and a head. On the plain protocol each party answers the
label holder's requests; on a secure sum the label holder obtains only the total.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from torch import Tensor

from securevfl.algorithms.base import SERVER, Algorithm, Role, ServerRole, Setup
from securevfl.algorithms.channels import build_channel
from securevfl.algorithms.local import Records
from securevfl.algorithms.messages import End, Predict, Prediction
from securevfl.algorithms.sums import REQUEST, SumParticipant, read_request
from securevfl.errors import ProtocolError
from securevfl.models import Fusion
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Inside
from securevfl.privacy.rows import Rows

KIND = "prediction"
CHUNK = 1024


class Finished(Role):
    """A role that has nothing left to learn."""

    async def epoch(self) -> None:
        return

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        return


class PredictingServer(Finished, ServerRole):
    """The label holder: asks for embeddings, or their sum, and applies its model.

    Args:
        setup: What the run is built from; its training part holds the new records.
        numbers: Record index of each new record.
    """

    def __init__(self, setup: Setup, numbers: Rows) -> None:
        self.setup, self.numbers = setup, numbers
        self.link = setup.links[SERVER]
        self.parties = setup.data.parties
        self.fusion = Fusion(setup.plan.fusion, (setup.plan.embedding,) * len(self.parties))
        plain = setup.plan.protocol == "plain"
        self.sums = None if plain else SumParticipant(setup, SERVER, [build_channel(setup, SERVER)])

    async def evaluate(self) -> None:
        if self.sums is not None:
            await self.sums.begin(everybody=True)
        self.setup.head.eval()
        outputs = []
        for start in range(0, len(self.numbers), CHUNK):
            fused = await self._fused(self.numbers[start : start + CHUNK])
            with torch.no_grad():
                outputs.append(self.setup.head(fused))
        self.predictions = torch.cat(outputs)
        for party in self.parties:
            await self.link.send(party, End())

    async def _fused(self, rows: Rows) -> Tensor:
        if self.sums is not None:
            return self._tensor(SERVER, (await self.sums.total(rows, KIND)).values, len(rows))
        return self.fusion(await asyncio.gather(*(self._ask(party, rows) for party in self.parties)))

    async def _ask(self, party: str, rows: Rows) -> Tensor:
        answer = await self.link.call(party, Predict(rows=rows))
        return self._tensor(party, answer["values"], len(rows))

    def _tensor(self, sender: str, values: Any, rows: int) -> Tensor:
        expected = rows, self.setup.plan.embedding
        if np.shape(values) != expected:
            raise ProtocolError(f"{sender} gives embeddings of shape {np.shape(values)}; expected {expected}")
        return torch.from_numpy(np.array(values, np.float32)).to(self.setup.device)


class PredictingParty(Finished):
    """A party: lets the embeddings of new records out, through its gate.

    Args:
        setup: What the run is built from.
        party: Whose role.
        numbers: Record index of each new record.
        told_apart: False where new records may be earlier ones, so that every record pays.
    """

    def __init__(self, setup: Setup, party: str, numbers: Rows, *, told_apart: bool) -> None:
        self.address, self.setup, self.told_apart = party, setup, told_apart
        self.link = setup.links[party]
        self.gate = setup.gates[setup.hosts[party]]
        self.encoder = setup.encoders[party]
        self.observers = setup.observers(SERVER, party)
        block = setup.data.train[setup.data.parties.index(party)]
        self.records = Records(block, block[:0], setup.device)
        self.numbers, self.order = numbers, np.argsort(numbers)
        self.asked = np.zeros(len(numbers), bool)
        self.channel = None if setup.plan.protocol == "plain" else build_channel(setup, SERVER)
        self.sums = None if self.channel is None else SumParticipant(setup, party, [self.channel])

    async def evaluate(self) -> None:
        self.encoder.eval()
        if self.sums is not None:
            await self.sums.begin()
        while (message := await self._receive()).kind != "end":
            await self._answer(message)

    async def _receive(self) -> Packet:
        return await (self.link.receive() if self.sums is None else self.sums.receive())

    async def _answer(self, message: Packet) -> None:
        if self.sums is not None and self.channel is not None and message.kind == REQUEST:
            request = read_request(message)
            given = self.channel.protect(
                self.gate,
                self._embed(request.rows),
                party=self.address,
                rows=request.rows if self.told_apart else None,
                kind=KIND,
            )
            await self.sums.join(request, given)
        elif self.sums is None and message.kind == "predict":
            rows = np.asarray(message["rows"]).astype(np.int64)
            vectors = self._embed(rows)
            paying = rows if self.told_apart else None
            released = (
                self.gate.release(vectors, rows=paying, kind=KIND, observers=self.observers)
                if self.observers
                else Inside.of(vectors)
            )
            await self.link.reply(message, Prediction(values=released))
        else:
            raise ProtocolError(
                f"{self.address} received {message.kind!r} from {message.sender}, not a request"
            )

    def _embed(self, rows: Rows) -> Tensor:
        """Embeddings of new records, which are asked for by their record index, each of them once."""
        if rows.ndim != 1 or not rows.size or not np.isin(rows, self.numbers).all():
            raise ProtocolError(f"{self.address} was asked for records that it was not told to predict")
        places = self.order[np.searchsorted(self.numbers, rows, sorter=self.order)]
        if np.unique(places).size != places.size or self.asked[places].any():
            raise ProtocolError(f"{self.address} was asked for a record twice in one prediction")
        self.asked[places] = True
        with torch.no_grad():
            vectors: Tensor = self.encoder(self.records[places])
        return vectors


class PooledPredictor(Finished, ServerRole):
    """Applies a model that is in one place, as the baselines train it."""

    def __init__(self, setup: Setup, parties: tuple[str, ...]) -> None:
        self.setup, self.parties = setup, parties

    async def evaluate(self) -> None:
        data, plan = self.setup.data, self.setup.plan
        rows = np.arange(data.n_train)
        embeddings = []
        with torch.no_grad():
            for party in self.parties:
                block = data.train[data.parties.index(party)]
                encoder = self.setup.encoders[party].eval()
                embeddings.append(encoder(Records(block, block[:0], self.setup.device)[rows]))
            fusion = Fusion(plan.fusion, (plan.embedding,) * len(self.parties))
            self.predictions = self.setup.head.eval()(fusion(embeddings))


class Predicting(Algorithm):
    """Applies a federated model; nobody chooses it by name.

    Args:
        numbers: Record index of each new record.
        told_apart: False where new records may be earlier ones, so that every record pays.
    """

    name = "predict"
    summary = "applies a trained model to new records"

    def __init__(self, numbers: Rows, *, told_apart: bool) -> None:
        self.numbers, self.told_apart = numbers, told_apart

    def role(self, setup: Setup, address: str) -> Role:
        """The label holder, or a party."""
        if address == SERVER:
            return PredictingServer(setup, self.numbers)
        return PredictingParty(setup, address, self.numbers, told_apart=self.told_apart)


class PooledPredicting(Algorithm):
    """Applies the model of a baseline; nothing leaves anybody."""

    name = "predict-pooled"
    summary = "applies a baseline's model to new records"
    federated = False

    def role(self, setup: Setup, address: str) -> Role:
        """One role that does everything."""
        alone = setup.plan.algorithm == "local"
        return PooledPredictor(setup, (setup.label_holder,) if alone else setup.data.parties)
