"""Runs role machines in one process, delivering envelopes in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from securevfl.errors import ProtocolError
from securevfl.protocols.contract import Address, Envelope, Machine, Node, SecureSum

Choose = Callable[[Sequence[Envelope]], int]
"""Picks the index of the pending envelope that is delivered next."""


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
        codec: SecureSum | None = None,
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
            envelope = Envelope(envelope.sender, envelope.receiver, message)
        self.transcript.append(envelope)
        self.pending += self.machines[envelope.receiver].receive(envelope)

    def run(self) -> None:
        """Delivers until nothing is pending."""
        while self.pending:
            self.step()

    def drop(self, address: Address) -> None:
        """Takes a participant out, with whatever is on its way from or to it, and tells all others."""
        del self.machines[address]
        self.pending = [e for e in self.pending if address not in (e.sender, e.receiver)]
        for machine in list(self.machines.values()):
            self.pending += machine.drop(address)


def run_setup(
    nodes: Mapping[Address, Node], *, choose: Choose | None = None, codec: SecureSum | None = None
) -> list[Envelope]:
    """Runs the key agreement of all nodes, where there is one, and returns what was sent."""
    machines = {address: machine for address, node in nodes.items() if (machine := node.setup()) is not None}
    driver = Driver(machines, choose=choose, codec=codec)
    driver.start()
    driver.run()
    _check_done(machines)
    return driver.transcript


def run_round(
    nodes: Mapping[Address, Node],
    values: Sequence[npt.ArrayLike],
    *,
    round: int,  # noqa: A002
    attempt: int = 0,
    choose: Choose | None = None,
    codec: SecureSum | None = None,
) -> npt.NDArray[np.float64]:
    """Runs one round of all nodes and returns the sum that its receivers obtain."""
    shape = np.shape(values[0])
    machines = {
        address: node.round(
            values[address] if address >= 0 else None, round=round, attempt=attempt, shape=shape
        )
        for address, node in nodes.items()
    }
    driver = Driver(machines, choose=choose, codec=codec)
    driver.start()
    driver.run()
    _check_done(machines)
    protocol = next(iter(nodes.values())).protocol
    return machines[protocol.receivers[0]].result()


def _check_done(machines: Mapping[Address, Machine]) -> None:
    waiting = sorted(address for address, machine in machines.items() if not machine.done)
    if waiting:
        raise ProtocolError(f"nothing is left to deliver, but {waiting} are not done")
