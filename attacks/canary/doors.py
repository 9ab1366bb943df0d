"""The ways out of a gate that canaries can take: releases, noisy updates, shares of a secure sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from securevfl.errors import AttackError
from securevfl.privacy.gate import Gate
from securevfl.privacy.rows import Rows
from securevfl.protocols.sums.noise import NoisySum

Floats = NDArray[np.float64]
MakeGate: TypeAlias = Callable[[int], Gate]

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
