"""The service examples are what the commands are, and a running process can be watched and stopped."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from federation import free_port

from securevfl import Plan, errors
from securevfl.network.authority import create_authority, issue
from securevfl.network.config import read_party_config, read_server_config
from securevfl.network.progress import run_progress

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "network"
UNITS = sorted(EXAMPLE.glob("*.service"))


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def securevfl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "securevfl.cli", *arguments]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """The example's folders with certificates, on a free port."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    authority = create_authority(tmp_path / "ca", name="test")
    issue(authority, ["bank", "clinic"], out=tmp_path / "handed-over")
    for name in ("bank", "clinic"):
        (tmp_path / "handed-over" / name).rename(tmp_path / name / "certificates")
    (tmp_path / "bank" / "bank.csv").write_text("id,x,defaulted\na,1,0\nb,2,1\nc,3,0\n")
    return tmp_path


def unit(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser


def test_configurations_are_valid_and_fit_together(folders: Path) -> None:
    server = read_server_config(folders / "bank" / "server.toml")
    party = read_party_config(folders / "clinic" / "party.toml")
    assert server.run == party.run and server.parties == (party.identity.name,)
    assert party.coordinator == server.identity.name
    assert party.address.rpartition(":")[2] == server.listen.rpartition(":")[2]
    accept = party.accept
    assert accept is not None and server.plan.algorithm in (accept.algorithms or ())
    stated = (accept.epsilon, accept.members, accept.protocols, accept.test_fraction, accept.evaluations)
    assert None not in stated and accept.alignment is not None


def commands() -> list[list[str]]:
    units = [shlex.split(unit(path)["Service"]["ExecStart"])[1:] for path in UNITS]
    compose = re.findall(r"command: (\[.*\])", (EXAMPLE / "compose.yaml").read_text())
    found = units + [json.loads(line) for line in compose]
    return [shlex.split(each) for each in sorted({shlex.join(each) for each in found})]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_commands_exist(arguments: list[str]) -> None:
    done = subprocess.run(
        securevfl(*arguments, "--help"), capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0 and f" {arguments[0]} [OPTIONS]" in done.stdout
    for option in (each for each in arguments if each.startswith("--")):
        assert option in done.stdout


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_start_again_where_another_try_can_help(path: Path) -> None:
    service = unit(path)["Service"]
    never = {int(code) for code in service["RestartPreventExitStatus"].split()}
    hopeless = (errors.InputError, errors.ProtocolError, errors.BudgetExceeded, errors.LedgerError)
    assert never == {each.exit_code for each in hopeless}
    assert errors.NetworkError.exit_code not in never and service["SuccessExitStatus"] == "130"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_are_well_formed(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = path.read_text().replace("/opt/securevfl/bin/securevfl", "/bin/true")
    (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert path.name.split("@")[0] not in done.stderr, done.stderr


def test_the_page_tells_every_metric_and_exit_code() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    source = (ROOT / "securevfl" / "network" / "participant.py").read_text()
    snapshot = re.findall(r'^            "(\w+)": ', source[source.index("def status") :], re.MULTILINE)
    now = run_progress(Plan(epsilon=1.0), mu=0.1, epoch=1, away=(), resumed=None)
    words = {"organisation", "run", "phase", "guarantee", "away"}
    shown = {*snapshot, *now.figures}
    assert set(re.findall(r"`securevfl_(\w+)`", page)) == {"info", *shown} - words
    assert words < shown and all(f"`{word}`" in page for word in words)
    assert f"| {errors.NetworkError.exit_code} |" in page and "| 130 |" in page


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
        return str(answer.read().decode())


def test_a_waiting_coordinator_can_be_watched_and_stopped(folders: Path) -> None:
    pytest.importorskip("grpc", reason="needs securevfl[network]")
    config, port = folders / "bank" / "server.toml", free_port()
    text = config.read_text().replace("0.0.0.0:8750", f"127.0.0.1:{free_port()}")
    config.write_text(text.replace("127.0.0.1:9750", f"127.0.0.1:{port}"))
    process = subprocess.Popen(
        securevfl("serve", "--config", str(config), "--json"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        while True:
            assert process.poll() is None, process.communicate()
            try:
                health = json.loads(get(port, "/health"))
                break
            except urllib.error.URLError:
                time.sleep(0.05)
        metrics = get(port, "/metrics")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert health["status"] == "ok" and health["organisation"] == "bank" and health["connected"] == 0
    assert 'securevfl_info{organisation="bank",run="credit",phase="' in metrics
    assert "\nsecurevfl_peers 1\n" in metrics and "\nsecurevfl_mu 0.0\n" in metrics
    assert process.returncode == 130 and out == "" and "go on with: securevfl serve" in err
    lines = [json.loads(line) for line in (folders / "bank" / "run.log").read_text().splitlines()]
    assert any(line["event"] == "status page" for line in lines)


def test_the_logged_example_is_a_log_line(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    from securevfl.network import monitoring

    allowed = {"time", "level", "event", "error", *monitoring._FIELDS}
    assert set(json.loads(example)) <= allowed
    told = re.search(r"`time` \(UTC\).*?where they belong", page, re.DOTALL)
    assert told is not None and set(re.findall(r"`(\w+)`", told[0])) == allowed
