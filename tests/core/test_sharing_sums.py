"""FDML and the Flex family on secure sums: the same model as without, and nobody's vectors in any view."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from round_data import tiny

from securevfl import Plan, train
from securevfl.algorithms.sums import SumParticipant, SumRequest
from securevfl.errors import PlanError
from securevfl.gate import Contribution
from securevfl.ledger import read_records
from securevfl.protocols.homomorphic_sum import HomomorphicNode, HomomorphicSum
from securevfl.run import Run
from securevfl.views import View

SUMS = ("plain-tree", "two-tree", "pairwise", "bfv", "ckks")


def plan(algorithm: str, **changes: Any) -> Plan:
    given = {"epochs": 1, "batch": 20, "learning_rate": 0.2, "timeout": 3.0, "fusion": "sum", **changes}
    return Plan(algorithm=algorithm, **given)


def vector(run: Run) -> torch.Tensor:
    assert run.head is not None
    modules = [*run.encoders.values(), run.head]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


@pytest.mark.parametrize("holder", ["party", "server"])
@pytest.mark.parametrize("protocol", SUMS)
@pytest.mark.parametrize(("algorithm", "private"), [("fdml", False), ("flex", False), ("flex", True)])
def test_sums_train_the_model_that_plain_messages_train(
    algorithm: str, private: bool, protocol: str, holder: str
) -> None:
    chosen = plan(algorithm, private_labels=private, label_holder=holder)
    plain = train(tiny(), chosen)
    summed = train(tiny(), chosen.with_changes(protocol=protocol))
    # The ring resolves 2^-20 or finer and CKKS errs below 1e-6; a few steps of rate 0.2 add that up.
    assert float((vector(plain) - vector(summed)).abs().max()) < 2e-5
    assert summed.test["loss"] == pytest.approx(plain.test["loss"], abs=1e-4)


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


# -- homomorphic sums: who adds has no key, who has the key gets no single prediction ------------------------


@pytest.fixture
def predictions(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, np.ndarray]]:
    """Every worker's own predictions, by round of the sum."""
    found: dict[int, dict[str, np.ndarray]] = {}
    join = SumParticipant.join

    async def spy(self: SumParticipant, request: SumRequest, contribution: Contribution) -> None:
        found.setdefault(request.number, {})[self.address] = contribution.values
        await join(self, request, contribution)

    monkeypatch.setattr(SumParticipant, "join", spy)
    return found


def plaintexts(view: View) -> dict[str, list[np.ndarray]]:
    """Numbers that an observer received or worked out, by kind of message; ciphertexts are bytes."""
    found: dict[str, list[np.ndarray]] = {}
    for seen in view.messages(sent=False):
        arrays = [v for v in seen.fields.values() if isinstance(v, np.ndarray) and v.dtype != np.uint8]
        found.setdefault(seen.kind, []).extend(arrays)
    return found


@pytest.mark.parametrize("protocol", ["ckks", "bfv"])
@pytest.mark.parametrize(
    ("holder", "key_holder", "aggregator"), [("party", "p0", "p1"), ("server", "server", "p0")]
)
def test_the_aggregator_holds_only_ciphertexts(
    holder: str, key_holder: str, aggregator: str, protocol: str, tmp_path: Path, predictions: dict
) -> None:
    chosen = plan("fdml", protocol=protocol, label_holder=holder, record_views=True)
    train(tiny(), chosen, tmp_path / "run")
    views = {name: View(tmp_path / "run" / "views" / name) for name in (key_holder, aggregator)}
    adds, opens = plaintexts(views[aggregator]), plaintexts(views[key_holder])
    # What is summed reaches the aggregator in ciphertexts alone. The labels and the sums are FDML's own.
    assert {kind for kind, arrays in adds.items() if arrays} == {"labels", "sum", "sum-request"}
    senders = {seen.sender for seen in views[aggregator].messages("he-value", sent=False)}
    assert senders == {"p0", "p1", "p2"} - {aggregator}
    # The key holder gets totals, never what could be decrypted to a single prediction.
    assert {kind for kind, arrays in opens.items() if arrays} <= {"opened-total", "labels", "sum"}
    assert not list(views[key_holder].messages("he-value", sent=False))
    for numbers in (*adds["sum"], *opens["opened-total"]):
        for parts in predictions.values():
            same = [
                v for v in parts.values() if v.shape == numbers.shape and np.allclose(v, numbers, atol=1e-3)
            ]
            assert not same


@pytest.mark.parametrize("protocol", ["ckks", "bfv"])
def test_only_the_key_holder_can_decrypt(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: dict[int, HomomorphicNode] = {}
    build = HomomorphicSum.node

    def noted(self: HomomorphicSum, address: int) -> HomomorphicNode:
        nodes[address] = build(self, address)
        return nodes[address]

    monkeypatch.setattr(HomomorphicSum, "node", noted)
    train(tiny(), plan("fdml", protocol=protocol))
    assert {address: node.encryption.is_private for address, node in nodes.items()} == {
        0: True,
        1: False,
        2: False,
    }
