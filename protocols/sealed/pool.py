"""Masks of scores, dealt ahead: a label holder obtains sums of scores without waiting for the dealer.

The dealer deals a pool: to every party a seed, to the label holder the sum of all parties' masks. A request
takes the next places of the pool, which serve once. All parties but the label holder also share a key that it
does not know: what they add from it cancels only if all were asked for the same records under the same name,
so that a label holder which asks two parties for different people obtains uniform words.

Exact sums: a request that is repeated with other places gives the same sum, and nothing besides. What a party
puts in is its own to choose, as in every prediction; a total that is not plausible is refused.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
import numpy.typing as npt

from securevfl.errors import Deviation, ProtocolError
from securevfl.protocols.contract import DEALER, Address, Envelope, Message, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.messages import PoolDeal, PooledScores
from securevfl.protocols.sealed.protocol import SCORES, SealedProtocol, expand
from securevfl.protocols.sealed.round import SealedMachine
from securevfl.protocols.stream import KEY_BYTES

POOL = 1 << 16
"""Scores whose masks are dealt at a time."""
PLAUSIBLE = 4096.0
"""Largest sum of scores that is believed. Uniform words exceed it but with probability 2^-18 each."""


def deal_pool(protocol: SealedProtocol, *, round: int, count: int = POOL) -> list[Envelope]:  # noqa: A002
    """What the dealer sends to every member: fresh masks of `count` scores."""
    holder, shape = protocol.label_holder, (count, protocol.outputs)
    binding, total = os.urandom(KEY_BYTES), np.zeros(shape, np.uint64)
    dealt = []
    for member in range(protocol.members):
        seed = os.urandom(KEY_BYTES)
        if member != holder:
            total += expand(seed, "pool", shape)
            message = PoolDeal(round=round, seed=seed, binding=binding, words=np.empty(0, np.uint64))
            dealt.append(Envelope(DEALER, member, message))
    return [*dealt, Envelope(DEALER, holder, PoolDeal(round=round, seed=b"", binding=b"", words=total))]


def purpose_of(name: str, rows: npt.NDArray[np.int64]) -> str:
    """What the parties' shared key is used for: this request of these records, and no other."""
    return hashlib.sha256(name.encode() + b"\0" + rows.astype("<i8").tobytes()).hexdigest()


class ScorePool:
    """One member's masks of a pool; every place serves once, in order.

    Args:
        protocol: The public configuration.
        index: Which member.
        deal: What the dealer sent to it.
        count: How many scores the pool is for.

    Raises:
        ProtocolError: The deal is none for this member.
    """

    def __init__(self, protocol: SealedProtocol, index: int, deal: PoolDeal, count: int = POOL) -> None:
        self.round, self.next = deal.round, 0
        self._protocol, self._index, self._count = protocol, index, count
        shape = count, protocol.outputs
        if index == protocol.label_holder:
            self._words, self._binding = SCORES.check(deal.words, shape), b""
        else:
            self._words, self._binding = expand(deal.seed, "pool", shape), deal.binding

    @property
    def left(self) -> int:
        """Places that have not served yet."""
        return self._count - self.next

    def take(self, start: int, count: int) -> Ring:
        """The masks at some places, which no other request gets.

        Raises:
            ProtocolError: One of them has served, or lies beyond the end.
        """
        if not self.next <= start <= start + count <= self._count:
            raise ProtocolError(f"masks {start} to {start + count} of pool {self.round}; next is {self.next}")
        self.next = start + count
        return self._words[start : start + count]

    def mask(self, values: Ring, *, start: int, purpose: str) -> Ring:
        """A party's values under the masks from a place on, bound to what they are for."""
        masked: Ring = values + self.take(start, len(values))
        parties = [m for m in range(self._protocol.members) if m != self._protocol.label_holder]
        if len(parties) > 1:
            place = parties.index(self._index)
            masked = masked + self._bound(place, purpose, values.shape)
            masked = masked - self._bound((place + 1) % len(parties), purpose, values.shape)
        return masked

    def _bound(self, place: int, purpose: str, shape: tuple[int, ...]) -> Ring:
        return expand(self._binding, f"pool/{place}/{purpose}", shape)


class PooledMachine(SealedMachine):
    """A party's answer to one request; it has nothing to wait for."""

    def __init__(self, index: int, protocol: SealedProtocol, words: Ring, *, round: int) -> None:  # noqa: A002
        super().__init__(index, round=round)
        self._holder, self._words = protocol.label_holder, words

    @property
    def done(self) -> bool:
        """Whether the answer was given."""
        return self._started

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        raise ProtocolError(f"{name_of(sender)} sends {message.kind!r}, which nobody waits for")

    def _start(self) -> list[Envelope]:
        message: Message = PooledScores(round=self.round, words=self._words)
        return [Envelope(self.address, self._holder, message)]


def opened(total: Ring) -> npt.NDArray[np.float64]:
    """The scores in a sum whose masks are off.

    Raises:
        Deviation: They are not plausible: somebody has answered something else than it was asked.
    """
    scores = SCORES.decode(total)
    if not (np.abs(scores) <= PLAUSIBLE).all():
        raise Deviation("the sum of all scores is not plausible: an answer does not belong to its request")
    return scores
