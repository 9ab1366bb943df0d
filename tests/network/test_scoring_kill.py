"""Real processes score people while any of them is killed and started again: every score once."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SECONDS = float(os.environ.get("SECUREVFL_SCORING_SECONDS", "30"))
"""How long clients ask while processes are killed."""
ENDURING = float(os.environ.get("SECUREVFL_ENDURING_SECONDS", "600"))
"""How long the service is asked at half its load."""


class Clients:
    """Plain HTTP clients that ask again, with the same key, until they have an answer."""

    def __init__(self, scoring: Any, company: Any) -> None:
        self.scoring, self.company = scoring, company
        self.asked = 0
        self.answers: dict[str, tuple[str, bytes]] = {}
        self.over = False

    async def one(self, name: int) -> None:
        draw, client = random.Random(name), self.scoring.Client(self.company.port)
        while not self.over:
            who, key = draw.choice(self.company.ids), f"{name}-{self.asked}"
            self.asked += 1
            answer = await self._until_answered(client, who, key)
            self.answers[key] = who, answer
            await asyncio.sleep(0.02)
        client.close()

    async def _until_answered(self, client: Any, who: str, key: str) -> bytes:
        while True:
            try:
                status, body = await client.score([who], key)
            except OSError:
                status, body = 503, b""
            if status == 200:
                return bytes(body)
            assert status == 503, (status, body)
            await asyncio.sleep(0.1)


async def serve_and_kill(scoring: Any, company: Any) -> Clients:
    clients = Clients(scoring, company)
    await company.ready()
    tasks = [asyncio.create_task(clients.one(name)) for name in range(8)]
    loop, victims = asyncio.get_running_loop(), ["shop", "bank", "dealer", "shop", "bank"]
    end = loop.time() + SECONDS
    try:
        while loop.time() < end:
            await asyncio.sleep(max(1.0, SECONDS / 12))
            victim = victims[0]
            victims = [*victims[1:], victim]
            company.kill(victim)
            await asyncio.sleep(0.3)
            company.start(victim)
            await company.ready()
        clients.over = True
        await asyncio.wait_for(asyncio.gather(*tasks), 300)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await repeat(scoring, company, clients)
    return clients


async def repeat(scoring: Any, company: Any, clients: Clients) -> None:
    """Every key gets the same bytes again."""
    client = scoring.Client(company.port)
    for key, (who, answer) in random.Random(0).sample(sorted(clients.answers.items()), 20):
        assert await client.score([who], key) == (200, answer)
    client.close()


@pytest.mark.slow
def test_scores_while_processes_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    scoring = importlib.import_module("benchmarks.scoring")
    company = scoring.Company(tmp_path, people=500, trained=400)
    try:
        company.train()
        company.serve()
        clients = asyncio.run(serve_and_kill(scoring, company))
        company.stop()
    finally:
        company.end()
    bank, shop = (Counter(company.scored(name)) for name in ("bank", "shop"))
    assert bank == shop
    assert sum(len(rows) * times for rows, times in bank.items()) == len(clients.answers) == clients.asked
    assert len(clients.answers) > 100


async def serve_and_fill(scoring: Any, company: Any) -> dict[str, bytes]:
    """The files of one process, then of another, may not grow; later they may again."""
    await company.ready()
    client, answers, refused = scoring.Client(company.port), dict[str, bytes](), list[tuple[int, bytes]]()

    async def ask(key: str) -> int:
        status, body = await client.score([company.ids[int(key)]], key)
        if status == 200:
            assert answers.setdefault(key, body) == body
        else:
            refused.append((status, body))
        return int(status)

    assert await ask("0") == 200
    for turn, victim in enumerate(("shop", "bank")):
        process = company.running[victim].pid
        length = (company.folder / victim / "run" / "ledger" / f"{victim}.jsonl").stat().st_size
        resource.prlimit(process, resource.RLIMIT_FSIZE, (length + 40, resource.RLIM_INFINITY))
        keys = [str(3 * turn + each) for each in (1, 2, 3)]
        for key in keys:
            assert await ask(key) == 507
        assert await ask("0") == 200  # what was answered before is still known
        resource.prlimit(process, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for key in keys:
            assert await ask(key) == 200
    client.close()
    for _, body in refused:
        assert "cannot" in json.loads(body)["error"], body  # one line that says whose disk it is
    return answers


@pytest.mark.slow
def test_a_disk_of_a_real_process_that_fills_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    scoring = importlib.import_module("benchmarks.scoring")
    company = scoring.Company(tmp_path, people=50, trained=400)
    try:
        company.train()
        company.serve()
        answers = asyncio.run(serve_and_fill(scoring, company))
        company.stop()
    finally:
        company.end()
    bank, shop = (company.scored(name) for name in ("bank", "shop"))
    assert len(answers) == len(bank) == len(set(bank)) == 7
    assert sorted(bank) == sorted(shop)


@pytest.mark.slow
def test_ten_minutes_at_half_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request answered, every score in both ledgers once, no memory that grows."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    endurance = importlib.import_module("benchmarks.endurance")
    company = endurance.Company(tmp_path)
    found = endurance.serve(company, ENDURING)
    assert len(found.latencies) == int(endurance.RATE * ENDURING)
    assert set(found.repeated) <= {0, 503}
    bank, shop = (Counter(company.scored(name)) for name in ("bank", "shop"))
    assert bank == shop
    assert sum(len(rows) * times for rows, times in bank.items()) == len(found.latencies)
    for name in ("bank", "shop", "dealer"):
        warm, end = found.grown(name)
        assert end < 1.05 * warm, name
