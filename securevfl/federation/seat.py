"""One organisation of a simulation, in whatever process: its block, its gate and ledger, its roles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from securevfl.algorithms import SERVER, Setup, find_algorithm
from securevfl.data import VerticalData
from securevfl.federation.engine import first_cause, run_roles
from securevfl.federation.folder import RunFolder
from securevfl.federation.organisations import Observatory, build_organisation, set_budget
from securevfl.federation.seating import hosts_of, label_holder_of, seat_encoder, seat_head
from securevfl.federation.share import Share, unpack_share
from securevfl.federation.stepped import Step, SteppedNetwork, SteppedPhase
from securevfl.federation.virtual import VirtualClock
from securevfl.models import pick_device, save_module
from securevfl.settings.plan import Plan


class Seat:
    """An organisation that is stepped from outside.

    Args:
        name: The organisation.
        plan: The resolved plan.
        share: What it has of the data.
        folder: The run's folder, which all processes see.
    """

    def __init__(self, name: str, plan: Plan, share: Share, folder: Path) -> None:
        self.name, self.plan, self.folder = name, plan, RunFolder(folder)
        data = unpack_share(share)
        self.algorithm = find_algorithm(plan.algorithm)
        hosts = hosts_of(self.algorithm, data, label_holder_of(plan, data))
        self.organisation = build_organisation(
            name,
            plan,
            records=data.n_train + data.n_test,
            test_records=data.n_test,
            holds_labels=False,
            folder=self.folder,
        )
        self.observatory = Observatory([self.organisation], hosts)
        self.network = SteppedNetwork(
            name,
            hosts,
            latency=plan.simulation.latency,
            codec=plan.simulation.wire,
            observe=self.observatory.observe,
        )
        self._phase: SteppedPhase | None = None
        try:
            self.setup = self._build(data, hosts)
            self.roles = [self.algorithm.role(self.setup, address) for address in self.network.links]
        except BaseException:
            self.observatory.close()
            raise

    def _build(self, data: VerticalData, hosts: dict[str, str]) -> Setup:
        plan, device, gate = self.plan, pick_device(self.plan.device), self.organisation.gate
        mine = [party for party in data.parties if hosts[party] == self.name]
        return Setup(
            plan=plan,
            data=data,
            label_holder=label_holder_of(plan, data),
            hosts=hosts,
            encoders={party: seat_encoder(plan, data, party, gate=gate).to(device) for party in mine},
            head=seat_head(plan, data).to(device),
            gates={self.name: gate},
            links=self.network.links,
            clock=VirtualClock(),
            device=device,
            report=lambda processed, loss: None,
        )

    # -- phases ---------------------------------------------------------------------------------------------

    def begin(self, part: str, start: float) -> None:
        """Begins a phase; nothing runs before the first step."""
        for link in self.network.links.values():
            link.phase = part
        self._phase = SteppedPhase(run_roles(self.roles, part), self.network, start=start)

    def step(self, now: float, arrived: Sequence[bytes]) -> tuple[Step, float, dict[str, int]]:
        """One step of the phase; what it did, the mu spent so far, and the links' running numbers."""
        if self._phase is None:
            raise RuntimeError(f"{self.name} is stepped outside a phase")
        try:
            step = self._phase.step(now, arrived)
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        numbers = {address: link.number for address, link in self.network.links.items()}
        return step, self.organisation.gate.budget.spent_mu, numbers

    def end(self) -> None:
        """Ends the phase, finished or not."""
        if self._phase is not None:
            self._phase.close()
            self._phase = None
        self.network.forget_undelivered()

    def explain(self) -> str:
        """Who waits here for what."""
        return self.network.explain()

    # -- between phases -------------------------------------------------------------------------------------

    def open_reserve(self) -> None:
        """Frees the budget that was held back for the final evaluation."""
        set_budget(self.organisation.gate, self.plan)

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here; writes receipts and views too."""
        self.observatory.save(self.folder)
        return {
            "parties": {role.address: role.state() for role in self.roles},
            "gate": self.organisation.gate.state(),
        }

    def load(self, parties: dict[str, Any], gate: Any, numbers: dict[str, int]) -> None:
        """Takes up a saved state."""
        for role in self.roles:
            role.load(parties[role.address])
        for address, link in self.network.links.items():
            link.number = int(numbers[address])
        self.organisation.gate.load(gate)

    def finish(self) -> None:
        """Writes the models that belong here, receipts and views."""
        self.observatory.save(self.folder)
        for party, encoder in self.setup.encoders.items():
            save_module(self.folder.model(party), encoder)
        if self.setup.hosts[self.algorithm.head_at(self.setup)] == self.name:
            save_module(self.folder.model(SERVER), self.setup.head)

    def close(self) -> None:
        """Closes ledger and view."""
        self.end()
        self.observatory.close()
