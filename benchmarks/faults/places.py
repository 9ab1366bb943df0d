"""How a case is run: in one process, with predictions afterwards, or by organisations over a network."""

from __future__ import annotations

import asyncio
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults.cases import CASES, MORE, plan_of
from benchmarks.network import free_port
from securevfl import Plan, VerticalData, load_run, train
from securevfl.data.share import OwnTable
from securevfl.network.authority import create_authority, issue
from securevfl.network.config import DataConfig, NetworkConfig, PartyConfig, ServerConfig
from securevfl.network.consent import Acceptance, AlignmentLimits
from securevfl.network.coordinator import Coordinator
from securevfl.network.folders import gather, load_truth
from securevfl.network.identity import load_identity
from securevfl.network.member import Member
from securevfl.settings.plan import PROTOCOLS
from securevfl.settings.source import load_planned

PARTIES = ("bank", "clinic", "shop")
DEALER = "dealer"
ROWS, WIDTH = 120, 4


def run_case(case: str, folder: Path, seed: int = 0) -> None:
    """Trains a case, and predicts or gathers as it says."""
    plan, about = plan_of(case, seed), (CASES | MORE)[case]
    if "align" in about:
        with tempfile.TemporaryDirectory() as scratch:
            homes = asyncio.run(_together(Path(scratch), plan, about["align"], seed))
            gather(homes, folder)
        return
    train(load_planned(plan), plan, folder)
    if count := about.get("predict", 0):
        run = load_run(folder)
        generator = np.random.default_rng(seed + 1)
        blocks = [generator.uniform(-1, 1, (count, width)) for width in load_planned(plan).widths]
        run.predict(blocks, ids=[f"new{number}" for number in range(count)])


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


async def _together(folder: Path, plan: Plan, align: str, seed: int) -> list[Path]:
    """All organisations in one event loop; the folders that they leave."""
    names = (*PARTIES, DEALER) if plan.algorithm == "sealed" else PARTIES
    issue(create_authority(folder / "ca", name="faults"), names, out=folder / "keys")
    known = {name: load_identity(folder / "keys" / name) for name in names}
    port, found = free_port(), tables(seed)
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
        alignment=AlignmentLimits(kinds=(align,), ids=10_000, times=2),
        delta=1.0,
        dealer=DEALER,
        adversary="semi-honest",
        predictions=0,
    )
    nodes: list[Any] = [Coordinator(server)]
    for name in names[1:]:
        config = PartyConfig(
            **shared,
            folder=folder / name,
            identity=known[name],
            coordinator=PARTIES[0],
            address=f"127.0.0.1:{port}",
            accept=accept,
            local=plan.local,
        )
        nodes.append(Member(config))
    for node in nodes:
        if node.name in found:
            node.own = found[node.name]
            node.config = replace(node.config, data=DataConfig(file="none"))
    async with asyncio.timeout(60):
        await asyncio.gather(*(node.run() for node in nodes))
    return [folder / name for name in PARTIES]
