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
from securevfl.messages import Head, Message
from securevfl.protocols.wire import Value

Observe = Callable[[Message, float], None]


class VirtualClock:
    """Virtual time, as the loop that runs the roles keeps it."""

    def now(self) -> float:
        """Time units since the run began."""
        return asyncio.get_running_loop().time()

    async def sleep_until(self, when: float, stop: asyncio.Event | None = None) -> bool:
        """Waits for a point in time; returns False if `stop` was set first."""
        if stop is not None and stop.is_set():
            return False
        delay = when - self.now()
        if delay <= 0:
            return True
        if stop is None:
            await asyncio.sleep(delay)
            return True
        try:
            async with asyncio.timeout(delay):
                await stop.wait()
        except TimeoutError:
            return True
        return False


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
        self._under_way: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[Message]] = WeakKeyDictionary()
        self.links = {address: VirtualLink(self, address) for address in self.hosts}

    def post(self, message: Message) -> None:
        """Delivers a message now or after the latency."""
        target = self.links.get(message.receiver)
        if target is None:
            raise ProtocolError(
                f"{message.sender} sends {message.kind!r} to unknown address {message.receiver!r}"
            )
        if self.codec:
            message = Message.from_bytes(message.to_bytes())
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

    def _arrive(self, message: Message) -> None:
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


class VirtualLink:
    """One address's door to the virtual network."""

    def __init__(self, network: VirtualNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self.number = 0
        self._inbox: deque[Message] = deque()
        self._receiver: asyncio.Future[Message] | None = None
        self._calls: dict[int, tuple[str, asyncio.Future[Message]]] = {}

    @property
    def waiting(self) -> str:
        """What this address waits for; empty if nothing."""
        calls = [f"the answer of {receiver}" for receiver, _ in self._calls.values()]
        return " and ".join(calls + (["a message"] if self._receiver is not None else []))

    def _message(self, receiver: str, kind: str, fields: Mapping[str, Value], head: Head | None) -> Message:
        self.number += 1
        return Message(
            kind=kind, sender=self.address, receiver=receiver, fields=fields, number=self.number, head=head
        )

    async def send(
        self, receiver: str, kind: str, fields: Mapping[str, Value], head: Head | None = None
    ) -> None:
        """Sends a message and does not wait for an answer."""
        self._network.post(self._message(receiver, kind, fields, head))

    async def call(
        self, receiver: str, kind: str, fields: Mapping[str, Value], head: Head | None = None
    ) -> Message:
        """Sends a message and waits for the answer to it."""
        message = self._message(receiver, kind, fields, head)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[message.number] = (receiver, answer)
        try:
            self._network.post(message)
            return await answer
        finally:
            self._calls.pop(message.number, None)

    async def reply(
        self, message: Message, kind: str, fields: Mapping[str, Value], head: Head | None = None
    ) -> None:
        """Answers a call."""
        self.number += 1
        self._network.post(
            Message(
                kind=kind,
                sender=self.address,
                receiver=message.sender,
                fields=fields,
                number=self.number,
                reply_to=message.number,
                head=head,
            )
        )

    async def receive(self) -> Message:
        """The next message that is not the answer to a call."""
        if self._inbox:
            return self._inbox.popleft()
        if self._receiver is not None:
            raise ProtocolError(f"two tasks of {self.address} wait for messages; one listener is allowed")
        self._receiver = asyncio.get_running_loop().create_future()
        try:
            return await self._receiver
        finally:
            self._receiver = None

    def forget(self) -> None:
        """Drops waiting messages and unanswered calls."""
        self._inbox.clear()
        self._calls.clear()
        self._receiver = None

    def deliver(self, message: Message) -> None:
        """Hands over a message that has arrived."""
        if message.reply_to is not None:
            receiver, answer = self._calls.get(message.reply_to, ("", None))
            if answer is None or receiver != message.sender:
                raise ProtocolError(
                    f"{message.sender} answers call {message.reply_to}, which {self.address} did not make"
                )
            if not answer.done():
                answer.set_result(message)
        elif self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(message)
        else:
            self._inbox.append(message)
