"""The link that all runtimes share: numbers what is sent, queues what arrives, matches answers to calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from securevfl.errors import ProtocolError
from securevfl.privacy.messages import Head, Packet
from securevfl.protocols.wire import Value


class QueueLink:
    """One address's door to the others.

    Args:
        address: Whose.
        post: Takes a message on its way; it must not wait.
    """

    def __init__(self, address: str, post: Callable[[Packet], None]) -> None:
        self.address = address
        self._post = post
        self.number = 0
        self.backlog = 0
        self._inbox: deque[tuple[Packet, int]] = deque()
        self._receiver: asyncio.Future[Packet] | None = None
        self._calls: dict[int, tuple[str, asyncio.Future[Packet]]] = {}

    @property
    def waiting(self) -> str:
        """What this address waits for; empty if nothing."""
        calls = [f"the answer of {receiver}" for receiver, _ in self._calls.values()]
        return " and ".join(calls + (["a message"] if self._receiver is not None else []))

    def _message(self, receiver: str, kind: str, fields: Mapping[str, Value], head: Head | None) -> Packet:
        self.number += 1
        return Packet(
            kind=kind, sender=self.address, receiver=receiver, fields=fields, number=self.number, head=head
        )

    async def send(
        self, receiver: str, kind: str, fields: Mapping[str, Value], head: Head | None = None
    ) -> None:
        """Sends a message and does not wait for an answer."""
        self._post(self._message(receiver, kind, fields, head))

    async def call(
        self, receiver: str, kind: str, fields: Mapping[str, Value], head: Head | None = None
    ) -> Packet:
        """Sends a message and waits for the answer to it."""
        message = self._message(receiver, kind, fields, head)
        answer: asyncio.Future[Packet] = asyncio.get_running_loop().create_future()
        self._calls[message.number] = (receiver, answer)
        try:
            self._post(message)
            return await answer
        finally:
            self._calls.pop(message.number, None)

    async def reply(
        self, message: Packet, kind: str, fields: Mapping[str, Value], head: Head | None = None
    ) -> None:
        """Answers a call."""
        self.number += 1
        self._post(
            Packet(
                kind=kind,
                sender=self.address,
                receiver=message.sender,
                fields=fields,
                number=self.number,
                reply_to=message.number,
                head=head,
            )
        )

    async def receive(self) -> Packet:
        """The next message that is not the answer to a call."""
        if self._inbox:
            message, size = self._inbox.popleft()
            self.backlog -= size
            return message
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
        self.backlog = 0
        self._calls.clear()
        self._receiver = None

    def deliver(self, message: Packet, size: int = 0) -> None:
        """Hands over a message that has arrived; its size counts in `backlog` until it is received."""
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
            self._inbox.append((message, size))
            self.backlog += size
