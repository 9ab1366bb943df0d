"""AFSGD-VP and its SVRG and SAGA variants, with their synchronous counterparts.

Gu, Xu, Huo, Deng, Huang: Privacy-preserving asynchronous federated learning algorithms for vertically
partitioned data, 2020. Linear models only: logistic, softmax or ridge regression with an l2 regulariser. A
worker's step needs the sum of all workers' products for its batch, obtained on demand through Algorithm 1
(protocol ``plain-tree``), Algorithm 2 (``two-tree``) or any other sum.

All workers are active by default: each has the labels, as in the paper's experiments. With ``active`` in the
plan only the named ones have; the others receive derivatives of the loss, which tell the labels just as well.
"""

from __future__ import annotations

from typing import ClassVar

from securevfl.algorithms.afsgd_coordinator import AsyncCoordinator, SyncCoordinator
from securevfl.algorithms.afsgd_worker import AsyncWorker, LinearWorker
from securevfl.algorithms.base import SERVER, Algorithm, Role, Setup
from securevfl.algorithms.channels import SUMS, build_channel, check_channels
from securevfl.algorithms.estimators import ESTIMATORS
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.settings.plan import Plan


class AFSGD(Algorithm):
    """Asynchronous SGD (Algorithm 3)."""

    name = "afsgd"
    summary = "asynchronous SGD on linear models: every worker steps on its own demand-driven sums"
    protocols = SUMS
    optimisers = ("sgd",)
    estimator: ClassVar[str] = "sgd"
    synchronous: ClassVar[bool] = False

    def role(self, setup: Setup, address: str) -> Role:
        """The coordinator, or a party's worker."""
        active = setup.plan.settings.active or setup.data.parties
        passive = len(active) < len(setup.data.parties)
        channels = [build_channel(setup, SERVER, hands_on=self.synchronous or self.estimator != "sgd")]
        if not self.synchronous:
            channels += [build_channel(setup, party, hands_on=passive) for party in active]
        if address == SERVER:
            coordinator = SyncCoordinator if self.synchronous else AsyncCoordinator
            return coordinator(setup, channels=channels, active=active, estimator=self.estimator)
        worker = LinearWorker if self.synchronous else AsyncWorker
        return worker(setup, address, channels=channels, estimator=self.estimator, active=address in active)

    def check(self, plan: Plan, data: VerticalData) -> None:
        """The plan must describe a linear model whose label holder has features, and a sum that can run."""
        if plan.model != "linear" or plan.hidden_noise or plan.embedding not in (0, data.outputs):
            raise PlanError(f"{self.name} trains linear models; set model 'linear' and leave the embedding")
        if plan.fusion == "concat" or plan.head not in ("auto", "sum"):
            raise PlanError(f"{self.name} sums the parties' products; leave fusion and head on 'auto'")
        if plan.encoder_training != "raw":
            raise PlanError(f"{self.name} trains on raw records; encoder_training can only be 'raw'")
        if plan.decay != "none":
            raise PlanError(f"{self.name} has a constant learning rate; set decay 'none'")
        if plan.label_holder == "server" or data.label_holder not in data.parties:
            raise PlanError(f"{self.name} needs a label holder with features: active workers have both")
        unknown = set(plan.settings.active) - set(data.parties)
        if unknown:
            raise PlanError(f"active names {min(unknown)!r}, but the parties are {', '.join(data.parties)}")
        if plan.settings.active and data.label_holder not in plan.settings.active:
            raise PlanError(f"the label holder {data.label_holder} is always active; name it in active too")
        active = (
            [] if self.synchronous else [data.parties.index(p) for p in plan.settings.active or data.parties]
        )
        check_channels(plan, len(data.parties), (data.parties.index(data.label_holder), *active))

    def needs_everybody(self, plan: Plan) -> str:
        """Workers receive sums themselves, or step behind a barrier."""
        if self.synchronous:
            return "its workers step together, behind a barrier that waits for all of them"
        return "active workers receive sums of their own, and whoever receives cannot be missing"

    def complete(self, plan: Plan, data: VerticalData) -> Plan:
        """Products are summed whatever the protocol."""
        return plan.with_changes(fusion="sum", head="sum")

    def passes(self, plan: Plan, data: VerticalData) -> float:
        """Every step of any worker releases all workers' products; so does every record of a snapshot."""
        steps = plan.epochs * (1 if self.synchronous else len(data.parties))
        snapshots = {"never": 0, "once": 1, "repeated": -(-plan.epochs // plan.settings.snapshot_every)}
        return float(steps + snapshots[ESTIMATORS[self.estimator].snapshots])


class AFSVRG(AFSGD):
    """Asynchronous SVRG (Algorithm 4); an inner loop is as many epochs as the plan's ``snapshot_every``."""

    name = "afsvrg"
    summary = "asynchronous SVRG on linear models: a full gradient every few epochs (field snapshot_every)"
    estimator = "svrg"


class AFSAGA(AFSGD):
    """Asynchronous SAGA (Algorithm 5), with one number per record and output."""

    name = "afsaga"
    summary = "asynchronous SAGA on linear models: every record's last derivative is remembered"
    estimator = "saga"


class FSGD(AFSGD):
    """Synchronous SGD."""

    name = "fsgd"
    summary = "synchronous counterpart of afsgd: one batch for all workers, a barrier after each step"
    synchronous = True


class FSVRG(FSGD):
    """Synchronous SVRG."""

    name = "fsvrg"
    summary = "synchronous counterpart of afsvrg"
    estimator = "svrg"


class FSAGA(FSGD):
    """Synchronous SAGA."""

    name = "fsaga"
    summary = "synchronous counterpart of afsaga"
    estimator = "saga"
