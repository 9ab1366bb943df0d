"""Faults of private updates, and of what is released once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.faults.books import _uncounted
from benchmarks.faults.contract import fault, swap
from benchmarks.faults.noise import _with
from securevfl.algorithms import local
from securevfl.privacy.gate import Gate, _Cache, clip_rows
from securevfl.privacy.payloads import Released

DP = ("dp-encoder", "dp-sums")
ONCE = ("frozen",)


def _updates(change: Any) -> None:
    """Encoders learn from change(gate, exact sums, noisy sums)."""

    def make(honest: Any) -> Any:
        def noisy(self: Gate, sums: Any, *, rows: Any) -> list[torch.Tensor]:
            return list(change(self, list(sums), honest(self, sums, rows=rows)))

        return noisy

    swap(Gate, "noisy_update", make)


@fault("dp-encoder", "the noise of updates is made and not used", DP)
def update_noise_unused() -> None:
    _updates(lambda gate, exact, noisy: exact)


@fault("dp-encoder", "the noise of updates is halved", DP)
def update_noise_halved() -> None:
    _updates(lambda gate, exact, noisy: [e + (n - e) / 2 for e, n in zip(exact, noisy, strict=True)])


@fault("dp-encoder", "the noise of updates is drawn once and used again", DP)
def update_noise_once() -> None:
    first: dict[Any, Any] = {}

    def change(gate: Gate, exact: Any, noisy: Any) -> Any:
        key = gate.owner, *(each.shape for each in exact)
        drawn = first.setdefault(key, [n - e for e, n in zip(exact, noisy, strict=True)])
        return [e + n for e, n in zip(exact, drawn, strict=True)]

    _updates(change)


@fault("dp-encoder", "every fifth update uses the exact gradient", DP)
def update_sometimes_exact() -> None:
    count: list[int] = []
    _updates(lambda gate, exact, noisy: exact if (count.append(1) or len(count)) % 5 == 0 else noisy)


@fault("dp-encoder", "only the first tensor of an update gets noise", ("dp-sums",))
def update_noise_on_one_tensor() -> None:
    _updates(lambda gate, exact, noisy: [noisy[0], *exact[1:]])


@fault("dp-encoder", "updates get float32 noise", DP)
def update_noise_float32() -> None:
    _updates(lambda gate, exact, noisy: [e + gate.update.sigma * torch.randn_like(e) for e in exact])


@fault("dp-encoder", "updates have no entry", DP)
def update_entry_missing() -> None:
    _uncounted(("update",))


@fault("dp-encoder", "every third update has no entry", DP)
def update_entry_third_missing() -> None:
    _uncounted(("update",), every=3)


@fault("dp-encoder", "gradients of single records are not clipped", DP)
def update_clip_ignored() -> None:
    def make(honest: Any) -> Any:
        return lambda encoder, inputs, own, clip, **rest: honest(encoder, inputs, own, 1e9, **rest)

    swap(local, "clipped_gradient_sum", make)


@fault("dp-encoder", "the batch's gradient is clipped instead of every record's", (*DP, "dp-encoder-longer"))
def update_clip_by_batch() -> None:
    def make(honest: Any) -> Any:
        def clipped(encoder: Any, inputs: Any, own: Any, clip: float, **rest: Any) -> Any:
            sums = honest(encoder, inputs, own, 1e9, **rest)
            norm = float(torch.sqrt(sum(each.square().sum() for each in sums)))
            return [each * min(1.0, clip * len(own) / max(norm, 1e-9)) for each in sums]

        return clipped

    swap(local, "clipped_gradient_sum", make)


@fault("dp-encoder", "encoders take a second, exact step after each private one", DP)
def update_second_step() -> None:
    def make(honest: Any) -> Any:
        def learn(self: Any, released: Any, gradient: Any, rows: Any) -> None:
            honest(self, released, gradient, rows)
            if self.private:
                parameters = [p for p in self.encoder.parameters() if p.requires_grad]
                with torch.enable_grad():
                    outputs = self.encoder(self.records[rows])
                    upstream = torch.from_numpy(np.array(gradient, np.float32))
                    steps = torch.autograd.grad(outputs, parameters, upstream)
                with torch.no_grad():
                    for parameter, step in zip(parameters, steps, strict=True):
                        parameter.sub_(0.1 * step)

        return learn

    swap(local.LocalModel, "learn", make)


# -- released once ------------------------------------------------------------------------------------------


def _again(chosen: Any) -> None:
    """What was released before leaves with fresh noise where `chosen` says so, without an entry."""

    def make(honest: Any) -> Any:
        def release(self: Gate, vectors: Any, *, rows: Any, kind: str, observers: Any) -> Released:
            released: Released = honest(self, vectors, rows=rows, kind=kind, observers=observers)
            if self._cache is None:
                return released
            mark = chosen(kind, len(vectors))[:, None]
            fresh = self._protect(vectors.numpy(force=True))
            return _with(released, np.where(mark, fresh, released.values))

        return release

    swap(Gate, "release", make)


@fault("release-once", "what was released once gets fresh noise each time", ONCE)
def once_redrawn() -> None:
    _again(lambda kind, count: np.ones(count, bool))


@fault("release-once", "each purpose has noise of its own, and only the first is written down", ONCE)
def once_by_purpose() -> None:
    _again(lambda kind, count: np.full(count, kind == "embedding"))


@fault("release-once", "one record of each message gets fresh noise", ONCE)
def once_redrawn_for_one() -> None:
    _again(lambda kind, count: np.arange(count) == 0)


@fault("release-once", "the noise fades each time a record is sent again", ONCE)
def once_fading() -> None:
    sent: list[int] = []

    def make(honest: Any) -> Any:
        def release(self: Gate, vectors: Any, *, rows: Any, kind: str, observers: Any) -> Released:
            released: Released = honest(self, vectors, rows=rows, kind=kind, observers=observers)
            sent.append(1)
            exact = clip_rows(vectors, self.mechanism.clip).detach().numpy()
            faded = exact + (released.values - exact) * 0.9 ** len(sent)
            return released if self._cache is None else _with(released, faded.astype(np.float32))

        return release

    swap(Gate, "release", make)


@fault("release-once", "the noise of a record is looked up under another one's number", ONCE)
def once_wrong_key() -> None:
    swap(_Cache, "fetch", lambda honest: lambda self, rows: honest(self, rows - rows % 2))


@fault("release-once", "encoders that should stay as they are go on learning", ONCE)
def once_but_trained() -> None:
    def make(honest: Any) -> Any:
        def release(self: Any, rows: Any, **options: Any) -> Any:
            with torch.no_grad():
                for parameter in self.encoder.parameters():
                    parameter.add_(0.02 * self.records[rows].mean())
            return honest(self, rows, **options)

        return release

    swap(local.LocalModel, "release", make)
