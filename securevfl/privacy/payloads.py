"""Payloads: what may leave an organisation, and the link that carries nothing else.

A link carries declared messages only. Their fields are public facts (numbers, words, record indices) or
payloads, and a payload is made by a gate, or from a gate's material by the driver of protocol machines: no
other code has the key that the constructors ask for. So whatever arrives elsewhere was written down first,
and says for whom.

Python cannot keep a secret from code in the same process. A test over the syntax tree of the whole package
therefore makes sure that nobody else uses the key.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from securevfl.errors import EgressError, ProtocolError, WireError
from securevfl.privacy.messages import Head, Packet
from securevfl.privacy.rows import Rows, fixed
from securevfl.privacy.schemas import (
    ARRAY,
    BYTES,
    FACT,
    LIST,
    MESSAGES,
    NUMBER,
    PLACES,
    ROWS,
    TABLE,
    Form,
    Schema,
    roles_of,
)
from securevfl.protocols.contract import MAX_ROUND, PROTOCOLS, Message
from securevfl.protocols.wire import Value

if TYPE_CHECKING:
    from torch import Tensor

_KEY = object()
Aside = Callable[..., Awaitable[Any]]
"""Calls a function with its arguments somewhere else, to be awaited."""

MAX_WORD = 255


# -- payloads -----------------------------------------------------------------------------------------------


def _unchangeable(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that nobody can change: an array that owns its memory can be made writeable again."""
    if not values.size:
        return np.zeros(values.shape, values.dtype)
    return np.frombuffer(values.tobytes(), values.dtype).reshape(values.shape)


class _Gated:
    """Can be made with the key alone, and cannot be changed or copied afterwards."""

    __slots__ = ("_made_with",)

    def __post_init__(self, key: object) -> None:
        if key is not _KEY:
            raise EgressError(
                f"{type(self).__name__} is made by a gate alone; let the values pass through it"
            )
        object.__setattr__(self, "_made_with", key)
        values = getattr(self, "values", None)
        if type(values) is np.ndarray:
            object.__setattr__(self, "values", _unchangeable(values))
        elif type(values) is dict:
            kept = {
                name: _unchangeable(each) if type(each) is np.ndarray else each
                for name, each in values.items()
            }
            object.__setattr__(self, "values", MappingProxyType(kept))

    def __reduce__(self) -> Any:
        raise EgressError(
            f"{type(self).__name__} cannot be copied; let the values pass through the gate again"
        )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Released(_Gated):
    """What may be sent, and what the party needs to learn from the answer.

    Attributes:
        values: As they leave: an array, a number, or several by name. They cannot be changed.
        head: The ledger head that is sent along.
        observers: Organisations that it was written down for; it goes to no other.
        kind: What it is, as the ledger says.
        rows: The records it is about, where it is about single ones.
        source: The clipped vectors with their graph; the gradient that comes back goes in here.
    """

    values: Any
    head: Head
    observers: tuple[str, ...]
    kind: str
    rows: Rows | None = None
    source: Any = None
    key: InitVar[object] = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Contribution(_Gated):
    """What may enter a secure sum, and what the party needs to learn from the answer.

    Attributes:
        values: Floats, or ring elements that already carry the party's share of the noise.
        head: The ledger head that is sent along.
        observers: Organisations that obtain the total, or something computed from it.
        kind: What it is, as the ledger says.
        source: The clipped vectors with their graph; the gradient that comes back goes in here.
    """

    values: Any
    head: Head
    observers: tuple[str, ...]
    kind: str
    source: Any
    key: InitVar[object] = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Accounted(_Gated):
    """A protocol machine whose ledger entry is written: what it sends may leave.

    Attributes:
        machine: The machine, made of the party's values; None where an entry stands for a replay.
        head: The ledger head that is sent along; None where the sender has nothing of its own in it.
        observers: Organisations that it talks to.
    """

    machine: Any
    head: Head | None
    observers: tuple[str, ...]
    key: InitVar[object] = None

    def __post_init__(self, key: object) -> None:
        if self.machine is not None and not type(self.machine).__module__.startswith(PROTOCOLS):
            raise EgressError(f"{type(self.machine).__name__} is not a machine of a protocol that is shipped")
        _Gated.__post_init__(self, key)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Masked(_Gated):
    """One message of a protocol machine on its way.

    Attributes:
        message: As the machine made it.
        route: Fields that say which machine it is for, where a link carries several protocols.
        head: The sender's ledger head; None where the sender has nothing of its own in it.
        observers: Organisations that it may go to.
    """

    message: Message
    route: Mapping[str, Value]
    head: Head | None
    observers: tuple[str, ...]
    key: InitVar[object] = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Arrived(_Gated):
    """What a message brought, as the link got it.

    Attributes:
        fields: Its content.
        reach: Organisations that this one's own part of it was let out to; None where it has no part.
    """

    fields: Mapping[str, Value]
    reach: frozenset[str] | None
    key: InitVar[object] = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Passed(_Gated):
    """What was computed from values that gates have let out, and from nothing else: it may be handed on.

    Attributes:
        values: An array, a number, or numbers by name.
        reach: Organisations that this one's own part of it was let out to; None where it has no part.
        source: The values on the device where they were computed, if any.
    """

    values: Any
    reach: frozenset[str] | None
    source: Any = None
    key: InitVar[object] = None


def common(reaches: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """Whom something may be handed to that was computed from several; None for anybody."""
    bound = [each for each in reaches if each is not None]
    return frozenset.intersection(*bound) if bound else None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Inside:
    """Values that stay inside one organisation. A link carries them to no other.

    Attributes:
        values: An array, a number, or several by name.
        source: The vectors with their graph; the gradient that comes back goes in here.
    """

    values: Any
    source: Any = None

    @classmethod
    def of(cls, vectors: Tensor) -> Inside:
        """Vectors with their graph: no clip, no noise, no entry."""
        return cls(values=np.array(vectors.numpy(force=True), np.float32), source=vectors)


# -- the link -----------------------------------------------------------------------------------------------


class Link:
    """One address's connection to the others, on every carrier.

    It numbers what is sent, queues what arrives and matches answers to calls. Before anything leaves it
    checks that it is a declared message, that every field is of its declared form, and that whatever depends
    on private data is a payload which a gate has made for the receiver's organisation; on receipt, that the
    message is known, complete, without anything more, and of a role that may send it in this phase.

    Args:
        address: Whose.
        post: Takes a packet on its way; it must not wait.
        hosts: Address -> organisation, of all roles of the run.

    Attributes:
        phase: The phase that the carrier has begun; while it is empty, any message may come.
        aside: How the carrier wants long work to be done while it serves connections; None for at once.
        heads: The newest ledger head that arrived from each owner at another organisation.
        backlog: Organisation -> bytes of its packets that wait here.
        handing: Kinds of messages whose content the role may hand on; they come with `Packet.arrived`.
    """

    def __init__(self, address: str, post: Callable[[Packet], None], hosts: Mapping[str, str]) -> None:
        self.address = address
        self.hosts = MappingProxyType(dict(hosts))  # who is inside is not a role's to say
        self.phase = ""
        self.aside: Aside | None = None
        self.number = 0
        self.backlog: Counter[str] = Counter()
        self.heads: dict[str, Head] = {}
        self.handing: frozenset[str] = frozenset()
        self._post = post
        self._roles = roles_of(address)
        self._inbox: deque[Packet] = deque()
        self._receiver: asyncio.Future[Packet] | None = None
        self._calls: dict[int, tuple[str, asyncio.Future[Packet]]] = {}

    @property
    def waiting(self) -> str:
        """What this address waits for; empty if nothing."""
        calls = [f"the answer of {peer}" for peer, answer in self._calls.values() if not answer.done()]
        return " and ".join(calls + (["a message"] if self._listens else []))

    @property
    def _listens(self) -> bool:
        return self._receiver is not None and not self._receiver.done()

    # -- sending --------------------------------------------------------------------------------------------

    async def send(self, receiver: str, content: Any) -> None:
        """Sends a declared message and does not wait for an answer.

        Raises:
            EgressError: It is no declared message, or holds what no gate has let out to the receiver.
        """
        self._post(self._pack(receiver, content))

    def call(self, receiver: str, content: Any) -> asyncio.Future[Packet]:
        """Sends a declared message; the answer to it is to be awaited. Raises like `send`."""
        packet = self._pack(receiver, content)
        answer: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        self._calls[packet.number] = (receiver, answer)
        self._post(packet)
        return answer

    async def reply(self, call: Packet, content: Any) -> None:
        """Answers a call with a declared message; raises like `send`."""
        self._post(self._pack(call.sender, content, call.number))

    def _pack(self, receiver: str, content: Any, reply_to: int | None = None) -> Packet:
        """The packet with this content, once all of it may go to the receiver; else nothing has happened."""
        masked = type(content) is Masked
        said = content.message if masked else content
        name = getattr(said, "kind", None)
        schema = MESSAGES.get(name) if type(name) is str else None
        if schema is None or schema.content is not type(said) or schema.of_machine is not masked:
            raise EgressError(
                f"{self.address} tries to send {type(content).__name__} to {receiver}; only declared "
                "messages leave, with what a gate has let out"
            )
        kind, host = schema.kind, self.hosts.get(receiver)
        if host is None:
            raise ProtocolError(f"{self.address} sends {kind!r} to unknown address {receiver!r}")
        if self._roles.isdisjoint(schema.senders) or (self.phase and self.phase not in schema.phases):
            raise EgressError(f"{self.address} may not send {kind!r} in phase {self.phase or 'unknown'!r}")
        here = host == self.hosts[self.address]
        reach: tuple[str, ...] = ()
        rows: Rows | None = None
        if masked:
            fields, head = self._masked(content, host, here), None if here else content.head
        else:
            fields, head, reach, rows = self._fields(schema, content, host, here)
        self.number += 1
        return Packet(
            kind=kind,
            sender=self.address,
            receiver=receiver,
            fields=fields,
            number=self.number,
            reply_to=reply_to,
            head=head,
            checked=True,
            reach=reach,
            rows=rows,
        )

    def _masked(self, content: Masked, host: str, here: bool) -> dict[str, Value]:
        """Fields of a protocol machine's message."""
        if getattr(content, "_made_with", None) is not _KEY:
            raise EgressError(f"{self.address}: a message of a protocol machine was not made by its driver")
        kind, fields = content.message.kind, {**content.route, **vars(content.message)}
        if not here and host not in content.observers:
            raise EgressError(f"{self.address}: {kind!r} is for {content.observers}, not for {host}")
        check_fields(self.address, kind, fields)
        return fields

    def _fields(
        self, schema: Schema, content: Any, host: str, here: bool
    ) -> tuple[dict[str, Value], Head | None, tuple[str, ...], Rows | None]:
        """Fields, ledger head, observers, records of a declared message; all is checked, payloads opened."""
        fields: dict[str, Value] = {}
        head: Head | None = None
        reach: tuple[str, ...] = ()
        about = rows = None
        for attribute, name, form in schema.sent:
            value = getattr(content, attribute)
            if value is None and form.optional:
                continue
            if form.payload:
                if type(value) is Released:
                    if form.inside or (form.of and value.kind not in form.of):
                        raise self._refusal(schema, name, f"holds {value.kind!r}")
                    if getattr(value, "_made_with", None) is not _KEY:
                        raise self._refusal(schema, name, "was not made by a gate")
                    if not here and host not in value.observers:
                        raise self._refusal(schema, name, f"was let out to {value.observers}, not to {host}")
                    head, about, reach = value.head, value.rows, value.observers
                elif type(value) is not Inside:
                    raise self._refusal(schema, name, f"is {type(value).__name__}, which passed no gate")
                elif not here:
                    raise self._refusal(schema, name, f"must stay inside, and {host} is another organisation")
                value = value.values
                if form.what == TABLE:
                    _check_table(schema, form, value)
                    fields.update(value)
                    continue
            elif form.what == ROWS:
                rows, value = value, _rows_on_wire(value)
            if value is None or not (form.what == ROWS or _fits(form, value)):
                raise self._refusal(schema, name, f"is not {form.expected}")
            fields[name] = value
        if rows is not None and about is not None and rows is not about and not np.array_equal(rows, about):
            raise self._refusal(schema, "rows", "names other records than the payload is about")
        if rows is not None and (type(rows.base) is not bytes or rows.dtype != np.int64):
            rows = fixed(rows)  # what the receiver looks at later must be what was checked now
        return fields, head, reach, rows

    def _refusal(self, schema: Schema, name: str, found: str) -> EgressError:
        return EgressError(f"{self.address} does not send {schema.kind!r}: field {name!r} {found}")

    # -- receiving ------------------------------------------------------------------------------------------

    def receive(self) -> asyncio.Future[Packet]:
        """The next message that is not the answer to a call, to be awaited."""
        if self._listens:
            raise ProtocolError(f"two tasks of {self.address} wait for messages; one listener is allowed")
        self._receiver = asyncio.get_running_loop().create_future()
        if self._inbox:
            packet = self._inbox.popleft()
            self.let_go(packet)
            self._receiver.set_result(packet)
        return self._receiver

    def forget(self) -> None:
        """Drops waiting messages and unanswered calls."""
        self._inbox.clear()
        self.backlog.clear()
        self._calls.clear()
        self._receiver = None

    def hold(self, packet: Packet) -> None:
        """A packet whose turn has not come: what it weighs counts in `backlog` until it is let go.

        A role that keeps one for later says so here, or whoever sends ahead of its turn, without end, would
        fill this process's memory.
        """
        if packet.weight:
            self.backlog[self.hosts[packet.sender]] += packet.weight

    def let_go(self, packet: Packet) -> None:
        """The packet's turn has come."""
        if packet.weight:
            sender = self.hosts[packet.sender]
            self.backlog[sender] = max(self.backlog[sender] - packet.weight, 0)

    def deliver(self, packet: Packet) -> None:
        """Hands over a packet that has arrived.

        Raises:
            ProtocolError: It is not what its sender may send now, or answers a call that was not made.
        """
        if not packet.checked:  # else a link of this process has checked the very same object
            self._check(packet)
        if packet.kind in self.handing:
            here = self.hosts[packet.sender] == self.hosts[self.address]
            fields, reach = MappingProxyType(dict(packet.fields)), frozenset(packet.reach) if here else None
            packet.arrived = Arrived(fields=fields, reach=reach, key=_KEY)
        if packet.reply_to is not None:
            receiver, answer = self._calls.get(packet.reply_to, ("", None))
            if answer is None or receiver != packet.sender:
                raise ProtocolError(
                    f"{packet.sender} answers call {packet.reply_to}, which {self.address} did not make"
                )
            del self._calls[packet.reply_to]
            if not answer.done():
                answer.set_result(packet)
        elif self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(packet)
        else:
            self._inbox.append(packet)
            self.hold(packet)
        if packet.head is not None and self.hosts.get(packet.sender) != self.hosts[self.address]:
            keep_newest(self.heads, packet.head)

    def _check(self, packet: Packet) -> None:
        schema = check_fields(packet.sender, packet.kind, packet.fields)
        if roles_of(packet.sender).isdisjoint(schema.senders) or (
            self.phase and self.phase not in schema.phases
        ):
            raise ProtocolError(
                f"{packet.sender} may not send {packet.kind!r} in phase {self.phase or 'unknown'!r}"
            )
        if "rows" in packet.fields and schema.received["rows"].what == ROWS:
            packet.rows = fixed(packet.fields["rows"])  # type: ignore[arg-type]
        here = self.hosts.get(packet.sender) == self.hosts[self.address]
        if not here and any(form.inside for _, _, form in schema.sent):
            raise ProtocolError(f"{packet.sender} sends {packet.kind!r}, which stays inside one organisation")


def keep_newest(heads: dict[str, Head], head: Head) -> None:
    """Keeps an owner's ledger head if it is newer than the one that is kept."""
    known = heads.get(head.owner)
    if known is None or head.position > known.position:
        heads[head.owner] = head


def check_fields(sender: str, kind: str, fields: Mapping[str, Any]) -> Schema:
    """Checks a message against what its kind declares; returns the declaration.

    Raises:
        WireError: The kind is unknown, or a field is unknown, missing or of another form.
    """
    schema = MESSAGES.get(kind)
    if schema is None:
        raise WireError(f"{sender} sends {kind!r}, a kind of message that nobody has declared")
    for name, value in fields.items():
        form = schema.received.get(name) or schema.form_of(name)
        if form is None:
            raise WireError(f"{sender} sends {kind!r} with a field {name!r} that it does not have")
        if not _fits(form, value):
            raise WireError(f"{sender} sends {kind!r} whose field {name!r} is not {form.expected}")
    if not schema.required <= fields.keys():
        missing = ", ".join(sorted(schema.required - fields.keys()))
        raise WireError(f"{sender} sends {kind!r} without {missing}")
    return schema


def _check_table(schema: Schema, form: Form, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if schema.form_of(name) is not form or not _fits(form, value):
            raise EgressError(f"{schema.kind!r}: {name!r} is not {form.expected}")


def _fits(form: Form, value: Any) -> bool:
    """Whether a value, as the wire carries it, is of a form."""
    what = form.what
    if what == ARRAY:
        return type(value) is np.ndarray and value.dtype.kind in form.dtypes and value.ndim in form.ndims
    if what == ROWS:
        return _are_rows(value)
    if what == FACT:
        return type(value) in form.types and _is_fact(form, value)
    if what == NUMBER:
        return type(value) is float
    if what == TABLE:
        if type(value) is np.ndarray:
            return value.dtype.kind in form.dtypes
        return value is None or type(value) is float
    if what == BYTES:
        return type(value) is bytes
    if type(value) is not list:
        return False
    if what == PLACES:
        return all(type(each) is int for each in value) and _are_places(value)
    return what == LIST and all(type(each) in form.types and _is_fact(form, each) for each in value)


def _is_fact(form: Form, value: Any) -> bool:
    """Whether a fact is of a public one's size: many features would fit into one long number or word."""
    if type(value) is int:
        return -MAX_ROUND <= value <= MAX_ROUND
    return type(value) is not str or (len(value) <= MAX_WORD and (not form.choices or value in form.choices))


def _are_places(value: list[int]) -> bool:
    """Whether these can be new numbers of as many things: from 0 on, none left out."""
    most = max(value, default=-1)
    return most < len(value) and min(value, default=0) >= 0 and len(set(value)) == most + 1


_named: list[tuple[Rows | None, Any]] = [(None, None)]  # what was named last, and how it went on the wire
_MOST_KEPT = 1 << 16


def _rows_on_wire(rows: Any) -> Any:
    """Record indices as messages carry them; None where these cannot be any.

    What cannot change is looked through once, however many messages name it.
    """
    known, wired = _named[0]
    if rows is known and rows is not None:
        return wired
    if not _are_rows(rows):
        return None
    wired = rows.astype(np.int32)
    if type(rows.base) is bytes and rows.size <= _MOST_KEPT:
        wired = _unchangeable(wired)
        _named[0] = rows, wired
    return wired


def _are_rows(value: Any) -> bool:
    """Whether these can be record indices: one-dimensional, integers, distinct, not negative, in range."""
    if type(value) is not np.ndarray or value.ndim != 1 or value.dtype.kind not in "iu":
        return False
    if not value.size:
        return True
    ordered = value.copy()
    ordered.sort()
    return bool(ordered[0] >= 0 and ordered[-1] < 1 << 31 and (ordered[1:] > ordered[:-1]).all())
