"""Virtual time in several processes: each site runs until it is idle, somebody else moves the clock.

Every organisation has a loop of its own that never waits. A step sets its clock, hands over what has arrived,
runs whatever can run, and reports what left and when it wants to be woken. Whoever steps all organisations
carries the messages and decides the order, so a run is a function of its seeds although it is spread out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from securevfl.algorithms import find_algorithm
from securevfl.data import VerticalData
from securevfl.data.share import absent_block, absent_labels
from securevfl.errors import ProtocolError
from securevfl.federation.clock import SteppedLoop, VirtualClock, undisturbed
from securevfl.federation.folder import RunFolder
from securevfl.federation.site import PARTS, Site, hosts_of, run_roles
from securevfl.federation.virtual import VirtualNetwork
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Link
from securevfl.settings.plan import Plan


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What an organisation did at one instant.

    Attributes:
        messages: What left: the receiving organisation and the wire form, in order.
        wake: When it wants to go on by itself; None if only a message can wake it.
        done: True once all its roles have finished the phase.
    """

    messages: Sequence[tuple[str, bytes]]
    wake: float | None
    done: bool


class SteppedNetwork(VirtualNetwork):
    """One organisation's end of the network; what goes to others waits in `outbox` until it is taken.

    Args:
        name: The organisation.
        hosts: Address -> organisation that runs it.
        given: See `VirtualNetwork`.
    """

    def __init__(self, name: str, hosts: Mapping[str, str], **given: Any) -> None:
        super().__init__(hosts, **given)
        self.name = name
        self.links = {
            each: Link(each, self.post, self.hosts) for each, host in self.hosts.items() if host == name
        }
        self.outbox: list[tuple[str, bytes]] = []

    def post(self, message: Packet) -> None:
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
        message = Packet.from_bytes(data)
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
            self._loop = SteppedLoop(start)
            self._task = self._loop.create_task(main)
        self._network = network

    def step(self, now: float, arrived: Sequence[bytes]) -> StepReport:
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
        return StepReport(messages=self._network.take(), wake=None if done else wake, done=done)

    def close(self) -> None:
        """Ends the phase, finished or not; what was under way is dropped."""
        with undisturbed():
            if not self._task.done():
                self._task.cancel()
                self._loop.run_until_complete(asyncio.gather(self._task, return_exceptions=True))
            self._loop.close()
        self._network.take()


class SteppedSite(Site):
    """A site that is stepped from outside, in whatever process.

    Args:
        name: The organisation.
        plan: The resolved plan.
        data: The scaled data, or its share of it.
        folder: The run's folder, which all processes see.
        report: Called with (records processed, loss) after each step of the server.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        data: VerticalData,
        folder: RunFolder,
        report: Callable[[int, float | None], None] | None = None,
    ) -> None:
        hosts = hosts_of(plan, data, find_algorithm(plan.algorithm))
        self.network = SteppedNetwork(
            name, hosts, latency=plan.simulation.latency, codec=plan.simulation.wire, observe=self.observe
        )
        self._phase: SteppedPhase | None = None
        super().__init__(
            name,
            plan,
            data,
            hosts=hosts,
            links=self.network.links,
            clock=VirtualClock(),
            folder=folder,
            report=report,
        )

    def start(self, part: str, epoch: int, time: float) -> None:
        """Begins a part; nothing runs before the first step."""
        self.begin(part, epoch)
        for link in self.network.links.values():
            link.phase = PARTS[part]
        self._phase = SteppedPhase(run_roles(self.roles.values(), part), self.network, start=time)

    def step(self, now: float, arrived: Sequence[bytes]) -> tuple[StepReport, float]:
        """One step of the part; what it did, and the mu spent so far."""
        if self._phase is None:
            raise RuntimeError(f"{self.name} is stepped outside a part")
        return self._phase.step(now, arrived), self.spent()

    def end(self) -> None:
        """Ends the part, finished or not."""
        if self._phase is not None:
            self._phase.close()
            self._phase = None
        self.network.forget_undelivered()

    def explain(self) -> str:
        """Who waits here for what."""
        return self.network.explain()

    def close(self) -> None:
        """Closes ledger and view."""
        self.end()
        super().close()


# -- what a site is sent of the data ------------------------------------------------------------------------

PackedShare = dict[str, Any]


def pack_share(data: VerticalData, name: str) -> PackedShare:
    """An organisation's own block and public facts; no other features, no scalings of them, no labels."""
    content = {each.name: getattr(data, each.name) for each in fields(data)}
    for part in ("train", "test"):
        blocks = zip(data.parties, content[part], strict=True)
        content[part] = tuple(block if party == name else block.shape for party, block in blocks)
    scales = zip(data.parties, data.scales, strict=False)
    content["scales"] = tuple(steps if party == name else () for party, steps in scales)
    described = zip(data.parties, data.described, strict=False)
    content["described"] = tuple(mine if party == name else mine.without_rows() for party, mine in described)
    content |= {"y_train": data.n_train, "y_test": data.n_test, "labels_absent": True}
    content["absent"] = tuple(party for party in data.parties if party != name)
    return content


def unpack_share(share: PackedShare) -> VerticalData:
    """The data as the organisation has it; what is absent is NaN throughout and takes no memory."""
    content = dict(share)
    for part in ("train", "test"):
        blocks = content[part]
        content[part] = tuple(absent_block(*each) if isinstance(each, tuple) else each for each in blocks)
    for part in ("y_train", "y_test"):
        content[part] = absent_labels(content["task"], content[part])
    return VerticalData(**content)
