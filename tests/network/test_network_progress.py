"""Everybody sees where a networked run is: epochs, epsilon spent and forecast, who is away."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from federation import Federation

from securevfl import Plan
from securevfl.accountants import gdp_epsilon
from securevfl.cli import network as command
from securevfl.network.monitoring import health_page, metrics_page
from securevfl.network.progress import RunProgress, forecast_mu, run_progress

PLAN = Plan(algorithm="vafl-sync", sigma=20.0, epochs=4, batch=16, delta=1e-3)


def followed(
    federation: Federation,
) -> tuple[dict[str, list[RunProgress]], dict[str, list[str]], dict[str, Any]]:
    """Runs everybody; what each was told after its epochs, what was said, and the last status of each."""
    told: dict[str, list[RunProgress]] = {}
    said: dict[str, list[str]] = {name: [] for name in federation.names}
    nodes = {federation.names[0]: federation.coordinator(say=said[federation.names[0]].append)}
    nodes |= {name: federation.member(name, say=said[name].append) for name in federation.members}
    for name, node in nodes.items():
        node.on_progress = told.setdefault(name, []).append

    async def play() -> None:
        async with asyncio.timeout(240):
            await asyncio.gather(*(node.run() for node in nodes.values()))

    asyncio.run(play())
    return told, said, {name: node.status() for name, node in nodes.items()}


def test_every_organisation_follows_its_own_spending(tmp_path: Path) -> None:
    told, said, status = followed(Federation(tmp_path, PLAN))
    assert set(told) == {"bank", "clinic", "shop"}
    for name in ("clinic", "shop"):
        steps = told[name]
        assert [now.epoch for now in steps] == [1, 2, 3, 4] and {now.epochs for now in steps} == {4}
        assert not any(now.away for now in steps)  # the two have no stream with each other and need none
        assert status[name]["peers"] == 1
        spent = [now.epsilon for now in steps]
        assert spent == sorted(spent) and spent[0] > 0
        # Every epoch releases equally much; batches of 16 of 48 rows come out even.
        assert steps[1].forecast == pytest.approx(spent[-1], rel=1e-6)
        assert steps[-1].forecast == spent[-1]
        shown = status[name]
        assert shown["epsilon"] >= spent[-1] and shown["epochs"] == 4 and shown["resumed_at"] == -1
        assert f'"epsilon": {shown["epsilon"]}' in health_page(shown)
        assert "securevfl_epsilon_forecast " in metrics_page(shown)
    assert not any("resumed" in line for lines in said.values() for line in lines)


def test_a_restart_says_where_it_resumed(tmp_path: Path) -> None:
    """A member's process ends after two epochs; its next one says so, and so does everybody who went back."""
    federation = Federation(tmp_path, PLAN)
    said: dict[str, list[str]] = {name: [] for name in federation.names}

    async def play() -> dict[str, Any]:
        first = federation.member("clinic", say=said["clinic"].append)
        others = [
            federation.coordinator(say=said["bank"].append),
            federation.member("shop", say=said["shop"].append),
        ]
        tasks = [asyncio.create_task(node.run()) for node in others]
        gone = asyncio.create_task(first.run())
        first.on_progress = lambda now: now.epoch == 2 and gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        again = federation.member("clinic", say=said["clinic"].append)
        async with asyncio.timeout(240):
            await asyncio.gather(again.run(), *tasks)
        return again.status()

    status = asyncio.run(play())
    resumed = [line for line in said["clinic"] if line.startswith("resumed at epoch")]
    assert len(resumed) == 1 and resumed[0] in ("resumed at epoch 1", "resumed at epoch 2")
    assert resumed[0] in said["shop"] and resumed[0] in said["bank"]
    assert f"resumed at epoch {status['resumed_at']}" == resumed[0]


def test_forecasts() -> None:
    half = run_progress(PLAN, mu=1.0, epoch=2, away=(), resumed=None)
    assert half.epsilon == gdp_epsilon(1.0, 1e-3) and half.forecast == gdp_epsilon(math.sqrt(2), 1e-3)
    limited = Plan(algorithm="vafl", epsilon=4.0, epochs=4, batch=16, budget_epsilon=4.0)
    assert run_progress(limited, mu=0.6, epoch=1, away=(), resumed=None).forecast <= 4.0
    frozen = Plan(algorithm="vafl", encoder_training="none", sigma=1.0, epochs=4)
    assert forecast_mu(frozen, 2.0, 1) == 2.0  # everything left at the start
    assert forecast_mu(PLAN, 2.0, 0) == 2.0


def test_the_line_names_who_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    now = run_progress(PLAN, mu=1.0, epoch=2, away=("clinic", "shop"), resumed=None)
    assert now.words == "epoch 2 of 4: epsilon 3.14 spent, about 4.85 at the end; away: clinic, shop"
    exact = run_progress(PLAN, mu=math.inf, epoch=2, away=(), resumed=None)
    assert exact.words == "epoch 2 of 4: exact values leave: no guarantee"
    follow = command._following(json=False)
    for epoch in range(1, 5):  # four epochs within a second: the first and the last are said
        follow(run_progress(PLAN, mu=1.0, epoch=epoch, away=(), resumed=None))
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "epoch 1 of 4",
        "epoch 4 of 4",
    ]
