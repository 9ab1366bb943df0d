"""Canaries that do not touch the encoder: many independent coins in one run of a gate.

This is the whole audit of mode ``frozen``, and in every mode the audit of the gate itself, on each way out of
it: releases, noisy updates, shares of a secure sum. The attacker knows every other record, as differential
privacy grants it: beside each canary lies a companion whose vector is known, and before each release comes
one of known vectors only. Their noise is known to the attacker; if the canary's noise has anything to do with
it, the fitted rule uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from securevfl.attacks.canary.results import (
    CanaryGuesses,
    CanaryResult,
    LinearRule,
    MakeGate,
    claims_of,
    conclude,
)
from securevfl.errors import AttackError
from securevfl.privacy.gate import Gate
from securevfl.privacy.rows import Rows
from securevfl.protocols.sums.noise import NoisySum

Floats = NDArray[np.float64]

OBSERVER = "auditor"
OVERSIZE = 10.0


@dataclass(frozen=True, kw_only=True)
class Door:
    """One way out.

    Attributes:
        gate: The gate whose ledger says what is promised.
        reach: L2 norm of the vectors that canaries submit.
        let_out: From vectors and rows to what the attacker sees.
    """

    gate: Gate
    reach: float
    let_out: Callable[[Floats, Rows], Floats]


def release_door(gate: Gate) -> Door:
    """Releases of vectors. Canaries are ten clips long, so that a gate that forgets to clip is caught."""

    def let_out(vectors: Floats, rows: Rows) -> Floats:
        tensor = torch.from_numpy(vectors.astype(np.float32))
        released = gate.release(tensor, rows=rows, kind="canary", observers=(OBSERVER,))
        return np.asarray(released.values, np.float64)

    return Door(gate=gate, reach=OVERSIZE * gate.mechanism.clip, let_out=let_out)


def update_door(gate: Gate) -> Door:
    """Noisy sums of gradients. They are clipped before they reach the gate, so canaries have that length."""
    if gate.update is None:
        raise AttackError("the gate has no mechanism for updates")

    def let_out(vectors: Floats, rows: Rows) -> Floats:
        noisy = gate.noisy_update([torch.from_numpy(vectors)], rows=rows)
        return np.asarray(noisy[0].numpy(), np.float64)

    return Door(gate=gate, reach=gate.update.clip, let_out=let_out)


def sum_door(make_gate: MakeGate, records: int, noise: NoisySum) -> Door:
    """Totals of a secure sum with distributed noise.

    The attacker obtains the total and knows the shares of all colluders, so it is left with the canary's
    contribution and the noise of the other honest parties, whose values it knows to be zero.
    """
    gate, *others = [make_gate(records) for _ in range(noise.noise.honest)]

    def let_out(vectors: Floats, rows: Rows) -> Floats:
        total = _contribute(gate, vectors, rows, noise)
        for other in others:
            total = total + _contribute(other, np.zeros_like(vectors), rows, noise)
        return np.asarray(noise.fixed_point.decode(total), np.float64)

    return Door(gate=gate, reach=OVERSIZE * gate.mechanism.clip, let_out=let_out)


def _contribute(gate: Gate, vectors: Floats, rows: Rows, noise: NoisySum) -> NDArray[np.uint64]:
    tensor = torch.from_numpy(vectors.astype(np.float32))
    share = gate.contribute(tensor, rows=rows, kind="canary", observers=(OBSERVER,), noise=noise)
    return np.asarray(share.values)


ROWS = 4  # rows of the gate that one canary uses
CHUNK = 1 << 15
CALLS = 64  # a rule is fitted on at least so many calls of the gate, so that noise shared in a call shows
HELD_OUT = 1 << 16  # more held-out trials would not make the rule better


def gate_canaries(
    door: Door,
    *,
    trials: int,
    width: int = 1,
    repeats: int = 1,
    rule: str = "held-out",
    delta: float = 1e-5,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> CanaryResult:
    """Throws a coin per canary, lets all of them out, guesses every coin.

    Args:
        door: The way out to audit; its gate serves at least `ROWS` * trials records.
        trials: Canaries; with rule ``held-out`` some of them (half, at most 65,536) only fit the rule.
        width: Length of a vector.
        repeats: How often each canary is let out. A gate that releases once sends the same bytes again.
        rule: ``held-out``, or ``fixed`` for the plain likelihood ratio with the threshold at mu/2.
        delta: The delta of the epsilons.
        seed: Seed of coins and direction.
        progress: Called with the share done.
    """
    if rule not in ("fixed", "held-out"):
        raise AttackError(f"unknown rule {rule!r}; choose 'fixed' or 'held-out'")
    if trials < 8 or width < 1 or repeats < 1:
        raise AttackError(
            f"{trials} trials, width {width}, {repeats} repeats; at least 8, 1 and 1 are needed"
        )
    rng = np.random.default_rng(seed)
    direction = rng.normal(size=width)
    direction /= np.linalg.norm(direction)
    held_out = min(trials // 2, HELD_OUT) if rule == "held-out" else 0
    score = _rule(door, held_out, direction, repeats, rng)
    scores, worlds = [], []
    for features, coins in _trials(door, range(held_out, trials), CHUNK, direction, repeats, rng):
        scores.append(score(features))
        worlds.append(coins)
        progress(min(1.0, len(worlds) * CHUNK / (trials - held_out)))
    guesses = CanaryGuesses(np.concatenate(scores), np.concatenate(worlds), score.origin)
    claims = claims_of(door.gate)
    return conclude(guesses, mode=door.gate.mode, accounting="per-record", claims=claims, delta=delta)


def _rule(door: Door, held_out: int, direction: Floats, repeats: int, rng: np.random.Generator) -> LinearRule:
    """The rule fitted on held-out trials, or without any the likelihood ratio of honest noise."""
    if not held_out:
        return LinearRule.fixed(np.concatenate([direction, np.zeros(2 * len(direction))]), 0.0)
    chunk = min(CHUNK, -(-held_out // CALLS))
    found = list(_trials(door, range(held_out), chunk, direction, repeats, rng))
    return LinearRule.fitted(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _trials(
    door: Door, numbers: range, chunk: int, direction: Floats, repeats: int, rng: np.random.Generator
) -> Iterator[tuple[Floats, NDArray[np.bool_]]]:
    """Yields features and coins of the canaries of these numbers, a chunk at a time."""
    for start in range(numbers.start, numbers.stop, chunk):
        size = min(chunk, numbers.stop - start)
        coins = rng.integers(0, 2, size).astype(np.bool_)
        rows = ROWS * start + np.arange(ROWS * size, dtype=np.int64)
        vectors = np.zeros((2 * size, len(direction)))
        known = _mean(door, vectors, rows[: 2 * size], repeats)
        vectors[0::2] = np.where(coins, door.reach, -door.reach)[:, None] * direction
        seen = _mean(door, vectors, rows[2 * size :], repeats)
        # What the attacker has: the canary, its companion's noise, the noise let out before in its place.
        yield np.concatenate([seen[0::2], seen[1::2], known[0::2]], axis=1), coins


def _mean(door: Door, vectors: Floats, rows: NDArray[np.int64], repeats: int) -> Floats:
    """The mean of what comes out for these rows in `repeats` goes."""
    total = np.zeros(vectors.shape)
    for _ in range(repeats):
        total += door.let_out(vectors, rows)
    return total / repeats
