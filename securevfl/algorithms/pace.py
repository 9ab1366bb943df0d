"""How fast parties are: the duration of their steps, and the share of the work that follows from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from securevfl.algorithms.base import SERVER, Setup
from securevfl.algorithms.delays import StepDelay, read_trace
from securevfl.models.seeds import numpy_generator
from securevfl.settings.plan import Plan


def build_delay(setup: Setup, party: str) -> StepDelay:
    """How long a party's steps take."""
    plan, parties = setup.plan, setup.data.parties
    index = parties.index(party)
    trace = (
        read_trace(Path(plan.simulation.delay_trace), parties)[party]
        if plan.simulation.delays == "trace"
        else ()
    )
    return StepDelay(
        plan.simulation.delays,
        party=index,
        parties=len(parties),
        speed=float(plan.simulation.speeds.get(party, 1.0)),
        generator=numpy_generator(plan.seed, "delays", index),
        trace=trace,
    )


def step_shares(plan: Plan, parties: tuple[str, ...]) -> dict[str, float]:
    """Each party's expected share of all steps, from the mean duration of its steps."""
    traces = (
        read_trace(Path(plan.simulation.delay_trace), parties) if plan.simulation.delays == "trace" else {}
    )
    rates = {}
    for index, party in enumerate(parties):
        mean = {
            "constant": 1.0,
            "poisson": (index + 1) / len(parties),
            "exponential": index + 1.0,
            "trace": float(np.mean(traces.get(party, (1.0,)))),
        }[plan.simulation.delays]
        rates[party] = 1.0 / max(
            mean / float(plan.simulation.speeds.get(party, 1.0)) + 2 * plan.simulation.latency, 1e-9
        )
    slack = 1.25 if plan.simulation.delays in ("poisson", "exponential") else 1.0
    return {party: min(1.0, slack * rate / sum(rates.values())) for party, rate in rates.items()}


def known_steps(plan: Plan, parties: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    """The durations of each party's steps, and of the server's, as far as the plan fixes them."""
    traces = (
        read_trace(Path(plan.simulation.delay_trace), parties) if plan.simulation.delays == "trace" else {}
    )
    known = (1.0,) if plan.simulation.delays == "constant" else ()
    steps = {party: traces.get(party, known) for party in parties} | {SERVER: (1.0,)}
    return {
        name: tuple(each / float(plan.simulation.speeds.get(name, 1.0)) for each in steps[name])
        for name in steps
    }


def fastest_step(plan: Plan, parties: tuple[str, ...]) -> float:
    """The shortest duration that a step is expected to have; random ones count with half their mean."""
    traces = (
        read_trace(Path(plan.simulation.delay_trace), parties) if plan.simulation.delays == "trace" else {}
    )
    durations = []
    for index, party in enumerate(parties):
        shortest = {
            "constant": 1.0,
            "poisson": (index + 1) / len(parties) / 2,
            "exponential": (index + 1.0) / 2,
            "trace": min((step for step in traces.get(party, ()) if step > 0), default=1.0),
        }[plan.simulation.delays]
        durations.append(shortest / float(plan.simulation.speeds.get(party, 1.0)))
    return min(durations)
