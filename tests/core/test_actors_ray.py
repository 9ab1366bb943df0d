"""Organisations as actors of a real Ray cluster: the run of one process, also after a process was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ray_cluster import Cluster, command, needs_ray, running_cluster
from safetensors.numpy import load_file

pytestmark = [needs_ray, pytest.mark.slow]
PLAN = ["--data", "synthetic:rows=120,features=9,informative=6", "--parties", 3, "--batch", 32]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as started:
        yield started


def assert_same_models(one: Path, other: Path) -> None:
    for path in sorted((one / "models").glob("*.safetensors")):
        for key, tensor in load_file(path).items():
            np.testing.assert_array_equal(tensor, load_file(other / "models" / path.name)[key])


def test_the_run_is_that_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    plan = [
        "train",
        *PLAN,
        "--unprotected",
        "--algorithm",
        "fdml",
        "--protocol",
        "two-tree",
        "--epochs",
        2,
        "--json",
    ]
    here = json.loads(cluster.run(*plan, "--out", tmp_path / "here").stdout)
    away = json.loads(cluster.run(*plan, "--out", tmp_path / "away", "--ray", cluster.address).stdout)
    for result in (here, away):
        result["time"].pop("wall")
    assert away == here
    assert_same_models(tmp_path / "here", tmp_path / "away")


def test_a_killed_process_is_told_and_the_run_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    plan = ["train", *PLAN, "--unprotected", "--algorithm", "flex", "--epochs", 60]
    started = command(*plan, "--out", tmp_path / "away", "--ray", cluster.address)
    run = subprocess.Popen(started, env=cluster.environment, stderr=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "away" / "checkpoint.safetensors").exists():
            assert run.poll() is None
            time.sleep(0.05)
        victims = cluster.workers("SiteActor")
        assert len(victims) == 2
        os.kill(victims[0], signal.SIGKILL)
        _, errors = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 2 and errors.count("\n") == 1 and "has died; go on" in errors, errors
    cluster.run("train", "--resume", tmp_path / "away", "--ray", "auto")
    cluster.run(*plan, "--out", tmp_path / "here")
    assert_same_models(tmp_path / "here", tmp_path / "away")


def test_bad_input_from_afar_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    options = ["--algorithm", "vafl", "--sigma", 0.5, "--budget-epsilon", 0.5, "--ray", cluster.address]
    done = cluster.run("train", *PLAN, *options, "--out", tmp_path / "away", check=False)
    assert done.returncode == 4 and done.stderr.count("\n") == 1 and "owner 'p1'" in done.stderr
