"""The canary audit of trained encoders with whole runs of `train`: slow, nothing simulated.

Each run writes its ledger and views to a folder of its own; the server's view is read back like any attack
would. The rule is fitted on the stacked simulation beforehand, so that every run counts as a trial.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from securevfl.accountants import mu_of
from securevfl.attacks.canary import CanaryResult
from securevfl.attacks.canary.results import CanaryGuesses, LinearRule, conclude, gate_of
from securevfl.attacks.canary.trained import Scenario, summarise, transcript
from securevfl.data import VerticalData
from securevfl.errors import AttackError
from securevfl.federation.run import train
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View
from securevfl.settings.plan import Plan

Floats = NDArray[np.float64]

SERVER, PARTY = "p0", "p1"


def scenario_plan(plan: Plan, scenario: Scenario) -> Plan:
    """The plan of one run of the scenario, with the protection of `plan`."""
    return plan.with_changes(
        algorithm="vafl",
        protocol="plain",
        model="linear",
        embedding=1,
        fusion="sum",
        head="sum",
        epochs=scenario.releases - 1,
        batch=scenario.batch,
        learning_rate=scenario.rate,
        server_learning_rate=1e-12,  # the server's only weight, a bias, stays where it is
        l2=0.0,
        scaling="none",
        seed=scenario.seed,
        budget_epsilon=0.0,
        record_views=True,
        optimiser="sgd",
    )


def run_once(plan: Plan, scenario: Scenario, coin: bool, folder: Path) -> Floats:
    """Trains once and returns the features of the server's view, as the simulation gives them."""
    features = scenario.features(np.array([coin]))
    blocks = [np.zeros((scenario.records, 1), np.float32), features]
    test = ([np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)], np.array([0, 1]))
    data = VerticalData.from_arrays(blocks, scenario.labels().astype(int), test=test)
    encoder = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        encoder.weight.fill_(scenario.weight)
    train(data, plan, folder, encoders={PARTY: encoder})
    passes = _passes(View(folder / "views" / SERVER), scenario)
    return summarise(passes, scenario).ravel()


def _passes(view: View, scenario: Scenario) -> NDArray[np.float32]:
    """(releases, records, 1): what arrived for each record, in order."""
    table: NDArray[np.float32] = np.zeros((scenario.releases, scenario.records, 1), np.float32)
    arrived = np.zeros(scenario.records, np.int64)
    asked = {seen.number: seen.fields["rows"] for seen in view.messages("embed", sent=True)}
    for seen in view.messages("embedding", sender=PARTY, sent=False):
        rows = np.asarray(seen.fields["rows"] if "rows" in seen.fields else asked[seen.reply_to or 0])
        known = rows < scenario.records
        rows, values = rows[known], seen.fields["values"][known]
        if (arrived[rows] >= scenario.releases).any():
            raise AttackError(f"a record arrived more than {scenario.releases} times")
        table[arrived[rows], rows] = values
        arrived[rows] += 1
    if (arrived != scenario.releases).any():
        raise AttackError(f"a record arrived {arrived.min()} times; the scenario has {scenario.releases}")
    return table


def retrained_canaries(
    plan: Plan,
    scenario: Scenario,
    *,
    runs: int,
    held_out: int = 2000,
    delta: float = 1e-5,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> CanaryResult:
    """Repeats real training runs with a coin each and guesses every coin.

    Args:
        plan: Its protection and training are audited.
        scenario: The run to repeat.
        runs: Training runs.
        held_out: Simulated runs that the rule is fitted on.
        delta: The delta of the epsilons.
        seed: Seed of the coins.
        progress: Called with the share done.
    """
    rng = np.random.default_rng(seed)
    simulated = rng.integers(0, 2, held_out).astype(np.bool_)
    gate = gate_of(plan)(held_out * scenario.records)
    rule = LinearRule.fitted(transcript(gate, scenario, simulated, plan.encoder_training), simulated)
    coins = rng.integers(0, 2, runs).astype(np.bool_)
    single = scenario_plan(plan, scenario)
    found = []
    with tempfile.TemporaryDirectory(prefix="canary-") as name:
        for index, coin in enumerate(coins):
            found.append(run_once(single, scenario, bool(coin), Path(name) / f"run{index}"))
            progress((index + 1) / runs)
        ledger = [r for r in read_records(Path(name) / "run0") if r.owner == PARTY]
    return conclude(
        CanaryGuesses(rule(np.stack(found)), coins, rule.origin),
        mode=plan.mode,
        accounting=plan.mode,
        claims={"per-record": mu_of(ledger, "dp-encoder"), plan.mode: mu_of(ledger, plan.mode)},
        delta=delta,
    )
