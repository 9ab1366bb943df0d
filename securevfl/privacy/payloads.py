"""Payloads: what may leave an organisation, and in which messages.

A link carries declared messages only. Their fields are public facts (numbers, words, record indices) or
payloads, and a payload is made by a gate, or from a gate's material by the driver of protocol machines: no
other code has the key that the constructors ask for. So whatever arrives elsewhere was written down first,
and says for whom.

Python cannot keep a secret from code in the same process. A test over the syntax tree of the whole package
therefore makes sure that nobody else uses the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, dataclass_transform, get_origin, get_type_hints

import numpy as np

from securevfl.errors import EgressError, InputError
from securevfl.privacy.messages import Head
from securevfl.privacy.rows import Rows
from securevfl.protocols.contract import Message as ProtocolMessage
from securevfl.protocols.wire import Value

if TYPE_CHECKING:
    from torch import Tensor

_KEY = object()

PREPARE, EPOCH, EVALUATE = "prepare", "epoch", "evaluate"
PHASES = (PREPARE, EPOCH, EVALUATE)
SERVER, DEALER, PARTY = "server", "dealer", "party"
"""Roles. The first two are addresses as well; every other address is a party's."""
MAX_WORD = 255


def role_of(address: str) -> str:
    """The role that an address plays."""
    return address if address in (SERVER, DEALER) else PARTY


# -- payloads -----------------------------------------------------------------------------------------------


class _Gated:
    """Can be made with the key alone, and cannot be changed or copied afterwards."""

    __slots__ = ("_mark",)

    def __post_init__(self, key: object) -> None:
        if key is not _KEY:
            raise EgressError(
                f"{type(self).__name__} is made by a gate alone; let the values pass through it"
            )
        object.__setattr__(self, "_mark", key)

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
        head: The ledger head that is sent along.
        observers: Organisations that it talks to.
    """

    machine: Any
    head: Head
    observers: tuple[str, ...]
    key: InitVar[object] = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Masked(_Gated):
    """One message of a protocol machine on its way.

    Attributes:
        message: As the machine made it.
        route: Fields that say which machine it is for, where a link carries several protocols.
        head: The sender's ledger head; None where the sender has nothing of its own in it.
        observers: Organisations that it may go to.
    """

    message: ProtocolMessage
    route: Mapping[str, Value]
    head: Head | None
    observers: tuple[str, ...]
    key: InitVar[object] = None


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


def check_made_by_gate(payload: Any, *expected: type) -> None:
    """Raises `EgressError` unless the payload is one of the expected types and a gate has made it."""
    if type(payload) not in expected or getattr(payload, "_mark", None) is not _KEY:
        names = " or ".join(each.__name__ for each in expected)
        raise EgressError(f"{type(payload).__name__} did not pass the gate; {names} from a gate is expected")


# -- fields of messages -------------------------------------------------------------------------------------

FACT, ROWS, ARRAY, NUMBER, TABLE, BYTES, LIST = range(7)


class Form(NamedTuple):
    """What one field of a message may hold.

    Attributes:
        what: The form on the wire: a public fact, record indices, an array, a number, several by name.
        types: Of facts and lists, the type.
        choices: Of words, those that are allowed; empty allows any.
        dtypes: Of arrays, the kinds of numbers: f, i, u.
        ndims: Of arrays, the numbers of dimensions.
        names: Of tables, the names; a name that ends in ``:`` stands for all that begin with it.
        of: Of payloads, what may be in them, as the ledger says; empty allows any.
        payload: True where only a payload may be put in.
        inside: True where it never leaves the organisation.
        optional: True where it may be left out.
    """

    what: int
    types: tuple[type, ...] = ()
    choices: tuple[str, ...] = ()
    dtypes: str = ""
    ndims: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    of: frozenset[str] = frozenset()
    payload: bool = False
    inside: bool = False
    optional: bool = False


def fact(kind: type, *choices: str, optional: bool = False, wire: str = "") -> Any:
    """A public fact: a count, a flag, a word, a number that no record has an influence on."""
    return _field(Form(FACT, types=(kind,), choices=choices, optional=optional), wire)


def records(*, optional: bool = False) -> Any:
    """Record indices: one-dimensional, distinct, not negative."""
    return _field(Form(ROWS, optional=optional))


def names(*, optional: bool = False) -> Any:
    """A list of public names."""
    return _field(Form(LIST, types=(str,), optional=optional))


def released(
    *kinds: str,
    dtypes: str = "f",
    ndims: tuple[int, ...] = (2,),
    inside: bool = False,
    optional: bool = False,
) -> Any:
    """An array that passed a gate as one of these kinds, or that stays inside."""
    of = frozenset(kinds)
    return _field(
        Form(ARRAY, dtypes=dtypes, ndims=ndims, of=of, payload=True, inside=inside, optional=optional)
    )


def released_number(*kinds: str) -> Any:
    """A number that passed a gate as one of these kinds, or that stays inside."""
    return _field(Form(NUMBER, of=frozenset(kinds), payload=True))


def released_table(kind: str, *names: str, dtypes: str = "f") -> Any:
    """Arrays or numbers by name that passed a gate together, or that stay inside."""
    return _field(Form(TABLE, names=names, dtypes=dtypes, of=frozenset({kind}), payload=True))


def _field(form: Form, wire: str = "") -> Any:
    metadata = {"form": form, "wire": wire}
    return field(default=None, metadata=metadata) if form.optional else field(metadata=metadata)


# -- declared messages --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Schema:
    """What the world agrees on about one kind of message.

    Attributes:
        kind: Its name on the wire.
        content: The class that roles send: a declared message, or a protocol's.
        senders: Roles that may send it; none for what an observer notes at home.
        phases: When.
        sent: Attribute, name on the wire and form of each field.
        received: Name on the wire -> form.
        prefixes: Forms of the names that begin with these.
        required: Names that must be there.
    """

    kind: str
    content: type
    senders: tuple[str, ...]
    phases: tuple[str, ...]
    sent: tuple[tuple[str, str, Form], ...]
    received: Mapping[str, Form]
    prefixes: tuple[tuple[str, Form], ...]
    required: frozenset[str]

    def form_of(self, name: str) -> Form | None:
        """The form of a field by its name on the wire; None where it has no such field."""
        found = self.received.get(name)
        return found or next((form for prefix, form in self.prefixes if name.startswith(prefix)), None)


MESSAGES: dict[str, Schema] = {}
"""Every kind of message that roles exchange, by its name."""

Content = TypeVar("Content", bound=type)


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(fact, records, names, released, released_number, released_table),
)
def declare(kind: str, *senders: str, phases: tuple[str, ...] = PHASES) -> Callable[[Content], Content]:
    """Makes a class a message that links carry: a frozen dataclass, entered in `MESSAGES`.

    Args:
        kind: Its name on the wire.
        senders: Roles that may send it.
        phases: When.
    """

    def enter(cls: Content) -> Content:
        made = dataclass(frozen=True, kw_only=True, eq=False)(cls)
        sent = tuple(
            (each.name, each.metadata["wire"] or each.name, each.metadata["form"]) for each in fields(made)
        )
        made.kind = kind
        _enter(kind, made, senders, phases, sent)
        return made

    return enter


def declare_protocol(
    *contents: type[ProtocolMessage], senders: tuple[str, ...], routed: bool, arrays: str = "iu"
) -> None:
    """Enters messages of protocol machines.

    Args:
        contents: Their classes.
        senders: Roles that may send them.
        routed: True where they say which channel and which addresses they are for.
        arrays: Kinds of numbers in their arrays: words of a ring, unless the protocol hides nothing.
    """
    route = {
        "channel": Form(FACT, types=(str,)),
        "from": Form(FACT, types=(int,)),
        "to": Form(FACT, types=(int,)),
    }
    for cls in contents:
        hints = get_type_hints(cls)
        forms = {each.name: _form_of_hint(hints[each.name], arrays) for each in fields(cls)}
        forms = route | forms if routed else forms
        _enter(cls.kind, cls, senders, PHASES, tuple((name, name, form) for name, form in forms.items()))


def _form_of_hint(hint: Any, arrays: str) -> Form:
    if get_origin(hint) is list:
        return Form(LIST, types=hint.__args__)
    if hint in (int, bool, str, float):
        return Form(FACT, types=(hint,))
    if hint is bytes:
        return Form(BYTES)
    return Form(ARRAY, dtypes=arrays, ndims=(0, 1, 2, 3, 4))


def _enter(
    kind: str,
    cls: type,
    senders: tuple[str, ...],
    phases: tuple[str, ...],
    sent: tuple[tuple[str, str, Form], ...],
) -> Schema:
    if kind in MESSAGES and MESSAGES[kind].content.__qualname__ != cls.__qualname__:
        raise InputError(
            f"messages of kind {kind!r} are declared twice, as {MESSAGES[kind].content} and {cls}"
        )
    received, prefixes = {}, []
    for _, wire, form in sent:
        for name in form.names or (wire,):
            if name.endswith(":"):
                prefixes.append((name, form))
            else:
                received[name] = form
    needed = frozenset(wire for _, wire, form in sent if not form.optional and form.what != TABLE)
    schema = Schema(
        kind=kind,
        content=cls,
        senders=senders,
        phases=phases,
        sent=sent,
        received=received,
        prefixes=tuple(prefixes),
        required=needed,
    )
    MESSAGES[kind] = schema
    return schema
