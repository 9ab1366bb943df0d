"""The canary audit: how well two worlds are distinguished, through the run's real gate.

In each trial a coin decides which of two records a party holds; the attacker sees what the gate lets out and
guesses the coin. The errors certify, with 95 % confidence, a lower bound of mu and of epsilon. A bound above
the promise refutes it; a bound below never proves it.

- The gate itself, in every mode: canaries with coins of their own in one run (`gate_canaries`). For frozen
  encoders that is the whole audit.
- Trained encoders: whole training runs per coin, side by side (`trained_canaries`), because there a record
  also shifts what is released for all others.
- Sealed training: whole runs too, with an observer that replays its victim's weights (`sealed_canaries`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from securevfl.algorithms.channels import build_sum, unknown_shares
from securevfl.attacks.canary.gate import ROWS, Door, gate_canaries, release_door, sum_door, update_door
from securevfl.attacks.canary.replay import sealed_canaries
from securevfl.attacks.canary.results import CanaryResult, gate_of
from securevfl.attacks.canary.trained import Scenario, trained_canaries
from securevfl.errors import AttackError, InputError
from securevfl.protocols.sums.noise import NoisySum
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import HIDING

__all__ = ["CanaryResult", "canary_audits"]

CANARIES = 100_000
WORLDS = 2_000


def canary_audits(
    plan: Plan,
    *,
    parties: int | Sequence[str] = 0,
    label_holder: str = "",
    records: int = 256,
    trials: int = 0,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda name, share: None,
) -> dict[str, CanaryResult]:
    """Audits the gate of a plan, and training with it where encoders are trained.

    Each result carries the claim that belongs to its own trials, which may release less than the run did;
    `violated` compares with that.

    Args:
        plan: The resolved plan of a run.
        parties: Names of the parties, or their number; 0 takes the plan's, or the fewest that its secure sum
            serves.
        label_holder: Of sealed training: who has the labels, the first party by default.
        records: Training records of the run; the audit of training uses at most 256.
        trials: Trials of each audit, some of them held out to fit the rule; 0 takes 100,000 canaries on each
            way out of the gate and 2,000 training runs, of sealed training up to 20,000; that is also the
            most.
        seed: Seed of coins and directions, never of noise.
        progress: Called with the audit's name and the share done.

    Returns:
        Under ``releases`` or ``sums`` what comes out for a record, under ``updates`` noisy gradients, under
        ``training`` whole runs; of sealed training ``party`` and ``label-holder`` by whose record the canary
        is, and ``statistics``. Only those that the plan has. All bounds hold at 95 % each.

    Raises:
        AttackError: The plan's mode promises nothing.
    """
    if plan.mode not in ("strict", "dp-encoder", "frozen", "sealed"):
        raise AttackError(f"mode {plan.mode!r} promises nothing; there is nothing to try")
    names = [f"p{i}" for i in range(parties)] if isinstance(parties, int) else list(parties)
    canaries, worlds = trials or CANARIES, min(trials or WORLDS, WORLDS)
    if plan.mode == "sealed":
        names = names or [f"p{i}" for i in range(plan.source.parties or 2)]
        return sealed_canaries(
            plan,
            parties=names,
            label_holder=label_holder or names[0],
            trials=trials,
            canaries=canaries,
            seed=seed,
            progress=progress,
        )
    return _gate_audits(
        plan, len(names), records=records, canaries=canaries, worlds=worlds, seed=seed, progress=progress
    )


def _gate_audits(
    plan: Plan,
    parties: int,
    *,
    records: int,
    canaries: int,
    worlds: int,
    seed: int,
    progress: Callable[[str, float], None],
) -> dict[str, CanaryResult]:
    """Every way out of the gate of a plan that is not sealed, and training with it."""
    width = plan.embedding or 1

    def gate_audit(name: str, door: Door, trials: int, columns: int) -> CanaryResult:
        return gate_canaries(
            door,
            trials=trials,
            width=columns,
            delta=plan.delta,
            seed=seed,
            progress=lambda share: progress(name, share),
        )

    make = gate_of(plan)
    found: dict[str, CanaryResult] = {}
    sums = _noisy_sum(plan, parties)
    if sums is None:
        found["releases"] = gate_audit("releases", release_door(make(ROWS * canaries)), canaries, width)
    else:
        found["sums"] = gate_audit("sums", sum_door(make, ROWS * canaries, sums), canaries, width)
    if plan.encoder_training == "dp":
        found["updates"] = gate_audit("updates", update_door(make(ROWS * canaries)), canaries, 1)
    if plan.encoder_training != "none" and sums is None:
        found["training"] = trained_canaries(
            make,
            Scenario.for_plan(plan, records),
            training=plan.encoder_training,
            worlds=worlds,
            delta=plan.delta,
            seed=seed,
            progress=lambda share: progress("training", share),
        )
    return found


def _noisy_sum(plan: Plan, parties: int) -> NoisySum | None:
    """The plan's secure sum with distributed noise; None where each party adds noise of its own."""
    if plan.protocol not in HIDING or not plan.sigma:
        return None
    workers = parties or plan.source.parties or max(plan.collusion + 2, plan.threshold)
    inner = build_sum(
        plan.protocol, workers=workers, receiver=0, collusion=plan.collusion, threshold=plan.threshold
    )
    try:
        return NoisySum(inner, sigma=plan.sigma, colluders=unknown_shares(plan, workers))
    except InputError:
        return None
