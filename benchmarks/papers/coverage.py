"""What of the four papers is here: every algorithm, theorem, table and figure, and what became of it.

python -m benchmarks.papers.coverage writes docs/results/papers.md
"""

from __future__ import annotations

import re
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
    """One numbered thing of a paper, or equations that belong together: `Equations 2 to 4`."""

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
            "`shares`; exponential delays without latency keep it, by a test",
        ),
        Row("Assumption 4", "bounded delay", ASSUMED, "enforced where `delay_bound` is set"),
        Row("Assumption 5", "random unbounded delay", ASSUMED, "`theory.vafl.delay_spreads`"),
        Row(
            "Assumption 6",
            "who uploads, t at a time",
            ASSUMED,
            "`shares` that add up to t; exponential delays without latency keep it, by a test",
        ),
        Row("Lemma 1", "descent, bounded delay", STEP, "of Theorems 1 and 2"),
        Row("Lemma 2", "descent of one step", STEP, "of Lemma 1 and of Theorems 3 and 4"),
        Row("Lemma 3", "noise smooths an activation", STEP, "of Theorem 5"),
        Row("Remark 1", "nu of Theorem 4 is above 0", STEP, "of Theorem 4, which computes the repaired nu"),
        Row(
            "Equation 1",
            "objective, one regulariser per client",
            CODE,
            "fields `loss` and `l2`; `l2` leaves the server's model and biases alone",
        ),
        Row(
            "Equations 2 to 4",
            "gradients at stale embeddings, their age, updates",
            CODE,
            "`vafl`; runs report the oldest embedding that was used",
        ),
        Row("Equations 5 to 8", "orders of convergence", CODE, "Theorems 1 to 4"),
        Row("Equation 9", "an embedding, layer by layer", CODE, "field `model`; docs/models.md"),
        Row(
            "Equations 10, 11",
            "noise in every layer",
            CODE,
            "field `hidden_noise` in hidden layers, `sigma` on the embedding, after clipping",
        ),
        Row("Equations 12, 13", "the smoothed loss and its constants", CODE, "Theorem 5"),
        Row("Equations 14, 15", "privacy", CODE, "Definition 1 and Theorem 6"),
        Row("Equations 16 to 36", "proofs of Theorems 1 to 4", STEP, "of Theorems 1 to 4"),
        Row("Equations 37 to 40", "orders of convergence, t at a time", CODE, "Theorems 7 to 10"),
        Row("Equation 41", "smoothness in all parameters", CODE, "`theory.smoothness.smoothness`; repaired"),
        Row(
            "Equation 42",
            "how far noise moves the objective",
            CODE,
            "`theory.smoothness.objective_gap`; repaired",
        ),
        Row("Definition 1", "Gaussian differential privacy", CODE, "accountant `GDPAccountant`"),
        Row(
            "Theorem 1",
            "bounded delay, nonconvex",
            CODE,
            "`theory.vafl.bounded_delay`; beside runs in bounds.md",
        ),
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
        Row(
            "Theorem 7",
            "t-synchronous, bounded delay, nonconvex",
            CODE,
            "`bounded_delay`, `together` = t; beside runs in bounds.md",
        ),
        Row(
            "Theorem 8",
            "t-synchronous, bounded delay, convex",
            CODE,
            "`bounded_delay_convex`, `together` = t; parties' rates are 1 / t of the server's, as in "
            "Theorem 7, where equal ones are printed",
        ),
        Row(
            "Theorem 9", "t-synchronous, random delay, nonconvex", CODE, "`stochastic_delay`, `together` = t"
        ),
        Row(
            "Theorem 10",
            "t-synchronous, random delay, convex",
            CODE,
            "`stochastic_delay_convex`, `together` = t; rates as for Theorem 8",
        ),
        Row(
            "Figure 2",
            "accuracy against time, linear models",
            REPRODUCED,
            "vafl.md; samples of MNIST and Fashion-MNIST, Parkinson whole; CIFAR-10 cannot be had",
        ),
        Row("Figure 3", "accuracy against time, CNN", STAND_IN, "vafl.md"),
        Row("Figure 4", "AUC against time, LSTM", STAND_IN, "vafl.md; accuracy"),
        Row("Figure 5", "training loss, CNN (ModelNet40)", STAND_IN, "vafl.md; MNIST in bands"),
        Row("Figure 6", "accuracy, CNN", STAND_IN, "vafl.md; its caption is that of Figure 3, made once"),
        Row("Figure 7", "training loss, LSTM (MIMIC-III)", STAND_IN, "vafl.md; digits in bands"),
        Row(
            "Figure 8", "AUC, LSTM", STAND_IN, "vafl.md; accuracy; its caption is that of Figure 4, made once"
        ),
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
        Row(
            "Equations 1, 2",
            "a function of the sum of local predictions",
            CODE,
            "sum fusion with head `sum`; the weights of (1) are in the local models, as the paper puts them",
        ),
        Row("Equations 3 to 5", "objective", CODE, "fields `loss` and `l2`"),
        Row(
            "Equations 6, 7",
            "partial gradients",
            CODE,
            "every worker has its sum's derivative and its own model's",
        ),
        Row("Equations 8, 9", "updates", CODE, "`fdml`; the mean over a batch, where the paper has the sum"),
        Row("Equation 10", "regret", CODE, "`theory.fdml.regret`"),
        Row("Equation 11", "Lipschitz gradients", ASSUMED, "Assumption 1"),
        Row("Equations 12 to 33", "proof of Proposition 1", STEP, "of Proposition 1"),
        Row("Proposition 1", "regret", CODE, "`theory.fdml.regret`; repaired"),
        Row(
            "Section 1",
            "predictions to other parties directly, fully decentralised",
            CODE,
            "`fdml` with `decentralised`; half a sentence without an algorithm, made as Algorithm 1 with the "
            "server's matrix at every worker; the label holder still hands out labels and measures",
        ),
        Row("Figure 1", "diagram of the model", CODE, "sum fusion with head `sum`"),
        Row(
            "Section 3",
            "local models of any kind",
            CODE,
            "fields `model`, `encoders`, `loss`: SVM, FM, networks",
        ),
        Row(
            "Section 5.2",
            "noise on local predictions",
            CODE,
            "fields `clip` and `sigma`; counted by mode `strict`",
        ),
        Row(
            "Section 5.1",
            "workers with a cluster or several threads",
            CODE,
            "a step of a large model takes torch's threads or a GPU; a cluster within a worker is not made",
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
            CODE,
            "`TreePair.is_significantly_different()`; not enough, see Lemma 12",
        ),
        Row(
            "Equations 20, 21",
            "logistic and ridge regression",
            CODE,
            "the usual losses; of half the squared error, so that lambda is an `l2` of half its size",
        ),
        Row(
            "Equation 1", "regularised risk of a linear model", CODE, "the AFSGD-VP family trains these alone"
        ),
        Row(
            "Equations 2 to 5",
            "steps of SGD, SVRG, SAGA",
            CODE,
            "`afsgd`, `afsvrg`, `afsaga`; tested to be unbiased",
        ),
        Row("Equations 6 to 8", "strong convexity, smoothness", ASSUMED, "Assumptions 1 and 2"),
        Row("Equations 9, 10", "updates in one order, stale weights", STEP, "of Theorems 4, 6 and 8"),
        Row("Equations 11 to 19", "rates and epochs", CODE, "Theorems 4, 6 and 8"),
        Row(
            "Equations 22 to 69",
            "proofs",
            STEP,
            "of Theorems 4, 6 and 8; slips in the docstring of `theory.afsgd`",
        ),
        Row(
            "Section 3.3",
            "messages of an iteration are O(q)",
            CODE,
            "about two per worker on `plain-tree`, by a test",
        ),
        Row("Definition 2", "iterations that visit every block", CODE, "the epoch of `theory.afsgd`"),
        Row("Definition 3", "number of such epochs", CODE, "`theory.afsgd.Requirement`, its epochs"),
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
            "Definition 10",
            "exact inference",
            CODE,
            "attacks exact-inference and exact-inference-totals; with some of the owner's records known they "
            "succeed on Algorithm 1 and, where records are summed repeatedly, on Algorithm 2",
        ),
        Row("Definition 11", "approximate inference", CODE, "attack approximate-inference"),
        Row(
            "Lemma 12",
            "masks summed along a second tree disclose no mask and no subtree's sum",
            REFUTED,
            "by pairs that Definition 1 admits; what holds is the connectivity of both trees' union, "
            "docs/protocols.md",
        ),
        Row("Figure 1", "asynchronous against synchronous time", CODE, "the virtual clock shows it"),
        Row("Figure 2", "system", CODE, "the picture in docs/architecture.md"),
        Row("Figure 3", "two trees", CODE, "`securevfl trees Q`"),
        Row(
            "Table 1",
            "data sets",
            STAND_IN,
            "afsgd.md; two of eight, and synthetic ones as wide as news20, url and both of regression; none "
            "for rcv1 and webspam",
        ),
        Row(
            "Table 2",
            "speed-up with a straggler",
            REPRODUCED,
            "afsgd.md; the two credit sets; stand-ins for four others, none for rcv1 and webspam",
        ),
        Row(
            "Figure 4",
            "convergence, classification and regression",
            STAND_IN,
            "afsgd.md; both sets of classification; of regression synthetic sets of the same width",
        ),
        Row(
            "Figure 5",
            "convergence on news20, rcv1, url, webspam",
            STAND_IN,
            "afsgd.md; synthetic sets as wide as news20 and url; none for rcv1 and webspam",
        ),
        Row("Figure 6", "speed-up against workers", STAND_IN, "afsgd.md; uci-credit, SGD"),
        Row(
            "Figure 7",
            "where the time goes, 8 workers, url",
            CODE,
            "afsgd.md, by the virtual clock; times on a cluster are not measured",
        ),
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
        Row("Equation 1", "objective", CODE, "fields `loss` and `l2`"),
        Row("Equations 2 to 5", "smoothness, unbiased, bounded variance", ASSUMED, "Assumptions 1 to 3"),
        Row("Equations 6, 7", "local updates", CODE, "`flex`"),
        Row("Equations 9 to 11", "a round as one step", STEP, "of Theorem 1"),
        Row("Equations 12, 13", "drift within a round", STEP, "Lemma 1"),
        Row("Equations 14, 15", "rates and gradient norms", CODE, "Theorem 1"),
        Row("Equations 16, 17", "equal parties", CODE, "Corollary 1"),
        Row("Equations 21 to 59", "proofs of Lemma 1 and Theorem 1", STEP, "of Theorem 1"),
        Row(
            "Section IV",
            "K (|server's model| + B sum of embeddings) numbers go to the parties in a round",
            CODE,
            "messages of `flex`, by a test; the uploads come on top",
        ),
        Row(
            "Equation 8",
            "weights of local optimisers",
            CODE,
            "function `gradient_weights` of `algorithms.flex`: SGD, momentum, proximal (repaired), decaying",
        ),
        Row(
            "Lemma 1",
            "drift within a round",
            STEP,
            "of Theorem 1; tested with a smaller constant for every optimiser",
        ),
        Row(
            "Theorem 1",
            "gradient norms",
            CODE,
            "`theory.flex.rate_limit`, `theory.flex.bound`; its proof is repaired; beside runs in bounds.md",
        ),
        Row("Corollary 1", "equal parties", CODE, "`theory.flex.uniform_bound`; the printed one is refuted"),
        Row("Corollary 2", "decaying rates", CODE, "`theory.flex.vanishes`"),
        Row(
            "Equations 18 to 20",
            "rates of the adaptive algorithm",
            CODE,
            "`theory.flex.adaptive_limit`; (18) repaired",
        ),
        Row("Figure 1", "diagram of the model", CODE, "the picture in docs/architecture.md"),
        Row("Table I", "notation", CODE, "docstrings name the symbols"),
        Row(
            "Table II",
            "combinations of optimisers (MOSEI)",
            STAND_IN,
            "flex.md; FATE's motor set",
        ),
        Row("Table III", "time to target against communication", STAND_IN, "flex.md"),
        Row("Table IV", "timeouts", STAND_IN, "flex.md"),
        Row(
            "Figure 2",
            "distributions of speed",
            STAND_IN,
            "flex.md; Fashion-MNIST, and synthetic traces in place of Google's",
        ),
        Row(
            "Figure 3",
            "Google cluster traces",
            IMPOSSIBLE,
            "the traces are not at hand; synthetic ones serve",
        ),
        Row(
            "Figure 4",
            "adaptive against static rates",
            STAND_IN,
            "flex.md; accuracy on mfeat in place of MOSEI, on Fashion-MNIST in place of ModelNet40",
        ),
    ),
}


def covered(row: Row) -> list[str]:
    """The single numbers that a row is about."""
    numbers = re.fullmatch(r"Equations (\d+)(,| to) (\d+)", row.item)
    if numbers is None:
        return [row.item]
    return [f"Equation {each}" for each in range(int(numbers[1]), int(numbers[3]) + 1)]


RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
MEASURED = (REPRODUCED, STAND_IN)
UNDER = {
    **{("AFSGD-VP", item): "Table 2" for item in ("Table 1", "Figure 4", "Figure 5")},
    ("VAFL", "Figure 6"): "Figure 3",
    ("VAFL", "Figure 8"): "Figure 4",
}
"""The section of a page that an item's figures stand in, where it is not called after the item."""


def page_of(row: Row) -> str:
    """The page of results, and the module that makes it; empty where nothing is measured."""
    return row.where.partition(".md")[0] if row.state in MEASURED else ""


def figures_of(paper: str, row: Row) -> str:
    """The commits with which a measured row's figures came, as its page says; empty where it has none."""
    if row.state not in MEASURED:
        return ""
    text = (RESULTS / f"{page_of(row)}.md").read_text(encoding="utf-8")
    item = re.escape(UNDER.get((paper, row.item), row.item))
    section = re.search(rf"^## {item}\b.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    said = re.search(r"Figures of commit ((?:`\w+\+?`(?:, )?)+)\.", section[0]) if section else None
    return said[1].replace("`", "") if said else ""


def settled(paper: str, row: Row) -> Row:
    """The row as it is: one whose page has no figures for it has not been made."""
    if row.state in MEASURED and not figures_of(paper, row):
        return row._replace(state=MISSING, where=f"{row.where}; {command_of(row)} makes it")
    return row


def command_of(row: Row) -> str:
    """How a measured row is made again; empty where nothing was measured."""
    return f"`python -m benchmarks.papers.{page_of(row)} --data-folder DATA`" if page_of(row) else ""


NOT_NEWER = (
    "*figures of* names the commit with which figures came, as their page says: they are of the code of that "
    "time, with the settings that the page names."
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
                [
                    [*row, command_of(row), figures_of(paper, row)]
                    for row in (settled(paper, r) for r in rows)
                ],
            ),
        ]
    return parts


def main() -> None:
    """Writes the page."""
    write(RESULTS / "papers.md", page())


if __name__ == "__main__":
    main()
