"""Running sweeps: every point once, whatever happens in between."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from sweep_helpers import FOUR, TINY, InProcess, journal_of

from securevfl import train
from securevfl.errors import AttackError, InputError, MissingExtra, PlanError, RunError, TrainingDiverged
from securevfl.sweeps import LocalExecutor, SweepProgress, parse_sweep, run_sweep
from securevfl.sweeps.executors import WorkerProcess, task_of


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four points, run with two workers."""
    folder = tmp_path_factory.mktemp("sweep") / "two"
    run_sweep(parse_sweep(FOUR), folder, workers=2)
    return folder


@pytest.fixture(autouse=True)
def _no_plots(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than tiny runs; the reference has them."""
    monkeypatch.setattr("securevfl.sweeps.engine.write_plots", lambda results: None)


def test_the_folder_holds_table_pages_and_runs(reference: Path) -> None:
    rows = read_rows(reference)
    assert [row["algorithm"] for row in rows] == ["vafl", "vafl", "local", "local"]
    assert [row["status"] for row in rows] == ["ok"] * 4
    assert [row["sound_epsilon"] for row in rows] == ["inf", "inf", "0.0", "0.0"]
    assert all(float(row["auc"]) > 0 and int(row["bytes"]) >= 0 for row in rows)
    for row in rows:
        assert (reference / row["report"]).is_file()
        assert not (reference / "runs" / row["id"] / "views").exists()
    assert (reference / "sweep.html").is_file()
    assert (reference / "plots" / "frontier.png").is_file()
    assert len((reference / "timings.csv").read_text().splitlines()) == 5


def test_the_table_does_not_depend_on_the_workers(reference: Path, tmp_path: Path) -> None:
    run_sweep(parse_sweep(FOUR), tmp_path / "one", executor=InProcess())
    assert (tmp_path / "one" / "results.csv").read_bytes() == (reference / "results.csv").read_bytes()


def test_noise_repeats_only_where_every_guarantee_is_void(tmp_path: Path) -> None:
    text = TINY + "sigma = 1.0\ninsecure_reproducible_noise = true\n"
    text = text.replace("[audit]", "").replace('attacks = "none"', "").replace("canaries = -1", "")
    text += "[audit]\nattacks = 'none'\ncanaries = -1\n"
    tables = []
    for name in ("a", "b"):
        run_sweep(parse_sweep(text), tmp_path / name, executor=InProcess())
        tables.append((tmp_path / name / "results.csv").read_bytes())
    assert tables[0] == tables[1]
    row = read_rows(tmp_path / "a")[0]
    assert row["guarantee"].startswith("void")
    assert row["sound_epsilon"] == "inf"


def test_a_second_session_repeats_nothing(reference: Path) -> None:
    again = InProcess()
    results = run_sweep(parse_sweep(FOUR), reference, executor=again)
    assert again.done == []
    assert again.closed
    assert results.complete


def test_ctrl_c_leaves_a_usable_folder_and_the_rest_follows(reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    with pytest.raises(KeyboardInterrupt):
        run_sweep(parse_sweep(FOUR), out, executor=InProcess(most=1))
    assert len(read_rows(out)) == 1
    assert "run the same command again" in (out / "sweep.html").read_text()
    rest = InProcess()
    run_sweep(parse_sweep(FOUR), out, executor=rest)
    assert len(rest.done) == 3
    assert (out / "results.csv").read_bytes() == (reference / "results.csv").read_bytes()


def test_a_half_written_journal_is_repaired(reference: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    run_sweep(parse_sweep(FOUR), out, executor=InProcess())
    lines = (out / "journal.jsonl").read_text().splitlines(keepends=True)
    torn = lines[0] + '{"id": 3}\n' + lines[1] + "\x00garbage\n" + lines[3] + lines[2][:-20]
    (out / "journal.jsonl").write_text(torn)
    (out / "results.csv").write_text("point,id\n0,")
    rest = InProcess()
    results = run_sweep(parse_sweep(FOUR), out, executor=rest)
    assert results.repaired == 3
    assert len(rest.done) == 1
    assert len(journal_of(out).records) == 4
    assert (out / "results.csv").read_bytes() == (reference / "results.csv").read_bytes()


def test_a_lost_journal_costs_no_training(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s"
    run_sweep(parse_sweep(FOUR), out, executor=InProcess())
    (out / "journal.jsonl").unlink()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a finished run was trained or audited again")

    monkeypatch.setattr("securevfl.sweeps.work.train", refuse)
    monkeypatch.setattr("securevfl.auditing.audit", refuse)
    run_sweep(parse_sweep(FOUR), out, executor=InProcess())
    assert (out / "results.csv").read_bytes() == (reference / "results.csv").read_bytes()


def test_a_run_that_was_cut_off_starts_again(tmp_path: Path) -> None:
    sweep = parse_sweep(TINY)
    left = tmp_path / "s" / "runs" / sweep.points[0].id
    left.mkdir(parents=True)
    (left / "plan.toml").write_text("epochs = 1\n")
    (tmp_path / "s" / "sweep.toml").write_text("")
    assert run_sweep(sweep, tmp_path / "s", executor=InProcess()).finished


def test_failing_points_are_recorded_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from securevfl.cli.sweep import sweep as command

    def fail_odd(data: Any, plan: Any, folder: Any) -> Any:
        if plan.seed % 2:
            raise TrainingDiverged("by hand")
        return train(data, plan, folder)

    monkeypatch.setattr("securevfl.sweeps.work.train", fail_odd)
    text = TINY + "[grid]\nseed = [0, 1, 2]\n"
    seen: list[SweepProgress] = []
    run_sweep(parse_sweep(text), tmp_path / "s", executor=InProcess(), progress=seen.append)
    rows = read_rows(tmp_path / "s")
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert rows[1]["error"] == "by hand"
    assert (seen[-1].done, seen[-1].total, seen[-1].failed) == (3, 3, 1)
    assert "Points that failed" in (tmp_path / "s" / "sweep.html").read_text()
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(typer.Exit) as stop:
        command(tmp_path / "s.toml", out=tmp_path / "s")
    said = capsys.readouterr().out
    assert stop.value.exit_code == 1 and "2 of 3 points finished, 1 failed" in said and "by hand" in said
    monkeypatch.undo()
    again = InProcess()
    assert not run_sweep(parse_sweep(text), tmp_path / "s", executor=again, retry_failed=True).failed
    assert len(again.done) == 1


def test_a_full_disk_is_no_points_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep ends with one line, keeps what is finished, and the same command runs the rest."""
    from securevfl.cli.sweep import sweep as command

    def full(data: Any, plan: Any, folder: Any) -> Any:
        if not plan.seed:
            return train(data, plan, folder)
        folder.mkdir(parents=True)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file, out = tmp_path / "s.toml", tmp_path / "s"
    file.write_text(TINY + "[grid]\nseed = [0, 1, 2]\n")
    monkeypatch.setattr("securevfl.sweeps.work.train", full)
    monkeypatch.setattr("securevfl.sweeps.engine.LocalExecutor", lambda *_: InProcess())
    with pytest.raises(RunError, match=r"s: no space left on the disk; free some, and the same command"):
        command(file, out=out)
    assert [row["status"] for row in read_rows(out)] == ["ok"]
    monkeypatch.setattr("securevfl.sweeps.work.train", train)
    command(file, out=out)
    assert [row["status"] for row in read_rows(out)] == ["ok"] * 3


def test_every_point_is_checked_before_the_first_one_runs(tmp_path: Path) -> None:
    """Against itself and against its data; nothing is made on disk."""
    text = TINY + "[grid]\nprotocol = ['plain', 'two-tree', 'plane']\nseed = [0, 1]\n"
    runner = InProcess()
    with pytest.raises(PlanError) as told:
        run_sweep(parse_sweep(text), tmp_path / "s", executor=runner)
    said = str(told.value)
    assert "4 of 6 points cannot run, and none was started" in said and "--skip-impossible" in said
    assert "point 2 (protocol two-tree, seed 0): protocol 'two-tree' needs at least 3 parties" in said
    assert "unknown protocol 'plane'; did you mean 'plain'?" in said
    assert not runner.done and not (tmp_path / "s").exists()
    results = run_sweep(parse_sweep(text), tmp_path / "s", executor=runner, skip_impossible=True)
    assert len(runner.done) == len(results.finished) == 2 and results.complete
    assert results.sweep.left_out == 4


def test_data_that_cannot_be_read_stops_a_sweep_at_once(tmp_path: Path) -> None:
    text = TINY.replace("synthetic:rows=60,features=4", "nosuch")
    with pytest.raises(PlanError, match=r"1 of 1 points cannot run.*unknown data set 'nosuch'"):
        run_sweep(parse_sweep(text), tmp_path / "s", executor=InProcess(), skip_impossible=True)


def test_unexpected_errors_are_recorded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr("securevfl.sweeps.work.train", crash)
    results = run_sweep(parse_sweep(TINY), tmp_path / "s", executor=InProcess())
    assert results.failed[0]["error"] == "ZeroDivisionError: by hand"


def test_a_longer_sweep_takes_up_the_points_of_a_shorter_one(tmp_path: Path) -> None:
    run_sweep(parse_sweep(TINY + "[grid]\nseed = [0]\n"), tmp_path / "s", executor=InProcess())
    more = InProcess()
    results = run_sweep(parse_sweep(TINY + "[grid]\nseed = [1, 0]\n"), tmp_path / "s", executor=more)
    assert len(more.done) == 1
    assert [row["seed"] for row in results.rows] == [1, 0]


def test_attacks_are_audited_and_scored(tmp_path: Path) -> None:
    text = TINY.replace('attacks = "none"', 'attacks = ["spectral"]').replace("-1", "200\nkeep_views = true")
    text = text.replace("batch = 16", "batch = 16\nsigma = 1.0")
    results = run_sweep(parse_sweep(text), tmp_path / "s", executor=InProcess())
    row = results.finished[0]
    assert 0 <= row["attack.spectral"] <= 1
    assert row["measured_epsilon"] >= 0
    assert row["claimed_epsilon"] < row["sound_epsilon"]
    assert (tmp_path / "s" / "runs" / row["id"] / "views").is_dir()


def test_a_point_may_do_without_views(tmp_path: Path) -> None:
    text = TINY.replace('attacks = "none"', 'attacks = ["gradient-direction"]')
    text += "[[point]]\nseed = 0\n[[point]]\nseed = 1\nrecord_views = false\n"
    results = run_sweep(parse_sweep(text), tmp_path / "s", executor=InProcess())
    with_views, without = (results.records[point.id]["attacks"] for point in results.sweep.points)
    assert {attack["status"] for attack in with_views} == {"scored"}
    assert {attack["status"] for attack in without} == {"n/a"}


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds other files"):
        run_sweep(parse_sweep(TINY), tmp_path, executor=InProcess())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_sweeps_never_work_in_one_folder(tmp_path: Path) -> None:
    class Nested(InProcess):
        def run(self, tasks: Any) -> Any:
            with pytest.raises(RunError, match="another sweep works in"):
                run_sweep(parse_sweep(TINY), tmp_path / "s", executor=InProcess())
            yield from super().run(tasks)

    assert run_sweep(parse_sweep(TINY), tmp_path / "s", executor=Nested()).complete


def test_unknown_attacks_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(AttackError, match="'spectral'"):
        run_sweep(parse_sweep(TINY.replace('"none"', '["spectrall"]')), tmp_path / "s", executor=InProcess())
    assert not (tmp_path / "s").exists()


def test_workers_are_counted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="workers is 0"):
        LocalExecutor(0)


def test_a_worker_that_dies_fails_its_point_after_one_more_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def dying(command: list[str], **options: Any) -> subprocess.Popen[str]:
        started.append(command)
        return real([sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"], **options)

    real = subprocess.Popen
    monkeypatch.setattr("securevfl.sweeps.executors.subprocess.Popen", dying)
    with (tmp_path / "log").open("w") as log:
        worker = WorkerProcess(log)
        record = worker.run({"id": "a"})
        worker.close()
    assert record["status"] == "failed"
    assert "died twice" in record["error"]
    assert len(started) == 2


def test_a_machine_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    from securevfl.sweeps.work import run_point

    sweep = parse_sweep(TINY)
    record = run_point(task_of(sweep.points[0], sweep.audit, tmp_path))
    assert "that all machines share" in record["error"]


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from securevfl.sweeps.executors import RayExecutor

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"securevfl\[ray\]"):
        RayExecutor("auto")


def _start(file: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "securevfl.cli", "sweep", str(file), "--out", str(out), "--workers", "1"]
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_heed_interrupts
    )


def _heed_interrupts() -> None:
    """A shell that runs the tests in the background lets them ignore Ctrl-C, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_for_points(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    for _ in range(2400):
        journal = out / "journal.jsonl"
        if journal.exists() and journal.read_bytes().count(b"\n") >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    pytest.fail("the sweep made no progress")


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_sweep_leaves_no_worker_and_resumes(tmp_path: Path) -> None:
    text = TINY.replace("rows=60", "rows=2000") + "[grid]\nseed = [0, 1, 2, 3]\n"
    file, out = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text(text)
    process = _start(file, out)
    _wait_for_points(out, 1, process)
    workers = _children(process.pid)
    assert workers
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    for _ in range(2400):
        if not any(_is_running(pid) for pid in workers):
            break
        time.sleep(0.05)
    assert not any(_is_running(pid) for pid in workers)
    before = set(journal_of(out).records)
    rest = InProcess()
    results = run_sweep(parse_sweep(text), out, executor=rest)
    assert results.complete
    assert before.isdisjoint(rest.done)
    assert len(before) + len(rest.done) == 4
    fresh = tmp_path / "fresh"
    run_sweep(parse_sweep(text), fresh, executor=InProcess())
    assert (out / "results.csv").read_bytes() == (fresh / "results.csv").read_bytes()


def test_ctrl_c_on_the_command_line(tmp_path: Path) -> None:
    # Far more points than can be done before the interrupt arrives.
    text = TINY.replace("rows=60", "rows=2000") + f"[grid]\nseed = {list(range(60))}\n"
    file, out = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text(text)
    process = _start(file, out)
    _wait_for_points(out, 1, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert len(read_rows(out)) == len(journal_of(out).records) >= 1


def test_the_command_prints_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from securevfl.cli.sweep import sweep

    file = tmp_path / "sweep.toml"
    file.write_text(TINY)
    run_sweep(parse_sweep(TINY), tmp_path / "s", executor=InProcess())
    sweep(file, out=tmp_path / "s", json=True)
    content = json.loads(capsys.readouterr().out)
    assert (content["points"], content["finished"], content["failed"]) == (1, 1, 0)
    assert content["rows"][0]["sound_epsilon"] is None
    sweep(file, out=tmp_path / "s")
    assert "1 of 1 points finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a sweep file or --preset"),
        ({"file": Path("a"), "preset": "quick"}, "one of them"),
        ({"preset": "quick"}, "--out DIR"),
        ({"preset": "quick", "out": Path("x"), "workers": 0}, "at least 1"),
        ({"preset": "quick", "out": Path("x"), "data_folder": Path("nowhere")}, "not a folder"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    from securevfl.cli.sweep import sweep

    with pytest.raises(InputError, match=words):
        sweep(**options)
