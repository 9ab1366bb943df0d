"""An organisation's seat in a prediction: the trained models, and the gate and ledger that go on counting."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from securevfl.algorithms import SERVER, Setup, find_algorithm
from securevfl.data import VerticalData
from securevfl.errors import RunError
from securevfl.federation.engine import first_cause, run_roles
from securevfl.federation.folder import RunFolder
from securevfl.federation.prediction import Floats, in_label_units, predicting
from securevfl.federation.trained import Trained
from securevfl.models import load_module
from securevfl.network.mesh import Mesh
from securevfl.network.own_encoder import Builder
from securevfl.network.seat import Seat
from securevfl.privacy.rows import Rows
from securevfl.settings.plan import Plan

PART = "predict"


class PredictingSeat(Seat):
    """One organisation's part of a prediction.

    Args:
        name: The organisation.
        plan: The resolved plan of the training.
        rows: Its share of the new records, scaled as in training, as the training part.
        numbers: Record index of each new record; a helper, which releases nothing, need not know them.
        trained: What it keeps of the training; message numbers and time go on from there.
        folder: Where its files are.
        mesh: Its connections.
        agreement: Digest of what all organisations agreed on.
        builder: Makes its own encoder, where it does not use the plan's.
    """

    def __init__(
        self,
        name: str,
        *,
        plan: Plan,
        rows: VerticalData,
        numbers: Rows,
        trained: Trained,
        folder: RunFolder,
        mesh: Mesh,
        agreement: str,
        builder: Builder | None = None,
    ) -> None:
        self.trained = trained
        super().__init__(
            name,
            plan=plan,
            data=rows,
            folder=folder,
            mesh=mesh,
            agreement=agreement,
            builder=builder,
            algorithm=predicting(plan, numbers, told_apart=True),
            records=trained.records,
        )
        self.clock.set(trained.time)
        for link in mesh.links.values():
            link.number = max(link.number, trained.messages)

    def _build(self) -> Setup:
        """The setup with the trained models.

        Where a party has trained the head, as FDML's first worker does, it is part of what that party
        releases, and the label holder's own head stays at nothing.
        """
        setup = super()._build()
        encoders: dict[str, nn.Module] = dict(setup.encoders)
        for party, encoder in encoders.items():
            load_module(self.folder.model(party), encoder)
        home = find_algorithm(self.plan.algorithm).head_at(setup)
        if self.hosts[home] == self.name:
            load_module(self.folder.model(SERVER), setup.head)
        if self.hosts[home] == self.name != self.hosts[SERVER]:
            encoders[home] = nn.Sequential(encoders[home], setup.head)
        return replace(setup, encoders=encoders)

    async def run(self, part: str) -> None:
        """Runs the prediction, the only part there is."""
        try:
            await run_roles(self.roles.values(), "evaluate")
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    def scores(self) -> Floats:
        """The label holder's scores of the new records, in the units of the labels."""
        if self.server is None:
            raise RunError("only the label holder obtains scores")
        return in_label_units(self.data, self.server.predictions.detach().cpu().double().numpy())

    def finish(self) -> None:
        """Keeps receipts and views, and from where the next prediction goes on."""
        self.observatory.save(self.folder)
        self.trained.messages = max(link.number for link in self.mesh.links.values())
        self.trained.time = self.clock.now()
        self.trained.save_records(self.folder)
