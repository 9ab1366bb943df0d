"""Drawings of tree pairs and the command that prints them."""

import itertools
import json

import pytest
import typer
from typer.testing import CliRunner

from securevfl.cli.trees import trees
from securevfl.errors import TopologyError
from securevfl.protocols import TreePair, build_trees
from securevfl.protocols.sums import describe, draw
from securevfl.protocols.sums.trees import worst_coalition

APP = typer.Typer()
APP.command("trees")(trees)


def test_drawing_of_four_workers():
    assert draw(build_trees(4)) == "\n".join(
        [
            "T1 (values plus masks)",
            "0",
            "├── 1",
            "└── 2",
            "    └── 3",
            "",
            "T2 (masks)",
            "1",
            "├── 2",
            "└── 3",
            "    └── 0",
        ]
    )


@pytest.mark.parametrize("coordinator", [False, True])
@pytest.mark.parametrize("workers", [4, 5, 9, 16])
def test_every_participant_is_drawn_twice(workers, coordinator):
    pair = build_trees(workers, coordinator=coordinator)
    words = draw(pair).split()
    for worker in range(workers):
        assert words.count(str(worker)) == 2
    assert words.count("coordinator") == 2 * coordinator


@pytest.mark.parametrize("coordinator", [False, True])
@pytest.mark.parametrize(("workers", "collusion"), [(3, 1), (4, 1), (5, 1), (6, 1), (7, 2), (8, 1), (9, 1)])
def test_worst_coalition_is_a_smallest_one_that_leaks(workers, collusion, coordinator):
    pair = build_trees(workers, collusion, coordinator=coordinator) if workers > collusion + 1 else None
    sizes = [
        size
        for size in range(1, workers - 1)
        if any(len(pair.learned_by(c)) > 1 for c in itertools.combinations(sorted(pair.vertices), size))
    ]
    worst = worst_coalition(pair)
    if sizes and sizes[0] <= workers - 2:
        assert len(worst) == sizes[0]
        assert len(pair.learned_by(worst)) > 1
    else:
        assert worst is None


def test_description_of_a_leaking_pair():
    facts = describe(TreePair({1: 0, 2: 0}, {1: 0, 2: 0}))
    assert facts["max_collusion"] == 0
    assert facts["singles"]["0"] == [[1], [2]]
    assert facts["worst_coalition"] == {"members": ["0"], "learns": [[1], [2]]}


def test_command_prints_trees_and_leakage():
    result = CliRunner().invoke(APP, ["5"])
    assert result.exit_code == 0
    assert result.stdout.startswith(draw(build_trees(5)))
    assert result.stdout.count("alone learns the total of the other 4, nothing else.") == 5
    assert "No coalition of up to 1 learns" in result.stdout
    assert "learns the sum over workers 1 to 2 and the input of worker 4." in result.stdout
    assert "gives away" in CliRunner().invoke(APP, ["4", "--collusion", "2"]).stdout


def test_command_prints_one_json_object():
    result = CliRunner().invoke(APP, ["6", "--collusion", "2", "--json"])
    facts = json.loads(result.stdout)
    assert facts["max_collusion"] == 2
    assert facts["t1"] == {str(c): str(p) for c, p in build_trees(6, 2).t1.items()}
    assert set(facts["singles"]) == set("012345")


def test_impossible_requests_raise():
    result = CliRunner().invoke(APP, ["9", "--collusion", "3"])
    assert isinstance(result.exception, TopologyError)
