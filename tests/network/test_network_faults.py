"""Processes die and come back at every step of a run: nothing is lost, and the model is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from crashes import Process, check_ledgers, finish, models, processes, run_with_crash
from federation import Federation

from securevfl.accountants.gdp import gdp_epsilon
from securevfl.algorithms import find_algorithm
from securevfl.errors import NetworkError
from securevfl.plan import Plan

Arm = Callable[[Process], None]


def plan(algorithm: str = "vafl-sync", **changes: object) -> Plan:
    settings = {"epochs": 3, "batch": 16, "evaluate_every": 1, "record_views": False, "seed": 7}
    defaults = find_algorithm(algorithm).defaults
    return Plan.from_mapping({**defaults, "algorithm": algorithm, **settings, **changes})


def told(kind: str, count: int = 1) -> Arm:
    return partial(Process.crash_when_told, kind=kind, count=count)


def telling(kind: str, count: int = 1) -> Arm:
    return partial(Process.crash_before_telling, kind=kind, count=count)


def within(part: str, posts: int = 1) -> Arm:
    return partial(Process.crash_in_phase, part=part, posts=posts)


@cache
def undisturbed(protocol: str, direct: bool) -> dict[str, np.ndarray]:
    with TemporaryDirectory() as folder:
        federation = Federation(Path(folder), plan(protocol=protocol), direct=direct)
        asyncio.run(federation.run())
        return models(Path(folder))


def same_model(tmp_path: Path, victim: str, arm: Arm, protocol: str = "plain", direct: bool = False) -> None:
    federation = Federation(tmp_path, plan(protocol=protocol), direct=direct)
    found, results = asyncio.run(run_with_crash(federation, victim, arm))
    check_ledgers(federation, found)
    assert all(each["epochs"] == 3 and each["stopped"] is None for each in results.values())
    expected, got = undisturbed(protocol, direct), models(tmp_path)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=2e-6, err_msg=name)


MEMBER = {
    "join": telling("join"),
    "introduction": told("introduction", 2),
    "meet": told("meet"),
    "met": telling("met"),
    "align": told("compare"),
    "aligned": telling("compared"),
    "propose": told("propose"),
    "confirmed": telling("confirmed"),
    "agreed": told("agreed"),
    "before the first phase": told("begin"),
    "epoch": within("epoch", 2),
    "done": telling("done", 2),
    "evaluate": within("evaluate"),
    "final": within("final"),
    "finish": told("finish"),
    "finished": telling("finished"),
    "goodbye": told("goodbye"),
}
COORDINATOR = {
    "join": told("join", 2),
    "introduce": telling("introduction", 2),
    "met": told("met"),
    "compare": telling("compare", 2),
    "compared": told("compared", 2),
    "propose": telling("propose", 2),
    "confirmed": told("confirmed", 2),
    "agreed": telling("agreed", 2),
    "begin": telling("begin", 2),
    "epoch": within("epoch", 3),
    "done": told("done", 4),
    "evaluate": within("evaluate"),
    "final": within("final"),
    "finish": telling("finish", 2),
    "finished": told("finished", 2),
}


@pytest.mark.parametrize("step", MEMBER)
def test_a_party_dies_and_starts_again(tmp_path, step):
    same_model(tmp_path, "clinic", MEMBER[step])


@pytest.mark.parametrize("step", COORDINATOR)
def test_the_coordinator_dies_and_starts_again(tmp_path, step):
    same_model(tmp_path, "bank", COORDINATOR[step])


@pytest.mark.parametrize("direct", [False, True], ids=["relayed", "direct"])
@pytest.mark.parametrize(
    ("victim", "arm"),
    [
        ("clinic", told("meet")),
        ("clinic", within("epoch", 3)),
        ("shop", within("final")),
        ("bank", within("epoch", 4)),
    ],
    ids=["meet", "epoch", "final", "coordinator"],
)
def test_a_protocol_between_parties_starts_again(tmp_path, victim, arm, direct):
    same_model(tmp_path, victim, arm, protocol="two-tree", direct=direct)
