"""Correlations of two members, made ahead of their rounds: A offers, B answers, each in pieces.

A sends its masks encrypted and, closed, X_B' V_A + e; B answers with the products of its masks and A's, and
with X_A' V_B + e. Neither waits idle: A offers the next one before the last was answered, B prepares its part
of the next before the offer comes. What is under way is bounded, and so is what waits in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from securevfl.errors import InputError, ProtocolError
from securevfl.protocols.contract import SETUP_ROUND, Address, Envelope, Message, name_of
from securevfl.protocols.sealed import residues
from securevfl.protocols.sealed.cipher import DEGREE, pack, shared_cipher, unpack
from securevfl.protocols.sealed.kernel import Kernel, WaveKernel
from securevfl.protocols.sealed.messages import Answer, Offer
from securevfl.protocols.sealed.party import Rows
from securevfl.protocols.sealed.protocol import SealedProtocol
from securevfl.protocols.sealed.residues import Words
from securevfl.protocols.sealed.round import SealedMachine
from securevfl.protocols.sealed.series import Waves

if TYPE_CHECKING:
    from securevfl.protocols.sealed.encrypted import EncryptedParty

UNANSWERED = 2
"""Offers that may be under way."""


@dataclass
class Correlation:
    """What one member keeps for one round.

    Attributes:
        binding: Digest of what it was made for.
        factors: Masks of the own factors, (rows, K): x of A, z of B.
        products: (rows, outputs): A's sum of x z + rho, B's -rho.
        blind: V, (rows, outputs).
        received: X' V + e of the own rows and the other's V and noise, (width, outputs).
        noise: The own noise on the own total, (width, outputs).
    """

    binding: bytes
    factors: Words
    products: Words
    blind: Words
    received: Words
    noise: Words


def kernel_of(protocol: SealedProtocol) -> Kernel | WaveKernel:
    """The products that shares of the residuals need."""
    if isinstance(protocol.series, Waves):
        return WaveKernel(protocol.series)
    if not isinstance(protocol.series, Kernel):
        raise InputError("two members without a dealer need a function that is a sum of products")
    return protocol.series


def factor_counts(protocol: SealedProtocol) -> tuple[int, int]:
    """How many factors A and B have."""
    if protocol.series is None:
        return 0, 0
    terms = [term for output in kernel_of(protocol).terms for term in output]
    return 1 + max(i for i, _, _ in terms), 1 + max(j for _, j, _ in terms)


class PoolMachine(SealedMachine):
    """Makes correlations: A offers, B answers."""

    heavy = True

    def __init__(self, party: EncryptedParty, rounds: Sequence[tuple[int, Rows | None]]) -> None:
        super().__init__(party.index, round=SETUP_ROUND)
        self._party = party
        self._coming = dict(rounds)
        self._open: dict[int, tuple[Correlation, bytes]] = {}
        """A's offers that are not answered; B's parts of what is not offered yet."""
        self._rest = len(self._coming)

    @property
    def done(self) -> bool:
        """Whether all are made."""
        return not self._rest

    @property
    def pending(self) -> bool:
        """A may offer another one; B may prepare the next."""
        most = UNANSWERED if self._party.first else 1
        return self._started and bool(self._coming) and len(self._open) < most

    def awaits(self, kind: str, fields: Any) -> bool:
        """What concerns a correlation that is to be made here."""
        if kind == Offer.kind:
            return not self._party.first and fields["number"] in {*self._open, *self._coming}
        return kind == Answer.kind and self._party.first and fields["number"] in self._open

    def _proceed(self) -> list[Envelope]:
        number = next(iter(self._coming))
        if self._party.first:
            return self._offer(number)
        self._open[number] = self._prepared(number)
        return []

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        expected = sender == self._party.other and self.awaits(message.kind, vars(message))
        match message:
            case Offer() if expected:
                return self._answer(message)
            case Answer() if expected:
                return self._take(message)
        raise ProtocolError(f"{name_of(sender)} sends {message.kind!r} out of turn ahead of rounds")

    def _prepared(self, number: int) -> tuple[Correlation, bytes]:
        """The own masks and noise of a round, and the answer to the other's rows."""
        rows = self._coming.pop(number)
        made = self._new(rows)
        return made, self._party.answer_rows(made.blind, rows)

    def _new(self, rows: Rows | None) -> Correlation:
        party, protocol = self._party, self._party.protocol
        count, stream = protocol.count(rows), party._stream
        shape = count, protocol.outputs
        return Correlation(
            binding=party.binding(rows),
            factors=residues.draw(stream, (count, factor_counts(protocol)[not party.first])),
            products=np.zeros(shape, np.uint64),
            blind=residues.draw(stream, shape),
            received=np.zeros((party.opens(party.index), protocol.outputs), np.uint64),
            noise=residues.residues(party.noise_for(party.index).view(np.int64)),
        )

    def _keep(self, number: int) -> None:
        self._party.pool[number], _ = self._open.pop(number)
        self._rest -= 1

    def _send(self, message: Message) -> list[Envelope]:
        return [Envelope(self.address, self._party.other, message)]

    def _offer(self, number: int) -> list[Envelope]:
        """A's masks, encrypted, and its answer to B's rows."""
        party, cipher = self._party, shared_cipher()
        made, product = self._prepared(number)
        self._open[number] = made, b""
        masks = [
            party._keys.encrypt(cipher.slots(made.factors[start : start + DEGREE, factor]))
            for factor in range(made.factors.shape[1])
            for start in range(0, len(made.factors), DEGREE)
        ]
        return self._send(
            Offer(round=self.round, number=number, binding=made.binding, masks=pack(masks), product=product)
        )

    def _answer(self, offer: Offer) -> list[Envelope]:
        """B: products of A's masks and its own, and its answer to A's rows."""
        party, number = self._party, offer.number
        if number not in self._open:
            self._open[number] = self._prepared(number)
        made, product = self._open[number]
        if offer.binding != made.binding:
            raise ProtocolError("the other member prepares something else: plan, noise or records differ")
        left, _ = factor_counts(party.protocol)
        blocks = -(-len(made.blind) // DEGREE)
        masks = [shared_cipher().read(piece) for piece in unpack(offer.masks, left * blocks)]
        made.received = party.read_rows(offer.product)
        rho = residues.draw(party._stream, made.products.shape) if left else made.products
        closed = [
            self._closed_products(made.factors, rho, masks, start)
            for start in range(0, len(made.blind) if left else 0, DEGREE)
        ]
        made.products = residues.subtract(made.products, rho)
        self._keep(number)
        products = pack([piece for block in closed for piece in block])
        return self._send(Answer(round=self.round, number=number, products=products, product=product))

    def _closed_products(self, own: Words, rho: Words, masks: list[Any], start: int) -> list[bytes]:
        """Sum of x z + rho for one block of records, output by output."""
        party, cipher = self._party, shared_cipher()
        rows, blocks, block = slice(start, start + DEGREE), -(-len(own) // DEGREE), start // DEGREE
        closed = []
        for output, terms in enumerate(kernel_of(party.protocol).terms):
            products = []
            for i, j, sign in terms:
                words = own[rows, j] if sign > 0 else residues.negative(own[rows, j])
                products.append((masks[i * blocks + block], cipher.factor(cipher.slots(words))))
            # Slots beyond the records are masked too: they hold products of the other's own padding.
            padded = residues.draw(party._stream, DEGREE)
            padded[: len(own[rows])] = rho[rows, output]
            answer = cipher.combine(products)
            closed.append(cipher.close(answer, cipher.slots(padded), party._receiver, party._stream))
        return closed

    def _take(self, answer: Answer) -> list[Envelope]:
        """A: opens what B answered."""
        party = self._party
        made, _ = self._open[answer.number]
        outputs, count = party.protocol.outputs, len(made.blind)
        starts = range(0, count if made.factors.shape[1] else 0, DEGREE)
        pieces = unpack(answer.products, len(starts) * outputs)
        made.received = party.read_rows(answer.product)
        for place, piece in enumerate(pieces):
            block, output = divmod(place, outputs)
            rows = slice(starts[block], starts[block] + DEGREE)
            made.products[rows, output] = party._keys.slots(piece)[: count - starts[block]]
        self._keep(answer.number)
        return []
