"""Seeded faults keep up with the code: each finds what it replaces, and a run with it is another run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from warm import cold

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def work() -> Any:
    with pytest.MonkeyPatch.context() as patch, cold():
        patch.syspath_prepend(str(ROOT))
        patch.chdir(ROOT)
        yield importlib.import_module("benchmarks.faults.work")


@pytest.fixture(scope="module")
def sound(work: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run without a fault leaves behind, by case; made when asked for."""
    known: dict[str, Any] = {}

    def of(case: str) -> Any:
        if case not in known:
            folder = tmp_path_factory.mktemp("sound")
            known[case] = work.apart(work.fingerprint, work.WITHOUT, case, folder / "first")
            again = work.apart(work.fingerprint, work.WITHOUT, case, folder / "second")
            assert "broken" not in again and again == known[case], "a run with fixed entropy repeats itself"
        return known[case]

    return of


def names() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        importlib.import_module("benchmarks.faults.work")
        return list(importlib.import_module("benchmarks.faults.contract").FAULTS)


def test_the_catalogue_is_whole(work: Any) -> None:
    cases = importlib.import_module("benchmarks.faults.cases").CASES
    assert len(work.FAULTS) >= 60
    for fault in work.FAULTS.values():
        assert fault.applies and set(fault.applies) <= set(cases), fault.name
        assert fault.leaves_trace != bool(fault.needs), fault.name


def test_a_fault_follows_the_code(work: Any) -> None:
    with pytest.raises(AttributeError, match="has no gone; the fault must follow the code"):
        importlib.import_module("benchmarks.faults.contract").swap(Path, "gone", lambda honest: honest)


def test_every_patch_finds_what_it_replaces(work: Any) -> None:
    assert work.apart(work.patched, list(work.FAULTS)) == {"broken": {}}


FEW = (
    "noise-halved",
    "entry-row-missing",
    "update-noise-unused",
    "share-off",
    "mask-zero",
    "sealed-noise-off",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in names()]
)
def test_a_fault_changes_the_run(name: str, work: Any, sound: Any, tmp_path: Path) -> None:
    case = work.FAULTS[name].applies[0]
    found = work.apart(work.fingerprint, name, case, tmp_path / "run")
    assert "broken" not in found, found
    assert found != sound(case)


def test_an_outcome_is_told_from_what_a_sound_run_is_told(work: Any) -> None:
    sound = {"verdict": "holds", "cells": {"p1 > p0": "holds"}, "words": ["3 of 4 checked"]}
    assert work.outcome(sound, sound) == "silent"
    assert work.outcome(sound | {"words": ["2 of 4 checked"]}, sound) == "silent", "figures alone differ"
    assert work.outcome(sound | {"words": ["a head is missing"]}, sound) == "mentioned"
    assert work.outcome(sound | {"cells": {"p1 > p0": "no guarantee"}}, sound) == "mentioned"
    assert work.outcome(sound | {"verdict": "violated"}, sound) == "violated"
    alarm = sound | {"verdict": "violated"}
    assert work.outcome(alarm, alarm) == "silent", "a sound run is told the same"
    untested = sound | {"cells": {"p1 > p0": "not tested"}}
    assert work.outcome(untested, untested) == "not tested"
