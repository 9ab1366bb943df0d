"""The scoring service: latencies and scores a second, of real processes on loopback with mutual TLS.

Two organisations and a dealer train a sealed scorecard, start `securevfl score-server`, and a plain client
asks. Requests come at fixed times whether answers are there or not (an open loop), so that a slow answer does
not hide the ones behind it; a latency counts from the time at which the request was due. A page that asks no
organisation, at the same rate, shows what the machine leaves to a bare HTTP exchange. Run as

    python -m benchmarks.scoring [--folder DIR] [--seconds S] [--page FILE]

The folder decides what a synced write costs, which every score pays twice; one in memory shows the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import json
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.network.authority import create_authority, issue
from securevfl.privacy.ledger import read_ledger, rows_from_text

P99_GOAL, RATE_GOAL, BATCH_GOAL = 0.010, 500.0, 20_000.0
PEOPLE, TRAINED = 20_000, 2_000
NAMES = ("bank", "shop", "dealer")
CONNECTIONS = 200
SECUREVFL = str(Path(sys.executable).parent / "securevfl")
ACCEPT = """[accept]
epsilon = inf
members = ["bank", "shop", "dealer"]
algorithms = ["sealed"]
protocols = ["plain"]
test_fraction = 1.0
evaluations = 1000
alignment = { kinds = ["none"], ids = 1000000, times = 100 }
delta = 1.0
dealer = "dealer"
adversary = "semi-honest"
predictions = 1000000000
requests = 1000000000
"""


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


class Company:
    """Organisations in folders of their own, as processes of the command line."""

    def __init__(self, folder: Path, *, people: int = PEOPLE, trained: int = TRAINED) -> None:
        self.folder, self.port = folder, free_port()
        self.ids = [f"new{i:06d}" for i in range(people)]
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        issue(create_authority(folder / "ca", name="bench"), NAMES, out=folder)
        address, draw = f"127.0.0.1:{free_port()}", np.random.default_rng(0)
        rows = {name: draw.uniform(-1, 1, (trained + people, 5)) for name in ("bank", "shop")}
        labels = (sum(block.sum(axis=1) for block in rows.values()) > 0).astype(int)
        known = [f"id{i:06d}" for i in range(trained)]
        for name in NAMES:
            self._configure(name, address)
            if name in rows:
                answers = labels[:trained] if name == "bank" else None
                write_table(folder / name / "table.csv", known, rows[name][:trained], answers)
                write_table(folder / name / "people.csv", self.ids, rows[name][trained:])

    def _configure(self, name: str, address: str) -> None:
        lines = ['run = "cards"', 'certificates = "."', 'folder = "run"']
        if name == "bank":
            lines += [f'listen = "{address}"', 'parties = ["shop"]', 'align = "none"']
            tail = ["[plan]", 'algorithm = "sealed"', 'model = "scorecard"', "epsilon = 1.0"]
            tail += ["[plan.sealed]", 'adversary = "semi-honest"', 'dealer = "dealer"']
        else:
            lines += ['coordinator = "bank"', f'address = "{address}"']
            tail = ACCEPT.splitlines()
        scoring = ["[scoring]", "people = 1000000000", "requests = 1000000000"]
        scoring += [f'listen = "127.0.0.1:{self.port}"', 'file = "people.csv"']
        if name != "dealer":
            tail += ["[data]", 'file = "table.csv"'] + (['label_column = "y"'] if name == "bank" else [])
            tail += ["[data.bounds]", *(f"x{i} = [-1.0, 1.0]" for i in range(5))]
        (self.folder / name / "config.toml").write_text("\n".join([*lines, *scoring, *tail]) + "\n")

    def train(self) -> None:
        for name in NAMES:
            self.start(name, "serve" if name == "bank" else "join")
        for name in NAMES:
            if self.running[name].wait(timeout=600):
                raise RuntimeError(f"{name}: {self.said(name)}")

    def start(self, name: str, command: str = "score-server") -> None:
        with (self.folder / f"{name}.out").open("ab") as file:
            self.running[name] = subprocess.Popen(
                [SECUREVFL, command, "--config", str(self.folder / name / "config.toml")],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def serve(self) -> None:
        for name in NAMES:
            self.start(name)

    async def ready(self, seconds: float = 120) -> None:
        async with asyncio.timeout(seconds):
            while True:
                for name, process in self.running.items():
                    if process.poll():
                        raise RuntimeError(f"{name}: {self.said(name)}")
                client = Client(self.port)
                try:
                    if (await client.ask("GET", "/health"))[0] == 200:
                        return
                except OSError:
                    pass
                finally:
                    client.close()
                await asyncio.sleep(0.05)

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()

    def stop(self) -> None:
        """The label holder drains, then everybody ends."""
        for name in NAMES:
            if self.running[name].poll() is None:
                self.running[name].send_signal(signal.SIGTERM)
                self.running[name].wait(timeout=60)

    def end(self) -> None:
        """Whatever still runs."""
        for process in self.running.values():
            process.kill()
            process.wait()

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def memory(self, name: str) -> int:
        """Bytes of memory that a process holds, counted page by page: the quick figure lags behind."""
        held = Path(f"/proc/{self.running[name].pid}/smaps_rollup").read_text()
        return 1024 * int(held.split("Rss:")[1].split()[0])

    def processor(self) -> float:
        """Seconds of processor time that all services have used."""
        ticks = 0
        for process in self.running.values():
            ticks += sum(
                map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13])
            )
        return ticks / os.sysconf("SC_CLK_TCK")

    def scored(self, name: str) -> list[tuple[int, ...]]:
        """Rows of every entry of a ledger that counts scores."""
        entries = read_ledger(self.folder / name / "run" / "ledger" / f"{name}.jsonl")
        kinds = ("prediction", "scoring")
        found = [each.content for each in entries if each.content["kind"] in kinds]
        return [tuple(rows_from_text(each["rows"]).tolist()) for each in found]


def write_table(path: Path, ids: list[str], block: Any, labels: Any = None) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(
            ["id", *(f"x{i}" for i in range(block.shape[1])), *(["y"] if labels is not None else [])]
        )
        for place, (each, row) in enumerate(zip(ids, block.tolist(), strict=True)):
            table.writerow([each, *row, *([labels[place]] if labels is not None else [])])


class Client:
    """A plain HTTP client that keeps its connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: bytes = b"", key: str = "") -> tuple[int, bytes]:
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # the service ends connections that were idle for a minute
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        reader, writer = self._streams
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        if method == "POST":
            head += (
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nIdempotency-Key: {key}\r\n"
            )
        writer.write(head.encode() + b"\r\n" + body)
        try:
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length:")[1].split()[0])
            return int(answer.split()[1]), await reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            self.close()
            raise ConnectionResetError from error

    async def score(self, ids: list[str], key: str = "") -> tuple[int, bytes]:
        body = json.dumps({"ids": ids}).encode()
        return await self.ask("POST", "/v1/score", body, key or secrets.token_hex(8))

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Load:
    """Requests at fixed times, over as many connections as are needed."""

    def __init__(self, company: Company) -> None:
        self.company, self.free = company, list[Client]()
        self.latencies: list[float] = []
        self.failures: list[Any] = []
        self._ids = itertools.cycle(company.ids)
        self._connections = asyncio.Semaphore(CONNECTIONS)

    async def one(self, size: int, due: float) -> None:
        async with self._connections:
            await self._one(size, due)

    async def _one(self, size: int, due: float) -> None:
        client = self.free.pop() if self.free else Client(self.company.port)
        ids = [next(self._ids) for _ in range(size)]
        try:
            status, body = await (client.score(ids) if size else client.ask("GET", "/v1/models"))
            if status != 200:
                self.failures.append((status, body))
        except OSError as error:
            self.failures.append(error)
        self.latencies.append(time.perf_counter() - due)
        self.free.append(client)

    async def at(self, rate: float, seconds: float, size: int = 1) -> dict[str, float]:
        """So many requests a second."""
        self.latencies, self.failures = [], []
        begun, before, tasks = time.perf_counter(), self.company.processor(), set[asyncio.Task[None]]()
        own = resource.getrusage(resource.RUSAGE_SELF)
        for number in range(int(rate * seconds)):
            due = begun + number / rate
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            task = asyncio.create_task(self.one(size, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.sleep(0.001)
        return self._figures(begun, before, own, size)

    async def full(self, seconds: float, size: int, clients: int) -> dict[str, float]:
        """As many as some clients get, each asking again as soon as it has its answer."""
        self.latencies, self.failures = [], []
        begun, before = time.perf_counter(), self.company.processor()
        own = resource.getrusage(resource.RUSAGE_SELF)

        async def client() -> None:
            while time.perf_counter() < begun + seconds:
                await self.one(size, time.perf_counter())

        await asyncio.gather(*(client() for _ in range(clients)))
        return self._figures(begun, before, own, size)

    def _figures(self, begun: float, before: float, own: Any, size: int) -> dict[str, float]:
        if self.failures:
            raise RuntimeError(f"{len(self.failures)} requests failed: {self.failures[0]}")
        took, now = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
        count = len(self.latencies)
        return {
            "scores_per_second": size * count / took,
            "p10": float(np.quantile(self.latencies, 0.1)),
            "p50": float(np.quantile(self.latencies, 0.5)),
            "p99": float(np.quantile(self.latencies, 0.99)),
            "worst": max(self.latencies),
            "services_ms_per_request": 1000 * (self.company.processor() - before) / count,
            "client_ms_per_request": 1000
            * (now.ru_utime + now.ru_stime - own.ru_utime - own.ru_stime)
            / count,
        }


def sync_cost(folder: Path) -> list[float]:
    """Seconds that a synced write of a ledger's line takes there: median and 99th percentile."""
    taken = []
    with (folder / "sync").open("ab", buffering=0) as file:
        for _ in range(200):
            begun = time.perf_counter()
            file.write(b"x" * 500)
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - begun)
    (folder / "sync").unlink()
    return [float(np.quantile(taken, share)) for share in (0.5, 0.99)]


async def measure(company: Company, seconds: float, page: Path | None) -> None:
    load = Load(company)
    median, slow = (1000 * each for each in sync_cost(company.folder))
    print(f"a synced write takes {median:.2f} ms, 1 of 100 {slow:.1f} ms; load {os.getloadavg()[0]:.1f}")
    await load.at(50, 2)
    found: dict[str, dict[str, float]] = {}
    curves: dict[str, list[float]] = {}
    for name, work in {
        "a page alone, 500": lambda: load.at(RATE_GOAL, seconds, 0),
        "500 a second": lambda: load.at(RATE_GOAL, seconds),
        "64 clients": lambda: load.full(seconds, 1, 64),
        "batches of 1,000": lambda: load.full(seconds, 1000, 4),
    }.items():
        found[name] = await work()
        curves[name] = sorted(load.latencies)
        show(name, found[name])
    _, late, singles, batches = found.values()
    single, batched = singles["scores_per_second"], batches["scores_per_second"]
    goals = {
        f"p99 at 500 a second: {1000 * late['p99']:.1f} ms (goal {1000 * P99_GOAL:g})": late["p99"]
        <= P99_GOAL,
        f"single scores a second: {single:,.0f} (goal {RATE_GOAL:g})": single >= RATE_GOAL,
        f"in batches: {batched:,.0f} a second (goal {BATCH_GOAL:,.0f})": batched >= BATCH_GOAL,
    }
    for line, met in goals.items():
        print(f"{'met    ' if met else 'MISSED '} {line}")
    if page is not None:
        plot(page, curves)
        print(f"page: {page}")


def show(name: str, figures: dict[str, float]) -> None:
    latencies = "   ".join(f"{each} {1000 * figures[each]:.1f}" for each in ("p10", "p50", "p99", "worst"))
    print(
        f"{name:18} {figures['scores_per_second']:9,.0f} scores/s   {latencies} ms   processor ms a request: "
        f"services {figures['services_ms_per_request']:.2f}, client {figures['client_ms_per_request']:.2f}",
        flush=True,
    )


def plot(path: Path, curves: dict[str, list[float]]) -> None:
    """Latencies by the share of requests that had to wait longer."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, latencies in curves.items():
        share = 1 - np.arange(len(latencies)) / len(latencies)
        axes.loglog(1000 * np.array(latencies), share, label=name)
    axes.axvline(1000 * P99_GOAL, color="grey", linewidth=0.8)
    axes.axhline(0.01, color="grey", linewidth=0.8)
    axes.set(xlabel="latency, ms", ylabel="share of requests that took longer")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        company = Company(Path(folder))
        try:
            company.train()
            company.serve()
            asyncio.run(_measure(company, given))
            company.stop()
            both = [sorted(company.scored(name)) for name in ("bank", "shop")]
            scores, rounds = sum(map(len, both[0])), len(both[0])
            print(f"in both ledgers: {both[0] == both[1]}, {scores:,} scores, {rounds:,} rounds")
        finally:
            company.end()


async def _measure(company: Company, given: argparse.Namespace) -> None:
    await company.ready()
    await measure(company, given.seconds, given.page)


if __name__ == "__main__":
    main()
