"""An organisation's seat in a run: its gate, ledger and view, the roles it hosts, and their checkpoints."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from securevfl.algorithms import SERVER, Algorithm, Role, ServerRole, Setup, find_algorithm
from securevfl.data import VerticalData
from securevfl.errors import RunError
from securevfl.federation.checkpoint import NAME as CHECKPOINT
from securevfl.federation.checkpoint import load_checkpoint, save_checkpoint
from securevfl.federation.engine import first_cause
from securevfl.federation.folder import RunFolder
from securevfl.federation.organisations import Observatory, build_organisation, set_budget
from securevfl.federation.seating import hosts_of, label_holder_of, seat_encoder, seat_head
from securevfl.federation.trained import Trained
from securevfl.models import pick_device, save_module
from securevfl.models.seeds import torch_generator
from securevfl.network.clock import RealClock
from securevfl.network.mesh import Mesh
from securevfl.network.own_encoder import Builder, build_own
from securevfl.privacy.messages import Message
from securevfl.protocols.contract import Address
from securevfl.protocols.keys import Authenticator
from securevfl.settings.plan import Plan

PARTS = ("prepare", "epoch", "evaluate", "final")
KEPT = 2


def complete_checkpoints(folder: RunFolder) -> list[int]:
    """The epochs whose checkpoints are whole; a folder that a crash left without one does not count."""
    found = (folder.path / "checkpoints").glob(f"[0-9]*/{CHECKPOINT}")
    return sorted(int(path.parent.name) for path in found)


class Seat:
    """One organisation's part of a run.

    Args:
        name: The organisation.
        plan: The resolved plan.
        data: Its share of the data, scaled.
        folder: Where it keeps its files.
        mesh: Its connections.
        agreement: Digest of what all organisations agreed on.
        unit: Seconds that a simulated time unit lasts; 0 does not sleep.
        report: Called with (records processed, loss) after each step of the server.
        builder: Makes its own encoder, where it does not use the plan's.
        algorithm: What to run instead of the plan's algorithm, such as prediction.
        records: How many record indices are in use, where they are more than those of the data.
    """

    def __init__(
        self,
        name: str,
        *,
        plan: Plan,
        data: VerticalData,
        folder: RunFolder,
        mesh: Mesh,
        agreement: str,
        unit: float = 0.0,
        report: Callable[[int, float | None], None] = lambda processed, loss: None,
        builder: Builder | None = None,
        algorithm: Algorithm | None = None,
        records: int = 0,
    ) -> None:
        self.name, self.plan, self.data, self.folder, self.mesh = name, plan, data, folder, mesh
        self.agreement = agreement
        self.clock, self.report, self._builder = RealClock(unit), report, builder
        self.algorithm = algorithm or find_algorithm(plan.algorithm)
        self.label_holder = label_holder_of(plan, data)
        self.hosts = hosts_of(self.algorithm, data, self.label_holder)
        self.organisation = build_organisation(
            name,
            plan,
            records=records or data.n_train + data.n_test,
            test_records=data.n_test,
            holds_labels=name == self.label_holder,
            folder=folder,
        )
        self.observatory = Observatory([self.organisation], self.hosts)
        mesh.observe = self._observe
        self._randomised = not plan.label_epsilon
        try:
            self.setup = self._build()
            self.roles = self._roles()
        except BaseException:
            self.close()
            raise

    # -- building -------------------------------------------------------------------------------------------

    def _build(self) -> Setup:
        device = pick_device(self.plan.device)
        encoders = {
            party: seat_encoder(
                self.plan, self.data, party, gate=self.organisation.gate, given=self._own_encoder(party)
            ).to(device)
            for party in self.data.parties
            if self.hosts[party] == self.name
        }
        return Setup(
            plan=self.plan,
            data=self.data,
            label_holder=self.label_holder,
            hosts=self.hosts,
            encoders=encoders,
            head=seat_head(self.plan, self.data).to(device),
            gates={self.name: self.organisation.gate},
            links=self.mesh.seat(self.hosts),
            clock=self.clock,
            device=device,
            report=self.report,
            views={} if self.organisation.view is None else {self.name: self.organisation.view},
            authenticate=self._authenticate,
        )

    def _own_encoder(self, party: str) -> nn.Module | None:
        if self._builder is None:
            return None
        index = self.data.parties.index(party)
        generator = torch_generator(self.plan.seed, "encoder", index)
        columns = self.data.train[index].shape[1]
        return build_own(self._builder, columns, self.plan.embedding, generator=generator)

    def _roles(self) -> dict[str, Role]:
        return {address: self.algorithm.role(self.setup, address) for address in self.setup.links}

    def _authenticate(self, channel: str, workers: Mapping[Address, str]) -> Authenticator:
        return self.mesh.authenticator(channel, workers, self.agreement)

    def _observe(self, message: Message) -> None:
        self.observatory.observe(message, self.clock.now())

    @property
    def server(self) -> ServerRole | None:
        """The server's role, where it runs here."""
        role = self.roles.get(SERVER)
        return role if isinstance(role, ServerRole) else None

    # -- running --------------------------------------------------------------------------------------------

    async def run(self, part: str) -> None:
        """Runs one part of all roles to its end.

        Raises:
            BudgetExceeded: The gate refuses; nothing of that release has left.
        """
        if part == "prepare":
            self._randomise_labels()
        if part == "final":
            self._open_reserve()
        name = "evaluate" if part == "final" else part
        try:
            async with asyncio.TaskGroup() as group:
                for role in self.roles.values():
                    group.create_task(getattr(role, name)())
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    def _randomise_labels(self) -> None:
        """Flips the label holder's training labels, once."""
        if self._randomised or self.name != self.label_holder:
            return
        observers = tuple(sorted(set(self.hosts.values()) - {self.name}))
        flipped = self.organisation.gate.randomise_labels(
            self.data.y_train,
            classes=len(self.data.classes),
            epsilon=self.plan.label_epsilon,
            observers=observers,
        )
        self._take_labels(flipped)

    def _take_labels(self, labels: Any) -> None:
        self._randomised = True
        self.data = replace(self.data, y_train=np.array(labels))
        self.setup = self._build()
        self.roles = self._roles()

    def _open_reserve(self) -> None:
        """The budget that was held back for the final evaluation."""
        plan = self.plan
        if plan.budget_epsilon and not plan.insecure_reproducible_noise and self.name != self.label_holder:
            set_budget(self.organisation.gate, plan)

    def spent(self) -> float:
        """This organisation's mu so far."""
        return self.organisation.gate.budget.spent_mu

    # -- checkpoints ----------------------------------------------------------------------------------------

    def _checkpoint(self, epoch: int) -> Path:
        return self.folder.path / "checkpoints" / f"{epoch:06d}"

    def checkpoints(self) -> list[int]:
        """Epochs that this organisation can go back to."""
        return complete_checkpoints(self.folder)

    def save(self, epoch: int, **more: Any) -> None:
        """Keeps the state after an epoch; older ones but the last are removed."""
        self.observatory.save(self.folder)
        state = {
            "time": self.clock.now(),
            "messages": self.mesh.messages,
            "bytes": self.mesh.bytes,
            "numbers": {address: link.number for address, link in self.mesh.links.items()},
            "roles": {address: role.state() for address, role in self.roles.items()},
            "gate": self.organisation.gate.state(),
            "labels": self.data.y_train if self.plan.label_epsilon and not self.data.labels_absent else None,
            **more,
        }
        target = self._checkpoint(epoch)
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        save_checkpoint(target, state)
        for old in self.checkpoints()[:-KEPT]:
            shutil.rmtree(self._checkpoint(old))

    def restore(self, epoch: int, *, fresh: bool) -> dict[str, Any]:
        """Goes back to the state after an epoch; -1 is before anything was done.

        Args:
            epoch: Which.
            fresh: True in a new process, which has no other memory of what was released once.

        Raises:
            RunError: There is no such checkpoint.
        """
        if self.algorithm.tolerates_absence(self.plan):  # who was away has older ones only
            epoch = max((each for each in self.checkpoints() if each <= epoch), default=epoch)
        state = load_checkpoint(self._checkpoint(epoch)) if epoch >= 0 else None
        if epoch >= 0 and state is None:
            raise RunError(f"{self._checkpoint(epoch)} holds no checkpoint")
        self.setup = self._build()
        self.roles = self._roles()
        if state is None:
            return {}
        if state["labels"] is not None:
            self._take_labels(state["labels"])
        self._randomised = True
        if fresh:
            self.clock.set(float(state["time"]))
            self.mesh.messages, self.mesh.bytes = int(state["messages"]), int(state["bytes"])
            self.organisation.gate.load(state["gate"])
        for address, number in state["numbers"].items():
            link = self.mesh.links[address]
            link.number = max(link.number, int(number))
        for address, role in self.roles.items():
            role.load(state["roles"][address])
        return state

    def finish(self) -> None:
        """Writes the models that belong here, and what it takes to predict with them."""
        self.observatory.save(self.folder)
        self.folder.model(SERVER).parent.mkdir(exist_ok=True)
        for party, encoder in self.setup.encoders.items():
            save_module(self.folder.model(party), encoder)
        if self.hosts[self.algorithm.head_at(self.setup)] == self.name:
            save_module(self.folder.model(SERVER), self.setup.head)
        self._trained().save(self.folder)

    def _trained(self) -> Trained:
        """How new rows are scaled, and whose records have which index; over a network IDs are text."""
        last = max(link.number for link in self.mesh.links.values())
        trained = Trained.of(self.data, messages=last, time=self.clock.now())
        helper = self.data.labels_absent and set(self.data.absent) == set(self.data.parties)
        trained.numbers = {} if helper else {str(each): n for each, n in trained.numbers.items()}
        return trained

    def close(self) -> None:
        """Closes ledger and view."""
        self.observatory.close()

    def line(self, epoch: int) -> dict[str, Any]:
        """The label holder's line of metrics for an epoch."""
        server, mu = self.server, self.spent()
        if server is None:
            raise RunError("only the label holder measures")
        return {
            "epoch": epoch,
            "time": self.clock.now(),
            "processed": server.processed,
            "loss": server.loss,
            "test": dict(server.test),
            "mu": {self.name: mu if math.isfinite(mu) else None} if mu else {},
            "messages": self.mesh.messages,
            "bytes": self.mesh.bytes,
            **server.figures(),
        }
