"""Flex-VFL: rounds with a timeout, in which each party takes as many local steps as it can (Alg. 1 and 2).

Castiglia, Wang, Patterson: Flexible Vertical Federated Learning with Heterogeneous Parties, 2023.

At the start of a round every party uploads its embeddings of the round's batch, and the server hands all of
them, with its own model, to everybody (with sum fusion: their sum). Server and parties then train on that
snapshot until the timeout. A round takes twice the latency (the paper's t_comm) plus the timeout.

Each party releases its embeddings of a batch once per round, however many steps follow, but to **all** other
organisations. With private labels only the server sees them: it answers with the gradient, which depends on
the others' embeddings too, and the party's local steps reuse that gradient (Liu et al., FedBCD).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from securevfl.algorithms.base import ONE_ORDER, SERVER, Algorithm, Role, Setup
from securevfl.algorithms.channels import SUMS
from securevfl.algorithms.flex_clock import MOST_STEPS, capacity
from securevfl.algorithms.flex_party import FlexParty
from securevfl.algorithms.flex_server import FlexServer
from securevfl.algorithms.local_steps import LOCAL_OPTIMISERS
from securevfl.algorithms.pace import fastest_step, known_steps
from securevfl.algorithms.sharing import check_sums
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.settings.plan import Plan


class Flex(Algorithm):
    """As many local steps as fit the timeout."""

    name = "flex"
    summary = "each round as many local steps as fit the timeout at each party's speed; shares labels"
    protocols = SUMS
    optimisers = LOCAL_OPTIMISERS
    adaptive = False
    waits_for_timeout = True
    counts_steps = True

    def needs_everybody(self, plan: Plan) -> str:
        """Rounds are of all parties."""
        return ONE_ORDER

    def check(self, plan: Plan, data: VerticalData) -> None:
        """Secure sums must be possible, and are not kept from round to round; a step must fit the timeout."""
        if plan.protocol != "plain" and plan.encoder_training == "none":
            raise PlanError(
                f"{self.name} sums the same frozen embeddings anew in every pass; "
                "use protocol 'plain' or algorithm 'vafl', which release each record once"
            )
        check_sums(plan, data)
        if self.counts_steps:
            _check_timeout(plan, known_steps(plan, data.parties))

    def steps(self, capacities: Mapping[str, int]) -> int | None:
        """How many steps everybody takes, given how many would fit; None leaves it to each of them."""
        return None

    def answers_with_gradients(self, plan: Plan) -> bool:
        """Only where the labels stay with the server."""
        return plan.settings.private_labels and plan.encoder_training != "none"

    def role(self, setup: Setup, address: str) -> Role:
        """The server, or a party."""
        if address != SERVER:
            return FlexParty(setup, address, waits_for_timeout=self.waits_for_timeout)
        return FlexServer(
            setup, steps=self.steps, adaptive=self.adaptive, waits_for_timeout=self.waits_for_timeout
        )

    def updates(self, plan: Plan, data: VerticalData) -> float:
        """Every local step is an update of all records of the batch."""
        most = max(1, math.floor(plan.settings.timeout / fastest_step(plan, data.parties) + 1e-9))
        return float(plan.epochs * most)


def _check_timeout(plan: Plan, steps: Mapping[str, tuple[float, ...]]) -> None:
    """Raises `PlanError` if the plan says already that no step fits the timeout, or any number of them."""
    if plan.simulation.delays == "poisson":
        raise PlanError(
            "delays 'poisson' has steps that take no time, of which any number would fit the timeout; "
            "use 'constant', 'exponential' or 'trace'"
        )
    for name, durations in steps.items():
        shortest, longest = min(durations, default=math.inf), max(durations, default=0.0)
        # A trace may have rounds in which a party is too busy; it takes its one step late then.
        if plan.simulation.delays != "trace" and longest > plan.settings.timeout * (1 + 1e-9):
            raise PlanError(
                f"timeout {plan.settings.timeout:g} is too short for one local step of {name}, which takes "
                f"{longest:g}; set timeout to at least that or raise its speed"
            )
        if plan.settings.timeout > shortest * MOST_STEPS:
            raise PlanError(
                f"timeout {plan.settings.timeout:g} has room for more than {MOST_STEPS} local steps of "
                f"{name}, which takes {shortest:g} for one; lower timeout"
            )


class FlexAdaptive(Flex):
    """Learning rates follow each party's number of steps and optimiser."""

    name = "flex-adaptive"
    summary = "flex with rates A / (steps * largest weight) from the round before; shares labels"
    adaptive = True


class SyncMin(Flex):
    """Everybody takes as many steps as the slowest can."""

    name = "sync-min"
    summary = "baseline of flex: all take the number of steps that the slowest manages; shares labels"
    waits_for_timeout = False

    def steps(self, capacities: Mapping[str, int]) -> int | None:
        """The slowest one's number."""
        return min(capacities.values())


class SyncMax(Flex):
    """Everybody takes as many steps as the fastest can, however long that lasts."""

    name = "sync-max"
    summary = "baseline of flex: all take the number of steps that the fastest manages; shares labels"
    waits_for_timeout = False

    def steps(self, capacities: Mapping[str, int]) -> int | None:
        """The fastest one's number."""
        return max(capacities.values())

    def updates(self, plan: Plan, data: VerticalData) -> float:
        """The fastest one may be the server."""
        server = 1.0 / float(plan.simulation.speeds.get(SERVER, 1.0))
        return max(super().updates(plan, data), float(plan.epochs * capacity(plan.settings.timeout, server)))


class PBCD(Flex):
    """Parallel block coordinate descent: one step per round."""

    name = "p-bcd"
    summary = "baseline of flex: one local step per round; shares labels"
    waits_for_timeout = False
    counts_steps = False

    def steps(self, capacities: Mapping[str, int]) -> int | None:
        """One."""
        return 1

    def updates(self, plan: Plan, data: VerticalData) -> float:
        """One per round."""
        return float(plan.epochs)
