"""A session: numbered frames between two organisations, once and in order, over streams that may break.

Frames wait until the other side has acknowledged them. When a stream breaks, the next one begins with what
each side has received, and the rest is sent again. A frame that was delivered before is dropped, so a
replayed one does nothing. A process that starts anew says so by a new incarnation: what was under way to the
old one is void, both sides count from the beginning, and the old one cannot come back.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable

from securevfl.errors import ProtocolError, WireError
from securevfl.network.frames import MAX_PAYLOAD, Frame, Kind

ACK_EVERY = 64
ACK_BYTES = 8 << 20
ACK_AFTER = 0.5
MAX_WAITING = 1 << 30
"""Bytes that may wait for a peer to take them; each organisation has as much for what is passed on for it."""
FRAME_COST = 256
"""Bytes of memory that a waiting frame takes beside its payload, roughly."""

Write = Callable[[bytes], Awaitable[None]]


def new_incarnation() -> bytes:
    """The name of this process among all that an organisation ever starts."""
    return secrets.token_bytes(16)


class Flood(ProtocolError):
    """A peer sends more than anybody can take, or takes nothing."""

    notice = "flood"


class Replaced(WireError):
    """An earlier process of an organisation comes back."""

    notice = "replaced"


class Session:
    """One organisation's side of a session with another.

    Args:
        peer: The other organisation.
        passed: Organisation -> bytes of its that wait to be passed on, to whomever.
    """

    def __init__(self, peer: str, passed: Counter[str] | None = None) -> None:
        self.peer = peer
        self.passed: Counter[str] = Counter() if passed is None else passed
        self.incarnation = b""
        self.received = 0
        self.connected = False
        self._former: set[bytes] = set()
        self._sent = 0
        self._unsent: deque[Frame] = deque()
        self._unacknowledged: deque[Frame] = deque()
        self._bytes = 0
        self._acknowledged = 0
        self._owed_bytes = 0
        self._overdue = False
        self._timer: asyncio.TimerHandle | None = None
        self._idle: asyncio.Future[None] | None = None

    # -- sending --------------------------------------------------------------------------------------------

    def post(self, kind: Kind, payload: bytes, origin: str = "") -> None:
        """Puts a numbered frame on its way; it waits here while there is no stream.

        Args:
            kind: What it carries.
            payload: The content.
            origin: For whom it is passed on, if it is not our own.

        Raises:
            ProtocolError: It is too large, or the other side has stopped taking frames and too many wait.
        """
        if len(payload) > MAX_PAYLOAD:
            raise ProtocolError(
                f"a message of {len(payload):,} bytes for {self.peer}; at most {MAX_PAYLOAD:,} travel at once"
            )
        waiting = self.passed[origin] if origin else self._bytes
        if waiting + len(payload) + FRAME_COST > MAX_WAITING:
            raise Flood(
                f"{origin} floods: {waiting:,} bytes wait to be passed on, some to {self.peer}"
                if origin
                else f"{self.peer} does not take its messages: {waiting:,} bytes wait for it"
            )
        self._sent += 1
        self._count(frame := Frame(kind, payload, self._sent, origin=origin), 1)
        self._unsent.append(frame)
        self._flush()

    def _count(self, frame: Frame, sign: int) -> None:
        """A frame begins to wait (1), or waits no longer (-1)."""
        size = sign * (len(frame.payload) + FRAME_COST)
        if frame.origin:
            self.passed[frame.origin] += size
        else:
            self._bytes += size

    # -- streams --------------------------------------------------------------------------------------------

    def check(self, incarnation: bytes, received: int) -> None:
        """Checks how a stream begins, and changes nothing.

        Args:
            incarnation: The other side's.
            received: How many frames of this process it has received.

        Raises:
            WireError: It claims more than was ever sent, or a later process has taken its place.
        """
        if incarnation in self._former:
            raise Replaced(f"a later process of {self.peer} has taken the place of this one")
        sent = self._sent if incarnation == self.incarnation else 0
        if received > sent:
            raise WireError(f"{self.peer} claims {received} frames; {sent} were sent")

    def attach(self, incarnation: bytes, received: int) -> bool:
        """A stream begins. Returns True if the other side is a new process.

        Args:
            incarnation: The other side's.
            received: How many frames of this process it has received.

        Raises:
            WireError: As `check`; nothing has changed then.
        """
        self.check(incarnation, received)
        restarted = bool(self.incarnation) and incarnation != self.incarnation
        if restarted:
            self._former.add(self.incarnation)
            for frame in (*self._unsent, *self._unacknowledged):
                self._count(frame, -1)
            self._sent = 0
            self._unsent.clear()
            self._unacknowledged.clear()
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self.received = self._acknowledged = 0
        self._take_acknowledgement(received)
        self._unsent.extendleft(reversed(self._unacknowledged))
        self._unacknowledged.clear()
        self.connected = True
        return restarted

    def detach(self) -> None:
        """The stream is gone."""
        self.connected = False

    # -- receiving ------------------------------------------------------------------------------------------

    def expects(self, frame: Frame) -> bool:
        """Takes a frame's acknowledgement; True if its content is new and next.

        Raises:
            WireError: A frame is missing in between, or it acknowledges what was never sent.
        """
        self._take_acknowledgement(frame.acknowledged)
        if frame.number > self.received + 1:
            raise WireError(f"{self.peer} sends frame {frame.number} after frame {self.received}")
        return frame.number > self.received

    def take(self, frame: Frame) -> None:
        """The expected frame's content was accepted; only now it counts as received."""
        self.received = frame.number
        self._owed_bytes += len(frame.payload)
        if self.received - self._acknowledged >= ACK_EVERY or self._owed_bytes >= ACK_BYTES:
            self._flush()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ACK_AFTER, self._remind)

    def _remind(self) -> None:
        """Acknowledges what no frame of ours has acknowledged on its way."""
        self._timer = None
        if self.received > self._acknowledged:
            self._overdue = True
            self._flush()

    def _take_acknowledgement(self, number: int) -> None:
        if number > self._sent:
            raise WireError(f"{self.peer} acknowledges frame {number}; {self._sent} were sent")
        for frames in (self._unacknowledged, self._unsent):  # an earlier stream may have carried the latter
            while frames and frames[0].number <= number:
                self._count(frames.popleft(), -1)

    # -- writing --------------------------------------------------------------------------------------------

    async def pump(self, write: Write) -> None:
        """Writes frames to a stream until it is cancelled or breaks."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                while (data := self._next()) is not None:
                    await write(data)
                self._idle = loop.create_future()
                await self._idle
        finally:
            self._idle = None

    def _flush(self) -> None:
        """Wakes the pump, where it waits for something to write."""
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _next(self) -> bytes | None:
        """The next frame to write, if one is due."""
        if self._unsent:
            frame = self._unsent.popleft()
            self._unacknowledged.append(frame)
            return frame.to_bytes(self._acknowledge())
        if self._owes_acknowledgement():
            return Frame(Kind.ACK, acknowledged=self._acknowledge()).to_bytes()
        return None

    def _owes_acknowledgement(self) -> bool:
        unacknowledged = self.received - self._acknowledged
        return unacknowledged > 0 and (
            self._overdue or unacknowledged >= ACK_EVERY or self._owed_bytes >= ACK_BYTES
        )

    def _acknowledge(self) -> int:
        """What the frame that is about to be written acknowledges."""
        self._acknowledged, self._owed_bytes, self._overdue = self.received, 0, False
        return self.received

    @property
    def waiting(self) -> int:
        """How many frames the other side has not acknowledged."""
        return len(self._unsent) + len(self._unacknowledged)
