"""The sans-I/O contract of every secure sum.

A `SecureSum` is the public configuration that all participants share. Each participant holds one `Node`, its
long-lived secret state, and runs one `Machine` per round. Machines do no I/O: `start`, `receive` and `drop`
return the envelopes to send, in whatever way the caller sends them. The sender of an envelope is who the
transport authenticated, never a field of the message.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from securevfl.errors import InputError, ProtocolError, WireError
from securevfl.protocols.ring import FixedPoint, Ring, as_floats
from securevfl.protocols.wire import Value, pack, unpack

Address = int
"""Workers are 0..q-1; participants without an input have the negative addresses below."""

COORDINATOR: Address = -1
"""An external coordinator: the extra vertex of a tree topology."""
AGGREGATOR: Address = -2
"""Collects masked or encrypted values."""
KEY_HOLDER: Address = -3
"""Holds the decryption key of a homomorphic sum."""
DEALER: Address = -4
"""Deals correlated randomness and has no input; the one participant that must see no others' traffic."""
HELPER: Address = -5
"""Compares keyed values in an alignment and has no input; it must not collude with a party."""

Shape = tuple[int, ...] | None
"""Of a round's values; None where a participant without an input does not know it yet."""

SETUP_ROUND = -1
"""The round number that messages of the key agreement carry."""
MAX_ROUND = 1 << 32
MAX_ATTEMPT = 1 << 16

_NAMES = {
    COORDINATOR: "coordinator",
    AGGREGATOR: "aggregator",
    KEY_HOLDER: "key holder",
    DEALER: "dealer",
    HELPER: "helper",
}


def name_of(address: Address) -> str:
    """How messages to people name a participant."""
    return _NAMES.get(address, f"worker {address}" if address >= 0 else f"address {address}")


PROTOCOLS = __name__.rpartition(".")[0] + "."
"""Where the classes of protocols are."""


def is_shipped(thing: object, *, place: str = PROTOCOLS) -> bool:
    """Whether an object is of a class of a module in this place, and has no methods of its own before it."""
    kind: Any = type(thing)
    if not kind.__module__.startswith(place):
        return False
    return _methods(kind).isdisjoint(getattr(thing, "__dict__", ()))


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name)))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """One protocol message; subclasses add their fields and set `kind`.

    Fields are int, bool, float, str, bytes, numpy arrays or lists of ints or strings.

    Attributes:
        uniform: Fields with words that are uniform, and fresh in every round, to all who get them.
        widths: Of uniform fields whose words do not fill their type, in how many bits they are uniform.
        secret: Fields that whoever keeps the messages of others must not write down beside them: seeds.
        opaque: Fields with ciphertexts: only a key opens them, and none is like another.
        unmasked: Fields of a few words that hide nothing: they settle whether a check comes out.
        fresh: Fields whose rows never come again: coins, nonces, digests of seeds.
        summed: Uniform fields that stay so when all senders' of a round are added up.
    """

    kind: ClassVar[str] = ""
    uniform: ClassVar[tuple[str, ...]] = ()
    widths: ClassVar[Mapping[str, int]] = {}
    secret: ClassVar[tuple[str, ...]] = ()
    opaque: ClassVar[tuple[str, ...]] = ()
    unmasked: ClassVar[tuple[str, ...]] = ()
    fresh: ClassVar[tuple[str, ...]] = ()
    summed: ClassVar[tuple[str, ...]] = ()
    round: int
    attempt: int = 0

    def to_bytes(self) -> bytes:
        """The versioned binary form."""
        return pack(self.kind, vars(self))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        """Decodes exactly this kind of message.

        Raises:
            WireError: The bytes are no such message; a field is missing, unknown or of the wrong type.
        """
        kind, fields = unpack(data)
        return cls._from_fields(kind, fields)

    @classmethod
    def _from_fields(cls, kind: str, fields: dict[str, Value]) -> Self:
        if kind != cls.kind:
            raise WireError(f"message is of kind {kind!r}; {cls.kind!r} is expected")
        key: Any = cls
        types = _field_types(key)
        if fields.keys() != types.keys():
            raise WireError(f"message {kind!r} has fields {sorted(fields)}; {sorted(types)} are expected")
        for name, expected in types.items():
            if not _has_type(fields[name], expected):
                raise WireError(f"message {kind!r}: field {name!r} is not of type {expected}")
        values: dict[str, Any] = fields
        return cls(**values)


def read_message(
    messages: Iterable[type[Message]], kind: str, fields: dict[str, Value], owner: str
) -> Message:
    """The message of that kind, its fields checked; `owner` names the protocol that the kinds belong to."""
    for candidate in messages:
        if candidate.kind == kind:
            return candidate._from_fields(kind, fields)
    raise WireError(f"message kind {kind!r} does not belong to {owner}")


@functools.cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _has_type(value: Value, expected: Any) -> bool:
    origin = typing.get_origin(expected)
    if origin is list:
        (item,) = typing.get_args(expected)
        return isinstance(value, list) and all(type(entry) is item for entry in value)
    return type(value) is (origin or expected)


@dataclasses.dataclass(frozen=True)
class Envelope:
    """A message on its way; the transport authenticates `sender`."""

    sender: Address
    receiver: Address
    message: Message


class Machine(ABC):
    """One participant's part in one round. Every call checks wholly before it changes anything."""

    def __init__(self, address: Address, *, round: int, attempt: int = 0) -> None:  # noqa: A002
        self.address = address
        self.round = round
        self.attempt = attempt
        self._started = False

    def start(self) -> list[Envelope]:
        """Begins the round, once, and returns what has to be sent."""
        if self._started:
            raise ProtocolError(f"round {self.round} of {name_of(self.address)} has already started")
        self._started = True
        return self._start()

    def receive(self, envelope: Envelope) -> list[Envelope]:
        """Takes one message and returns what has to be sent.

        Raises:
            ProtocolError: The message is malformed, replayed, out of phase, of another round or attempt, or
                from a participant that has no business sending it. The state is as before.
        """
        message = envelope.message
        if not self._started:
            raise ProtocolError(f"{name_of(self.address)} received a message before its round started")
        if envelope.receiver != self.address:
            raise ProtocolError(
                f"message for {name_of(envelope.receiver)} was delivered to {name_of(self.address)}"
            )
        if not isinstance(message, Message):
            raise ProtocolError(f"{type(message).__name__} is not a protocol message")
        if (message.round, message.attempt) != (self.round, self.attempt):
            raise ProtocolError(
                f"message of round {message.round}, attempt {message.attempt} arrived in"
                f" round {self.round}, attempt {self.attempt}"
            )
        return self._receive(envelope.sender, message)

    heavy: ClassVar[bool] = False
    """Whether its calls take long; connections should be served meanwhile."""

    @property
    def pending(self) -> bool:
        """Whether there is work that needs no message; `proceed` does a piece of it."""
        return False

    def proceed(self) -> list[Envelope]:
        """Does the next piece of work that needs no message, and returns what has to be sent.

        Raises:
            ProtocolError: There is none.
        """
        if not (self._started and self.pending):
            raise ProtocolError(f"{name_of(self.address)} has nothing to do before a message comes")
        return self._proceed()

    def _proceed(self) -> list[Envelope]:
        raise NotImplementedError

    def drop(self, address: Address) -> list[Envelope]:
        """Declares another participant gone and returns what has to be sent.

        Raises:
            DropoutError: The round cannot finish without that participant; retry with a new attempt.
            ProtocolError: The address takes no part in this round, or is this participant's own.
        """
        if not self._started:
            raise ProtocolError(f"{name_of(self.address)} has not started its round")
        return self._drop(address)

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether this participant has nothing left to send or to wait for."""

    def result(self) -> npt.NDArray[np.float64]:
        """The sum.

        Raises:
            ProtocolError: The round is not done, or this participant does not receive the sum.
        """
        raise ProtocolError(f"{name_of(self.address)} does not receive the sum")

    @abstractmethod
    def _start(self) -> list[Envelope]: ...

    @abstractmethod
    def _receive(self, sender: Address, message: Message) -> list[Envelope]: ...

    @abstractmethod
    def _drop(self, address: Address) -> list[Envelope]: ...


class Node(ABC):
    """The secret state of one participant: keys, streams and the record of used (round, attempt) pairs.

    Several rounds may be under way at once, but all calls must come from one thread.
    """

    def __init__(self, protocol: SecureSum, address: Address) -> None:
        if address not in protocol.addresses:
            raise InputError(
                f"address {address} takes no part; participants are {sorted(protocol.addresses)}"
            )
        self.protocol = protocol
        self.address = address
        self._claimed: set[tuple[int, int]] = set()
        self._retired = 0

    def setup(self) -> Machine | None:
        """The key agreement, to be run once before the first round; None where there is none."""
        return None

    @property
    def present(self) -> frozenset[Address]:
        """Who takes part in this node's rounds: everybody, unless the key agreement went on without some."""
        return frozenset(self.protocol.addresses)

    def round(
        self,
        value: npt.ArrayLike | None = None,
        *,
        round: int,  # noqa: A002
        attempt: int = 0,
        shape: tuple[int, ...] | None = None,
    ) -> Machine:
        """The machine of one round. A pair (round, attempt) is good for one machine only.

        Args:
            value: This worker's floats, or ring elements of the protocol's own unsigned type, taken as
                already encoded; None for participants without an input.
            round: Number of the round, the same at all participants.
            attempt: Counts the retries of a round; a retry uses fresh masks.
            shape: For participants without an input, the shape to insist on; otherwise the first message
                sets it.

        Raises:
            ProtocolError: The pair was used before, or its round is retired; reusing masks would leak.
            EncodingError: The value cannot be represented.
        """
        round, attempt = operator.index(round), operator.index(attempt)  # noqa: A001
        if not 0 <= round < MAX_ROUND or not 0 <= attempt < MAX_ATTEMPT:
            raise InputError(f"round {round}, attempt {attempt} is out of range")
        if (value is None) != (self.address < 0):
            needs = "has no input; pass None" if self.address < 0 else "needs an input"
            raise InputError(f"{name_of(self.address)} {needs}")
        self._check_unclaimed(round, attempt)
        encoded = None if value is None else self.protocol.encode(value)
        machine = self._round(
            encoded, shape if encoded is None else encoded.shape, round=round, attempt=attempt
        )
        self._claimed.add((round, attempt))
        return machine

    def retire(self, before: int) -> None:
        """Forgets the record of rounds below `before` and refuses them for ever."""
        self._retired = max(self._retired, before)
        self._claimed = {pair for pair in self._claimed if pair[0] >= self._retired}

    def _check_unclaimed(self, round: int, attempt: int) -> None:  # noqa: A002
        if round < self._retired or (round, attempt) in self._claimed:
            raise ProtocolError(
                f"{name_of(self.address)} already used round {round}, attempt {attempt};"
                " take the next attempt, masks are never used twice"
            )

    @abstractmethod
    def _round(self, encoded: Ring | None, shape: Shape, **where: int) -> Machine: ...


class SecureSum(ABC):
    """Public configuration of a sum over `workers` inputs; it holds no secret.

    Args:
        workers: Number of inputs.
        fixed_point: How floats become ring elements.
    """

    messages: ClassVar[tuple[type[Message], ...]] = ()
    """Every kind of message this protocol sends."""

    def __init__(self, *, workers: int, fixed_point: FixedPoint | None = None) -> None:
        if workers < 2:
            raise InputError(f"a sum over {workers} workers hides nothing; at least 2 are needed")
        self.workers = workers
        self.fixed_point = fixed_point if fixed_point is not None else FixedPoint()

    @property
    @abstractmethod
    def addresses(self) -> tuple[Address, ...]:
        """All participants: the workers and those without an input."""

    @property
    @abstractmethod
    def receivers(self) -> tuple[Address, ...]:
        """The participants that obtain the sum."""

    @property
    def max_total(self) -> int | None:
        """The largest magnitude of a total in ring integers; None where the sum is not exact on a ring."""
        return (1 << (self.fixed_point.bits - 1)) - 1

    @abstractmethod
    def node(self, address: Address) -> Node:
        """Fresh secret state for one participant, to be kept for a whole run."""

    def encode(self, value: npt.ArrayLike) -> Ring:
        """One worker's ring elements, a new array; refuses what could overflow the sum over all workers."""
        array = np.asarray(value)
        if array.dtype == self.fixed_point.dtype:
            return array.copy()
        return self.fixed_point.encode(array, self.workers)

    def decode(self, data: bytes | memoryview) -> Message:
        """Decodes any message of this protocol from its binary form."""
        return self.read(*unpack(data))

    def read(self, kind: str, fields: dict[str, Value]) -> Message:
        """Checks the fields of a message whose binary form a transport has decoded."""
        return read_message(self.messages, kind, fields, type(self).__name__)

    def sum(self, values: Sequence[npt.ArrayLike]) -> npt.NDArray[np.float64]:
        """Runs all participants in this process and returns the sum.

        Args:
            values: One array of floats or integers per worker, all of the same shape.
        """
        from securevfl.protocols.driver import run_round, run_setup

        if len(values) != self.workers:
            raise InputError(f"{len(values)} values were given for {self.workers} workers")
        shapes = {np.shape(value) for value in values}
        if len(shapes) != 1:
            raise InputError(f"values have different shapes: {sorted(shapes)}")
        nodes = {address: self.node(address) for address in self.addresses}
        run_setup(nodes)
        # As floats, so that unsigned integers are numbers here and not taken as ring elements.
        return run_round(nodes, [as_floats(value) for value in values], round=0)
