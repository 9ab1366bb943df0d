"""The virtual network: all roles in one process, messages by reference, time in units.

Delivery takes the plan's latency and keeps the order of sending, as a stream between two organisations does.
Each organisation hosts one or more addresses; a message inside one
organisation is nobody's observation and is neither counted nor recorded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

from securevfl.errors import ProtocolError
from securevfl.privacy.messages import Packet, Stop
from securevfl.privacy.payloads import Link

Observe = Callable[[Packet, float], None]


class VirtualClock:
    """Virtual time, as the loop that runs the roles keeps it."""

    def now(self) -> float:
        """Time units since the run began."""
        return asyncio.get_running_loop().time()

    async def sleep_until(self, when: float, stop: Stop | None = None) -> bool:
        """Waits for a point in time; returns False if `stop` was set first."""
        if stop is not None and stop.is_set():
            return False
        loop = asyncio.get_running_loop()
        if when <= loop.time():
            return True
        sleeper: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_at(when, _wake, sleeper)
        if stop is not None:
            stop.sleepers.add(sleeper)
        try:
            return await sleeper
        finally:
            timer.cancel()
            if stop is not None:
                stop.sleepers.discard(sleeper)


def _wake(sleeper: asyncio.Future[bool]) -> None:
    if not sleeper.done():
        sleeper.set_result(True)


class VirtualNetwork:
    """Carries messages between addresses and counts those that cross organisations.

    Args:
        hosts: Address -> organisation that runs it.
        latency: Time units that a message takes between two organisations.
        codec: True to send every message through its wire form, as a network would.
        observe: Called for each message that crosses organisations, with the time of its delivery.
    """

    def __init__(
        self,
        hosts: Mapping[str, str],
        *,
        latency: float = 0.0,
        codec: bool = False,
        observe: Observe | None = None,
    ) -> None:
        self.hosts = dict(hosts)
        self.latency = latency
        self.codec = codec
        self.observe = observe
        self.messages = 0
        self.bytes = 0
        self._under_way: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[Packet]] = WeakKeyDictionary()
        self.links = {address: Link(address, self.post, self.hosts) for address in self.hosts}

    def post(self, message: Packet) -> None:
        """Delivers a message now or after the latency."""
        target = self.links.get(message.receiver)
        if target is None:
            raise ProtocolError(
                f"{message.sender} sends {message.kind!r} to unknown address {message.receiver!r}"
            )
        if self.codec:
            message = Packet.from_bytes(message.to_bytes())
        if self.hosts[message.sender] == self.hosts[message.receiver]:
            target.deliver(message)
            return
        self.messages += 1
        self.bytes += message.size()
        if not self.latency:
            self._arrive(message)
            return
        # Timers of one moment fire in any order, so each delivers the message that has waited longest.
        loop = asyncio.get_running_loop()
        queue = self._under_way.setdefault(loop, deque())
        queue.append(message)
        loop.call_later(self.latency, lambda: self._arrive(queue.popleft()))

    def _arrive(self, message: Packet) -> None:
        if self.observe is not None:
            self.observe(message, asyncio.get_running_loop().time())
        self.links[message.receiver].deliver(message)

    def forget_undelivered(self) -> None:
        """Drops what was under way when a phase was broken off."""
        for link in self.links.values():
            link.forget()

    def explain(self) -> str:
        """Who waits for what, for the report of a deadlock."""
        waits = [
            f"{address} waits for {link.waiting}" for address, link in self.links.items() if link.waiting
        ]
        return "; ".join(waits) or "no role waits for a message"
