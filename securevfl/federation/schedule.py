"""The schedule of a run, the same on every carrier: prepare, epochs, evaluations; or one prediction.

A carrier moves messages and time between sites. There are three: `virtual` (one process), `actors` (one
process per organisation, on Ray), and the network's, which is its coordinator.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from securevfl.algorithms import ServerRole
from securevfl.errors import BudgetExceeded
from securevfl.federation.folder import RunFolder
from securevfl.federation.site import Site
from securevfl.settings.plan import Plan


class Carrier(ABC):
    """Runs the parts of a run at all sites.

    Attributes:
        plan: The resolved plan.
        folder: Where metrics are kept; None keeps them in memory.
        evaluated: What a last evaluation found before the run broke off; empty where there was none.
    """

    plan: Plan
    folder: RunFolder | None
    evaluated: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    async def phase(self, part: str, epoch: int) -> None:
        """Runs one part (`prepare`, `epoch`, `evaluate`, `final`, `predict`) at all sites to its end.

        Args:
            part: Which.
            epoch: For which epoch; 0 is before the first.

        Raises:
            BudgetExceeded: A gate refuses; the part has ended everywhere.
        """

    @property
    @abstractmethod
    def home(self) -> Site:
        """The label holder's site, which measures."""

    @property
    def server(self) -> ServerRole:
        """The label holder's role."""
        role = self.home.server
        if role is None:
            raise TypeError(f"{self.home.name} does not run the server's role")
        return role

    @abstractmethod
    def spent(self) -> dict[str, float]:
        """Mu so far of each owner that is known here."""

    def measure(self) -> None:  # noqa: B027 - only a simulation knows more than its organisations
        """Called after every evaluation."""

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Time, messages and bytes so far, as the label holder counts them."""

    @abstractmethod
    def restore(self) -> int:
        """Takes up the newest state that all sites have; how many epochs are done, -1 before `prepare`."""

    @abstractmethod
    def save(self, epoch: int) -> None:
        """Makes sure that `restore` finds the state after an epoch, 0 for that after `prepare`."""

    def save_evaluated(self) -> None:  # noqa: B027 - the network's sites keep their own states
        """Keeps what the last evaluation found, beside the state before it."""

    @abstractmethod
    async def finish(self, epochs: int, stopped: str | None) -> None:
        """Has every site write what belongs to it."""


T = TypeVar("T")


class Schedule:
    """Leads the sites through a run.

    Args:
        carrier: Runs the parts.
        on_epoch: Called with each line of metrics.

    Attributes:
        metrics: One line per epoch.
        epochs: Epochs done.
        stopped: Why the run ended before its last epoch; None if it did not.
    """

    def __init__(
        self, carrier: Carrier, *, on_epoch: Callable[[dict[str, Any]], None] = lambda line: None
    ) -> None:
        self.carrier, self.plan, self.folder = carrier, carrier.plan, carrier.folder
        self.on_epoch = on_epoch
        self.metrics: list[dict[str, Any]] = []
        self.epochs = 0
        self.stopped: str | None = None

    async def train(self) -> None:
        """Runs all epochs that are left, then evaluates and has every site write what belongs to it.

        Raises:
            BudgetExceeded: The budget does not even allow the first step.
        """
        start = self.carrier.restore()
        self._restore_metrics(max(0, start))
        try:
            if start < 0:
                await self.carrier.phase("prepare", 0)
                self.carrier.save(0)
            while self.epochs < self.plan.epochs and not self.stopped:
                await self._epoch(self.epochs + 1)
        except BudgetExceeded as refused:
            if self.carrier.server.processed == 0:
                raise BudgetExceeded(f"{refused}; not one step fits: raise the budget or sigma") from refused
            self.stopped = f"budget: {refused}"
        await self._final_evaluation()
        await self.carrier.finish(self.epochs, self.stopped)

    async def predict(self) -> None:
        """Applies the trained model once, to the records that the sites were built with."""
        await self.carrier.phase("predict", 0)
        await self.carrier.finish(0, None)

    async def score(self) -> None:
        """Applies the trained model on request, until the label holder's service ends."""
        await self.carrier.phase("score", 0)
        await self.carrier.finish(0, None)

    async def _epoch(self, epoch: int) -> None:
        self.carrier.evaluated = {}
        await self.carrier.phase("epoch", epoch)
        self.epochs, every = epoch, self.plan.evaluate_every
        if every and epoch % every == 0 and epoch < self.plan.epochs:
            await self.carrier.phase("evaluate", epoch)
            self.carrier.measure()
        self._record(epoch)
        self.carrier.save(epoch)

    async def _final_evaluation(self) -> None:
        """Evaluates with the budget that was held back; if even that is refused, the metrics stay unknown."""
        server = self.carrier.server
        try:
            await self.carrier.phase("final", self.epochs)
            self.carrier.measure()
        except BudgetExceeded as refused:
            if not self.carrier.evaluated:
                self.stopped = self.stopped or f"budget: {refused}"
                server.test = dict.fromkeys(server.test)
            for name, value in self.carrier.evaluated.items():  # paid before the run broke off: it stands
                setattr(server, name, value)
        else:
            self.carrier.save_evaluated()
        if self.metrics:
            self.metrics[-1] |= _plain({"test": server.test, "mu": self._spent()})
            if self.folder is not None:
                self.folder.cut_metrics(len(self.metrics) - 1)
                self.folder.append_metrics(self.metrics[-1])

    # -- metrics --------------------------------------------------------------------------------------------

    def _restore_metrics(self, epochs: int) -> None:
        """Takes up the lines of the epochs that are done; one that a crash lost is written again."""
        self.epochs = epochs
        if self.folder is None:
            return
        self.folder.cut_metrics(epochs)
        self.metrics = self.folder.read_metrics()
        if len(self.metrics) < epochs:
            self._record(epochs)
        self._stop_early()

    def _record(self, epoch: int) -> None:
        server = self.carrier.server
        line = {
            "epoch": epoch,
            "processed": server.processed,
            "loss": server.loss,
            "test": dict(server.test),
            "mu": self._spent(),
            **self.carrier.figures(),
            **server.figures(),
        }
        self.metrics.append(_plain(line))
        if self.folder is not None:
            self.folder.append_metrics(self.metrics[-1])
        self._stop_early()
        self.on_epoch(self.metrics[-1])

    def _spent(self) -> dict[str, float | None]:
        return {name: mu if math.isfinite(mu) else None for name, mu in self.carrier.spent().items() if mu}

    def _stop_early(self) -> None:
        """Stops where the training loss has not improved for as many epochs as the plan is patient."""
        losses, patience = [line["loss"] for line in self.metrics], self.plan.patience
        if patience and len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience]):
            self.stopped = f"early: the training loss has not improved for {patience} epochs"


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Runs a schedule to its end on a carrier that never suspends it."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise TypeError("the carrier suspends the schedule; await it instead")


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    """As it is read back from a file."""
    return dict(json.loads(json.dumps(line)))
