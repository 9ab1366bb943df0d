"""Frames that no honest process would send, each malformed in at least one way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from securevfl.network.frames import OF_COORDINATOR, OF_MEMBERS, Frame, Kind
from securevfl.network.mesh import Mesh
from securevfl.privacy.messages import Head, Packet
from securevfl.protocols.wire import pack

_LENGTHS = {"phase": 16, "round": 8, "incarnation": 16, "public_key": 32}


def any_value(random: Random) -> Any:
    """Whatever the wire carries."""
    return random.choice(
        [
            lambda: None,
            lambda: random.random() < 0.5,
            lambda: random.choice([0, -1, 1 << 62, -(1 << 63), random.randrange(100)]),
            lambda: random.choice([0.0, -1.5, math.nan, math.inf]),
            lambda: random.choice(["", "bank", "clinic", "server", "\x00", "é" * random.randrange(50)]),
            lambda: random.randbytes(random.choice([0, 1, 8, 16, 32, 300])),
            lambda: np.zeros(
                random.choice([(), (0,), (3,), (2, 2), (1, 1, 1, 1)]), random.choice(["f4", "u1"])
            ),
            lambda: [random.randrange(-5, 5) for _ in range(random.randrange(4))],
            lambda: ["x"] * random.randrange(1, 4),
        ]
    )()


def proper(random: Random, name: str, kind: type) -> Any:
    """A value as the form of a control message asks for it."""
    if kind is bytes:
        return random.randbytes(_LENGTHS.get(name, 20))
    return {str: "text", int: 3, bool: True, list: [1, 2]}[kind]


def bad_control(random: Random, forms: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A control message with a field too many, too few, or of another type."""
    kind, form = random.choice(sorted(forms.items()))
    fields = {name: proper(random, name, expected) for name, expected in form.items()}
    change = random.randrange(4)
    if change == 0 or not fields:
        fields[f"more{random.randrange(9)}"] = any_value(random)
    elif change == 1:
        fields.pop(random.choice(sorted(fields)))
    elif change == 2:
        name = random.choice(sorted(fields))
        values = [each for each in (any_value(random) for _ in range(8)) if type(each) is not form[name]]
        fields[name] = values[0] if values else None
    else:
        kind = random.choice(["restarted", "away", "failed-here", "x", "BEGIN", kind + "s"])
    return pack(kind, fields)


PACKED = (0, 1, 2, 3, 4, 6, 7, *range(8, 16))  # 5 is padding
ENVELOPE = range(8)  # then numbers follow, of which all are allowed


def broken(random: Random, raw: bytes, header: Sequence[int] = PACKED) -> bytes:
    """A message cut, lengthened, or with another header."""
    change = random.randrange(3)
    if change == 0:
        return raw[: random.randrange(len(raw))]
    if change == 1:
        return raw + random.randbytes(random.randrange(1, 20))
    offset = random.choice(header)
    return raw[:offset] + bytes([raw[offset] ^ random.randrange(1, 256)]) + raw[offset + 1 :]


def bad_data(random: Random, mesh: Mesh, peer: str) -> bytes:
    """A role's message that is broken, that its sender may not send, or an answer that nobody asked for."""
    theirs = [address for address, host in mesh.hosts.items() if host == peer]
    foreign = [address for address, host in mesh.hosts.items() if host != peer]
    sender, receiver = random.choice(theirs), random.choice(sorted(mesh.links))
    fields = {f"f{i}": any_value(random) for i in range(random.randrange(4))}
    change = random.randrange(5)
    message = Packet(kind="x", sender=sender, receiver=receiver, number=1, fields=fields)
    if change == 0:
        message = Packet(
            kind="x", sender=random.choice([*foreign, "nobody"]), receiver=receiver, fields=fields
        )
    elif change == 1:
        elsewhere = [address for address in mesh.hosts if address not in mesh.links]
        message = Packet(kind="x", sender=sender, receiver=random.choice([*elsewhere, ""]), fields=fields)
    elif change == 2:
        message = Packet(kind="x", sender=sender, receiver=receiver, reply_to=1 << 40, fields=fields)
    elif change == 3:
        head = Head("somebody", 3, "0" * 64)
        message = Packet(kind="x", sender=sender, receiver=receiver, head=head, fields=fields)
    raw = message.to_bytes()
    if change == 4:
        raw = broken(random, raw, ENVELOPE)
    return mesh._marked + raw if random.random() < 0.9 else random.randbytes(random.randrange(16))


def bad_relay(random: Random, mesh: Mesh, peer: str) -> bytes:
    """A relayed message that was not sealed by its sender, or is none."""
    sender = random.choice([name for name in mesh.introductions if name != mesh.coordinator] or ["clinic"])
    known = mesh.introductions.get(sender)
    fields: dict[str, Any] = {
        "from": sender,
        "to": mesh.name,
        "by": known.incarnation if known is not None else bytes(16),
        "for": mesh.incarnation,
        "via": mesh._via,
        "sealed": random.randbytes(random.randrange(200)),
    }
    change = random.randrange(3)
    if change == 0:
        fields[random.choice(["from", "to"])] = random.choice(["nobody", "", 3, None, np.zeros(2), ["x"]])
    elif change == 1:
        fields[random.choice(["by", "for", "via", "sealed"])] = random.choice(
            [None, "x", 3, [1], np.zeros(3)]
        )
    raw = pack("relay" if random.random() < 0.9 else "rely", fields)
    return raw if change < 2 else broken(random, raw) if random.random() < 0.5 else raw


def bad_frame(random: Random, mesh: Mesh, peer: str, number: int) -> bytes:
    """A frame that must be refused, of any kind."""
    forms = OF_COORDINATOR if peer == mesh.coordinator else OF_MEMBERS
    makers: list[Callable[[], tuple[Kind, bytes]]] = [
        lambda: (Kind.CONTROL, bad_control(random, forms)),
        lambda: (Kind.CONTROL, broken(random, pack("done", {"phase": bytes(16)}))),
        lambda: (Kind.CONTROL, random.randbytes(random.randrange(100))),
        lambda: (Kind.DATA, bad_data(random, mesh, peer)),
        lambda: (Kind.RELAY, bad_relay(random, mesh, peer)),
        lambda: (Kind.RELAY, random.randbytes(random.randrange(100))),
    ]
    choice = random.randrange(len(makers) + 3)
    if choice < len(makers):
        kind, payload = makers[choice]()
        return Frame(kind=kind, payload=payload, number=number).to_bytes()
    if choice == len(makers):
        return random.randbytes(random.randrange(80))
    if choice == len(makers) + 1:
        raw = bytearray(Frame(kind=Kind.DATA, number=number, payload=random.randbytes(9)).to_bytes())
        raw[random.randrange(8)] ^= random.randrange(1, 256)
        return bytes(raw)
    return random.choice(
        [
            Frame(kind=Kind.DATA, number=number + random.randrange(1, 1 << 40)).to_bytes(),
            Frame(kind=Kind.ACK, acknowledged=random.randrange(1 << 40, 1 << 63)).to_bytes(),
            Frame(kind=Kind.HELLO, payload=random.randbytes(30)).to_bytes(),
            Frame(kind=Kind.WELCOME, payload=random.randbytes(30)).to_bytes(),
            Frame(kind=Kind.REFUSE, payload=random.randbytes(30)).to_bytes(),
        ]
    )
