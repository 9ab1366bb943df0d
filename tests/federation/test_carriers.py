"""The carriers, each against the same suite."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from carrier_conformance import PARTIES, CarrierConformance, Outcome, simulated
from federation import Federation, tables
from near_pool import NearPool
from ray_cluster import Cluster, needs_ray, running_cluster

from securevfl import Plan
from securevfl.algorithms import find_algorithm
from securevfl.federation import actors
from securevfl.network.gathering import gather


class TestVirtual(CarrierConformance):
    """All sites in one process."""

    def run(self, plan: Plan, folder: Path, task: str = "binary", profile: Path | None = None) -> Outcome:
        return simulated(plan, folder, task, profile=profile)


class TestActors(CarrierConformance):
    """Sites that are stepped from outside, here without processes of their own."""

    @pytest.fixture(autouse=True)
    def _near(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(actors, "RayPool", NearPool)

    def run(self, plan: Plan, folder: Path, task: str = "binary", profile: Path | None = None) -> Outcome:
        return simulated(plan, folder, task, profile=profile, ray="auto")


class TestNetwork(CarrierConformance):
    """A process's worth of everything for each organisation, over gRPC with mutual TLS."""

    def run(self, plan: Plan, folder: Path, task: str = "binary", profile: Path | None = None) -> Outcome:
        helpers = tuple(find_algorithm(plan.algorithm).assistants(plan).values())
        federation = Federation(folder, plan, parties=PARTIES, helpers=helpers)
        federation.tables = tables(PARTIES, task=task)
        if profile is not None:
            federation.server = replace(federation.server, profile=profile / PARTIES[0])
            federation.members = {
                name: replace(each, profile=profile / name) for name, each in federation.members.items()
            }
        asyncio.run(federation.run())
        gather([folder / name for name in federation.names], folder / "joint")
        return Outcome.read(folder / "joint", folder / PARTIES[0])


@needs_ray
@pytest.mark.slow
class TestRay(CarrierConformance):
    """Sites in actors of a real cluster."""

    cluster: Cluster

    @pytest.fixture(autouse=True, scope="class")
    def _cluster(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with running_cluster() as started:
            request.cls.cluster = started
            yield

    def run(self, plan: Plan, folder: Path, task: str = "binary", profile: Path | None = None) -> Outcome:
        return simulated(plan, folder, task, profile=profile, ray=self.cluster.address)
