"""Ten minutes of the scoring service at half its load, while one side is killed and started again.

Two organisations and a dealer train a sealed scorecard and start `securevfl score-server`; a plain client
sends 250 requests a second at fixed times and repeats, with the same key, what is not answered. Half-way
through the party's process is killed and another one started. In the end every request was answered, every
score stands in both ledgers once, and no process holds more memory than when it had warmed up. Run as

    python -m benchmarks.endurance [--folder DIR] [--seconds S] [--page FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.scoring import CONNECTIONS, NAMES, Client, Company

RATE = 250.0
VICTIM = "shop"
AWAY = 2.0
"""Seconds between the end of a process and the start of another."""
MOST_AWAY = 600.0
"""Seconds in which everybody must be together again; a crowded machine takes its time."""
PATIENCE = 1.0
"""Seconds after which a client repeats what was not answered."""
SAMPLES = 60
WARM = 0.1
"""Share of the time after which a process that was started has warmed up."""


@dataclass(kw_only=True)
class Endured:
    """What was seen: latencies by the time at which requests were due, statuses of requests that were
    repeated, memory by time, and when the party was away."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    repeated: Counter[int] = field(default_factory=Counter)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    away: tuple[float, float] = (0.0, 0.0)

    def grown(self, name: str) -> tuple[int, int]:
        """Memory of a process when it had warmed up, and at the end.

        Raises:
            RuntimeError: It came back too late to warm up.
        """
        begun = self.away[1] if name == VICTIM else 0.0
        end, last = self.memory[-1]
        warm = [held[name] for at, held in self.memory if begun + WARM * end <= at < end]
        if not warm:
            raise RuntimeError(f"{name} came back after {begun:.0f} of {end:.0f} s; let it run longer")
        return warm[0], last[name]


class Endurance:
    """One run.

    Args:
        company: Organisations whose services run.
        seconds: For how long.
        rate: Requests a second.
    """

    def __init__(self, company: Company, seconds: float, rate: float = RATE) -> None:
        self.company, self.seconds, self.rate = company, seconds, rate
        self.found, self._free = Endured(), list[Client]()
        self._begun = 0.0
        self._connections = asyncio.Semaphore(CONNECTIONS)

    async def run(self) -> Endured:
        await self.company.ready()
        self._begun = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            group.create_task(self._kill())
            for number, who in zip(
                range(int(self.rate * self.seconds)), itertools.cycle(self.company.ids), strict=False
            ):
                due = number / self.rate
                if (wait := due - self._now()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._one(f"k{number}", who, due))
        for client in self._free:
            client.close()
        await asyncio.sleep(0)  # connections end with the next turn of the loop
        return self.found

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    async def _one(self, key: str, who: str, due: float) -> None:
        async with self._connections:
            client = self._free.pop() if self._free else Client(self.company.port)
            while (status := await self._ask(client, key, who)) != 200:
                self.found.repeated[status] += 1
                await asyncio.sleep(PATIENCE)
            self._free.append(client)
        self.found.latencies.append((due, self._now() - due))

    @staticmethod
    async def _ask(client: Client, key: str, who: str) -> int:
        try:
            return (await client.score([who], key))[0]
        except OSError:
            return 0

    async def _watch(self) -> None:
        for number in range(SAMPLES + 1):
            await asyncio.sleep(max(0.0, number * self.seconds / SAMPLES - self._now()))
            held = {
                name: 0 if self.company.running[name].poll() is not None else self.company.memory(name)
                for name in NAMES
            }
            self.found.memory.append((self._now(), held))

    async def _kill(self) -> None:
        await asyncio.sleep(self.seconds / 2)
        begun = self._now()
        self.company.kill(VICTIM)
        await asyncio.sleep(AWAY)
        self.company.start(VICTIM)
        await self.company.ready(MOST_AWAY)
        self.found.away = begun, self._now()


def plot(path: Path, found: Endured) -> None:
    """Latencies and memory over time."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True)
    due, taken = np.array(sorted(found.latencies)).T
    for axes in (above, below):
        axes.axvspan(*found.away, color="0.9", label=f"{VICTIM} killed and back")
    edges = np.linspace(0, due.max(), SAMPLES + 1)
    places = np.clip(np.searchsorted(edges, due, "right") - 1, 0, SAMPLES - 1)
    for share, name in ((0.5, "median"), (0.99, "99 of 100"), (1.0, "worst")):
        each = [np.quantile(taken[places == place], share) for place in range(SAMPLES)]
        above.semilogy((edges[1:] + edges[:-1]) / 2, 1000 * np.array(each), label=name)
    above.set(ylabel="latency, ms", title=f"{len(due):,} requests, {RATE:g} a second")
    for name in NAMES:
        below.plot(
            [at for at, _ in found.memory], [held[name] / 2**20 for _, held in found.memory], label=name
        )
    below.set(xlabel="seconds", ylabel="memory, MB", ylim=(0, None))
    above.legend(loc="upper right", fontsize="small")
    below.legend(loc="lower right", fontsize="small")
    figure.tight_layout()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(path, format="svg", metadata=nothing)


def serve(company: Company, seconds: float, rate: float = RATE) -> Endured:
    """Trains, serves for so long and ends; the ledgers are there afterwards."""
    try:
        company.train()
        company.serve()
        found = asyncio.run(Endurance(company, seconds, rate).run())
        company.stop()
    finally:
        company.end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        company = Company(Path(folder))
        found = serve(company, given.seconds)
        both = [Counter(company.scored(name)) for name in ("bank", "shop")]
    taken = [latency for _, latency in found.latencies]
    print(f"{len(taken):,} requests, repeated by status {dict(found.repeated)}")
    p50, p99 = (1000 * float(np.quantile(taken, share)) for share in (0.5, 0.99))
    print(f"median {p50:.1f} ms, 99 of 100 {p99:.0f} ms, worst {1000 * max(taken):.0f} ms")
    print(f"{VICTIM} away from {found.away[0]:.1f} to {found.away[1]:.1f} s")
    for name in NAMES:
        warm, end = (held / 2**20 for held in found.grown(name))
        print(f"{name}: {warm:.1f} MB warm, {end:.1f} MB at the end")
    scores = sum(len(rows) * times for rows, times in both[0].items())
    print(f"in both ledgers alike: {both[0] == both[1]}, {scores:,} scores")
    if given.page is not None:
        plot(given.page, found)


if __name__ == "__main__":
    main()
