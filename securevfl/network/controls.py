"""Control messages: what the coordinator and everybody else tell each other between and around phases.

Each kind has fixed fields of fixed types. A message of another form is refused where it arrives, so that
whoever handles one can rely on it, and nothing from outside passes for an event of this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from securevfl.errors import WireError
from securevfl.network.frames import PHASE_BYTES
from securevfl.protocols.wire import Value, unpack

ROUND_BYTES = 8
SALT_BYTES = 32
MAX_CONTROL = 1 << 20
LARGE = frozenset({"alignment", "propose", "join", "records"})
"""Kinds that carry sets of IDs or record numbers, plans or bounds, and may fill a whole frame."""

_INTRODUCTION: dict[str, Any] = {
    "name": str,
    "address": str,
    "incarnation": bytes,
    "public_key": bytes,
    "certificate": bytes,
    "signature": bytes,
}

OF_COORDINATOR: Mapping[str, Mapping[str, Any]] = {
    "introduction": _INTRODUCTION,
    "meet": {"round": bytes, "away": str},
    "align": {"round": bytes, "index": int, "parties": int, "normalise": str},
    "alignment": {"round": bytes, "content": bytes},
    "compare": {"round": bytes, "normalise": str},
    "records": {"numbers": list, "salt": bytes},
    "propose": {"proposal": str, "digest": str},
    "agreed": {"digest": str},
    "begin": {"phase": bytes, "part": str, "epoch": int, "restore": int},
    "abort": {"phase": bytes},
    "stop": {"reason": str, "again": bool},
    "finish": {"epochs": int, "stopped": str},
    "goodbye": {},
}

OF_MEMBERS: Mapping[str, Mapping[str, Any]] = {
    "join": {**_INTRODUCTION, "facts": str, "aligned": str, "checkpoints": list, "finished": bool},
    "met": {"round": bytes},
    "alignment": {"round": bytes, "content": bytes},
    "aligned": {"round": bytes},
    "compared": {"round": bytes, "ids": str},
    "confirmed": {"digest": str},
    "done": {"phase": bytes},
    "refused": {"phase": bytes, "reason": str},
    "failed": {"reason": str},
    "aborted": {"phase": bytes, "checkpoints": list},
    "finished": {},
}

_LISTS = {"checkpoints": "epochs", "numbers": "record numbers"}
_LENGTHS = {
    "phase": PHASE_BYTES,
    "round": ROUND_BYTES,
    "incarnation": 16,
    "public_key": 32,
    "salt": SALT_BYTES,
}


def read_control(payload: bytes, known: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """A control message's kind and fields.

    Args:
        payload: What arrived.
        known: The kinds that its sender may send, `OF_COORDINATOR` or `OF_MEMBERS`.

    Raises:
        WireError: It is none of them, or has other fields.
    """
    kind, fields = unpack(payload)
    form = known.get(kind)
    if form is None:
        raise WireError(f"a control message {kind!r}, which this version does not know")
    if len(payload) > MAX_CONTROL and kind not in LARGE:
        raise WireError(f"a control message {kind!r} of {len(payload):,} bytes")
    if fields.keys() != form.keys():
        raise WireError(f"{kind!r} has the fields {sorted(fields)}, expected {sorted(form)}")
    for name, expected in form.items():
        _check_field(kind, name, fields[name], expected)
    return kind, fields


def _check_field(kind: str, name: str, value: Value, expected: Any) -> None:
    if type(value) is not expected:
        raise WireError(f"{kind!r}: {name} is of type {type(value).__name__}, expected {expected.__name__}")
    if isinstance(value, list) and not all(type(each) is int and 0 <= each < 1 << 31 for each in value):
        raise WireError(f"{kind!r}: {name} is not a list of {_LISTS[name]}")
    if isinstance(value, bytes) and len(value) != _LENGTHS.get(name, len(value)):
        raise WireError(f"{kind!r}: {name} has {len(value)} bytes, expected {_LENGTHS[name]}")
