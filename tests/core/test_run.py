"""Run folders: nothing overwritten, nothing lost by a kill, the budget holds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from securevfl import Plan, VerticalData, load_run, train
from securevfl.errors import (
    BudgetExceeded,
    LedgerError,
    PlanError,
    RunError,
    SecureVFLError,
    TrainingDiverged,
)
from securevfl.federation import folder as folder_module
from securevfl.federation.folder import RunFolder
from securevfl.models import load_module
from securevfl.privacy.ledger import Ledger, read_ledger, read_records
from securevfl.privacy.views import View

TINY = "synthetic:rows=240,features=12,informative=6"


@pytest.fixture(scope="module")
def tiny() -> VerticalData:
    return VerticalData.load(TINY, parties=3)


def test_a_run_folder_has_everything(tiny: VerticalData, tmp_path: Path) -> None:
    run = train(tiny, Plan(algorithm="vafl", epochs=2, sigma=1.0, record_views=True), tmp_path / "run")
    names = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*") if p.is_file()}
    expected = {"plan.toml", "metrics.jsonl", "result.json", "models/server.safetensors"}
    for party in ("p0", "p1", "p2"):
        expected |= {
            f"ledger/{party}.jsonl", f"models/{party}.safetensors", f"receipts/{party}.json",
            f"views/{party}/messages.jsonl", f"views/{party}/arrays.bin",
        }  # fmt: skip
    assert expected <= names
    again = load_run(tmp_path / "run")
    assert (again.plan, again.metrics, again.result) == (run.plan, run.metrics, run.result)
    encoder = nn.Linear(1, 1)
    with pytest.raises(RunError):
        load_module(tmp_path / "run" / "models" / "p1.safetensors", encoder)


def test_views_hold_what_each_observer_got_and_nothing_else(tiny: VerticalData, tmp_path: Path) -> None:
    train(tiny, Plan(algorithm="vafl", epochs=1, sigma=1.0, record_views=True), tmp_path / "run")
    server = View(tmp_path / "run" / "views" / "p0")
    assert {seen.sender for seen in server.messages("embedding", sent=False)} == {"p1", "p2"}
    party = View(tmp_path / "run" / "views" / "p1")
    assert {(seen.sender, seen.kind) for seen in party.messages(sent=False)} == {
        ("server", "embed"), ("server", "gradient"), ("server", "end"),
    }  # fmt: skip
    assert not list(party.messages(sender="p2"))
    # every embedding that p0 received stands in the sender's ledger, under the head it carried
    entries = {owner: read_ledger(tmp_path / "run" / "ledger" / f"{owner}.jsonl") for owner in ("p1", "p2")}
    for seen in server.messages("embedding", sent=False):
        assert seen.head is not None
        entry = entries[seen.head.owner][seen.head.position]
        assert entry.digest == seen.head.digest
        assert entry.content["vectors"] == len(seen.fields["values"])


def test_tampering_with_a_run_is_found(tiny: VerticalData, tmp_path: Path) -> None:
    train(tiny, Plan(algorithm="vafl", epochs=1, sigma=1.0), tmp_path / "run")
    ledger = tmp_path / "run" / "ledger" / "p1.jsonl"
    text = ledger.read_text()
    ledger.write_text("\n".join(text.splitlines()[:-1]) + "\n")
    with pytest.raises(LedgerError, match="cut"):
        read_records(tmp_path / "run")
    ledger.unlink()
    with pytest.raises(LedgerError, match="missing"):
        read_records(tmp_path / "run")


def test_existing_folder_is_never_touched(tiny: VerticalData, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("keep")
    with pytest.raises(RunError, match="exists already"):
        train(tiny, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["precious.txt"]


def test_an_empty_folder_is_taken(tiny: VerticalData, tmp_path: Path) -> None:
    """A process that is killed before it writes its plan leaves one."""
    (tmp_path / "run").mkdir()
    train(tiny, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run")
    assert (tmp_path / "run" / "result.json").is_file()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_folder_in_which_nothing_has_begun_is_not_left_behind(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the same command would be refused, and there is nothing to resume."""

    def interrupted(*_: object) -> None:
        raise error

    monkeypatch.setattr(folder_module, "write_text", interrupted)
    with pytest.raises(error):
        RunFolder(tmp_path / "run").create(Plan(epsilon=1.0))
    assert not (tmp_path / "run").exists()


def test_folder_that_cannot_be_made(tiny: VerticalData, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be made"):
        train(tiny, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "file" / "run")


def test_load_run_says_what_is_missing(tiny: VerticalData, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run folder"):
        load_run(tmp_path / "none")
    with pytest.raises(RunError, match="holds no run"):
        load_run(tmp_path)
    train(tiny, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(RunError, match=r"has not finished; go on with: securevfl train --resume"):
        load_run(tmp_path / "run")


def test_resume_needs_the_same_plan(tiny: VerticalData, tmp_path: Path) -> None:
    train(tiny, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run")
    with pytest.raises(RunError, match="finished; there is nothing to resume"):
        train(tiny, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"belongs to another plan: epochs was 1, now it is 2"):
        train(tiny, Plan(algorithm="vafl", epochs=2, unprotected=True), tmp_path / "run", resume=True)
    with pytest.raises(PlanError, match="resume needs the folder"):
        train(tiny, Plan(algorithm="vafl", unprotected=True), resume=True)


PARENT = """
import os, sys
import securevfl.federation.run, securevfl.data.synthetic
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        exec(eval(line), {})
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def ends() -> Iterator[Callable[[str], int]]:
    """Runs code in a process of its own and says how that ended. The processes' parent loads torch once."""
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pipes = parent.stdin, parent.stdout

        def run(code: str) -> int:
            pipes[0].write(f"{code!r}\n")
            pipes[0].flush()
            return int(pipes[1].readline())

        yield run
        pipes[0].close()


KILLED = """
import os, signal
from securevfl import Plan, VerticalData, train
data = VerticalData.load({data!r}, parties=3)
count = 0
def step(progress):
    global count
    count += 1
    if count == {after}:
        os.kill(os.getpid(), signal.SIGKILL)
train(data, Plan.from_flat({plan!r}), {out!r}, progress=step, resume={resume})
"""


@pytest.fixture(scope="module")
def killed(ends: Callable[[str], int]) -> Callable[..., None]:
    def run(out: Path, plan: dict, after: int, *, resume: bool = False) -> None:
        code = KILLED.format(data=TINY, after=after, plan=plan, out=str(out), resume=resume)
        assert ends(code) == -signal.SIGKILL

    return run


@pytest.mark.parametrize(
    "changes",
    [{"delays": "exponential"}, {"algorithm": "vafl-sync", "optimiser": "adam"}, {"algorithm": "central"}],
)
def test_killed_twice_and_resumed_gives_the_same_result(
    tiny: VerticalData, tmp_path: Path, changes: dict, killed: Callable[..., None]
) -> None:
    plan = {"algorithm": "vafl", "unprotected": True, "epochs": 5, "batch": 16, "patience": 9, **changes}
    straight = train(tiny, Plan.from_flat(plan), tmp_path / "straight")
    steps = 12 if changes.get("algorithm") in ("vafl-sync", "central") else 36  # server steps per epoch
    killed(tmp_path / "broken", plan, after=steps + 5)  # in the second epoch
    killed(tmp_path / "broken", plan, after=2 * steps + 1, resume=True)  # and in the fourth
    resumed = train(tiny, Plan.from_flat(plan), tmp_path / "broken", resume=True)
    assert resumed.metrics == straight.metrics
    for name in ("p0", "p1", "p2", "server"):
        first, second = (
            tmp_path / side / "models" / f"{name}.safetensors" for side in ("straight", "broken")
        )
        assert first.read_bytes() == second.read_bytes()
    # what left before the kills stays on the books
    if changes.get("algorithm") != "central":
        assert resumed.privacy["p1"]["releases"] > straight.privacy["p1"]["releases"]


def test_frozen_releases_survive_a_kill_without_paying_twice(
    tiny: VerticalData, tmp_path: Path, killed
) -> None:
    plan = {"algorithm": "vafl", "epochs": 4, "batch": 16, "encoder_training": "none", "sigma": 2.0}
    killed(tmp_path / "run", plan, after=60)
    run = train(tiny, Plan.from_flat(plan), tmp_path / "run", resume=True)
    assert run.privacy["p1"]["mu"] == pytest.approx(1.0)


DIES_BEFORE_SENDING = """
import os
from securevfl import Plan, VerticalData, train
from securevfl.federation.virtual import VirtualNetwork
post, count = VirtualNetwork.post, 0
def dying(self, message):
    global count
    if message.kind == "embedding" and message.sender == "p1":
        count += 1
        if count == 4:
            os._exit(9)
    post(self, message)
VirtualNetwork.post = dying
plan = Plan(algorithm="vafl", epochs=3, sigma=1.0, record_views=True)
train(VerticalData.load({data!r}, parties=3), plan, {out!r})
"""


def test_dying_between_ledger_and_network_over_counts(tmp_path: Path, ends) -> None:
    code = DIES_BEFORE_SENDING.format(data=TINY, out=str(tmp_path / "run"))
    assert ends(code) == 9
    entries = [e for e in read_ledger(tmp_path / "run" / "ledger" / "p1.jsonl") if not e.is_session]
    assert len(entries) == 4  # the fourth is on disk although its message never left


def test_budget_stops_training_and_keeps_the_evaluation(tiny: VerticalData, tmp_path: Path) -> None:
    plan = Plan(algorithm="vafl", epochs=50, sigma=10.0, budget_epsilon=60.0)
    run = train(tiny, plan, tmp_path / "run")
    assert run.stopped is not None and run.stopped.startswith("budget: owner 'p")
    assert run.test["auc"] is not None
    for owner in ("p1", "p2"):
        assert run.privacy[owner]["epsilon"] <= 60.0
    assert load_run(tmp_path / "run").stopped == run.stopped


def test_budget_too_small_for_anything(tiny: VerticalData, tmp_path: Path) -> None:
    with pytest.raises(BudgetExceeded):
        train(tiny, Plan(algorithm="vafl", epochs=5, sigma=1.0, budget_epsilon=0.5), tmp_path / "run")
    assert all(e.is_session for e in read_ledger(tmp_path / "run" / "ledger" / "p1.jsonl"))


def test_a_resumed_run_keeps_its_old_spending(tiny: VerticalData, tmp_path: Path, killed) -> None:
    plan = {"algorithm": "vafl", "epochs": 20, "batch": 16, "sigma": 10.0, "budget_epsilon": 60.0}
    killed(tmp_path / "run", plan, after=50)
    run = train(tiny, Plan.from_flat(plan), tmp_path / "run", resume=True)
    assert run.privacy["p1"]["epsilon"] <= 60.0


def test_views_need_a_folder(tiny: VerticalData) -> None:
    with pytest.raises(PlanError, match="give an output folder"):
        train(tiny, Plan(algorithm="vafl", record_views=True, unprotected=True))


def test_early_stop(tiny: VerticalData) -> None:
    run = train(tiny, Plan(algorithm="vafl", epochs=200, patience=2, learning_rate=2.0, unprotected=True))
    assert run.stopped is not None and run.stopped.startswith("early") and len(run.metrics) < 200


def test_divergence_is_reported_not_released(tiny: VerticalData) -> None:
    with pytest.raises(TrainingDiverged, match="lower the learning rate"):
        train(tiny, Plan(algorithm="vafl", epochs=30, learning_rate=1e30, model="mlp", unprotected=True))


def test_own_modules(tiny: VerticalData) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.layer(x))

    plan = Plan(algorithm="vafl", embedding=5, epochs=5, unprotected=True)
    run = train(tiny, plan, encoders={p: Own() for p in tiny.parties}, head=nn.Linear(15, 1))
    assert run.test["auc"] is not None and run.test["auc"] > 0.6
    with pytest.raises(PlanError, match="'p7', which is not a party"):
        train(tiny, plan, encoders={"p7": Own()})
    with pytest.raises(PlanError):
        train(
            tiny,
            Plan(algorithm="vafl", embedding=3, unprotected=True),
            encoders={p: Own() for p in tiny.parties},
        )
    coupled = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    with pytest.raises(PlanError, match=r"couples records .* use LayerNorm"):
        train(
            tiny,
            Plan(algorithm="vafl", embedding=5, encoder_training="none", sigma=1.0),
            encoders={"p1": coupled},
        )


def test_sparse_features_train_like_dense_ones() -> None:
    from scipy import sparse

    generator = np.random.default_rng(0)
    blocks = [generator.random((80, 6)) * (generator.random((80, 6)) < 0.3) for _ in range(2)]
    labels = (blocks[0].sum(1) > np.median(blocks[0].sum(1))).astype(int)
    dense = VerticalData.from_arrays(blocks, labels)
    thin = VerticalData.from_arrays([sparse.csr_array(block) for block in blocks], labels)
    plan = Plan(algorithm="vafl", epochs=3, scaling="none", unprotected=True)
    assert train(dense, plan).metrics == train(thin, plan).metrics


def test_hidden_noise_perturbs_training_and_is_not_counted(tiny: VerticalData) -> None:
    plan = Plan(algorithm="vafl", model="mlp", hidden=(8,), epochs=2, sigma=1.0)
    noisy = train(tiny, plan.with_changes(hidden_noise=(0.5,)))
    assert noisy.privacy["p1"]["mu"] == train(tiny, plan).privacy["p1"]["mu"]


def test_result_is_plain_json(tiny: VerticalData) -> None:
    result = train(tiny, Plan(algorithm="vafl", epochs=1, unprotected=True)).result
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert {"algorithm", "test", "privacy", "time", "messages", "bytes", "labels"} <= set(result)
    assert result["privacy"]["p1"]["epsilon"] is None  # infinite


class Tracked(Ledger):
    """Remembers every ledger that was opened."""

    opened: list[Ledger]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.opened.append(self)
        super().__init__(*arguments, **options)

    @classmethod
    def all_closed(cls) -> bool:
        return all(each._file is not None and each._file.closed for each in cls.opened)


@pytest.mark.parametrize("failing", ["encoder", "role", "view of p1", "ledger of p1"])
def test_a_run_that_cannot_begin_leaves_no_file_open(
    tiny: VerticalData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    Tracked.opened = []
    monkeypatch.setattr("securevfl.federation.site.Ledger", Tracked)
    encoders = {"p1": torch.nn.Linear(2, 1)} if failing == "encoder" else {}  # made for other features

    def broken(*arguments: Any, **options: Any) -> Any:
        if failing == "role" or "p1" in arguments or getattr(arguments[0], "owner", "") == "p1":
            raise RunError("nothing goes")

    if failing == "role":
        monkeypatch.setattr("securevfl.algorithms.vafl.VAFL.role", broken)
    if failing == "view of p1":
        monkeypatch.setattr("securevfl.federation.site.ViewWriter", broken)
    if failing == "ledger of p1":
        monkeypatch.setattr(Tracked, "_begin_session", broken)
    with pytest.raises(SecureVFLError):
        train(
            tiny,
            Plan(algorithm="vafl", epochs=1, record_views=True, unprotected=True),
            tmp_path / "run",
            encoders=encoders,
        )
    assert Tracked.opened and Tracked.all_closed()
    assert not (tmp_path / "run").exists()


def test_a_party_cannot_have_the_servers_name():
    blocks = {name: np.ones((20, 2), np.float32) for name in ("bank", "server")}
    data = VerticalData.from_arrays(blocks, np.arange(20) % 2)
    with pytest.raises(PlanError, match="a party is called 'server', which names the label holder's role"):
        train(data, Plan(algorithm="vafl", epochs=1, unprotected=True))


def test_a_cluster_that_is_not_there_leaves_no_folder(tiny: VerticalData, tmp_path: Path) -> None:
    """Whoever installs Ray, or starts the cluster, can give the same command again."""
    with pytest.raises(SecureVFLError, match="Ray"):
        train(tiny, Plan(algorithm="vafl", epochs=1, unprotected=True), tmp_path / "run", ray="127.0.0.1:1")
    assert not (tmp_path / "run").exists()
