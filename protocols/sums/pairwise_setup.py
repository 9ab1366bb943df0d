"""The key agreement behind pairwise masks, run once per node, through the aggregator.

Where dropouts are recovered, it goes on without workers that are gone, as long as the others are enough; the
aggregator tells everybody who takes part, and everybody checks that.

Workers with an `Authenticator` sign their public keys, so that the aggregator cannot put others in their
place. ML-KEM ciphertexts need no signature: two workers whose ciphertext was changed have two different keys,
and whoever changed it has neither of them, as both also come from the X25519 keys that are signed.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols.contract import (
    AGGREGATOR,
    SETUP_ROUND,
    Address,
    Envelope,
    Machine,
    Message,
    name_of,
)
from securevfl.protocols.keys import (
    KEM_CIPHERTEXT_BYTES,
    KEM_PUBLIC_BYTES,
    SIGNATURE_BYTES,
    X25519_BYTES,
    PairKeys,
    PartyKeys,
    key_statement,
)
from securevfl.protocols.sums.pairwise_messages import Encapsulations, KeyDirectory, PublicKeys

if TYPE_CHECKING:
    from securevfl.protocols.sums.pairwise import PairwiseNode


def rows(parts: list[bytes], width: int) -> np.ndarray:
    """Equally long byte strings as the rows of an array, the form in which the wire carries them."""
    return np.frombuffer(b"".join(parts), dtype=np.uint8).reshape(len(parts), width)


def check_rows(array: object, count: int, width: int) -> np.ndarray:
    """Returns `array` if it has `count` rows of `width` bytes; raises `ProtocolError` otherwise."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape != (count, width):
        raise ProtocolError(f"message does not carry {count} rows of {width} bytes")
    return array


class _Setup(Machine):
    def __init__(self, node: PairwiseNode) -> None:
        super().__init__(node.address, round=SETUP_ROUND)
        self._node = node
        self._protocol = node.protocol
        self._public_bytes = X25519_BYTES + (KEM_PUBLIC_BYTES if node.protocol.hybrid else 0)

    def _drop(self, address: Address) -> list[Envelope]:
        if address == self.address or address not in self._protocol.addresses:
            raise ProtocolError(f"{name_of(address)} cannot drop out of the setup of {name_of(self.address)}")
        return [] if self.done else self._lose(address)

    def _lose(self, address: Address) -> list[Envelope]:
        """Goes on without somebody, if that is possible."""
        raise DropoutError(f"{name_of(address)} is gone before all keys were agreed; set up without it")

    @property
    def done(self) -> bool:
        """Whether this participant has its keys."""
        return self._node.pairs is not None


class WorkerSetup(_Setup):
    """A worker's key agreement: send keys, get the neighbours' keys, in hybrid mode swap ciphertexts."""

    def __init__(self, node: PairwiseNode) -> None:
        super().__init__(node)
        self._keys = PartyKeys(hybrid=node.protocol.hybrid)
        self._participants = frozenset(range(node.protocol.workers))
        self._directory: dict[Address, bytes] | None = None
        self._secrets: dict[Address, tuple[bytes, bytes]] = {}  # of higher neighbours: KEM secret, ciphertext

    def _start(self) -> list[Envelope]:
        public = self._keys.public
        if self._node.authenticator is not None:
            public += self._node.authenticator.sign(key_statement(self.address, public))
        return [Envelope(self.address, AGGREGATOR, PublicKeys(round=self.round, public=public))]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if sender != AGGREGATOR:
            raise ProtocolError(f"keys come from the aggregator, not from {name_of(sender)}")
        if isinstance(message, KeyDirectory) and self._directory is None:
            return self._take_directory(message)
        waiting = self._directory is not None and not self.done
        if isinstance(message, Encapsulations) and self._protocol.hybrid and waiting:
            return self._take_encapsulations(message)
        raise ProtocolError(f"{type(message).__name__} is out of phase at {name_of(self.address)}")

    def _lose(self, address: Address) -> list[Envelope]:
        if address == AGGREGATOR or not self._protocol.recovers:
            return super()._lose(address)
        return []  # the aggregator tells who takes part

    def _take_directory(self, message: KeyDirectory) -> list[Envelope]:
        participants, neighbours = self._take_list(message.participants)
        signed = SIGNATURE_BYTES if self._node.authenticator is not None else 0
        table = check_rows(message.public, len(neighbours), self._public_bytes + signed)
        directory = {
            peer: self._check_signed(peer, row.tobytes()) for peer, row in zip(neighbours, table, strict=True)
        }
        if not self._protocol.hybrid:
            pairs = {peer: self._pair(peer, public) for peer, public in directory.items()}
            self._directory = directory
            self._node.participants, self._node.pairs = participants, pairs
            return []
        higher = [peer for peer in neighbours if peer > self.address]
        secrets = {peer: self._keys.encapsulate(directory[peer]) for peer in higher}
        self._participants, self._directory, self._secrets = participants, directory, secrets
        table = rows([secrets[peer][1] for peer in higher], KEM_CIPHERTEXT_BYTES)
        answer = Encapsulations(round=self.round, participants=[], ciphertexts=table)
        return [Envelope(self.address, AGGREGATOR, answer)]

    def _check_signed(self, peer: Address, row: bytes) -> bytes:
        """A neighbour's public keys, if it signed them, where keys are signed."""
        public, signature = row[: self._public_bytes], row[self._public_bytes :]
        if self._node.authenticator is not None:
            self._node.authenticator.verify(peer, key_statement(peer, public), signature)
        return public

    def _take_encapsulations(self, message: Encapsulations) -> list[Envelope]:
        participants, neighbours = self._take_list(message.participants)
        lower = [peer for peer in neighbours if peer < self.address]
        table = check_rows(message.ciphertexts, len(lower), KEM_CIPHERTEXT_BYTES)
        received = {peer: row.tobytes() for peer, row in zip(lower, table, strict=True)}
        kem = {peer: (self._keys.decapsulate(raw), raw) for peer, raw in received.items()} | self._secrets
        directory = self._directory or {}
        pairs = {peer: self._pair(peer, directory[peer], *kem[peer]) for peer in neighbours}
        self._node.participants, self._node.pairs = participants, pairs
        return []

    def _take_list(self, listed: list[int]) -> tuple[frozenset[Address], tuple[Address, ...]]:
        """Who takes part, checked, and the neighbours among them."""
        participants = self._protocol.read_list(listed, allowed=self._participants, own=self.address)
        return participants, self._protocol.peers(self.address, participants)

    def _pair(self, peer: Address, public: bytes, kem: bytes = b"", ciphertext: bytes = b"") -> PairKeys:
        secret = self._keys.exchange(public) + kem
        own, other = (self.address, self._keys.public), (peer, public)
        context = b"".join(struct.pack(">q", address) + key for address, key in sorted((own, other)))
        return PairKeys(secret, context + ciphertext, own=self.address, peer=peer)


class AggregatorSetup(_Setup):
    """The aggregator's part: pass public keys and ciphertexts on, and tell who takes part."""

    def __init__(self, node: PairwiseNode) -> None:
        super().__init__(node)
        self._alive = frozenset(range(node.protocol.workers))
        self._listed: frozenset[Address] | None = None  # who got a directory
        self._public: dict[Address, bytes] = {}
        self._ciphertexts: dict[Address, dict[Address, bytes]] = {}  # sender -> receiver -> ciphertext

    def _start(self) -> list[Envelope]:
        return []

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if sender not in self._alive:
            raise ProtocolError(f"{name_of(sender)} takes no part in the key agreement, or no longer")
        if isinstance(message, PublicKeys) and self._listed is None and sender not in self._public:
            self._check_public(sender, message.public)
            self._public[sender] = message.public
            return self._advance()
        ready = self._protocol.hybrid and self._listed is not None
        if isinstance(message, Encapsulations) and ready and sender not in self._ciphertexts:
            higher = [peer for peer in self._peers(sender) if peer > sender]
            table = check_rows(message.ciphertexts, len(higher), KEM_CIPHERTEXT_BYTES)
            if message.participants != []:
                raise ProtocolError(f"{name_of(sender)} says who takes part; only the aggregator does")
            self._ciphertexts[sender] = {peer: row.tobytes() for peer, row in zip(higher, table, strict=True)}
            return self._advance()
        raise ProtocolError(f"{type(message).__name__} of {name_of(sender)} is out of phase or a repeat")

    def _check_public(self, sender: Address, public: object) -> None:
        """Keys come with signatures or without, but alike from all; their readers check them."""
        lengths = {len(other) for other in self._public.values()}
        lengths = lengths or {self._public_bytes, self._public_bytes + SIGNATURE_BYTES}
        if type(public) is not bytes or len(public) not in lengths:
            raise ProtocolError(f"keys of {name_of(sender)} do not have {max(lengths)} bytes")

    def _lose(self, address: Address) -> list[Envelope]:
        if not self._protocol.recovers:
            return super()._lose(address)
        if address not in self._alive:
            raise ProtocolError(f"{name_of(address)} has left the key agreement before")
        alive = self._alive - {address}
        self._protocol.check_present(alive)
        self._alive = alive
        return self._advance()

    def _peers(self, worker: Address) -> tuple[Address, ...]:
        return self._protocol.peers(worker, self._listed or frozenset())

    def _advance(self) -> list[Envelope]:
        """Passes on what has come once nobody alive is awaited."""
        if self._listed is None and self._alive <= self._public.keys():
            self._listed = self._alive
            if not self._protocol.hybrid:
                self._agree()
            return self._send_directories()
        if self._listed is not None and not self.done and self._alive <= self._ciphertexts.keys():
            self._agree()
            return self._send_ciphertexts()
        return []

    def _agree(self) -> None:
        self._node.participants, self._node.pairs = self._alive, {}

    def _send_directories(self) -> list[Envelope]:
        envelopes = []
        for worker in sorted(self._alive):
            table = rows([self._public[peer] for peer in self._peers(worker)], len(self._public[worker]))
            message = KeyDirectory(round=self.round, participants=sorted(self._alive), public=table)
            envelopes.append(Envelope(self.address, worker, message))
        return envelopes

    def _send_ciphertexts(self) -> list[Envelope]:
        envelopes = []
        for worker in sorted(self._alive):
            lower = [peer for peer in self._protocol.peers(worker, self._alive) if peer < worker]
            table = rows([self._ciphertexts[peer][worker] for peer in lower], KEM_CIPHERTEXT_BYTES)
            message = Encapsulations(round=self.round, participants=sorted(self._alive), ciphertexts=table)
            envelopes.append(Envelope(self.address, worker, message))
        return envelopes
