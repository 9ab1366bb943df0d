"""The audit: promises stand where they are kept, and every injected fault is found."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import run_command

from securevfl import Plan, Recorder, VerticalData, audit, train
from securevfl.accountants import gdp_epsilon
from securevfl.algorithms import ALGORITHMS
from securevfl.auditing.page import render
from securevfl.auditing.words import strength
from securevfl.errors import AttackError, InputError, RunError
from securevfl.privacy.gate import Gate
from securevfl.privacy.noise import Noise
from securevfl.privacy.payloads import _KEY, Contribution, Link, Released

HOLDS, VIOLATED, NO_GUARANTEE, NOT_TESTED = "holds", "violated", "no guarantee", "not tested"
TINY = "synthetic:rows=400,features=9,informative=6"
FROZEN = Plan(
    algorithm="vafl",
    epochs=2,
    encoder_training="none",
    sigma=1.2,
    embedding=2,
    record_views=True,
    source={"data": TINY, "parties": 3},
)
RAW = FROZEN.with_changes(encoder_training="raw")


@pytest.fixture(scope="module")
def tiny() -> VerticalData:
    return VerticalData.load(TINY, parties=3)


def audited(data: VerticalData, plan: Plan, folder: Path, **options: Any):
    run = train(data, plan, folder)
    return audit(run, "none", isolated=False, **{"canaries": 4000, **options})


@pytest.fixture(scope="module")
def frozen_run(tiny: VerticalData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "frozen"
    train(tiny, FROZEN, folder)
    return folder


def test_a_sound_run_holds(frozen_run: Path) -> None:
    report = audit(frozen_run, "none", canaries=4000)
    assert report.verdict == HOLDS, report.content["words"]
    assert set(report.owners) == {"p1", "p2"}
    cell = report.owners["p1"]["observers"]["p0"]
    assert cell["epsilon_upper"] == pytest.approx(gdp_epsilon(2 / 1.2, 1e-5), rel=1e-9)
    assert 0 < cell["epsilon_lower"] <= cell["epsilon_upper"]
    assert (cell["verdict"], cell["mode"], cell["claimed"]) == (HOLDS, "frozen", None)
    assert 0.5 < cell["power"] < 1 and cell["powers"] == {"embeddings": cell["power"]}
    noticed = f"noise below {cell['power']:.0%} (embeddings) of the promised one"
    assert noticed in report.content["words"][1]
    assert "initial: reconciled with the ledger" in cell["tested"]
    assert all(finding["verdict"] == HOLDS for finding in report.content["findings"])
    assert "noise below" in report.content["words"][1] and "moderate protection" in report.content["words"][1]
    assert {(s["observer"], s["sender"]) for s in report.content["seen"]} >= {("p0", "p1"), ("p0", "p2")}


def test_raw_training_shows_claim_bound_and_measurement(tiny: VerticalData, tmp_path: Path) -> None:
    report = audited(tiny, RAW, tmp_path / "run", canaries=1000)
    cell = report.owners["p1"]["observers"]["p0"]
    assert cell["mode"] == "strict" and cell["claimed"] < cell["epsilon_upper"]
    assert report.owners["p0"]["observers"]["p1"]["verdict"] == NO_GUARANTEE  # gradients
    assert report.verdict == NO_GUARANTEE
    assert any("the paper would claim" in text for text in report.content["words"])


def test_exact_release_has_no_guarantee(tiny: VerticalData, tmp_path: Path) -> None:
    report = audited(tiny, FROZEN.with_changes(sigma=0.0, unprotected=True), tmp_path / "run")
    cell = report.owners["p1"]["observers"]["p0"]
    assert (cell["verdict"], cell["epsilon_upper"], cell["epsilon_lower"]) == (NO_GUARANTEE, None, None)


def test_nothing_left_nothing_promised(tiny: VerticalData, tmp_path: Path) -> None:
    report = audited(
        tiny, Plan(algorithm="local", epochs=1, source={"data": TINY, "parties": 3}), tmp_path / "run"
    )
    assert report.verdict == HOLDS and report.owners == {}
    assert "nothing to promise" in report.content["words"][0]


def violations(report: Any) -> str:
    assert report.verdict == VIOLATED
    return " ".join(
        [reason for f in report.content["findings"] if f["verdict"] == VIOLATED for reason in f["reasons"]]
        + [reason for _, _, cell in report.cells() for reason in cell["reasons"]]
    )


def test_halved_noise_is_found(tiny: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Noise.gaussian
    monkeypatch.setattr(Noise, "gaussian", lambda self, shape, std: honest(self, shape, std / 2))
    for plan in (FROZEN, RAW):
        report = audited(tiny, plan, tmp_path / plan.encoder_training)
        assert "less noise was added than claimed" in violations(report)


def test_skipped_clip_is_found_by_canaries(
    tiny: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("securevfl.privacy.gate.clip_rows", lambda vectors, clip: vectors)
    monkeypatch.setattr("securevfl.privacy.gate.clip_exactly", lambda values, clip: values)
    assert "canary audit of releases: mu is at least" in violations(audited(tiny, FROZEN, tmp_path / "run"))


def test_reused_noise_is_found_by_canaries(
    tiny: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Noise.gaussian
    first: dict[tuple[int, ...], Any] = {}

    def reused(self: Noise, shape: tuple[int, ...], std: float) -> Any:
        return first.setdefault(shape, honest(self, shape, std))

    monkeypatch.setattr(Noise, "gaussian", reused)
    assert "canary audit of" in violations(audited(tiny, FROZEN, tmp_path / "run"))


@pytest.mark.parametrize("protocol", ["plain-tree", "two-tree", "pairwise", "bfv"])
@pytest.mark.parametrize("algorithm", ["vafl", "afsgd", "flex"])
def test_values_past_the_gate_into_a_sum_are_found(
    algorithm: str, protocol: str, tiny: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(
        algorithm=algorithm,
        protocol=protocol,
        epochs=1,
        batch=200,
        source={"data": TINY, "parties": 3},
        settings={"timeout": 2.0} if algorithm == "flex" else {},
        unprotected=True,
    )
    plan = plan.with_changes(record_views=True)
    honest, kind = Gate.contribute, {"vafl": "embedding", "afsgd": "product", "flex": "embedding"}[algorithm]
    report = audited(tiny, plan, tmp_path / "honest", canaries=-1)
    assert not [f for f in report.content["findings"] if f["verdict"] == VIOLATED]

    def leaking(self: Gate, vectors: Any, **options: Any) -> Contribution:
        if options["kind"] != kind or self.owner != "p2":
            return honest(self, vectors, **options)
        values = vectors.detach().double().numpy()
        where = {"observers": options["observers"], "kind": kind, "head": self.ledger.head}
        return Contribution(values=values, source=vectors, key=_KEY, **where)

    monkeypatch.setattr(Gate, "contribute", leaking)
    report = audited(tiny, plan, tmp_path / "leaking", canaries=-1)
    assert f"went into a sum of {kind}; entry" in violations(report)


def test_release_past_the_gate_is_found(
    tiny: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Gate.release

    def leaking(self: Gate, vectors: Any, **options: Any) -> Released:
        if options["kind"] != "evaluation":
            return honest(self, vectors, **options)
        return Released(values=vectors.numpy(), head=None, key=_KEY, **options)

    monkeypatch.setattr(Gate, "release", leaking)
    assert "left without a ledger entry" in violations(audited(tiny, RAW, tmp_path / "run", canaries=-1))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_field_that_nobody_declared_is_found(
    dtype: Any, tiny: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that lets one more field through: a ledger head alone does not make it accounted for."""
    fields, features = Link._fields, np.asarray(tiny.train[1][:4] * 1000, dtype)

    def leaking(self: Link, schema: Any, *rest: Any) -> Any:
        found, *others = fields(self, schema, *rest)
        return (found | {"features": features} if schema.kind == "embedding" else found), *others

    monkeypatch.setattr(Link, "_fields", leaking)
    report = audited(tiny, RAW, tmp_path / "run", canaries=-1)
    assert "'embedding' with a field 'features' that it does not have" in violations(report)


def test_messages_that_nobody_declared_are_found(frozen_run: Path, tmp_path: Path) -> None:
    for number, (before, after, match) in enumerate(
        [
            ('"kind": "embedding"', '"kind": "features"', "'features', a kind of message that nobody has"),
            ('"purpose": "evaluation"', '"purpose": 7', "'purpose' is not embedding or"),
            ('"purpose": "evaluation"', '"words": [1, 2]', "a field 'words' that it does not have"),
            ('"sender": "p1", "receiver": "server", "kind": "ended"', None, "p1 may not send 'end'"),
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(frozen_run, folder)
        view = folder / "views" / "p0" / "messages.jsonl"
        text = view.read_text()
        assert before in text
        view.write_text(text.replace(before, after or before.replace("ended", "end"), 1))
        assert match in violations(audit(folder, "none", canaries=-1))


def test_tampered_books_are_a_violation(frozen_run: Path, tmp_path: Path) -> None:
    shutil.copytree(frozen_run, tmp_path / "run")
    ledger = tmp_path / "run" / "ledger" / "p1.jsonl"
    ledger.write_text("\n".join(ledger.read_text().splitlines()[:-1]) + "\n")
    report = audit(tmp_path / "run", "none", canaries=-1)
    assert "cut" in violations(report) and report.owners == {}


def test_a_moved_folder_without_data(frozen_run: Path, tmp_path: Path) -> None:
    """Promises and books can be audited anywhere; what needs the truth says that it is missing."""
    shutil.copytree(frozen_run, tmp_path / "run")
    plan = tmp_path / "run" / "plan.toml"
    plan.write_text(plan.read_text().replace(f'data = "{TINY}"', 'data = "a9a"'))
    report = audit(tmp_path / "run", canaries=-1, isolated=False)
    assert report.verdict == NOT_TESTED
    assert report.content["words"][0].endswith("Attacks were not run for lack of data.")
    assert "give it with --data" in " ".join(report.owners["p1"]["observers"]["p0"]["reasons"])
    assert "a9a" in report.content["run"]["truth"]
    for attack in report.attacks:
        assert attack["applicable"] is False or attack["family"] == "protocol"
        assert attack["score"] is not None or attack["reason"]


def test_unknown_runs_and_attacks(frozen_run: Path, tmp_path: Path, tiny: VerticalData) -> None:
    with pytest.raises(RunError, match="holds no run"):
        audit(tmp_path)
    with pytest.raises(AttackError, match="unknown attack 'magic'"):
        audit(frozen_run, ["magic"])
    with pytest.raises(RunError, match="only runs with a folder"):
        audit(train(tiny, Plan(algorithm="vafl", epochs=1, unprotected=True)))


def test_limits(frozen_run: Path) -> None:
    report = audit(frozen_run, "none", canaries=-1)
    assert report.over_limits({"epsilon": 9.0, "mu": 2.0}) == []
    problems = report.over_limits({"epsilon": 1.0})
    assert len(problems) == 2 and problems[0].startswith("epsilon of p1 towards p0 is 8.0")
    with pytest.raises(InputError, match="unknown figure"):
        report.over_limits({"height": 1.0})


@pytest.mark.parametrize(
    ("epsilon", "word"),
    [(0.5, "strong"), (4.0, "good"), (9.9, "moderate"), (30.0, "weak"), (1e6, "worthless"), (None, "none")],
)
def test_strength(epsilon: float | None, word: str) -> None:
    assert strength(epsilon) == word


IN_SUMS = ("vafl", "fdml", "afsvrg", "afsaga", "fsvrg", "flex")  # of each kind of role, one


@pytest.mark.parametrize(
    ("name", "protocol"),
    [
        *((name, "plain") for name in sorted(ALGORITHMS)),
        *((name, "two-tree") for name in IN_SUMS),
        *(
            pytest.param(name, "two-tree", marks=pytest.mark.slow)
            for name, each in sorted(ALGORITHMS.items())
            if "two-tree" in each.protocols and name not in IN_SUMS
        ),
    ],
)
def test_the_books_of_every_algorithm_agree_with_its_views(name: str, protocol: str, tmp_path: Path) -> None:
    if protocol not in ALGORITHMS[name].protocols:
        pytest.skip(f"{name} does not run on {protocol}")
    data = VerticalData.load("synthetic:rows=80,features=6,informative=4", parties=3)
    plan = Plan(
        algorithm=name,
        protocol=protocol,
        epochs=1,
        batch=32,
        sigma=2.0,
        record_views=True,
    )
    report = audit(train(data, plan, tmp_path / "run"), "none", data=data, canaries=-1)
    assert [f for f in report.content["findings"] if f["verdict"] == VIOLATED] == []


class Page(HTMLParser):
    """Collects what a page would load, and checks that tags close."""

    VOID = ("meta", "br", "path", "rect", "polyline")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.stack.pop() == tag


def test_the_page_is_self_contained(frozen_run: Path, tmp_path: Path) -> None:
    report = audit(frozen_run, "none", canaries=4000)
    report.save(tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.stack == ["html"] or page.stack == []
    assert page.loads == []
    assert set(re.findall(r"https?://[^\"'\s<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert json.loads((tmp_path / "report.json").read_text()) == report.content


def test_names_in_the_page_are_escaped(frozen_run: Path) -> None:
    content = audit(frozen_run, "none", canaries=-1).content
    content["run"]["data"] = "<script>alert(1)</script>"
    content["words"][0] = "<b>"
    assert "<script>" not in render(content) and "<p><b></p>" not in render(content)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_renders_in_a_browser(frozen_run: Path, tmp_path: Path, width: int) -> None:
    audit(frozen_run, "none", canaries=4000).save(tmp_path)
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900",
         (tmp_path / "report.html").as_uri()],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "frozen" in done.stdout and "<svg" in done.stdout and "Who promises what to whom" in done.stdout


def foreign_loop(folder: Path, data: VerticalData, sigma: float) -> None:
    """Split learning written by hand, as somebody else would."""
    torch.manual_seed(0)
    blocks = [torch.tensor(np.array(block)) for block in data.train]
    labels = torch.tensor(np.array(data.y_train))
    encoders = [torch.nn.Linear(block.shape[1], 2) for block in blocks]
    top = torch.nn.Linear(4, 1)
    optimiser = torch.optim.SGD([p for m in (*encoders, top) for p in m.parameters()], lr=0.1)
    plan = Plan(algorithm="vafl-sync", sigma=sigma, clip=1.0, embedding=2)
    with Recorder(folder, plan, parties=("p0", "p1"), label_holder="p0") as recorder:
        for rows in torch.randperm(len(labels)).split(64):
            h = [torch.nn.functional.normalize(e(x[rows])) for e, x in zip(encoders, blocks, strict=True)]
            sent = (h[1] + sigma * torch.randn_like(h[1])).detach().requires_grad_()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                top(torch.cat([h[0], sent], 1))[:, 0], labels[rows]
            )
            optimiser.zero_grad()
            loss.backward()
            assert sent.grad is not None
            h[1].backward(sent.grad)
            optimiser.step()
            recorder.exchange("p1", rows, sent, sent.grad)
        recorder.epoch(loss=loss.item())
        recorder.finish(test={"loss": loss.item()})


@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_foreign_loops_can_be_audited(tmp_path: Path, sigma: float) -> None:
    data = VerticalData.load(TINY, parties=2)
    foreign_loop(tmp_path / "run", data, sigma)
    report = audit(tmp_path / "run", "none", data=data)
    cell = report.owners["p1"]["observers"]["p0"]
    assert cell["releases"] == data.n_train
    expected = gdp_epsilon(2 / 2.0 * math.sqrt(data.n_train), 1e-5) if sigma else None
    assert cell["epsilon_upper"] == (pytest.approx(expected) if sigma else None)
    assert report.owners["p0"]["observers"]["p1"]["verdict"] == NO_GUARANTEE
    assert report.content["canaries"] == {}  # there was no gate of ours
    assert "no gate enforced it" in render(report.content)


def test_foreign_loops_on_described_columns_without_bounds(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name, own in (("p0", "late"), ("p1", "orders")):
        rows = "".join(f"c{i},{draw.normal():.3f},{draw.integers(2)}\n" for i in range(80))
        (tmp_path / f"{name}.csv").write_text(f"id,x{name},{own}\n{rows}")
    (tmp_path / "data.toml").write_text(
        'id = "id"\nlabel = "late"\nlabel_holder = "p0"\ntask = "binary"\n'
        '[parties.p0]\nfile = "p0.csv"\n[parties.p1]\nfile = "p1.csv"\n'
    )
    data = VerticalData.from_description(tmp_path / "data.toml")
    plan = Plan(algorithm="vafl-sync", sigma=2.0, clip=1.0, embedding=2, encoder_training="none")
    with Recorder(tmp_path / "run", plan, parties=("p0", "p1"), label_holder="p0") as recorder:
        for _ in range(2):  # released anew, each time under an entry of its own
            recorder.exchange("p1", np.arange(16), draw.normal(size=(16, 2), scale=2), np.ones((16, 2)))
        recorder.finish(test={"loss": 0.6})
    cell = audit(tmp_path / "run", "none", data=data).owners["p1"]["observers"]["p0"]
    assert cell["releases"] == 32 and cell["verdict"] == "not tested"


def test_command(frozen_run: Path, tmp_path: Path, capfd) -> None:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_command(shlex.join(map(str, ("securevfl", *arguments))))
        return code, *capfd.readouterr()

    shutil.copytree(frozen_run, tmp_path / "run")
    common = ("audit", tmp_path / "run", "--attacks", "none", "--canaries", -1)
    options = ("--json", "--html", tmp_path / "page.html", "--fail-if-violated", "--max", "epsilon=9")
    command = [sys.executable, "-m", "securevfl.cli", *map(str, (*common, *options))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    names = {"claimed", "epsilon_upper", "epsilon_lower", "verdict", "tested", "power", "reasons"}
    assert set(content["owners"]["p1"]["observers"]["p0"]) >= names
    assert (tmp_path / "page.html").exists() and Path(content["dossier"], "report.html").exists()
    assert run(*common, "--fail-unless-holds")[0] == 0
    code, out, err = run(*common, "--max", "epsilon=2")
    assert code == 11 and "above 2" in err and "HOLDS" in out
    ledger = tmp_path / "run" / "ledger" / "p1.jsonl"
    ledger.write_text(ledger.read_text().replace('"clip":1.0', '"clip":0.1'))
    code, out, _ = run(*common, "--fail-if-violated")
    assert code == 10 and "VIOLATED" in out
    assert run(*common, "--fail-unless-holds")[0] == 12
    before = sorted((tmp_path / "run" / "audits").iterdir())
    for bad, says in (
        ("--attacks=magic", "unknown attack"),
        ("--max=epsilon", "METRIC=VALUE"),
        ("--max=height=1", "unknown figure"),
        ("--canaries=0", "too few"),
        ("--sign=nowhere.pem", "cannot be read"),
    ):
        code, _, err = run("audit", tmp_path / "run", bad)
        assert code == 2 and says in err and err.count("\n") == 1
    assert sorted((tmp_path / "run" / "audits").iterdir()) == before
    code, _, err = run("audit", tmp_path)
    assert code == 2 and "holds 1 runs; name one of them" in err
    code, _, err = run("audit", tmp_path / "nothing")
    assert code == 2 and "holds no run" in err


def test_forget_deletes_the_evidence_and_nothing_else(tmp_path: Path) -> None:
    data = VerticalData.load("synthetic:rows=40,features=4", parties=2)
    folder = tmp_path / "run"
    train(data, Plan(algorithm="vafl-sync", sigma=1.0, epochs=1, record_views=True), folder)
    before = {path.name for path in folder.iterdir()}
    assert {"views", "journal"} <= before
    assert run_command(f"securevfl audit --forget {folder}") == 0
    assert {path.name for path in folder.iterdir()} == before - {"views", "journal"}
