"""Writes examples/quickstart.ipynb with its outputs: python docs/make_notebook.py (needs no network)."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "quickstart.ipynb"

CELLS = [
    """# securevfl in five minutes

Three organisations hold different columns of the same patients; the first has the diagnoses. We train one
model, see what it promises, predict, and let attacks try the promise.""",
    """from securevfl import Plan, VerticalData, audit, train

data = VerticalData.load("breast-cancer", parties=3)
print(data)""",
    """## The published way, without noise

Every vector that leaves a party passes its gate and is written to its ledger. Without noise nothing is
promised: epsilon is infinite (`None`).""",
    """exact = train(data, Plan(algorithm="vafl", epochs=5, unprotected=True))
print("AUC", round(exact.test["auc"], 3))
for owner, spend in exact.privacy.items():
    print(owner, spend["mode"], spend["releases"], "releases, epsilon", spend["epsilon"])""",
    """## A promise that can be kept

Encoders that do not train on private rows, each record released once: every record pays for one noisy vector.
The label holder `p0` is not listed because it sends nothing.""",
    """frozen = {"algorithm": "vafl", "encoder_training": "none", "embedding": 4}
plan = Plan(**frozen, epsilon=8.0, epochs=10, record_views=True)
run = train(data, plan, out="run")
print("AUC", round(run.test["auc"], 3))
for owner, spend in run.privacy.items():
    print(owner, spend["mode"], spend["releases"], "releases, epsilon", round(spend["epsilon"], 3))""",
    """## What epsilon costs

The exact curve of the Gaussian mechanism: any point (epsilon, delta) on it is promised at once.""",
    """import matplotlib.pyplot as plt
import numpy as np

from securevfl.accountants import GaussianRelease, GDPAccountant

release = GaussianRelease(sigma=run.plan.sigma, sensitivity=2 * run.plan.clip, adjacency="replace-one")
epsilons = np.linspace(0.5, 10, 40)
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.semilogy(epsilons, [GDPAccountant().delta(release, epsilon) for epsilon in epsilons])
axes.axhline(1e-5, linestyle=":", color="grey")
axes.set(xlabel="epsilon", ylabel="delta", title="Promise for one record")
plt.show()""",
    """## Predictions count

New records pass the same gates. Known IDs pay again, new ones start at nothing; over a budget the gate
refuses.""",
    """from securevfl.errors import BudgetExceeded

new = [block[:5] for block in data.test]
print(run.predict(new, ids=[900001, 900002, 900003, 900004, 900005]).round(2))
try:
    run.predict(new, ids=data.ids_test[:5])
except BudgetExceeded as refused:
    print("refused:", refused)""",
    """## Attack it

The audit matches every message with the ledgers, replays the run to measure the noise that was really added,
predictions after training included, and runs attacks on exactly what each observer saw.""",
    """report = audit(run, attacks=["embedding-inversion"], data=data, canaries=-1)
print("verdict:", report.verdict)
for line in report.attacks:
    if line["applicable"]:
        score, guessing = round(line["score"], 3), round(line["baseline"], 3)
        print(line["name"], "on", line["owner"], "by", line["observer"], line["metric"], score)
        print("    where guessing gives", guessing)
report.save(run.folder)""",
    """The full page is in `run/report.html`. Go on with the [quickstart](../docs/quickstart.md).""",
]


def build() -> dict[str, Any]:
    """The notebook as nbformat 4 JSON, executed from top to bottom in an empty folder."""
    names: dict[str, Any] = {}
    cells = []
    count = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for number, text in enumerate(CELLS):
            cell: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": _lines(text)}
            if _is_code(number):
                count += 1
                cell |= {"cell_type": "code", "execution_count": count, "outputs": _run(text, names)}
            else:
                cell |= {"cell_type": "markdown"}
            cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _is_code(number: int) -> bool:
    """Text and code take turns; the last cell is text."""
    return number % 2 == 1


def _run(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "<cell>", "exec"), names)  # noqa: S102 - the cells are above
    outputs: list[dict[str, Any]] = []
    if said.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(said.getvalue())})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=80)
        encoded = base64.b64encode(picture.getvalue()).decode()
        shown = {"image/png": encoded, "text/plain": ["<Figure>"]}
        outputs.append({"data": shown, "metadata": {}, "output_type": "display_data"})
    plt.close("all")
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    NOTEBOOK.write_text(json.dumps(build(), indent=1) + "\n", encoding="utf-8")
