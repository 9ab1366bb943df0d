"""The carrier whose sites are in processes of their own: the label holder's here, the others on Ray.

It carries the messages, in their wire form, and moves the clock. At every instant all organisations that have
something to do are stepped at the same time; their messages go on in the order of the organisations, so the
result does not depend on who was faster.

Ray has no identities inside a cluster and runs whatever its members send: use it within one organisation
only.
"""

from __future__ import annotations

import heapq
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from securevfl import errors
from securevfl.algorithms import Progress
from securevfl.data import VerticalData
from securevfl.errors import DeadlockError, InputError, MissingExtra, PlanError, RunError, SecureVFLError
from securevfl.federation.folder import RunFolder
from securevfl.federation.stepped import PackedShare, SteppedSite, StepReport, pack_share, unpack_share
from securevfl.federation.virtual import SimulatedCarrier
from securevfl.settings.plan import Plan


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

    def open_site(self, name: str, plan: Plan, share: PackedShare, folder: RunFolder) -> Handle:
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
            report = self.report if progress else None
            self._own = SteppedSite(self.label_holder, plan, data, folder, report)
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
            self.ask("start", dict.fromkeys((self.label_holder, *self.away), (part, epoch, self.time)))
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
                    heapq.heappush(
                        under_way, (self.time + self.plan.simulation.latency, count, receiver, data)
                    )
                    self.network.messages += 1
                    self.network.bytes += len(data)

    def _step(self, arrived: Mapping[str, list[bytes]]) -> dict[str, StepReport]:
        """One step of all that have work, at the same time; the answers in the order of the organisations."""
        pending = {
            name: site.call("step", self.time, arrived[name])
            for name, site in self.away.items()
            if name in arrived
        }
        steps: dict[str, StepReport] = {}
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


# -- on Ray -------------------------------------------------------------------------------------------------

Returned = tuple[str, Any]


def answer(action: Callable[[], Any]) -> Returned:
    """What an action gave: ("", value), or the name and the text of an error of ours."""
    try:
        return "", action()
    except SecureVFLError as error:
        return type(error).__name__, str(error)


def value_of(given: Returned) -> Any:
    """The value of an answer; an error is raised again on this side."""
    name, value = given
    if name:
        raise getattr(errors, name)(value)
    return value


class SiteActor:
    """Holds one site in a process of its own; errors travel as text."""

    site: Any

    def open(self, *arguments: Any) -> Returned:
        """Makes the site."""
        return answer(lambda: self._open(*arguments))

    def _open(self, name: str, plan: Plan, share: PackedShare, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)  # as in a sweep: the actors share the machine
        self.site = SteppedSite(name, plan, unpack_share(share), RunFolder(folder))

    def call(self, method: str, *arguments: Any) -> Returned:
        """Calls a method of the site."""
        return answer(lambda: getattr(self.site, method)(*arguments))


class RayHandle:
    """A site in a Ray actor."""

    def __init__(self, ray: Any, actor: Any, name: str, opened: RayCall) -> None:
        self._ray, self._actor, self._name, self._opened = ray, actor, name, opened

    def ready(self) -> None:
        """See `Handle.ready`."""
        self._opened.result()

    def call(self, method: str, *arguments: Any) -> RayCall:
        """See `Handle.call`."""
        return RayCall(self._ray, self._actor.call.remote(method, *arguments), self._name)


class RayCall:
    """A call that an actor works on."""

    def __init__(self, ray: Any, reference: Any, name: str) -> None:
        self._ray, self._reference, self._name = ray, reference, name

    def result(self) -> Any:
        """See `Pending.result`."""
        try:
            return value_of(self._ray.get(self._reference))
        except self._ray.exceptions.RayActorError as error:
            raise RunError(
                f"the process of {self._name} has died; go on from the last epoch with --resume"
            ) from error


class RayPool:
    """The actors of one run.

    Args:
        address: Address of a running cluster, ``auto`` for the one of this machine, ``local`` to start one
            here for the time of the run.

    Raises:
        MissingExtra: Ray is not installed.
        InputError: No cluster answers.
    """

    def __init__(self, address: str) -> None:
        self._ray = connect(address)
        # No processor is reserved: organisations wait for each other most of the time, and a simulation may
        # have more of them than the cluster has processors.
        self._make = self._ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(SiteActor)

    def open_site(self, name: str, plan: Plan, share: PackedShare, folder: RunFolder) -> RayHandle:
        """Starts an actor for the organisation's site; all start at the same time."""
        actor = self._make.remote()
        opened = actor.open.remote(name, plan, share, folder.path.absolute())
        return RayHandle(self._ray, actor, name, RayCall(self._ray, opened, name))

    def close(self) -> None:
        """Ends the actors and leaves the cluster."""
        self._ray.shutdown()


REACHABLE_SECONDS = 5.0


def connect(address: str) -> Any:
    """Connects this process to a cluster and returns the module `ray`.

    Args:
        address: Address of a running cluster, ``auto`` for the one of this machine, ``local`` to start one
            here that ends with this process.

    Raises:
        MissingExtra: Ray is not installed.
        InputError: No cluster answers.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when Ray is imported
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise MissingExtra("--ray needs Ray: pip install 'securevfl[ray]'") from error
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {"address": address}
    try:
        _check_reachable(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no Ray cluster at {address!r}: {first}; start one with 'ray start --head', or use local"
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Tries the port: Ray itself goes on trying a dead one for longer than anybody waits."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError("an address is HOST:PORT, auto or local")
    socket.create_connection((host.strip("[]"), int(port)), timeout=REACHABLE_SECONDS).close()
