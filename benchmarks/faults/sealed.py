"""Faults of sealed training: its noise, its rows, its masks and what it writes down."""

from __future__ import annotations

import os
import types
from typing import Any

import numpy as np
import torch

from benchmarks.faults.books import _uncounted
from benchmarks.faults.contract import SEALED, fault, swap
from securevfl.algorithms.sealed import rows as sealed_rows
from securevfl.algorithms.sealed.member import SealedMember
from securevfl.algorithms.sealed.settings import SealedGeometry
from securevfl.privacy.gate import Gate
from securevfl.protocols.sealed import dealer, large, party
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import OPERAND_BITS
from securevfl.protocols.sealed.series import SineSeries

LINEAR = ("sealed",)


def _noise(change: Any) -> None:
    """Noise on a total becomes change(member, target, noise)."""

    def make(honest: Any) -> Any:
        return lambda self, target: change(self, target, honest(self, target))

    swap(SealedParty, "noise_for", make)


@fault("sealed", "totals are opened without noise", SEALED)
def sealed_noise_off() -> None:
    _noise(lambda member, target, noise: np.zeros_like(noise))


@fault("sealed", "no member adds noise to its own total", SEALED)
def sealed_self_share_missing() -> None:
    _noise(lambda member, target, noise: np.zeros_like(noise) if target == member.index else noise)


@fault("sealed", "no member adds noise to the others' totals", SEALED)
def sealed_other_shares_missing() -> None:
    _noise(lambda member, target, noise: noise if target == member.index else np.zeros_like(noise))


@fault("sealed", "one member adds no noise", (*SEALED, "sealed-longer"))
def sealed_member_without_noise() -> None:
    _noise(lambda member, target, noise: np.zeros_like(noise) if member.index == 1 else noise)


@fault("sealed", "noise on totals is halved", SEALED)
def sealed_noise_halved() -> None:
    _noise(lambda member, target, noise: (noise.view(np.int64) // 2).view(np.uint64))


@fault("sealed", "noise on totals is drawn once and used again", SEALED)
def sealed_noise_once() -> None:
    kept: dict[Any, Any] = {}
    _noise(lambda member, target, noise: kept.setdefault((member.index, target, noise.shape), noise))


@fault("sealed", "the first value of each total has no noise", SEALED)
def sealed_noise_without_a_value() -> None:
    def change(member: Any, target: int, noise: Any) -> Any:
        noise = noise.copy()
        noise[:1] = 0
        return noise

    _noise(change)


@fault("sealed", "every third opening has no noise", SEALED)
def sealed_noise_off_sometimes() -> None:
    count: dict[Any, int] = {}

    def change(member: Any, target: int, noise: Any) -> Any:
        count[member.index, target] = count.get((member.index, target), 0) + 1
        return np.zeros_like(noise) if count[member.index, target] % 3 == 0 else noise

    _noise(change)


@fault("sealed", "the iteration's cost is written with half its sensitivity", SEALED)
def sealed_cost_halved() -> None:
    def make(honest: Any) -> Any:
        def cost(self: SealedGeometry, member: int) -> tuple[float, float]:
            sensitivity, sigma = honest(self, member)
            return sensitivity / 2, sigma

        return cost

    swap(SealedGeometry, "cost", make)


@fault("sealed", "every third opening has no entry", SEALED)
def sealed_entry_missing() -> None:
    _uncounted(("totals",), every=3)


@fault("sealed", "the range of the series is taken for half of what it is", SEALED)
def sealed_series_range() -> None:
    def make(honest: Any) -> Any:
        def shrunk(self: SineSeries) -> tuple[float, float]:
            low, high = honest.func(self)
            return (self.offset + low) / 2, (self.offset + high) / 2

        return property(shrunk)

    swap(SineSeries, "range", make)


@fault("sealed", "rows are not clipped, and nobody asks", LINEAR)
def sealed_rows_unclipped() -> None:
    def make(honest: Any) -> Any:
        return lambda rows, clip: np.asarray(np.trunc(rows * 2.0**OPERAND_BITS), np.int32)

    swap(sealed_rows, "clip_to_integers", make)
    swap(party, "check_operand", lambda honest: lambda *given, **options: None)


@fault("sealed", "rows are clipped to twice the norm, and nobody asks", LINEAR)
def sealed_rows_clip_doubled() -> None:
    swap(sealed_rows, "clip_to_integers", lambda honest: lambda rows, clip: honest(3 * rows, 2 * clip))
    swap(party, "check_operand", lambda honest: lambda *given, **options: None)


@fault("sealed", "rows are rounded away from zero", LINEAR)
def sealed_rows_rounded_up() -> None:
    def make(honest: Any) -> Any:
        def away(rows: Any, clip: float) -> Any:
            norms = np.linalg.norm(rows, axis=1, keepdims=True)
            scaled = rows * np.minimum(1.0, clip / np.maximum(norms, 1e-300)) * 2.0**OPERAND_BITS
            return np.asarray(np.copysign(np.ceil(np.abs(scaled)), scaled), np.int32)

        return away

    swap(sealed_rows, "clip_to_integers", make)


@fault("sealed", "rows are centred with exact means", LINEAR)
def sealed_means_exact() -> None:
    def make(honest: Any) -> Any:
        def exact(self: Gate, values: Any, **options: Any) -> Any:
            honest(self, values, **options)
            return values

        return exact

    swap(Gate, "noisy_statistic", make)


@fault("sealed", "the means that rows are centred with are not counted", LINEAR)
def sealed_means_uncounted() -> None:
    _uncounted(("means", "scale"))


@fault("sealed", "one party's weights depend on its raw rows", LINEAR)
def sealed_weights_touched() -> None:
    def make(honest: Any) -> Any:
        def learn(self: SealedMember, total: Any, count: int) -> None:
            honest(self, total, count)
            if self.index == 1 and self.model is not None:
                mean = torch.from_numpy(self.model.operand(None).mean(1) * 2.0**-OPERAND_BITS)
                with torch.no_grad():
                    weights = next(iter(self.model.parameters))
                    weights.add_(0.05 * mean.reshape(weights.shape).to(weights))

        return learn

    swap(SealedMember, "_learn", make)


@fault("sealed", "weights do not stay within their bound", LINEAR)
def sealed_weights_unbounded() -> None:
    def make(honest: Any) -> Any:
        def learn(self: SealedMember, total: Any, count: int) -> None:
            honest(self, 1e3 * total, count)

        return learn

    swap(SealedMember, "_learn", make)


def _without_mask(purpose: str) -> None:
    class Nothing:
        def words(self, shape: Any, dtype: Any) -> Any:
            return np.zeros(shape, dtype)

        def fill(self, out: Any) -> Any:
            out[...] = 0
            return out

        def _from_block(self, block: int) -> Any:
            return self

    swap(large, "_key_of", lambda honest: lambda seed, what: b"" if what == purpose else honest(seed, what))
    swap(large, "KeyStream", lambda honest: lambda key, *more: honest(key, *more) if key else Nothing())


@fault("masks", "the rows of sealed training travel without a mask", SEALED)
def sealed_operand_unmasked() -> None:
    _without_mask("operand")


@fault("masks", "the scores of sealed training travel without a mask", SEALED)
def sealed_phase_unmasked() -> None:
    _without_mask("phase")


@fault("masks", "the scores that evaluate a sealed model travel without a mask", SEALED)
def sealed_scores_unmasked() -> None:
    _without_mask("score")


@fault("masks", "the dealer uses its seeds again in every round", SEALED)
def dealer_seeds_reused() -> None:
    kept: list[bytes] = [os.urandom(16) for _ in range(3)]
    drawn: list[int] = []

    def urandom(size: int) -> bytes:
        drawn.append(size)
        return kept[len(drawn) % 3]

    swap(dealer, "os", lambda honest: types.SimpleNamespace(urandom=urandom))


@fault(
    "masks",
    "the dealer's seeds are one of 65,536",
    SEALED,
    needs="a search through all small seeds against the masked words of a view that keeps them",
)
def dealer_seeds_small() -> None:
    def make(honest: Any) -> Any:
        return types.SimpleNamespace(urandom=lambda size: honest.urandom(2).ljust(size, b"\0"))

    swap(dealer, "os", make)
