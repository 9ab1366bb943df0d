"""Organisations train, predict and score on a device that is not there, see `tests/core/elsewhere.py`."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from elsewhere import PLACE, Device
from federation import Federation
from scoring import LINEAR, Scorers
from test_network_predict import Prediction, fine, new_rows, strangers

from securevfl.federation import site
from securevfl.settings.plan import Plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [Plan(algorithm="vafl-sync", epochs=1, unprotected=True), LINEAR],
    ids=["embeddings", "sealed"],
)
def test_training_predictions_and_the_scoring_service(tmp_path, plan, monkeypatch):
    helpers = ("dealer",) if plan.algorithm == "sealed" else ()
    federation = Federation(tmp_path, plan, helpers=helpers)
    monkeypatch.setattr(site, "pick_device", lambda name: PLACE)

    async def use() -> Any:
        async with scorers.running():
            return await scorers.score("new0001", "new0002")

    with Device() as device:
        asyncio.run(federation.run())
        prediction = Prediction(federation, new_rows(list(federation.tables)), strangers())
        fine(prediction.run())
        scorers = Scorers(federation)
        status, found = asyncio.run(use())
    assert list(prediction.scores()) == strangers()
    assert status == 200 and np.isfinite(list(found.values())).all()
    assert device.transfers["up"] and device.transfers["down"]
