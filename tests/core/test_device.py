"""Every training path on a device that is not there: what a GPU would refuse, or wait for, fails here.

The models are the CPU's, number by number, so no transfer is forgotten and none changes a value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elsewhere import PLACE, Device, Elsewhere
from round_data import tiny
from torch import nn

from securevfl import Plan, Run, train
from securevfl.algorithms import ALGORITHMS
from securevfl.federation import site
from securevfl.federation.callbacks import Callback
from securevfl.settings.families import family_of
from securevfl.transfers import Index

BASE = Plan(
    algorithm="vafl-sync",
    epochs=2,
    batch=16,
    learning_rate=0.1,
    unprotected=True,
    insecure_reproducible_noise=True,
)
PARTIES, STEPS = 3, 3  # of an epoch over 40 records
NETWORK = {"model": "mlp", "hidden": (3, 3)}
NOISY = {"sigma": 1.0, "unprotected": False, "scaling": "none"}
DP = NOISY | {"encoder_training": "dp", "gradient_sigma": 1.0, "insecure_reproducible_noise": False}
SEALED = {"algorithm": "sealed", "unprotected": False, "epsilon": 8.0, "scaling": "none"}
FLEX = tuple(name for name in ALGORITHMS if family_of(name).name == "flex")
SHORT = {"algorithm": "flex", "settings": {"timeout": 2.0}}
PATHS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHMS if name not in ("sealed", *FLEX)},
    **{name: SHORT | {"algorithm": name} for name in FLEX},
    **{f"{name} networks": NETWORK | {"algorithm": name} for name in ("vafl", "fdml", "central")},
    "adam": NETWORK | {"optimiser": "adam"},
    "frozen": NETWORK | NOISY | {"encoder_training": "none"},
    "hidden noise": NETWORK | {"hidden_noise": (0.1, 0.1)},
    "private updates": NETWORK | DP,
    "private updates with hidden noise": NETWORK | DP | {"hidden_noise": (0.1, 0.1)},
    "private updates of an lstm": DP | {"model": "lstm", "hidden": (2,)},
    "two trees": NETWORK | {"protocol": "two-tree"},
    "two trees, frozen": NETWORK | NOISY | {"protocol": "two-tree", "encoder_training": "none"},
    "noisy gradients": NETWORK | {"defence": "noise"},
    "fdml encrypted": {"algorithm": "fdml", "protocol": "bfv"},
    "flex networks": NETWORK | SHORT,
    "flex without labels": NETWORK | SHORT | {"settings": {"timeout": 2.0, "private_labels": True}},
    "flex proximal": SHORT | {"optimiser": "proximal", "settings": {"timeout": 2.0, "proximal": 0.1}},
    "a party's own loss": {"losses": {"p1": "hinge"}},
    "gradients asked for later": {"algorithm": "vafl", "settings": {"query_first": True}},
    "other records beside": {"algorithm": "vafl", "settings": {"also": 5}},
    "central trees": {"algorithm": "central", "model": "trees"},
    "sealed linear": SEALED,
    "sealed network": SEALED | NETWORK,
}


BESIDE = ("gradients asked for later", "other records beside")
"""Steps with one message more from each party, and its records' numbers."""


class Steps(Callback):
    """Keeps the counts of transfers at the ends of epochs."""

    def __init__(self, device: Device) -> None:
        self.device, self.counts = device, list[Counter[str]]()

    def on_epoch(self, line: Mapping[str, Any]) -> None:
        self.counts.append(Counter(self.device.transfers))


@pytest.mark.parametrize("path", PATHS)
def test_training(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = BASE.with_changes(**PATHS[path])
    with monkeypatch.context() as patch, Device() as device:
        patch.setattr(site, "pick_device", lambda name: PLACE)
        seen = Steps(device)
        found = train(tiny(), plan, callbacks=[seen])
    assert_same(found, train(tiny(), plan), exactly=plan.insecure_reproducible_noise)
    # What a second epoch adds. A step takes a batch, a gradient and hidden noise of two layers up at each
    # party, and its embeddings, gradients and loss down; an epoch ends with a look at every parameter.
    each = Counter({name: seen.counts[-1][name] - seen.counts[0][name] for name in ("up", "down", "waiting")})
    epochs = len(seen.counts) - 1
    parameters = sum(len(list(model.parameters())) for model in (*found.encoders.values(), found.head))
    most = 6 + (path in BESIDE)
    assert each["up"] <= epochs * (PARTIES * STEPS * most + parameters)
    assert each["down"] <= epochs * (PARTIES * STEPS * 4 + 2 * parameters)
    assert each["waiting"] <= epochs * parameters


def assert_same(found: Run, wanted: Run, *, exactly: bool) -> None:
    """The same test figures; where noise cannot be repeated, only that there are some."""
    for name, value in wanted.test.items():
        assert found.test[name] is not None
        assert not exactly or found.test[name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize(
    "plan",
    [BASE, BASE.with_changes(**NETWORK), BASE.with_changes(**SEALED), Plan(model="scorecard", epsilon=60.0)],
    ids=["linear", "network", "sealed", "card"],
)
def test_predictions(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run in memory, whose models are on the device already."""
    new = tiny(rows=300)
    with monkeypatch.context() as patch, Device():
        patch.setattr(site, "pick_device", lambda name: PLACE)
        run = train(tiny(rows=250), plan)
        ids = [f"new{place}" for place in range(len(new.test[0]))]
        assert np.isfinite(run.predict(new.test, ids=ids)).all()


class Cut(Callback):
    """Breaks a run off after its first epoch."""

    def on_epoch(self, line: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "path", ["afsaga", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adam", "sealed network"))]
)
def test_a_run_in_a_folder_is_recorded_broken_off_and_resumed(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First models, checkpoints and last models leave the device, and come back to it."""
    plan = BASE.with_changes(record_views=True, **PATHS[path])
    with monkeypatch.context() as patch, Device():
        patch.setattr(site, "pick_device", lambda name: PLACE)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(), plan, tmp_path / "run", callbacks=[Cut()])
        found = train(tiny(), plan, tmp_path / "run", resume=True)
    alike = train(tiny(), plan.with_changes(record_views=False))
    assert_same(found, alike, exactly=path != "sealed network")


def test_what_a_gpu_would_refuse_raises() -> None:
    with Device() as device:
        layer = nn.Linear(2, 2).to(PLACE)
        there, here = torch.ones(3, 2).to(PLACE), torch.ones(3, 2)
        assert type(layer(there)) is Elsewhere and type(layer(there).cpu()) is torch.Tensor
        assert device.transfers == {"up": 3, "down": 1, "waiting": 3}
        for mixed in (lambda: there + here, lambda: there[torch.tensor([0])], lambda: layer(here)):
            with pytest.raises(RuntimeError, match="mixes tensors of two devices"):
                mixed()
        for hidden in (lambda: there[there > 0], lambda: there.nonzero()):
            with pytest.raises(RuntimeError, match="makes the host wait"):
                hidden()
        with pytest.raises(TypeError, match="bring it to the CPU first"):
            there.numpy()
        assert float(there.sum()) == 6.0 and device.transfers["down"] == 2


def test_indices_stay_on_the_device() -> None:
    rows, index = np.arange(3), Index(PLACE)
    with Device() as device:
        first = index(rows)
        assert index(rows) is first and device.transfers["up"] == 1
        assert index(np.arange(3)) is not first and device.transfers["up"] == 2
