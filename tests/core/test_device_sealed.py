"""Every kind of sealed training on a device that is not there; see `test_device`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elsewhere import PLACE, Device
from round_data import tiny

from securevfl import Plan, VerticalData, train
from securevfl.federation import site
from securevfl.federation.callbacks import Callback

NUMBERS = {"label_low": -10.0, "label_high": 10.0}
LINEAR = {"model": "linear", "epochs": 2, "epsilon": 8.0, "scaling": "none"}
PATHS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "three without a dealer": ("three", LINEAR, {"dealer": "none"}),
    "members that may cheat": ("three", LINEAR, {"adversary": "malicious"}),
    "several classes": ("classes", LINEAR, {}),
    "numbers": ("numbers", LINEAR, NUMBERS),
    "a card": ("three", {"model": "scorecard", "epsilon": 60.0}, {}),
    "a card without a dealer": ("three", {"model": "scorecard", "epsilon": 60.0}, {"dealer": "none"}),
    "a card of several classes": ("classes", {"model": "scorecard", "epsilon": 60.0}, {}),
    "a stack": ("three", {"model": "scorecard", "epsilon": 60.0}, {"stack": True}),
    "a card of numbers": ("numbers", {"model": "scorecard", "epsilon": 60.0}, NUMBERS),
}
SLOW = {
    "two without a dealer": ("two", LINEAR | {"epsilon": 2.0}, {"dealer": "none"}),
    "a card of two without a dealer": ("two", {"model": "scorecard", "epsilon": 12.0}, {"dealer": "none"}),
}


def data_of(kind: str) -> VerticalData:
    if kind == "numbers":
        draw = np.random.default_rng(5)
        blocks = [draw.uniform(-1, 1, (250, 3)) for _ in range(2)]
        labels = blocks[0][:, 0] - 2 * blocks[1][:, 0] + 0.1 * draw.normal(size=250)
        return VerticalData.from_arrays(blocks, labels, task="regression", bounds=[(-1.0, 1.0)] * 2)
    return tiny(parties=2 if kind == "two" else 3, rows=250, classes=3 if kind == "classes" else 2)


class Transfers(Callback):
    """Transfers that every epoch has added."""

    def __init__(self, device: Device) -> None:
        self.device, self.counts = device, list[int]()

    def on_epoch(self, line: Mapping[str, Any]) -> None:
        self.counts.append(sum(self.device.transfers.values()))


@pytest.mark.parametrize("path", [*PATHS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_training(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, fields, settings = (PATHS | SLOW)[path]
    plan, picked = Plan(algorithm="sealed", settings=settings, **fields), list[str]()

    def pick(name: str) -> Any:
        picked.append(name)
        return PLACE

    with monkeypatch.context() as patch, Device() as device:
        patch.setattr(site, "pick_device", pick)
        seen = Transfers(device)
        found = train(data_of(kind), plan, callbacks=[seen])
    assert picked
    assert all(value is not None and np.isfinite(value) for value in found.test.values())
    # Sealed arithmetic is the CPU's: an iteration looks at parameters, and takes no records up.
    parameters = sum(len(list(model.parameters())) for model in found.encoders.values())
    steps = np.diff(seen.counts)
    assert (steps <= 4 * parameters + 4).all(), seen.counts


def test_a_card_that_begins_with_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of("three")
    with monkeypatch.context() as patch, Device():
        patch.setattr(site, "pick_device", lambda name: PLACE)
        train(data, Plan(model="profile", epsilon=20.0), tmp_path / "profile")
        card = train(
            data, Plan(model="scorecard", epsilon=60.0), tmp_path / "card", profile=tmp_path / "profile"
        )
    assert card.test["auc"] is not None
    assert card.plan.settings.profile_epsilon == 20.0
