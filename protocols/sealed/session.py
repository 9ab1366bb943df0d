"""The set-up of a checked session: masked rows and labels are opened, then proved to everybody.

One machine is prover towards all others and verifier of each of them. The dealer draws a coin only when all
members have said that everything before it is in. Whoever finds a proof wanting stops, and says whose.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from securevfl.errors import Deviation, DropoutError, InputError, ProtocolError
from securevfl.protocols.contract import DEALER, SETUP_ROUND, Address, Envelope, Machine, Message, name_of
from securevfl.protocols.sealed.field import FIELD, Elements
from securevfl.protocols.sealed.messages import Bits, CheckedOperand, Coin, Proof, ProofKeys, ProofSeed, Ready
from securevfl.protocols.sealed.proof import ProofClaim, Prover, Secrets, Verifier, VerifierKeys, seed_stream
from securevfl.protocols.sealed.protocol import WORDS, SealedProtocol
from securevfl.protocols.stream import KEY_BYTES

SESSION_BYTES = 16
COIN_BYTES = 32
_KEY_BYTES = 32


@dataclass(kw_only=True, eq=False)
class CheckedSession:
    """One member's secrets of a checked session; `burn` ends it for ever.

    Attributes:
        name: The session's public name, bound into every commitment and signature.
        key: alpha_j, its share of the key of all tags.
        masked: The others' masked operands, as rings multiply them.
        labels: Its share of the labels, (records, outputs).
        tags: Its share of the labels' tags.
        constants: Both as rounds use them, once a round has computed it.
        told: Digest of the masked labels that it was told: part of what the label holder signs.
        signer: Signs what it sends to all; None with two members, where nobody else could be told otherwise.
        verifiers: The others' public keys.
        unjudged: Whether a round has begun whose check has not passed.
    """

    name: bytes
    key: int
    masked: dict[int, npt.NDArray[np.uint64]]
    labels: Elements
    tags: Elements
    constants: tuple[Elements, Elements] | None = None
    told: bytes = b""
    signer: Ed25519PrivateKey | None = None
    verifiers: dict[int, Ed25519PublicKey] = field(default_factory=dict)
    unjudged: bool = False
    burnt: bool = False

    def burn(self) -> None:
        """Erases everything: no iteration of this session is ever judged again."""
        nothing = np.empty(0, np.uint64)
        self.burnt, self.key, self.signer = True, 0, None
        self.masked, self.labels, self.tags, self.constants = {}, nothing, nothing, None


class CheckedMachine(Machine):
    """A machine that needs everybody, and whose session does not survive anything unexpected."""

    def __init__(self, index: int, protocol: SealedProtocol, *, round: int) -> None:  # noqa: A002
        super().__init__(index, round=round)
        self._protocol = protocol
        self._others = tuple(m for m in range(protocol.members) if m != index)
        self._failed = False

    @property
    def _burnt(self) -> bool:
        return self._failed

    def receive(self, envelope: Envelope) -> list[Envelope]:
        """Takes one message; after an error it takes no other.

        A member that sends what has no place here, or no such form, is named.
        """
        if self._burnt:
            raise ProtocolError(f"{name_of(self.address)} has burnt this session; begin a new one")
        delivered = self._started and envelope.receiver == self.address
        try:
            return super().receive(envelope)
        except Deviation:
            self._fail()
            raise
        except ProtocolError as fault:
            self._fail()
            if delivered and envelope.sender in self._others:
                raise Deviation(str(fault), envelope.sender) from None
            raise

    def _fail(self) -> None:
        self._failed = True

    def _drop(self, address: Address) -> list[Envelope]:
        self._fail()
        raise DropoutError(f"sealed training cannot go on without {name_of(address)}; resume when it is back")

    def _to_all(self, message: Message) -> list[Envelope]:
        return [Envelope(self.address, other, message) for other in self._others]

    def _ready(self, stage: int) -> Envelope:
        return Envelope(self.address, DEALER, Ready(round=self.round, stage=stage))

    def _out_of_turn(self, sender: Address, message: Message) -> ProtocolError:
        return ProtocolError(f"{name_of(sender)} sends {message.kind!r} out of turn in round {self.round}")


class ProofMachine(CheckedMachine):
    """Opens and proves the own rows and labels, and verifies all others'.

    Args:
        index: Which member.
        protocol: The public configuration.
        operand: The member's operand.
        labels: Of the label holder: (records, outputs) of 0 and 1.
    """

    def __init__(
        self,
        index: int,
        protocol: SealedProtocol,
        operand: npt.NDArray[np.int32],
        labels: npt.NDArray[np.float64] | None,
    ) -> None:
        super().__init__(index, protocol, round=SETUP_ROUND)
        unit = protocol.operand_unit(index)
        if (operand % unit).any():
            raise InputError(f"one-hot columns of member {index} hold something else than 0 and {unit}")
        self._operand = operand // unit
        self._labels = np.empty(0) if labels is None else labels[:, :1] if protocol.complement else labels
        self._claims = protocol.claims
        signer = Ed25519PrivateKey.generate() if protocol.members > 2 else None
        self._signer = signer
        raw = serialization.Encoding.Raw, serialization.PublicFormat.Raw
        self._keys: dict[int, bytes] = {index: signer.public_key().public_bytes(*raw) if signer else b""}
        self._seed: ProofSeed | None = None
        self._prover: Prover | None = None
        self._verifiers: dict[int, Verifier] = {}
        self._opened: dict[int, CheckedOperand] = {}
        self._elements: dict[int, Elements] = {}
        self._bits: dict[int, Bits] = {}
        self._proofs: dict[int, Proof] = {}
        self._coins: list[Coin] = []
        self._said = 0
        self.session: CheckedSession | None = None

    @property
    def brought(self) -> tuple[ProofClaim, npt.NDArray[np.int32], npt.NDArray[np.float64]]:
        """What this member proves, its operand as it is proved and its labels: secrets, for an audit."""
        return self._claims[self.address], self._operand, self._labels

    @property
    def done(self) -> bool:
        """Whether everybody's proof has held."""
        return self.session is not None

    def _start(self) -> list[Envelope]:
        return []

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        other = sender in self._others
        match message:
            case ProofSeed() if sender == DEALER and self._seed is None:
                return self._open(message) + self._advance()
            case ProofKeys() if sender == DEALER and message.prover not in self._verifiers:
                self._take_keys(message)
            case CheckedOperand() if other and sender not in self._opened:
                self._take_operand(sender, message)
            case Coin() if sender == DEALER and message.stage == len(self._coins) + 1 == self._said:
                return self._take_coin(message) + self._advance()
            case Bits() if other and sender not in self._bits and self._said >= 1:
                FIELD.check(message.words, self._claims[sender].bits_shape)
                if len(message.keys) != _KEY_BYTES:
                    raise ProtocolError(f"{name_of(sender)} sends a digest of {len(message.keys)} bytes")
                self._bits[sender] = message
            case Proof() if other and sender not in self._proofs and self._said >= 2:
                self._proofs[sender] = message
            case _:
                raise self._out_of_turn(sender, message)
        return self._advance()

    # -- what arrives ---------------------------------------------------------------------------------------

    def _open(self, seed: ProofSeed) -> list[Envelope]:
        """Masks rows and labels and opens them to all."""
        members = self._protocol.members
        if (len(seed.session), len(seed.seed), len(seed.pairs)) != (
            SESSION_BYTES,
            KEY_BYTES,
            members * KEY_BYTES,
        ):
            raise ProtocolError("the dealer sent seeds of a wrong length")
        shape = self._label_shape
        for words, holder in ((seed.share, 0), (seed.tags, 1)):
            FIELD.check(words, shape if self.address == holder else (0,))
        self._prover = self._make_prover(Secrets(self._claims[self.address], seed.seed))
        self._seed = seed
        return self._to_all(
            CheckedOperand(
                round=self.round,
                words=self._prover.opened(),
                labels=self._prover.opened_labels(),
                key=self._keys[self.address],
            )
        )

    def _make_prover(self, secrets: Secrets) -> Prover:
        return Prover(secrets, self._operand, self._labels.astype(np.uint64))

    def _take_keys(self, message: ProofKeys) -> None:
        if message.prover not in self._others:
            raise ProtocolError(f"the dealer sent keys for member {message.prover}, who proves nothing here")
        FIELD.check(message.point, (1,))
        keys = VerifierKeys(
            point=int(message.point[0]),
            operand=message.operand,
            bits=message.bits,
            labels=message.labels,
            masks=message.masks,
        )
        self._verifiers[message.prover] = Verifier(self._claims[message.prover], keys)

    def _take_operand(self, sender: int, message: CheckedOperand) -> None:
        claim = self._claims[sender]
        WORDS.check(message.words, claim.operand_shape)
        FIELD.check(message.labels, claim.labels_shape)
        if len(message.key) != (_KEY_BYTES if self._signer else 0):
            raise ProtocolError(f"{name_of(sender)} sends a key of {len(message.key)} bytes")
        self._elements[sender] = claim.check_opened(message.words)
        self._opened[sender], self._keys[sender] = message, message.key

    def _take_coin(self, message: Coin) -> list[Envelope]:
        if len(message.coin) != COIN_BYTES or self._seed is None or self._prover is None:
            raise ProtocolError(f"the dealer sent a coin of {len(message.coin)} bytes")
        FIELD.check(message.corrections, (self._protocol.members,) if message.stage == 2 else (0,))
        self._coins.append(message)
        name = self._seed.session
        if message.stage == 1:
            words = self._prover.opened_bits(message.coin, name)
            return self._to_all(Bits(round=self.round, words=words, keys=self._all_keys()))
        sent = []
        for other in self._others:
            pair = self._seed.pairs[other * KEY_BYTES : (other + 1) * KEY_BYTES]
            words = self._prover.prove(pair, self._coins[0].coin, message.coin, name)
            sent.append(Envelope(self.address, other, Proof(round=self.round, words=words)))
        return sent

    def _all_keys(self) -> bytes:
        """A digest of everybody's keys: signatures mean something only if all hold the same ones."""
        joined = b"".join(self._keys[m] for m in range(self._protocol.members))
        return hashlib.sha256(joined).digest()

    # -- what follows ---------------------------------------------------------------------------------------

    def _advance(self) -> list[Envelope]:
        everybody = len(self._others)
        if self._said == 0 and self._seed and len(self._opened) == len(self._verifiers) == everybody:
            self._said = 1
            return [self._ready(1)]
        if self._said == 1 and self._coins and len(self._bits) == everybody:
            if any(bits.keys != self._all_keys() for bits in self._bits.values()):
                only = self._others[0] if everybody == 1 else None
                raise Deviation("members were given different keys for signatures", only)
            self._said = 2
            return [self._ready(2)]
        if len(self._coins) == 2 and len(self._proofs) == everybody and self.session is None:
            for other in self._others:
                self._verify(other)
            self.session = self._conclude()
        return []

    def _verify(self, prover: int) -> None:
        first, second = self._coins
        try:
            self._verifiers[prover].check(
                opened=self._elements[prover],
                bits=self._bits[prover].words,
                labels=self._opened[prover].labels,
                proof=self._proofs[prover].words,
                first=first.coin,
                second=second.coin,
                correction=int(second.corrections[prover]),
                session=self._seed.session if self._seed else b"",
            )
        except ProtocolError as fault:
            raise Deviation(str(fault), prover) from None

    @property
    def _label_shape(self) -> tuple[int, int]:
        return self._claims[self._protocol.label_holder].labels_shape

    def _conclude(self) -> CheckedSession:
        """What the rounds need; masks, points and coins are forgotten."""
        if self._seed is None or self._prover is None:
            raise ProtocolError("a session without a seed")
        holder = self._protocol.label_holder
        key = int(FIELD.draw(seed_stream(self._seed.seed, "key"), 1)[0])
        share = self._label_words("share", self._seed.share, 0)
        tags = self._label_words("tags", self._seed.tags, 1)
        opened = self._prover.opened_labels() if self.address == holder else self._opened[holder].labels
        labels = FIELD.sub(opened if self.address == 0 else np.zeros_like(opened), share)
        tags = FIELD.sub(FIELD.mul(opened, key), tags)
        found = CheckedSession(
            name=self._seed.session,
            key=key,
            masked={m: self._ring(m) for m in self._others},
            labels=self._by_record(labels, int(self.address == 0)),
            tags=self._by_record(tags, key),
            told=hashlib.sha256(np.ascontiguousarray(opened, "<u8").data).digest(),
            signer=self._signer,
            verifiers={
                m: Ed25519PublicKey.from_public_bytes(self._keys[m]) for m in self._others if self._signer
            },
        )
        self._prover, self._seed = (
            None,
            ProofSeed(
                round=self.round,
                session=found.name,
                seed=b"",
                locked=b"",
                pairs=b"",
                share=share[:0],
                tags=share[:0],
            ),
        )
        self._verifiers, self._opened, self._elements, self._bits, self._proofs = {}, {}, {}, {}, {}
        return found

    def _label_words(self, name: str, dealt: Elements, holder: int) -> Elements:
        """This member's share of the label mask, or of its tags: dealt to one, expanded by the others."""
        if self._seed is None:
            raise ProtocolError("a session without a seed")
        return (
            dealt
            if self.address == holder
            else FIELD.draw(seed_stream(self._seed.seed, name), self._label_shape)
        )

    def _ring(self, member: int) -> npt.NDArray[np.uint64]:
        width, unit = self._protocol.widths[member], self._protocol.operand_unit(member)
        return np.ascontiguousarray(self._opened[member].words[:width]) * np.uint64(unit)

    def _by_record(self, words: Elements, one: int) -> Elements:
        """(records, outputs); with a complement the second output is 1 less the first."""
        protocol = self._protocol
        count = self._claims[protocol.label_holder].labels
        if not count:
            return np.zeros((protocol.records, protocol.outputs), np.uint64)
        first = words.reshape(-1)[:count].reshape(protocol.records, -1)
        if not protocol.complement:
            return first
        return np.concatenate([first, FIELD.add(FIELD.negative(first), one)], axis=1)
