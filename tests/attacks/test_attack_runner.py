"""The machinery that runs attacks: isolation, determinism, failures, scores apart from attacks."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from attack_conformance import poisoned, same
from probe_attack import Careless, Crasher, Failer, Probe, Sleeper, Spy

from securevfl import Plan, VerticalData, train
from securevfl.attacks.contract import Applicability, Attack, Info, Need, Score
from securevfl.attacks.jobs import AttackProcess, InProcess, Job, load_arrays, save_arrays
from securevfl.attacks.runner import evaluate, evaluate_all, pairs
from securevfl.attacks.source import AUXILIARY, Source
from securevfl.errors import AttackError, LedgerError


@pytest.fixture(scope="module")
def data() -> VerticalData:
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(60, 2)).astype(np.float32) for _ in range(3)]
    return VerticalData.from_arrays(blocks, (blocks[0][:, 0] + blocks[1][:, 0] > 0).astype(int))


@pytest.fixture(scope="module")
def folder(data: VerticalData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    plan = Plan(
        algorithm="vafl",
        epochs=1,
        batch=16,
        sigma=2.0,
        record_views=True,
        source={"data": "a-name", "data_folder": "a-folder"},
    )
    train(data, plan, path)
    return path


@pytest.fixture(scope="module")
def source(folder: Path, data: VerticalData) -> Source:
    return Source(folder, data)


@pytest.fixture(autouse=True)
def find_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def job(source: Source, attack: type[Attack], seed: int = 0) -> Job:
    info = source.info("p0", ("p1",))
    return Job(
        attack=attack,
        info=info,
        views={"p1": source.view_folder("p1")},
        auxiliary=source.auxiliary(attack.needs, info),
        seed=seed,
    )


def quiet(share: float) -> None:
    pass


@pytest.fixture(scope="module")
def process() -> Iterator[AttackProcess]:
    """One for all tests, as an audit has; it starts anew after an attack that ends it."""
    with AttackProcess() as process:
        yield process


def test_process_and_in_process_agree(source: Source, process: AttackProcess) -> None:
    shares: list[float] = []
    apart = process.run(job(source, Probe), timeout=60, progress=shares.append)
    assert shares and set(shares) == {0.5}
    assert same(apart, InProcess().run(job(source, Probe), timeout=60, progress=quiet))


def test_attacks_that_break_off_are_failed_not_scored(source: Source, process: AttackProcess) -> None:
    reasons = {}
    for attack, timeout in ((Failer, 60), (Careless, 60), (Crasher, 60), (Sleeper, 0.5), (Probe, 60)):
        outcome = evaluate(source, attack, "p0", ("p1",), runner=process, timeout=timeout)
        reasons[attack.name] = (outcome.status, outcome.reason, outcome.score is None)
    assert reasons["failer"] == ("failed", "the view ends too early", True)
    assert reasons["careless"] == (
        "failed",
        "careless returned 'thing' as object; expected an array of numbers",
        True,
    )
    assert reasons["crasher"] == ("failed", "the process of crasher died", True)
    assert reasons["sleeper"] == ("failed", "sleeper took longer than 0.5 s", True)
    assert reasons["probe"] == ("scored", "", False)


def test_the_attack_process_finds_its_view_and_declared_knowledge_only(
    source: Source, process: AttackProcess
) -> None:
    found = process.run(job(source, Spy), timeout=60, progress=quiet)
    assert set(found["files"]) == {
        "auxiliary.npz",
        "job.json",
        "views",
        "views/p1",
        "views/p1/arrays.bin",
        "views/p1/messages.jsonl",
    }
    assert list(found["names"]) == ["known_labels/rows", "known_labels/values"]
    assert str(source.files.path) not in found["folder"][0]


def test_job_folder_names_nothing_of_the_run(source: Source, tmp_path: Path) -> None:
    job(source, Probe).write(tmp_path)
    text = (tmp_path / "job.json").read_text()
    assert not any(secret in text for secret in (str(source.files.path), "a-name", "a-folder"))
    assert same(load_arrays(tmp_path / "auxiliary.npz"), job(source, Probe).auxiliary)


def test_poisoned_truth_changes_scores_but_no_guess(folder: Path, source: Source) -> None:
    known = source.known
    wrong = dataclasses.replace(known, y_train=1 - known.y_train, y_test=1 - known.y_test)
    other = Source(folder, wrong)
    info, lies = source.info("p0", ("p1",)), other.info("p0", ("p1",))
    views = {"p1": source.view_folder("p1")}
    known_labels = source.auxiliary(Probe.needs, info)
    honest = Job(attack=Probe, info=info, views=views, auxiliary=known_labels).execute(quiet)
    fooled = Job(attack=Probe, info=lies, views=views, auxiliary=known_labels).execute(quiet)
    assert same(honest, fooled)
    right = Probe.score(honest, source.truth(Probe.truth, info), info).score
    assert Probe.score(honest, other.truth(Probe.truth, lies), lies).score == pytest.approx(1 - right)
    assert poisoned({"labels": known.y_train})["labels"].shape == known.y_train.shape


def test_seed_decides_the_guess(source: Source) -> None:
    guesses = [job(source, Probe, seed).execute(quiet)["guess"] for seed in range(8)]
    again = [job(source, Probe, seed).execute(quiet)["guess"] for seed in range(8)]
    assert all(np.array_equal(a, b) for a, b in zip(guesses, again, strict=True))
    assert len({guess.tobytes() for guess in guesses}) == 2


def test_all_pairs_are_evaluated_and_ready_for_json(source: Source) -> None:
    assert pairs(source, Probe) == [("p0", ("p1",)), ("p0", ("p2",))]
    counts: list[tuple[int, int]] = []
    outcomes = evaluate_all(
        source,
        [Probe],
        workers=2,
        isolated=False,
        progress=lambda done, total, _: counts.append((done, total)),
    )
    assert [outcome.status for outcome in outcomes] == ["scored", "scored"]
    assert sorted(counts) == [(1, 2), (2, 2)]
    line = json.loads(json.dumps(outcomes[0].to_mapping(), allow_nan=False))
    assert line["observer"] == "p1" and line["applicable"] and line["baseline"] == 0.5


class Coalition(Probe):
    name = "coalition"
    family = "feature"
    coalition = 2


def test_coalitions_are_groups_of_others(source: Source) -> None:
    assert pairs(source, Coalition) == [("p0", ("p1", "p2")), ("p1", ("p0", "p2")), ("p2", ("p0", "p1"))]


class TestNotApplicable:
    def test_without_data(self, folder: Path) -> None:
        outcome = evaluate(Source(folder), Probe, "p0", ("p1",), runner=InProcess())
        assert outcome.status == "n/a" and "--data" in outcome.reason
        assert outcome.to_mapping()["score"] is None and not outcome.to_mapping()["applicable"]

    def test_without_messages_of_the_kind(self, source: Source) -> None:
        outcome = evaluate(source, Probe, "p1", ("p0",), runner=InProcess())
        assert outcome.reason == "p0 received no gradient message from p1"

    def test_without_a_recorded_view(self, data: VerticalData, tmp_path: Path) -> None:
        train(data, Plan(algorithm="vafl", epochs=1, batch=16, unprotected=True), tmp_path / "run")
        outcome = evaluate(Source(tmp_path / "run", data), Probe, "p0", ("p1",), runner=InProcess())
        assert outcome.status == "n/a" and "--record-views" in outcome.reason

    def test_without_models(self, folder: Path, data: VerticalData, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        for file in folder.rglob("*"):
            if file.is_file() and "models" not in file.parts:
                (copy / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
                (copy / file.relative_to(folder)).write_bytes(file.read_bytes())
        info = Source(copy, data).info("p1", ("p0",))
        assert "model weights" not in info.auxiliary and "not at hand" in info.missing["model weights"]
        with pytest.raises(AttackError, match="not at hand"):
            Source(copy, data).auxiliary([Need("model weights")], info)

    def test_reason_is_compulsory(self) -> None:
        with pytest.raises(AttackError):
            Applicability(applicable=False)


class TestSource:
    def test_every_auxiliary_name_can_be_built(self, source: Source) -> None:
        info = source.info("p1", ("p0",))
        assert info.auxiliary == set(AUXILIARY)
        for name in AUXILIARY:
            arrays = source.auxiliary([Need(name, 4)], info)
            assert arrays and all(key.startswith(name.replace(" ", "_") + "/") for key in arrays)

    def test_candidates_are_half_members_and_apart_from_shadows(self, source: Source) -> None:
        rows, rest = source.candidates()
        members = source.truth(["members"], source.info("p1", ("p0",)))["members"]
        assert members.mean() == 0.5 and len(np.intersect1d(rows, rest)) == 0
        assert np.array_equal(members, rows < source.known.n_train)

    def test_known_labels_cover_the_classes(self, source: Source) -> None:
        known = source.auxiliary([Need("known labels", 4)], source.info("p0", ("p1",)))
        assert sorted(known["known_labels/values"]) == [0, 0, 1, 1]
        assert np.array_equal(source.labels[known["known_labels/rows"]], known["known_labels/values"])

    def test_promise_of_the_ledger(self, source: Source) -> None:
        # 48 initial and 48 training vectors and 12 of the evaluation, sensitivity 2, sigma 2, strict.
        assert source.info("p1", ("p0",)).mu == pytest.approx(math.sqrt(48 + 48 + 12))
        assert source.info("p0", ("p1",)).mu == math.inf

    def test_deployed_predictions_follow_the_saved_models(self, source: Source) -> None:
        info = source.info("p1", ("p0",))
        arrays = source.auxiliary([Need("predictions"), Need("model weights")], info)
        weights = {name.removeprefix("model_weights/"): v for name, v in arrays.items()}
        columns = []
        for party in source.parties:
            values = source.features(party) @ weights[f"{party}/output.weight"].T
            if party != "p0":  # the label holder's own embeddings do not leave, so they are not clipped
                values = values * np.minimum(1, 1 / np.abs(values))
            columns.append(values)
        logits = np.concatenate(columns, axis=1) @ weights["server/weight"].T + weights["server/bias"]
        expected = 1 / (1 + np.exp(-logits[:, 0]))
        # float32 sums of three terms of order 1: a few units of 2^-24.
        assert np.allclose(arrays["predictions/values"][:, 1], expected, atol=1e-6)

    def test_edited_ledger_is_refused(self, folder: Path, data: VerticalData, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        (copy / "ledger").mkdir(parents=True)
        (copy / "plan.toml").write_bytes((folder / "plan.toml").read_bytes())
        text = (folder / "ledger" / "p1.jsonl").read_text()
        (copy / "ledger" / "p1.jsonl").write_text(text.replace('"sigma":2.0', '"sigma":9.0', 1))
        with pytest.raises(LedgerError):
            Source(copy, data).info("p1", ("p0",))


class TestScore:
    def test_ranges_and_intervals_are_checked(self) -> None:
        good = {"metric": "auc", "score": 0.7, "low": 0.6, "high": 0.8, "baseline": 0.5}
        Score(**good)
        for change in ({"low": 0.75}, {"high": 0.65}, {"score": math.nan}, {"metric": "x"}, {"high": 1.5}):
            with pytest.raises(AttackError):
                Score(**{**good, **change})

    def test_info_round_trip(self, source: Source) -> None:
        for info in (source.info("p0", ("p1",)), source.info("p1", ("p0", "p2"))):
            assert Info.from_json(info.to_json()) == info


def test_arrays_survive_any_name(tmp_path: Path) -> None:
    arrays = {"file": np.arange(3), "a/b c": np.array(["x", "yz"]), "n": np.array(2.5)}
    save_arrays(tmp_path / "arrays.npz", arrays)
    assert same(load_arrays(tmp_path / "arrays.npz"), arrays)
