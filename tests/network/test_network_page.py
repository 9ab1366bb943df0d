"""The page on training between organisations, word by word: separate processes in separate folders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from federation import free_port
from in_process import run_program, run_shell
from warm import Command

PAGE = Path(__file__).resolve().parents[2] / "docs" / "network.md"


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def start(code: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """A shell's process of its own, which takes a while to load everything."""
    with log.open("ab") as file:
        return subprocess.Popen(
            ["bash", "-e", "-c", code.replace("securevfl ", "exec securevfl ")],
            cwd=folder,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
        )


VIEWS, WORDS = "record_views = true", "record_words = true"
Process: TypeAlias = Command | subprocess.Popen[bytes]


class Page:
    """The page's commands in a folder, with the coordinator at an address."""

    def __init__(self, folder: Path, address: str, *, dealt: bool = False) -> None:
        text = PAGE.read_text(encoding="utf-8").replace("127.0.0.1:8750", address)
        blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
        tables, (server, shop, named, dealer) = (
            blocks[0][1],
            [code for kind, code in blocks if kind == "toml"],
        )
        shells = [code for kind, code in blocks if kind == "sh"]
        certificates, self.serve, self.join, self.audit, admitted, self.deal = shells
        self.folder, self.dealt = folder, dealt
        if dealt:
            certificates, server = certificates + admitted, f"{server}\n{named}"
            shop = shop.replace('"shop"]', '"shop", "dealer"]').replace('dealer = ""', 'dealer = "dealer"')
            shop = shop.replace('"semi-honest"', '"malicious"')
            self.audit = self.audit.replace("shop/run --out", "shop/run dealer/run --out")
            # As the page says: without words totals are too few to tell whose noise is in them.
            server, shop, dealer = (
                each.replace(VIEWS, f"{VIEWS}\n{WORDS}") for each in (server, shop, dealer)
            )
        (folder / "tables.py").write_text(tables)
        with contextlib.chdir(folder):
            run_program(folder / "tables.py")
            run_shell(certificates)
        # Slow enough that something can happen in the middle.
        (folder / "bank" / "server.toml").write_text("time_unit = 0.02\n" + server)
        (folder / "shop" / "party.toml").write_text(shop)
        if dealt:
            (folder / "dealer" / "party.toml").write_text(dealer)

    def begun(self, epoch: int) -> bool:
        return (self.folder / "shop" / "run" / "checkpoints" / f"{epoch:06d}").is_dir()

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def finish(self, **processes: Process) -> None:
        for name, process in processes.items():
            assert process.wait(timeout=240) == 0, self.said(name)


def dossier(run: Path) -> dict[str, Any]:
    """The report of a run's only audit."""
    (found,) = run.glob("audits/*/report.json")
    return json.loads(found.read_text())


def everybody(page: Page) -> dict[str, Command]:
    """The page's processes."""
    commands = {"bank": page.serve, "shop": page.join} | ({"dealer": page.deal} if page.dealt else {})
    return {
        name: Command.line(code, page.folder, page.folder / f"{name}.out") for name, code in commands.items()
    }


@pytest.mark.parametrize("dealt", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_ends_in_a_run_that_holds(tmp_path: Path, capfd, dealt: bool) -> None:
    page = Page(tmp_path, f"127.0.0.1:{free_port()}", dealt=dealt)
    running = everybody(page)
    try:
        page.finish(**running)
    finally:
        for process in running.values():
            process.kill()
    with contextlib.chdir(tmp_path):
        run_shell(page.audit.replace("--attacks none", "--attacks none --canaries -1"))
    assert f"bank, {'dealer, ' if dealt else ''}shop -> joint" in capfd.readouterr().out
    report = dossier(tmp_path / "joint")
    assert report["run"]["labels"].startswith("sealed: only noisy totals")
    cells = [cell for row in report["owners"].values() for cell in row["observers"].values()]
    assert all(cell["epsilon_upper"] <= 1.0 for cell in cells)
    assert set(report["owners"]) == {"bank", "shop"} and report["verdict"] == "holds"
    assert dossier(tmp_path / "shop" / "run")["verdict"] == "not tested"  # alone


@pytest.mark.parametrize("dealt", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_page_survives_a_kill(tmp_path: Path, dealt: bool) -> None:
    page = Page(tmp_path, f"127.0.0.1:{free_port()}", dealt=dealt)
    running = everybody(page)
    try:
        until(lambda: page.begun(1), *running.values())
        running["shop"].send_signal(signal.SIGKILL)
        running["shop"].wait()
        running["shop"] = Command.line(page.join, tmp_path, tmp_path / "shop.out")
        page.finish(**running)
    finally:
        for process in running.values():
            process.kill()
    assert "has joined" in page.said("bank")
    with contextlib.chdir(tmp_path):
        run_shell(page.audit.replace("--attacks none", "--attacks none --canaries -1"))
    # Rounds came again, each with an entry of its own: no alarm, but nothing to replay either.
    assert dossier(tmp_path / "joint")["verdict"] == "not tested"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them; skips where the system does not allow them."""
    names = tuple(f"svfl-{os.getpid()}-{letter}" for letter in "ab")
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip -n {names[0]} link add cable type veth peer name cable netns {names[1]}",
        *(f"ip -n {name} addr add 10.77.0.{i}/24 dev cable" for i, name in enumerate(names, start=1)),
        *(f"ip -n {name} link set {device} up" for name in names for device in ("lo", "cable")),
    ]
    try:
        for command in commands:
            if shutil.which("ip") is None or subprocess.run(command.split(), capture_output=True).returncode:
                pytest.skip("no network namespaces here")
        yield names
    finally:
        for name in names if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
def test_two_hosts_bridge_a_cable_that_is_pulled(tmp_path: Path) -> None:
    """Nothing in common but a network, and that is away for a while: the run goes on where it was."""
    with two_hosts() as (one, other):
        page = Page(tmp_path, "10.77.0.1:8750", dealt=True)
        bank = start(f"ip netns exec {one} bash -e -c '{page.serve}'", tmp_path, tmp_path / "bank.out")
        shop = start(f"ip netns exec {other} bash -e -c '{page.join}'", tmp_path, tmp_path / "shop.out")
        dealer = start(f"ip netns exec {other} bash -e -c '{page.deal}'", tmp_path, tmp_path / "dealer.out")
        try:
            until(lambda: page.begun(1), bank, shop, dealer)
            for state, seconds in (("down", 3), ("up", 0)):
                subprocess.run(["ip", "-n", other, "link", "set", "cable", state], check=True)
                time.sleep(seconds)
            page.finish(shop=shop, dealer=dealer, bank=bank)
        finally:
            for process in (bank, shop, dealer):
                process.kill()
    assert "goes back" not in page.said("bank")
    results = [json.loads((tmp_path / name / "run" / "result.json").read_text()) for name in ("bank", "shop")]
    assert {each["stopped"] for each in results} == {None}
    assert results[0]["epochs"] == results[1]["epochs"]


def until(condition, *processes: Process) -> None:
    for _ in range(2400):
        if condition():
            return
        assert all(process.poll() is None for process in processes), "a process ended early"
        time.sleep(0.05)
    raise AssertionError("it did not happen")
