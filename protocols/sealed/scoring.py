"""The opening of exact scores: the label holder obtains the sum of all members', and nobody anything else.

Masks are bound to what all have agreed on: scores of two members that were shown different agreements,
whoever lied to them, add up to noise. Each member's words have a tag under a key of the dealer's, over the
agreement and the records that the member took; the label holder opens nothing unless all took those that it
took itself.
"""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import numpy.typing as npt

from securevfl.errors import Deviation, DropoutError, ProtocolError
from securevfl.protocols.contract import DEALER, Address, Envelope, Message, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.protocol import SCORES, MaskedScores, ScoreDeal, SealedProtocol, expand
from securevfl.protocols.sealed.round import SealedMachine
from securevfl.protocols.stream import KEY_BYTES, derive_key


def score_mask(seed: bytes, agreed: bytes, shape: tuple[int, ...]) -> Ring:
    """The mask on a member's scores, which it can make for one agreement only."""
    return expand(seed, f"score/{agreed.hex()}", shape)


def tag_key(seed: bytes) -> bytes:
    """The key of a member's tag; it tells nothing of the seed."""
    return derive_key(seed, purpose="sealed/score-tag")


def score_tag(key: bytes, member: int, agreed: bytes, records: bytes, message: MaskedScores) -> bytes:
    """The tag of a member's masked scores."""
    parts = (b"securevfl/sealed/score", agreed, records, np.ascontiguousarray(message.words, "<u8").tobytes())
    content = message.round.to_bytes(8, "big") + member.to_bytes(4, "big")
    content += b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(key, content, hashlib.sha256)


class ScoreMachine(SealedMachine):
    """Opens the sum of all members' scores to the label holder: a release per record, counted apart.

    Built by `SealedParty.score`.
    """

    def __init__(
        self,
        index: int,
        protocol: SealedProtocol,
        words: Ring,
        *,
        round: int,  # noqa: A002
        agreed: bytes,
        records: bytes,
    ) -> None:
        super().__init__(index, round=round)
        self._holder, self._words = protocol.label_holder, words
        self._agreed, self._records = agreed, records
        others = [m for m in range(protocol.members) if m != index]
        self._others = others if index == self._holder else []
        self._deal: ScoreDeal | None = None
        self._masked: dict[int, MaskedScores] = {}
        self._total: Ring | None = None

    @property
    def done(self) -> bool:
        """Whether everything is sent, or received and verified."""
        return self._total is not None

    def result(self) -> npt.NDArray[np.float64]:
        """The summed scores, at the label holder."""
        if self.address != self._holder:
            return super().result()
        if self._total is None:
            missing = [m for m in self._others if m not in self._masked]
            raise ProtocolError(f"round {self.round} is not done; {missing} are missing")
        return SCORES.decode(self._total)

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        match message:
            case ScoreDeal() if sender == DEALER and self._deal is None:
                self._take_deal(message)
            case MaskedScores() if sender in self._others and sender not in self._masked:
                SCORES.check(message.words, self._words.shape)
                self._masked[sender] = message
            case _:
                raise ProtocolError(f"{name_of(sender)} sends {message.kind!r} out of turn in a prediction")
        return self._advance()

    def _take_deal(self, deal: ScoreDeal) -> None:
        holder = self.address == self._holder
        SCORES.check(deal.words, self._words.shape if holder else (0,))
        if (len(deal.seed), len(deal.keys)) != (0 if holder else KEY_BYTES, len(self._others) * KEY_BYTES):
            raise ProtocolError("the dealer sent a seed or keys of a wrong length")
        self._deal = deal

    def _advance(self) -> list[Envelope]:
        if self._deal is None or len(self._masked) < len(self._others):
            return []
        if self.address != self._holder:
            return self._send(self._deal.seed)
        for place, sender in enumerate(self._others):
            key = self._deal.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
            tag = score_tag(key, sender, self._agreed, self._records, self._masked[sender])
            if not hmac.compare_digest(tag, self._masked[sender].tag):
                raise Deviation("its scores are of other records, or by another agreement", sender)
        received = sum((each.words for each in self._masked.values()), np.zeros_like(self._words))
        self._total = self._words - self._deal.words + received
        return []

    def _send(self, seed: bytes) -> list[Envelope]:
        self._total = self._words + score_mask(seed, self._agreed, self._words.shape)
        message = MaskedScores(round=self.round, words=self._total, tag=b"")
        tag = score_tag(tag_key(seed), self.address, self._agreed, self._records, message)
        sent = MaskedScores(round=self.round, words=self._total, tag=tag)
        return [Envelope(self.address, self._holder, sent)]

    def _drop(self, address: Address) -> list[Envelope]:
        raise DropoutError(f"a prediction needs {name_of(address)}; ask again when it is back")
