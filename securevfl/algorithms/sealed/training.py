"""Sealed training: nothing per record is opened; each party gets only noisy batch gradients of its weights.

Parties hold features, one organisation holds the labels, a dealer without data deals correlated randomness.
Residuals stay secret-shared (see `securevfl.protocols.sealed`), so the noise competes with sums over whole
batches and a small epsilon leaves a useful model. What leaves a party besides noisy totals is masked.
"""

from __future__ import annotations

import math

import numpy as np

from securevfl.accountants.gdp import gdp_mu
from securevfl.algorithms.base import SERVER, Algorithm, Role, Setup
from securevfl.algorithms.sealed.adversary import MALICIOUS, check_slack, settled, settled_dealer
from securevfl.algorithms.sealed.card import (
    CARDS,
    HAIR,
    PROFILE,
    CardGeometry,
    calibrated,
    card_plan,
    choose,
    geometry_of,
)
from securevfl.algorithms.sealed.roles import DealerRole, PartyRole, SealedServer
from securevfl.algorithms.sealed.settings import DEALER, NOBODY, SealedGeometry, dealing_organisation
from securevfl.algorithms.sealed.stack import held_back
from securevfl.data import VerticalData
from securevfl.data.binning import card_columns
from securevfl.errors import PlanError
from securevfl.models.heads import SumHead
from securevfl.protocols.sealed.cipher import ENCRYPTION
from securevfl.protocols.sealed.kernel import TABLES, tables_digest
from securevfl.settings.plan import Plan

HOPELESS, NOISY = 1.0, 15.0
"""Signal below which a model is no better than a constant, and below which it differs from run to run: on
breast-cancer, wine and digits AUC is .05 to .8 below 1, .5 to .99 between, .94 and more above 28."""
HALF = 10.0
"""Signal at which half of what a linear model gains over a constant is left, on digits and wine."""
LITTLE = 0.9
"""Forecast below which a warning is given."""
WIDE = 62
"""Columns of a party above which the rate grows with them."""
ITERATIONS = ((80, 2000.0), (40, 500.0), (20, 0.0))
"""Iterations of a linear model, and the least mu N that they are worth."""


def signal(plan: Plan, data: VerticalData) -> float:
    """How large the data is against the noise: mu N / sqrt(columns x outputs). Public.

    Residuals of several classes are bounded together like two, where members follow the protocol.
    """
    columns = sum(len(mine) for mine in card_columns(data))
    outputs = data.outputs if plan.settings.adversary == MALICIOUS else min(data.outputs, 2)
    return gdp_mu(plan.epsilon, plan.delta) * data.n_train / math.sqrt(columns * outputs)


def forecast(plan: Plan, data: VerticalData) -> float:
    """The share that noise leaves of what the same model gains over a constant, by public facts alone."""
    return 1 / (1 + (HALF / signal(plan, data)) ** 2)


def _fitting(plan: Plan, data: VerticalData) -> Plan:
    """Iterations and rate that fit the data, where the plan leaves them open; public facts alone decide.

    Every iteration costs, so few are made where mu N is small. Wide rows of norm 1 have small entries, and
    their directions need larger steps. Regression's weights are small, its curvature is four times that of
    the logistic loss at most and has no bound from below.
    """
    usual = Plan(algorithm=plan.algorithm)
    if (plan.epochs, plan.learning_rate) != (usual.epochs, usual.learning_rate) or plan.learning_rates:
        return plan
    if plan.model != "linear" or plan.batch < data.n_train or plan.optimiser != usual.optimiser:
        return plan
    rate = 1.0 if data.task == "regression" else usual.learning_rate * max(1.0, max(data.widths) / WIDE)
    if not plan.epsilon:
        return plan.with_changes(learning_rate=rate)
    size = gdp_mu(plan.epsilon, plan.delta) * data.n_train
    epochs = next((count for count, least in ITERATIONS if size >= least), ITERATIONS[-1][0])
    return plan.with_changes(learning_rate=rate, epochs=epochs)


class Sealed(Algorithm):
    """Secret-shared residuals, noisy totals."""

    name = "sealed"
    summary = (
        "nothing per record is opened: noisy batch gradients from secret-shared residuals, with a dealer"
    )
    helpers = (DEALER,)

    def assistants(self, plan: Plan) -> dict[str, str]:
        """The dealer, if there is one."""
        return dealing_organisation(plan)

    def constants(self, plan: Plan, members: int) -> dict[str, str]:
        """Of two members without a dealer: the tables that bound residuals, and the encryption."""
        if plan.settings.dealer != NOBODY or members != 2:
            return {}
        return {TABLES: tables_digest(), "encryption": ENCRYPTION}

    def role(self, setup: Setup, address: str) -> Role:
        """The label holder, a party, or the dealer."""
        if type(setup.head) is not SumHead:
            raise PlanError("sealed training adds scores up; it has no place for a model of the label holder")
        settings = geometry_of(setup.plan, setup.data)
        if address == SERVER:
            return SealedServer(setup, settings)
        return DealerRole(setup, settings) if address == DEALER else PartyRole(setup, settings, address)

    def check(self, plan: Plan, data: VerticalData) -> None:
        """What sealed training cannot do is refused before anything starts."""
        members = len(data.parties) + (plan.label_holder == "server" or data.label_holder not in data.parties)
        wrong = {
            "sealed training needs at least 2 members": members < 2,
            f"collusion of {plan.collusion} among {members} members leaves no honest one": plan.collusion
            >= members,
            "early stopping looks at private data; set patience = 0": plan.patience > 0,
            "scaling fitted on private rows couples records; use 'public' or 'none'": "standard"
            in (plan.scaling, data.scaling),
            "hidden_noise has no place in sealed training": bool(plan.hidden_noise),
            "sealed training has one kind of model for all parties; leave encoders out": bool(plan.encoders),
            "sealed training has a loss of its own; leave loss and losses out": plan.loss != "auto"
            or bool(plan.losses),
            "encoders learn from noisy totals alone; leave encoder_training at 'raw'": plan.encoder_training
            != "raw",
            "regression needs a public range of the labels: write label_bounds = [LOW, HIGH] in data.toml "
            "or --set label_low=LOW --set label_high=HIGH": data.task == "regression"
            and plan.model != PROFILE
            and not plan.settings.label_high > plan.settings.label_low,
            f"label_low and label_high are for regression, and the task is {data.task}; leave them out": (
                data.task != "regression" and plan.settings.label_high > plan.settings.label_low
            ),
        }
        if plan.settings.profile_epsilon and plan.model not in ("auto", *CARDS):
            wrong[f"a profile is the beginning of a scorecard, not of model {plan.model!r}"] = True
        if plan.epsilon and signal(plan, data) < HOPELESS:
            wrong[
                "noise would drown the data and a constant would be as good: mu N / sqrt(columns x outputs) "
                f"= {signal(plan, data):.2g}, below {HOPELESS:g}; raise epsilon or bring more records"
            ] = True
        for reason, applies in wrong.items():
            if applies:
                raise PlanError(reason)

    def arrange(self, plan: Plan, data: VerticalData) -> VerticalData:
        """With a stack, the last tenth of the training records is held back.

        Raises:
            PlanError: There can be no stack.
        """
        if not plan.settings.stack:
            return data
        holds = plan.label_holder == "party" and data.label_holder in data.parties
        wrong = {
            f"it is for two classes, and the task is {data.task}": data.task != "binary",
            "the label holder has no features of its own": not holds,
            f"{data.n_train} training records leave too few to decide on": data.n_train < 200,
            "a profile has no scores": plan.model == "profile",
            "the profile that it starts from held nobody back": plan.settings.profile_epsilon > 0,
        }
        for reason, applies in wrong.items():
            if applies:
                raise PlanError(f"stack is not possible: {reason}; leave it at false")
        return held_back(data)

    def complete(self, plan: Plan, data: VerticalData) -> Plan:
        """Scores add up, so fusion and head are sums; rows keep their public scale where they have one."""
        if plan.model == "auto":
            plan = plan.with_changes(model=choose(plan, data)[0])
        dealer = settled_dealer(plan, data, apart=self.apart)[0]
        plan = plan.with_changes(settings={"dealer": dealer})
        plan = plan.with_changes(settings={"adversary": settled(plan, data, apart=self.apart)[0]})
        if plan.model in CARDS:
            return card_plan(plan, data)
        bounds = [table for table in data.bounds if table is not None]
        known = len(bounds) == len(data.parties) and not any(np.isnan(table).any() for table in bounds)
        scaling = plan.scaling
        if scaling == "auto" and not known and data.scaling == "none":
            raise PlanError(
                "sealed training scales columns by public bounds, and the data has none. "
                f"{data.bounds_to_add() or 'Give bounds'}; or set scaling = 'none' to clip the rows as they "
                "are, or model = 'scorecard', which needs none"
            )
        if scaling == "auto":
            small = known and all(np.abs(table).max(initial=0.0) <= 1 for table in bounds)
            scaling = "none" if small or not known else "public"
        return _fitting(plan, data).with_changes(
            batch=min(plan.batch, data.n_train),
            embedding=data.outputs,
            fusion="sum",
            head="sum",
            scaling=scaling,
            settings={} if known and plan.model == "linear" else {"centring": 0.0},
        )

    def notes(self, plan: Plan, data: VerticalData) -> tuple[str, ...]:
        """Which model and which adversary `auto` stands for, and why."""
        found = ["model {} ({})".format(*choose(plan, data))] if plan.model == "auto" else []
        chosen = plan.with_changes(model=choose(plan, data)[0]) if plan.model == "auto" else plan
        dealer, why = settled_dealer(chosen, data, apart=self.apart)
        if plan.settings.dealer == "auto" and self.apart:
            found.append(f"dealer {dealer} ({why})")
        chosen = chosen.with_changes(settings={"dealer": dealer})
        if plan.settings.adversary == "auto":
            found.append("adversary {} ({})".format(*settled(chosen, data, apart=self.apart)))
        if plan.epsilon and forecast(plan, data) < LITTLE:
            varies = ", in a model that differs much from run to run" if signal(plan, data) < NOISY else ""
            found.append(
                f"little data for this epsilon, expect about {forecast(plan, data):.0%} of what the model "
                f"gains over a constant without noise{varies}: mu N / sqrt(columns x outputs) = "
                f"{signal(plan, data):.2g}"
            )
        return tuple(found)

    def calibrate(self, plan: Plan, data: VerticalData) -> Plan:
        """The noise for the target epsilon after `epochs` iterations of each record."""
        if plan.model in CARDS:
            plan = calibrated(plan, data)
            CardGeometry(plan=plan, data=data).check()
            check_slack(plan, data)
            return plan
        settings = SealedGeometry(plan=plan, data=data)
        if plan.epsilon:
            mu = gdp_mu(plan.epsilon, plan.accounted_delta) * HAIR
            each = mu * ((1 - plan.settings.centring) / plan.epochs) ** 0.5
            budget = plan.budget_epsilon or plan.epsilon
            sigma = settings.shifts.diameter / each
            plan = plan.with_changes(sigma=sigma, epsilon=0.0, budget_epsilon=budget)
            settings = SealedGeometry(plan=plan, data=data)
        settings.protocol(
            (1,) * len(settings.members), (True,) * len(settings.members)
        )  # does it fit the ring?
        check_slack(plan, data)
        return plan
