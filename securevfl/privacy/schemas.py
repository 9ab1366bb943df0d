"""Declared messages: what each kind holds, who may send it, and when.

A field is a public fact, a list of record indices, or a payload (`securevfl.privacy.payloads`). The kinds
that roles exchange are declared in `securevfl.algorithms.messages`; links, views, attacks and audits read the
same declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, dataclass_transform, get_origin, get_type_hints

from securevfl.errors import InputError
from securevfl.protocols.contract import Message

PREPARE, EPOCH, EVALUATE = "prepare", "epoch", "evaluate"
PHASES = (PREPARE, EPOCH, EVALUATE)
SERVER, DEALER, PARTY = "server", "dealer", "party"
"""Roles. The first two are addresses as well; every other address is a party's."""
_ROLES = {SERVER: frozenset({SERVER}), DEALER: frozenset({DEALER, PARTY}), PARTY: frozenset({PARTY})}


def roles_of(address: str) -> frozenset[str]:
    """The roles that an address may play; where no dealer is needed, a party may be called so."""
    return _ROLES.get(address, _ROLES[PARTY])


# -- fields of messages -------------------------------------------------------------------------------------

FACT, ROWS, ARRAY, NUMBER, TABLE, BYTES, LIST, PLACES = range(8)


class Form(NamedTuple):
    """What one field of a message may hold.

    Attributes:
        what: The form on the wire: a public fact, record indices, an array, a number, several by name.
        types: Of facts and lists, the type.
        choices: Of words, those that are allowed; empty allows any.
        dtypes: Of arrays, the kinds of numbers: f, i, u.
        ndims: Of arrays, the numbers of dimensions.
        names: Of tables, the names; a name that ends in ``:`` stands for all that begin with it.
        of: Of payloads, what may be in them, as the ledger says; of facts, the families of algorithms that
            state them. Empty allows any.
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

    @property
    def expected(self) -> str:
        """What a field should hold, in words."""
        if self.what == ARRAY:
            return f"an array of {'/'.join(self.dtypes)} with {' or '.join(map(str, self.ndims))} dimensions"
        if self.what == FACT:
            return " or ".join(self.choices) or f"a public {self.types[0].__name__}"
        if self.what == LIST:
            return f"a list of {self.types[0].__name__}"
        if self.what == TABLE:
            return f"arrays or numbers by name ({', '.join(self.names)})"
        return {
            ROWS: "a list of distinct record indices",
            NUMBER: "a number",
            BYTES: "bytes",
            PLACES: "a list of places, none left out",
        }[self.what]


def fact(
    kind: type, *choices: str, default: Any = MISSING, wire: str = "", families: tuple[str, ...] = ()
) -> Any:
    """A public fact: a count, a flag, a word, a number that no record has an influence on.

    Args:
        kind: Its type.
        choices: Of words, those that are allowed.
        default: None where it may be left out.
        wire: Its name on the wire, where that is another.
        families: The families of algorithms that state it; none for all. Audits look for it elsewhere.
    """
    if kind not in (int, bool, float, str):
        raise InputError(f"{kind.__name__} cannot be a public fact; use int, bool, float or str")
    form = Form(FACT, types=(kind,), choices=choices, optional=default is None, of=frozenset(families))
    return _field(form, wire)


def records(*, default: Any = MISSING) -> Any:
    """Record indices: one-dimensional, distinct, not negative."""
    return _field(Form(ROWS, optional=default is None))


def places() -> Any:
    """New numbers of things in order, several of which may get the same: none is left out, from 0 on."""
    return _field(Form(PLACES))


def names(*, default: Any = MISSING) -> Any:
    """A list of public names."""
    return _field(Form(LIST, types=(str,), optional=default is None))


def released(
    *kinds: str,
    dtypes: str = "f",
    ndims: tuple[int, ...] = (2,),
    inside: bool = False,
    default: Any = MISSING,
) -> Any:
    """An array that passed a gate as one of these kinds, or that stays inside."""
    form = Form(ARRAY, dtypes=dtypes, ndims=ndims, of=frozenset(kinds), payload=True, inside=inside)
    return _field(form._replace(optional=default is None))


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
        of_machine: True where protocol machines say it, and nobody else.
        uniform: Fields with masked words, which are uniform and fresh to all who get them.
        widths: Of uniform fields whose words do not fill their type, in how many bits they are uniform.
        secret: Fields with seeds, which no view keeps.
        opaque: Fields with ciphertexts, none like another.
        common: Of secret fields, those that all receivers of one round may share.
        unmasked: Fields of a few words that hide nothing.
        fresh: Fields whose rows never come again.
        summed: Uniform fields that stay so when all senders' of a round are added up.
    """

    kind: str
    content: type
    senders: tuple[str, ...]
    phases: tuple[str, ...]
    sent: tuple[tuple[str, str, Form], ...]
    received: Mapping[str, Form]
    prefixes: tuple[tuple[str, Form], ...]
    required: frozenset[str]
    of_machine: bool
    uniform: tuple[str, ...] = ()
    widths: Mapping[str, int] = field(default_factory=dict)
    secret: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    unmasked: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()

    def form_of(self, name: str) -> Form | None:
        """The form of a field by its name on the wire; None where it has no such field."""
        found = self.received.get(name)
        return found or next((form for prefix, form in self.prefixes if name.startswith(prefix)), None)


MESSAGES: dict[str, Schema] = {}
"""Every kind of message that roles exchange, by its name."""


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    field_specifiers=(fact, records, places, names, released, released_number, released_table),
)
class Content:
    """What a role says. Subclasses are frozen dataclasses, entered in `MESSAGES` when they are declared.

    Class arguments:
        kind: Its name on the wire.
        senders: Roles that may send it.
        phases: When.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(
        cls, *, kind: str, senders: tuple[str, ...] = (), phases: tuple[str, ...] = PHASES
    ) -> None:
        dataclass(frozen=True, kw_only=True, eq=False)(cls)
        made: Any = cls
        cls.kind = kind
        sent = [
            (each.name, each.metadata["wire"] or each.name, each.metadata["form"]) for each in fields(made)
        ]
        if sum(form.payload and not form.inside for _, _, form in sent) > 1:
            raise InputError(
                f"messages of kind {kind!r} carry two payloads, which may be for different observers"
            )
        _enter(kind, cls, senders, phases, tuple(sent))


def declare_protocol(
    *contents: type[Message], senders: tuple[str, ...], routed: bool, arrays: str = "iu"
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
    if kind in MESSAGES and MESSAGES[kind].content is not cls:
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
        of_machine=issubclass(cls, Message),
        uniform=getattr(cls, "uniform", ()),
        widths=getattr(cls, "widths", {}),
        secret=getattr(cls, "secret", ()),
        opaque=getattr(cls, "opaque", ()),
        common=getattr(cls, "common", ()),
        unmasked=getattr(cls, "unmasked", ()),
        fresh=getattr(cls, "fresh", ()),
        summed=getattr(cls, "summed", ()),
    )
    MESSAGES[kind] = schema
    return schema
