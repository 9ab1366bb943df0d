"""What the papers' own settings leak: every algorithm on every protocol, attacked with what observers saw.

    python -m benchmarks.leaks [--out FILE] [--algorithms vafl fdml] [--raw FILE]

Trains without noise, as most of the published experiments do, and runs every attack for every owner and
observer. A score counts as a leak where its interval, widened for all comparisons of the table together,
lies beyond what guessing achieves.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import norm

from benchmarks.papers.common import say, table
from securevfl import Plan, VerticalData, train
from securevfl.algorithms import ALGORITHMS
from securevfl.attacks import ATTACKS
from securevfl.attacks.contract import METRICS
from securevfl.attacks.jobs import InProcess
from securevfl.attacks.runner import evaluate, pairs
from securevfl.attacks.source import Source
from securevfl.settings.families import family_of
from securevfl.settings.protocols import TREE_SUMS

TREE = TREE_SUMS[0]
COLUMNS, PARTIES, EPOCHS, BATCH = 12, 4, 12, 128
MODEL_ONLY = {"equality-solving", "generative-regression", "membership-predictions", "model-completion"}
"""Attacks on models and predictions. All sums give the same model, so one of them stands for the others."""
SLOW = {"generative-regression": ("vafl", "fdml", "afsgd", "flex", "sealed")}
"""Run for these algorithms only, on their first protocol."""
GROUPS = {
    "labels": ("label", ()),
    "products, totals": ("feature", ("exact", "reverse", "approximate")),
    "embeddings": ("feature", ("embedding", "attribute")),
    "predictions": ("feature", ("equality", "generative")),
    "membership": ("membership", ()),
    "protocol": ("protocol", ()),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row's algorithm with what is changed in the plan and the data, and its protocols."""

    name: str
    algorithm: str
    protocols: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    columns: int = COLUMNS


def _variant(algorithm: str) -> dict[str, Any]:
    """The algorithm's own defaults win over this benchmark's, but for the target; snapshots every epoch."""
    family = family_of(algorithm)
    usual = {name: value for name, value in family.defaults.items() if name != "epsilon"}
    return {**usual, **({"snapshot_every": 1} if family.name == "afsgd" else {})}


def settings() -> list[Setting]:
    """Every federated algorithm as published, and variants that single attacks are about."""
    found = [
        Setting(name=name, algorithm=name, protocols=each.protocols, changes=_variant(name))
        for name, each in ALGORITHMS.items()
        if family_of(name).federated
    ]
    private, passive = {"private_labels": True}, {**_variant("afsgd"), "active": ("p0", "p1")}
    malicious = {"optimisers": {"p1": "malicious"}}
    single = {**_variant("afsgd"), "batch": 1, "l2": 0.0, "epochs": 1, "evaluate_every": 0}
    few = ("plain", "two-tree")
    return [
        *found,
        Setting(name="flex, private labels", algorithm="flex", protocols=few, changes=private),
        Setting(name="afsgd, p2 and p3 passive", algorithm="afsgd", protocols=few, changes=passive),
        Setting(name="vafl, p1 malicious", algorithm="vafl", protocols=("plain",), changes=malicious),
        Setting(name="vafl, one column each", algorithm="vafl", protocols=("plain",), columns=PARTIES),
        Setting(name="afsgd, one record per step", algorithm="afsgd", protocols=("plain",), changes=single),
    ]


def load(columns: int) -> VerticalData:
    """The first columns of breast-cancer, dealt out in order."""
    whole = VerticalData.load("breast-cancer", parties=1)
    parts = np.array_split(np.arange(columns), PARTIES)
    first, second = (
        [np.asarray(block)[:, part] for part in parts] for block in (whole.train[0], whole.test[0])
    )
    return VerticalData.from_arrays(
        first,
        whole.y_train,
        test=(second, whole.y_test),
        bounds=[np.asarray(whole.bounds[0])[part] for part in parts],
        name="breast-cancer",
    )


def attack(setting: Setting, protocol: str, folder: Path) -> list[dict[str, Any]]:
    """Trains, and tries every attack for every owner and observer."""
    data = load(setting.columns)
    basis = {"epochs": EPOCHS, "batch": BATCH, "evaluate_every": 1}
    plan = Plan.from_flat(
        {
            "unprotected": True,
            **basis,
            "algorithm": setting.algorithm,
            "protocol": protocol,
            **setting.changes,
        }
    )
    plan = plan.with_changes(record_views=True)
    run = train(data, plan, folder)
    source, runner = Source(folder, data), InProcess()
    about = {"setting": setting.name, "protocol": protocol, "labels": run.result["labels"].split(":")[0]}
    return [
        {**about, **evaluate(source, ATTACKS[name], owner, observers, runner=runner).to_mapping()}
        for name in ATTACKS
        if is_run(name, setting, protocol)
        for owner, observers in pairs(source, ATTACKS[name])
    ]


def is_run(name: str, setting: Setting, protocol: str) -> bool:
    """Whether an attack is run, and not taken from another protocol or left out as slow."""
    if name in SLOW:
        return setting.name in SLOW[name] and protocol == setting.protocols[0]
    return name not in MODEL_ONLY or protocol in ("plain", TREE) or TREE not in setting.protocols


def taken_over(outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What one sum's model gives away, for the other sums of the same setting."""
    found = list(outcomes)
    for setting, protocol in dict.fromkeys((each["setting"], each["protocol"]) for each in outcomes):
        if protocol not in ("plain", TREE):
            found += [
                {**each, "protocol": protocol}
                for each in outcomes
                if each["setting"] == setting and each["protocol"] == TREE and each["name"] in MODEL_ONLY
            ]
    return found


# -- reading the outcomes ----------------------------------------------------------------------------------


def gain(outcome: dict[str, Any]) -> float:
    """By how much an attack beats guessing; negative where it does not."""
    sign = 1 if METRICS[outcome["metric"]].more_is_worse else -1
    return float(sign * (outcome["score"] - outcome["baseline"]))


def leaks(outcome: dict[str, Any], widening: float) -> bool:
    """Whether the widened interval lies beyond the baseline."""
    side = "low" if METRICS[outcome["metric"]].more_is_worse else "high"
    end = outcome["score"] if outcome[side] is None else outcome[side]
    return gain(outcome) > widening * abs(outcome["score"] - end)


def cell(outcomes: list[dict[str, Any]], widening: float, *, named: bool) -> str:
    """The worst outcome of several: in bold where it is a leak."""
    scored = [each for each in outcomes if each["status"] == "scored"]
    if any(each["status"] == "failed" for each in outcomes):
        return "failed"
    if not scored:
        return "n/a"
    worst = max(scored, key=lambda each: (leaks(each, widening), gain(each)))
    digits = ".0f" if worst["metric"] == "count" else ".2g"
    text = f"{worst['score']:{digits}} ({worst['baseline']:{digits}})"
    if leaks(worst, widening):
        return f"{worst['name']} **{text}**" if named else f"**{text}**"
    return f"none of {len({each['name'] for each in scored})}" if named else text


def grouped(outcomes: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The outcomes of each group of attacks."""
    for family, starts in GROUPS.values():
        yield [o for o in outcomes if o["family"] == family and (not starts or o["name"].startswith(starts))]


def summary(outcomes: list[dict[str, Any]], widening: float) -> str:
    """One row per setting and protocol."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for each in outcomes:
        rows[each["setting"], each["protocol"], each["labels"]].append(each)
    lines = [
        [*key, *(cell(group, widening, named=True) for group in grouped(mine))] for key, mine in rows.items()
    ]
    return table(["algorithm", "protocol", "labels are", *GROUPS], lines)


def details(name: str, outcomes: list[dict[str, Any]], widening: float) -> str:
    """All settings and protocols of one attack, and why it does not apply where it does not."""
    mine = [each for each in outcomes if each["name"] == name]
    reasons = {each["reason"]: "" for each in mine if each["status"] != "scored"}
    protocols = list(dict.fromkeys(each["protocol"] for each in mine))
    lines = []
    for setting in dict.fromkeys(each["setting"] for each in mine):
        here = {p: [e for e in mine if e["setting"] == setting and e["protocol"] == p] for p in protocols}
        lines.append(
            [setting, *(cell(each, widening, named=False) if each else "" for each in here.values())]
        )
    text = [f"#### {name}", f"{ATTACKS[name].metric}: {METRICS[ATTACKS[name].metric].text}."]
    if any(each["status"] == "scored" for each in mine):
        text.append(table(["algorithm", *protocols], lines))
    shown = sorted({general(reason) for reason in reasons if reason})
    return "\n\n".join([*text, "\n".join(f"- n/a: {reason}" for reason in shown)])


def general(reason: str) -> str:
    """A reason without the names of who it was about."""
    names = {f"p{i}" for i in range(PARTIES)}
    words = [("PARTY" if word.strip(";:,").split("+")[0] in names else word) for word in reason.split()]
    return " ".join(words).replace("PARTY", "a party")


INTRODUCTION = f"""Breast-cancer (455 + 114 records), the first {COLUMNS} columns, {PARTIES} parties with
three each, linear models, {EPOCHS} epochs in batches of {BATCH}, evaluation after every epoch, no noise: what
the papers' algorithms show without any addition of ours. p0 holds the labels. Each run is attacked by every
observer (pairs of them in `tree-collusion`) for every owner; what each attack knows besides stands in
[attacks](../attacks.md). A cell names the attack of the group that gained most, its score, and what guessing
achieves in parentheses (`mse`: smaller is worse). Bold is a leak: the 95 % interval, widened
{{widening:.2f}} times to cover all {{comparisons:,}} comparisons of this page together (Bonferroni), lies
beyond guessing. `none of n`: n attacks of the group applied and none did. `n/a`: none applied; the reasons
are below. One run each. Attacks on the model alone ({", ".join(f"`{name}`" for name in sorted(MODEL_ONLY))})
were run on `plain` and `plain-tree`, whose model is that of all other sums, and `generative-regression`,
which is slow, for one algorithm of each paper."""


def report(outcomes: list[dict[str, Any]], command: str) -> str:
    """The page."""
    scored = [each for each in outcomes if each["status"] == "scored"]
    widening = float(norm.isf(0.025 / len(scored)) / norm.isf(0.025))
    order = [(each.name, protocol) for each in settings() for protocol in each.protocols]
    outcomes = sorted(taken_over(outcomes), key=lambda each: order.index((each["setting"], each["protocol"])))
    parts = [
        "# What the published settings leak",
        f"Made with `{command}`.",
        INTRODUCTION.format(widening=widening, comparisons=len(scored)),
        summary(outcomes, widening),
        READING,
        "<details><summary>Every attack on every algorithm and protocol</summary>",
        *(details(name, outcomes, widening) for name in ATTACKS),
        "</details>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


READING = """What to read from it:

- **Features.** Without noise no protocol keeps a party's columns from whoever obtains totals. Evaluation
  after every epoch sums the same test records twelve times, one linear equation each for nine unknown
  columns: p0 solves them everywhere but in FDML on `ckks` and `bfv`, where p1 has the key and solves
  them. The SVRG variants tell all workers the scores of all training records, so that every party does.
  Elsewhere the batches are shuffled and the other parties'
  totals do not repeat. Masks and encryption take away the single products (`exact-inference` is `n/a`)
  and nothing else. Homomorphic sums round to 20 binary digits: fewer values come out within 0.001, which
  is rounding and no protection.
- **Single products** are seen by p0 on `plain`, by every worker of asynchronous AFSGD, by every party of
  Flex, and by parents in the plain tree. p0's own hold its bias, which the attack does not model: it is
  recovered in Flex alone. With one record per step no message has enough known records.
- **Labels.** One output per record: the sign of the gradient is the label, on every protocol, and
  `gradient-direction` is exact. FDML, AFSGD and Flex hand the labels out; where they do not (private
  labels, passive workers) the same attack works. `spectral` is no better than a party's own columns may
  be: those of breast-cancer tell the diagnosis by themselves (`model-completion`: up to 0.89 from raw
  columns and 40 labels, with nothing gained from training, malicious or not).
- **Predictions** with known weights give one equation per record; the columns are correlated, so that one
  equation goes far. That is no matter of training or protocol, and sealed training does not change it:
  its guarantee needs noise, and there is none here.
- **Membership**: nothing beyond chance; 57 candidates of each kind could show a large leak only.
- **Protocols**: subtotals of the plain tree are other parties' values. Two trees give nothing away,
  neither to one participant nor to two; masks pass all tests; no key is in any message."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/leaks.md"))
    parser.add_argument("--algorithms", nargs="*", default=[], help="names of rows; all by default")
    parser.add_argument("--raw", type=Path, help="keep the outcomes in this file; a run goes on from there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = json.loads(options.raw.read_text()) if options.raw and options.raw.exists() else []
    done = {(each["setting"], each["protocol"]) for each in outcomes}
    wanted = options.algorithms or [each.name for each in settings()]
    with tempfile.TemporaryDirectory() as folder:
        for setting in (each for each in settings() if each.name in wanted):
            for protocol in (each for each in setting.protocols if (setting.name, each) not in done):
                outcomes += attack(
                    setting, protocol, Path(folder) / f"{setting.name}-{protocol}".replace(" ", "")
                )
                failed = {each["name"]: each["reason"] for each in outcomes if each["status"] == "failed"}
                say(f"{setting.name} on {protocol}; failed: {failed or 'none'}")
                if options.raw:
                    options.raw.write_text(json.dumps(outcomes))
    options.out.write_text(report(outcomes, "python -m benchmarks.leaks"), encoding="utf-8")


if __name__ == "__main__":
    main()
