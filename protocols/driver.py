"""The one way to drive machines inside one process: envelopes in any order, as objects or as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from securevfl.errors import ProtocolError

if TYPE_CHECKING:
    from securevfl.protocols.contract import Address, Envelope, Machine, Message, Node

Choose = Callable[[Sequence["Envelope"]], int]
"""Picks the index of the pending envelope that is delivered next."""


class Codec(Protocol):
    """Whatever reads a protocol's messages from their binary form."""

    def decode(self, data: bytes) -> Message:
        """The message."""


class Driver:
    """Delivers envelopes between machines.

    Args:
        machines: One machine per participant.
        choose: Order of delivery; first in, first out by default.
        codec: Pass every message through its binary form, as the network would.
    """

    def __init__(
        self,
        machines: Mapping[Address, Machine],
        *,
        choose: Choose | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.machines = dict(machines)
        self.pending: list[Envelope] = []
        self.transcript: list[Envelope] = []
        self._choose = choose
        self._codec = codec

    def start(self) -> None:
        """Starts every machine."""
        for machine in list(self.machines.values()):
            self.pending += machine.start()

    def step(self) -> None:
        """Delivers one pending envelope."""
        index = self._choose(self.pending) if self._choose else 0
        envelope = self.pending.pop(index)
        if self._codec is not None:
            message = self._codec.decode(envelope.message.to_bytes())
            envelope = replace(envelope, message=message)
        self.transcript.append(envelope)
        self.pending += self.machines[envelope.receiver].receive(envelope)

    def run(self) -> None:
        """Delivers until nothing is pending, and nobody has work that needs no message."""
        while True:
            for machine in list(self.machines.values()):
                while machine.pending:
                    self.pending += machine.proceed()
            if not self.pending:
                return
            self.step()

    def drop(self, address: Address) -> None:
        """Takes a participant out, with whatever is on its way from or to it, and tells all others."""
        del self.machines[address]
        self.pending = [e for e in self.pending if address not in (e.sender, e.receiver)]
        for machine in list(self.machines.values()):
            self.pending += machine.drop(address)


def drive(
    machines: Iterable[Machine],
    sent: Iterable[Envelope] = (),
    *,
    choose: Choose | None = None,
    codec: Codec | None = None,
) -> list[Envelope]:
    """Runs machines to their end and returns what was delivered.

    Args:
        machines: One machine per participant.
        sent: What somebody without a machine has sent already, such as a dealer.
        choose: Order of delivery; first in, first out by default.
        codec: Pass every message through its binary form, as the network would.

    Raises:
        ProtocolError: Nothing is left to deliver, but somebody is not done.
    """
    driver = Driver({machine.address: machine for machine in machines}, choose=choose, codec=codec)
    driver.pending += sent
    driver.start()
    driver.run()
    waiting = sorted(address for address, machine in driver.machines.items() if not machine.done)
    if waiting:
        raise ProtocolError(f"nothing is left to deliver, but {waiting} are not done")
    return driver.transcript


def run_setup(
    nodes: Mapping[Address, Node], *, choose: Choose | None = None, codec: Codec | None = None
) -> list[Envelope]:
    """Runs the key agreement of all nodes, where there is one, and returns what was sent."""
    machines = (node.setup() for node in nodes.values())
    return drive(filter(None, machines), choose=choose, codec=codec)


def run_round(
    nodes: Mapping[Address, Node],
    values: Sequence[npt.ArrayLike],
    *,
    round: int,  # noqa: A002
    attempt: int = 0,
    choose: Choose | None = None,
    codec: Codec | None = None,
) -> npt.NDArray[np.float64]:
    """Runs one round of all nodes and returns the sum that its receivers obtain."""
    shape = np.shape(values[0])
    machines = {
        address: node.round(
            values[address] if address >= 0 else None, round=round, attempt=attempt, shape=shape
        )
        for address, node in nodes.items()
    }
    drive(machines.values(), choose=choose, codec=codec)
    protocol = next(iter(nodes.values())).protocol
    return machines[protocol.receivers[0]].result()
