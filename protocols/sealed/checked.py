"""One round of sealed training among members that may cheat.

Shares are elements of the field of 2^61 - 1, and every opened residual has a tag: members hold shares gamma_j
of alpha d for the key alpha that nobody has. When all shares are in, the dealer tells a coin; each member
commits to its share of sum chi (gamma_j - alpha_j d), then opens it, and the shares must add up to 0. Before
that the round has no result: nothing can be learned, tested or kept from a total that was not verified.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidSignature

from securevfl.errors import Deviation, ProtocolError
from securevfl.protocols.contract import DEALER, Address, Envelope, Message, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.field import FIELD, Elements
from securevfl.protocols.sealed.messages import CheckedDeal, CheckedShare, Coin, Commitment, Opening
from securevfl.protocols.sealed.proof import coin_stream
from securevfl.protocols.sealed.protocol import (
    PHASES,
    RESIDUAL_BITS,
    RESIDUAL_ROOM,
    WORDS,
    Phase,
    SealedProtocol,
    expand,
    ring_product,
)
from securevfl.protocols.sealed.series import QUARTER, SineSeries, phase_places, sine_table
from securevfl.protocols.sealed.session import COIN_BYTES, CheckedMachine, CheckedSession
from securevfl.protocols.stream import KeyStream, derive_key

_DIGEST = 32
_SIGNATURE = 64
_NONCE = 32
_PIECE = 1 << 12
"""Records at a time: waves, tags and tables of a piece stay in the cache."""


def field_stream(seed: bytes, purpose: str) -> KeyStream:
    """The stream of field elements that dealer and member both derive from a seed."""
    return KeyStream(derive_key(seed, purpose=f"sealed/{purpose}"))


def blind(protocol: SealedProtocol, member: int, seed: bytes, shape: tuple[int, ...]) -> Ring:
    """V_j: below 2^v; the first member's is shifted, so that no residual plus V is negative."""
    words = expand(seed, "blind", shape)
    words >>= np.uint64(64 - protocol.blind_bits)
    if member == 0:
        words += np.uint64(RESIDUAL_ROOM)
    return words


def wave_holder(protocol: SealedProtocol, number: int) -> int:
    """Whose wave shares of a round are dealt; the tags go to the next: both take turns."""
    return number % protocol.members


def tag_shape(protocol: SealedProtocol, rows: int) -> tuple[int, ...]:
    """Tags of all waves, and of V."""
    sines, harmonics, _, scores = protocol.wave_shape(rows)
    return sines * harmonics + protocol.outputs // scores, rows, scores


def tags_of(protocol: SealedProtocol, tags: Elements) -> tuple[Elements, Elements]:
    """Views of the tags of all waves, (waves, rows, scores), and of those of V, (rows, outputs)."""
    sines, harmonics, *_ = protocol.wave_shape(tags.shape[1])
    # V has as many outputs as there are scores, or is kept as one score after the other.
    kept = tags[sines * harmonics :]
    return tags[: sines * harmonics], kept[0] if len(kept) == 1 else kept[:, :, 0].T


def commitment(session: bytes, number: int, member: int, nonce: bytes, word: int) -> bytes:
    """What a member is bound to before anybody opens."""
    content = b"securevfl/sealed/commitment" + session + number.to_bytes(8, "big") + member.to_bytes(4, "big")
    return hashlib.sha256(content + nonce + word.to_bytes(8, "big")).digest()


class Brought(NamedTuple):
    """What a member brings to a round; its operand and phases are secrets."""

    protocol: SealedProtocol
    member: int
    round: int
    rows: npt.NDArray[np.int64] | None
    operand: npt.NDArray[np.int32]
    phase: Ring | None


def _each_wave(factors: npt.NDArray[np.int64], words: Elements) -> Elements:
    """(rows, waves): sines, then cosines of the sum of two phases, from the parts of each."""
    count = len(words) // 2
    found = np.empty((words.shape[1], len(words)), np.uint64)
    for k in range(count):
        cosine, sine = factors[k], factors[count + k]
        pair = words[[k, count + k]]
        found[:, k] = FIELD.by_small(np.stack([cosine, sine]), pair)
        found[:, count + k] = FIELD.by_small(np.stack([-sine, cosine]), pair)
    return found


class CheckedRound(CheckedMachine):
    """Like `RoundMachine`, and its total exists only once it is verified. Built by `CheckedParty.round`."""

    def __init__(
        self,
        index: int,
        protocol: SealedProtocol,
        *,
        round: int,  # noqa: A002
        phase: Ring | None,
        rows: npt.NDArray[np.int64] | None,
        operand: npt.NDArray[np.int32],
        noise: dict[int, Ring],
        session: CheckedSession,
    ) -> None:
        super().__init__(index, protocol, round=round)
        self._count = protocol.records if rows is None else len(rows)
        self._shape = self._count, protocol.outputs
        self._phase, self._rows, self._operand, self._noise = phase, rows, operand, noise
        self._session = session
        self._deal: CheckedDeal | None = None
        self._phases: dict[int, Ring] = {}
        self._shares: dict[int, CheckedShare] = {}
        self._blind: Ring | None = None
        self._blinded: Ring | None = None
        self._tags: Elements | None = None
        self._opened: Elements | None = None
        self._served = self._said = False
        self._coin: bytes | None = None
        self._own: tuple[bytes, int] | None = None
        self._commitments: dict[int, Commitment] = {}
        self._openings: dict[int, Opening] = {}
        self._seen: dict[int, bytes] = {}
        self._total: Ring | None = None

    @property
    def brought(self) -> Brought:
        """What this member brings to the round, for an audit that makes the round again."""
        return Brought(self._protocol, self.address, self.round, self._rows, self._operand, self._phase)

    @property
    def done(self) -> bool:
        """Whether the own total is known and verified."""
        return self._total is not None

    def result(self) -> npt.NDArray[np.float64]:
        """This member's noisy total, verified: (width, outputs)."""
        if self._total is None:
            raise ProtocolError(f"round {self.round} of {name_of(self.address)} is not verified")
        return WORDS.decode(self._total)

    def _start(self) -> list[Envelope]:
        # One opening with an error in it reveals alpha: no later check of that session would mean anything.
        if self._session.unjudged:
            self._session.burn()
        if self._session.burnt:
            raise ProtocolError(f"{name_of(self.address)} has burnt this session; begin a new one")
        self._session.unjudged = True
        return []

    @property
    def _burnt(self) -> bool:
        return self._failed or self._session.burnt

    def _fail(self) -> None:
        super()._fail()
        self._session.burn()
        self._forget()

    # -- what arrives ---------------------------------------------------------------------------------------

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        protocol, other = self._protocol, sender in self._others
        match message:
            case CheckedDeal() if sender == DEALER and self._deal is None:
                return self._take_deal(message) + self._advance()
            case Phase() if other and sender not in self._phases and protocol.series:
                self._phases[sender] = PHASES.check(message.words, protocol.phase_shape(self._count))
            case CheckedShare() if other and sender not in self._shares:
                FIELD.check(message.blinded, self._shape)
                WORDS.check(message.product, protocol.total_shape(self.address))
                self._shares[sender] = message
            case Coin() if sender == DEALER and self._said and self._coin is None and message.stage == 1:
                return self._take_coin(message) + self._advance()
            case Commitment() if other and sender not in self._commitments and self._said:
                self._check_commitment(sender, message)
                self._commitments[sender] = message
            case Opening() if other and sender not in self._openings and self._own:
                FIELD.check(message.word, (1,))
                self._openings[sender] = message
            case _:
                raise self._out_of_turn(sender, message)
        return self._advance()

    def _take_deal(self, deal: CheckedDeal) -> list[Envelope]:
        protocol, first = self._protocol, wave_holder(self._protocol, self.round)
        WORDS.check(deal.product, protocol.total_shape(self.address))
        dealt = protocol.series is not None and self.address == first
        FIELD.check(deal.waves, protocol.wave_shape(self._count) if dealt else (0,))
        tagged = self.address == (first + 1) % protocol.members
        FIELD.check(deal.tags, tag_shape(protocol, self._count) if tagged else (0,))
        self._deal = deal
        if self._phase is None:
            return []
        words = self._phase - expand(deal.seed, "phase", self._phase.shape, np.uint32)
        self._phases[self.address] = words
        return self._to_all(Phase(round=self.round, words=words))

    def _take_coin(self, message: Coin) -> list[Envelope]:
        """Commits to this member's share of the check."""
        if (
            len(message.coin) != COIN_BYTES
            or message.corrections.size
            or self._opened is None
            or self._tags is None
        ):
            raise ProtocolError(f"the dealer sent a coin of {len(message.coin)} bytes")
        self._coin = message.coin
        stream = coin_stream(message.coin, self._session.name, f"round/{self.round}")
        factors = FIELD.draw(stream, self._shape)
        opened, tagged = FIELD.dots(factors, self._opened, self._tags)
        self._own = os.urandom(_NONCE), (tagged - self._session.key * opened) % FIELD.p
        digest = commitment(self._session.name, self.round, self.address, *self._own)
        return self._to_all(Commitment(round=self.round, digest=digest, seen=self._report()))

    def _check_commitment(self, sender: int, message: Commitment) -> None:
        seen = (_DIGEST + _SIGNATURE) * self._protocol.members if self._session.signer else 0
        if len(message.digest) != _DIGEST or len(message.seen) != seen:
            raise ProtocolError(f"{name_of(sender)} sends a commitment of a wrong length")

    # -- what follows ---------------------------------------------------------------------------------------

    def _advance(self) -> list[Envelope]:
        expected = 0 if self._protocol.series is None else self._protocol.members
        if self._deal is None or len(self._phases) < expected:
            return []
        sent: list[Envelope] = []
        everybody = len(self._others)
        if not self._served:
            self._served = True
            self._share_residual(self._deal)
            sent += [Envelope(self.address, m, self._share_for(m, self._deal)) for m in self._others]
        if not self._said and len(self._shares) == everybody:
            self._opened = self._add_up()
            self._said = True
            sent.append(self._ready(1))
        if self._own and not self._openings.get(self.address) and len(self._commitments) == everybody:
            nonce, word = self._own
            own = Opening(round=self.round, nonce=nonce, word=np.array([word], np.uint64))
            self._openings[self.address] = own
            sent += self._to_all(own)
        if len(self._openings) == everybody + 1 and self._total is None:
            self._verify()
            self._session.unjudged = False
            self._total = self._open(self._deal)
            self._forget()
        return sent

    def _share_residual(self, deal: CheckedDeal) -> None:
        """B_j and the tags gamma_j of what will be opened."""
        protocol, first = self._protocol, wave_holder(self._protocol, self.round)
        tags = deal.tags
        if self.address != (first + 1) % protocol.members:
            tags = FIELD.draw(field_stream(deal.seed, "tags"), tag_shape(protocol, self._count))
        waves = deal.waves
        if protocol.series is not None and self.address != first:
            waves = FIELD.draw(field_stream(deal.seed, "waves"), protocol.wave_shape(self._count))
        self._blind = blind(protocol, self.address, deal.seed, self._shape)
        share, tag = self._constants()
        share = FIELD.add(share, self._blind)
        wave_tags, blind_tags = tags_of(protocol, tags)
        tag = FIELD.add(tag, blind_tags)
        if protocol.series is not None:
            added, tagged = self._by_waves(waves.reshape(wave_tags.shape), wave_tags)
            share, tag = FIELD.add(share, added), FIELD.add(tag, tagged)
        self._blinded, self._tags = share, tag

    def _constants(self) -> tuple[Elements, Elements]:
        """This member's shares of offset - label (or label) and of its tag, the same in all rounds."""
        session, series = self._session, self._protocol.series
        if session.constants is None:
            labels, tags = (
                FIELD.shift(session.labels, RESIDUAL_BITS),
                FIELD.shift(session.tags, RESIDUAL_BITS),
            )
            if isinstance(series, SineSeries):
                offset = round(series.offset * 2.0**RESIDUAL_BITS)
                labels = FIELD.add(FIELD.negative(labels), offset if self.address == 0 else 0)
                tags = FIELD.add(FIELD.negative(tags), offset * session.key)
            session.constants = labels, tags
        labels, tags = session.constants
        return (labels, tags) if self._rows is None else (labels[self._rows], tags[self._rows])

    def _by_waves(self, waves: Elements, tags: Elements) -> tuple[Elements, Elements]:
        """sum_k sin(k d) waves[cosine k] + cos(k d) waves[sine k] for the public phase d; and of tags.

        Where all waves are totalled as they are, each is an output of its own.
        """
        series = self._protocol.sines
        delta: Ring = np.asarray(sum(self._phases.values()), np.uint32)
        table = sine_table().view(np.int64)
        added, tagged = np.empty(self._shape, np.uint64), np.empty(self._shape, np.uint64)
        for start in range(0, self._count, _PIECE):
            part = slice(start, start + _PIECE)
            places = np.stack(list(phase_places(delta[part], series.harmonics)))
            # Places are in range by their type; checking every one would double the time.
            factors = np.take(table, np.concatenate([places + QUARTER, places]), mode="clip")
            for words, out in ((waves[:, part], added), (tags[:, part], tagged)):
                if isinstance(series, SineSeries):
                    out[part] = FIELD.by_small(factors, words)
                else:
                    out[part] = _each_wave(factors[:, :, 0], words[:, :, 0])
        return added, tagged

    def _share_for(self, member: int, deal: CheckedDeal) -> CheckedShare:
        """B_j and q_mj = -E_m' V_j + c'_mj + e_mj."""
        if self._blind is None or self._blinded is None:
            raise ProtocolError(f"round {self.round} of {name_of(self.address)} has no shares yet")
        masked = self._session.masked[member]
        masked = masked if self._rows is None else np.ascontiguousarray(masked[:, self._rows])
        product = expand(deal.seed, f"product/{member}", self._protocol.total_shape(member))
        product -= ring_product(masked, self._blind)
        product += self._noise[member]  # before it leaves: nobody ever holds the product without it
        return CheckedShare(
            round=self.round, blinded=self._blinded, product=product, signature=self._signature()
        )

    def _add_up(self) -> Elements:
        """d: all blinded shares together. Whoever signed something else than it sent is refused."""
        if self._blinded is None:
            raise ProtocolError(f"round {self.round} of {name_of(self.address)} has no shares yet")
        total = self._blinded
        for sender, share in self._shares.items():
            total = FIELD.add(total, share.blinded)
            self._check_signature(sender, share)
        return total

    def _open(self, deal: CheckedDeal) -> Ring:
        """The own total; the own noise stays in it."""
        if self._opened is None or self._blind is None:
            raise ProtocolError(f"round {self.round} of {name_of(self.address)} has no shares yet")
        total = ring_product(self._operand, self._opened - self._blind)
        total += deal.product
        total += self._noise[self.address]
        for share in self._shares.values():
            total += share.product
        return total

    # -- the check ------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        """Raises unless all commitments are kept and the shares of the check add up to 0."""
        total = 0
        for sender, opening in self._openings.items():
            word = int(opening.word[0])
            total += word
            if sender == self.address:
                continue
            expected = commitment(self._session.name, self.round, sender, opening.nonce, word)
            if not hmac.compare_digest(expected, self._commitments[sender].digest):
                raise Deviation("it opens something else than it has committed to", sender)
        if total % FIELD.p == 0:
            return
        if len(self._others) == 1:
            raise Deviation("an opened residual is not what was dealt and proved", self._others[0])
        self._find_equivocation()
        raise Deviation(
            "an opened residual is not what was dealt and proved; everybody told all others the same, so "
            "nobody can be named"
        )

    def _digest(self, sender: int, blinded: Elements) -> bytes:
        """Of what a member sends to all in this round."""
        content = hashlib.sha256(b"securevfl/sealed/broadcast" + self._session.name)
        content.update(self.round.to_bytes(8, "big") + sender.to_bytes(4, "big"))
        if sender == self._protocol.label_holder:  # two members may have been told, and proved, other labels
            content.update(self._session.told)
        if self._protocol.series is not None:
            content.update(np.ascontiguousarray(self._phases[sender], "<u4").data)
        content.update(np.ascontiguousarray(blinded, "<u8").data)
        return content.digest()

    def _signed(self, sender: int, digest: bytes) -> bytes:
        """What a signature is of: a digest that was signed in another round tells nothing about this one."""
        where = self.round.to_bytes(8, "big") + sender.to_bytes(4, "big")
        return b"securevfl/sealed/signed" + self._session.name + where + digest

    def _signature(self) -> bytes:
        if self._session.signer is None or self._blinded is None:
            return b""
        if self.address not in self._seen:
            digest = self._digest(self.address, self._blinded)
            self._seen[self.address] = digest + self._session.signer.sign(self._signed(self.address, digest))
        return self._seen[self.address][_DIGEST:]

    def _check_signature(self, sender: int, share: CheckedShare) -> None:
        if self._session.signer is None:
            if share.signature:
                raise Deviation("it signs what needs no signature", sender)
            return
        digest = self._digest(sender, share.blinded)
        if not self._is_signed(sender, digest + share.signature):
            raise Deviation("its signature does not fit what it sent", sender)
        self._seen[sender] = digest + share.signature

    def _is_signed(self, sender: int, seen: bytes) -> bool:
        try:
            signed = self._signed(sender, seen[:_DIGEST])
            self._session.verifiers[sender].verify(seen[_DIGEST:], signed)
        except InvalidSignature:
            return False
        return True

    def _report(self) -> bytes:
        """Digest and signature of what everybody sent to this member."""
        if self._session.signer is None:
            return b""
        return b"".join(self._seen[m] for m in range(self._protocol.members))

    def _find_equivocation(self) -> None:
        """Raises with a name if somebody signed two different things, or reports what nobody signed."""
        size = _DIGEST + _SIGNATURE
        for sender in self._others:
            for reporter, message in self._commitments.items():
                seen = message.seen[sender * size : (sender + 1) * size]
                if seen[:_DIGEST] == self._seen[sender][:_DIGEST]:
                    continue
                if self._is_signed(sender, seen):
                    raise Deviation("it told members different things, and signed both", sender)
                raise Deviation(f"it reports what member {sender} did not sign", reporter)
        own = self._seen[self.address][:_DIGEST]
        for reporter, message in self._commitments.items():
            if message.seen[self.address * size :][:_DIGEST] != own:
                raise Deviation(f"it reports what member {self.address} did not sign", reporter)

    def _forget(self) -> None:
        """Erases the round's seed, masks and noise; the total stays."""
        nothing = np.empty(0, np.uint64)
        self._deal = CheckedDeal(
            round=self.round, seed=b"", locked=b"", product=nothing, waves=nothing, tags=nothing
        )
        self._blind = self._blinded = self._tags = self._opened = nothing
        self._noise, self._own = {}, (b"", 0)
