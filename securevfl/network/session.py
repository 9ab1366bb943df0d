"""A session: numbered frames between two organisations, once and in order, over streams that may break.

Frames wait until the other side has acknowledged them. When a stream breaks, the next one begins with what
each side has received, and the rest is sent again. A frame that was delivered before is dropped, so a
replayed one does nothing. A process that starts anew says so by a new incarnation: what was under way to the
old one is void, and both sides count from the beginning.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

from securevfl.errors import ProtocolError, WireError
from securevfl.network.frames import NUMBERED, Frame, Kind

ACK_EVERY = 64
ACK_AFTER = 0.5
MAX_WAITING = 1 << 30

Write = Callable[[bytes], Awaitable[None]]


def new_incarnation() -> bytes:
    """The name of this process among all that an organisation ever starts."""
    return secrets.token_bytes(16)


class Session:
    """One organisation's side of a session with another.

    Args:
        peer: The other organisation.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.incarnation = b""
        self.received = 0
        self.connected = False
        self._sent = 0
        self._waiting: deque[Frame] = deque()
        self._bytes = 0
        self._cursor = 0
        self._acknowledged = 0
        self._wake = asyncio.Event()

    def post(self, kind: Kind, payload: bytes) -> None:
        """Puts a numbered frame on its way; it waits here while there is no stream.

        Raises:
            ProtocolError: The other side has stopped taking frames, and too many wait.
        """
        if self._bytes + len(payload) > MAX_WAITING:
            raise ProtocolError(f"{self.peer} does not take its messages: {self._bytes:,} bytes wait for it")
        self._sent += 1
        self._waiting.append(Frame(kind=kind, payload=payload, number=self._sent))
        self._bytes += len(payload)
        self._wake.set()

    def attach(self, incarnation: bytes, received: int) -> bool:
        """A stream begins. Returns True if the other side is a new process.

        Args:
            incarnation: The other side's.
            received: How many frames of this process it has received.

        Raises:
            WireError: It claims more than was ever sent.
        """
        restarted = bool(self.incarnation) and incarnation != self.incarnation
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self.received = 0
            self._acknowledged = 0
            if restarted:
                self._forget()
        self._take_acknowledgement(received)
        self._cursor = 0
        self.connected = True
        self._wake.set()
        return restarted

    def _forget(self) -> None:
        self._sent = 0
        self._waiting.clear()
        self._bytes = 0

    def detach(self) -> None:
        """The stream is gone."""
        self.connected = False

    def accept(self, frame: Frame) -> bool:
        """Takes a frame's numbers; True if its content is new and next.

        Raises:
            WireError: A frame is missing in between, or it acknowledges what was never sent.
        """
        self._take_acknowledgement(frame.acknowledged)
        if frame.kind not in NUMBERED:
            return False
        if frame.number <= self.received:
            return False
        if frame.number != self.received + 1:
            raise WireError(f"{self.peer} sends frame {frame.number} after frame {self.received}")
        self.received = frame.number
        if self.received - self._acknowledged >= ACK_EVERY:
            self._wake.set()
        return True

    def _take_acknowledgement(self, number: int) -> None:
        if number > self._sent:
            raise WireError(f"{self.peer} acknowledges frame {number}; {self._sent} were sent")
        while self._waiting and self._waiting[0].number <= number:
            self._bytes -= len(self._waiting.popleft().payload)
            self._cursor = max(0, self._cursor - 1)

    async def pump(self, write: Write) -> None:
        """Writes frames to a stream until it is cancelled or breaks."""
        while True:
            while self._cursor < len(self._waiting):
                frame = replace(self._waiting[self._cursor], acknowledged=self.received)
                self._cursor += 1
                self._acknowledged = self.received
                await write(frame.to_bytes())
            self._wake.clear()
            if self.received - self._acknowledged >= ACK_EVERY:
                await self._acknowledge(write)
            try:
                async with asyncio.timeout(ACK_AFTER):
                    await self._wake.wait()
            except TimeoutError:
                if self.received > self._acknowledged:
                    await self._acknowledge(write)

    async def _acknowledge(self, write: Write) -> None:
        self._acknowledged = self.received
        await write(Frame(kind=Kind.ACK, acknowledged=self.received).to_bytes())

    @property
    def waiting(self) -> int:
        """How many frames the other side has not acknowledged."""
        return len(self._waiting)
