"""VAFL: asynchronous (Alg. 1), t-synchronous (Alg. 2) and synchronous block-wise training.

Chen, Jin, Sun, Yin: VAFL: a Method of Vertical Asynchronous Federated Learning, 2020.

The server keeps the latest embedding of each record and party. A party that becomes active uploads the
embeddings of a batch, the server updates its model with what it has and answers with the gradient, and the
party updates its encoder. Before the first epoch every party uploads every training record once, so that the
server never works with a made-up embedding; those releases count like all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from securevfl.algorithms.base import ONE_ORDER, SERVER, Algorithm, Role, Setup
from securevfl.algorithms.channels import SUMS, check_channels
from securevfl.algorithms.local import Together
from securevfl.algorithms.lockstep import Lockstep
from securevfl.algorithms.pace import step_shares
from securevfl.algorithms.vafl_party import VAFLParty
from securevfl.algorithms.vafl_server import VAFLServer
from securevfl.algorithms.vafl_sums import SummingParty, SummingServer
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.settings.plan import Plan


class VAFL(Algorithm):
    """Asynchronous VAFL."""

    name = "vafl"
    summary = "asynchronous: the server steps on every upload, with the latest embeddings of the others"
    protocols = SUMS
    optimisers = ("sgd", "momentum", "adam", "malicious")
    shared_schedule = False
    initial_upload = True

    def wait_for(self, plan: Plan, parties: int) -> int:
        """How many uploads one iteration takes."""
        return 1

    def answers_with_gradients(self, plan: Plan) -> bool:
        """Unless encoders are frozen, every upload is answered with gradients."""
        return plan.encoder_training != "none"

    def role(self, setup: Setup, address: str) -> Role:
        """The server, or a party."""
        plain = setup.plan.protocol == "plain"
        if address != SERVER:
            party = VAFLParty if plain else SummingParty
            return party(setup, address, shared_schedule=self.shared_schedule)
        server = VAFLServer if plain else SummingServer
        wait_for = self.wait_for(setup.plan, len(setup.data.parties))
        return server(setup, wait_for=wait_for, shared_schedule=self.shared_schedule)

    def check(self, plan: Plan, data: VerticalData) -> None:
        """Secure sums are always fresh and must be possible with these parties."""
        if plan.protocol == "plain":
            return
        if plan.settings.delay_bound:
            raise PlanError("delay_bound has no meaning on secure sums: their embeddings are never stale")
        holder = data.label_holder if plan.label_holder == "party" else None
        receiver = data.parties.index(holder) if holder in data.parties else None
        check_channels(plan, len(data.parties), (receiver,))

    def tolerates_absence(self, plan: Plan) -> bool:
        """On the plain protocol the server has everybody's latest embeddings; with a threshold, sums go on.

        Where the age of embeddings is bounded it waits instead.
        """
        if plan.protocol != "plain":
            return bool(plan.threshold) and not self.needs_everybody(plan)
        return not self.shared_schedule and not plan.settings.delay_bound

    def needs_everybody(self, plan: Plan) -> str:
        """Frozen encoders and a schedule for all leave no room for steps without a party."""
        if self.shared_schedule:
            return ONE_ORDER
        if plan.encoder_training == "none":
            return "with frozen encoders each record is summed once, and its sum would stay without the party"
        return ""

    def passes(self, plan: Plan, data: VerticalData) -> float:
        """The fastest party's share of all steps; random delays get a quarter on top.

        On a secure sum every party's step releases all parties' embeddings.
        """
        if self.shared_schedule:
            return float(plan.epochs)
        if plan.protocol != "plain":
            return float(plan.epochs * len(data.parties))
        sending = [p for p in data.parties if plan.label_holder == "server" or p != data.label_holder]
        shares = step_shares(plan, data.parties)
        return plan.epochs * max((shares[p] for p in sending), default=0.0) * len(data.parties)


class VAFLTSync(VAFL):
    """The t-synchronous variant."""

    name = "vafl-tsync"
    summary = "the server waits for uploads of t different parties (plan field wait_for)"

    def check(self, plan: Plan, data: VerticalData) -> None:
        """T is at most the number of parties."""
        super().check(plan, data)
        if plan.settings.wait_for > len(data.parties):
            raise PlanError(
                f"vafl-tsync needs wait_for between 1 and {len(data.parties)}, or 0 for half of the parties, "
                f"not {plan.settings.wait_for}"
            )

    def complete(self, plan: Plan, data: VerticalData) -> Plan:
        """Waits for half of the parties, for two at least, where the plan does not say for how many."""
        parties = len(data.parties)
        wait_for = plan.settings.wait_for or min(parties, max(2, parties // 2))
        return plan.with_changes(settings={"wait_for": wait_for})

    def wait_for(self, plan: Plan, parties: int) -> int:
        """The plan's t."""
        return int(plan.settings.wait_for)


class VAFLSync(VAFL):
    """Synchronous block-wise training: all parties work on the same batch."""

    name = "vafl-sync"
    summary = "synchronous baseline: all parties upload the same batch, one joint step"
    shared_schedule = True

    def wait_for(self, plan: Plan, parties: int) -> int:
        """All of them."""
        return parties

    def combine(self, setup: Setup, parties: Sequence[Role]) -> None:
        """Parties with encoders of one shape are computed together."""
        models = [role.model for role in parties if isinstance(role, VAFLParty)]
        lockstep = Lockstep.of(models, setup.plan) if setup.plan.protocol == "plain" else None
        if lockstep is not None:
            for place, model in enumerate(models):
                model.together = Together(lockstep, place)
