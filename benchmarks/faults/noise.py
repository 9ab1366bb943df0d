"""Faults of the noise that parties add to what they release, and of the gate that lets it out."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.faults.contract import DEFENCE, OWN, SUMS, fault, swap
from securevfl.federation.site import Site
from securevfl.privacy import gate as gates
from securevfl.privacy import noise as noises
from securevfl.privacy.gate import Gate
from securevfl.privacy.noise import Noise
from securevfl.privacy.payloads import _KEY, Released
from securevfl.protocols.stream import KeyStream

OWN_AND_DEFENCE = (*OWN, *DEFENCE)
CLIPPING = tuple(case for case in (*OWN, *SUMS, *DEFENCE) if case != "frozen")
"""Cases with vectors beyond the clip; encoders that stay as they are give shorter ones here."""


def _gaussian(change: Any) -> None:
    """Replaces the Gaussian noise by change(honest draw, shape, std)."""
    swap(
        Noise,
        "gaussian",
        lambda honest: lambda self, shape, std: change(lambda s=shape, d=std: honest(self, s, d), shape, std),
    )


@fault("noise", "noise of half the standard deviation", OWN_AND_DEFENCE)
def noise_halved() -> None:
    _gaussian(lambda draw, shape, std: draw(shape, std / 2))


@fault("noise", "noise of 90 % of the standard deviation", OWN_AND_DEFENCE)
def noise_tenth_less() -> None:
    _gaussian(lambda draw, shape, std: draw(shape, std * 0.9))


@fault("noise", "no noise at all", OWN_AND_DEFENCE)
def noise_off() -> None:
    _gaussian(lambda draw, shape, std: np.zeros(shape))


@fault("noise", "noise drawn once for each shape and used again", OWN_AND_DEFENCE)
def noise_once() -> None:
    kept: dict[Any, Any] = {}
    _gaussian(lambda draw, shape, std: kept.setdefault((shape, std), draw()))


@fault("noise", "every seventh row has the noise of the first", OWN_AND_DEFENCE)
def noise_row_repeated() -> None:
    def change(draw: Any, shape: Any, std: float) -> Any:
        values = draw()
        if values.ndim > 1:
            values[7::7] = values[0]
        return values

    _gaussian(change)


@fault("noise", "every second row has the noise of the row before it, with the other sign", OWN_AND_DEFENCE)
def noise_mirrored() -> None:
    def change(draw: Any, shape: Any, std: float) -> Any:
        values = draw()
        if values.ndim > 1:
            values[1::2] = -values[: len(values) - 1 : 2]
        return values

    _gaussian(change)


@fault(
    "noise", "no noise from the second epoch on", tuple(case for case in OWN_AND_DEFENCE if case != "frozen")
)
def noise_off_after_an_epoch() -> None:
    begun: list[str] = []

    def begin(honest: Any) -> Any:
        def counted(self: Site, part: str, *given: Any) -> Any:
            begun.extend([self.name] if part == "epoch" else [])
            return honest(self, part, *given)

        return counted

    swap(Site, "begin", begin)
    _gaussian(lambda draw, shape, std: draw() if len(begun) == len(set(begun)) else np.zeros(shape))


@fault("noise", "no noise on the first of the coordinates", OWN_AND_DEFENCE)
def noise_without_a_coordinate() -> None:
    def change(draw: Any, shape: Any, std: float) -> Any:
        values = draw()
        values[..., 0] = 0
        return values

    _gaussian(change)


@fault("noise", "one value of noise for all coordinates of a row", ("strict", "frozen", "dp-encoder", "flex"))
def noise_correlated() -> None:
    def change(draw: Any, shape: Any, std: float) -> Any:
        return draw() if len(shape) < 2 else np.repeat(draw((shape[0], 1)), shape[1], axis=1)

    _gaussian(change)


@fault("noise", "uniform noise of the same variance", OWN_AND_DEFENCE)
def noise_uniform() -> None:
    swap(Noise, "gaussian", lambda honest: lambda self, shape, std: self.uniform(shape, std * 3**0.5))


@fault("noise", "noise cut off at one and a half standard deviations", OWN_AND_DEFENCE)
def noise_truncated() -> None:
    _gaussian(lambda draw, shape, std: np.clip(draw(), -1.5 * std, 1.5 * std))


@fault("noise", "noise on the first half of the rows of a batch only", OWN_AND_DEFENCE)
def noise_on_half_the_rows() -> None:
    def change(draw: Any, shape: Any, std: float) -> Any:
        values = draw()
        values[(len(values) + 1) // 2 :] = 0
        return values

    _gaussian(change)


@fault("noise", "all parties draw the same noise", ("strict", "frozen", "fdml", "flex", "afsgd"))
def noise_shared() -> None:
    key = os.urandom(16)

    def make(honest: Any) -> Any:
        def begun(self: Noise) -> None:
            honest(self)
            self._stream = KeyStream(key)

        return begun

    swap(Noise, "__init__", make)


@fault(
    "noise",
    "noise from a generator whose seed is known",
    OWN_AND_DEFENCE,
    needs="the seed: the values are those of a sound generator; only the code or its package digest tells",
)
def noise_seeded() -> None:
    made: list[Noise] = []

    def make(honest: Any) -> Any:
        def begun(self: Noise) -> None:
            honest(self)
            made.append(self)
            self._stream = KeyStream(len(made).to_bytes(16, "big"))

        return begun

    swap(Noise, "__init__", make)


@fault("noise", "noisy values are not rounded to the lattice", OWN_AND_DEFENCE)
def noise_off_the_lattice() -> None:
    swap(noises, "lattice", lambda honest: lambda std: honest(std) * 2.0**-20)


@fault("noise", "noise is added in float32", OWN_AND_DEFENCE)
def noise_float32() -> None:
    def make(honest: Any) -> Any:
        def single(self: Noise, values: Any, std: float) -> Any:
            exact = np.asarray(values, np.float32)
            return exact + self.gaussian(exact.shape, std).astype(np.float32)

        return single

    swap(Noise, "perturb", make)


# -- the gate -----------------------------------------------------------------------------------------------


@fault("gate", "nothing is clipped", CLIPPING)
def clip_skipped() -> None:
    swap(gates, "clip_rows", lambda honest: lambda vectors, clip: vectors)
    swap(gates, "clip_exactly", lambda honest: lambda values, clip: values)


@fault("gate", "vectors are clipped to twice the norm", CLIPPING)
def clip_doubled() -> None:
    for name in ("clip_rows", "clip_exactly"):
        swap(gates, name, lambda honest: lambda values, clip: honest(values, 2 * clip))


@fault("gate", "each coordinate is clipped instead of the norm", ("strict", "dp-encoder", "two-tree"))
def clip_by_coordinate() -> None:
    swap(gates, "clip_rows", lambda honest: lambda vectors, clip: vectors.clamp(-clip, clip))
    swap(gates, "clip_exactly", lambda honest: lambda values, clip: np.clip(values, -clip, clip))


@fault("gate", "vectors are clipped after the noise instead of before", OWN)
def clip_after_noise() -> None:
    clip = gates.clip_exactly

    def make(honest: Any) -> Any:
        def late(self: Gate, source: torch.Tensor) -> Any:
            return clip(honest(self, source).astype(np.float64), self.mechanism.clip).astype(np.float32)

        return late

    swap(Gate, "_protect", make)


def _raw_where(chosen: Any) -> None:
    """Vectors that `chosen` picks leave as they are, with an entry that says otherwise."""

    def make(honest: Any) -> Any:
        def raw(self: Gate, vectors: Any, values: Any, rows: Any, kind: str, *given: Any) -> Released:
            released: Released = honest(self, vectors, values, rows, kind, *given)
            mark = chosen(self, kind, len(values))
            mixed = np.where(mark[:, None], values.astype(np.float32), released.values)
            return _with(released, mixed.astype(np.float32))

        return raw

    swap(Gate, "_release_fresh", make)


def _with(released: Released, values: Any) -> Released:
    """The same release with other values."""
    kept = {name: getattr(released, name) for name in ("head", "observers", "kind", "rows", "source")}
    return Released(values=values, **kept, key=_KEY)


@fault("gate", "raw embeddings leave instead of noisy ones", OWN)
def raw_embeddings() -> None:
    _raw_where(lambda gate, kind, count: np.ones(count, bool))


@fault("gate", "one party's embeddings leave raw", OWN)
def raw_party() -> None:
    _raw_where(lambda gate, kind, count: np.full(count, gate.owner == "p1"))


@fault("gate", "embeddings of the test part leave raw", ("strict", "frozen", "dp-encoder", "fdml", "flex"))
def raw_evaluation() -> None:
    _raw_where(lambda gate, kind, count: np.full(count, kind == "evaluation"))


@fault("gate", "embeddings that open training or refresh it leave raw", ("strict", "frozen", "dp-encoder"))
def raw_refresh() -> None:
    _raw_where(lambda gate, kind, count: np.full(count, kind in ("initial", "refresh")))


@fault("gate", "one record of each batch leaves raw", OWN)
def raw_record() -> None:
    _raw_where(lambda gate, kind, count: np.arange(count) == 0)


@fault("gate", "one record in all leaves raw, once", ("strict", "frozen", "dp-encoder"))
def raw_once() -> None:
    done: list[int] = []

    def chosen(gate: Gate, kind: str, count: int) -> Any:
        mark = np.zeros(count, bool)
        if gate.owner == "p2" and not done:
            mark[done.append(0) or 0] = True
        return mark

    _raw_where(chosen)


@fault("gate", "low-order bits of the noisy values carry signs of the raw ones", OWN)
def low_bits() -> None:
    def make(honest: Any) -> Any:
        def marked(self: Gate, source: Any) -> Any:
            values = np.ascontiguousarray(honest(self, source), np.float32)
            signs = (np.asarray(source) > 0).astype(np.uint32)
            return ((values.view(np.uint32) & ~np.uint32(1)) | signs).view(np.float32)

        return marked

    swap(Gate, "_protect", make)


@fault("gate", "the noise of the plan is halved at the gate, which writes down the plan's", OWN)
def gate_sigma_halved() -> None:
    def make(honest: Any) -> Any:
        def weak(self: Gate, source: torch.Tensor) -> Any:
            mechanism = self.mechanism
            self.mechanism = replace(mechanism, sigma=mechanism.sigma / 2)
            try:
                return honest(self, source)
            finally:
                self.mechanism = mechanism

        return weak

    swap(Gate, "_protect", make)
