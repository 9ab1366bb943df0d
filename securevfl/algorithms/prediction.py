"""Roles that apply a trained model to new records: embeddings leave through the gates, nothing is learned.

They serve every algorithm whose model is encoders and a head. On the plain protocol each party answers the
label holder's requests; on a secure sum the label holder obtains only the total.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from securevfl.algorithms.base import SERVER, Algorithm, Finished, Role, Setup
from securevfl.algorithms.local import Records
from securevfl.algorithms.messages import End, Predict, Prediction
from securevfl.algorithms.roles import LabelHolder, Party, channels_of
from securevfl.algorithms.sums import REQUEST, SumParticipant, read_request
from securevfl.errors import ProtocolError
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Inside, Released
from securevfl.privacy.rows import Rows

KIND = "prediction"
CHUNK = 1024


class PredictingServer(Finished, LabelHolder):
    """The label holder: asks for embeddings, or their sum, and applies its model.

    Args:
        setup: What the run is built from; its training part holds the new records.
        numbers: Record index of each new record.
    """

    def __init__(self, setup: Setup, numbers: Rows) -> None:
        super().__init__(setup)
        self.numbers = numbers
        self.sums = SumParticipant(setup, SERVER, channels_of(setup))

    async def evaluate(self) -> None:
        await self.sums.begin(everybody=True)
        self.setup.head.eval()
        outputs = []
        for start in range(0, len(self.numbers), CHUNK):
            fused = await self._fused(self.numbers[start : start + CHUNK])
            with torch.no_grad():
                outputs.append(self.setup.head(fused))
        self.predictions = torch.cat(outputs)
        await self._tell_all(End())

    async def _fused(self, rows: Rows) -> Tensor:
        if self.sums.channels:
            return self._tensor(SERVER, (await self.sums.total(rows, KIND)).values, len(rows))
        return self.fusion.join_table(await self._ask_all(rows, KIND))

    async def _ask(self, party: str, rows: Rows, purpose: str = KIND) -> Tensor:
        answer = await self.link.call(party, Predict(rows=rows))
        return self._tensor(party, answer["values"], len(rows))


class PredictingParty(Finished, Party):
    """A party: lets the embeddings of new records out, through its gate.

    Args:
        numbers: Record index of each new record.
        all_new: True where they are known to be none of the earlier ones; else every record pays.
    """

    def __init__(self, setup: Setup, party: str, numbers: Rows, *, all_new: bool) -> None:
        super().__init__(setup, party)
        self.all_new = all_new
        self.encoder = setup.encoders[party]
        self.observers = setup.observers(SERVER, party)
        block = setup.data.train[self.index]
        self.records = Records(block, block[:0], setup.device)
        self.numbers, self.order = numbers, np.argsort(numbers)
        self.asked = np.zeros(len(numbers), bool)
        channels = channels_of(setup)
        self.sums = SumParticipant(setup, party, channels)
        self._receive = self.sums.receive
        self.handlers = {REQUEST: self._join} if channels else {Predict.kind: self._answer}

    async def evaluate(self) -> None:
        self.encoder.eval()
        await self.sums.begin()
        await self._listen()

    async def _join(self, message: Packet) -> None:
        request = read_request(message)
        vectors, rows = self._embed(request.rows), request.rows if self.all_new else None
        channel = self.sums.channel(request.channel)
        given = channel.protect(self.gate, vectors, party=self.address, rows=rows, kind=KIND)
        await self.sums.join(request, given)

    async def _answer(self, message: Packet) -> None:
        rows = message.rows
        vectors, paying = self._embed(rows), rows if self.all_new else None
        released: Released | Inside = Inside.of(vectors)
        if self.observers:
            released = self.gate.release(vectors, rows=paying, kind=KIND, observers=self.observers)
        await self.link.reply(message, Prediction(values=released))

    def _embed(self, rows: Rows) -> Tensor:
        """Embeddings of new records, which are asked for by their record index, each of them once."""
        if not rows.size or not np.isin(rows, self.numbers).all():
            raise ProtocolError(f"{self.address} was asked for records that it was not told to predict")
        places = self.order[np.searchsorted(self.numbers, rows, sorter=self.order)]
        if np.unique(places).size != places.size or self.asked[places].any():
            raise ProtocolError(f"{self.address} was asked for a record twice in one prediction")
        self.asked[places] = True
        with torch.no_grad():
            features = self.records[places]
            self.gate.keep_predicted(features.numpy(force=True))
            vectors: Tensor = self.encoder(features)
        return vectors


class Predicting(Algorithm):
    """Applies a federated model; nobody chooses it by name.

    Args:
        numbers: Record index of each new record.
        all_new: True where they are known to be none of the earlier ones; else every record pays.
    """

    name = "predict"
    summary = "applies a trained model to new records"

    def __init__(self, numbers: Rows, *, all_new: bool) -> None:
        self.numbers, self.all_new = numbers, all_new

    def role(self, setup: Setup, address: str) -> Role:
        """The label holder, or a party."""
        if address == SERVER:
            return PredictingServer(setup, self.numbers)
        return PredictingParty(setup, address, self.numbers, all_new=self.all_new)
