"""FDML and the Flex family on secure sums: the same model as without, and nobody's vectors in any view."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from round_data import tiny

from securevfl import Plan, train
from securevfl.errors import PlanError
from securevfl.federation.run import Run
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View
from securevfl.protocols.sums.homomorphic import HomomorphicNode, HomomorphicSum
from securevfl.settings.protocols import PROTOCOLS

SUMS = tuple(name for name in PROTOCOLS if name != "plain")


def plan(algorithm: str, **changes: Any) -> Plan:
    own = {} if algorithm == "fdml" else {"timeout": 3.0}
    given = {"epochs": 1, "batch": 20, "learning_rate": 0.2, "fusion": "sum", **own, **changes}
    return Plan.from_flat({"unprotected": True, "algorithm": algorithm, **given})


def vector(run: Run) -> torch.Tensor:
    assert run.head is not None
    modules = [*run.encoders.values(), run.head]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


@functools.cache
def trained_plainly(algorithm: str, private: bool, holder: str) -> tuple[Plan, torch.Tensor, float | None]:
    own = {"private_labels": True} if private else {}
    chosen = plan(algorithm, label_holder=holder, **own)
    run = train(tiny(), chosen)
    return chosen, vector(run), run.test["loss"]


@pytest.mark.parametrize(
    ("protocol", "holder"),
    [
        *((name, "party") for name in SUMS),
        ("two-tree", "server"),
        ("bfv", "server"),
        *(
            pytest.param(name, "server", marks=pytest.mark.slow)
            for name in SUMS
            if name not in ("two-tree", "bfv")
        ),
    ],
)
@pytest.mark.parametrize(("algorithm", "private"), [("fdml", False), ("flex", False), ("flex", True)])
def test_sums_train_the_model_that_plain_messages_train(
    algorithm: str, private: bool, protocol: str, holder: str
) -> None:
    chosen, wanted, loss = trained_plainly(algorithm, private, holder)
    summed = train(tiny(), chosen.with_changes(protocol=protocol))
    # The ring resolves 2^-20 or finer and CKKS errs below 1e-6; a few steps of rate 0.2 add that up.
    assert float((wanted - vector(summed)).abs().max()) < 2e-5
    assert summed.test["loss"] == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize("algorithm", ["fdml", "flex"])
def test_the_label_holder_sees_no_vectors(algorithm: str, tmp_path: Path) -> None:
    chosen = plan(algorithm, protocol="two-tree", record_views=True, label_holder="server")
    run = train(tiny(), chosen, tmp_path / "run")
    seen = list(View(tmp_path / "run" / "views" / "server"))
    assert not [s for s in seen if s.kind == "embedding"]
    assert [s for s in seen if s.kind == "ready" and "values" not in s.fields]
    records = [r for r in read_records(tmp_path / "run") if r.owner == "p1"]
    opened = [r for r in records if r.mechanism == "exact" and r.kind == "embedding"]
    assert {r.observers for r in opened} == {("p0", "p2", "server")}
    assert [r for r in records if r.mechanism == "masked"]
    assert run.result["labels"].startswith("shared")


@pytest.mark.parametrize("algorithm", ["fdml", "flex"])
def test_noise_is_distributed(algorithm: str) -> None:
    run = train(tiny(parties=4), plan(algorithm, protocol="two-tree", sigma=3.0))
    # One release of each of 40 training records and 10 test records; the rounding to the ring costs little.
    assert run.privacy["p1"]["mu"] == pytest.approx(2 / 3 * np.sqrt(50), rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "changes", "words"),
    [
        ("fdml", {"staleness": 1}, "set staleness to 0"),
        ("flex", {"encoder_training": "none", "scaling": "none"}, "release each record once"),
    ],
)
def test_combinations_that_cannot_work_say_so(algorithm: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        train(tiny(), plan(algorithm, protocol="two-tree", **changes))


@pytest.mark.parametrize("algorithm", ["fdml", "p-bcd"])
def test_too_few_parties_for_a_secret_sum(algorithm: str) -> None:
    with pytest.raises(PlanError, match="at least 3 parties"):
        train(tiny(parties=2), plan(algorithm, protocol="two-tree"))


# -- homomorphic sums of Flex: the label holder has the key, the next party adds (FDML has its own tests) ----


@pytest.mark.parametrize("protocol", ["ckks", "bfv"])
def test_only_the_key_holder_can_decrypt(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: dict[int, HomomorphicNode] = {}
    build = HomomorphicSum.node

    def noted(self: HomomorphicSum, address: int) -> HomomorphicNode:
        nodes[address] = build(self, address)
        return nodes[address]

    monkeypatch.setattr(HomomorphicSum, "node", noted)
    train(tiny(), plan("flex", protocol=protocol))
    assert {address: node.encryption.is_private for address, node in nodes.items()} == {
        0: True,
        1: False,
        2: False,
    }
