"""The key agreement behind pairwise masks, run once through the aggregator."""

from __future__ import annotations

import struct

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
from securevfl.protocols.keys import KEM_CIPHERTEXT_BYTES, KEM_PUBLIC_BYTES, X25519_BYTES, PairKeys, PartyKeys
from securevfl.protocols.pairwise import Encapsulations, KeyDirectory, PairwiseNode, PublicKeys


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
        if self.done:
            return []
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
        self._neighbours = node.protocol.graph.neighbours(node.address)
        self._directory: dict[Address, bytes] | None = None
        self._secrets: dict[Address, tuple[bytes, bytes]] = {}  # of higher neighbours: KEM secret, ciphertext

    def _start(self) -> list[Envelope]:
        return [Envelope(self.address, AGGREGATOR, PublicKeys(round=self.round, public=self._keys.public))]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if sender != AGGREGATOR:
            raise ProtocolError(f"keys come from the aggregator, not from {name_of(sender)}")
        if isinstance(message, KeyDirectory) and self._directory is None:
            return self._take_directory(message)
        waiting = self._directory is not None and not self.done
        if isinstance(message, Encapsulations) and self._protocol.hybrid and waiting:
            return self._take_encapsulations(message)
        raise ProtocolError(f"{type(message).__name__} is out of phase at {name_of(self.address)}")

    def _take_directory(self, message: KeyDirectory) -> list[Envelope]:
        table = check_rows(message.public, len(self._neighbours), self._public_bytes)
        directory = {peer: row.tobytes() for peer, row in zip(self._neighbours, table, strict=True)}
        if not self._protocol.hybrid:
            pairs = {peer: self._pair(peer, public) for peer, public in directory.items()}
            self._directory, self._node.pairs = directory, pairs
            return []
        higher = [peer for peer in self._neighbours if peer > self.address]
        secrets = {peer: self._keys.encapsulate(directory[peer]) for peer in higher}
        self._directory, self._secrets = directory, secrets
        table = rows([secrets[peer][1] for peer in higher], KEM_CIPHERTEXT_BYTES)
        return [Envelope(self.address, AGGREGATOR, Encapsulations(round=self.round, ciphertexts=table))]

    def _take_encapsulations(self, message: Encapsulations) -> list[Envelope]:
        lower = [peer for peer in self._neighbours if peer < self.address]
        table = check_rows(message.ciphertexts, len(lower), KEM_CIPHERTEXT_BYTES)
        received = {peer: row.tobytes() for peer, row in zip(lower, table, strict=True)}
        kem = {peer: (self._keys.decapsulate(raw), raw) for peer, raw in received.items()} | self._secrets
        directory = self._directory or {}
        self._node.pairs = {peer: self._pair(peer, directory[peer], *kem[peer]) for peer in self._neighbours}
        return []

    def _pair(self, peer: Address, public: bytes, kem: bytes = b"", ciphertext: bytes = b"") -> PairKeys:
        secret = self._keys.exchange(public) + kem
        own, other = (self.address, self._keys.public), (peer, public)
        context = b"".join(struct.pack(">q", address) + key for address, key in sorted((own, other)))
        return PairKeys(secret, context + ciphertext, own=self.address, peer=peer)


class AggregatorSetup(_Setup):
    """The aggregator's part: pass public keys and ciphertexts on."""

    def __init__(self, node: PairwiseNode) -> None:
        super().__init__(node)
        self._public: dict[Address, bytes] = {}
        self._ciphertexts: dict[Address, dict[Address, bytes]] = {}  # sender -> receiver -> ciphertext

    def _start(self) -> list[Envelope]:
        return []

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        workers = self._protocol.workers
        if sender not in range(workers):
            raise ProtocolError(f"{name_of(sender)} takes no part in the key agreement")
        if isinstance(message, PublicKeys) and sender not in self._public:
            if type(message.public) is not bytes or len(message.public) != self._public_bytes:
                raise ProtocolError(f"keys of {name_of(sender)} do not have {self._public_bytes} bytes")
            self._public[sender] = message.public
            return self._send_directories() if len(self._public) == workers else []
        ready = self._protocol.hybrid and len(self._public) == workers
        if isinstance(message, Encapsulations) and ready and sender not in self._ciphertexts:
            higher = [peer for peer in self._protocol.graph.neighbours(sender) if peer > sender]
            table = check_rows(message.ciphertexts, len(higher), KEM_CIPHERTEXT_BYTES)
            self._ciphertexts[sender] = {peer: row.tobytes() for peer, row in zip(higher, table, strict=True)}
            return self._send_ciphertexts() if len(self._ciphertexts) == workers else []
        raise ProtocolError(f"{type(message).__name__} of {name_of(sender)} is out of phase or a repeat")

    def _send_directories(self) -> list[Envelope]:
        if not self._protocol.hybrid:
            self._node.pairs = {}
        envelopes = []
        for worker in range(self._protocol.workers):
            table = [self._public[peer] for peer in self._protocol.graph.neighbours(worker)]
            message = KeyDirectory(round=self.round, public=rows(table, self._public_bytes))
            envelopes.append(Envelope(self.address, worker, message))
        return envelopes

    def _send_ciphertexts(self) -> list[Envelope]:
        self._node.pairs = {}
        envelopes = []
        for worker in range(self._protocol.workers):
            lower = [peer for peer in self._protocol.graph.neighbours(worker) if peer < worker]
            table = rows([self._ciphertexts[peer][worker] for peer in lower], KEM_CIPHERTEXT_BYTES)
            envelopes.append(
                Envelope(self.address, worker, Encapsulations(round=self.round, ciphertexts=table))
            )
        return envelopes
