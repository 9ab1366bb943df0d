"""Training over gRPC gives what training in one process gives."""

from __future__ import annotations

import asyncio
import json
import re
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashes import Process, run_with_crash
from federation import EVERYTHING, Federation, routes, together
from safetensors.torch import load_file

from securevfl import train
from securevfl.errors import InputError, NetworkError
from securevfl.network.coordinator import Coordinator
from securevfl.network.gathering import gather, load_truth
from securevfl.privacy.ledger import read_ledger, read_records
from securevfl.privacy.views import OPENED, View
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl", epochs=2, batch=16, learning_rate=0.5, unprotected=True)


def run(federation: Federation) -> dict:
    return asyncio.run(federation.run())


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in load_file(folder).items()}


TRAINED = [
    ("vafl-sync", "plain"),
    ("vafl-sync", "two-tree"),
    ("vafl-sync", "ckks"),
    ("fdml", "pairwise"),
    ("fdml", "bfv"),
    ("fsgd", "plain-tree"),
    ("fsvrg", "two-tree"),
    ("fsaga", "pairwise"),
    ("flex", "bfv"),
    ("p-bcd", "plain"),
]


@pytest.mark.parametrize(("algorithm", "protocol", "direct"), routes(TRAINED, {0, 1, 3, 4}))
def test_synchronous_training_gives_the_same_model(tmp_path, algorithm, protocol, direct):
    plan = PLAN.with_changes(algorithm=algorithm, protocol=protocol)
    federation = Federation(tmp_path, plan, direct=direct)
    results = run(federation)
    local = train(together(federation.tables, plan), plan, tmp_path / "local")
    # Secure sums are exact; all else differs by the order of float32 sums alone.
    tolerance = {"rtol": 0, "atol": 2e-6}
    for name in federation.names:
        own = weights(tmp_path / name / "models" / f"{name}.safetensors")
        for key, value in weights(tmp_path / "local" / "models" / f"{name}.safetensors").items():
            np.testing.assert_allclose(own[key], value, **tolerance)
    assert results["bank"]["test"]["loss"] == pytest.approx(local.test["loss"], abs=1e-4)
    found = {name: each["privacy"][name]["releases"] for name, each in results.items() if each["privacy"]}
    expected = {name: spend["releases"] for name, spend in local.privacy.items()}
    assert found == expected


@pytest.mark.parametrize(
    "algorithm",
    ["vafl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("afsgd", "afsvrg")), "afsaga"],
)
def test_asynchronous_training_comes_close(tmp_path, algorithm):
    protocol = "plain" if algorithm == "vafl" else "two-tree"
    plan = PLAN.with_changes(algorithm=algorithm, protocol=protocol, epochs=12)
    federation = Federation(tmp_path, plan, rows=200)
    results = run(federation)
    local = train(together(federation.tables, plan), plan)
    # Who steps when is chance here. Both are close to the same optimum: AUC 1 on separable data.
    assert results["bank"]["test"]["auc"] > 0.9
    assert abs(results["bank"]["test"]["auc"] - local.test["auc"]) < 0.08


def test_sealed_training_with_a_dealer(tmp_path):
    plan = Plan(algorithm="sealed", epochs=4, scaling="none", epsilon=0.0, unprotected=True)
    federation = Federation(tmp_path, plan, helpers=("dealer",))
    results = run(federation)
    local = train(together(federation.tables, plan), plan)
    assert results["bank"]["test"]["accuracy"] is None and results["bank"]["test"]["se"] > 0
    assert results["bank"]["test_is"].startswith("from noisy totals")
    assert local.result["test_is"].startswith("exact, by the simulator")
    opened = [{n: v for n, v in r["evaluation"].items() if v} for r in (results["bank"], local.result)]
    assert opened[0] == pytest.approx(opened[1], abs=0.02)
    assert results["dealer"]["privacy"] == {}
    assert all(each["prediction"] == {} for each in results.values())


def test_every_organisation_keeps_its_own_files(tmp_path):
    plan = PLAN.with_changes(algorithm="vafl-sync", sigma=0.5, record_views=True)
    federation = Federation(tmp_path, plan)
    run(federation)
    for name in federation.names:
        folder = tmp_path / name
        assert [path.name for path in (folder / "ledger").iterdir()] == [f"{name}.jsonl"]
        assert [path.name for path in (folder / "views").iterdir()] == [name]
        models = {path.stem for path in (folder / "models").iterdir()}
        assert models == ({name, "server"} if name == "bank" else {name})
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {record.owner for record in read_records(folder)} <= {name}
    # What others hold is nowhere in an organisation's folder: no value of their tables, in any form.
    for name in federation.names:
        blob = b"".join(path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file())
        for other in set(federation.names) - {name}:
            block = federation.tables[other].block
            assert not any(block[row].tobytes() in blob for row in range(len(block)))


def test_totals_stand_in_the_view_of_whoever_opened_them(tmp_path):
    plan = PLAN.with_changes(algorithm="vafl-sync", protocol="pairwise", epochs=1, record_views=True)
    federation = Federation(tmp_path, plan)
    run(federation)
    train(together(federation.tables, plan), plan, tmp_path / "local")
    opened = {
        name: [seen.fields["values"] for seen in View(tmp_path / name / "views" / name).messages(OPENED)]
        for name in federation.names
    }
    local = [seen.fields["values"] for seen in View(tmp_path / "local" / "views" / "bank").messages(OPENED)]
    assert {name for name, values in opened.items() if values} == {"bank"}
    assert len(local) == len(opened["bank"]) > 3
    for here, there in zip(local, opened["bank"], strict=True):
        np.testing.assert_allclose(here, there, atol=2e-6)


@pytest.mark.parametrize(
    ("algorithm", "protocol"),
    [("fdml", "plain"), ("fdml", "bfv"), ("flex", "pairwise"), ("vafl-sync", "pairwise")],
)
def test_a_coordinator_with_labels_alone(tmp_path, algorithm, protocol):
    plan = PLAN.with_changes(algorithm=algorithm, protocol=protocol, record_views=True)
    federation = Federation(tmp_path, plan, parties=("bank", "clinic", "shop", "stranger"))
    own = federation.tables["bank"]
    federation.tables["bank"] = replace(own, columns=(), block=own.block[:, :0], bounds=None)
    results = run(federation)
    assert np.isfinite(results["bank"]["test"]["loss"])
    seen = {record.kind: record.observers for record in read_records(tmp_path / "shop")}
    assert seen["embedding"] == ("bank", "clinic", "stranger")
    if protocol == "bfv":  # no number per record reaches it: ciphertexts, losses and metrics do
        received = list(View(tmp_path / "bank" / "views" / "bank").messages(sent=False))
        assert {each.kind for each in received} == {"ready", "he-value", "loss", "metrics"}
        assert seen["evaluation"] == ("bank", "clinic") and seen["contributions"] == ("bank",)


def test_budget_ends_training_everywhere(tmp_path):
    plan = PLAN.with_changes(algorithm="vafl-sync", sigma=20.0, epochs=6, budget_epsilon=9.0, delta=1e-5)
    federation = Federation(tmp_path, plan)
    results = run(federation)
    assert results["bank"]["stopped"].startswith("budget")
    for name in ("clinic", "shop"):
        assert 0 < results[name]["privacy"][name]["epsilon"] <= 9.0 * (1 + 1e-9)


def test_randomised_labels_are_flipped_once(tmp_path):
    plan = PLAN.with_changes(algorithm="vafl-sync", label_epsilon=1.0)
    federation = Federation(tmp_path, plan)
    run(federation)
    kinds = [record.kind for record in read_records(tmp_path / "bank")]
    assert kinds.count("randomised labels") == 1


def test_a_party_that_does_not_accept_stops_the_run(tmp_path):
    federation = Federation(tmp_path, PLAN)
    refusing = replace(federation.members["clinic"], accept=replace(EVERYTHING, epsilon=1.0))
    federation.members["clinic"] = refusing

    async def attempt():
        nodes = [federation.coordinator(), federation.member("clinic"), federation.member("shop")]
        return await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    bank, clinic, shop = asyncio.run(attempt())
    assert isinstance(clinic, InputError)
    assert "no budget" in str(clinic)
    assert "clinic stops: it does not accept what is proposed" in str(bank)
    assert isinstance(shop, NetworkError)
    for name in ("clinic", "bank"):  # records were aligned, and nothing was released
        entries = read_ledger(tmp_path / name / "ledger" / f"{name}.jsonl")
        assert [entry.content["kind"] for entry in entries] == ["session", "alignment"]


def test_others_are_not_told_the_text_of_an_unforeseen_error(tmp_path, monkeypatch):
    federation = Federation(tmp_path, PLAN)
    clinic = federation.member("clinic")

    async def fail(*_: object) -> None:
        raise ValueError("cannot convert 'diagnosis of person 17'")

    monkeypatch.setattr(clinic, "work", fail)

    async def attempt():
        nodes = [federation.coordinator(), clinic, federation.member("shop")]
        return await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    bank, own, shop = asyncio.run(attempt())
    assert "person 17" in str(own)
    assert "clinic stops: something failed there" in str(bank)
    assert "person 17" not in str(bank) + str(shop)


def test_private_alignment_keeps_the_common_records(tmp_path):
    federation = Federation(tmp_path, PLAN.with_changes(algorithm="vafl-sync"), align="private")
    for name, kept in (("clinic", slice(5, None)), ("shop", slice(None, 50))):
        table = federation.tables[name]
        order = np.random.default_rng(1).permutation(len(table.ids[kept]))
        federation.tables[name] = replace(table, ids=table.ids[kept][order], block=table.block[kept][order])
    run(federation)
    common = [f"id{i:04d}" for i in range(5, 50)]
    for name in federation.names:
        assert json.loads((tmp_path / name / "alignment.json").read_text()) == common
    local = {
        name: replace(
            table,
            block=table.block[[table.ids.tolist().index(each) for each in common]],
            ids=np.array(common),
            labels=None if table.labels is None else table.labels[5:50],
        )
        for name, table in federation.tables.items()
    }
    plan = federation.plan
    expected = train(together(local, plan), plan, tmp_path / "local")
    for name in federation.names:
        own = weights(tmp_path / name / "models" / f"{name}.safetensors")
        for key, value in weights(tmp_path / "local" / "models" / f"{name}.safetensors").items():
            np.testing.assert_allclose(own[key], value, rtol=0, atol=2e-6)
    assert expected.test["auc"] is not None


def test_different_ids_are_found_before_training(tmp_path):
    federation = Federation(tmp_path, PLAN)
    table = federation.tables["shop"]
    federation.tables["shop"] = replace(table, ids=np.array([f"x{each}" for each in table.ids]))

    async def attempt():
        nodes = [federation.coordinator(), federation.member("clinic"), federation.member("shop")]
        return await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    bank, *_ = asyncio.run(attempt())
    # Whoever compares first says it, and the bank hears it from there or finds it itself.
    assert "exactly the same IDs" in str(bank) or "stops: the records of the organisations" in str(bank)


def differently_spelled(federation: Federation) -> None:
    """The same people, written in another way by the clinic, and in another order."""
    table = federation.tables["clinic"]
    order = np.random.default_rng(1).permutation(len(table.ids))
    ids = np.array([f" {each.upper()} " for each in table.ids[order]])
    federation.tables["clinic"] = replace(table, ids=ids, block=table.block[order])


@pytest.mark.parametrize("align", ["private", "none"])
@pytest.mark.parametrize("crash", [False, True], ids=["undisturbed", "restarted"])
def test_ids_that_are_spelled_differently_are_the_same_people(tmp_path, align, crash):
    plan = Plan(algorithm="vafl-sync", epochs=2, batch=16, seed=7, unprotected=True)
    given = Federation(tmp_path / "net", plan, align=align, normalise="trim-casefold")
    expected = train(together(given.tables, plan), plan)
    differently_spelled(given)
    if crash:
        arm = partial(Process.crash_before_telling, kind="done", count=2)
        _, results = asyncio.run(run_with_crash(given, "clinic", arm))
    else:
        results = asyncio.run(given.run())
    assert results["bank"]["test"]["loss"] == pytest.approx(expected.test["loss"], abs=1e-4)
    gather([tmp_path / "net" / name for name in given.names], tmp_path / "joint")
    truth = load_truth(tmp_path / "joint", given.tables)
    assert all(str(each) == str(each).strip().casefold() for each in truth.ids_train)
    for party, block in zip(truth.parties, truth.train, strict=True):
        places = {str(each).strip().casefold(): row for row, each in enumerate(given.tables[party].ids)}
        rows = [places[str(each)] for each in truth.ids_train]
        np.testing.assert_array_equal(block, given.tables[party].block[rows])


def attempt(given: Federation, bank: Coordinator | None = None) -> dict[str, str]:
    """What everybody ends with."""

    async def play() -> list[object]:
        nodes = [bank or given.coordinator(), *(given.member(name) for name in given.members)]
        return await asyncio.gather(*(node.run() for node in nodes), return_exceptions=True)

    return dict(zip(given.names, map(str, asyncio.run(play())), strict=True))


def test_two_records_that_become_the_same_are_named_to_their_owner_alone(tmp_path):
    given = Federation(
        tmp_path, Plan(algorithm="vafl", epochs=1, unprotected=True), normalise="trim-casefold"
    )
    table = given.tables["clinic"]
    ids = np.array([*table.ids[:-1], table.ids[0].upper()])
    given.tables["clinic"] = replace(table, ids=ids)
    ended = attempt(given)
    assert "remove duplicates first" in ended["clinic"]
    assert "clinic stops: its own data cannot be used" in ended["bank"]
    assert "own data cannot be used" in ended["shop"]
    assert not re.search("id0000", ended["bank"] + ended["shop"], re.IGNORECASE)


@pytest.mark.parametrize("label", ["17", "ill"])
def test_nobody_learns_a_label_from_labels_that_cannot_be_used(tmp_path, label):
    """A party that brings one record alone would else be told the label of its choice."""
    given = Federation(
        tmp_path,
        Plan(algorithm="vafl", epochs=1, unprotected=True),
        task="regression" if label == "ill" else "",
    )
    given.tables["bank"] = replace(given.tables["bank"], labels=np.array([label] * 60))
    ended = attempt(given)
    assert "labels are" in ended["bank"]
    for name in ("clinic", "shop"):
        assert "its own data cannot be used" in ended[name]
    assert not any(re.search(rf"\b{label}\b", said) for said in ended.values())


def test_a_coordinator_cannot_find_ids_in_one_way_and_keep_them_in_another(tmp_path):
    """Records would be known by IDs that are not those of later predictions, and would not pay again."""
    given = Federation(tmp_path, Plan(algorithm="vafl", epochs=1, unprotected=True))
    loud = {name: replace(table, ids=np.char.upper(table.ids)) for name, table in given.tables.items()}
    given.tables = loud
    bank = given.coordinator()
    tell = bank.mesh.tell

    def lying(peer: str, kind: str, **fields: Any) -> None:
        if kind == "invite":
            fields["invitation"] = fields["invitation"].replace('"exact"', '"trim-casefold"')
        tell(peer, kind, **{**fields, "normalise": "trim-casefold"} if kind == "align" else fields)

    bank.mesh.tell = lying
    ended = attempt(given, bank)
    assert any("aligns in another way" in said for said in ended.values())
    assert not any("id0" in said.casefold() for said in ended.values())
