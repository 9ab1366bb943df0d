"""Runs the roles of an algorithm on the virtual network, epoch by epoch, with checkpoints between."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms import SERVER, Algorithm, Progress, Role, ServerRole, Setup, find_algorithm
from securevfl.data import VerticalData
from securevfl.errors import BudgetExceeded, PlanError, SecureVFLError
from securevfl.federation.checkpoint import load_checkpoint, save_checkpoint
from securevfl.federation.folder import RunFolder
from securevfl.federation.loop import run_virtual
from securevfl.federation.organisations import (
    Observatory,
    Organisation,
    build_organisations,
    kept_records,
    set_budget,
)
from securevfl.federation.seating import hosts_of, label_holder_of, seat_encoder, seat_head
from securevfl.federation.trained import Trained
from securevfl.federation.virtual import VirtualClock, VirtualNetwork
from securevfl.models import pick_device, save_module
from securevfl.settings.plan import Plan


class Engine:
    """One run: organisations, network, roles, and the loop over epochs.

    Args:
        plan: The resolved plan.
        data: The scaled data.
        folder: The run's folder; None keeps everything in memory.
        encoders: Encoders that the caller supplies, by party.
        head: The caller's model for the label holder.
        progress: Called after every step of the server.
        on_epoch: Called with each line of metrics.
        algorithm: What to run instead of the plan's algorithm, such as prediction.
        organisations: Whose gates go on counting, instead of new ones.
    """

    def __init__(
        self,
        plan: Plan,
        data: VerticalData,
        *,
        folder: RunFolder | None = None,
        encoders: Mapping[str, nn.Module] | None = None,
        head: nn.Module | None = None,
        progress: Callable[[Progress], None] | None = None,
        on_epoch: Callable[[dict[str, Any]], None] | None = None,
        algorithm: Algorithm | None = None,
        organisations: Sequence[Organisation] | None = None,
    ) -> None:
        self.plan, self.data, self.folder = plan, data, folder
        self.progress, self.on_epoch = progress, on_epoch
        self.algorithm = algorithm or find_algorithm(plan.algorithm)
        self.device = pick_device(plan.device)
        self.label_holder = label_holder_of(plan, data)
        self.hosts = hosts_of(self.algorithm, data, self.label_holder)
        self.organisations = list(organisations or ())
        try:
            self._build(encoders, head, own=organisations is None)
        except BaseException:
            for each in self.organisations:
                each.close()
            raise
        self.metrics: list[dict[str, Any]] = []
        self.time = 0.0
        self.wall = 0.0
        self.stopped: str | None = None

    # -- building -------------------------------------------------------------------------------------------

    def _build(self, encoders: Mapping[str, nn.Module] | None, head: nn.Module | None, *, own: bool) -> None:
        plan, data = self.plan, self.data
        if self.algorithm.federated and own:
            self.organisations = build_organisations(
                self._here(),
                plan,
                label_holder=self.label_holder,
                folder=self.folder,
                records=data.n_train + data.n_test,
                test_records=data.n_test,
            )
            self.data = self._with_randomised_labels()
        self.observatory = Observatory(self.organisations, self.hosts)
        self.network = self._network()
        self.setup = self._setup(dict(encoders or {}), head)
        self.server = self._server()
        others = [address for address in self.network.links if address != SERVER and self.algorithm.federated]
        self.parties = [self.algorithm.role(self.setup, address) for address in others]
        self.algorithm.combine(self.setup, self.parties)

    def _server(self) -> ServerRole:
        role = self.algorithm.role(self.setup, SERVER)
        if not isinstance(role, ServerRole):
            raise TypeError(f"algorithm {self.algorithm.name!r} gives no ServerRole at {SERVER!r}")
        return role

    def _here(self) -> list[str]:
        """The organisations that run in this process."""
        return list(dict.fromkeys(self.hosts.values()))

    def _network(self) -> VirtualNetwork:
        observe = self.observatory.observe
        return VirtualNetwork(
            self.hosts, latency=self.plan.simulation.latency, codec=self.plan.simulation.wire, observe=observe
        )

    def _with_randomised_labels(self) -> VerticalData:
        """The data with its training labels flipped once; a resumed run goes on with those it has."""
        data, plan = self.data, self.plan
        if not plan.label_epsilon:
            return data
        saved = load_checkpoint(self.folder.path) if self.folder is not None else None
        if saved is not None:
            return replace(data, y_train=np.array(saved["labels"]))
        holder = next(each for each in self.organisations if each.name == self.label_holder)
        observers = tuple(sorted(set(self.hosts.values()) - {self.label_holder}))
        flipped = holder.gate.randomise_labels(
            data.y_train, classes=len(data.classes), epsilon=plan.label_epsilon, observers=observers
        )
        return replace(data, y_train=flipped)

    def _setup(self, encoders: dict[str, nn.Module], head: nn.Module | None) -> Setup:
        plan, data = self.plan, self.data
        unknown = set(encoders) - set(data.parties)
        if unknown:
            raise PlanError(f"an encoder was given for {min(unknown)!r}, which is not a party")
        mine = [party for party in data.parties if self.hosts[party] in self._here()]
        built = {party: self._encoder(party, encoders.get(party)) for party in mine}
        head = seat_head(plan, data) if head is None else head
        return Setup(
            plan=plan,
            data=data,
            label_holder=self.label_holder,
            hosts=self.hosts,
            encoders=built,
            head=head.to(self.device),
            gates={each.name: each.gate for each in self.organisations},
            links=self.network.links,
            clock=VirtualClock(),
            device=self.device,
            report=self._report,
            views={each.name: each.view for each in self.organisations if each.view is not None},
        )

    def _encoder(self, party: str, given: nn.Module | None) -> nn.Module:
        gates = [each.gate for each in self.organisations if each.name == self.hosts[party]]
        gate = gates[0] if gates else None
        return seat_encoder(self.plan, self.data, party, gate=gate, given=given).to(self.device)

    # -- running --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs all epochs that are left, then evaluates and saves the models."""
        begun = time.monotonic()
        start = self._restore()
        try:
            if start == 0:
                self._phase("prepare")
            for epoch in range(start, self.plan.epochs):
                self._epoch(epoch)
                if self.stopped:
                    break
        except BudgetExceeded as refused:
            if self.server.processed == 0:
                raise BudgetExceeded(f"{refused}; not one step fits: raise the budget or sigma") from refused
            self.stopped = f"budget: {refused}"
        self._final_evaluation()
        self.wall = time.monotonic() - begun
        self._save_models()

    def evaluate(self) -> None:
        """Runs the roles' evaluation once."""
        self._phase("evaluate")

    def _epoch(self, epoch: int) -> None:
        self._phase("epoch")
        last = epoch + 1 == self.plan.epochs
        every = self.plan.evaluate_every
        if every and (epoch + 1) % every == 0 and not last:
            self.evaluate()
        self._record()
        if self._has_stalled():
            self.stopped = f"early: the training loss has not improved for {self.plan.patience} epochs"
        if self.folder is not None:
            self._save_checkpoint(epoch + 1)

    def _phase(self, part: str) -> None:
        """Runs one part (`prepare`, `epoch`, `evaluate`) of every role to its end, in virtual time."""
        for link in self.network.links.values():
            link.phase = part
        roles = run_roles((self.server, *self.parties), part)
        try:
            _, self.time = run_virtual(roles, start=self.time, explain=self.network.explain)
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    def _final_evaluation(self) -> None:
        """Evaluates with the budget that was held back; if even that is refused, the metrics stay unknown."""
        if self.plan.budget_epsilon and not self.plan.insecure_reproducible_noise:
            self._open_reserves()
        self.network.forget_undelivered()
        try:
            self.evaluate()
        except BudgetExceeded as refused:
            self.stopped = self.stopped or f"budget: {refused}"
            self.server.test = dict.fromkeys(self.server.test)
        if self.metrics:
            self.metrics[-1] |= {"test": dict(self.server.test), "mu": self._spent_or_none()}
            if self.folder is not None:
                self.folder.cut_metrics(len(self.metrics) - 1)
                self.folder.append_metrics(self.metrics[-1])
                self.observatory.save(self.folder)

    def _open_reserves(self) -> None:
        for each in self.organisations:
            if each.name != self.label_holder:
                set_budget(each.gate, self.plan)

    def _has_stalled(self) -> bool:
        losses = [line["loss"] for line in self.metrics]
        patience = self.plan.patience
        return bool(
            patience and len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])
        )

    # -- reporting ------------------------------------------------------------------------------------------

    def spent(self) -> dict[str, float]:
        """Each owner's mu so far."""
        return {each.name: each.gate.budget.spent_mu for each in self.organisations}

    def _spent_or_none(self) -> dict[str, float | None]:
        return {name: mu if math.isfinite(mu) else None for name, mu in self.spent().items() if mu}

    def _report(self, processed: int, loss: float | None) -> None:
        if self.progress is None:
            return
        total = self.plan.epochs * len(self.data.parties) * self.data.n_train
        now = self.time if not self.algorithm.federated else asyncio.get_running_loop().time()
        self.progress(
            Progress(
                epoch=self.server.epochs_done + 1,
                epochs=self.plan.epochs,
                done=min(1.0, processed / total),
                loss=loss,
                time=now,
                spent=self.spent(),
                test=self.server.test,
            )
        )

    def _record(self) -> None:
        line = {
            "epoch": self.server.epochs_done,
            "time": self.time,
            "processed": self.server.processed,
            "loss": self.server.loss,
            "test": dict(self.server.test),
            "mu": self._spent_or_none(),
            "messages": self.network.messages,
            "bytes": self.network.bytes,
            **self.server.figures(),
        }
        self.metrics.append(json.loads(json.dumps(line)))
        if self.folder is not None:
            self.folder.append_metrics(self.metrics[-1])
        if self.on_epoch is not None:
            self.on_epoch(self.metrics[-1])

    def records(self) -> list[ReleaseRecord]:
        """All releases of a run that is kept in memory."""
        return kept_records(self.organisations)

    # -- saving ---------------------------------------------------------------------------------------------

    def _save_checkpoint(self, epochs: int) -> None:
        if self.folder is None:
            return
        self.observatory.save(self.folder)
        state = {
            "epochs": epochs,
            "time": self.time,
            "messages": self.network.messages,
            "bytes": self.network.bytes,
            "metrics": len(self.metrics),
            "server": self.server.state(),
            **self._states(),
            "labels": self.data.y_train if self.plan.label_epsilon else None,
        }
        save_checkpoint(self.folder.path, state)

    def _numbers(self) -> dict[str, int]:
        return {address: link.number for address, link in self.network.links.items()}

    def _states(self) -> dict[str, Any]:
        return {
            "numbers": self._numbers(),
            "parties": {role.address: role.state() for role in self.parties},
            "gates": {each.name: each.gate.state() for each in self.organisations},
        }

    def _load_states(self, state: dict[str, Any]) -> None:
        for address, link in self.network.links.items():
            link.number = int(state["numbers"][address])
        for role in self.parties:
            role.load(state["parties"][role.address])
        for each in self.organisations:
            each.gate.load(state["gates"][each.name])

    def _restore(self) -> int:
        """Takes up the last checkpoint, if there is one; returns the number of finished epochs."""
        state = load_checkpoint(self.folder.path) if self.folder is not None else None
        if state is None or self.folder is None:
            return 0
        self.time = float(state["time"])
        self.network.messages, self.network.bytes = int(state["messages"]), int(state["bytes"])
        self.server.load(state["server"])
        self._load_states(state)
        self.folder.cut_metrics(int(state["metrics"]))
        self.metrics = self.folder.read_metrics()
        return int(state["epochs"])

    def _save_models(self) -> None:
        if self.folder is None:
            return
        self.folder.model(SERVER).parent.mkdir(exist_ok=True)
        for party, encoder in self.setup.encoders.items():
            save_module(self.folder.model(party), encoder)
        save_module(self.folder.model(SERVER), self.setup.head)
        self.trained().save(self.folder)

    def trained(self) -> Trained:
        """What is needed to take new records."""
        last = max(self._numbers().values())
        return Trained.of(self.data, messages=last, time=self.time)

    def close(self) -> None:
        """Closes ledgers and views."""
        self.observatory.close()


async def run_roles(roles: Iterable[Role], part: str) -> None:
    """Runs one part of some roles to its end."""
    async with asyncio.TaskGroup() as group:
        for role in roles:
            group.create_task(getattr(role, part)())


def first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a user should read: ours before others, and no group around it."""
    flat: list[BaseException] = []
    for error in errors.exceptions:
        flat.append(first_cause(error) if isinstance(error, BaseExceptionGroup) else error)
    ours = [error for error in flat if isinstance(error, SecureVFLError)]
    return (ours or flat)[0]
