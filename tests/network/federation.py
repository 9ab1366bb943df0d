"""Federations for tests: all organisations in one event loop, over real gRPC with mutual TLS on loopback."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securevfl.data import VerticalData
from securevfl.data.share import OwnTable, split_rows
from securevfl.network.authority import create_authority, issue
from securevfl.network.config import DataConfig, NetworkConfig, PartyConfig, ServerConfig
from securevfl.network.consent import Acceptance, AlignmentLimits
from securevfl.network.coordinator import Coordinator
from securevfl.network.identity import Identity, load_identity
from securevfl.network.member import Member
from securevfl.settings.families import ALGORITHM_FAMILIES
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import PROTOCOLS

ALGORITHMS = tuple(ALGORITHM_FAMILIES)
NAMES = ("bank", "clinic", "shop", "lab", "mill", "dealer", "stranger")

EVERYTHING = Acceptance(
    epsilon=math.inf,
    members=NAMES,
    algorithms=ALGORITHMS,
    protocols=PROTOCOLS,
    test_fraction=1.0,
    evaluations=1000,
    alignment=AlignmentLimits(kinds=("private", "helper", "none"), ids=1_000_000, times=100),
    delta=1.0,
    dealer="dealer",
    adversary="semi-honest",
    predictions=1_000_000,
)
"""Rules that accept whatever a test proposes; others are made from these."""
ACCEPT_EVERYTHING = f"""[accept]
epsilon = inf
members = {json.dumps(NAMES)}
algorithms = {json.dumps(ALGORITHMS)}
protocols = {json.dumps(PROTOCOLS)}
test_fraction = 1.0
evaluations = 1000
alignment = {{ kinds = ["private", "helper", "none"], ids = 1000000, times = 100 }}
delta = 1.0
dealer = "dealer"
adversary = "semi-honest"
predictions = 1000000
"""
"""The same as text of `party.toml`."""


@functools.cache
def identities() -> Mapping[str, Identity]:
    """One consortium's certificates, made once per test process."""
    folder = Path(tempfile.mkdtemp())
    authority = create_authority(folder / "ca", name="test")
    issue(authority, NAMES, out=folder)
    found = {name: load_identity(folder / name) for name in NAMES}
    shutil.rmtree(folder)
    return found


def routes(cases: Sequence[tuple[str, str]], direct: set[int]) -> list[Any]:
    """Every algorithm and protocol through the coordinator, those of some numbers directly, too.

    Which way frames take is the mesh's alone; the other half of the product is for `make test-all`.
    """
    return [
        pytest.param(
            *case,
            straight,
            id=f"{'-'.join(case)}-{'direct' if straight else 'relayed'}",
            marks=pytest.mark.slow if straight and number not in direct else (),
        )
        for straight in (False, True)
        for number, case in enumerate(cases)
    ]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def tables(
    parties: Sequence[str], rows: int = 60, seed: int = 0, task: str = "binary"
) -> dict[str, OwnTable]:
    """Tables with the same IDs; the first has labels that depend on everybody's features."""
    generator = np.random.default_rng(seed)
    ids = [f"id{i:04d}" for i in range(rows)]
    blocks = {party: generator.uniform(-1, 1, (rows, 3)).astype(np.float32) for party in parties}
    score = sum(block.sum(axis=1) for block in blocks.values())
    labels = (score > 0).astype(int)
    if task != "binary":
        labels = np.digitize(score, [-1, 1]) if task == "multiclass" else np.clip(score, -4, 4) / 4
    return {
        party: OwnTable.from_arrays(
            block, ids=ids, labels=labels if party == parties[0] else None, bounds=(-1.0, 1.0)
        )
        for party, block in blocks.items()
    }


def together(found: Mapping[str, OwnTable], plan: Plan, fraction: float = 0.2) -> VerticalData:
    """The same data in one place, with the split that a federation makes."""
    names = list(found)
    first = found[names[0]]
    order = np.argsort(first.ids)
    kept, apart = split_rows(len(order), fraction, plan.seed)
    kept, apart = order[kept], order[apart]
    return VerticalData.from_arrays(
        {name: found[name].block[kept] for name in names},
        first.labels[kept],
        first.ids[kept],
        test=([found[name].block[apart] for name in names], first.labels[apart], first.ids[apart]),
        bounds=(-1.0, 1.0),
    )


class Federation:
    """Configurations of a coordinator and its parties in one temporary folder."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        *,
        parties: Sequence[str] = ("bank", "clinic", "shop"),
        helpers: Sequence[str] = (),
        rows: int = 60,
        direct: bool = False,
        patience: float = 30.0,
        absence: float = 5.0,
        align: str = "none",
        **server: Any,
    ) -> None:
        if plan.algorithm == "sealed" and plan.settings.dealer == "auto" and "dealer" in helpers:
            plan = plan.with_changes(settings={"dealer": "dealer"})
        self.folder, self.plan, self.tables = folder, plan, tables(parties, rows)
        self.names = (*parties, *helpers)
        port = free_port()
        shared = {"run": "test", "base": folder, "network": NetworkConfig(patience=patience, absence=absence)}
        self.server = ServerConfig(
            **shared,
            folder=folder / parties[0],
            identity=identities()[parties[0]],
            data=DataConfig(file="none", label_column="y"),
            listen=f"127.0.0.1:{port}",
            parties=tuple(parties[1:]),
            plan=plan,
            align=align,
            **server,
        )
        self.members = {
            name: PartyConfig(
                **shared,
                folder=folder / name,
                identity=identities()[name],
                data=DataConfig(file="none") if name in parties else None,
                coordinator=parties[0],
                address=f"127.0.0.1:{port}",
                listen=f"127.0.0.1:{free_port()}" if direct else "",
                accept=EVERYTHING,
                local=plan.local,
            )
            for name in self.names[1:]
        }

    def coordinator(self, **options: Any) -> Coordinator:
        """A new process of the coordinator."""
        return _with_table(Coordinator, self.server, self.tables[self.names[0]], **options)

    def member(self, name: str, **options: Any) -> Member:
        """A new process of another organisation."""
        return _with_table(Member, self.members[name], self.tables.get(name), **options)

    async def run(self) -> dict[str, Any]:
        """Runs everybody to the end; organisation -> result."""
        nodes = {self.names[0]: self.coordinator()} | {name: self.member(name) for name in self.members}
        async with asyncio.timeout(240):
            results = await asyncio.gather(*(node.run() for node in nodes.values()))
        return dict(zip(nodes, results, strict=True))


def _with_table(cls: Any, config: Any, table: OwnTable | None, **options: Any) -> Any:
    """A node whose table comes from memory."""
    node = cls(replace(config, data=None), **options)
    node.config, node.own = config, table
    return node
