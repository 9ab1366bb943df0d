"""Roles that apply a sealed model to new records: the label holder obtains the sum of all scores, exactly.

No operand is exchanged and nothing is learned. What is opened is a score per record, counted apart from
training; records that training used are refused, because an exact score would void their epsilon.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.algorithms.base import SERVER, Algorithm, Finished, Role, ServerRole, Setup
from securevfl.algorithms.messages import SealedOutputs
from securevfl.algorithms.sealed.card import geometry_of
from securevfl.algorithms.sealed.encoder import ScorecardEncoder
from securevfl.algorithms.sealed.exchange import SealedExchange, hidden
from securevfl.algorithms.sealed.models import build_model
from securevfl.algorithms.sealed.roles import DealerRole, in_label_units
from securevfl.algorithms.sealed.rows import Preparation, dense, records_named
from securevfl.algorithms.sealed.settings import DEALER, SealedGeometry, dealing_organisation
from securevfl.errors import ProtocolError
from securevfl.models.encoders import PreparedLinear
from securevfl.privacy.payloads import Accounted, Inside
from securevfl.privacy.rows import Rows
from securevfl.protocols.contract import Machine
from securevfl.protocols.sealed import party_of
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import DEALT, SealedProtocol
from securevfl.settings.plan import Plan


def scoring_protocol(settings: SealedGeometry) -> SealedProtocol:
    """The protocol without operands: nothing but scores can be opened."""
    members = len(settings.members)
    return settings.protocol((0,) * members, (settings.dealing != DEALT,) * members, checked=False)


class ScoringMember:
    """A member's part in a prediction.

    Args:
        setup: What the run is built from; its training part holds the new records.
        settings: What all roles agree on.
        address: The member's address.
        numbers: Record index of each new record; None where they cannot be told from earlier ones.
    """

    def __init__(self, setup: Setup, settings: SealedGeometry, address: str, numbers: Rows | None) -> None:
        self.setup, self.settings, self.numbers = setup, settings, numbers
        self.gate = setup.gates[setup.hosts[address]]
        self.exchange = SealedExchange(setup.links[address], settings, self.gate)
        self.holds_labels = settings.members.index(address) == settings.label_holder

    async def predict(self) -> npt.NDArray[np.float64] | None:
        """Opens the summed scores to the label holder, who gets them returned."""
        exchange, setup = self.exchange, self.setup
        await exchange.begin(session=False)
        party = party_of(scoring_protocol(self.settings), exchange.index, **self.nothing())
        await exchange.follow(self._session(party))
        machine = party.score(
            self.own_scores(),
            round=exchange.next_round(),
            agreed=setup.agreement.encode(),
            records=records_named(self.numbers),
        )
        self._keep_rows()
        if self.holds_labels:
            await exchange.follow(machine)
            self.gate.keep_scored(machine.result())
            return machine.result()
        rows, count, to = self.numbers, setup.data.n_train, (setup.label_holder,)
        await exchange.follow(self.gate.open_scores(machine, rows=rows, vectors=count, observers=to))
        return None

    def _keep_rows(self) -> None:
        """Keeps the new records' own rows, before scores of them are opened."""
        data, address = self.setup.data, self.exchange.link.address
        if address in data.parties:
            self.gate.keep_predicted(dense(data.train[data.parties.index(address)]))

    def nothing(self) -> dict[str, Any]:
        """An operand without columns, where a protocol has no others."""
        if self.settings.dealing == DEALT:
            return {}
        return {"operand": np.zeros((0, self.settings.data.n_train), np.int32)}

    def _session(self, party: SealedParty) -> Accounted | Machine:
        """Without an operand it only receives from a dealer; members without one share seeds."""
        if self.settings.dealing == DEALT:
            return party.setup()
        return hidden(self.exchange, self.gate, party.setup(), party.protocol, self.setup.plan)

    def own_scores(self) -> npt.NDArray[np.float64]:
        """This member's scores of the new records, by the trained model."""
        setup, address = self.setup, self.exchange.link.address
        party = None if address == SERVER else setup.data.parties.index(address)
        encoder = setup.encoders.get(address)
        if party is not None and isinstance(encoder, ScorecardEncoder):
            return encoder.score(dense(setup.data.train[party]))
        prepared = Preparation.of(encoder) if isinstance(encoder, PreparedLinear) else None
        return build_model(setup, party, prepared, biased=self.holds_labels).scores(None)


class ScoringParty(Finished):
    """A party; the label holder's own hands the result to the server."""

    def __init__(self, setup: Setup, settings: SealedGeometry, party: str, numbers: Rows | None) -> None:
        self.address = party
        self.member = ScoringMember(setup, settings, party, numbers)

    async def evaluate(self) -> None:
        outputs = await self.member.predict()
        if outputs is not None:
            await self.member.exchange.link.send(SERVER, SealedOutputs(values=Inside(values=outputs)))


class ScoringServer(Finished, ServerRole):
    """The label holder, and a member itself if it has no features."""

    def __init__(self, setup: Setup, settings: SealedGeometry, numbers: Rows | None) -> None:
        self.setup = setup
        self.link = setup.links[SERVER]
        member = not settings.holds_features
        self.member = ScoringMember(setup, settings, SERVER, numbers) if member else None

    async def evaluate(self) -> None:
        if self.member is not None:
            outputs = await self.member.predict()
        else:
            message = await self.link.receive()
            if (
                message.kind != SealedOutputs.kind
                or self.setup.hosts[message.sender] != self.setup.hosts[SERVER]
            ):
                raise ProtocolError(f"server received {message.kind!r} from {message.sender} out of turn")
            outputs = np.array(message["values"])
        self.predictions = in_label_units(self.setup, outputs)


class ScoringDealer(DealerRole):
    """The dealer of a prediction: masks that cancel in the sum of all scores."""

    async def evaluate(self) -> None:
        await self._begin()
        number, count = await self._next_round(), self.setup.data.n_train
        await self.exchange.deal(
            self.dealer.deal_scores(round=number, count=count, agreed=self.setup.agreement.encode())
        )

    def _protocol(self, done: int) -> SealedProtocol:
        return scoring_protocol(self.settings)


class SealedPredicting(Algorithm):
    """Applies a sealed model; nobody chooses it by name.

    Args:
        numbers: Record index of each new record; None where they cannot be told from earlier ones.
    """

    name = "predict-sealed"
    summary = "applies a sealed model to new records"
    helpers = (DEALER,)

    def assistants(self, plan: Plan) -> dict[str, str]:
        """The dealer, if the model was trained with one."""
        return dealing_organisation(plan)

    def __init__(self, numbers: Rows | None) -> None:
        self.numbers = numbers

    def role(self, setup: Setup, address: str) -> Role:
        """The label holder, a party, or the dealer."""
        settings = geometry_of(setup.plan, setup.data)
        if address == SERVER:
            return ScoringServer(setup, settings, self.numbers)
        if address == DEALER:
            return ScoringDealer(setup, settings)
        return ScoringParty(setup, settings, address, self.numbers)
