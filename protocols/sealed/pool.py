"""Masks of scores, made ahead: a label holder obtains sums of scores in one question and one answer.

The dealer deals a pool: to every party a seed, to the label holder the sum of all parties' masks and the keys
of their tags, as for one opening of many scores. A request takes the next places of the pool, which serve
once. All parties but the label holder also share a key that it does not know: what they add from it cancels
only if all were asked for the same records under the same name, so that a label holder which asks two parties
for different people obtains uniform words. The tag of an answer names its question, its request and its
records: one that was changed, or belongs to another question, is refused, and its sender named.

Members that trained without a dealer make their masks from the seeds that every two of them share
(`PairPool`): what a pair adds and subtracts is made for one place, one request and its records, and cancels
if both answer that. What the label holder shares with a party hides nothing from it; between parties it
knows no seed, and as with a dealer obtains the sum alone. With two members the sum tells the other's part.

Exact sums: a request that is repeated with other places gives the same sum, and nothing besides. What a party
puts in is its own to choose, as in every prediction; a sum beyond all reason is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from securevfl.errors import Deviation, ProtocolError
from securevfl.protocols.contract import DEALER, Address, Envelope, Message, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.protocol import SCORES, MaskedScores, ScoreDeal, SealedProtocol, expand
from securevfl.protocols.sealed.round import SealedMachine
from securevfl.protocols.sealed.scoring import score_mask, score_tag, tag_key
from securevfl.protocols.stream import KEY_BYTES, derive_key

POOL = 1 << 16
"""Scores whose masks are dealt at a time."""
ENDLESS = 1 << 62
"""Places of a pool that members make themselves."""
PLAUSIBLE = 4096.0
"""Largest sum of scores that is believed. Uniform words exceed it but with probability 2^-18 each."""


def _parties(protocol: SealedProtocol) -> list[int]:
    return [member for member in range(protocol.members) if member != protocol.label_holder]


def deal_pool(
    protocol: SealedProtocol,
    *,
    round: int,  # noqa: A002
    agreed: bytes = b"",
    count: int = POOL,
) -> list[Envelope]:
    """What the dealer sends to every member: fresh masks of `count` scores.

    Args:
        protocol: The public configuration.
        round: Number of the pool.
        agreed: What was agreed on: the masks of members that know of another agreement do not cancel.
        count: How many scores.
    """
    shape, binding = (count, protocol.outputs), os.urandom(KEY_BYTES)
    seeds = {member: os.urandom(KEY_BYTES) for member in _parties(protocol)}
    nothing, total = np.empty(0, np.uint64), np.zeros(shape, np.uint64)
    for seed in seeds.values():
        total += score_mask(seed, agreed, shape)
    dealt = {
        member: ScoreDeal(round=round, seed=seed, words=nothing, keys=binding)
        for member, seed in seeds.items()
    }
    keys = b"".join(map(tag_key, seeds.values()))
    dealt[protocol.label_holder] = ScoreDeal(round=round, seed=b"", words=total, keys=keys)
    return [Envelope(DEALER, member, message) for member, message in dealt.items()]


class ScorePool:
    """One member's masks of a pool; every place serves once, in order.

    Args:
        protocol: The public configuration.
        index: Which member.
        deal: What the dealer sent to it.
        agreed: What all have agreed on.
        count: How many scores the pool is for.

    Raises:
        ProtocolError: The deal is none for this member.
    """

    def __init__(
        self, protocol: SealedProtocol, index: int, deal: ScoreDeal, *, agreed: bytes = b"", count: int = POOL
    ) -> None:
        self.round, self.next = deal.round, 0
        self._protocol, self._index, self._agreed, self._count = protocol, index, agreed, count
        self._parties, shape = _parties(protocol), (count, protocol.outputs)
        holder = index == protocol.label_holder
        expected = (0, len(self._parties) * KEY_BYTES) if holder else (KEY_BYTES, KEY_BYTES)
        if (len(deal.seed), len(deal.keys)) != expected:
            raise ProtocolError("the dealer sent a seed or keys of a wrong length")
        self._words = SCORES.check(deal.words, shape) if holder else score_mask(deal.seed, agreed, shape)
        self._key, self._keys = b"" if holder else tag_key(deal.seed), deal.keys

    @property
    def left(self) -> int:
        """Places that have not served yet."""
        return self._count - self.next

    def masks(self, start: int, *, name: str, rows: npt.NDArray[np.int64]) -> Ring:
        """The masks of a request from a place on: what a party adds, and the label holder takes off.

        Raises:
            ProtocolError: One of the places has served, or lies beyond the end.
        """
        count = len(rows)
        if not self.next <= start <= start + count <= self._count:
            raise ProtocolError(f"masks {start} to {start + count} of pool {self.round}; next is {self.next}")
        self.next = start + count
        return self._masks(start, _asked(name, rows), (count, self._protocol.outputs))

    def _masks(self, start: int, asked: bytes, shape: tuple[int, ...]) -> Ring:
        words = self._words[start : start + shape[0]]
        if self._index == self._protocol.label_holder or len(self._parties) == 1:
            return words
        place = self._parties.index(self._index)
        following = (place + 1) % len(self._parties)
        return words + self._bound(place, asked, shape) - self._bound(following, asked, shape)

    def answer(
        self,
        values: Ring,
        *,
        round: int,  # noqa: A002
        start: int,
        name: str,
        rows: npt.NDArray[np.int64],
    ) -> PooledMachine:
        """The machine that gives a party's values to the label holder, under the masks from a place on.

        Args:
            values: One row per record.
            round: Number of the question.
            start: The first place.
            name: The request's.
            rows: Its records.
        """
        masked = values + self.masks(start, name=name, rows=rows)
        message = MaskedScores(round=round, words=masked, tag=b"")
        records = self._named(start, _asked(name, rows))
        tag = score_tag(self._key, self._index, self._agreed, records, message)
        sent = MaskedScores(round=round, words=masked, tag=tag)
        return PooledMachine(self._index, self._protocol.label_holder, sent)

    def verify(
        self, sender: int, message: MaskedScores, *, start: int, name: str, rows: npt.NDArray[np.int64]
    ) -> Ring:
        """What a party has answered, at the label holder.

        Raises:
            Deviation: It answers something else.
            ProtocolError: It has another form.
        """
        place = self._parties.index(sender)
        key = self._keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
        records = self._named(start, _asked(name, rows))
        words = SCORES.check(message.words, (len(rows), self._protocol.outputs))
        if not hmac.compare_digest(score_tag(key, sender, self._agreed, records, message), message.tag):
            raise Deviation("its answer is to another question, of other records or was changed", sender)
        return words

    def _named(self, start: int, asked: bytes) -> bytes:
        return f"{self.round}/{start}/".encode() + asked

    def _bound(self, place: int, asked: bytes, shape: tuple[int, ...]) -> Ring:
        return expand(self._keys, f"pool/{place}/{asked.hex()}", shape)


class PairPool(ScorePool):
    """One member's masks where nobody deals: as many as are asked for, from the seeds of one session.

    Args:
        protocol: The public configuration.
        index: Which member.
        seeds: What it shares with every other member, in this session alone.
        agreed: What all have agreed on.
    """

    def __init__(
        self, protocol: SealedProtocol, index: int, seeds: Mapping[int, bytes], *, agreed: bytes = b""
    ) -> None:
        self.round, self.next, self._count = 0, 0, ENDLESS
        self._protocol, self._index, self._agreed = protocol, index, agreed
        self._parties = _parties(protocol)
        purpose = f"sealed/pool/{agreed.hex()}"
        self._seeds = {member: derive_key(seed, purpose=purpose) for member, seed in seeds.items()}
        holds = index == protocol.label_holder
        self._key = b"" if holds else tag_key(self._seeds[protocol.label_holder])
        self._keys = b"".join(tag_key(self._seeds[each]) for each in self._parties) if holds else b""

    def _masks(self, start: int, asked: bytes, shape: tuple[int, ...]) -> Ring:
        total = np.zeros(shape, np.uint64)
        for other, seed in self._seeds.items():
            mask = expand(seed, f"pool/{start}/{asked.hex()}", shape)
            total = total + mask if self._index < other else total - mask
        return -total if self._index == self._protocol.label_holder else total


def _asked(name: str, rows: npt.NDArray[np.int64]) -> bytes:
    """This request of these records, and no other."""
    return hashlib.sha256(name.encode() + b"\0" + rows.astype("<i8").tobytes()).digest()


class PooledMachine(SealedMachine):
    """A party's answer to one question; it has nothing to wait for. Built by `ScorePool.answer`."""

    def __init__(self, index: int, holder: int, message: MaskedScores) -> None:
        super().__init__(index, round=message.round)
        self._holder, self._message = holder, message

    @property
    def done(self) -> bool:
        """Whether the answer was given."""
        return self._started

    def _start(self) -> list[Envelope]:
        return [Envelope(self.address, self._holder, self._message)]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        raise ProtocolError(f"{name_of(sender)} sends {message.kind!r}, which nobody waits for")


def opened(total: Ring) -> npt.NDArray[np.float64]:
    """The scores in a sum whose masks are off.

    Raises:
        Deviation: They are not plausible.
    """
    scores = SCORES.decode(total)
    if not (np.abs(scores) <= PLAUSIBLE).all():
        raise Deviation("a sum of scores is not plausible")
    return scores
