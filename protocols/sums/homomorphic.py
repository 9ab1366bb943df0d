"""Homomorphic sums: workers encrypt, an aggregator adds, a key holder decrypts the total."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from securevfl.errors import DropoutError, InputError, ProtocolError
from securevfl.protocols.contract import (
    AGGREGATOR,
    KEY_HOLDER,
    SETUP_ROUND,
    Address,
    Envelope,
    Machine,
    Message,
    Node,
    SecureSum,
    Shape,
    name_of,
)
from securevfl.protocols.ring import FixedPoint, Ring
from securevfl.protocols.sums.encryption import Encryption, Parameters
from securevfl.protocols.wire import MAX_BYTES, MAX_DIMENSIONS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PublicKey(Message):
    """The key holder's public key, sent to every worker before the first round."""

    kind: ClassVar[str] = "he-key"
    key: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncryptedValue(Message):
    """One worker's ciphertexts, to the aggregator."""

    kind: ClassVar[str] = "he-value"
    opaque: ClassVar[tuple[str, ...]] = ("ciphertexts",)
    shape: list[int]
    sizes: list[int]
    ciphertexts: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EncryptedTotal(EncryptedValue):
    """The added ciphertexts, from the aggregator to the key holder."""

    kind: ClassVar[str] = "he-total"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedTotal(Message):
    """The decrypted sum as 64-bit integers, from the key holder to the workers."""

    kind: ClassVar[str] = "he-opened"
    total: npt.NDArray[np.int64]


class HomomorphicSum(SecureSum):
    """What `BFVSum` and `CKKSSum` share; see there for the threat model."""

    messages = (PublicKey, EncryptedValue, EncryptedTotal, OpenedTotal)

    def __init__(
        self,
        *,
        workers: int,
        parameters: Parameters,
        key_holder: Address,
        aggregator: Address,
        announce: bool,
        fixed_point: FixedPoint | None = None,
    ) -> None:
        super().__init__(workers=workers, fixed_point=fixed_point)
        for role, address, outside in (
            ("key holder", key_holder, KEY_HOLDER),
            ("aggregator", aggregator, AGGREGATOR),
        ):
            if address != outside and not 0 <= address < workers:
                raise InputError(f"{role} {address} is neither a worker (0 to {workers - 1}) nor {outside}")
        if key_holder == aggregator:
            raise InputError(
                f"{name_of(key_holder)} cannot be key holder and aggregator:"
                " it could decrypt every single value"
            )
        self.parameters = parameters
        self.key_holder = key_holder
        self.aggregator = aggregator
        self.announce = announce

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The workers, and the aggregator and key holder where they are no workers."""
        outside = tuple(address for address in (self.aggregator, self.key_holder) if address < 0)
        return (*range(self.workers), *outside)

    @property
    def receivers(self) -> tuple[Address, ...]:
        """The key holder, and with `announce` the workers."""
        others = range(self.workers) if self.announce else range(0)
        return (self.key_holder, *(address for address in others if address != self.key_holder))

    def node(self, address: Address) -> HomomorphicNode:
        """Fresh state; the key holder's makes its key pair."""
        return HomomorphicNode(self, address)

    @abstractmethod
    def open_total(self, numbers: npt.NDArray[Any], node: HomomorphicNode) -> npt.NDArray[np.int64]:
        """What the key holder announces, from the decrypted numbers."""

    @abstractmethod
    def decode_total(self, total: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The floats that an announced total stands for."""

    def keep_total(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """What a key holder that announces nothing keeps."""
        return self.decode_total(numbers)

    def check_size(self, size: int) -> None:
        """Refuses a total that may not be opened; called before decryption."""

    def claim_opening(self, node: HomomorphicNode) -> None:
        """Refuses a further opened total at the key holder; called once per round."""


class HomomorphicNode(Node):
    """A participant's keys: a pair at the key holder, the public one at workers, none at the aggregator."""

    protocol: HomomorphicSum

    def __init__(self, protocol: HomomorphicSum, address: Address) -> None:
        super().__init__(protocol, address)
        self.openings = 0
        self._ready = address == AGGREGATOR
        self._encryption: Encryption | None = None
        if address == protocol.key_holder:
            self._encryption = Encryption.generate(protocol.parameters)
        elif address < 0:
            self._encryption = Encryption.without_key(protocol.parameters)

    @property
    def encryption(self) -> Encryption:
        """The keys.

        Raises:
            ProtocolError: The setup has not run.
        """
        if self._encryption is None:
            raise ProtocolError(f"{name_of(self.address)} has no public key yet; run the setup first")
        return self._encryption

    @property
    def holds_key(self) -> bool:
        """Whether this is the key holder."""
        return self.address == self.protocol.key_holder

    def setup(self) -> Machine | None:
        """The key holder sends its public key to the workers; an outside aggregator takes no part."""
        if self.address == AGGREGATOR:
            return None
        return _Setup(self)

    def accept_key(self, data: bytes) -> None:
        """Takes the key holder's public key, once."""
        if self._encryption is not None:
            raise ProtocolError(f"{name_of(self.address)} already has a key; a second one is refused")
        self._encryption = Encryption.from_public_key(self.protocol.parameters, data)
        self._ready = True

    def share_key(self) -> bytes:
        """The key holder's public key for the workers."""
        self._ready = True
        return self.encryption.public_key()

    @property
    def ready(self) -> bool:
        """Whether the setup has run."""
        return self._ready

    def _round(self, encoded: Ring | None, shape: Shape, **where: int) -> Machine:
        if not self.ready:
            raise ProtocolError(f"{name_of(self.address)} cannot start a round before the setup has run")
        if self.holds_key:
            # Counted when the round begins: one that breaks off later may have opened its total all the same.
            self.protocol.claim_opening(self)
            self.openings += 1
        return HomomorphicMachine(self, encoded, shape, **where)


class _Setup(Machine):
    def __init__(self, node: HomomorphicNode) -> None:
        super().__init__(node.address, round=SETUP_ROUND)
        self._node = node

    @property
    def done(self) -> bool:
        return self._node.ready

    def _start(self) -> list[Envelope]:
        if not self._node.holds_key:
            return []
        message = PublicKey(round=self.round, key=self._node.share_key())
        others = (worker for worker in range(self._node.protocol.workers) if worker != self.address)
        return [Envelope(self.address, worker, message) for worker in others]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if not isinstance(message, PublicKey) or sender != self._node.protocol.key_holder:
            raise ProtocolError(f"{name_of(self.address)} expects the public key of the key holder only")
        self._node.accept_key(message.key)
        return []

    def _drop(self, address: Address) -> list[Envelope]:
        check_other(self._node.protocol, self.address, address)
        if address == self._node.protocol.key_holder and not self.done:
            raise DropoutError("the key holder is gone before it sent its public key; set up anew")
        return []


class HomomorphicMachine(Machine):
    """One participant's round; a worker may also be the aggregator or the key holder."""

    def __init__(self, node: HomomorphicNode, encoded: Ring | None, shape: Shape, **where: int) -> None:
        super().__init__(node.address, **where)
        self._node = node
        self._protocol = node.protocol
        self._encoded = encoded
        self._shape = shape
        self._added: list[Any] = []
        self._missing = set(range(self._protocol.workers)) if self._aggregates else set()
        self._opened: npt.NDArray[np.float64] | None = None

    @property
    def _aggregates(self) -> bool:
        return self.address == self._protocol.aggregator

    @property
    def _receives(self) -> bool:
        return self.address in self._protocol.receivers

    @property
    def done(self) -> bool:
        """Whether everything was sent, and the sum has arrived where it should."""
        return self._started and not self._missing and (self._opened is not None or not self._receives)

    def result(self) -> npt.NDArray[np.float64]:
        """The sum, at its receivers."""
        if not self._receives:
            return super().result()
        if self._opened is None:
            raise ProtocolError(f"{name_of(self.address)} does not have the sum yet")
        return self._opened.copy()

    def _start(self) -> list[Envelope]:
        if self._encoded is None:
            return []
        numbers = self._encoded.reshape(-1).view(self._protocol.parameters.dtype)
        ciphertexts = self._node.encryption.encrypt(numbers)
        message = EncryptedValue(**self._packed(self._encoded.shape, ciphertexts))
        self._encoded = None
        if self._aggregates:
            return self._add(self.address, message)
        return [Envelope(self.address, self._protocol.aggregator, message)]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        match message:
            case EncryptedTotal() if self._node.holds_key and sender == self._protocol.aggregator:
                return self._open(message)
            case EncryptedValue() if self._aggregates and not isinstance(message, EncryptedTotal):
                return self._add(sender, message)
            case OpenedTotal() if self._receives and sender == self._protocol.key_holder != self.address:
                return self._take(message)
        raise ProtocolError(
            f"{name_of(self.address)} has no use for a {message.kind!r} message from {name_of(sender)}"
        )

    def _add(self, sender: Address, message: EncryptedValue) -> list[Envelope]:
        if sender not in self._missing:
            raise ProtocolError(f"{name_of(sender)} has sent its value already, or is no worker")
        vectors = self._unpacked(message)
        self._shape = tuple(message.shape)
        self._missing.discard(sender)
        if self._added:
            for total, vector in zip(self._added, vectors, strict=True):
                total.add_(vector)
        else:
            self._added = vectors
        return [] if self._missing else self._send_total()

    def _send_total(self) -> list[Envelope]:
        ciphertexts = [self._node.encryption.dump(vector) for vector in self._added]
        self._added = []
        message = EncryptedTotal(**self._packed(self._shape or (), ciphertexts))
        return [Envelope(self.address, self._protocol.key_holder, message)]

    def _open(self, message: EncryptedTotal) -> list[Envelope]:
        if self._opened is not None:
            raise ProtocolError("the total of this round was opened already")
        size = math.prod(message.shape)
        self._protocol.check_size(size)
        pieces = [self._node.encryption.decrypt(vector) for vector in self._unpacked(message)]
        empty = np.empty(0, dtype=self._protocol.parameters.dtype)
        numbers = np.concatenate([empty, *pieces])[:size].reshape(message.shape)
        if not self._protocol.announce:
            self._opened = self._protocol.keep_total(numbers)
            return []
        total = self._protocol.open_total(numbers, self._node)
        self._opened = self._protocol.decode_total(total)
        reply = OpenedTotal(round=self.round, attempt=self.attempt, total=total)
        others = (address for address in self._protocol.receivers if address != self.address)
        return [Envelope(self.address, address, reply) for address in others]

    def _take(self, message: OpenedTotal) -> list[Envelope]:
        if self._opened is not None:
            raise ProtocolError("the sum of this round has arrived already")
        if message.total.dtype != np.int64 or message.total.shape != self._shape:
            raise ProtocolError(
                f"the opened total is {message.total.dtype} of shape {message.total.shape};"
                f" int64 of shape {self._shape} is expected"
            )
        self._opened = self._protocol.decode_total(message.total)
        return []

    def _packed(self, shape: Sequence[int], ciphertexts: list[bytes]) -> dict[str, Any]:
        return {
            "round": self.round,
            "attempt": self.attempt,
            "shape": list(shape),
            "sizes": [len(ciphertext) for ciphertext in ciphertexts],
            "ciphertexts": b"".join(ciphertexts),
        }

    def _unpacked(self, message: EncryptedValue) -> list[Any]:
        shape, sizes, data = tuple(message.shape), message.sizes, message.ciphertexts
        if not _is_shape(shape) or (self._shape is not None and shape != self._shape):
            raise ProtocolError(f"ciphertexts stand for shape {shape}; {self._shape} is expected")
        if len(sizes) != self._protocol.parameters.chunks(math.prod(shape)):
            raise ProtocolError(f"{len(sizes)} ciphertexts cannot stand for an array of shape {shape}")
        if any(size <= 0 for size in sizes) or sum(sizes) != len(data):
            raise ProtocolError(f"ciphertexts have {len(data)} bytes, not the {sum(sizes)} announced")
        ends = np.cumsum([0, *sizes]).tolist()
        pieces = [data[start:end] for start, end in pairwise(ends)]
        return [self._node.encryption.load(piece) for piece in pieces]

    def _drop(self, address: Address) -> list[Envelope]:
        check_other(self._protocol, self.address, address)
        if self.done:
            return []
        if address in (self._protocol.aggregator, self._protocol.key_holder) or address in self._missing:
            raise DropoutError(
                f"{name_of(address)} is gone and the sum cannot be finished without it; start anew without it"
            )
        return []


def _is_shape(shape: tuple[int, ...]) -> bool:
    # Lengths of zero must not hide a product that numpy cannot hold.
    fits = len(shape) <= MAX_DIMENSIONS and all(length >= 0 for length in shape)
    return fits and math.prod(max(length, 1) for length in shape) <= MAX_BYTES


def check_other(protocol: SecureSum, own: Address, address: Address) -> None:
    """Raises `ProtocolError` unless `address` is another participant than `own`."""
    if address == own or address not in protocol.addresses:
        raise ProtocolError(f"{name_of(address)} is no other participant of this round")
