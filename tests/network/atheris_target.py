"""Coverage-guided fuzzing of everything that reads bytes from the network; run by test_network_atheris.py."""

from __future__ import annotations

import sys
from collections.abc import Callable

import atheris

with atheris.instrument_imports(
    include=["securevfl.protocols.wire", "securevfl.network", "securevfl.privacy.messages"]
):
    from securevfl.errors import WireError
    from securevfl.network.frames import (
        OF_COORDINATOR,
        OF_MEMBERS,
        Frame,
        read_control,
        read_greeting,
        reason_of,
    )
    from securevfl.privacy.messages import Packet

READERS: tuple[Callable[[bytes], object], ...] = (
    Frame.from_bytes,
    Packet.from_bytes,
    lambda data: read_control(data, OF_COORDINATOR),
    lambda data: read_control(data, OF_MEMBERS),
    lambda data: read_greeting(Frame.from_bytes(data)),
    lambda data: reason_of(Frame.from_bytes(data)),
)


def one(data: bytes) -> None:
    """Anything but a value or a `WireError` ends the fuzzer with a report."""
    for read in READERS:
        try:
            read(data)
        except WireError:
            continue


if __name__ == "__main__":
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
