"""The documentation is what the code is: references are current, code blocks and the notebook run."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from in_process import run_program, run_shell

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_map_shows_what_is_there() -> None:
    """Every folder and file that the page on architecture names, and every room that there is."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_/]*(?:\w+\.py)?)`", text))
    places = [
        ROOT,
        ROOT / "securevfl",
        ROOT / "securevfl" / "algorithms",
        ROOT / "protocols",
        ROOT / "attacks",
    ]
    assert not [name for name in named if not any((place / name).exists() for place in places)]
    rooms = [path.name for path in (ROOT / "securevfl").iterdir() if (path / "__init__.py").exists()]
    assert len(rooms) > 8 and all(f"{room}/`" in text for room in rooms)


@pytest.mark.parametrize("page", ["cli.md", "api.md"])
def test_references_are_current(page: str) -> None:
    made = script("make_reference").PAGES[page]()
    assert (DOCS / page).read_text(encoding="utf-8") == made, "run: python docs/make_reference.py"


def test_references_name_everything() -> None:
    from securevfl.cli import COMMANDS

    commands, names = (DOCS / "cli.md").read_text(), (DOCS / "api.md").read_text()
    assert all(f"## securevfl {name}\n" in commands for name in COMMANDS)
    assert "`--set TEXT`" in commands and "| `RUN` | Folder of the run. |  |" in commands
    for expected in ("### VerticalClassifier", "### PairwiseMaskSum", "- `.predict(blocks, *, ids=None)`"):
        assert expected in names
    assert not re.search(r" at 0x|<lambda>|<class", commands + names)


def test_help_names_every_choice() -> None:
    """Texts of options stand by themselves, so that `--help` need not load what they speak of."""
    from securevfl.network.authority import KEYS
    from securevfl.protocols.alignment.ids import NORMALISATIONS
    from securevfl.protocols.alignment.protocol import KINDS

    commands = (DOCS / "cli.md").read_text()
    assert f"How IDs are compared: {', '.join(NORMALISATIONS)}." in commands
    assert f"How: {', '.join(KINDS)}" in re.sub(r" \([^)]*\)", "", commands)
    assert f"Its own key: {' or '.join(KEYS)}." in commands


def test_quickstart_runs_top_to_bottom(tmp_path: Path, monkeypatch, capfd) -> None:
    text = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    found = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    assert {language for language, _ in found} == {"sh", "python"} and len(found) >= 8
    assert len(re.findall("^## The ", text, re.MULTILINE)) == 4
    monkeypatch.chdir(tmp_path)
    run_shell("".join(code for language, code in found if language == "sh"))
    for made in ("sweeps/first/results.csv", "sweeps/first/sweep.html"):
        assert (tmp_path / made).is_file()
    assert len(list(tmp_path.glob("runs/bank/audits/*/report.html"))) == 1
    program = tmp_path / "blocks.py"
    program.write_text("\n".join(code for language, code in found if language == "python"))
    run_program(program)
    said = capfd.readouterr().out
    assert re.search(r"epsilon of the employer (1\.0|0\.99)", said) and "first applicants" in said


def test_the_page_on_data_runs_top_to_bottom(tmp_path: Path, monkeypatch, capfd) -> None:
    text = (DOCS / "data.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 800
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "block.py"
    for language, code in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if language == "sh":
            run_shell(code)
        elif language == "toml":
            (tmp_path / "data.toml").write_text(code)
        else:
            program.write_text(code)
            capfd.readouterr()
            run_program(program)
    assert (tmp_path / "draft.toml").is_file() and list(tmp_path.glob("runs/mine/audits/*/report.html"))
    assert "'spent', 'spent missing'" in capfd.readouterr().out


SAVED = re.compile(r"`([\w./-]+)`:\n\n```toml\n(.*?)```", re.DOTALL)


@pytest.mark.slow  # the quickstart's sweep runs always
@pytest.mark.parametrize("page", ["sweeps.md"])
def test_a_page_of_a_task_runs_top_to_bottom(page: str, tmp_path: Path, monkeypatch, capfd) -> None:
    """Files are saved under the names that the text gives them; then every block runs, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    assert len(text.split()) <= 800
    monkeypatch.chdir(tmp_path)
    for name, content in SAVED.findall(text):
        (tmp_path / name).write_text(content)
    program = tmp_path / "block.py"
    for language, code in re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL):
        if language == "sh":
            run_shell(code)
        else:
            program.write_text(code)
            run_program(program)


def task_pages() -> list[str]:
    """The pages that docs/README.md lists under what a reader does, in its order."""
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    lists = re.findall(
        r"^(?:Start here|Do one thing|Run it between .*):\n\n((?:[- ] .*\n)+)", text, re.MULTILINE
    )
    assert len(lists) == 3
    return [page for each in lists for page in re.findall(r"\]\(([\w-]+)\.md\)", each)]


REFERENCE = {"glossary": "words to look up", "network-reference": "settings to look up"}
WITHOUT_DATA = {
    "certificates": "an authority and its files: no table takes part",
    "extending": "how to write code",
    "operations": "services around a run that the page on networks makes",
    "scoring": "continues the run that the page on networks makes of its own tables",
}
EMBEDDED = re.compile(
    r"^(?:\.venv/bin/)?securevfl .*(?:--data|data) (?:credit|breast-cancer|wine|digits|diabetes|synthetic)\b"
    r"|^(?:\.venv/bin/)?securevfl sweep --preset|load_breast_cancer|default_rng|^printf .* > \w+\.csv$",
    re.MULTILINE,
)
OWN = re.compile(r"data\.toml|--config (?:server|party)\.toml|draft FILES")


def blocks_of(page: str) -> list[tuple[str, str]]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"```(sh|python)\n(.*?)```", text, re.DOTALL)


def test_exceptions_are_pages() -> None:
    assert REFERENCE.keys() | WITHOUT_DATA.keys() <= set(task_pages())


@pytest.mark.parametrize("page", [page for page in task_pages() if page not in REFERENCE])
def test_a_task_fits_on_a_page_and_can_be_tried(page: str) -> None:
    """At most 800 words; a block with data that comes along, and a command on files of the reader."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 800
    if page not in WITHOUT_DATA:
        assert any(EMBEDDED.search(code) for _, code in blocks_of(page)), (
            "no block with data that comes along"
        )
        assert OWN.search(text), "no command on the reader's own files"


@pytest.mark.parametrize(
    "page", ["audit", "suggest", "profile", "scorecards", "align", "predict", "large", "gpu"]
)
def test_blocks_with_embedded_data_run(page: str, tmp_path: Path, monkeypatch) -> None:
    """Other tests run the other pages, but for install, which fetches packages, and clusters."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "block.py"
    ran = 0
    for language, code in blocks_of(page):
        if not EMBEDDED.search(code):
            continue
        ran += 1
        if language == "sh":
            shorter = code.replace("rows=100000", "rows=5000")
            run_shell(shorter.replace("--attacks none", "--attacks none --canaries 300"))
        else:
            program.write_text(code)
            run_program(program)
    assert ran


def test_the_page_on_installing_names_what_is_there() -> None:
    """Its commands fetch packages, so they are not run; the files, variables and options must exist."""
    text = (DOCS / "install.md").read_text(encoding="utf-8")
    for name in re.findall(r"(?:--constraint|--requirement) (\S+)|CONSTRAINTS=(\S+)", text):
        assert (ROOT / (name[0] or name[1])).is_file()
    extras = re.search(r"Extras: (.*?)\n\n", text, re.DOTALL)
    assert extras is not None
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(\w+)\]", extras[1])) <= set(known)
    assert "CONSTRAINTS ?=" in (ROOT / "Makefile").read_text()
    assert "_SECUREVFL_COMPLETE=source_zsh" in text


def test_the_site_is_built_and_leads_nowhere_else(tmp_path: Path) -> None:
    """Every link and anchor leads somewhere, every page is in the contents, no page names an address."""
    pytest.importorskip("sphinx", reason="needs securevfl[docs]")
    pytest.importorskip("myst_parser", reason="needs securevfl[docs]")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        str(DOCS),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".html", ".js", ".css")]
    addresses = {
        found
        for path in files
        for found in re.findall(r"https?://[\w.-]+\.[a-z]{2,}", path.read_text(encoding="utf-8"))
    }
    assert addresses <= {"http://www.w3.org"}
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    assert pages <= {path.relative_to(tmp_path) for path in files}
    assert (tmp_path / "searchindex.js").is_file()  # a script, so that search works from disk


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([^)]+)\)", index))


# -- the notebook -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    return dict(json.loads(NOTEBOOK.read_text(encoding="utf-8")))


def test_notebook_is_well_formed_and_renders(notebook: dict[str, Any]) -> None:
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    identities = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identities)) == len(identities)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] == number for number, cell in enumerate(code, 1))
    assert all(cell["outputs"] for cell in code)
    pictures = [
        output["data"]["image/png"] for cell in code for output in cell["outputs"] if "data" in output
    ]
    assert pictures and all(base64.b64decode(each).startswith(b"\x89PNG") for each in pictures)


def test_notebook_is_what_its_script_writes(notebook: dict[str, Any]) -> None:
    cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    assert cells == script("make_notebook").CELLS, "run: python docs/make_notebook.py"


@pytest.mark.slow
def test_notebook_runs(notebook: dict[str, Any], tmp_path: Path, monkeypatch, capfd) -> None:
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for cell in code:
        exec(cell, names)
    said = capfd.readouterr().out
    assert "verdict: holds" in said and "refused: owner 'p1'" in said
