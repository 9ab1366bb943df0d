"""The carrier whose sites are in processes of their own: the label holder's here, the others on Ray.

It carries the messages, in their wire form, and moves the clock. At every instant all organisations that have
something to do are stepped at the same time; their messages go on in the order of the organisations, so the
result does not depend on who was faster.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, Protocol

from securevfl.algorithms import Progress, find_algorithm
from securevfl.data import VerticalData
from securevfl.data.share import absent_block, absent_labels
from securevfl.errors import DeadlockError, PlanError, RunError
from securevfl.federation.folder import RunFolder
from securevfl.federation.site import Site, hosts_of, run_roles
from securevfl.federation.stepped import Step, SteppedNetwork, SteppedPhase
from securevfl.federation.virtual import SimulatedCarrier, VirtualClock
from securevfl.settings.plan import Plan

Share = dict[str, Any]


def pack_share(data: VerticalData, name: str) -> Share:
    """An organisation's own block and public facts; no other features, no scalings of them, no labels."""
    content = {each.name: getattr(data, each.name) for each in fields(data)}
    for part in ("train", "test"):
        blocks = zip(data.parties, content[part], strict=True)
        content[part] = tuple(block if party == name else block.shape for party, block in blocks)
    scales = zip(data.parties, data.scales, strict=False)
    content["scales"] = tuple(steps if party == name else () for party, steps in scales)
    content |= {"y_train": data.n_train, "y_test": data.n_test, "labels_absent": True}
    content["absent"] = tuple(party for party in data.parties if party != name)
    return content


def unpack_share(share: Share) -> VerticalData:
    """The data as the organisation has it; what is absent is NaN throughout and takes no memory."""
    content = dict(share)
    for part in ("train", "test"):
        blocks = content[part]
        content[part] = tuple(absent_block(*each) if isinstance(each, tuple) else each for each in blocks)
    for part in ("y_train", "y_test"):
        content[part] = absent_labels(content["task"], content[part])
    return VerticalData(**content)


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
        report: Callable[[int, float | None], None] = lambda processed, loss: None,
    ) -> None:
        hosts = hosts_of(plan, data, find_algorithm(plan.algorithm))
        self.network = SteppedNetwork(
            name, hosts, latency=plan.latency, codec=plan.wire, observe=self.observe
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

    def start(self, part: str, time: float) -> None:
        """Begins a part; nothing runs before the first step."""
        self.begin(part)
        self._phase = SteppedPhase(run_roles(self.roles.values(), part), self.network, start=time)

    def step(self, now: float, arrived: Sequence[bytes]) -> tuple[Step, float]:
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


class Pending(Protocol):
    """A call under way."""

    def result(self) -> Any:
        """Waits for it; errors of the other side are raised here."""


class Handle(Protocol):
    """A `SteppedSite` somewhere."""

    def call(self, method: str, *arguments: Any) -> Pending:
        """Calls a method of the site without waiting for it."""

    def ready(self) -> None:
        """Waits until the site is made.

        Raises:
            PlanError: The plan does not fit the organisation's data.
        """


class Pool(Protocol):
    """Where sites are made."""

    def open_site(self, name: str, plan: Plan, share: Share, folder: RunFolder) -> Handle:
        """Begins to make the site of an organisation."""

    def close(self) -> None:
        """Ends all sites."""


class ActorCarrier(SimulatedCarrier):
    """Runs the label holder's site itself and steps everybody else's.

    Args:
        plan: The resolved plan.
        data: The scaled data.
        folder: The run's folder, which all processes see.
        pool: Makes a site for every other organisation; closed with the carrier.
        progress: Called after every step of the server.

    Raises:
        PlanError: The algorithm is not a federated one.
    """

    def __init__(
        self,
        plan: Plan,
        data: VerticalData,
        *,
        folder: RunFolder,
        pool: Pool,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._pool, self.away = pool, dict[str, Handle]()
        self._own: SteppedSite | None = None
        try:
            super().__init__(plan, data, folder=folder, progress=progress)
            if not self.algorithm.federated:
                raise PlanError(f"algorithm {plan.algorithm!r} has a single participant; leave Ray out")
            self._own = SteppedSite(self.label_holder, plan, data, folder, self.report)
            for name in dict.fromkeys(self.hosts.values()):
                if name != self.label_holder:
                    self.away[name] = pool.open_site(name, plan, pack_share(data, name), folder)
            for site in self.away.values():
                site.ready()
        except BaseException:
            if self._own is not None:
                self._own.close()
            pool.close()
            raise
        self.network = self._own.network
        self._spent = dict.fromkeys(self.away, 0.0)

    @property
    def home(self) -> SteppedSite:
        """The label holder's site."""
        if self._own is None:
            raise RuntimeError("the carrier was not built")
        return self._own

    def ask(self, method: str, each: Mapping[str, tuple[Any, ...]] | None = None) -> dict[str, Any]:
        """See `SimulatedCarrier.ask`; all work at the same time."""
        given = each or {}
        pending = {name: site.call(method, *given.get(name, ())) for name, site in self.away.items()}
        own = getattr(self.home, method)(*given.get(self.label_holder, ()))
        return {self.label_holder: own} | {name: call.result() for name, call in pending.items()}

    # -- parts ----------------------------------------------------------------------------------------------

    async def phase(self, part: str, epoch: int) -> None:
        """See `Carrier.phase`."""
        try:
            self.ask("start", dict.fromkeys((self.label_holder, *self.away), (part, self.time)))
            self._play()
        finally:
            self.ask("end")

    def _play(self) -> None:
        """Steps everybody until all are done, always at the earliest time at which anybody has work."""
        names = [self.label_holder, *self.away]
        under_way: list[tuple[float, int, str, bytes]] = []
        wakes: dict[str, float | None] = dict.fromkeys(names, self.time)
        done: dict[str, bool] = dict.fromkeys(names, False)
        count = 0
        while not all(done.values()):
            due = [wake for name, wake in wakes.items() if wake is not None and not done[name]]
            times = due + ([under_way[0][0]] if under_way else [])
            if not times:
                waits = "; ".join(self.ask("explain").values())
                raise DeadlockError(f"every role waits and nothing is under way: {waits}")
            # By differences, as the clock of a single process moves, so that the times are the same.
            self.time += max(0.0, min(times) - self.time)
            arrived: dict[str, list[bytes]] = {
                name: [] for name, wake in wakes.items() if wake is not None and wake <= self.time
            }
            while under_way and under_way[0][0] <= self.time:
                _, _, name, data = heapq.heappop(under_way)
                arrived.setdefault(name, []).append(data)
            for name, step in self._step(arrived).items():
                wakes[name], done[name] = step.wake, step.done
                for receiver, data in step.messages:
                    count += 1
                    heapq.heappush(under_way, (self.time + self.plan.latency, count, receiver, data))
                    self.network.messages += 1
                    self.network.bytes += len(data)

    def _step(self, arrived: Mapping[str, list[bytes]]) -> dict[str, Step]:
        """One step of all that have work, at the same time; the answers in the order of the organisations."""
        pending = {
            name: site.call("step", self.time, arrived[name])
            for name, site in self.away.items()
            if name in arrived
        }
        steps: dict[str, Step] = {}
        if self.label_holder in arrived:
            steps[self.label_holder] = self.home.step(self.time, arrived[self.label_holder])[0]
        for name, call in pending.items():
            steps[name], self._spent[name] = call.result()
        return steps

    def spent(self) -> dict[str, float]:
        """Each owner's mu so far, as of its last step."""
        return {self.label_holder: self.home.spent()} | self._spent

    def close(self) -> None:
        """Closes ledgers and views everywhere."""
        self.home.close()
        for site in self.away.values():
            with suppress(RunError):  # it has died, and its files with it
                site.call("close").result()
        self._pool.close()
