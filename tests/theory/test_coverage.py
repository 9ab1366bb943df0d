"""Every numbered statement of the four papers has a row, and the rows name what is really there."""

import importlib
import re
from pathlib import Path

import pytest

from securevfl.algorithms import ALGORITHMS
from securevfl.settings.plan import PROTOCOLS

ROOT = Path(__file__).resolve().parents[2]
# Counted in the papers themselves.
NUMBERED = {
    "VAFL": {"Algorithm": range(1, 3), "Theorem": range(1, 11), "Figure": range(1, 9)},
    "FDML": {
        "Algorithm": range(1, 2),
        "Proposition": range(1, 2),
        "Table": range(1, 3),
        "Figure": range(1, 5),
    },
    "AFSGD-VP": {
        "Algorithm": range(1, 6),
        "Theorem": (4, 6, 8),
        "Lemma": (12,),
        "Table": range(1, 3),
        "Figure": range(1, 8),
    },
    "Flex-VFL": {
        "Algorithm": range(1, 3),
        "Theorem": (1,),
        "Corollary": (1, 2),
        "Table": ("I", "II", "III", "IV"),
        "Figure": range(1, 5),
    },
}


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.papers.coverage")


@pytest.mark.parametrize("paper", NUMBERED)
def test_nothing_numbered_is_left_out(coverage, paper):
    rows = [row.item for row in coverage.ROWS[paper]]
    expected = {f"{kind} {number}" for kind, numbers in NUMBERED[paper].items() for number in numbers}
    assert expected <= set(rows)
    assert len(rows) == len(set(rows))


def test_rows_name_functions_algorithms_and_pages_that_exist(coverage):
    for rows in coverage.ROWS.values():
        for row in rows:
            assert row.state in coverage.STATES
            for module, name in re.findall(r"`theory\.(\w+)\.(\w+)`", row.where):
                assert hasattr(importlib.import_module(f"securevfl.theory.{module}"), name)
            for page in re.findall(r"([\w-]+)\.md", row.where):
                assert list((ROOT / "docs").rglob(f"{page}.md")), row
            for name in re.findall(r"^`([\w-]+)`", row.where):
                assert name in (*ALGORITHMS, *PROTOCOLS) or name in dir(
                    importlib.import_module("securevfl.theory.vafl")
                ), row


def test_every_table_and_figure_has_a_command_or_a_reason(coverage):
    for rows in coverage.ROWS.values():
        for row in (each for each in rows if each.item.startswith(("Table", "Figure"))):
            command = coverage.command_of(row)
            if row.state in (coverage.REPRODUCED, coverage.STAND_IN):
                module = re.search(r"benchmarks\.papers\.(\w+) ", command)
                assert module and (ROOT / "benchmarks" / "papers" / f"{module[1]}.py").is_file(), row
            else:
                assert not command and len(row.where) > 8, row


def test_the_page_is_current(coverage):
    assert (ROOT / "docs" / "results" / "papers.md").read_text() == "\n\n".join(coverage.page()) + "\n"
