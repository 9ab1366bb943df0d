"""What of the four papers is here: every algorithm, theorem, table and figure, and what became of it.

python -m benchmarks.papers.coverage writes docs/results/papers.md
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.papers.common import table, write

CODE, REPRODUCED, STAND_IN = "code", "reproduced", "stand-in data"
REFUTED, IMPOSSIBLE, MISSING = "refuted", "impossible here", "not made"
ASSUMED, STEP = "assumed", "step of a proof"
STATES = {
    CODE: "runs as the paper says, or is computed, and is tested",
    REPRODUCED: "measured on the paper's own data",
    STAND_IN: "measured on other data of the same kind",
    REFUTED: "shown to be wrong by a test; what holds instead stands in the right column",
    IMPOSSIBLE: "its data cannot be had here",
    MISSING: "could be made here and has not been",
    ASSUMED: "a condition of theorems; the right column says where it enters and whether runs keep it",
    STEP: "no code of its own; what it serves for is computed",
}


class Row(NamedTuple):
    """One numbered thing of a paper."""

    item: str
    what: str
    state: str
    where: str


ROWS: dict[str, tuple[Row, ...]] = {
    "VAFL": (
        Row("Algorithm 1", "asynchronous training", CODE, "`vafl`; its footnote is `also` and `query_first`"),
        Row("Algorithm 2", "t-synchronous training", CODE, "`vafl-tsync`, t is `wait_for`"),
        Row("Figure 1", "diagram of the system", CODE, "the picture in docs/architecture.md"),
        Row(
            "Assumption 1",
            "independent draws, bounded variance",
            ASSUMED,
            "draws with `sampling` = draws, else passes; `variances` of `theory.vafl.Constants`",
        ),
        Row(
            "Assumption 2",
            "lower bound, Lipschitz gradients",
            ASSUMED,
            "`smoothness`, read for every single record; estimated for sums of linear models alone",
        ),
        Row(
            "Assumption 3",
            "who uploads is independent",
            ASSUMED,
            "`shares`; the simulated clock does not keep it",
        ),
        Row("Assumption 4", "bounded delay", ASSUMED, "enforced where `delay_bound` is set"),
        Row("Assumption 5", "random unbounded delay", ASSUMED, "`theory.vafl.delay_spreads`"),
        Row("Assumption 6", "who uploads, t at a time", ASSUMED, "`shares` that add up to t"),
        Row("Lemma 1", "descent, bounded delay", STEP, "of Theorems 1 and 2"),
        Row("Lemma 2", "descent of one step", STEP, "of Lemma 1 and of Theorems 3 and 4"),
        Row("Lemma 3", "noise smooths an activation", STEP, "of Theorem 5"),
        Row("Remark 1", "nu of Theorem 4 is above 0", STEP, "of Theorem 4"),
        Row("Definition 1", "Gaussian differential privacy", CODE, "accountant `GDPAccountant`"),
        Row("Theorem 1", "bounded delay, nonconvex", CODE, "`theory.vafl.bounded_delay`"),
        Row(
            "Theorem 2",
            "bounded delay, strongly convex",
            CODE,
            "`theory.vafl.bounded_delay_convex`; repaired",
        ),
        Row("Theorem 3", "random delay, nonconvex", CODE, "`theory.vafl.stochastic_delay`; repaired"),
        Row(
            "Theorem 4",
            "random delay, strongly convex",
            CODE,
            "`theory.vafl.stochastic_delay_convex`; repaired",
        ),
        Row(
            "Theorem 5",
            "hidden noise makes the loss smooth",
            CODE,
            "`theory.smoothness`; repaired; beside runs in vafl.md",
        ),
        Row(
            "Theorem 6",
            "the noise's privacy",
            REFUTED,
            "docs/accounting.md; counted by mode `strict` instead",
        ),
        Row("Theorem 7", "t-synchronous, bounded delay, nonconvex", CODE, "`bounded_delay`, `together` = t"),
        Row(
            "Theorem 8",
            "t-synchronous, bounded delay, convex",
            CODE,
            "`bounded_delay_convex`, `together` = t",
        ),
        Row(
            "Theorem 9", "t-synchronous, random delay, nonconvex", CODE, "`stochastic_delay`, `together` = t"
        ),
        Row(
            "Theorem 10",
            "t-synchronous, random delay, convex",
            CODE,
            "`stochastic_delay_convex`, `together` = t",
        ),
        Row(
            "Figure 2",
            "accuracy against time, linear models",
            STAND_IN,
            "vafl.md; its CIFAR-10 part cannot be had",
        ),
        Row("Figure 3", "accuracy against time, CNN", STAND_IN, "vafl.md"),
        Row("Figure 4", "AUC against time, LSTM", STAND_IN, "vafl.md; accuracy"),
        Row(
            "Figure 5",
            "training loss, CNN (ModelNet40)",
            IMPOSSIBLE,
            "ModelNet40; the stand-in shows Figure 3",
        ),
        Row(
            "Figure 6", "accuracy, CNN, other settings", IMPOSSIBLE, "ModelNet40; the stand-in shows Figure 3"
        ),
        Row(
            "Figure 7",
            "training loss, LSTM (MIMIC-III)",
            IMPOSSIBLE,
            "MIMIC-III; the stand-in shows Figure 4",
        ),
        Row("Figure 8", "AUC, LSTM, other settings", IMPOSSIBLE, "MIMIC-III; the stand-in shows Figure 4"),
    ),
    "FDML": (
        Row("Algorithm 1", "asynchronous training, bounded staleness", CODE, "`fdml`, tau is `staleness`"),
        Row(
            "Assumption 1",
            "smooth, convex, bounded gradients and distances",
            ASSUMED,
            "arguments of `theory.fdml.regret`; nothing in training bounds the distance",
        ),
        Row("Lemma 1", "one step's share of the regret", STEP, "of Proposition 1"),
        Row("Proposition 1", "regret", CODE, "`theory.fdml.regret`; repaired"),
        Row(
            "Section 1",
            "predictions to other parties directly, fully decentralised",
            MISSING,
            "named in half a sentence, without an algorithm; `afsgd` on `plain-tree` trains a sum of linear "
            "models without a server, `fdml` always has one",
        ),
        Row("Figure 1", "diagram of the model", CODE, "sum fusion with head `sum`"),
        Row(
            "Section 3",
            "local models of any kind",
            CODE,
            "fields `model`, `encoders`, `loss`: SVM, FM, networks",
        ),
        Row(
            "Section 5.1",
            "workers with a cluster or several threads",
            CODE,
            "a step of a large model takes torch's threads; a cluster within a worker is not made",
        ),
        Row("Table 1", "Tencent MyApp", IMPOSSIBLE, "the data is a company's own"),
        Row("Table 2", "a9a: local, centralised, FDML", REPRODUCED, "fdml.md"),
        Row("Figure 2", "curves of LR over 40 passes (MyApp)", IMPOSSIBLE, "the data is a company's own"),
        Row("Figure 3", "curves of NN over 40 passes (MyApp)", IMPOSSIBLE, "the data is a company's own"),
        Row("Figure 4", "AUC against noise, a9a", REPRODUCED, "fdml.md"),
    ),
    "AFSGD-VP": (
        Row("Algorithm 1", "sums along a tree", CODE, "protocol `plain-tree`"),
        Row("Algorithm 2", "masked sums along two trees", CODE, "protocol `two-tree`; Lemma 12 below"),
        Row(
            "Algorithm 3",
            "AFSGD-VP",
            CODE,
            "`afsgd`; draws, as `sampling` says; several records at a time, none twice among them",
        ),
        Row("Algorithm 4", "AFSVRG-VP", CODE, "`afsvrg`"),
        Row("Algorithm 5", "AFSAGA-VP", CODE, "`afsaga`"),
        Row(
            "Definition 1",
            "significantly different trees",
            REFUTED,
            "not enough; connectivity, docs/protocols.md",
        ),
        Row("Definition 2", "iterations that visit every block", CODE, "the epoch of `theory.afsgd`"),
        Row("Definition 3", "number of such epochs", CODE, "`theory.afsgd.Schedule`, its epochs"),
        Row(
            "Assumption 1",
            "strong convexity of every record's loss",
            ASSUMED,
            "`convexity` of `theory.afsgd.Constants`; with the logistic loss it is `l2`, without biases",
        ),
        Row(
            "Assumption 2",
            "Lipschitz gradients",
            ASSUMED,
            "`smoothness`, `block_smoothness`; estimated from rows",
        ),
        Row(
            "Assumption 3",
            "bounded block gradients",
            ASSUMED,
            "`gradient`; holds for the logistic loss without `l2`",
        ),
        Row(
            "Assumption 4",
            "visits of a block per epoch",
            ASSUMED,
            "`visits`; nothing in training bounds them",
        ),
        Row("Assumption 5", "bounded overlap", ASSUMED, "`overlap`; nothing in training bounds it"),
        Row(
            "Assumption 6",
            "updates within the overlap",
            ASSUMED,
            "`overlapping`; nothing in training bounds them",
        ),
        Row("Assumption 7", "workers follow the algorithm", ASSUMED, "docs/threat-model.md"),
        Row("Lemma 13", "gradients along an epoch", STEP, "of Theorem 4"),
        Row("Lemma 14", "variance of SVRG", STEP, "of Theorem 6"),
        Row("Lemma 15", "memory of SAGA", STEP, "of Theorem 8"),
        Row("Lemma 16", "variance of SAGA", STEP, "of Theorem 8"),
        Row("Lemma 17", "variance of the fresh estimator", STEP, "of Theorem 8; the text names SVRG"),
        Row(
            "Remark 5",
            "order of AFSGD-VP",
            REFUTED,
            "1/eps log(1/eps) by its own rate, docstring of `theory.afsgd`",
        ),
        Row(
            "Remark 7",
            "order of AFSVRG-VP",
            REFUTED,
            "its rate shrinks with eps for small eps; docstring of `theory.afsgd`",
        ),
        Row(
            "Remark 9",
            "order of AFSAGA-VP",
            REFUTED,
            "its rate shrinks with eps for small eps; docstring of `theory.afsgd`",
        ),
        Row("Theorem 4", "accuracy of AFSGD-VP", CODE, "`theory.afsgd.sgd`"),
        Row("Theorem 6", "accuracy of AFSVRG-VP", CODE, "`theory.afsgd.svrg`; repaired"),
        Row("Theorem 8", "accuracy of AFSAGA-VP", CODE, "`theory.afsgd.saga`; repaired"),
        Row(
            "Definition 10", "exact inference", CODE, "attack on recorded totals; it succeeds on Algorithm 2"
        ),
        Row("Definition 11", "approximate inference", CODE, "attack on recorded products"),
        Row(
            "Lemma 12",
            "two trees prevent exact inference",
            REFUTED,
            "docs/protocols.md, docs/threat-model.md",
        ),
        Row("Figure 1", "asynchronous against synchronous time", CODE, "the virtual clock shows it"),
        Row("Figure 2", "system", CODE, "the picture in docs/architecture.md"),
        Row("Figure 3", "two trees", CODE, "`securevfl trees Q`"),
        Row(
            "Table 1", "data sets", STAND_IN, "two of eight are here; a synthetic set has the width of news20"
        ),
        Row("Table 2", "speed-up with a straggler", REPRODUCED, "afsgd.md; two sets, stand-ins for others"),
        Row(
            "Figure 4",
            "convergence, classification and regression",
            STAND_IN,
            "afsgd.md; for regression FATE's motor set, SGD alone",
        ),
        Row("Figure 5", "convergence on rcv1, url, webspam", IMPOSSIBLE, "the sets are not at hand"),
        Row("Figure 6", "speed-up against workers", STAND_IN, "afsgd.md"),
        Row("Figure 7", "efficiency with 8 workers on url", IMPOSSIBLE, "the set is not at hand"),
    ),
    "Flex-VFL": (
        Row("Algorithm 1", "Flex-VFL", CODE, "`flex`"),
        Row("Algorithm 2", "Adaptive Flex-VFL", CODE, "`flex-adaptive`"),
        Row(
            "Assumption 1",
            "Lipschitz gradients",
            ASSUMED,
            "`smoothness`, `block_smoothness`; estimated from rows",
        ),
        Row(
            "Assumption 2", "unbiased gradients", ASSUMED, "batches of a pass are not independent; draws are"
        ),
        Row("Assumption 3", "bounded variance", ASSUMED, "`variance` of `theory.flex.Block`"),
        Row("Lemma 1", "drift within a round", CODE, "part of `theory.flex.bound`"),
        Row("Theorem 1", "gradient norms", CODE, "`theory.flex.rate_limit`, `theory.flex.bound`"),
        Row("Corollary 1", "equal parties", CODE, "`theory.flex.uniform_bound`; the printed one is refuted"),
        Row("Corollary 2", "decaying rates", CODE, "`theory.flex.vanishes`"),
        Row(
            "Equation 20",
            "rates of the adaptive algorithm",
            CODE,
            "`theory.flex.adaptive_limit`; (18) repaired",
        ),
        Row("Figure 1", "diagram of the model", CODE, "the picture in docs/architecture.md"),
        Row("Table I", "notation", CODE, "docstrings name the symbols"),
        Row(
            "Table II",
            "combinations of optimisers (MOSEI)",
            MISSING,
            "`python -m benchmarks.papers.flex_optimisers` makes it on FATE's motor set; not run to its end",
        ),
        Row("Table III", "time to target against communication", STAND_IN, "flex.md"),
        Row("Table IV", "timeouts", STAND_IN, "flex.md"),
        Row("Figure 2", "distributions of speed", MISSING, "Fashion-MNIST could stand in, as in Table III"),
        Row(
            "Figure 3",
            "Google cluster traces",
            IMPOSSIBLE,
            "the traces are not at hand; synthetic ones serve",
        ),
        Row("Figure 4", "adaptive against static rates", STAND_IN, "flex.md"),
    ),
}


MODULES = {
    "vafl": "vafl",
    "fdml": "fdml",
    "afsgd": "afsgd",
    "flex": "flex",
}
"""Page of results -> the module of `benchmarks.papers` that makes it."""


FIGURES = {
    ("VAFL", "Figure 2"): "2ee01fb",
    ("VAFL", "Figure 3"): "04625d1",
    ("VAFL", "Figure 4"): "04625d1",
    ("FDML", "Table 2"): "e68cc29",
    ("FDML", "Figure 4"): "e68cc29",
    ("AFSGD-VP", "Table 1"): "1d4edbc",
    ("AFSGD-VP", "Table 2"): "1d4edbc",
    ("AFSGD-VP", "Figure 4"): "04625d1",
    ("AFSGD-VP", "Figure 6"): "1d4edbc",
    ("Flex-VFL", "Table III"): "4596c8d",
    ("Flex-VFL", "Table IV"): "d442dd0",
    ("Flex-VFL", "Figure 4"): "4596c8d",
}
"""The commit with which the figures of a measured row came."""


def command_of(row: Row) -> str:
    """How a measured row is made again; empty where nothing was measured."""
    if row.state not in (REPRODUCED, STAND_IN):
        return ""
    name = row.where.partition(".md")[0] if ".md" in row.where else "afsgd"
    return f"`python -m benchmarks.papers.{MODULES[name]} --data-folder DATA`"


NOT_NEWER = (
    "*figures of* names the commit with which figures came: they are of the code of that time, and what has "
    "changed since is not in them."
)


def page() -> list[str]:
    """The parts of the page."""
    parts = [
        "# The four papers, item by item",
        "Made with `python -m benchmarks.papers.coverage`.",
        "What the words mean: " + "; ".join(f"*{state}*: {words}" for state, words in STATES.items()) + ".",
        NOT_NEWER,
    ]
    for paper, rows in ROWS.items():
        parts += [
            f"## {paper}",
            table(
                ("item", "what", "state", "where, or why not", "made with", "figures of"),
                [[*row, command_of(row), FIGURES.get((paper, row.item), "")] for row in rows],
            ),
        ]
    return parts


def main() -> None:
    """Writes the page."""
    write(Path(__file__).resolve().parents[2] / "docs" / "results" / "papers.md", page())


if __name__ == "__main__":
    main()
