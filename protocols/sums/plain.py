"""The sum of protocol ``plain``: every party sends its values, as they are, to whoever needs the total."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from securevfl.errors import DropoutError, EncodingError, InputError, ProtocolError
from securevfl.protocols.contract import (
    COORDINATOR,
    Address,
    Envelope,
    Machine,
    Message,
    Node,
    SecureSum,
    Shape,
    name_of,
)
from securevfl.protocols.ring import Ring


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlainValue(Message):
    """One worker's values, unprotected."""

    kind = "plain.value"
    values: np.ndarray


class PlainSum(SecureSum):
    """A sum that hides nothing: the receiver sees every worker's values. It speaks the contract of sums.

    Args:
        workers: Number of inputs; a single one needs nobody else.
        receiver: The worker that obtains the values, or `COORDINATOR` for one without an input.
    """

    messages = (PlainValue,)

    def __init__(self, *, workers: int, receiver: Address = COORDINATOR) -> None:
        super().__init__(workers=max(2, workers))
        if receiver != COORDINATOR and receiver not in range(workers):
            raise InputError(
                f"receiver {receiver} is neither a worker (0 to {workers - 1}) nor {COORDINATOR}"
            )
        self.workers = workers
        self.receiver = receiver

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The workers, and the receiver where it is none of them."""
        return (*range(self.workers), *((self.receiver,) if self.receiver < 0 else ()))

    @property
    def receivers(self) -> tuple[Address, ...]:
        """The one receiver."""
        return (self.receiver,)

    @property
    def max_total(self) -> None:
        """Floats are not exact on a ring."""
        return

    def encode(self, value: npt.ArrayLike) -> Ring:
        """The floats themselves."""
        floats = np.array(value, dtype=np.float64)
        if not np.isfinite(floats).all():
            raise EncodingError("a value is not finite; nothing is sent")
        return floats

    def node(self, address: Address) -> PlainNode:
        """A participant without secrets."""
        return PlainNode(self, address)


class PlainNode(Node):
    """A participant of a plain sum."""

    protocol: PlainSum

    def _round(self, encoded: Ring | None, shape: Shape, **where: int) -> PlainMachine:
        return PlainMachine(self, encoded, shape, **where)


class PlainMachine(Machine):
    """Sends its values to the receiver; the receiver adds them up in the workers' order."""

    def __init__(self, node: PlainNode, values: Ring | None, shape: Shape, **where: int) -> None:
        super().__init__(node.address, **where)
        self._protocol = node.protocol
        self._shape = shape
        self._values: dict[Address, Ring] = {} if values is None else {node.address: values}

    @property
    def done(self) -> bool:
        """Whether the values are sent, and at the receiver, whether all have arrived."""
        return self._started and (
            self.address != self._protocol.receiver or len(self._values) == self._protocol.workers
        )

    def result(self) -> npt.NDArray[np.float64]:
        """The total, at the receiver."""
        if self.address != self._protocol.receiver:
            return super().result()
        if not self.done:
            raise ProtocolError(f"round {self.round} is not done; the sum is not known yet")
        total: npt.NDArray[np.float64] = np.sum([self._values[each] for each in sorted(self._values)], axis=0)
        return total

    def _start(self) -> list[Envelope]:
        if self.address == self._protocol.receiver:
            return []
        message = PlainValue(round=self.round, attempt=self.attempt, values=self._values[self.address])
        return [Envelope(self.address, self._protocol.receiver, message)]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if self.address != self._protocol.receiver or not isinstance(message, PlainValue):
            raise ProtocolError(f"{name_of(self.address)} expects no {message.kind!r} from {name_of(sender)}")
        if sender in self._values or sender not in range(self._protocol.workers):
            raise ProtocolError(f"{name_of(sender)} has sent its values already, or is no worker")
        values = message.values
        if values.dtype != np.float64 or (self._shape is not None and values.shape != self._shape):
            raise ProtocolError(
                f"{name_of(sender)} sent {values.dtype} of shape {values.shape}; float64 of shape"
                f" {self._shape} is expected"
            )
        self._shape = values.shape
        self._values[sender] = values
        return []

    def _drop(self, address: Address) -> list[Envelope]:
        if self.done:
            return []
        raise DropoutError(
            f"{name_of(address)} is gone before round {self.round} was summed; retry without it"
        )
