"""Per-record clipped gradients against a plain loop of backward passes."""

import pytest
import torch
from model_fixtures import KINDS, SeededNoise, batch, encoder, generator
from torch import nn

from securevfl.errors import PlanError
from securevfl.models import MLPEncoder, clipped_gradient_sum, drawn_noise, per_record, perturb, replaying

MARGIN = per_record.CLIP_MARGIN


def by_hand(module, rows, upstream, clip, noise=None):
    """One backward pass per record, clipped and added in float64."""
    weights = [p for p in module.parameters() if p.requires_grad]
    total = [torch.zeros_like(p, dtype=torch.float64) for p in weights]
    for n in range(len(rows)):
        with replaying(module, {name: values[n : n + 1] for name, values in (noise or {}).items()}):
            out = module(rows[n : n + 1])
        found = torch.autograd.grad(out, weights, upstream[n : n + 1])
        norm = torch.cat([g.double().flatten() for g in found]).norm()
        factor = min(1.0, clip * MARGIN / float(norm)) if norm > 0 else 1.0
        for value, g in zip(total, found, strict=True):
            value += factor * g.double()
    return total


def assert_same(found, expected, rows, clip):
    # Each clipped gradient has norm at most clip; float32 keeps about 2^-20 of it after a few layers.
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), other, rtol=0, atol=rows * clip * 2**-20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip", [0.1, 1.5, 100.0])
def test_equals_a_loop(kind, clip):
    module, rows = encoder(kind), batch(kind, 9)
    upstream = torch.randn(9, 3, generator=generator(4))
    found = clipped_gradient_sum(module, rows, upstream, clip)
    assert [v.shape for v in found] == [p.shape for p in module.parameters()]
    assert_same(found, by_hand(module, rows, upstream, clip), 9, min(clip, 10))
    assert all(p.grad is None for p in module.parameters()) and not any(v.requires_grad for v in found)


@pytest.mark.parametrize("kind", KINDS)
def test_without_clipping_it_is_the_batch_gradient(kind):
    module, rows = encoder(kind), batch(kind, 9)
    upstream = torch.randn(9, 3, generator=generator(4))
    expected = torch.autograd.grad(module(rows), list(module.parameters()), upstream)
    for value, other in zip(clipped_gradient_sum(module, rows, upstream, 1e6), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "cnn", "lstm"])
def test_the_noise_of_the_forward_pass_is_replayed(kind):
    module, rows = perturb(encoder(kind), 0.5, SeededNoise()), batch(kind, 7)
    upstream = torch.randn(7, 3, generator=generator(4))
    module(rows)
    noise = drawn_noise(module)
    module(batch(kind, 3))  # another batch in between must not matter
    found = clipped_gradient_sum(module, rows, upstream, 0.5, noise=noise)
    assert_same(found, by_hand(module, rows, upstream, 0.5, noise), 7, 0.5)
    module.eval()  # an evaluation may come between the forward pass and the gradient
    for value, other in zip(
        clipped_gradient_sum(module, rows, upstream, 0.5, noise=noise), found, strict=True
    ):
        assert torch.equal(value, other)
    module.train()
    fresh = clipped_gradient_sum(module, rows, upstream, 0.5)
    assert not torch.allclose(fresh[0], found[0])
    with pytest.raises(PlanError, match="for 7 records, the batch has 3"):
        clipped_gradient_sum(module, batch(kind, 3), upstream[:3], 0.5, noise=noise)


@pytest.mark.parametrize("kind", KINDS)
def test_no_record_moves_the_sum_by_more_than_the_clip(kind):
    module, rows = encoder(kind), 50 * batch(kind, 1)
    upstream = 1e4 * torch.randn(1, 3, generator=generator(4))
    for clip in (1e-3, 0.7, 5.0):
        found = clipped_gradient_sum(module, rows, upstream, clip)
        norm = torch.cat([value.double().flatten() for value in found]).norm()
        assert clip * 0.9999 < norm <= clip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_a_record_without_a_finite_gradient_contributes_nothing(kind, bad):
    module, rows = encoder(kind), batch(kind, 4)
    upstream = torch.randn(4, 3, generator=generator(4))
    expected = clipped_gradient_sum(module, rows[:3], upstream[:3], 1.0)
    upstream[3] = bad
    for value, other in zip(clipped_gradient_sum(module, rows, upstream, 1.0), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    upstream[3], rows[3] = 1.0, float("nan")
    for value, other in zip(clipped_gradient_sum(module, rows, upstream, 1.0), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_edge_batches(kind):
    module = encoder(kind)
    for value in clipped_gradient_sum(module, batch(kind, 0), torch.zeros(0, 3), 1.0):
        assert (value == 0).all()
    for value in clipped_gradient_sum(module, batch(kind, 2), torch.zeros(2, 3), 1.0):
        assert (value == 0).all()


def test_chunks_add_up(monkeypatch):
    module, rows = encoder("cnn"), batch("cnn", 7)
    upstream = torch.randn(7, 3, generator=generator(4))
    whole = clipped_gradient_sum(module, rows, upstream, 0.5)
    monkeypatch.setattr(per_record, "CHUNK_VALUES", 2 * sum(p.numel() for p in module.parameters()))
    for value, other in zip(clipped_gradient_sum(module, rows, upstream, 0.5), whole, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)


class FusedLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)

    def forward(self, inputs):
        return self.lstm(inputs.reshape(len(inputs), 3, 2))[0][:, -1]


class Doubled(MLPEncoder):
    """Passes its first layer twice, so the closed form for a chain of layers does not apply."""

    def forward(self, inputs):
        return super().forward(inputs) + super().forward(-inputs)


@pytest.mark.parametrize(
    "module",
    [
        FusedLSTM(),
        Doubled(6, 3, (4,)),
        nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3)),
    ],
)
def test_users_modules(module):
    rows, upstream = batch("linear", 5), torch.randn(5, 3, generator=generator(4))
    assert_same(
        clipped_gradient_sum(module, rows, upstream, 0.3), by_hand(module, rows, upstream, 0.3), 5, 0.3
    )


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_frozen_parameters_are_left_out(kind):
    module, rows = encoder(kind), batch(kind, 5)
    module.hidden[0].requires_grad_(False)
    upstream = torch.randn(5, 3, generator=generator(4))
    found = clipped_gradient_sum(module, rows, upstream, 0.3)
    assert_same(found, by_hand(module, rows, upstream, 0.3), 5, 0.3)


def test_bad_input():
    module, rows, upstream = encoder("mlp"), batch("mlp", 4), torch.ones(4, 3)
    for clip in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(PlanError, match="gradient clip"):
            clipped_gradient_sum(module, rows, upstream, clip)
    with pytest.raises(PlanError, match=r"expected \(4, embedding\)"):
        clipped_gradient_sum(module, rows, upstream[:2], 1.0)
    for kind in KINDS:
        with pytest.raises(RuntimeError):  # never broadcast
            clipped_gradient_sum(encoder(kind), batch(kind, 4), torch.ones(4, 1), 1.0)
    mixing = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with pytest.raises(PlanError, match="couples records through 1 \\(BatchNorm1d\\)"):
        clipped_gradient_sum(mixing, rows, upstream, 1.0)


def test_mixed_precision_and_compiled_encoders_are_refused() -> None:
    """A bound derived for float32 does not hold for half precision, whichever way it gets in."""
    rows, upstream = torch.ones(2, 3), torch.ones(2, 1)
    encoder = nn.Linear(3, 1)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PlanError, match="mixed precision is not"):
        clipped_gradient_sum(encoder, rows, upstream, 1.0)
    with pytest.raises(PlanError, match="derived for float32; leave autocast"):
        clipped_gradient_sum(nn.Linear(3, 1).bfloat16(), rows.bfloat16(), upstream.bfloat16(), 1.0)
    with pytest.raises(PlanError, match="cannot pass a compiled encoder; give the module itself"):
        encoder._orig_mod = nn.Identity()  # as torch.compile leaves it
        clipped_gradient_sum(encoder, rows, upstream, 1.0)
