"""A run whose organisations are spread over processes: the label holder here, the others wherever they are.

The engine carries the messages, in their wire form, and moves the clock. At every instant all organisations
that have something to do are stepped at the same time; their messages go on in the order of the
organisations, so the result does not depend on who was faster.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from securevfl.algorithms import Progress, find_algorithm
from securevfl.data import VerticalData
from securevfl.errors import DeadlockError, PlanError, RunError
from securevfl.federation.engine import Engine, first_cause, run_roles
from securevfl.federation.folder import RunFolder
from securevfl.federation.share import Share, pack_share
from securevfl.federation.stepped import Step, SteppedNetwork, SteppedPhase
from securevfl.settings.plan import Plan


class Pending(Protocol):
    """A call under way."""

    def result(self) -> Any:
        """Waits for it; errors of the other side are raised here."""


class Handle(Protocol):
    """A `Seat` somewhere."""

    def call(self, method: str, *arguments: Any) -> Pending:
        """Calls a method of the seat without waiting for it."""

    def ready(self) -> None:
        """Waits until the seat is made.

        Raises:
            PlanError: The plan does not fit the organisation's data.
        """


class Seats(Protocol):
    """Where seats are made."""

    def open_seat(self, name: str, plan: Plan, share: Share, folder: RunFolder) -> Handle:
        """Begins to make the seat of an organisation."""

    def close(self) -> None:
        """Ends all seats."""


class ActorEngine(Engine):
    """An engine that runs the label holder itself and steps everybody else.

    Args:
        plan: The resolved plan.
        data: The scaled data.
        folder: The run's folder, which all processes see.
        seats: Makes a seat for every other organisation; closed with the engine.
        progress: Called after every step of the server.
        on_epoch: Called with each line of metrics.

    Raises:
        PlanError: The algorithm is not a federated one.
    """

    network: SteppedNetwork
    away: dict[str, Handle]

    def __init__(
        self,
        plan: Plan,
        data: VerticalData,
        *,
        folder: RunFolder,
        seats: Seats,
        progress: Callable[[Progress], None] | None = None,
        on_epoch: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._seats, self.away = seats, {}
        self._away_numbers: dict[str, int] = {}
        try:
            if not find_algorithm(plan.algorithm).federated:
                raise PlanError(f"algorithm {plan.algorithm!r} has a single participant; leave Ray out")
            super().__init__(plan, data, folder=folder, progress=progress, on_epoch=on_epoch)
            for name in dict.fromkeys(self.hosts.values()):
                if name != self.label_holder:
                    self.away[name] = seats.open_seat(name, plan, pack_share(data, name), folder)
            for seat in self.away.values():
                seat.ready()
        except BaseException:
            seats.close()
            raise
        self._spent: dict[str, float] = dict.fromkeys(self.away, 0.0)

    def _here(self) -> list[str]:
        return [self.label_holder]

    def _network(self) -> SteppedNetwork:
        return SteppedNetwork(
            self.label_holder,
            self.hosts,
            latency=self.plan.simulation.latency,
            codec=self.plan.simulation.wire,
            observe=self.observatory.observe,
        )

    def _ask_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        pending = {name: seat.call(method, *arguments) for name, seat in self.away.items()}
        return {name: each.result() for name, each in pending.items()}

    # -- phases ---------------------------------------------------------------------------------------------

    def _phase(self, part: str) -> None:
        own = SteppedPhase(run_roles((self.server, *self.parties), part), self.network, start=self.time)
        try:
            self._ask_all("begin", part, self.time)
            self._run(own)
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        finally:
            own.close()
            self._ask_all("end")

    def _run(self, own: SteppedPhase) -> None:
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
                raise DeadlockError(f"every role waits and nothing is under way: {self._explain()}")
            # By differences, as the clock of a single process moves, so that the times are the same.
            self.time += max(0.0, min(times) - self.time)
            arrived: dict[str, list[bytes]] = {
                name: [] for name, wake in wakes.items() if wake is not None and wake <= self.time
            }
            while under_way and under_way[0][0] <= self.time:
                _, _, name, data = heapq.heappop(under_way)
                arrived.setdefault(name, []).append(data)
            for name, step in self._step(own, arrived).items():
                wakes[name], done[name] = step.wake, step.done
                for receiver, data in step.messages:
                    count += 1
                    heapq.heappush(
                        under_way, (self.time + self.plan.simulation.latency, count, receiver, data)
                    )
                    self.network.messages += 1
                    self.network.bytes += len(data)

    def _step(self, own: SteppedPhase, arrived: Mapping[str, list[bytes]]) -> dict[str, Step]:
        """One step of all that have work, at the same time; the answers in the order of the organisations."""
        pending = {
            name: seat.call("step", self.time, arrived[name])
            for name, seat in self.away.items()
            if name in arrived
        }
        steps: dict[str, Step] = {}
        if self.label_holder in arrived:
            steps[self.label_holder] = own.step(self.time, arrived[self.label_holder])
        for name, each in pending.items():
            steps[name], self._spent[name], numbers = each.result()
            self._away_numbers |= numbers
        return steps

    def _explain(self) -> str:
        return "; ".join([self.network.explain(), *self._ask_all("explain").values()])

    def _open_reserves(self) -> None:
        self._ask_all("open_reserve")

    # -- state ----------------------------------------------------------------------------------------------

    def spent(self) -> dict[str, float]:
        """Each owner's mu so far."""
        return super().spent() | self._spent

    def _numbers(self) -> dict[str, int]:
        return super()._numbers() | self._away_numbers

    def _states(self) -> dict[str, Any]:
        states = super()._states()
        for name, state in self._ask_all("state").items():
            states["parties"] |= state["parties"]
            states["gates"][name] = state["gate"]
        return states

    def _load_states(self, state: dict[str, Any]) -> None:
        super()._load_states(state)
        self._away_numbers = {
            address: int(number)
            for address, number in state["numbers"].items()
            if self.hosts[address] != self.label_holder
        }
        for name, seat in self.away.items():
            seat.call("load", state["parties"], state["gates"][name], self._away_numbers).result()

    def _save_models(self) -> None:
        super()._save_models()
        self._ask_all("finish")

    def close(self) -> None:
        """Closes ledgers and views everywhere."""
        super().close()
        for seat in self.away.values():
            with suppress(RunError):  # it has died, and its files with it
                seat.call("close").result()
        self._seats.close()
