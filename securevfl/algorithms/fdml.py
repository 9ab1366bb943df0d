"""FDML: workers push local predictions, pull their sum, and compute their gradients at home (Alg. 1).

Hu, Niu, Yang, Zhou: FDML: A Collaborative Machine Learning Framework for Distributed Features, KDD 2019.

The model is a sum of local predictions, one logit (or value) per output. All workers hold the labels and
visit the records in the same order. The server keeps the latest prediction of each record and worker and
answers a pull with their sum, but not before the puller is at most `staleness` iterations ahead of the
slowest worker.

Two things are settled here that the paper leaves open. A prediction that was never pushed counts as 0, the
prediction of a worker without opinion; later, a worker that runs ahead uses predictions from the last visit
of the same record, one pass ago. And the bias of the sum belongs to the first worker's local model.

On a secure sum the label holder obtains each iteration's sum, nobody's prediction, and hands it to the
workers. A sum is complete only when everybody has contributed, so there is no staleness then. On encrypted
sums the server obtains no sum either: it adds ciphertexts for a worker that has the key (`fdml_encrypted`).
"""

from __future__ import annotations

from securevfl.algorithms.base import ONE_ORDER, SERVER, Algorithm, Role, Setup
from securevfl.algorithms.channels import ENCRYPTED, SUMS
from securevfl.algorithms.fdml_encrypted import check_encrypted, encrypted_role
from securevfl.algorithms.fdml_server import FDMLServer
from securevfl.algorithms.fdml_worker import FDMLWorker
from securevfl.algorithms.sharing import check_sums
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.models import SumHead
from securevfl.settings.plan import Plan


class FDML(Algorithm):
    """Stale synchronous training on the sum of local predictions."""

    name = "fdml"
    summary = (
        "workers push predictions and pull their sum, at most `staleness` iterations apart; shares labels"
    )

    protocols = SUMS

    def head_at(self, setup: Setup) -> str:
        return setup.data.parties[0]  # the bias is part of the first worker's prediction

    def check(self, plan: Plan, data: VerticalData) -> None:
        """The model is a plain sum of predictions, trained by the workers."""
        if plan.fusion == "concat" or plan.head not in ("auto", "sum"):
            raise PlanError(
                "fdml sums local predictions; leave fusion and head at 'auto' or set both to 'sum'"
            )
        if plan.embedding not in (0, data.outputs):
            raise PlanError(
                f"fdml's local predictions have {data.outputs} values, not {plan.embedding}; "
                "leave embedding at 0"
            )
        if plan.encoder_training == "none":
            raise PlanError("fdml trains local models only; with encoder_training 'none' nothing would learn")
        if plan.protocol != "plain" and plan.settings.staleness:
            raise PlanError(
                f"protocol {plan.protocol!r} has a sum only when every worker has contributed; "
                "set staleness to 0"
            )
        if plan.protocol in ENCRYPTED:
            check_encrypted(plan, data)
        else:
            check_sums(plan, data)

    def needs_everybody(self, plan: Plan) -> str:
        """Workers go through the records together."""
        return ONE_ORDER

    def complete(self, plan: Plan, data: VerticalData) -> Plan:
        """Sum fusion of one prediction per output."""
        return plan.with_changes(fusion="sum", head="sum", embedding=data.outputs)

    def role(self, setup: Setup, address: str) -> Role:
        """The server, or a party's worker."""
        if not isinstance(setup.head, SumHead):
            raise PlanError("fdml has no model on top of the sum; do not give a head")
        if setup.plan.protocol in ENCRYPTED:
            return encrypted_role(setup, address)
        return FDMLServer(setup) if address == SERVER else FDMLWorker(setup, address)
