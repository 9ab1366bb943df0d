"""What docs/wire.md says is what is written: bytes made by hand from the page are ours."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from securevfl.errors import NOTICES, WireError
from securevfl.network import frames
from securevfl.network.frames import Frame, Greeting, Kind, read_greeting
from securevfl.privacy.messages import Head, Packet
from securevfl.protocols.wire import pack, unpack

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text()


def name(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("ascii")


def value(kind: str, fields: list[tuple[str, bytes]]) -> bytes:
    content = name(kind) + b"".join(name(key) + made for key, made in fields)
    return b"SVFL" + struct.pack("<BBHQ", 1, 0, len(fields), 16 + len(content)) + content


def text(content: str) -> bytes:
    return b"s" + struct.pack("<Q", len(content.encode())) + content.encode()


def test_values_are_as_the_page_says() -> None:
    array = np.array([[1.5, -2.0, 0.25]], np.float32)
    strings = b"".join(struct.pack("<I", len(each.encode())) + each.encode() for each in ("a", "zwölf"))
    by_hand = value(
        "everything",
        [
            ("nothing", b"n"),
            ("yes", b"t"),
            ("no", b"f"),
            ("whole", b"i" + struct.pack("<q", -7)),
            ("real", b"d" + struct.pack("<d", 0.1)),
            ("text", text("zwölf")),
            ("raw", b"y" + struct.pack("<Q", 2) + b"\x00\xff"),
            ("array", b"a" + struct.pack("<BBQQ", 1, 2, 1, 3) + struct.pack("<fff", 1.5, -2.0, 0.25)),
            ("flags", b"a" + struct.pack("<BBQ", 7, 1, 2) + b"\x01\x00"),
            ("numbers", b"q" + struct.pack("<Qqq", 16, 3, -4)),
            ("strings", b"l" + struct.pack("<Q", len(strings)) + strings),
            ("empty", b"l" + struct.pack("<Q", 0)),
        ],
    )
    fields = {
        "nothing": None,
        "yes": True,
        "no": False,
        "whole": -7,
        "real": 0.1,
        "text": "zwölf",
        "raw": b"\x00\xff",
        "array": array,
        "flags": np.array([True, False]),
        "numbers": [3, -4],
        "strings": ["a", "zwölf"],
        "empty": [],
    }
    assert pack("everything", fields) == by_hand
    kind, back = unpack(by_hand)
    assert kind == "everything" and list(back) == list(fields)


def test_messages_are_as_the_page_says() -> None:
    digest = "0123456789abcdef" * 4
    route = b"\x02p1server"
    head = struct.pack("<q", 5) + digest.encode() + b"\x02p1"
    content = value("embedding", [("epoch", b"i" + struct.pack("<q", 3))])
    by_hand = b"SVFM" + struct.pack("<BBHqq", 1, 3, len(route), 8, 4) + route + head + content
    message = Packet(
        kind="embedding",
        sender="p1",
        receiver="server",
        fields={"epoch": 3},
        number=8,
        reply_to=4,
        head=Head("p1", 5, digest),
    )
    assert message.to_bytes() == by_hand and Packet.from_bytes(by_hand) == message
    plain = b"SVFM" + struct.pack("<BBHqq", 1, 0, len(route), 8, 0) + route + content
    message.reply_to = message.head = None
    assert message.to_bytes() == plain and message.size() == len(plain)


def test_frames_and_greetings_are_as_the_page_says() -> None:
    for kind, code in ((Kind.DATA, 5), (Kind.CONTROL, 6), (Kind.RELAY, 7)):
        by_hand = b"SVFN" + struct.pack("<BBHQQ", 3, code, 0, 9, 4) + b"payload"
        assert Frame(kind, b"payload", 9, 4).to_bytes() == by_hand
    listed = dict(re.findall(r"^\| (\d) \| ([A-Z]+) \|", PAGE, re.MULTILINE))
    assert listed == {str(int(kind)): kind.name for kind in Kind}
    given = {
        "sender": "a",
        "receiver": "b",
        "run": "r",
        "incarnation": bytes(16),
        "known": b"",
        "received": 2,
    }
    payload = pack("hello", {"software": "1", **given})
    greeting = read_greeting(Frame(Kind.HELLO, payload))
    assert greeting == Greeting(**given)  # type: ignore[arg-type]
    frame = Frame.from_bytes(greeting.to_bytes(Kind.HELLO))
    assert list(unpack(frame.payload)[1]) == ["software", *given]
    with pytest.raises(WireError):
        Frame.from_bytes(b"SVFN" + struct.pack("<BBHQQ", 1, 5, 0, 0, 4))


@pytest.mark.parametrize(
    ("title", "known"),
    [("from the coordinator", frames.OF_COORDINATOR), ("from a member", frames.OF_MEMBERS)],
)
def test_the_page_lists_every_control_message(title: str, known: dict[str, dict[str, type]]) -> None:
    table = PAGE.split(f"| {title} |")[1].split("\n\n")[0]
    types = {"text": str, "bytes": bytes, "int": int, "bool": bool, "list": list}
    listed = {}
    for kind, fields in re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE):
        form = {field: types[what] for field, what in re.findall(r"`(\w+)` (\w+)", fields)}
        listed[kind] = form | (frames.OF_COORDINATOR["introduction"] if "introduction" in fields else {})
    assert listed == {kind: dict(form) for kind, form in known.items()}


def test_notices_are_as_the_page_says() -> None:
    section = PAGE.split("### Notices")[1].split("### Signatures")[0]
    listed = re.findall(r"`([a-z-]+)`", section)
    assert set(listed) == set(NOTICES)
