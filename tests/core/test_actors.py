"""Organisations in processes of their own: the same run as in one, and nothing of the others' data."""

from __future__ import annotations

import gc
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from near_pool import NearPool
from safetensors.numpy import load_file
from torch import nn

from securevfl import Plan, Run, VerticalData, load_run, train
from securevfl.algorithms import ALGORITHMS, Algorithm
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.vafl import VAFLParty, VAFLSync
from securevfl.errors import BudgetExceeded, DeadlockError, PlanError, ProtocolError
from securevfl.federation import actors
from securevfl.federation.folder import RunFolder
from securevfl.federation.stepped import SteppedNetwork, SteppedSite, pack_share, unpack_share
from securevfl.privacy.messages import Packet

TINY = "synthetic:rows=120,features=9,informative=6"
# Sealed shares are rounded at random; t-synchronous training asks who was first at the same instant.
APART = ("sealed", "vafl-tsync")
FEDERATED = sorted(name for name, each in ALGORITHMS.items() if each.federated and name not in APART)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[NearPool]:
    """Runs `on Ray` use sites in this process; returns those that were made."""
    found: list[NearPool] = []

    def make(address: str) -> NearPool:
        found.append(NearPool(address))
        return found[-1]

    monkeypatch.setattr(actors, "RayPool", make)
    return found


@pytest.fixture(scope="module")
def data() -> VerticalData:
    return VerticalData.load(TINY, parties=3)


def plan_of(name: str, **changes: Any) -> Plan:
    return Plan.from_flat({"unprotected": True, "algorithm": name, "epochs": 2, "batch": 32, **changes})


def both(data: VerticalData, plan: Plan, folder: Path) -> tuple[Run, Run]:
    return train(data, plan, folder / "here"), train(data, plan, folder / "away", ray="auto")


def models(run: Run) -> dict[str, np.ndarray]:
    files = sorted((Path(str(run.folder)) / "models").glob("*.safetensors"))
    return {f"{path.stem} {key}": tensor for path in files for key, tensor in load_file(path).items()}


def assert_same_models(one: Run, other: Run) -> None:
    first, second = models(one), models(other)
    assert first.keys() == second.keys() and {name.split()[0] for name in first} >= {"p0", "p1", "p2"}
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor, second[name], err_msg=name)


def without_wall(run: Run) -> dict[str, Any]:
    return {**run.result, "time": run.result["time"]["virtual"]}


# -- the same run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEDERATED)
def test_the_run_is_that_of_one_process(
    data: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Parties of one process may compute together, which rounds differently in the last bit.
    monkeypatch.setattr(VAFLSync, "combine", Algorithm.combine)
    plan = plan_of(name, latency=0.25 if name in ("vafl-sync", "flex") else 0.0)
    here, away = both(data, plan, tmp_path)
    assert away.metrics == here.metrics and without_wall(away) == without_wall(here)
    assert_same_models(here, away)


def test_who_was_first_is_settled_the_same_way_every_time(data: VerticalData, tmp_path: Path) -> None:
    plan = plan_of("vafl-tsync", wait_for=2)
    runs = [train(data, plan, tmp_path / name, ray="auto") for name in "ab"]
    assert runs[0].metrics == runs[1].metrics
    assert_same_models(*runs)


def test_computing_together_differs_in_rounding_alone(data: VerticalData, tmp_path: Path) -> None:
    here, away = both(data, plan_of("vafl-sync"), tmp_path)
    # float32 keeps 24 bits; two epochs of a few steps lose at most a handful of them.
    assert away.test == pytest.approx(here.test, rel=1e-5)


@pytest.mark.parametrize("protocol", ["plain-tree", "two-tree", "pairwise", "bfv"])
def test_secure_sums_give_the_same_model(data: VerticalData, tmp_path: Path, protocol: str) -> None:
    assert_same_models(*both(data, plan_of("fdml", protocol=protocol), tmp_path))


def test_sums_that_recover_give_the_same_run(tmp_path: Path) -> None:
    four = VerticalData.load(TINY, parties=4)
    # Speeds differ, as one process settles otherwise who is first at one moment.
    speeds = {"p0": 1.0, "p1": 0.9, "p2": 0.77, "p3": 0.61}
    plan = plan_of("vafl", protocol="pairwise", threshold=3, speeds=speeds)
    here, away = both(four, plan, tmp_path)
    assert away.metrics == here.metrics and without_wall(away) == without_wall(here)
    assert_same_models(here, away)


def test_ledgers_say_the_same(data: VerticalData, tmp_path: Path) -> None:
    plan = plan_of("fdml", sigma=1.0, insecure_reproducible_noise=True, record_views=True)
    here, away = both(data, plan, tmp_path)
    assert_same_models(here, away)
    for owner in data.parties:
        entries = [
            [entry(line) for line in (tmp_path / run / "ledger" / f"{owner}.jsonl").read_text().splitlines()]
            for run in ("here", "away")
        ]
        assert entries[0] == entries[1] and len(entries[0]) > 1


def entry(line: str) -> dict[str, Any]:
    content = json.loads(line)
    fresh = ("hash", "previous", "signature", "public_key")  # every process signs with a key of its own
    return {name: value for name, value in content.items() if name not in fresh}


def test_a_run_can_be_audited(data: VerticalData, tmp_path: Path) -> None:
    from securevfl import audit

    plan = plan_of("vafl", encoder_training="none", epsilon=4.0, record_views=True)
    run = train(data, plan, tmp_path / "run", ray="auto")
    assert audit(run, "none", data=data, canaries=-1).verdict == "holds"
    assert load_run(tmp_path / "run").result == run.result


def test_a_run_predicts_as_at_home(data: VerticalData, tmp_path: Path) -> None:
    rows = [np.array(block[:5]) for block in data.test]
    here, away = both(data, plan_of("fdml"), tmp_path)
    np.testing.assert_array_equal(here.predict(rows), away.predict(rows))


def test_sealed_training_has_its_dealer_elsewhere(
    data: VerticalData, tmp_path: Path, made: list[NearPool]
) -> None:
    here, away = both(data, plan_of("sealed", epochs=1), tmp_path)
    assert set(made[0].sites) == {"p1", "p2", "dealer"}
    assert away.result["messages"] == here.result["messages"] and away.result["loss"] == here.result["loss"]


@pytest.mark.parametrize("protocol", ["plain", "bfv"])
def test_a_server_without_features(
    data: VerticalData, tmp_path: Path, made: list[NearPool], protocol: str
) -> None:
    assert_same_models(*both(data, plan_of("fdml", label_holder="server", protocol=protocol), tmp_path))
    assert set(made[0].sites) == {"p0", "p1", "p2"} and made[0].closed


# -- who has what -------------------------------------------------------------------------------------------


def test_a_site_gets_its_own_block_alone(data: VerticalData) -> None:
    sent = pickle.dumps(pack_share(data, "p1"))
    for index, party in enumerate(data.parties):
        for part in (data.train, data.test):
            assert (part[index].tobytes() in sent) == (party == "p1")
    assert data.y_train.tobytes() not in sent and data.y_test.tobytes() not in sent
    share = unpack_share(pickle.loads(sent))
    np.testing.assert_array_equal(share.train[1], data.train[1])
    assert np.isnan(share.train[0]).all() and np.isnan(share.test[2]).all() and np.isnan(share.y_train).all()
    assert share.train[0].strides == (0, 0)  # takes no memory
    assert share.absent == ("p0", "p2") and share.labels_absent


def test_a_dealer_gets_no_block() -> None:
    images = VerticalData.load("digits", parties=2)
    share = unpack_share(pickle.loads(pickle.dumps(pack_share(images, "dealer"))))
    assert share.absent == images.parties and share.widths == images.widths
    assert (share.y_train < 0).all() and share.image_size == images.image_size


# -- interrupted, refused, stuck ----------------------------------------------------------------------------


class Interrupted:
    """A callback that ends the run after an epoch, as Ctrl-C would."""

    def on_start(self, plan: Plan) -> None: ...

    def on_epoch(self, line: dict[str, Any]) -> None:
        if line["epoch"] == 2:
            raise KeyboardInterrupt

    def on_finish(self, result: dict[str, Any]) -> None: ...

    def on_error(self, error: BaseException) -> None: ...


@pytest.mark.parametrize(("first", "second"), [("auto", "auto"), ("auto", None), (None, "auto")])
def test_an_interrupted_run_goes_on_anywhere(
    data: VerticalData, tmp_path: Path, made: list[NearPool], first: str | None, second: str | None
) -> None:
    plan = plan_of("fdml", epochs=4)
    whole = train(data, plan, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(data, plan, tmp_path / "cut", callbacks=[Interrupted()], ray=first)
    again = train(data, plan, tmp_path / "cut", resume=True, ray=second)
    assert_same_models(whole, again)
    assert again.metrics == whole.metrics and all(each.closed for each in made)


def test_a_budget_ends_training_as_at_home(data: VerticalData, tmp_path: Path) -> None:
    plan = plan_of("fdml", epochs=6, sigma=4.0, budget_epsilon=30.0)
    here, away = both(data, plan, tmp_path)
    assert here.stopped is not None and here.stopped.startswith("budget") and away.stopped == here.stopped
    assert away.privacy == here.privacy and away.result["epochs"] == here.result["epochs"]


def test_a_budget_too_small_is_told_from_afar(data: VerticalData, tmp_path: Path) -> None:
    plan = plan_of("fdml", sigma=0.5, budget_epsilon=0.5)
    with pytest.raises(BudgetExceeded, match="p1"):
        train(data, plan, tmp_path / "run", ray="auto")


@pytest.mark.parametrize(
    ("changes", "given", "reason"),
    [
        ({"algorithm": "central"}, {}, "'central' has a single participant"),
        ({}, {"out": None}, "needs an output folder"),
        ({}, {"encoders": {"p1": nn.Linear(3, 8)}}, "the plan's own encoders"),
        ({}, {"head": nn.Linear(8, 1)}, "the plan's own encoders and head"),
    ],
)
def test_what_cannot_be_spread_out(
    data: VerticalData,
    tmp_path: Path,
    made: list[NearPool],
    changes: dict[str, Any],
    given: dict[str, Any],
    reason: str,
) -> None:
    options = {"out": tmp_path / "run", "ray": "auto", **given}
    with pytest.raises(PlanError, match=reason):
        train(
            data,
            Plan.from_flat({"algorithm": "vafl", "unprotected": True, "epochs": 1, **changes}),
            **options,
        )
    assert not (tmp_path / "run").exists() and all(each.closed for each in made)


def test_a_deadlock_is_explained(data: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(self: VAFLParty) -> None:
        await self.link.receive()

    monkeypatch.setattr(VAFLParty, "epoch", deaf)
    with pytest.raises(DeadlockError, match=r"p1 waits for a message"):
        train(data, plan_of("vafl"), tmp_path / "run", ray="auto")


def test_a_site_that_cannot_be_built_closes_its_ledger(
    data: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: VAFLParty, *arguments: Any, **options: Any) -> None:
        raise PlanError("not here")

    monkeypatch.setattr(VAFLParty, "__init__", fail)
    plan, data = resolve(Plan(algorithm="vafl", epochs=1, unprotected=True), data)
    with pytest.raises(PlanError, match="not here"):
        SteppedSite("p1", plan, unpack_share(pack_share(data, "p1")), RunFolder(tmp_path))
    gc.collect()  # an open file would warn now, and warnings are errors


def test_a_message_for_somebody_else_is_refused() -> None:
    network = SteppedNetwork("a", {"a": "a", "b": "b", "c": "c"})
    for sender, receiver in (("b", "c"), ("a", "a"), ("x", "a"), ("b", "x")):
        with pytest.raises(ProtocolError, match="is not for a"):
            network.arrive(Packet(kind="k", sender=sender, receiver=receiver).to_bytes(), 0.0)
