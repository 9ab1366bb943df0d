"""Predicting over gRPC with a model that was trained over gRPC: right, counted, confirmed, never repeated."""

from __future__ import annotations

import asyncio
import csv
import json
import math
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import EVERYTHING, Federation, free_port, routes
from test_network_config import OUTLINE
from test_network_page import PAGE, Page, everybody

from securevfl import load_run
from securevfl.accountants.modes import privacy_matrix
from securevfl.attacks.source import Source
from securevfl.auditing.predicted import Predicted
from securevfl.auditing.verdicts import Verdict
from securevfl.cli import main
from securevfl.data.share import OwnTable
from securevfl.errors import (
    NOTICES,
    BudgetExceeded,
    DataError,
    Deviation,
    InputError,
    NetworkError,
    ProtocolError,
    RunError,
)
from securevfl.federation.folder import RunFolder
from securevfl.federation.site import checked_encoder
from securevfl.federation.trained import Trained
from securevfl.models import load_module
from securevfl.network.agreement import Proposal, commitments
from securevfl.network.authority import create_authority, issue
from securevfl.network.coordinator import Coordinator
from securevfl.network.folders import commitment
from securevfl.network.gathering import gather, load_truth
from securevfl.network.member import Member
from securevfl.network.participant import PeerStops
from securevfl.network.prediction import PredictionPurpose
from securevfl.privacy.ledger import read_ledger, read_records
from securevfl.privacy.views import View, read_heads
from securevfl.protocols import FixedPoint
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", epochs=2, batch=16, learning_rate=0.5, unprotected=True)
COUNT = 7
REQUEST = Proposal(
    run="test",
    trained="a" * 64,
    members={"bank": "1" * 64, "clinic": "2" * 64},
    alignment="none",
    records=3,
    ids="b" * 64,
    numbers="c" * 64,
    token="d" * 32,
)


def new_rows(names: Sequence[str], count: int = COUNT, seed: int = 5) -> dict[str, np.ndarray]:
    """New people's features, by party."""
    generator = np.random.default_rng(seed)
    return {name: generator.uniform(-1, 1, (count, 3)).astype(np.float32) for name in names}


def strangers(count: int = COUNT, first: int = 0) -> list[str]:
    return [f"new{i:03d}" for i in range(first, first + count)]


class Prediction:
    """All processes of one prediction, with a file of new records for each.

    Args:
        federation: Who, with their configurations as in training.
        blocks: Party -> features of the new records.
        ids: Their IDs, for everybody or by party.
        out: Name of the scores' file.
    """

    def __init__(
        self,
        federation: Federation,
        blocks: Mapping[str, np.ndarray],
        ids: Sequence[str] | Mapping[str, Sequence[str]],
        out: str = "scores.csv",
    ) -> None:
        self.federation, self.said = federation, dict[str, list[str]]()
        self.out = federation.folder / out
        self.files = {}
        for name, block in blocks.items():
            mine = ids[name] if isinstance(ids, Mapping) else ids
            self.files[name] = write_table(federation.folder / f"new-{name}.csv", mine, block)

    def coordinator(self) -> Any:
        name = self.federation.names[0]
        purpose = PredictionPurpose(self.files[name], self.out)
        return Coordinator(self.federation.server, purpose, say=self._listener(name))

    def member(self, name: str, **options: Any) -> Any:
        purpose = PredictionPurpose(self.files.get(name, Path("-")))
        return Member(self.federation.members[name], purpose, say=self._listener(name), **options)

    def _listener(self, name: str) -> Any:
        return self.said.setdefault(name, []).append

    def nodes(self) -> dict[str, Any]:
        members = {name: self.member(name) for name in self.federation.members}
        return {self.federation.names[0]: self.coordinator()} | members

    def run(self, **given: Any) -> dict[str, Any]:
        """Runs everybody, or what is given instead; organisation -> result or error."""

        async def all_of_them() -> list[Any]:
            async with asyncio.timeout(240):
                return await asyncio.gather(*(node.run() for node in nodes.values()), return_exceptions=True)

        nodes = self.nodes() | given
        return dict(zip(nodes, asyncio.run(all_of_them()), strict=True))

    def scores(self) -> dict[str, list[float]]:
        with self.out.open(newline="") as file:
            _, *lines = csv.reader(file)
        return {line[0]: [float(cell) for cell in line[1:]] for line in lines}


def write_table(path: Path, ids: Sequence[str], block: np.ndarray) -> Path:
    """Columns in another order than in training, and one that training never had."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["note", "x2", "id", "x0", "x1"])
        table.writerows(
            ["?", row[2], each, row[0], row[1]] for each, row in zip(ids, block.tolist(), strict=True)
        )
    return path


def trained(folder: Path, plan: Plan = PLAN, **options: Any) -> Federation:
    federation = Federation(folder, plan, **options)
    asyncio.run(federation.run())
    return federation


def joint_predictions(
    federation: Federation, blocks: Mapping[str, np.ndarray], ids: Sequence[str]
) -> np.ndarray:
    """What the model gives in one process, from everybody's folder; its ledgers are copies."""
    folder = federation.folder
    gather([folder / name for name in federation.names if name != "dealer"], folder / "joint")
    return load_run(folder / "joint").predict(dict(blocks), ids=list(ids))


def predictions_of(folder: Path) -> list[Any]:
    return [record for record in read_records(folder) if record.kind == "prediction"]


def fine(results: Mapping[str, Any]) -> None:
    for name, each in results.items():
        assert isinstance(each, dict), f"{name}: {each!r}"


def said(results: Mapping[str, Any], text: str) -> bool:
    """Whether somebody ends with a text; others are told less."""
    return any(text in str(each) for each in results.values())


# -- scores -------------------------------------------------------------------------------------------------


SCORED = [
    ("vafl-sync", "plain"),
    ("vafl-sync", "two-tree"),
    ("vafl-sync", "bfv"),
    ("vafl", "pairwise"),
    ("flex", "plain-tree"),
    ("fdml", "ckks"),
    ("fsgd", "two-tree"),
]


@pytest.mark.parametrize(("algorithm", "protocol", "direct"), routes(SCORED, {1, 3}))
def test_scores_are_those_of_the_same_model_in_one_process(tmp_path, algorithm, protocol, direct):
    federation = trained(tmp_path, PLAN.with_changes(algorithm=algorithm, protocol=protocol), direct=direct)
    blocks, ids = new_rows(federation.names), strangers()
    prediction = Prediction(federation, blocks, ids)
    fine(prediction.run())
    expected = joint_predictions(federation, blocks, ids)
    found = prediction.scores()
    assert list(found) == ids
    assert len(set(np.round(expected, 4))) > 3  # the model tells people apart
    # Both take float32 embeddings; CKKS sums are exact to 2^-20.
    np.testing.assert_allclose([found[each][0] for each in ids], expected, rtol=0, atol=3e-6)
    assert stat.S_IMODE(prediction.out.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("algorithm", "protocol"), [("fdml", "plain"), ("fdml", "bfv"), ("flex", "pairwise")]
)
def test_a_coordinator_with_labels_alone(tmp_path, algorithm, protocol):
    """FDML's bias is then trained by another organisation, and must be in the scores all the same."""
    plan = PLAN.with_changes(algorithm=algorithm, protocol=protocol)
    federation = Federation(tmp_path, plan, parties=("bank", "clinic", "shop", "stranger"))
    own = federation.tables["bank"]
    labels = np.where(np.arange(60) % 6, 1, own.labels)  # mostly 1, so that the bias matters
    federation.tables["bank"] = replace(own, columns=(), block=own.block[:, :0], bounds=None, labels=labels)
    asyncio.run(federation.run())
    blocks = new_rows(("bank", "clinic", "shop", "stranger"))
    prediction = Prediction(federation, blocks, strangers())
    fine(prediction.run())
    del blocks["bank"]
    expected = joint_predictions(federation, blocks, strangers())
    found = [prediction.scores()[each][0] for each in strangers()]
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)
    assert predictions_of(tmp_path / "bank") == []


def test_an_encoder_of_its_own(tmp_path):
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\ndef build(columns, width):\n    return nn.Linear(columns, width, False)\n"
    )
    federation = Federation(tmp_path, PLAN.with_changes(embedding=4))
    federation.members["clinic"] = replace(federation.members["clinic"], encoder="own.py:build")
    asyncio.run(federation.run())
    blocks = new_rows(federation.names)
    prediction = Prediction(federation, blocks, strangers())
    fine(prediction.run())
    gather([tmp_path / name for name in federation.names], tmp_path / "joint")
    run = load_run(tmp_path / "joint", encoders={"clinic": torch.nn.Linear(3, 4, bias=False)})
    found = [prediction.scores()[each][0] for each in strangers()]
    np.testing.assert_allclose(found, run.predict(blocks, ids=strangers()), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "plan",
    [
        PLAN.with_changes(sigma=1.0, unprotected=False),
        PLAN.with_changes(sigma=1.0, unprotected=False, protocol="two-tree"),
        Plan(algorithm="sealed", epochs=1, scaling="none", epsilon=8.0),
    ],
    ids=["plain", "two-tree", "sealed"],
)
def test_a_joint_audit_recomputes_what_was_predicted(tmp_path, plan):
    helpers = ("dealer",) if plan.algorithm == "sealed" else ()
    federation = trained(tmp_path, plan.with_changes(record_views=True), helpers=helpers)
    fine(Prediction(federation, new_rows(federation.names, 80), strangers(80)).run())
    joint = tmp_path / "joint"
    gather([tmp_path / name for name in federation.names if name != "dealer"], joint)
    predicted = Predicted(Source(joint, load_truth(joint, federation.tables)))
    found = predicted.findings(dict.fromkeys(predicted.tests, 1e-9))
    assert {f.promise for f in found} == {"clinic against bank", "shop against bank"}
    assert {f.verdict for f in found} == {Verdict.HOLDS}, found


def test_a_model_of_sums_above_a_threshold(tmp_path):
    plan = PLAN.with_changes(algorithm="vafl", protocol="pairwise", threshold=3)
    federation = trained(tmp_path, plan, parties=("bank", "clinic", "shop", "stranger"))
    blocks = new_rows(federation.names)
    prediction = Prediction(federation, blocks, strangers())
    fine(prediction.run())
    found = [prediction.scores()[each][0] for each in strangers()]
    expected = joint_predictions(federation, blocks, strangers())
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("task", ["multiclass", "regression"])
def test_scores_are_in_the_units_of_the_labels(tmp_path, task):
    federation = Federation(tmp_path, PLAN, task=task)
    bank = federation.tables["bank"]
    score = sum(table.block.sum(axis=1) for table in federation.tables.values())
    values = {"multiclass": np.digitize(score, [-1, 1]) + 4, "regression": 500 + 70 * score}
    federation.tables["bank"] = replace(bank, labels=values[task])
    asyncio.run(federation.run())
    blocks = new_rows(federation.names)
    prediction = Prediction(federation, blocks, strangers())
    fine(prediction.run())
    expected = joint_predictions(federation, blocks, strangers()).reshape(COUNT, -1)
    found = np.array(list(prediction.scores().values()))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=3e-6)
    header = prediction.out.read_text().splitlines()[0]
    assert header == ("id,score_4,score_5,score_6" if task == "multiclass" else "id,score")
    assert (found > 300).all() if task == "regression" else np.allclose(found.sum(axis=1), 1)


def test_a_sealed_model_with_its_dealer(tmp_path):
    plan = Plan(algorithm="sealed", epochs=4, scaling="none", epsilon=8.0)
    federation = trained(tmp_path, plan, helpers=("dealer",))
    blocks, ids = new_rows(federation.names[:3]), strangers()
    prediction = Prediction(federation, blocks, ids)
    results = prediction.run()
    fine(results)
    found = prediction.scores()
    # Rows are rounded toward zero at 2^-14, three columns in each of three parties, weights of norm 16.
    np.testing.assert_allclose(
        [found[each][0] for each in ids],
        joint_predictions(federation, blocks, ids),
        rtol=0,
        atol=3 * 16 * 3**0.5 * 2.0**-14,
    )
    for owner in ("clinic", "shop"):
        (record,) = predictions_of(tmp_path / owner)
        assert record.observers == ("bank",) and record.rows.tolist() == list(range(60, 60 + COUNT))
        assert results[owner]["prediction"][owner]["scores"] == COUNT
    assert any("counted apart" in line for line in prediction.said["clinic"])


def test_a_member_that_scores_others_than_agreed_is_named_and_no_score_is_written(tmp_path):
    """The clinic takes the agreed people in another order: each sum would be of two people's scores."""
    federation = trained(
        tmp_path, Plan(algorithm="sealed", epochs=1, scaling="none", epsilon=8.0), helpers=("dealer",)
    )
    prediction = Prediction(federation, new_rows(federation.names[:3]), strangers())
    clinic = prediction.member("clinic")
    build = clinic.purpose.build

    def reordered(who: Any, agreement: Any) -> Any:
        clinic.purpose.ids, clinic.purpose.numbers = clinic.purpose.ids[::-1], clinic.purpose.numbers[::-1]
        return build(who, agreement)

    clinic.purpose.build = reordered
    results = prediction.run(clinic=clinic)
    found = results["bank"]
    assert isinstance(found, Deviation) and found.member == "clinic", results
    assert "other records" in found.how and not prediction.out.exists()


def test_a_dealer_cannot_find_out_who_is_predicted(tmp_path):
    """It confirms a commitment to the IDs. Of one person, trying all IDs there may be would be quick."""
    federation = trained(
        tmp_path, Plan(algorithm="sealed", epochs=1, scaling="none", epsilon=8.0), helpers=("dealer",)
    )
    ids = strangers(1, first=4)
    prediction = Prediction(federation, new_rows(federation.names[:3], 1), ids)
    dealer, clinic = prediction.member("dealer"), prediction.member("clinic")
    fine(prediction.run(dealer=dealer, clinic=clinic))
    known = dealer.agreement.proposal
    assert known == clinic.agreement.proposal
    for salt in (b"", bytes(32)):
        for place in (dealer.session, f"{dealer.session} {salt.hex()}"):
            assert known.ids not in [commitment(place, [each]) for each in strangers(100)]
    assert known.ids in [
        commitments(dealer.session, clinic.purpose.salt, [each], [0])[0] for each in strangers(100)
    ]
    assert dealer.purpose.salt == b""


def test_a_sealed_model_refuses_records_that_it_was_trained_on(tmp_path):
    plan = Plan(algorithm="sealed", epochs=4, scaling="none", epsilon=8.0)
    federation = trained(tmp_path, plan, helpers=("dealer",))
    kept = Trained.load_share(RunFolder(tmp_path / "bank"), "bank").numbers
    ids = [*strangers(COUNT - 1), next(each for each, number in kept.items() if number == 3)]
    prediction = Prediction(federation, new_rows(federation.names[:3]), ids)
    results = prediction.run()
    assert isinstance(results["bank"], BudgetExceeded) and "budget allows no more" in str(results["bank"])
    assert predictions_of(tmp_path / "clinic") == predictions_of(tmp_path / "shop") == []
    assert not prediction.out.exists()


# -- counting -----------------------------------------------------------------------------------------------


def test_the_same_people_pay_again_and_strangers_start_at_nothing(tmp_path):
    plan = PLAN.with_changes(encoder_training="none", sigma=4.0, epochs=1)
    federation = trained(tmp_path, plan)
    trained_on = Trained.load_share(RunFolder(tmp_path / "clinic"), "clinic").numbers
    known = next(each for each, number in trained_on.items() if number == 11)
    first = [*strangers(3), known]
    fine(Prediction(federation, new_rows(federation.names, 4), first, "first.csv").run())
    second = ["new001", "another", "new000"]
    again = Prediction(federation, new_rows(federation.names, 3), second, "second.csv")
    results = again.run()
    fine(results)
    for owner in ("clinic", "shop"):
        one, two = predictions_of(tmp_path / owner)
        assert one.observers == two.observers == ("bank",)
        assert one.rows.tolist() == [11, 60, 61, 62]
        assert two.rows.tolist() == [60, 61, 63]
        assert one.sigma == two.sigma == 4.0 and one.mechanism == "gaussian"
        assert results[owner]["known"] == 2
        rows = np.concatenate([each.rows for each in read_records(tmp_path / owner) if each.rows is not None])
        assert [np.sum(rows == number) for number in (10, 11, 60, 61, 62, 63)] == [1, 2, 2, 2, 1, 1]
        # Trained on once and predicted once, or predicted twice: two releases of mu 2 C / sigma.
        assert results[owner]["privacy"][owner]["mu"] == pytest.approx(math.sqrt(2) * 2 / 4.0)
        saved = json.loads((tmp_path / owner / "result.json").read_text())
        assert saved["privacy"] == results[owner]["privacy"]
        spent = privacy_matrix(read_records(tmp_path / owner), plan.delta)[owner]["bank"]
        assert spent.mu == pytest.approx(results[owner]["privacy"][owner]["mu"])
    assert predictions_of(tmp_path / "bank") == []


def test_ledgers_go_on_and_the_label_holder_keeps_their_heads(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0))
    before = len(read_ledger(tmp_path / "clinic" / "ledger" / "clinic.jsonl"))
    fine(Prediction(federation, new_rows(federation.names), strangers()).run())
    entries = read_ledger(tmp_path / "clinic" / "ledger" / "clinic.jsonl")  # verifies the whole chain
    kinds = [entry.content["kind"] for entry in entries[before:]]
    assert kinds == ["session", "alignment", "session", "phase", "prediction"]
    heads = json.loads((tmp_path / "bank" / "receipts" / "bank.json").read_text())
    assert heads["clinic"][1:] == [entries[-1].index, entries[-1].digest]
    gather([tmp_path / name for name in federation.names], tmp_path / "joint")
    assert len(read_records(tmp_path / "joint")) > before  # checked against all heads


def test_the_gate_refuses_what_exceeds_the_budget(tmp_path):
    # Mode strict: 60 training records and 12 evaluations fit, 7 more vectors do not.
    plan = PLAN.with_changes(sigma=60.0, epochs=1, budget_epsilon=2.0, delta=1e-5)
    federation = trained(tmp_path, plan)
    prediction = Prediction(federation, new_rows(federation.names, 2000), strangers(2000))
    results = prediction.run()
    assert isinstance(results["bank"], BudgetExceeded), results
    assert any("has spent mu" in line for line in prediction.said["clinic"] + prediction.said["shop"])
    assert isinstance(results["clinic"], NetworkError) and isinstance(results["shop"], NetworkError)
    assert any("the gate will refuse" in line for line in prediction.said["clinic"])
    assert not prediction.out.exists() and not prediction.out.with_name("scores.csv.part").exists()
    for owner in ("clinic", "shop"):
        spent = privacy_matrix(read_records(tmp_path / owner), plan.delta)[owner]["bank"]
        assert spent.epsilon <= 2.0 * (1 + 1e-9)
    small = Prediction(federation, new_rows(federation.names, 2), strangers(2))
    fine(small.run())  # what is left is enough for these


# -- agreement ----------------------------------------------------------------------------------------------


def test_everybody_is_shown_what_is_asked_and_may_refuse(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0))
    federation.members["clinic"] = replace(federation.members["clinic"], accept=None)
    shown: list[str] = []

    async def refuse(question: str) -> bool:
        shown.append(question)
        return len(shown) == 1  # it joins, and then refuses what is asked

    prediction = Prediction(federation, new_rows(federation.names), strangers())
    results = prediction.run(clinic=prediction.member("clinic", confirm=refuse))
    assert isinstance(results["clinic"], InputError)
    assert "clinic does not accept the prediction" in str(results["clinic"])
    assert "clinic stops: it does not accept what is proposed" in str(results["bank"])
    text = "\n".join(prediction.said["clinic"])
    assert len(shown) == 2 and shown[0].startswith("Join 'test'")
    assert "records       7, 0 of them known" in text and "scores        go to bank" in text
    assert "sigma 1, clip 1" in text and "7 noisy embeddings" in text
    for name in federation.names:
        assert predictions_of(tmp_path / name) == []
        assert Trained.load_share(RunFolder(tmp_path / name), name).records == 60
    agreed = [
        json.loads((tmp_path / name / "agreement.json").read_text())["digest"] for name in federation.names
    ]
    assert len(set(agreed)) == 1 and agreed[0] not in shown[1] and f"of agreement {agreed[0]}" in text


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"predictions": 6}, "asks for 7 records, 0 were scored before; at most 6"),
        ({"predictions": None}, "add: predictions = 7"),
        ({"epsilon": 1.0}, "no budget"),
        ({"digest": "f" * 32}, "not ffff"),
    ],
)
def test_rules_hold_for_predictions(tmp_path, rules, reason):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    federation.members["shop"] = replace(federation.members["shop"], accept=replace(EVERYTHING, **rules))
    results = Prediction(federation, new_rows(federation.names), strangers()).run()
    assert isinstance(results["shop"], InputError) and reason in str(results["shop"])
    assert predictions_of(tmp_path / "clinic") == []


def test_a_quota_of_predictions_holds_over_new_processes(tmp_path):
    """A coordinator that asks again and again, each time for few: the ledger counts."""
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    rules = replace(EVERYTHING, predictions=2 * COUNT - 1)
    federation.members["shop"] = replace(federation.members["shop"], accept=rules)
    fine(Prediction(federation, new_rows(federation.names), strangers()).run())
    for people in (strangers(first=COUNT), strangers()):  # others, and the same again
        again = Prediction(federation, new_rows(federation.names), people, out="more.csv").run()
        assert f"{COUNT} were scored before; at most {2 * COUNT - 1}" in str(again["shop"])
        assert not (tmp_path / "more.csv").exists()


def test_private_alignment_finds_the_new_records_that_all_have(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1), align="private")
    blocks, everybody = new_rows(federation.names), strangers()
    ids = {"bank": everybody[::-1], "clinic": everybody, "shop": [*everybody[:-2], "x1", "x2"]}
    prediction = Prediction(federation, blocks, ids)
    fine(prediction.run())
    common = everybody[:-2]
    assert list(prediction.scores()) == common[::-1]  # in the order of the bank's table
    mine = {
        name: np.array([blocks[name][list(ids[name]).index(each)] for each in common])
        for name in federation.names
    }
    expected = joint_predictions(federation, mine, common)
    np.testing.assert_allclose([prediction.scores()[each][0] for each in common], expected, atol=3e-6)
    assert json.loads((tmp_path / "clinic" / "alignment.json").read_text())[0] == "id0000"  # the training's


@pytest.mark.parametrize("align", ["private", "none"])
def test_no_common_record(tmp_path, align):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1), align=align)
    ids = {"bank": strangers(), "clinic": strangers(first=50), "shop": strangers()}
    results = Prediction(federation, new_rows(federation.names), ids).run()
    wanted = (
        "no ID in common" if align == "private" else "bank, clinic, shop do not have exactly the same IDs"
    )
    assert isinstance(results["bank"], DataError | ProtocolError | PeerStops)
    told = {name: str(result) for name, result in results.items()}
    assert any(wanted in each for each in told.values())  # who sees it stops, and tells the others less
    assert wanted in told["bank"] or NOTICES["common"] in told["bank"]
    assert predictions_of(tmp_path / "clinic") == []


# -- what cannot work ---------------------------------------------------------------------------------------


def test_a_run_that_has_not_finished(tmp_path):
    federation = Federation(tmp_path, PLAN)
    with pytest.raises(RunError, match="holds no run over a network; train first"):
        PredictionPurpose(tmp_path / "none.csv").read_table(federation.server)
    asyncio.run(federation.run())
    (tmp_path / "clinic" / "result.json").unlink()
    with pytest.raises(RunError, match="has not finished; finish the training first"):
        PredictionPurpose(tmp_path / "none.csv").read_table(federation.members["clinic"])


def test_a_table_that_does_not_fit(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    config, file = federation.members["clinic"], tmp_path / "new.csv"
    for text, reason in (
        ("id,x0,x1\na,1,2\n", "no column 'x2', which training had"),
        ("x0,x1,x2\n1,2,3\n", "no column 'id', which training had"),
        ("id,x0,x1,x2\na,1,2,3\na,1,2,3\n", "data row 2 occurs more than once"),
        ("id,x0,x1,x2\na,1,2,\n", "missing"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=reason):
            PredictionPurpose(file).read_table(config)


def test_coded_columns_are_those_of_training(tmp_path):
    file, codes = tmp_path / "new.csv", {"job": ["a", "b"], "left": ["x"]}
    file.write_text("job,age,id\nb,7,one\na,8,two\n")
    options: dict[str, Any] = {"id_column": "id", "columns": ("age", "job=a", "job=b")}
    table = OwnTable.of_new_records(file, one_hot=codes, **options)
    assert table.block.tolist() == [[7, 0, 1], [8, 1, 0]] and table.ids.tolist() == ["one", "two"]
    for codes, reason in (
        ({"job": ["a", "b", "c"]}, "gives or lacks 'job=c'"),
        ({"job": ["a"]}, "no column 'job=b'"),
        ({}, "no column 'job=a'"),
    ):
        with pytest.raises(DataError, match=reason):
            OwnTable.of_new_records(file, one_hot=codes, **options)
    file.write_text("job,age,id\nc,7,one\n")
    with pytest.raises(DataError, match="a value in data row 1"):
        OwnTable.of_new_records(file, one_hot={"job": ["a", "b"]}, **options)


def test_scores_that_would_overwrite_something(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    prediction = Prediction(federation, new_rows(federation.names), strangers())
    prediction.out.write_text("precious")
    with pytest.raises(InputError, match="exists already"):
        asyncio.run(prediction.coordinator().run())
    assert prediction.out.read_text() == "precious"
    prediction.out = tmp_path / "nowhere" / "scores.csv"
    with pytest.raises(InputError, match="cannot be written"):
        asyncio.run(prediction.coordinator().run())


def test_one_process_at_a_time_writes_a_ledger(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    prediction = Prediction(federation, new_rows(federation.names), strangers())
    with RunFolder(tmp_path / "clinic").locked(), pytest.raises(RunError, match="in use"):
        asyncio.run(prediction.member("clinic").run())


def test_training_and_predicting_do_not_mix(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    prediction = Prediction(federation, new_rows(federation.names), strangers())
    for name in ("clinic", "bank"):  # as if nothing had been trained yet, in other folders
        elsewhere = tmp_path / "fresh" / name
        if name == "bank":
            federation.server = replace(federation.server, folder=elsewhere)
        else:
            federation.members[name] = replace(federation.members[name], folder=elsewhere)

    async def meet(coordinator: Any, member: Any) -> Any:
        waiting = asyncio.create_task(coordinator.run())
        try:
            async with asyncio.timeout(240):
                return await asyncio.gather(member.run(), return_exceptions=True)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    shop, heard = prediction.member("shop"), []
    (found,) = asyncio.run(meet(federation.coordinator(say=heard.append), shop))
    assert any("shop was refused: 'test' is trained here" in line for line in heard)
    assert isinstance(found, NetworkError)
    assert "predicts where this one trains" in str(found)
    federation.server = replace(federation.server, folder=tmp_path / "bank")
    (found,) = asyncio.run(meet(prediction.coordinator(), federation.member("clinic")))
    assert isinstance(found, NetworkError)
    assert "takes part in another run" in str(found)


# -- who dies, and who lies ---------------------------------------------------------------------------------


def test_a_party_dies_while_predicting_and_all_start_again(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0), patience=2.0)
    blocks = new_rows(federation.names)
    prediction = Prediction(federation, blocks, strangers())
    clinic = prediction.member("clinic")

    async def attempt() -> list[Any]:
        dead = asyncio.Event()

        async def never(*_: Any) -> None:
            dead.set()
            await asyncio.Event().wait()

        clinic.work = never
        tasks = [
            asyncio.create_task(node.run())
            for node in (prediction.coordinator(), clinic, prediction.member("shop"))
        ]
        async with asyncio.timeout(240):
            await dead.wait()
            clinic.mesh.tell = lambda *_, **__: None
            tasks[1].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    bank, _, shop = asyncio.run(attempt())
    assert isinstance(bank, NetworkError) and "clinic has not been reachable for 2 s" in str(bank)
    assert isinstance(shop, NetworkError)
    assert not prediction.out.exists()
    (lost,) = predictions_of(tmp_path / "shop")  # it had answered; nobody got a score for it
    assert predictions_of(tmp_path / "clinic") == []
    fine(prediction.run())
    assert list(prediction.scores()) == strangers()
    again = predictions_of(tmp_path / "shop")
    assert [record.rows.tolist() for record in again] == [lost.rows.tolist()] * 2


def test_a_party_that_starts_anew_does_not_pay_again_by_itself(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0))
    prediction = Prediction(federation, new_rows(federation.names), strangers())

    async def attempt() -> list[Any]:
        clinic, dead = prediction.member("clinic"), asyncio.Event()

        async def never(*_: Any) -> None:
            dead.set()
            await asyncio.Event().wait()

        clinic.work = never
        others = [
            asyncio.create_task(node.run()) for node in (prediction.coordinator(), prediction.member("shop"))
        ]
        first = asyncio.create_task(clinic.run())
        async with asyncio.timeout(240):
            await dead.wait()
            clinic.mesh.tell = lambda *_, **__: None
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return await asyncio.gather(*others, prediction.member("clinic").run(), return_exceptions=True)

    bank, shop, clinic = asyncio.run(attempt())
    assert "clinic has started anew while predicting" in str(bank)
    assert isinstance(shop, NetworkError) and isinstance(clinic, NetworkError)
    assert len(predictions_of(tmp_path / "shop")) == 1 and predictions_of(tmp_path / "clinic") == []


def test_a_party_that_dies_before_anything_left_may_come_back(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0))
    prediction = Prediction(federation, new_rows(federation.names), strangers())

    async def attempt() -> list[Any]:
        clinic, dead = prediction.member("clinic"), asyncio.Event()
        clinic.mesh.tell = silence_after("confirmed", clinic.mesh.tell, dead)
        nodes = prediction.coordinator(), prediction.member("shop")
        others = [asyncio.create_task(node.run()) for node in nodes]
        first = asyncio.create_task(clinic.run())
        async with asyncio.timeout(240):
            await dead.wait()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return await asyncio.gather(*others, prediction.member("clinic").run())

    assert [each["records"] for each in asyncio.run(attempt())] == [COUNT] * 3
    assert len(predictions_of(tmp_path / "clinic")) == len(predictions_of(tmp_path / "shop")) == 1
    shown = [line for line in prediction.said["shop"] if line.startswith("scores ")]
    assert len(shown) == 1  # it had confirmed the same


def silence_after(kind: str, tell: Any, silent: asyncio.Event) -> Any:
    """Tells nothing any more, from the first message of a kind on."""

    def telling(peer: str, said: str, **fields: Any) -> None:
        if said == kind:
            silent.set()
        if not silent.is_set():
            tell(peer, said, **fields)

    return telling


def test_the_coordinator_dies_while_predicting(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0))
    prediction = Prediction(federation, new_rows(federation.names), strangers())

    async def attempt() -> list[Any]:
        bank, dead = prediction.coordinator(), asyncio.Event()
        build = bank.purpose.build

        def never_ending(*given: Any) -> Any:
            site = build(*given)

            async def fused(rows: Any) -> None:
                await asyncio.gather(*(site.server._ask(party, rows) for party in site.server.parties))
                dead.set()
                await asyncio.Event().wait()

            site.server._fused = fused
            return site

        async def nothing(*_: Any, **__: Any) -> None:
            pass  # a process that is killed says no goodbye

        bank.purpose.build, bank._stop = never_ending, nothing
        members = [asyncio.create_task(prediction.member(name).run()) for name in ("clinic", "shop")]
        first = asyncio.create_task(bank.run())
        async with asyncio.timeout(240):
            await dead.wait()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            second = asyncio.create_task(prediction.coordinator().run())
            found = await asyncio.gather(*members, return_exceptions=True)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
            return found

    for found in asyncio.run(attempt()):
        assert isinstance(found, NetworkError) and "bank has started anew while predicting" in str(found)
    assert len(predictions_of(tmp_path / "clinic")) == 1
    fine(prediction.run())
    assert len(predictions_of(tmp_path / "clinic")) == 2


def test_a_coordinator_cannot_give_a_known_person_a_fresh_number(tmp_path):
    plan = PLAN.with_changes(encoder_training="none", sigma=4.0, epochs=1)
    federation = trained(tmp_path, plan)
    ids = sorted(Trained.load_share(RunFolder(tmp_path / "bank"), "bank").numbers)[:COUNT]
    for lie in ({}, dict(zip(ids, range(COUNT, 2 * COUNT), strict=True))):  # all new; the numbers of others
        file = tmp_path / "bank" / "models" / "server.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, "ids": list(lie.items())}))
        results = Prediction(federation, new_rows(federation.names), ids).run()
        file.write_text(json.dumps(content))
        assert said(results, "gives record number")
        assert predictions_of(tmp_path / "clinic") == predictions_of(tmp_path / "shop") == []


@pytest.mark.parametrize("protocol", ["plain", "two-tree"])
def test_a_coordinator_gets_each_embedding_once(tmp_path, protocol, monkeypatch):
    """Noise averages out over repetitions; one confirmation is for one release of each record."""
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0, protocol=protocol))
    prediction = Prediction(federation, new_rows(federation.names), strangers())
    bank = prediction.coordinator()
    build = bank.purpose.build

    def greedy(*given: Any) -> Any:
        site = build(*given)
        # One request after the other: links refuse a request that names a record twice.
        monkeypatch.setattr("securevfl.algorithms.prediction.CHUNK", len(site.server.numbers))
        site.server.numbers = np.concatenate([site.server.numbers] * 2)
        return site

    bank.purpose.build = greedy
    results = prediction.run(bank=bank)
    assert said(results, "was asked for a record twice")
    assert len(predictions_of(tmp_path / "clinic")) == len(predictions_of(tmp_path / "shop")) == 1


def test_a_coordinator_cannot_begin_twice(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0))
    prediction = Prediction(federation, new_rows(federation.names), strangers())
    bank = prediction.coordinator()
    phase = bank.phase

    async def twice(part: str, epoch: int) -> None:
        await phase(part, epoch)
        bank.site.roles["bank"].asked[:] = False  # a coordinator that cheats does not refuse itself
        bank.site._enforcer._over = False
        bank.site._enforcer._begun = None
        await phase(part, epoch)

    bank.phase = twice
    results = prediction.run(bank=bank)
    assert said(results, "begins after the end of what was agreed on")
    assert "was not agreed on" in str(results["bank"])
    assert len(predictions_of(tmp_path / "clinic")) == len(predictions_of(tmp_path / "shop")) == 1


def test_a_request_of_another_process_does_not_pass(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    prediction = Prediction(federation, new_rows(federation.names), strangers())
    bank = prediction.coordinator()
    propose = bank._propose

    async def replaying(who: Any, proposal: str, digest: str, signature: str) -> None:
        old = replace(Proposal.from_json(proposal, PLAN.local), token="0" * 32)
        digest = old.for_prediction(bank.purpose.plan, bank.purpose.outline).digest
        await propose(who, old.to_json(), digest, signature)

    bank._propose = replaying
    results = prediction.run(bank=bank)
    assert said(results, "another process of it asked")
    assert predictions_of(tmp_path / "clinic") == predictions_of(tmp_path / "shop") == []


def test_other_numbers_than_were_confirmed_do_not_pass(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0, epochs=1))
    prediction = Prediction(federation, new_rows(federation.names), strangers())
    bank = prediction.coordinator()
    tell = bank.mesh.tell

    def lying(peer: str, kind: str, **fields: Any) -> None:
        if kind == "records" and peer == "clinic":
            fields["numbers"] = fields["numbers"][::-1]
        tell(peer, kind, **fields)

    bank.mesh.tell = lying
    results = prediction.run(bank=bank)
    assert isinstance(results["clinic"], ProtocolError)
    assert said(results, "other records than were found to be common")
    assert predictions_of(tmp_path / "shop") == []


def test_a_coordinator_cannot_rename_a_known_person(tmp_path):
    """Compared in another way than in training, known IDs would be new ones, which have not paid yet."""
    plan = PLAN.with_changes(encoder_training="none", sigma=4.0, epochs=1)
    federation = Federation(tmp_path, plan)
    loud = {name: replace(table, ids=np.char.upper(table.ids)) for name, table in federation.tables.items()}
    federation.tables = loud
    asyncio.run(federation.run())
    prediction = Prediction(federation, new_rows(federation.names), loud["bank"].ids[:COUNT].tolist())
    bank = prediction.coordinator()
    bank.config = replace(bank.config, normalise="trim-casefold")
    bank.purpose.check_config = lambda who: None  # a coordinator that cheats does not refuse itself
    results = prediction.run(bank=bank)
    assert any(
        "compares IDs by 'trim-casefold'; the run 'test' did by 'exact'" in str(each)
        for each in results.values()
    )
    assert predictions_of(tmp_path / "clinic") == predictions_of(tmp_path / "shop") == []


def test_a_configuration_that_compares_ids_otherwise_than_training_did(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    federation.server = replace(federation.server, normalise="trim-casefold")
    prediction = Prediction(federation, new_rows(federation.names), strangers())
    with pytest.raises(DataError, match="the run compared IDs by 'exact', the configuration says 'trim-case"):
        asyncio.run(prediction.coordinator().run())


def test_other_records_than_were_confirmed_do_not_pass(tmp_path):
    """After everybody has confirmed, the coordinator has other records found, and goes on with these."""
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0, epochs=1), align="private")
    both = strangers(2 * COUNT)
    prediction = Prediction(federation, new_rows(federation.names, 2 * COUNT), both)
    bank = prediction.coordinator()
    whole, propose = bank.own, bank._propose
    bank.own = replace(whole, ids=whole.ids[:COUNT], block=whole.block[:COUNT])

    async def switching(who: Any, proposal: str, digest: str, signature: str) -> None:
        await propose(who, proposal, digest, signature)
        bank.own = replace(whole, ids=whole.ids[COUNT:], block=whole.block[COUNT:])
        await bank._introduce()
        await bank._invite()
        await bank._align()

    bank._propose = switching
    results = prediction.run(bank=bank)
    assert said(results, "announces the prediction, which was not confirmed here")
    assert predictions_of(tmp_path / "clinic") == predictions_of(tmp_path / "shop") == []


def test_other_numbers_after_the_confirmation_do_not_pass(tmp_path):
    """What was confirmed is what is released, even if the coordinator numbers the records again after it."""
    federation = trained(tmp_path, PLAN.with_changes(sigma=1.0, epochs=1))
    prediction = Prediction(federation, new_rows(federation.names), strangers())
    bank = prediction.coordinator()
    tell, numbered = bank.mesh.tell, []

    def lying(peer: str, kind: str, **fields: Any) -> None:
        if kind == "records":
            numbered[:] = fields["numbers"]
        if kind == "agreed" and peer == "clinic":
            tell(peer, "records", numbers=numbered[::-1], salt=bank.purpose.salt)
        tell(peer, kind, **fields)

    bank.mesh.tell = lying
    results = prediction.run(bank=bank)
    assert isinstance(results["clinic"], ProtocolError)
    assert said(results, "announces the prediction, which was not confirmed here")
    assert predictions_of(tmp_path / "clinic") == []


@pytest.mark.parametrize("numbers", [[60, 60], [60, 1 << 30], [-1, 60], [0, 60]])
def test_numbers_that_make_no_sense_change_nothing(tmp_path, numbers):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    kept = Trained.load_share(RunFolder(tmp_path / "clinic"), "clinic")
    before = dict(kept.numbers)
    with pytest.raises(ProtocolError, match="record number"):
        kept.adopt(["new000", "new001"], numbers)
    assert kept.numbers == before and kept.records == 60
    assert kept.adopt(["new000", federation.tables["clinic"].ids[0].item()], [65, before["id0000"]]) == 1
    assert kept.records == 66


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"members": {}, "run": "test"}',
        json.dumps({**vars(REQUEST), "records": 0}),
        json.dumps({**vars(REQUEST), "records": True}),
        json.dumps({**vars(REQUEST), "ids": 5}),
        json.dumps({**vars(REQUEST), "members": None}),
        json.dumps({**vars(REQUEST), "more": 1}),
        "[" * 10_000,
    ],
)
def test_requests_of_another_form_are_refused(text):
    assert Proposal.from_json(REQUEST.to_json(), PLAN.local) == REQUEST
    with pytest.raises(InputError, match="cannot be read"):
        Proposal.from_json(text, PLAN.local)


def test_whatever_is_agreed_on_is_in_the_digest():
    def digest(request: Proposal, plan: Plan = PLAN, label_holder: str = "bank") -> str:
        outline = replace(OUTLINE, label_holder=label_holder)
        return request.for_prediction(plan, outline, known=3, cost="much").digest

    others = [
        *(replace(REQUEST, **{name: "other"}) for name in ("run", "trained", "ids", "numbers", "token")),
        replace(REQUEST, records=4),
        replace(REQUEST, members={"bank": "1" * 64, "shop": "2" * 64}),
        replace(REQUEST, members={"bank": "1" * 64, "clinic": "3" * 64}),
    ]
    plans = [
        PLAN.with_changes(**change)
        for change in (
            {"sigma": 1.0},
            {"clip": 2.0},
            {"protocol": "two-tree"},
            {"encoder_training": "none"},
            {"collusion": 2},
            {"protocol": "pairwise", "threshold": 3},
            {"protocol": "pairwise"},
            {"insecure_reproducible_noise": True},
        )
    ]
    found = [
        digest(REQUEST),
        digest(REQUEST, label_holder="clinic"),
        *map(digest, others),
        *(digest(REQUEST, plan) for plan in plans),
    ]
    assert len(set(found)) == len(found)
    assert digest(REQUEST) == REQUEST.for_prediction(PLAN, OUTLINE).digest  # cost is each one's own


@pytest.mark.parametrize("protocol", ["plain", "plain-tree", "two-tree", "pairwise", "bfv"])
def test_nobody_finds_an_embedding_that_the_protocol_hides(tmp_path, protocol):
    """Every observer looks for the clinic's embeddings in all that it saw of the prediction."""
    plan = PLAN.with_changes(protocol=protocol, epochs=1, record_views=True)
    federation = trained(tmp_path, plan)
    before = {name: len(View(tmp_path / name / "views" / name)) for name in federation.names}
    blocks = new_rows(federation.names)
    fine(Prediction(federation, blocks, strangers()).run())
    secret = embeddings(tmp_path / "clinic", "clinic", blocks["clinic"])
    total = secret + embeddings(tmp_path / "shop", "shop", blocks["shop"])
    finders, knowing = set(), set()
    for name in ("bank", "shop"):
        seen = list(View(tmp_path / name / "views" / name))[before[name] :]
        assert seen
        arrays = [form for each in seen for value in each.fields.values() for form in readings(value)]
        pairs = [one - other for one in arrays for other in arrays if one.shape == other.shape]
        finders |= {name for each in (*arrays, *pairs) if is_close(each, secret)}
        knowing |= {name for each in arrays if is_close(each, total)}
    (record,) = predictions_of(tmp_path / "clinic")
    assert finders <= set(record.observers)
    assert bool(finders) == protocol.startswith("plain")  # the search does find what is there
    if protocol in ("pairwise", "bfv"):
        assert knowing == {"bank"}  # what it is promised: the sum of the others


def embeddings(folder: Path, name: str, block: np.ndarray) -> np.ndarray:
    plan = RunFolder(folder).read_plan()
    rows = Trained.load_share(RunFolder(folder), name).take_share(block, len(block))
    encoder = checked_encoder(plan, rows, name, gate=None)
    load_module(RunFolder(folder).model(name), encoder)
    with torch.no_grad():
        return encoder.eval()(torch.from_numpy(np.array(rows.train[rows.parties.index(name)]))).numpy()


def readings(value: Any) -> list[np.ndarray]:
    """A field as numbers: as it is, as ring elements, or as bytes of floats."""
    if isinstance(value, bytes):
        value = np.frombuffer(value[: len(value) // 8 * 8], np.uint64)
    if not isinstance(value, np.ndarray):
        return []
    forms = [value.astype(np.float64)]
    if value.dtype == np.uint64:
        forms += [FixedPoint().decode(value), value.view(np.float64)]
    return [np.nan_to_num(form, nan=1e9, posinf=1e9, neginf=-1e9) for form in forms if form.size < 10_000]


def is_close(found: np.ndarray, secret: np.ndarray) -> bool:
    return found.size == secret.size and bool(np.abs(found.ravel() - secret.ravel()).max() < 1e-3)


def test_a_run_that_kept_nothing_to_predict_with(tmp_path):
    federation = trained(tmp_path, PLAN.with_changes(epochs=1))
    (tmp_path / "clinic" / "models" / "clinic.json").unlink()
    with pytest.raises(RunError, match="keeps no way to predict"):
        PredictionPurpose(tmp_path / "none.csv").read_table(federation.members["clinic"])


# -- the commands -------------------------------------------------------------------------------------------


def test_the_page_predicts(tmp_path):
    """The page's commands word by word, as processes of their own; then an audit of all that was released."""
    page = Page(tmp_path, f"127.0.0.1:{free_port()}")
    toml = tmp_path / "bank" / "server.toml"
    toml.write_text(toml.read_text().replace("time_unit = 0.02", ""))
    page.finish(**everybody(page))
    section = PAGE.with_name("predict.md").read_text(encoding="utf-8")
    page.serve, page.join, page.deal = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    for name, first in (("bank", 0), ("shop", 5)):
        head, *lines = (tmp_path / name / f"{name}.csv").read_text().splitlines()
        width = head.removesuffix(",defaulted").count(",") + 1  # labels are not needed
        kept = sorted([line.split(",")[:width] for line in lines if line < "person-0040"])[first:]
        rows = [head.split(",")[:width], *([f"new-{line[0]}", *line[1:]] for line in kept)]
        (tmp_path / name / "new.csv").write_text("\n".join(map(",".join, rows)) + "\n")
    page.finish(**everybody(page))
    lines = (tmp_path / "bank" / "scores.csv").read_text().splitlines()
    assert lines[0] == "id,score" and 20 < len(lines) <= 36
    assert all(0 < float(line.split(",")[1]) < 1 for line in lines[1:])
    assert f"{len(lines) - 1} records predicted" in page.said("shop")
    (record,) = predictions_of(tmp_path / "shop" / "run")
    assert record.vectors == len(lines) - 1 and record.observers == ("bank",)
    heads = read_heads(tmp_path / "bank" / "run")
    assert read_ledger(tmp_path / "shop" / "run" / "ledger" / "shop.jsonl", heads=heads)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve", "--predict", "new.csv"], "--predict FILE and --out FILE go together"),
        (["serve", "--out", "scores.csv"], "--predict FILE and --out FILE go together"),
        (["serve", "--predict", "new.csv", "--out", "new.csv"], "new.csv exists already"),
        (
            ["serve", "--predict", "new.csv", "--out", "scores.csv"],
            "holds no run over a network; train first",
        ),
        (["join", "--predict", "new.csv"], "holds no run over a network; train first"),
    ],
)
def test_bad_commands_end_with_one_line(tmp_path, monkeypatch, capsys, arguments, reason):
    authority = create_authority(tmp_path / "ca", name="test")
    issue(authority, ["bank", "clinic"], out=tmp_path)
    common = 'run = "credit"\nfolder = "run"\n[data]\nfile = "bank.csv"\n'
    server = 'certificates = "bank"\nlisten = "127.0.0.1:0"\nparties = ["clinic"]\n'
    party = 'certificates = "clinic"\ncoordinator = "bank"\naddress = "127.0.0.1:1"\n'
    (tmp_path / "serve.toml").write_text(server + common + 'label_column = "y"\n')
    (tmp_path / "join.toml").write_text(party + common)
    (tmp_path / "new.csv").write_text("id,x\na,1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["securevfl", *arguments, "--config", f"{arguments[0]}.toml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert reason in line
