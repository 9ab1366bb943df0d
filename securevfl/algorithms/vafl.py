"""VAFL: asynchronous (Alg. 1), t-synchronous (Alg. 2) and synchronous block-wise training.

Chen, Jin, Sun, Yin: VAFL: a Method of Vertical Asynchronous Federated Learning, 2020.

The server keeps the latest embedding of each record and party. A party that becomes active uploads the
embeddings of a batch, the server updates its model with what it has and answers with the gradient, and the
party updates its encoder. Before the first epoch every party uploads every training record once, so that the
server never works with a made-up embedding; those releases count like all others.
"""

from __future__ import annotations

from securevfl.algorithms.base import Algorithm, Role, ServerRole, Setup
from securevfl.algorithms.pace import step_shares
from securevfl.algorithms.vafl_party import VAFLParty
from securevfl.algorithms.vafl_server import VAFLServer
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.plan import Plan


class VAFL(Algorithm):
    """Asynchronous VAFL."""

    name = "vafl"
    summary = "asynchronous: the server steps on every upload, with the latest embeddings of the others"
    shared_schedule = False
    initial_upload = True

    def wait_for(self, plan: Plan, parties: int) -> int:
        """How many uploads one iteration takes."""
        return 1

    def roles(self, setup: Setup) -> tuple[ServerRole, list[Role]]:
        """The server role and one role per party."""
        count = len(setup.data.parties)
        server = VAFLServer(
            setup, wait_for=self.wait_for(setup.plan, count), shared_schedule=self.shared_schedule
        )
        parties: list[Role] = [
            VAFLParty(setup, party, shared_schedule=self.shared_schedule) for party in setup.data.parties
        ]
        return server, parties

    def passes(self, plan: Plan, data: VerticalData) -> float:
        """The fastest party's share of all steps; random delays get a quarter on top."""
        if self.shared_schedule:
            return float(plan.epochs)
        sending = [p for p in data.parties if plan.label_holder == "server" or p != data.label_holder]
        shares = step_shares(plan, data.parties)
        return plan.epochs * max((shares[p] for p in sending), default=0.0) * len(data.parties)


class VAFLTSync(VAFL):
    """The t-synchronous variant."""

    name = "vafl-tsync"
    summary = "the server waits for uploads of t different parties (plan field wait_for)"

    def check(self, plan: Plan, data: VerticalData) -> None:
        """T must lie between 1 and the number of parties."""
        if not 1 <= plan.wait_for <= len(data.parties):
            raise PlanError(
                f"vafl-tsync needs wait_for between 1 and {len(data.parties)}, not {plan.wait_for}"
            )

    def wait_for(self, plan: Plan, parties: int) -> int:
        """The plan's t."""
        return plan.wait_for


class VAFLSync(VAFL):
    """Synchronous block-wise training: all parties work on the same batch."""

    name = "vafl-sync"
    summary = "synchronous baseline: all parties upload the same batch, one joint step"
    shared_schedule = True

    def wait_for(self, plan: Plan, parties: int) -> int:
        """All of them."""
        return parties
