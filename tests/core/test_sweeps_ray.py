"""Sweeps on a real Ray cluster: the same table as at home, also when a worker is killed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_cluster import Cluster, command, free_port, needs_ray, running_cluster
from sweep_helpers import FOUR, InProcess

from securevfl.errors import InputError
from securevfl.federation.actors import connect
from securevfl.sweeps import parse_sweep, run_sweep

LONG = FOUR.replace("epochs = 1", "epochs = 150").replace("'vafl', 'local'", "'vafl'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as started:
        yield started


def write(folder: Path, text: str) -> Path:
    (folder / "sweep.toml").write_text(text)
    return folder / "sweep.toml"


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("address", ["auto", "given"])
def test_the_table_is_the_local_one(cluster: Cluster, tmp_path: Path, address: str) -> None:
    file = write(tmp_path, FOUR)
    where = cluster.address if address == "given" else "auto"
    done = cluster.run("sweep", file, "--out", tmp_path / "ray", "--ray", where, "--json")
    assert json.loads(done.stdout)
    run_sweep(parse_sweep(FOUR), tmp_path / "here", executor=InProcess())
    assert (tmp_path / "ray" / "results.csv").read_bytes() == (tmp_path / "here" / "results.csv").read_bytes()


@needs_ray
@pytest.mark.slow
def test_a_killed_workers_point_is_run_again(cluster: Cluster, tmp_path: Path) -> None:
    file, out = write(tmp_path, LONG), tmp_path / "ray"
    started = command("sweep", file, "--out", out, "--ray", cluster.address, "--json")
    sweep = subprocess.Popen(started, env=cluster.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not list(out.glob("runs/*/metrics.jsonl")):  # a point is under way
            assert sweep.poll() is None
            time.sleep(0.05)
        victims = cluster.workers("run_alone")
        assert victims
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        _, errors = sweep.communicate(timeout=300)
    finally:
        sweep.kill()
    assert sweep.returncode == 0, errors
    with (out / "results.csv").open(newline="") as table:
        assert [row["status"] for row in csv.DictReader(table)] == ["ok", "ok"]
    run_sweep(parse_sweep(LONG), tmp_path / "here", executor=InProcess())
    assert (out / "results.csv").read_bytes() == (tmp_path / "here" / "results.csv").read_bytes()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Ray, were it installed, would find about its statistics when it starts."""
    found: list[str] = []
    fake = types.SimpleNamespace(init=lambda **_: found.append(os.environ["RAY_USAGE_STATS_ENABLED"]))
    monkeypatch.setitem(sys.modules, "ray", fake)
    return found


def test_nothing_is_sent_to_the_makers(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    connect("local")
    assert seen == ["0"]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:http", "127.0.0.1:0", ":80", "127.0.0.1:99999"])
def test_malformed_address(seen: list[str], address: str) -> None:
    with pytest.raises(InputError, match="HOST:PORT, auto or local"):
        connect(address)
    assert seen == []


@pytest.mark.parametrize("address", ["{}", "ray://{}", "auto"])
def test_a_dead_address_is_told_at_once(
    seen: list[str], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    dead = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", dead)
    with pytest.raises(InputError, match=r"no Ray cluster at .*refused.*ray start --head"):
        connect(address.format(dead))
    assert seen == []
