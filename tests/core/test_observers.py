"""The ledger's observers against what really reaches whom: whoever's view depends on a party is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from securevfl import Plan, VerticalData, train
from securevfl.accountants.records import HIDDEN
from securevfl.algorithms import ALGORITHMS
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View

PARTIES = ("p0", "p1", "p2")
FAMILIES = [name for name, each in ALGORITHMS.items() if each.federated and "two-tree" in each.protocols]
CASES = [
    *({"algorithm": name} for name in FAMILIES),
    *(
        {"algorithm": name, "protocol": "pairwise"}
        for name in ("vafl", "vafl-sync", "fdml", "afsvrg", "flex")
    ),
    *({"algorithm": name, "protocol": "bfv"} for name in ("vafl", "fdml", "afsgd", "flex")),
    {"algorithm": "fdml", "protocol": "ckks", "label_holder": "server"},
    {"algorithm": "flex", "private_labels": True},
    {"algorithm": "flex", "private_labels": True, "protocol": "two-tree"},
    {"algorithm": "flex", "private_labels": True, "encoder_training": "none"},
    {"algorithm": "vafl", "encoder_training": "none"},
    {"algorithm": "vafl", "encoder_training": "none", "protocol": "two-tree"},
    {"algorithm": "vafl", "label_holder": "server"},
    {"algorithm": "afsgd", "active": ("p0", "p1")},
]


def with_other_features(data: VerticalData, party: str | None) -> VerticalData:
    """The same records and labels, but for the features of one party."""
    draw = np.random.default_rng(1)
    blocks = {
        name: draw.normal(size=block.shape).astype(np.float32) if name == party else np.asarray(block)
        for name, block in zip(data.parties, data.train, strict=True)
    }
    test = [np.asarray(block) for block in data.test]
    return VerticalData.from_arrays(blocks, data.y_train, test=(test, data.y_test))


def values_seen(folder: Path) -> dict[str, list[np.ndarray]]:
    """All floats that each organisation received or worked out; masked words and ciphertexts are fresh."""
    return {
        view.name: [
            np.asarray(value)
            for seen in View(view).messages(sent=False)
            for value in seen.fields.values()
            if isinstance(value, float | np.ndarray) and np.asarray(value).dtype.kind == "f"
        ]
        for view in sorted((folder / "views").glob("*"))
    }


def differ(first: list[np.ndarray], second: list[np.ndarray]) -> bool:
    """Beyond the rounding of sums in another order."""
    return len(first) != len(second) or any(
        a.shape != b.shape or not np.allclose(a, b, atol=1e-5) for a, b in zip(first, second, strict=True)
    )


# CKKS shows what encryption does to FDML, and two trees which of Flex's roles ask; four runs each.
SLOW = ({"algorithm": "fdml", "protocol": "bfv"}, {"algorithm": "flex", "protocol": "bfv"})


@pytest.mark.parametrize(
    "changes",
    [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in CASES],
    ids=[" ".join(map(str, each.values())) for each in CASES],
)
def test_whoever_sees_something_of_a_party_stands_in_its_ledger(changes: dict, tmp_path: Path) -> None:
    data = VerticalData.load("synthetic:rows=40,features=6,informative=6", parties=3)
    plan = Plan.from_flat(
        {
            "algorithm": "vafl",
            "unprotected": True,
            "epochs": 1,
            "batch": 16,
            "scaling": "none",
            "record_views": True,
            **changes,
        }
    )
    seen, listed = {}, {}
    for party in (None, *PARTIES):
        folder = tmp_path / str(party)
        train(with_other_features(data, party), plan, folder)
        seen[party] = values_seen(folder)
        ledger = [r for r in read_records(folder) if r.owner == party and r.mechanism not in HIDDEN]
        listed[party] = {name for record in ledger for name in record.observers}
    for owner in PARTIES:
        reached = {
            name for name in seen[None] if name != owner and differ(seen[None][name], seen[owner][name])
        }
        assert reached <= listed[owner]


@pytest.mark.parametrize("protocol", ["plain", "two-tree"])
def test_frozen_encoders_are_seen_by_the_server_alone(protocol: str, tmp_path: Path) -> None:
    data = VerticalData.load("synthetic:rows=40,features=6", parties=3)
    train(
        data,
        Plan(algorithm="vafl", protocol=protocol, encoder_training="none", epochs=1, unprotected=True),
        tmp_path / "run",
    )
    records = [r for r in read_records(tmp_path / "run") if r.owner == "p1" and r.mechanism != "masked"]
    assert {r.observers for r in records} == {("p0",)}
