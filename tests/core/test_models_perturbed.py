"""Hidden noise after VAFL eq. (10)-(11)."""

import copy
import math

import numpy as np
import pytest
import torch
from model_fixtures import KINDS, SeededNoise, batch, encoder
from torch import nn

from securevfl.errors import PlanError
from securevfl.models import HiddenNoise, Perturbed, drawn_noise, perturb, replaying


def test_noise_enters_before_the_activation():
    layer = Perturbed(nn.Linear(3, 4), nn.ReLU(), 0.5, SeededNoise(3))
    rows = torch.randn(6, 3)
    drawn = SeededNoise(3).uniform((6, 4), math.sqrt(3) * 0.5)
    expected = torch.relu(layer.affine(rows) + torch.from_numpy(drawn).float())
    assert torch.equal(layer(rows), expected)
    assert (layer(rows) >= 0).all()


def test_level_is_the_standard_deviation():
    source = SeededNoise()
    values = HiddenNoise(0.3, source)(torch.zeros(400, 500))
    # 200,000 uniform values of standard deviation s: that of s^2's estimate is s^2 sqrt(0.8/n) (kurtosis
    # 1.8).
    assert abs(float(values.var()) / 0.09 - 1) < 6 * math.sqrt(0.8 / 200_000)
    assert float(values.abs().max()) <= math.sqrt(3) * 0.3 * (1 + 1e-6)
    assert source.calls == [("uniform", (400, 500), math.sqrt(3) * 0.3)]


@pytest.mark.parametrize("kind", ["mlp", "cnn", "lstm"])
def test_perturb_keeps_parameters_and_acts_in_training_only(kind):
    plain, source = encoder(kind), SeededNoise()
    names = list(plain.state_dict())
    rows = batch(kind, 5)
    before = plain(rows)
    module = perturb(plain, 0.4, source)
    assert module is plain and list(module.state_dict()) == names
    assert not torch.equal(module(rows), before)
    assert not torch.equal(module(rows), module(rows))
    calls = len(source.calls)
    assert torch.equal(module.eval()(rows), before)
    assert len(source.calls) == calls and drawn_noise(module) == {}


def test_the_lstm_gets_gaussian_noise_at_the_output_of_each_layer():
    source = SeededNoise()
    perturb(encoder("lstm"), [0.01, 0.02], source)(batch("lstm", 5))
    assert source.calls == [("gaussian", (5, 3, 8), 0.01), ("gaussian", (5, 3, 4), 0.02)]


def test_a_level_of_zero_draws_nothing():
    source = SeededNoise()
    module = perturb(encoder("mlp"), [0, 0.0], source)
    assert torch.equal(module(batch("mlp", 3)), encoder("mlp")(batch("mlp", 3)))
    assert source.calls == []


def test_gradients_pass_through():
    module = perturb(encoder("mlp"), 0.1, SeededNoise())
    module(batch("mlp", 5)).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


def test_replay_repeats_the_last_noise():
    source = SeededNoise()
    module = perturb(encoder("mlp"), 0.5, source)
    rows = batch("mlp", 4)
    first = module(rows)
    assert [tuple(value.shape) for value in drawn_noise(module).values()] == [(4, 5), (4, 4)]
    kept = drawn_noise(module)
    module(batch("mlp", 9))
    last = drawn_noise(module)
    with replaying(module, kept):
        assert torch.equal(module(rows), first)
        assert torch.equal(module.eval()(rows), first)
    assert all(torch.equal(last[name], value) for name, value in drawn_noise(module.train()).items())
    assert not torch.equal(module(rows), first)
    with pytest.raises(PlanError, match=r"no noise was kept for hidden.0.noise.drawn"), replaying(module, {}):
        pass


def test_copies_share_the_source_and_so_never_repeat_its_values():
    module = perturb(encoder("mlp"), 0.5, SeededNoise())
    twin = copy.deepcopy(module)
    assert twin.hidden[0].noise.source is module.hidden[0].noise.source
    rows = batch("mlp", 4)
    assert not torch.equal(module(rows), twin(rows))


def test_torchs_generator_plays_no_part():
    state = torch.random.get_rng_state()
    outs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        outs.append(perturb(encoder("mlp"), 0.5, SeededNoise(9))(batch("mlp", 4)))
    torch.random.set_rng_state(state)
    assert torch.equal(*outs)


def test_noise_of_another_layout_and_type_is_accepted():
    class Fortran(SeededNoise):
        def uniform(self, shape, half_width):
            return np.asfortranarray(super().uniform(shape, half_width))

    out = HiddenNoise(1.0, Fortran())(torch.zeros(3, 4, dtype=torch.float64))
    assert torch.equal(out, torch.from_numpy(SeededNoise().uniform((3, 4), math.sqrt(3))))


@pytest.mark.parametrize("level", [-0.1, math.nan, math.inf])
def test_bad_levels(level):
    with pytest.raises(PlanError, match="hidden noise level"):
        perturb(encoder("mlp"), level, SeededNoise())


def test_bad_targets():
    with pytest.raises(PlanError, match="3 noise levels for 2 hidden layers"):
        perturb(encoder("mlp"), [1, 2, 3], SeededNoise())
    with pytest.raises(PlanError, match="Sequential is not a ready-made encoder"):
        perturb(nn.Sequential(nn.Linear(2, 2)), 1.0, SeededNoise())
    assert perturb(encoder("linear"), 0.5, SeededNoise()) is not None  # no hidden layer, nothing to perturb
    assert set(KINDS) == {"linear", "mlp", "cnn", "lstm", "fm"}


def test_bounded_support_is_visible():
    """Why hidden noise is never counted: shifted by d, values beyond the support give the shift away."""
    half, shift = 1.0, 0.3
    level = half / math.sqrt(3)
    moved = HiddenNoise(level, SeededNoise())(torch.full((1, 100_000), shift))
    caught = float((moved > half).double().mean())
    # Exactly shift / (2 half) of the values; six standard errors.
    p = shift / (2 * half)
    assert abs(caught - p) < 6 * math.sqrt(p * (1 - p) / 100_000)
