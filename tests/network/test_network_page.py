"""The page on training between organisations, word by word: separate processes in separate folders."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from federation import free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "network.md"


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def shell(code: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-e", "-c", code], cwd=folder, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def start(code: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            ["bash", "-e", "-c", code.replace("securevfl ", "exec securevfl ")],
            cwd=folder,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def test_the_page_works_and_survives_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("private_set_intersection", reason="openmined-psi is not installed")
    text = PAGE.read_text(encoding="utf-8").replace("127.0.0.1:8750", f"127.0.0.1:{free_port()}")
    text = text.replace("epochs = 6\n", 'epochs = 6\ndelays = "constant"\n')
    page = text[: text.index("## What happens")]
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    tables, (server, party) = blocks[0][1], [code for kind, code in blocks if kind == "toml"]
    certificates, serve, join, audit = [code for kind, code in blocks if kind == "sh"]
    (tmp_path / "tables.py").write_text(tables)
    subprocess.run([sys.executable, "tables.py"], cwd=tmp_path, check=True, env=environment())
    shell(certificates, tmp_path)
    # Slow enough that the clinic can be killed in the middle.
    (tmp_path / "bank" / "server.toml").write_text("time_unit = 0.02\n" + server)
    (tmp_path / "clinic" / "party.toml").write_text(party)
    bank = start(serve, tmp_path, tmp_path / "bank.out")
    clinic = start(join, tmp_path, tmp_path / "clinic.out")
    try:
        until(lambda: (tmp_path / "clinic" / "run" / "checkpoints" / "000001").is_dir(), bank, clinic)
        clinic.send_signal(signal.SIGKILL)
        clinic.wait()
        clinic = start(join, tmp_path, tmp_path / "clinic.out")
        assert clinic.wait(timeout=240) == 0, (tmp_path / "clinic.out").read_text()
        assert bank.wait(timeout=60) == 0, (tmp_path / "bank.out").read_text()
    finally:
        bank.kill()
        clinic.kill()
    assert "has joined" in (tmp_path / "bank.out").read_text()
    shown = shell(audit.replace("audit joint", "audit joint --attacks gradient-norm"), tmp_path)
    assert "bank, clinic -> joint" in shown
    report = json.loads((tmp_path / "joint" / "report.json").read_text())
    assert set(report["owners"]) == {"bank", "clinic"}
    assert report["verdict"] == "no guarantee"  # exact gradients left the bank
    assert json.loads((tmp_path / "clinic" / "run" / "report.json").read_text())["verdict"] == "holds"
    assert [each["score"] for each in report["attacks"] if each["score"] is not None]


def until(condition, *processes: subprocess.Popen[bytes]) -> None:
    for _ in range(2400):
        if condition():
            return
        assert all(process.poll() is None for process in processes), "a process ended early"
        time.sleep(0.05)
    raise AssertionError("it did not happen")
