"""Every example and every command of the README runs as written."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import run_command, run_program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
README = (ROOT / "README.md").read_text()


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    bin_folder = str(Path(sys.executable).parent)
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


# These need files: test_verifier.py and test_sealed_scorecard.py give them many.
@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if p.stem not in ("verify_ledger", "score_from_csv")], ids=lambda p: p.stem
)
def test_example(path: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    run_program(path)
    out, err = capfd.readouterr()
    assert out and err == ""


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"`(\w+\.py)`", (ROOT / "examples" / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES}


def test_a_run_of_flower_can_be_audited(tmp_path: Path) -> None:
    """The exchanges that Flower would leave behind; the other half of the example needs Flower itself."""
    from securevfl import audit

    program = runpy.run_path(str(ROOT / "examples" / "flower" / "audit_flower.py"))
    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(300, 8)), rng.integers(0, 2, 300)
    np.savez(tmp_path / "tables.npz", features=features, labels=labels)
    kept = {}
    for step in range(3):
        rows = np.sort(rng.permutation(240)[:40])
        for party in range(2):
            seen = features[rows, 4 * party : 4 * party + 2]
            kept |= {f"{step}/{party}/rows": rows, f"{step}/{party}/embeddings": seen}
            kept[f"{step}/{party}/gradients"] = 0.1 * seen
    np.savez(tmp_path / "exchanges.npz", steps=3, **kept)
    run_folder = program["record"](tmp_path)
    unknown = audit(run_folder, ["gradient-norm", "embedding-inversion"], isolated=False)
    assert "Attacks were not run for lack of data" in unknown.content["words"][0]
    known = audit(run_folder, "embedding-inversion", data=program["data_of"](tmp_path), isolated=False)
    assert any(attack["status"] == "scored" for attack in known.attacks)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_python(tmp_path: Path, monkeypatch, capsys) -> None:
    """Each by itself: what it uses, it must import."""
    monkeypatch.chdir(tmp_path)
    for number, block in enumerate(blocks("python")):
        script = tmp_path / f"block{number}.py"
        script.write_text(block)
        run_program(script)
        said = capsys.readouterr().out
        for expected in re.findall(r"# (True|\[.*?\)\])", block):
            assert expected in said


def own_files(folder: Path) -> None:
    """Two tables as people have them: gaps, text, units, and not the same people."""
    draw = np.random.default_rng(5)
    debts, jobs = draw.gamma(2, 4000, 4000), draw.choice(["clerk", "nurse", "poet"], 4000)
    orders = draw.poisson(6, 4000)
    late = debts / 6000 - orders / 4 + draw.normal(0, 1, 4000) > 0
    bank = [
        f"c{i},{'' if i % 7 == 0 else round(debts[i])},{jobs[i]},{'late' if late[i] else 'ok'}"
        for i in range(3600)
    ]
    shop = [f"c{i},{orders[i]},{orders[i] * 1.7:.1f}" for i in reversed(range(400, 4000))]
    (folder / "bank.csv").write_text("\n".join(["customer,debt,job,outcome", *bank]) + "\n")
    (folder / "shop.csv").write_text("\n".join(["customer,orders,weight_kg", *shop]) + "\n")


def fill_in(description: Path) -> None:
    text = description.read_text()
    for key, value in (("label", "outcome"), ("label_holder", "bank"), ("task", "binary")):
        text = text.replace(f'{key} = ""', f'{key} = "{value}"')
    description.write_text(text)


def test_readme_commands(tmp_path: Path, monkeypatch) -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("securevfl ")]
    lines = [line.partition("   #")[0].strip() for line in lines]
    own_files(tmp_path)
    (tmp_path / "sweep.toml").write_text(
        re.findall(r"<<'END'\n(.*?)END\n", README, re.DOTALL)[0].replace("seeds = 3", "seeds = 1")
    )
    # These wait for other organisations; tests of the network run them.
    lines = [line for line in lines if not line.startswith(("securevfl serve", "securevfl join"))]
    assert len(lines) >= 5
    monkeypatch.chdir(tmp_path)
    for line in lines:
        if line.startswith("securevfl account"):  # one as users call it, from a shell
            done = run(["bash", "-c", line], tmp_path)
            assert done.returncode == 0, f"{line}: {done.stderr}"
        else:
            assert run_command(line) == 0, line
        if line.startswith("securevfl data draft"):
            fill_in(tmp_path / "data.toml")
    verdicts = {
        run: json.loads(next((tmp_path / run / "audits").glob("*/report.json")).read_text())["verdict"]
        for run in ("runs/card", "runs/mine")
    }
    assert verdicts == {"runs/card": "holds", "runs/mine": "holds"}
    assert (tmp_path / "sweeps" / "mine" / "sweep.html").is_file()


def test_readme_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
