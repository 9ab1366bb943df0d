"""Train with frozen encoders at epsilon 4, then let the toolkit attack the run."""

import tempfile
from pathlib import Path

from securevfl import Plan, VerticalData, audit, train

data = VerticalData.load("breast-cancer", parties=3)
plan = Plan(algorithm="vafl", encoder_training="none", epsilon=4.0, epochs=5, record_views=True)

with tempfile.TemporaryDirectory() as folder:
    run = train(data, plan, out=Path(folder) / "run")
    report = audit(run, attacks=["attribute-inference"], data=data)
    report.save(run.folder)
    print(f"test AUC {run.test['auc']:.3f}")
    for sentence in report.content["words"]:
        print("-", sentence)
