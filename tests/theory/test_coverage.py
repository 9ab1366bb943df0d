"""Every numbered statement of the four papers has a row, and the rows name what is really there."""

import importlib
import json
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from securevfl.algorithms import ALGORITHMS
from securevfl.settings.protocols import PROTOCOLS

ROOT = Path(__file__).resolve().parents[2]
NUMBERED = json.loads((ROOT / "benchmarks" / "papers" / "numbered.json").read_text())
"""What the papers' texts number, as `benchmarks.papers.numbered` has read them."""


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.papers.coverage")


@pytest.mark.parametrize("paper", NUMBERED)
def test_nothing_numbered_is_left_out(coverage, paper):
    rows = [each for row in coverage.ROWS[paper] for each in coverage.covered(row)]
    assert set(NUMBERED[paper]) <= set(rows)
    assert len(rows) == len(set(rows))


def test_the_list_is_what_a_text_numbers(coverage):
    read = importlib.import_module("benchmarks.papers.numbered").numbered
    text = "**Theorem 10.** By Lemma 2 of Nesterov and Fig. 2,\nTABLE IV: x. THEOREM\n2, table 3, Figure 2"
    assert read(text) == ["Figure 2", "Table 3", "Table IV", "Theorem 2", "Theorem 10"]
    assert read("x = y \\tag{2}\n$$z$$ (1a)") == ["Equation 1", "Equation 2"]


@pytest.mark.skipif("SECUREVFL_PAPERS" not in os.environ, reason="SECUREVFL_PAPERS names no folder of texts")
def test_the_list_is_current(coverage):
    read = importlib.import_module("benchmarks.papers.numbered").read
    assert read(Path(os.environ["SECUREVFL_PAPERS"])) == NUMBERED


def test_rows_name_functions_algorithms_and_pages_that_exist(coverage):
    modules = [importlib.import_module(f"securevfl.theory.{name}") for name in ("vafl", "afsgd", "flex")]
    constants = [each.Constants for each in modules if hasattr(each, "Constants")]
    known = {*ALGORITHMS, *PROTOCOLS, *(name for each in modules for name in dir(each))}
    known |= {each.name for kind in (*constants, modules[-1].Block) for each in fields(kind)}
    for rows in coverage.ROWS.values():
        for row in rows:
            assert row.state in coverage.STATES
            for module, name in re.findall(r"`theory\.(\w+)\.(\w+)`", row.where):
                assert hasattr(importlib.import_module(f"securevfl.theory.{module}"), name)
            for page in re.findall(r"([\w-]+)\.md", row.where):
                assert list((ROOT / "docs").rglob(f"{page}.md")), row
            for name in re.findall(r"^`([\w-]+)`", row.where):
                assert name in known, row


def test_every_table_and_figure_has_a_command_or_a_reason(coverage):
    for paper, rows in coverage.ROWS.items():
        for row in (coverage.settled(paper, each) for each in rows):
            command = coverage.command_of(row)
            if row.state in coverage.MEASURED:
                module = re.search(r"benchmarks\.papers\.(\w+) ", command)
                assert module and (ROOT / "benchmarks" / "papers" / f"{module[1]}.py").is_file(), row
            elif row.item.startswith(("Table", "Figure")):
                assert not command and len(row.where) > 8, row


def test_measured_rows_say_of_which_commit_their_figures_are(coverage, tmp_path, monkeypatch):
    paper, row = "FDML", next(each for each in coverage.ROWS["FDML"] if each.item == "Table 2")
    assert re.fullmatch(r"[0-9a-f]{7}(, [0-9a-f]{7})*", coverage.figures_of(paper, row)), "no plus: committed"
    page = tmp_path / "fdml.md"
    monkeypatch.setattr(coverage, "RESULTS", tmp_path)
    page.write_text("## Table 2\n\nFigures of commit `abc1234`, `def5678`.\n\n## Table 20\n")
    assert coverage.figures_of(paper, row) == "abc1234, def5678"
    page.write_text("## Table 2\n\n| |\n\n## Figure 4\n\nFigures of commit `abc1234`.\n")
    assert coverage.figures_of(paper, row) == "", "those of another section are not its own"
    assert coverage.settled(paper, row).state == coverage.MISSING
    assert "benchmarks.papers.fdml" in coverage.settled(paper, row).where


def test_the_page_is_current(coverage):
    assert (ROOT / "docs" / "results" / "papers.md").read_text() == "\n\n".join(coverage.page()) + "\n"
