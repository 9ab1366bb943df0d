"""Virtual time in several processes: each organisation runs until it is idle, somebody else moves the clock.

Every organisation has a loop of its own that never waits. A step sets its clock, hands over what has arrived,
runs whatever can run, and reports what left and when it wants to be woken. Whoever steps all organisations
carries the messages and decides the order, so a run is a function of its seeds although it is spread out.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from securevfl.errors import ProtocolError
from securevfl.federation.links import QueueLink
from securevfl.federation.loop import undisturbed
from securevfl.federation.virtual import VirtualNetwork
from securevfl.privacy.messages import Message

# asyncio runs timers that are due within its clock's resolution.
_AT_ONCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an organisation did at one instant.

    Attributes:
        messages: What left: the receiving organisation and the wire form, in order.
        wake: When it wants to go on by itself; None if only a message can wake it.
        done: True once all its roles have finished the phase.
    """

    messages: Sequence[tuple[str, bytes]]
    wake: float | None
    done: bool


class _PausingSelector(selectors.SelectSelector):
    """Where a loop would wait, notes until when and stops it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.wake: float | None = None
        self.pause: Callable[[], None] = lambda: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout >= _AT_ONCE:
            self.wake = None if timeout is None else self.now + timeout
            self.pause()
        return []


class _SteppedLoop(asyncio.SelectorEventLoop):
    def __init__(self, start: float) -> None:
        self._pausing = _PausingSelector()
        self._pausing.now = start
        super().__init__(self._pausing)
        self._pausing.pause = self.stop

    def time(self) -> float:
        return self._pausing.now

    def run_until_idle(self, now: float) -> float | None:
        """Runs whatever can run at that time; returns when the next timer is due."""
        self._pausing.now = now
        self.run_forever()
        return self._pausing.wake


class SteppedNetwork(VirtualNetwork):
    """One organisation's end of the network; what goes to others waits in `outbox` until it is taken.

    Args:
        name: The organisation.
        hosts: Address -> organisation that runs it.
        latency: Time units that a message takes between two organisations.
        codec: True to send messages within the organisation through their wire form too.
        observe: Called for each message from or to another organisation, with the time of its delivery.
    """

    def __init__(
        self,
        name: str,
        hosts: Mapping[str, str],
        *,
        latency: float = 0.0,
        codec: bool = False,
        observe: Callable[[Message, float], None] | None = None,
    ) -> None:
        super().__init__(hosts, latency=latency, codec=codec, observe=observe)
        self.name = name
        self.links = {each: QueueLink(each, self.post) for each, host in self.hosts.items() if host == name}
        self.outbox: list[tuple[str, bytes]] = []

    def post(self, message: Message) -> None:
        """Delivers a message within the organisation, or puts it into the outbox."""
        host = self.hosts.get(message.receiver)
        if host is None or host == self.name:
            super().post(message)
            return
        if self.observe is not None:
            self.observe(message, asyncio.get_running_loop().time() + self.latency)
        self.outbox.append((host, message.to_bytes()))

    def arrive(self, data: bytes, time: float) -> None:
        """Takes a message from another organisation."""
        message = Message.from_bytes(data)
        link = self.links.get(message.receiver)
        if link is None or self.hosts.get(message.sender, self.name) == self.name:
            raise ProtocolError(
                f"{message.kind!r} from {message.sender} to {message.receiver} is not for {self.name}"
            )
        if self.observe is not None:
            self.observe(message, time)
        link.deliver(message)

    def take(self) -> list[tuple[str, bytes]]:
        """Empties the outbox."""
        taken, self.outbox = self.outbox, []
        return taken


class SteppedPhase:
    """One phase of an organisation's roles, run step by step.

    Args:
        main: Runs the roles to the end of the phase.
        network: The organisation's end of the network.
        start: The time at the beginning.
    """

    def __init__(self, main: Coroutine[Any, Any, None], network: SteppedNetwork, *, start: float) -> None:
        with undisturbed():
            self._loop = _SteppedLoop(start)
            self._task = self._loop.create_task(main)
        self._network = network

    def step(self, now: float, arrived: Sequence[bytes]) -> Step:
        """Hands over what has arrived and runs until nothing can run any more.

        Raises:
            Exception: A role has failed; the phase is over.
        """
        for data in arrived:
            self._network.arrive(data, now)
        wake = self._loop.run_until_idle(now)
        done = self._task.done()
        if done:
            self._task.result()
        return Step(messages=self._network.take(), wake=None if done else wake, done=done)

    def close(self) -> None:
        """Ends the phase, finished or not; what was under way is dropped."""
        with undisturbed():
            if not self._task.done():
                self._task.cancel()
                self._loop.run_until_complete(asyncio.gather(self._task, return_exceptions=True))
            self._loop.close()
        self._network.take()
