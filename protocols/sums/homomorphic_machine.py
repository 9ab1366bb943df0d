"""One participant's round of a homomorphic sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import DropoutError, ProtocolError
from securevfl.protocols.contract import Address, Envelope, Machine, Message, SecureSum, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.sums.homomorphic_messages import EncryptedTotal, EncryptedValue, OpenedTotal
from securevfl.protocols.wire import MAX_BYTES, MAX_DIMENSIONS

if TYPE_CHECKING:
    from securevfl.protocols.sums.homomorphic_sum import HomomorphicNode


class HomomorphicMachine(Machine):
    """One participant's round; a worker may also be the aggregator or the key holder."""

    def __init__(
        self,
        node: HomomorphicNode,
        encoded: Ring | None,
        shape: tuple[int, ...] | None,
        *,
        round: int,  # noqa: A002
        attempt: int,
    ) -> None:
        super().__init__(node.address, round=round, attempt=attempt)
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
