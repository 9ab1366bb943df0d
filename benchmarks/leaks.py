"""What the papers' own settings leak: every algorithm on every protocol, attacked with what observers saw.

Run `python -m benchmarks.leaks [--out FILE] [--protocols plain,two-tree,bfv] [--attacks all]`. It trains
without noise, as most of the published experiments do, audits each run, and writes a table of the attacks
that beat guessing.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from securevfl import Plan, VerticalData, audit, train
from securevfl.algorithms import ALGORITHMS
from securevfl.attacks import ATTACKS
from securevfl.auditing.words import beats_baseline

DATA, PARTIES, EPOCHS = "breast-cancer", 3, 8
SLOW = {"generative-regression", "model-completion", "model-completion-active", "membership-embeddings"}


def findings(name: str, protocol: str, attacks: list[str], folder: Path) -> list[str]:
    data = VerticalData.load(DATA, parties=PARTIES)
    plan = Plan(
        algorithm=name, protocol=protocol, epochs=EPOCHS, batch=32, wait_for=2, data=DATA, parties=PARTIES,
        record_views=True,
    )  # fmt: skip
    report = audit(train(data, plan, folder), attacks, data=data, canaries=-1, workers=2)
    best: dict[str, tuple[float, str]] = {}
    for attack in report.attacks:
        if beats_baseline(attack):
            gain = abs(attack["score"] - attack["baseline"])
            text = f"{attack['name']} {attack['metric']} {attack['score']:.3g} ({attack['baseline']:.3g})"
            best[attack["name"]] = max(best.get(attack["name"], (0.0, "")), (gain, text))
    labels = report.content["run"]["labels"].split(":")[0]
    tried = sum(a["status"] == "scored" for a in report.attacks)
    failed = sum(a["status"] == "failed" for a in report.attacks)
    return [name, protocol, labels, f"{tried}" + (f" ({failed} failed)" if failed else ""), "; ".join(
        text for _, text in sorted(best.values(), reverse=True)
    ) or "none"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/leaks.md"))
    parser.add_argument("--protocols", default="plain,plain-tree,two-tree,pairwise,ckks,bfv")
    parser.add_argument("--attacks", default="quick", help="quick leaves out the slowest; all; or names")
    options = parser.parse_args()
    chosen = [name for name in ATTACKS if options.attacks == "all" or name not in SLOW]
    if options.attacks not in ("all", "quick"):
        chosen = options.attacks.split(",")
    command = f"python -m benchmarks.leaks --protocols {options.protocols} --attacks {options.attacks}"
    lines = [
        "# What the published settings leak",
        "",
        f"`{command}`: {DATA}, {PARTIES} parties, {EPOCHS} epochs, batch 32, no noise.",
        "For each attack that beat guessing: the largest score of all owners and observers, the baseline in",
        "parentheses. Attacks tried: owner and observer pairs with a score. One run each; small gains over",
        "the baseline may be chance (95 % intervals, many comparisons).",
        "",
        "| algorithm | protocol | labels | attacks tried | attacks that beat guessing |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, algorithm in ALGORITHMS.items():
            if not algorithm.federated:
                continue
            for protocol in options.protocols.split(","):
                if protocol in algorithm.protocols:
                    row = findings(name, protocol, chosen, Path(folder) / f"{name}-{protocol}")
                    print(" | ".join(row), flush=True)
                    lines.append("| " + " | ".join(row) + " |")
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
