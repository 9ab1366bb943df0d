"""What members may do: the adversary that a plan is made for, and what checks add to delta."""

from __future__ import annotations

import math

from securevfl.accountants.gdp import gdp_epsilon
from securevfl.accountants.sealed import checked_slack, flooding_slack
from securevfl.algorithms.sealed.card import CARDS, CardGeometry, geometry_of
from securevfl.algorithms.sealed.evaluation import Evaluation
from securevfl.algorithms.sealed.settings import DEALER, NOBODY, SealedGeometry
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.protocols.sealed.correlations import kernel_of
from securevfl.protocols.sealed.protocol import DEALT, ENCRYPTED, SealedProtocol
from securevfl.settings.plan import Plan

MALICIOUS = "malicious"
SEMI_HONEST = "semi-honest"


def obstacle(plan: Plan, data: VerticalData) -> str:
    """Why members that cheat cannot be caught with this plan and model; empty where they can."""
    found = {
        "labels of a regression have no proof": data.task == "regression",
        f"rows of model {plan.model!r} change in every iteration and would need a proof each time": plan.model
        not in ("linear", *CARDS),
        "a card of several classes has rows of every round its own": plan.model in CARDS
        and data.task == "multiclass",
        f"proofs of rows take clips up to 64, not {plan.clip:g}": plan.clip > 64,
        "proofs of rows take up to 4,090 columns": plan.model == "linear" and max(data.widths) > 4090,
    }
    return next((reason for reason, applies in found.items() if applies), "")


def without_dealer(plan: Plan, data: VerticalData) -> str:
    """Why members cannot do without a dealer; empty where they can."""
    members = len(SealedGeometry(plan=plan, data=data).members)
    found = {
        "members that may cheat are caught with a dealer's help only": plan.settings.adversary == MALICIOUS,
        f"the task is {data.task}, and only two classes are offered": data.task != "binary",
        f"rows of model {plan.model!r} change in every iteration": plan.model not in ("linear", *CARDS),
        f"{members} members deal for each other only while no two of them collude (collusion 1)": members > 2
        and plan.collusion > 1,
    }
    return next((reason for reason, applies in found.items() if applies), "")


def settled_dealer(plan: Plan, data: VerticalData, *, apart: bool) -> tuple[str, str]:
    """Who deals, and why; see `settled`.

    Raises:
        PlanError: Somebody must deal, and nobody is named.
    """
    wanted = plan.settings.dealer
    if wanted not in ("auto", NOBODY):
        return wanted, "as the plan says"
    if wanted == "auto" and not apart:
        return DEALER, "simulated in this process"
    if reason := without_dealer(plan, data):
        raise PlanError(
            f"somebody must deal: {reason}; set dealer to the name of an organisation without data"
        )
    members = len(SealedGeometry(plan=plan, data=data).members)
    return NOBODY, "the two of them encrypt" if members == 2 else "members deal for each other"


def settled(plan: Plan, data: VerticalData, *, apart: bool) -> tuple[str, str]:
    """The adversary that a plan is made for, and why.

    Args:
        plan: Its model is chosen.
        data: The data; only public facts of it are read.
        apart: Whether organisations run in processes of their own.

    Raises:
        PlanError: The plan asks for what cannot be had.
    """
    wanted, reason = plan.settings.adversary, obstacle(plan, data)
    if wanted == MALICIOUS and reason:
        raise PlanError(f"adversary 'malicious' is not possible: {reason}; set adversary = 'semi-honest'")
    if wanted != "auto":
        return wanted, "as the plan says"
    if not apart:
        return SEMI_HONEST, "everybody is in one process"
    if plan.settings.dealer == NOBODY:
        return SEMI_HONEST, "there is no dealer"
    return (SEMI_HONEST, reason) if reason else (MALICIOUS, "rows and labels are proved")


def check_slack(plan: Plan, data: VerticalData) -> None:
    """Refuses a plan whose checks, or whose flooding, would take more of delta than is set aside for them.

    Raises:
        PlanError: They would.
    """
    if not plan.sigma:
        return
    if geometry_of(plan, data).dealing == ENCRYPTED:
        _check_flooding(plan, data)
    if plan.settings.adversary != MALICIOUS:
        return
    needed = slack(plan, data)
    if needed > plan.delta / 10:
        raise PlanError(
            f"masks and proofs against members that cheat add {needed:.2g} to delta, more than a tenth of "
            f"{plan.delta:g}; raise delta, take fewer epochs, or set adversary = 'semi-honest'"
        )


def _check_flooding(plan: Plan, data: VerticalData) -> None:
    needed, aside = flooding(plan, data), plan.delta - plan.accounted_delta
    if needed > aside:
        raise PlanError(
            f"answers under encryption would add {needed:.2g} to delta, more than the {aside:.2g} set aside; "
            "raise delta, lower epsilon, or name a dealer"
        )


def flooding(plan: Plan, data: VerticalData) -> float:
    """What the flooding of a calibrated plan adds to delta: of training, or of all evaluations."""
    protocols, epsilon = _openings(plan, data)
    trained = math.fsum(_flooding_of(protocol, count, epsilon) for protocol, count in protocols)
    evaluation = Evaluation(settings=geometry_of(plan, data))
    if not evaluation.offered:
        return trained
    return max(trained, _flooding_of(evaluation.protocol, plan.evaluations, epsilon))


def _flooding_of(protocol: SealedProtocol, rounds: int, epsilon: float) -> float:
    terms = () if protocol.series is None else kernel_of(protocol).terms
    return flooding_slack(
        epsilon=epsilon,
        rounds=rounds,
        records=protocol.records,
        widths=protocol.widths,
        outputs=protocol.outputs,
        products=max(map(len, terms), default=0),
    )


def _openings(plan: Plan, data: VerticalData) -> tuple[list[tuple[SealedProtocol, int]], float]:
    """The protocols of a calibrated plan with how many rounds each has, and the epsilon it promises."""
    if plan.model in CARDS:
        geometry = CardGeometry(plan=plan, data=data)
        protocols = [(geometry.protocol_of(opening), 1) for opening in geometry.openings]
        mu = geometry.mu
    else:
        linear = SealedGeometry(plan=plan, data=data)
        biased = [w + (m == linear.label_holder) for m, w in enumerate((*data.widths, 0))]
        widths = tuple(biased[: len(linear.members)])
        rounds = plan.epochs * (1 if linear.dealing == DEALT else linear.iterations)
        protocols = [(linear.protocol(widths, (True,) * len(widths)), rounds)]
        mu = linear.shifts.diameter / plan.sigma * plan.epochs**0.5
    return protocols, plan.budget_epsilon or gdp_epsilon(mu, plan.accounted_delta)


def slack(plan: Plan, data: VerticalData) -> float:
    """Delta' of a calibrated plan whose members may cheat."""
    protocols, epsilon = _openings(plan, data)
    trained = sum(_slack_of(protocol, count, epsilon) for protocol, count in protocols)
    evaluation = Evaluation(settings=geometry_of(plan, data))
    if not evaluation.offered:
        return trained
    # Test records are other people; every evaluation has a session of its own.
    return max(trained, plan.evaluations * _slack_of(evaluation.protocol, 1, epsilon))


def _slack_of(protocol: SealedProtocol, iterations: int, epsilon: float) -> float:
    claims = protocol.claims
    return checked_slack(
        epsilon=epsilon,
        iterations=iterations,
        outputs=protocol.outputs,
        residual_bound=protocol.residual_bound,
        blind_bits=protocol.blind_bits,
        bounds=[1 if claim.groups else claim.bound for claim in claims],
        columns=[claim.columns for claim in claims],
    )
