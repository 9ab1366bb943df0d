"""Sweep files: which points they mean, and what is wrong with bad ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_helpers import TINY

from securevfl.algorithms import ALGORITHMS
from securevfl.attacks import ATTACKS
from securevfl.errors import InputError, PlanError
from securevfl.settings.plan import Plan
from securevfl.sweeps.presets import PRESETS, preset
from securevfl.sweeps.spec import parse_sweep, read_sweep


def test_a_grid_is_all_combinations_in_order() -> None:
    sweep = parse_sweep("data = 'wine'\n[grid]\nepsilon = [1, 2]\nseeds = 3\n")
    assert [(p.fields["epsilon"], p.plan().seed) for p in sweep.points] == [
        (e, s) for e in (1.0, 2.0) for s in range(3)
    ]
    assert [p.number for p in sweep.points] == list(range(6))


def test_variants_are_crossed_with_the_grid_and_have_lists_of_their_own() -> None:
    text = """
    epochs = 3
    seeds = [5, 7]
    [[point]]
    label = "a"
    sigma = 0.5
    [[point]]
    label = "b"
    grid = { epsilon = [1, 8] }
    """
    sweep = parse_sweep(text)
    found = [(p.label, p.plan().sigma, p.plan().epsilon, p.plan().seed) for p in sweep.points]
    assert found == [
        ("a", 0.5, 0, 5),
        ("a", 0.5, 0, 7),
        ("b", 0, 1, 5),
        ("b", 0, 1, 7),
        ("b", 0, 8, 5),
        ("b", 0, 8, 7),
    ]
    assert all(p.plan().epochs == 3 for p in sweep.points)


@pytest.mark.parametrize(
    "text",
    [
        "seed = [1, 2]\nepsilon = [1, 8]",
        "seed = [1, 2]\n[grid]\nepsilon = [1, 8]",
        "[[point]]\nseed = [1, 2]\nepsilon = [1, 8]",
        "epsilon = 3\nseed = 9\n[[point]]\nseed = [1, 2]\ngrid = { epsilon = [1, 8] }",
    ],
)
def test_a_list_stands_wherever_a_field_does(text: str) -> None:
    found = {(p.plan().seed, p.plan().epsilon) for p in parse_sweep(text).points}
    assert found == {(1, 1), (1, 8), (2, 1), (2, 8)}


def test_tables_and_fields_that_are_lists_take_lists_too() -> None:
    sweep = parse_sweep("algorithm = 'fdml'\nsigma = 1\nhidden = [8, 8]\n[fdml]\nstaleness = [0, 4]\n")
    assert [(p.plan().settings.staleness, p.plan().hidden) for p in sweep.points] == [
        (0, (8, 8)),
        (4, (8, 8)),
    ]
    widths = parse_sweep("sigma = 1\nalgorithm = 'vafl'\nhidden = [[8], [8, 8]]\n").points
    assert [p.plan().hidden for p in widths] == [(8,), (8, 8)]


def test_a_variant_wins_over_the_common_grid() -> None:
    sweep = parse_sweep("[grid]\nepochs = [1, 2]\n[[point]]\nepochs = 9\n[[point]]\nbatch = 8\n")
    assert [p.plan().epochs for p in sweep.points] == [9, 1, 2]


def test_the_algorithms_own_defaults_hold_where_the_file_says_nothing() -> None:
    sweep = parse_sweep("[grid]\nalgorithm = ['sealed', 'vafl']\n")
    assert sweep.points[0].plan().epochs == Plan(algorithm="sealed").epochs == 80
    assert sweep.points[1].plan().epochs == Plan(algorithm="vafl").epochs == 0


def test_the_id_follows_from_the_plan_and_the_audit_alone() -> None:
    one = parse_sweep("epochs = 5\nclip = 2\n").points[0].id
    assert one == parse_sweep("clip = 2.0\nepochs = 5\nepsilon = 1\ntitle = 'x'\n").points[0].id
    assert one == parse_sweep("epochs = 5\nclip = 2\n", overrides={"data_folder": "/d"}).points[0].id
    assert one != parse_sweep("epochs = 6\nclip = 2\n").points[0].id
    assert one != parse_sweep("epochs = 5\nclip = 2\n[audit]\ncanaries = 9\n").points[0].id


def test_repeated_points_are_run_once() -> None:
    sweep = parse_sweep("[grid]\nepochs = [2, 2, 3]\n")
    assert len(sweep.points) == 2
    assert sweep.repeated == 1


def test_lists_and_tables_can_be_varied() -> None:
    sweep = parse_sweep("[grid]\nhidden = [[8], [8, 8]]\nspeeds = [{ p1 = 2.0 }, {}]\n")
    assert [(p.plan().hidden, p.plan().simulation.speeds) for p in sweep.points] == [
        ((8,), {"p1": 2.0}),
        ((8,), {}),
        ((8, 8), {"p1": 2.0}),
        ((8, 8), {}),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch = 3", "'epoch'.*'epochs'"),
        ("[plan]\nepochs = 3", "fields of the plan stand at its top"),
        ("[grid]\nepsilom = [1]", "'epsilom'.*'epsilon'"),
        ("[[point]]\nlabl = 'x'", "point 1.*'labl'.*'label'"),
        ("[audit]\nattack = 'all'", "audit.*'attack'.*'attacks'"),
        ("[grid]\nepsilon = 4", "grid.epsilon is 4; expected a list"),
        ("[grid]\nepsilon = []", "at least one value"),
        ("[grid]\nhidden = [32]", "each of its values is one"),
        ("epochs = 3\n[grid]\nepochs = [1]", "epochs is set both"),
        ("seeds = 2\nseed = 1", "seeds is given twice"),
        ("seeds = 2\nseed = [1]", "seeds is given twice"),
        ("seed = []", "at least one value"),
        ("seed = [1]\n[grid]\nseed = [2]", "seed is set both by the top"),
        ("[[point]]\nseed = [1]\nseeds = 2", "point 1 gives both seed and seeds"),
        ("[[point]]\nseed = [1]\ngrid = { seed = [2] }", "seed is set both by point 1"),
        ("[grid]\nseeds = 2\nseed = [1]", "both seed and seeds"),
        ("[[point]]\nepochs = 2\ngrid = { epochs = [1] }", "epochs is set both by point 1"),
        ("point = 3", r"write each variant as \[\[point\]\]"),
        ("audit = 3", r"expected a table \[audit\]"),
        ("[audit]\nattacks = 3", "audit.attacks is 3"),
        ("[audit]\ncanaries = 'x'", "audit.canaries"),
        ("[target]\nmetric = 'auk'\nvalue = 1", "'auk'.*'auc'"),
        ("[target]\nmetric = 'auc'", "needs a target.value"),
        ("epochs = 'ten'", "epochs is 'ten'; expected int"),
        ("algorithm = 'vaffl'", "'vaffl'.*'vafl'"),
        ("sigma = 1\nepsilon = 1", "exclude each other"),
        ("epochs = [1", "not TOML"),
        ("title = 3", "title is 3"),
        ("[grid]\nseed = [1]\nepochs = [1]\nbatch = [1]\nspeeds = [3]", "speeds is 3; expected a table"),
        ("[[point]]\nalgorithm = { a = 1 }", "algorithm is .*; expected str"),
        (f"[grid]\nseeds = 1001\nepochs = {list(range(1, 102))}", "101,101 points; at most 100,000"),
    ],
)
def test_a_bad_file_is_explained(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_sweep(text)


def test_a_contradiction_in_one_point_is_that_points_own() -> None:
    sweep = parse_sweep("epsilon = 1\n[grid]\nencoder_training = ['none', 'raww']\nseed = [0, -1]\n")
    assert [bool(p.error) for p in sweep.points] == [False, True, True, True]
    assert "'raw'" in sweep.points[2].error
    assert "negative" in sweep.points[1].error


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_sweep(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="UTF-8"):
        read_sweep(tmp_path / "bad.toml")
    (tmp_path / "good.toml").write_text(TINY)
    assert read_sweep(tmp_path / "good.toml").title == "Tiny"


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_plans_with_known_names(name: str) -> None:
    sweep = parse_sweep(preset(name))
    assert [p.error for p in sweep.points if p.error] == []
    assert {p.plan().algorithm for p in sweep.points} <= set(ALGORITHMS)
    assert set(sweep.audit.attacks) <= set(ATTACKS)
    assert {1.0, 2.0, 4.0, 8.0} <= {p.plan().epsilon for p in sweep.points}
    assert {"local", "central", "sealed"} <= {p.plan().algorithm for p in sweep.points}


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(InputError, match=r"'quik'.*'quick'"):
        preset("quik")
