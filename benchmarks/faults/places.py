"""How a case is run: in one process, with predictions afterwards, or by organisations over a network.

They may run a scoring service afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.cases import CASES, MORE, plan_of
from benchmarks.network import free_port
from securevfl import Plan, Recorder, VerticalData, load_run, train
from securevfl.algorithms import Progress
from securevfl.data.share import OwnTable
from securevfl.network.authority import create_authority, issue
from securevfl.network.config import (
    DataConfig,
    NetworkConfig,
    ParticipantConfig,
    PartyConfig,
    ScoringConfig,
    ServerConfig,
)
from securevfl.network.consent import Acceptance, AlignmentLimits
from securevfl.network.coordinator import Coordinator
from securevfl.network.dispatcher import Sent, ServiceDispatcher
from securevfl.network.gathering import gather, load_truth
from securevfl.network.identity import load_identity
from securevfl.network.member import Member
from securevfl.network.service import Service
from securevfl.settings.protocols import PROTOCOLS
from securevfl.settings.source import load_planned

PARTIES = ("bank", "clinic", "shop")
DEALER = "dealer"
ROWS, WIDTH = 120, 4
_TABLE = DataConfig(file="none")
AT_ONCE = 4
"""People in one request to a scoring service."""


_DESCRIPTION = """
id = "id"
label = "default"
label_holder = "bank"
task = "binary"
[parties.bank]
file = "bank.csv"
columns.balance = { bounds = [-1, 1] }
[parties.clinic]
file = "clinic.csv"
columns.height = { bounds = [-1, 1] }
columns.city = { kind = "category" }
[parties.shop]
file = "shop.csv"
columns.spent = { bounds = [-1, 1] }
"""


def run_case(case: str, folder: Path, seed: int = 0) -> None:
    """Trains a case, and predicts or gathers as it says."""
    plan, about = plan_of(case, seed), (CASES | MORE)[case]
    if "align" in about:
        with tempfile.TemporaryDirectory() as scratch:
            configs = _configs(Path(scratch), plan, about["align"])
            asyncio.run(_train(configs, seed))
            if quota := about.get("serve", 0):
                asyncio.run(_serve(Path(scratch), configs, quota, seed))
            gather([configs[name].folder for name in PARTIES], folder)
        return
    if "described" in about:
        described = describe(folder.with_name(f"{folder.name}-tables"), seed)
        plan = plan.with_changes(source={"data": str(described)})
    profile = None
    if epsilon := about.get("profile", 0.0):
        profile = folder.with_name(f"{folder.name}-profile")
        train(load_planned(plan), plan.with_changes(model="profile", epsilon=epsilon), profile)
    if epochs := about.get("foreign", 0):
        _record(plan, folder, epochs, seed)
        return
    if share := about.get("broken", 0.0):
        _break_off(plan, folder, share)
    else:
        train(load_planned(plan), plan, folder, profile=profile)
    if count := about.get("predict", 0):
        run = load_run(folder)
        generator = np.random.default_rng(seed + 1)
        blocks = [generator.uniform(-1, 1, (count, width)) for width in load_planned(plan).widths]
        run.predict(blocks, ids=[f"new{number}" for number in range(count)])


def describe(folder: Path, seed: int) -> Path:
    """Writes tables with categories and gaps, and their description; returns where that is."""
    generator = np.random.default_rng(seed)
    folder.mkdir()
    numbers = generator.uniform(-1, 1, (ROWS, 3)).round(3).astype(str)
    numbers[generator.random(ROWS) < 0.2, 1] = ""
    cities = generator.choice(
        ["Bonn", "Lille", "Porto", "Graz", "Turku"], ROWS, p=[0.1, 0.15, 0.2, 0.25, 0.3]
    )
    labels = generator.integers(0, 2, ROWS)
    for name, head, cells in (
        (PARTIES[0], ["balance", "default"], [numbers[:, 0], labels]),
        (PARTIES[1], ["height", "city"], [numbers[:, 1], cities]),
        (PARTIES[2], ["spent"], [numbers[:, 2]]),
    ):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["id", *head])
            table.writerows(zip(range(ROWS), *(each.tolist() for each in cells), strict=True))
    found = folder / "data.toml"
    found.write_text(_DESCRIPTION, encoding="utf-8")
    return found


broken = False
"""Whether a run of this process was broken off."""


class BrokenOff(Exception):
    """Somebody ended the run."""


def _break_off(plan: Plan, folder: Path, share: float) -> None:
    """Breaks a run off after a share of its training, and goes on with it."""
    global broken

    def stop(progress: Progress) -> None:
        if progress.done > share:
            raise BrokenOff

    with contextlib.suppress(BrokenOff):
        train(load_planned(plan), plan, folder, progress=stop)
    broken = True
    train(load_planned(plan), plan, folder, resume=True)


def foreign_noise(generator: np.random.Generator, shape: tuple[int, ...], sigma: float) -> Any:
    """The noise of a program that was not written here."""
    return generator.normal(0.0, sigma, shape)


def _record(plan: Plan, folder: Path, epochs: int, seed: int) -> None:
    """A program of its own, with encoders that do not learn, which records what leaves its parties."""
    data, generator = load_planned(plan), np.random.default_rng(seed + 1)
    maps = [generator.normal(size=(width, plan.embedding)) for width in data.widths]
    holder = data.parties[0]
    with Recorder(folder, plan, parties=data.parties, label_holder=holder) as recorder:
        for _ in range(epochs):
            for rows in np.array_split(generator.permutation(data.n_train), data.n_train // plan.batch):
                signs = np.asarray(data.y_train)[rows, None] - 0.5
                for party, block, each in zip(data.parties[1:], data.train[1:], maps[1:], strict=True):
                    values = np.asarray(block)[rows] @ each
                    values *= plan.clip / np.maximum(plan.clip, np.linalg.norm(values, axis=1, keepdims=True))
                    noisy = values + foreign_noise(generator, values.shape, plan.sigma)
                    recorder.exchange(party, rows, noisy, -signs / (1 + np.exp(2 * signs * noisy)))
            recorder.epoch()
        recorder.finish(test={"loss": 0.0})


def truth(case: str, folder: Path, seed: int = 0) -> VerticalData | None:
    """The data behind a run over a network; None where the plan names its own."""
    return load_truth(folder, tables(seed)) if "align" in (CASES | MORE)[case] else None


def tables(seed: int) -> dict[str, OwnTable]:
    """Everybody's records; each organisation has some that the others have not, and an order of its own."""
    generator = np.random.default_rng(seed)
    blocks = {name: generator.uniform(-1, 1, (ROWS, WIDTH)).astype(np.float32) for name in PARTIES}
    labels = (sum(block[:, 0] for block in blocks.values()) > 0).astype(int)
    ids = np.array([f"id{number:04d}" for number in range(ROWS)])
    return {
        name: OwnTable.from_arrays(
            block, ids=ids, labels=labels if name == PARTIES[0] else None, bounds=(-1.0, 1.0)
        )
        for name, block in blocks.items()
    }


def _configs(folder: Path, plan: Plan, align: str) -> dict[str, ParticipantConfig]:
    """What every organisation is configured with, by name; the coordinator comes first."""
    names = (*PARTIES, DEALER) if plan.algorithm == "sealed" else PARTIES
    issue(create_authority(folder / "ca", name="faults"), names, out=folder / "keys")
    known = {name: load_identity(folder / "keys" / name) for name in names}
    port = free_port()
    shared: dict[str, Any] = {"run": "faults", "base": folder, "network": NetworkConfig(patience=30.0)}
    server = ServerConfig(
        **shared,
        folder=folder / PARTIES[0],
        identity=known[PARTIES[0]],
        listen=f"127.0.0.1:{port}",
        parties=PARTIES[1:],
        plan=plan,
        align=align,
        time_unit=0.0,
    )
    accept = Acceptance(
        epsilon=math.inf,
        members=names,
        algorithms=(plan.algorithm,),
        protocols=PROTOCOLS,
        test_fraction=1.0,
        evaluations=1000,
        alignment=AlignmentLimits(kinds=(align,), ids=10_000, times=9),
        delta=1.0,
        dealer=DEALER,
        adversary="semi-honest",
        predictions=1000,
        requests=1000,
    )
    found: dict[str, ParticipantConfig] = {PARTIES[0]: server}
    for name in names[1:]:
        found[name] = PartyConfig(
            **shared,
            folder=folder / name,
            identity=known[name],
            coordinator=PARTIES[0],
            address=f"127.0.0.1:{port}",
            accept=accept,
            local=plan.local,
        )
    return found


async def _train(configs: Mapping[str, ParticipantConfig], seed: int) -> None:
    """All organisations in one event loop."""
    found = tables(seed)
    nodes: list[Any] = [
        Coordinator(config) if isinstance(config, ServerConfig) else Member(config)
        for config in configs.values()
    ]
    for node in nodes:
        if node.name in found:
            node.own = found[node.name]
            node.config = replace(node.config, data=_TABLE)
    async with asyncio.timeout(60):
        await asyncio.gather(*(node.run() for node in nodes))


async def _serve(folder: Path, configs: Mapping[str, ParticipantConfig], quota: int, seed: int) -> None:
    """A scoring service with a quota, which is asked for more than that, and for somebody of the training."""
    new, known = [f"new{number:04d}" for number in range(quota + AT_ONCE)], [f"id{n:04d}" for n in range(4)]
    generator = np.random.default_rng(seed + 1)
    for name in PARTIES:
        with (folder / f"people-{name}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["id", *(f"x{number}" for number in range(WIDTH))])
            for person in (*new, *known):
                table.writerow([person, *generator.uniform(-1, 1, WIDTH).astype(np.float32).tolist()])
    listen = f"127.0.0.1:{free_port()}"
    services = {
        name: Service(
            [
                replace(
                    config,
                    data=_TABLE if name in PARTIES else None,
                    scoring=ScoringConfig(
                        file=f"people-{name}.csv" if name in PARTIES else "",
                        listen=listen,
                        people=quota,
                        requests=100,
                        rounds=1,
                    ),
                )
            ]
        )
        for name, config in configs.items()
    }
    tasks = {name: asyncio.create_task(service.run()) for name, service in services.items()}
    try:
        async with asyncio.timeout(60):
            leads = services[PARTIES[0]]
            while not (leads.dispatchers and leads.dispatchers["faults"].ready):
                await asyncio.wait(tasks.values(), timeout=0.05)
            await _ask(leads.dispatchers["faults"], new, known)
            leads.stop()
            await tasks[PARTIES[0]]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _ask(dispatcher: ServiceDispatcher, new: list[str], known: list[str]) -> None:
    """Request by request, the first one again at the end; what is refused is refused."""
    asked = [new[start : start + AT_ONCE] for start in range(0, len(new), AT_ONCE)]
    for number, people in enumerate([*asked, known, asked[0]]):
        with contextlib.suppress(Sent):
            await dispatcher.score(f"key{number % (len(asked) + 1)}", people)
