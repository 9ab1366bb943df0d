"""Audits the run that `train_with_flower.py` left behind: what did the label holder and the parties see?

    python audit_flower.py FOLDER

Nothing of Flower is needed here. The organisation that runs Flower's server and holds the labels is `bank`.
The recorder writes down what the loop declares, which is that embeddings leave without noise; the audit then
attacks with exactly what was seen, once without the data and once with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from securevfl import Plan, Recorder, VerticalData, audit

PARTIES, TRAINING = ("bank", "shop"), 240


def data_of(folder: Path) -> VerticalData:
    """The data as the loop used it: the first records are those that were trained on."""
    kept = np.load(folder / "tables.npz")
    blocks = dict(zip(PARTIES, np.array_split(kept["features"], len(PARTIES), axis=1), strict=True))
    test = ({name: block[TRAINING:] for name, block in blocks.items()}, kept["labels"][TRAINING:])
    return VerticalData.from_arrays(
        {name: block[:TRAINING] for name, block in blocks.items()}, kept["labels"][:TRAINING], test=test
    )


def record(folder: Path) -> Path:
    """Every exchange of the loop, in the folder that an audit reads."""
    kept: Any = np.load(folder / "exchanges.npz")
    plan = Plan(algorithm="vafl-sync", embedding=2, fusion="concat", head="linear", unprotected=True)
    with Recorder(folder / "run", plan, parties=PARTIES, label_holder=PARTIES[0]) as recorder:
        for step in range(int(kept["steps"])):
            for number, party in enumerate(PARTIES):
                rows, values, gradients = (
                    kept[f"{step}/{number}/{what}"] for what in ("rows", "embeddings", "gradients")
                )
                recorder.exchange(party, rows, values, gradients)
        recorder.finish(test={})
    return folder / "run"


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "flower-run")
    run = record(where)
    for given in (None, data_of(where)):
        report = audit(run, data=given, workers=2)
        print("\nwithout data:" if given is None else "\nwith the data:")
        for sentence in report.content["words"]:
            print("-", sentence)
