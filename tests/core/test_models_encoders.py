"""Ready-made encoders, seeded construction, checks of users' modules, devices."""

import copy

import pytest
import torch
from model_fixtures import KINDS, batch, encoder, generator
from torch import nn

from securevfl.errors import PlanError
from securevfl.models import (
    ENCODERS,
    CNNEncoder,
    LinearEncoder,
    LSTMEncoder,
    MLPEncoder,
    build_encoder,
    check_encoder,
    couples_records,
    initialise,
    pick_device,
)
from securevfl.settings.plan import MODELS


def test_every_kind_is_tried_here():
    assert KINDS.keys() == ENCODERS.keys()
    assert set(MODELS) == {
        "auto",
        "profile",
        "scorecard",
        "trees",
        *ENCODERS,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_shape(kind, rows):
    assert encoder(kind)(batch(kind, rows)).shape == (rows, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_depend_on_the_generator_only(kind):
    torch.manual_seed(1)
    first = encoder(kind, seed=5).state_dict()
    state = torch.random.get_rng_state()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    second = encoder(kind, seed=5).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(state, before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = encoder(kind, seed=6).state_dict()
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_couples_records(kind):
    module, rows = encoder(kind), batch(kind, 9)
    assert couples_records(module, rows) == []
    # Equal up to float32 sums in another order: embeddings are of order 1, sums of at most 28 products.
    alone = torch.cat([module(row.unsqueeze(0)) for row in rows])
    torch.testing.assert_close(module(rows), alone, rtol=1e-5, atol=1e-6)


def test_weights_stay_inside_torchs_default_range():
    layer = build_encoder("linear", 400, 50, generator=generator()).output.weight.detach()
    # 20,000 uniform values on +-1/20: all are below 99 % of it with probability 0.99^20000 = 5e-88.
    assert 0.05 * 0.99 < float(layer.abs().max()) <= 0.05 * (1 + 2**-23)
    assert abs(float(layer.mean())) < 6 * (0.05 / 3**0.5) / 20_000**0.5  # six standard errors


def test_the_lstm_is_torchs_lstm():
    module = LSTMEncoder(5, 3, 2, units=4)
    initialise(module, generator())
    twins = [nn.LSTM(3, 4, batch_first=True, bidirectional=True), nn.LSTM(8, 4, batch_first=True)]
    for layer, twin in zip(module.hidden, twins, strict=True):
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            for way, suffix in enumerate(("_l0", "_l0_reverse")[: layer.directions]):
                getattr(twin, part + suffix).data.copy_(getattr(layer, part)[way])
    rows = torch.randn(6, 15, generator=generator(1))
    sequence = rows.reshape(6, 5, 3)
    for twin in twins:
        sequence, _ = twin(sequence)
    torch.testing.assert_close(module(rows), module.output(sequence[:, -1]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(module(rows), module(rows.reshape(6, 5, 3)), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(4, 28), (1, 64), (1, 1), (28, 1), (3, 5, 7), (2, 1, 9), (4, 4)])
def test_the_cnn_takes_every_band(shape):
    module = CNNEncoder(shape, 5, (2, 3, 4))
    flat = torch.randn(3, torch.Size(shape).numel())
    assert module(flat).shape == (3, 5)
    assert torch.equal(module(flat), module(flat.reshape(3, *shape)))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_activations_differ(kind):
    width, options = KINDS[kind]
    outs = []
    for activation in ("relu", "tanh", "sigmoid", "identity"):
        module = build_encoder(kind, width, 2, generator=generator(), activation=activation, **options)
        outs.append(module(batch(kind, 4)))
    assert all(not torch.allclose(a, b) for i, a in enumerate(outs) for b in outs[:i])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g: build_encoder("transformer", 4, 2, generator=g), "unknown encoder 'transformer'"),
        (lambda g: build_encoder("linear", 0, 2, generator=g), "width is 0"),
        (lambda g: build_encoder("linear", 4, -1, generator=g), "embedding is -1"),
        (lambda g: build_encoder("linear", 4, True, generator=g), "embedding is True"),
        (lambda g: build_encoder("linear", 4.0, 2, generator=g), "width is 4.0"),
        (lambda g: build_encoder("mlp", 4, 2, generator=g, hidden=()), "at least one hidden width"),
        (lambda g: build_encoder("mlp", 4, 2, generator=g, hidden=(3, 0)), "hidden width is 0"),
        (lambda g: build_encoder("mlp", 4, 2, generator=g, activation="swish"), "unknown activation 'swish'"),
        (lambda g: build_encoder("cnn", 27, 2, generator=g, image_shape=(4, 7)), "4x7 has 28 pixels"),
        (lambda g: build_encoder("cnn", 4, 2, generator=g, image_shape=(4,)), "2 or 3 sides"),
        (lambda g: build_encoder("cnn", 4, 2, generator=g, channels=()), "at least one convolution"),
        (lambda g: build_encoder("lstm", 7, 2, generator=g, steps=3), "do not divide into 3 steps"),
        (lambda g: build_encoder("lstm", 7, 2, generator=g, steps=0), "steps is 0"),
        (lambda g: build_encoder("lstm", 7, 2, generator=g, units=0), "units is 0"),
    ],
)
def test_bad_sizes_are_refused(make, words):
    with pytest.raises(PlanError, match=words) as caught:
        make(generator())
    assert "\n" not in str(caught.value)


def test_initialise_refuses_layers_it_does_not_know():
    with pytest.raises(TypeError, match="LayerNorm"):
        initialise(nn.Sequential(nn.LayerNorm(3)), generator())


class Centred(nn.Module):
    def forward(self, inputs):
        return inputs - inputs.mean(0)


@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        (nn.BatchNorm1d(4), torch.randn(5, 4)),
        (nn.LazyBatchNorm1d(), None),
        (nn.SyncBatchNorm(4), None),
        (nn.BatchNorm2d(4, track_running_stats=False), torch.randn(5, 4, 2, 2)),
        (nn.InstanceNorm1d(4, track_running_stats=True), torch.randn(5, 4, 3)),
    ],
)
def test_normalisation_over_records_is_named(layer, rows):
    module = nn.Sequential(nn.Identity(), layer)
    found = couples_records(module)
    assert found == [f"1 ({type(layer).__name__})"]
    assert couples_records(layer) == [f"module ({type(layer).__name__})"]


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.Dropout(), nn.Linear(4, 4)]
)
def test_layers_that_work_on_each_record_pass(layer):
    rows = torch.randn(5, 4, 3) if isinstance(layer, nn.InstanceNorm1d) else torch.randn(5, 4)
    module = nn.Sequential(layer)
    assert couples_records(module, rows) == []
    assert module.training and layer.training


def test_a_forward_that_mixes_records_is_found_by_trying():
    module = nn.Sequential(nn.Linear(4, 4), Centred())
    assert couples_records(module) == []
    assert couples_records(module, torch.randn(5, 4)) == ["forward"]
    assert couples_records(module, torch.randn(1, 4)) == []


def test_check_encoder_accepts_a_users_module_and_restores_its_mode():
    module = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    module[1].eval()
    state = copy.deepcopy(module.state_dict())
    assert check_encoder(module, torch.randn(5, 4)) == 3
    assert check_encoder(module, torch.randn(5, 4), 3) == 3
    assert module.training and not module[1].training
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, inputs):
        return self.make(inputs)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: x[0], r"returns shape \(4,\); expected \(5, embedding\)"),
        (lambda x: x[:2], r"returns shape \(2, 4\)"),
        (lambda x: x[:, :0], r"returns shape \(5, 0\)"),
        (lambda x: (x, x), "floating-point tensor, not tuple"),
        (lambda x: x.long(), "floating-point tensor, not torch.int64"),
        (lambda x: x / 0, "NaN or infinite"),
        (lambda x: x @ torch.ones(3, 2), r"fails on rows of shape \(5, 4\)"),
    ],
)
def test_check_encoder_names_the_fault(make, words):
    with pytest.raises(PlanError, match=words) as caught:
        check_encoder(Returns(make), torch.ones(5, 4))
    assert "\n" not in str(caught.value)


def test_check_encoder_compares_with_the_plan():
    with pytest.raises(PlanError, match="length 3; the plan says 8"):
        check_encoder(LinearEncoder(4, 3), torch.ones(5, 4), 8)


def test_devices(monkeypatch):
    assert pick_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto").type == "cpu"
    with pytest.raises(PlanError, match="finds no CUDA device; use 'cpu' or 'auto'"):
        pick_device("cuda")
    with pytest.raises(PlanError, match="unknown device 'tpu'"):
        pick_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto").type == pick_device("cuda").type == "cuda"
    assert pick_device("cpu").type == "cpu"


def test_an_mlp_without_hidden_layers_is_refused():
    with pytest.raises(PlanError, match="use the linear encoder"):
        MLPEncoder(4, 2, ())
