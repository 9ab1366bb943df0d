"""The carrier in virtual time: all sites in one process, messages by reference, time in units.

Delivery takes the plan's latency and keeps the order of sending, as a stream between two organisations does.
Each organisation hosts one or more addresses; a message inside one organisation is nobody's observation and
is neither counted nor recorded.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms import SERVER, Algorithm, Progress, Role, find_algorithm
from securevfl.data import VerticalData
from securevfl.errors import PlanError, ProtocolError
from securevfl.federation.clock import VirtualClock, run_virtual
from securevfl.federation.folder import RunFolder, load_checkpoint, save_checkpoint
from securevfl.federation.schedule import Carrier
from securevfl.federation.site import PARTS, Site, hosts_of, run_roles
from securevfl.federation.trained import Trained
from securevfl.privacy.gate import Gate
from securevfl.privacy.messages import Packet, overhead
from securevfl.privacy.payloads import Link
from securevfl.protocols.wire import packed_size
from securevfl.settings.plan import Plan

Observe = Callable[[Packet, float], None]


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
            reach, message = message.reach, Packet.from_bytes(message.to_bytes())
            message.reach = reach
        if self.hosts[message.sender] == self.hosts[message.receiver]:
            target.deliver(message)
            return
        if self.latency:
            # Timers of one moment fire in any order, so each delivers the message that has waited longest.
            loop = asyncio.get_running_loop()
            queue = self._under_way.setdefault(loop, deque())
            queue.append(message)
            loop.call_later(self.latency, lambda: self._arrive(queue.popleft()))
        else:
            self._arrive(message)
        self.messages += 1
        owner = None if message.head is None else message.head.owner
        self.bytes += overhead(message.sender, message.receiver, owner)
        self.bytes += packed_size(message.kind, message.fields)

    def _arrive(self, message: Packet) -> None:
        if self.observe is not None:
            self.observe(message, asyncio.get_running_loop().time())
        self.links[message.receiver].deliver(message)

    def links_of(self, name: str) -> dict[str, Link]:
        """The links of the addresses that an organisation runs."""
        return {address: link for address, link in self.links.items() if self.hosts[address] == name}

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


EVALUATED = ("test", "opened", "test_is", "held_back", "simulated")
"""What the label holder's role knows from an evaluation."""


class SimulatedCarrier(Carrier):
    """What the carriers of a simulation share: virtual time, one folder for all, one checkpoint.

    Args:
        plan: The resolved plan.
        data: The scaled data.
        folder: The run's folder; None keeps everything in memory.
        algorithm: What to run instead of the plan's algorithm, such as prediction.
        progress: Called after every step of the server.
    """

    network: VirtualNetwork

    def __init__(
        self,
        plan: Plan,
        data: VerticalData,
        *,
        folder: RunFolder | None = None,
        algorithm: Algorithm | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.plan, self.folder, self.progress = plan, folder, progress
        self.algorithm = algorithm or find_algorithm(plan.algorithm)
        self.hosts = hosts_of(plan, data, self.algorithm)
        self.label_holder = self.hosts[SERVER]
        self.time = 0.0

    @abstractmethod
    def ask(self, method: str, each: Mapping[str, tuple[Any, ...]] | None = None) -> dict[str, Any]:
        """Calls a method of every site; organisation -> answer.

        Args:
            method: Its name.
            each: Organisation -> arguments.
        """

    def spent(self) -> dict[str, float]:
        """Each owner's mu so far."""
        return self.ask("spent")

    def measure(self) -> None:
        """Exact figures where the federation opens noisy ones: outside of it, as only a simulation can."""
        scores = [each for found in self.ask("test_scores").values() for each in found]
        if scores:
            self.server.measure(np.sum(scores, axis=0))

    def figures(self) -> dict[str, Any]:
        """See `Carrier.figures`."""
        return {"time": self.time, "messages": self.network.messages, "bytes": self.network.bytes}

    def now(self) -> float:
        """Virtual time, within a part too."""
        return self.time

    def report(self, processed: int, loss: float | None) -> None:
        """Tells whoever watches where the run is."""
        if self.progress is None:
            return
        data, server = self.home.data, self.server
        total = self.plan.epochs * len(data.parties) * data.n_train
        self.progress(
            Progress(
                epoch=server.epochs_done + 1,
                epochs=self.plan.epochs,
                done=min(1.0, processed / total),
                loss=loss,
                time=self.now(),
                spent=self.spent(),
                test=server.test,
            )
        )

    # -- state ----------------------------------------------------------------------------------------------

    def save(self, epoch: int) -> None:
        """See `Carrier.save`; all sites' states in one file, which is replaced in one step."""
        if self.folder is not None:
            state = {"epoch": epoch, **self.figures(), "sites": self.ask("state")}
            save_checkpoint(self.folder.path, state)

    def save_evaluated(self) -> None:
        """See `Carrier.save_evaluated`."""
        state = load_checkpoint(self.folder.path) if self.folder is not None else None
        if self.folder is not None and state is not None:
            known = {name: getattr(self.server, name, None) for name in EVALUATED}
            found = {name: dict(each) if isinstance(each, Mapping) else each for name, each in known.items()}
            found = {name: each for name, each in found.items() if each is not None}
            save_checkpoint(self.folder.path, state | {"evaluated": found})

    def restore(self) -> int:
        """See `Carrier.restore`."""
        state = load_checkpoint(self.folder.path) if self.folder is not None else None
        if state is None:
            return -1
        self.evaluated = dict(state.get("evaluated", {}))
        self.time = float(state["time"])
        self.network.messages, self.network.bytes = int(state["messages"]), int(state["bytes"])
        self.ask("load", {name: (each,) for name, each in state["sites"].items()})
        return int(state["epoch"])

    def trained(self) -> Trained:
        """What is needed to take new records."""
        last = max(number for each in self.ask("numbers").values() for number in each.values())
        return Trained.of(self.home.data, messages=last, time=self.time)

    async def finish(self, epochs: int, stopped: str | None) -> None:
        """See `Carrier.finish`."""
        self.ask("finish")
        if self.folder is not None and not self.home.predicts:
            self.trained().save(self.folder)

    def records(self) -> list[ReleaseRecord]:
        """All releases of a run that is kept in memory."""
        return [record for each in self.ask("records").values() for record in each]

    def close(self) -> None:
        """Closes ledgers and views."""
        self.ask("close")


class VirtualCarrier(SimulatedCarrier):
    """Runs all sites in this process.

    Args:
        plan: The resolved plan.
        data: The scaled data.
        encoders: Encoders that the caller supplies, by party.
        head: The caller's model for the label holder.
        records: How many record indices are in use, where they are more than those of the data.
        gates: Organisation -> gate that goes on counting, instead of a new one.
        given: See `SimulatedCarrier`.
    """

    def __init__(
        self,
        plan: Plan,
        data: VerticalData,
        *,
        encoders: Mapping[str, nn.Module] | None = None,
        head: nn.Module | None = None,
        records: int = 0,
        gates: Mapping[str, Gate] | None = None,
        **given: Any,
    ) -> None:
        super().__init__(plan, data, **given)
        own = dict(encoders or {})
        if unknown := set(own) - set(data.parties):
            raise PlanError(f"an encoder was given for {min(unknown)!r}, which is not a party")
        self.network = VirtualNetwork(
            self.hosts,
            latency=plan.simulation.latency,
            codec=plan.simulation.wire,
            observe=self._observe if plan.record_views else None,
        )
        names = dict.fromkeys(self.hosts.values()) if self.algorithm.federated else (self.label_holder,)
        self.sites: dict[str, Site] = {}
        with ExitStack() as opened:
            for name in names:
                self.sites[name] = Site(
                    name,
                    plan,
                    data,
                    hosts=self.hosts,
                    links=self.network.links_of(name),
                    clock=VirtualClock(),
                    folder=self.folder,
                    algorithm=given.get("algorithm"),
                    records=records,
                    encoder=own.get,
                    head=head,
                    gate=(gates or {}).get(name),
                    report=self.report if self.progress else None,
                )
                opened.callback(self.sites[name].close)
            self._combine()
            opened.pop_all()

    @property
    def home(self) -> Site:
        """The label holder's site."""
        return self.sites[self.label_holder]

    @property
    def roles(self) -> list[Role]:
        """All roles, the server's first."""
        found = {address: role for site in self.sites.values() for address, role in site.roles.items()}
        order = [SERVER, *(address for address in self.hosts if address != SERVER)]
        return [found[address] for address in order if address in found]

    @property
    def encoders(self) -> dict[str, nn.Module]:
        """Every party's encoder."""
        found = {name: each for site in self.sites.values() for name, each in site.encoders.items()}
        return {party: found[party] for party in self.home.data.parties}

    @property
    def gates(self) -> dict[str, Gate]:
        """Every organisation's gate, where it has one."""
        return {name: site.gate for name, site in self.sites.items() if site.gate is not None}

    @property
    def head(self) -> nn.Module:
        """The trained head, wherever it is."""
        (found,) = (site.setup.head for site in self.sites.values() if site.keeps_head)
        return found

    def _combine(self) -> None:
        """Parties of one process may compute together."""
        self.algorithm.combine(self.home.setup, [role for role in self.roles if role.address != SERVER])

    def _observe(self, message: Packet, time: float) -> None:
        for address in (message.receiver, message.sender):
            self.sites[self.hosts[address]].observe(message, time)

    async def phase(self, part: str, epoch: int) -> None:
        """See `Carrier.phase`."""
        anew = [site.begin(part, epoch) for site in self.sites.values()]
        if any(anew):
            self._combine()
        try:
            work = self._play(part)
            _, self.time = run_virtual(work, start=self.time, explain=self.network.explain)
        except BaseException:
            self.network.forget_undelivered()
            raise

    async def _play(self, part: str) -> None:
        for link in self.network.links.values():
            link.phase = PARTS[part]
        await run_roles(self.roles, part)

    def now(self) -> float:
        """Virtual time, within a part too."""
        return asyncio.get_running_loop().time() if self.algorithm.federated else self.time

    def ask(self, method: str, each: Mapping[str, tuple[Any, ...]] | None = None) -> dict[str, Any]:
        """See `SimulatedCarrier.ask`."""
        given = each or {}
        return {name: getattr(site, method)(*given.get(name, ())) for name, site in self.sites.items()}

    def restore(self) -> int:
        """See `Carrier.restore`."""
        epoch = super().restore()
        if self.plan.label_epsilon:  # flipped labels took new roles
            self._combine()
        return epoch
