"""Sealed scorecards in simulation: test AUC beside boosted trees, on local copies of public sets.

The noise is what the ring protocol would add (continuous instead of discrete Gaussian, scores and rows in
floating point instead of fixed point; both differ by less than 1e-4 of the noise). Set SECUREVFL_DATA to the
folder with one folder per set. Arguments: names of sets, --epsilons, --splits, --parties, --seeds;
--protocol runs the real protocol, all roles in one process; --profile ranks information values by it.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from sklearn.datasets import load_svmlight_file
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

from securevfl import Plan, VerticalData, train
from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.scorecard import BIAS, TOTALS, ScorecardNoise, most_bins_for
from securevfl.algorithms.sealed import tables
from securevfl.data.binning import CategoryBins, NumberBins, bin_categories, bin_numbers
from securevfl.data.readers import find_files, read_text
from securevfl.data.schemas import ADULT, UCI_CREDIT_CODES
from securevfl.protocols.sealed.kernel import Kernel
from securevfl.protocols.sealed.series import SineSeries, logistic_series

DELTA = 1e-5
NO_NOISE = 1e5  # mu of the runs "without noise"
GOALS = {"uci_credit": 0.017, "adult": 0.022, "give_me_some_credit": 0.009, "magic": 0.062}
GOALS["bank_marketing"] = 0.041

BANK = {
    "job": "admin. unknown unemployed management housemaid entrepreneur student blue-collar self-employed "
    "retired technician services",
    "marital": "married divorced single",
    "education": "unknown secondary primary tertiary",
    "default": "yes no",
    "housing": "yes no",
    "loan": "yes no",
    "contact": "unknown telephone cellular",
    "month": "jan feb mar apr may jun jul aug sep oct nov dec",
    "poutcome": "unknown other failure success",
}


@dataclass(frozen=True)
class Column:
    """Cells of a column, and the public list of its values where it is a category."""

    name: str
    cells: np.ndarray
    values: tuple[str, ...] | None = None

    def rows(self, chosen: np.ndarray) -> Column:
        return replace(self, cells=self.cells[chosen])

    def for_trees(self) -> np.ndarray:
        if self.values is None:
            return self.cells
        place = {value: float(i) for i, value in enumerate(self.values)}
        return np.array([place.get(cell, np.nan) for cell in self.cells])


@dataclass(frozen=True)
class Set:
    columns: list[Column]
    labels: np.ndarray
    test: float = 0.2


def _table(name: str, file: str, header: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    folder = Path(os.environ["SECUREVFL_DATA"]) / name
    lines = read_text(find_files(name, folder, (file,))[0]).splitlines()
    rows = [
        [cell.strip() for cell in row]
        for row in csv.reader(io.StringIO("\n".join(lines)))
        if row and not row[0].startswith("|")
    ]
    header = header or rows.pop(0)
    return dict(zip(header, np.array(rows).T, strict=True))


def _numbers(cells: np.ndarray) -> np.ndarray:
    return np.array([float(cell) if cell not in ("", "NA") else np.nan for cell in cells])


def _set(
    cells: dict[str, np.ndarray],
    label: str,
    positive: str,
    lists: dict[str, tuple[str, ...]],
    leave_out: Sequence[str] = (),
    test: float = 0.2,
) -> Set:
    columns = [
        Column(name, found, lists[name]) if name in lists else Column(name, _numbers(found))
        for name, found in cells.items()
        if name != label and name not in leave_out
    ]
    return Set(columns, (np.char.rstrip(cells[label], ".") == positive).astype(float), test)


def load(name: str) -> Set:
    """A set with its columns in file order."""
    if name == "uci_credit":
        lists = {c: tuple(map(str, UCI_CREDIT_CODES[c])) for c in ("SEX", "EDUCATION", "MARRIAGE")}
        cells = _table(name, "UCI_Credit_Card.csv")
        return _set(cells, "default.payment.next.month", "1", lists, ["ID"])
    if name == "adult":
        parts = [_table(name, file, [*ADULT, "income"]) for file in ("adult.data", "adult.test")]
        lists = {c: values for c, values in ADULT.items() if isinstance(values[0], str)}
        cells = {c: np.concatenate([part[c] for part in parts]) for c in parts[0]}
        return _set(cells, "income", ">50K", lists, test=1 / 3)
    if name == "give_me_some_credit":
        return _set(_table(name, "cs-training.csv"), "SeriousDlqin2yrs", "1", {}, [""])
    if name == "magic":
        return _set(_table(name, "magic04.csv", [f"x{i}" for i in range(10)] + ["y"]), "y", "g", {})
    lists = {c: tuple(values.split()) for c, values in BANK.items()}
    return _set(_table("bank_marketing", "bank.csv"), "y", "yes", lists, ["duration"])


def halves(columns: int, parties: int) -> list[range]:
    """Columns in file order, the first parties one more where they do not divide."""
    ends = [-(-columns * m // parties) for m in range(parties + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


@dataclass
class Feature:
    """A party's feature on its way through the recipe."""

    bins: NumberBins | CategoryBins
    place: np.ndarray
    index: np.ndarray
    counts: tables.Counts
    tables: list[tables.BinTable]
    weights: list[float]


class Card:
    """The recipe with all roles in one place; noise as the parties would add it."""

    def __init__(
        self,
        blocks: Sequence[Sequence[Column]],
        labels: np.ndarray,
        mu: float,
        seed: int,
        series: SineSeries | Kernel | None = None,
    ) -> None:
        series = series or logistic_series()
        low, high = series.range
        self.series, self.blocks, self.labels, self.records = series, blocks, labels, len(labels)
        self.generator = np.random.default_rng(seed)
        self.noise = ScorecardNoise(
            mu=mu,
            records=len(labels),
            columns=tuple(len(block) for block in blocks),
            binned=sum(_binned(column) for block in blocks for column in block),
            residual_bound=max(high, 1 - low) + series.rounding,
            residual_change=high - low + 2 * series.rounding,
        )
        self.draw = lambda shape, std: self.generator.standard_normal(shape) * std
        self.noisy = lambda counts, std: counts + self.draw(counts.shape, std)
        self.features = [[self._feature(column, m) for column in block] for m, block in enumerate(blocks)]
        self.rates = [self._evidence(m) for m in range(len(blocks))]
        self.bias = math.log(self.rates[0] / (1 - self.rates[0]))
        self._fit("first")
        if self.noise.residuals:
            self._residuals()
        self._fit("last")

    def _feature(self, column: Column, member: int) -> Feature:
        bins: NumberBins | CategoryBins
        if column.values is None:
            most = most_bins_for(self.noise)
            bins = bin_numbers(column.cells, self.noisy, stds=self.noise.bin_stds, bins=most)
        else:
            bins = bin_categories(column.cells, column.values, self.noisy, std=self.noise.list_std)
        std = self.noise.std("labels", member)
        index = bins.assign(column.cells)
        counts = tables.Counts(
            positive=self._totals(index, self.labels, bins.size, std),
            negative=self._totals(index, 1 - self.labels, bins.size, std),
            ordered=bins.ordered,
            own_missing=bins.own_missing,
        )
        place = tables.join_weak_bins(counts, std)
        return Feature(bins, place, place[index], tables.joined(counts, place), [], [])

    def _totals(self, index: np.ndarray, weights: np.ndarray, size: int, std: float) -> np.ndarray:
        return np.bincount(index, weights, size) + self.draw((size,), std)

    def _evidence(self, member: int) -> float:
        features, std = self.features[member], self.noise.std("labels", member)
        q = tables.rate([f.counts for f in features], self.records, std)
        for f in features:
            f.tables = [tables.evidence(f.counts, q=q, records=self.records, std=std)]
            f.weights = [tables.FIRST_START if f.tables[0].used else 0.0]
        return q

    def _residuals(self) -> None:
        gaps = self.labels - self._logistic(self.scores())
        for m, features in enumerate(self.features):
            std = self.noise.std("residuals", m)
            for f in features:
                totals = self._totals(f.index, gaps, len(f.counts.positive), std)
                f.tables.append(
                    tables.residual_table(totals, f.counts, q=self.rates[m], records=self.records, std=std)
                )
                f.weights.append(tables.SECOND_START if f.tables[-1].used else 0.0)

    def scores(self) -> list[np.ndarray]:
        """Scores of the training records, member by member; the first one has the constant."""
        found = [np.full(self.records, 0.0 if m else self.bias) for m in range(len(self.blocks))]
        for score, f in ((found[m], f) for m, features in enumerate(self.features) for f in features):
            for t, w in zip(f.tables, f.weights, strict=True):
                score += w * t.values[f.index]
        return found

    def _logistic(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        """As members compute it: of the sum, or without a dealer of both."""
        return self.series.of(*scores) if isinstance(self.series, Kernel) else self.series(sum(scores))

    def _fit(self, opening: str) -> None:
        members = len(self.blocks)
        places, rows, fits, scales = [], [], [], []
        for m, features in enumerate(self.features):
            used = [(f, i) for f in features for i, t in enumerate(f.tables) if t.used]
            clip = math.sqrt(1 - BIAS**2) if m == 0 else 1.0
            scale = tables.column_scales(np.array([f.tables[i].information for f, i in used]), clip)
            columns = [f.tables[i].values[f.index] * s for (f, i), s in zip(used, scale, strict=True)]
            start = [f.weights[i] / s for (f, i), s in zip(used, scale, strict=True)]
            if m == 0:
                columns.append(np.full(self.records, BIAS))
                start.append(self.bias / BIAS)
                scale = np.append(scale, BIAS)
            std = self.noise.std(opening, m)
            pull = tables.ridge(scale, noise=std / math.sqrt(TOTALS[opening]), records=self.records)
            places.append(used)
            rows.append(tables.clipped_rows(np.stack(columns, 1), 1.0) if columns else None)
            scales.append(scale)
            fits.append(
                tables.PartyFit(
                    start=np.array(start),
                    pull=pull,
                    records=self.records,
                    totals=TOTALS[opening],
                    rate=10.0 / members,
                )
            )
        for _ in range(TOTALS[opening]):
            scores = [
                np.zeros(self.records) if x is None else x @ fit.weights
                for x, fit in zip(rows, fits, strict=True)
            ]
            residuals = self._logistic(scores) - self.labels
            for m, (x, fit) in enumerate(zip(rows, fits, strict=True)):
                if x is not None:
                    fit.step(x.T @ residuals + self.draw((x.shape[1],), self.noise.std(opening, m)))
        for used, fit, scale in zip(places, fits, scales, strict=True):
            for (f, i), weight in zip(used, fit.result * scale, strict=False):  # the constant comes last
                f.weights[i] = float(weight)
        self.bias = float(fits[0].result[-1] * BIAS)

    def predict(self, blocks: Sequence[Sequence[Column]]) -> np.ndarray:
        """Scores of other records, by shapes and bins alone."""
        total = np.full(len(blocks[0][0].cells), self.bias)
        for block, features in zip(blocks, self.features, strict=True):
            for column, f in zip(block, features, strict=True):
                if any(t.used for t in f.tables):
                    total += tables.shape(f.tables, f.weights).values[f.place[f.bins.assign(column.cells)]]
        return total


def _binned(column: Column) -> bool:
    return column.values is None or len(column.values) > 64


def trees(train: Sequence[Column], labels: np.ndarray, test: Sequence[Column]) -> np.ndarray:
    """Scores of scikit-learn's boosted trees with their defaults."""
    kinds = [column.values is not None for column in train]
    model = HistGradientBoostingClassifier(categorical_features=kinds, random_state=0)
    model.fit(np.stack([c.for_trees() for c in train], 1), labels)
    return model.predict_proba(np.stack([c.for_trees() for c in test], 1))[:, 1]


def measure(
    name: str,
    *,
    epsilons: Sequence[float],
    splits: Sequence[int],
    parties: int,
    seeds: int,
    with_trees: bool = True,
) -> dict[str, list[float]]:
    """AUC on the test records, per split, by kind of model."""
    data = load(name)
    found: dict[str, list[float]] = {}
    for split in splits:
        order = np.random.default_rng(split).permutation(len(data.labels))
        cut = round(len(order) * data.test)
        test, train = order[:cut], order[cut:]
        y, y_test = data.labels[train], data.labels[test]
        here = [[data.columns[i] for i in group] for group in halves(len(data.columns), parties)]
        blocks = [[c.rows(train) for c in block] for block in here]
        others = [[c.rows(test) for c in block] for block in here]
        results = {}
        if with_trees:
            every = [c for block in blocks for c in block], [c for block in others for c in block]
            results["central trees"] = roc_auc_score(y_test, trees(every[0], y, every[1]))
            results["holder's trees"] = roc_auc_score(y_test, trees(blocks[0], y, others[0]))
        for epsilon in epsilons:
            mu = gdp_mu(epsilon, DELTA) if math.isfinite(epsilon) else NO_NOISE
            runs = []
            for seed in range(seeds if math.isfinite(epsilon) else 1):
                start = time.process_time()
                card = Card(blocks, y, mu, seed=1000 * split + seed)
                found.setdefault("seconds", []).append(time.process_time() - start)
                runs.append(roc_auc_score(y_test, card.predict(others)))
            results[f"epsilon {epsilon:g}"] = float(np.mean(runs))
        for kind, auc in results.items():
            found.setdefault(kind, []).append(float(auc))
    return found


def described(name: str, split: int, parties: int, folder: Path) -> Path:
    """The same records as `measure` takes, as files with a description that gives no bounds."""
    data = load(name)
    order = np.random.default_rng(split).permutation(len(data.labels))
    cut = round(len(order) * data.test)
    lines = ["id = 'id'", "label = 'y'", "label_holder = 'p0'", "task = 'binary'", "positive = 1"]
    for number, group in enumerate(halves(len(data.columns), parties)):
        columns = [data.columns[i] for i in group]
        for part, rows in (("test", order[:cut]), ("train", order[cut:])):
            cells = [rows, *(c.cells[rows] for c in columns)]
            header = ["id", *(f"c{i}" for i in group)]
            if number == 0:
                cells, header = [*cells, data.labels[rows].astype(int)], [*header, "y"]
            with (folder / f"{part}{number}.csv").open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(header)
                writer.writerows(
                    [["" if x == "nan" else x for x in map(str, row)] for row in zip(*cells, strict=True)]
                )
        lines += [f"[parties.p{number}]", f"file = 'train{number}.csv'", f"test = 'test{number}.csv'"]
        lines += [f"[parties.p{number}.columns]"]
        for i, column in zip(group, columns, strict=True):
            if column.values:
                lines.append(f"c{i} = {{ values = {list(column.values)} }}")
    (folder / "data.toml").write_text("\n".join(lines) + "\n")
    return folder / "data.toml"


def split_data(name: str, split: int, parties: int) -> VerticalData:
    """The records of one split as a user would give them; w8a is sparse and has two-valued columns."""
    if name != "w8a":
        with tempfile.TemporaryDirectory() as folder:
            return VerticalData.from_description(described(name, split, parties, Path(folder)))
    files = find_files(name, Path(os.environ["SECUREVFL_DATA"]) / name, ("w8a",))
    rows, labels = load_svmlight_file(str(files[0]), n_features=300)
    order = np.random.default_rng(split).permutation(len(labels))
    cut = round(len(order) * 0.2)
    blocks = [rows[:, group].tocsr() for group in map(list, halves(300, parties))]
    return VerticalData.from_arrays(
        [block[order[cut:]] for block in blocks],
        (labels[order[cut:]] > 0).astype(int),
        test=([block[order[:cut]] for block in blocks], (labels[order[:cut]] > 0).astype(int)),
        bounds=[(0.0, 1.0)] * parties,
    )


def run_protocol(name: str, *, epsilon: float, split: int, parties: int) -> None:
    """One whole run of the real protocol, all roles in one process: AUC, processor time, bytes."""
    data = split_data(name, split, parties)
    start = time.process_time()
    run = train(data, Plan(algorithm="sealed", epsilon=epsilon, delta=DELTA))
    seconds = time.process_time() - start
    print(
        f"{name}, split {split}, epsilon {epsilon:g}: {run.plan.model}, AUC {run.result['test']['auc']:.4f}, "
        f"{seconds:.1f} s of processor time, {run.result['bytes'] / 1e6:.0f} MB, "
        f"{run.result['epochs']} openings",
        flush=True,
    )


def run_stack(name: str, *, epsilon: float, split: int, parties: int) -> None:
    """A whole run with a stack: what the label holder uses, beside its own trees and the card alone."""
    run = train(
        split_data(name, split, parties),
        Plan(algorithm="sealed", epsilon=epsilon, delta=DELTA, settings={"stack": True}),
    )
    found, alone = run.result["stack"], run.alone or {}
    print(
        f"{name}, split {split}, epsilon {epsilon:g}: uses {found['used']}, AUC {found['test']['auc']:.4f}, "
        f"sealed {run.test['auc']:.4f}, own trees {alone['trees']:.4f} (all records)",
        flush=True,
    )


def run_baselines(name: str, *, epsilon: float, split: int, parties: int) -> None:
    """Both baselines of one split, linear and boosted trees."""
    data = split_data(name, split, parties)
    for algorithm, model in itertools.product(("local", "central"), ("linear", "trees")):
        auc = train(data, Plan(algorithm=algorithm, model=model, unprotected=True)).test["auc"]
        print(f"{name}, split {split}, {algorithm} {model}: AUC {auc:.4f}", flush=True)


def run_profile(name: str, *, epsilon: float, split: int, parties: int) -> None:
    """Rank correlation of noisy information values with those of all but exact counts, real protocol."""
    found = []
    data = split_data(name, split, parties)
    for target in (epsilon, 1e4):
        run = train(data, Plan(algorithm="sealed", model="profile", epsilon=target, delta=DELTA))
        found.append(np.concatenate([run.encoders[p].information.numpy() for p in data.parties]))
    rank = spearmanr(*found).statistic
    print(f"{name}, split {split}, epsilon {epsilon:g}: Spearman {rank:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(GOALS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1, 2, math.inf])
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--parties", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-trees", action="store_true")
    parser.add_argument("--protocol", action="store_true", help="whole runs instead of the simulation")
    parser.add_argument("--baselines", action="store_true", help="linear models and trees, once per epsilon")
    parser.add_argument("--stack", action="store_true", help="whole runs with a stack")
    parser.add_argument("--profile", action="store_true", help="rank correlation of information values")
    parser.add_argument("--export", type=Path, help="write the splits as files, for other programs")
    options = parser.parse_args()
    if "SECUREVFL_DATA" not in os.environ:
        raise SystemExit("set SECUREVFL_DATA to the folder with one folder per data set")
    if options.export is not None:
        for name, split in itertools.product(options.names, range(options.splits)):
            folder = options.export / f"{name}-{split}"
            folder.mkdir(parents=True)
            described(name, split, options.parties, folder)
        return
    chosen = {
        run_protocol: options.protocol,
        run_profile: options.profile,
        run_stack: options.stack,
        run_baselines: options.baselines,
    }
    for run in (each for each, wanted in chosen.items() if wanted):
        for name, epsilon, split in itertools.product(options.names, options.epsilons, range(options.splits)):
            run(name, epsilon=epsilon, split=split, parties=options.parties)
    if any(chosen.values()):
        return
    for name in options.names:
        found = measure(
            name,
            epsilons=options.epsilons,
            splits=range(options.splits),
            parties=options.parties,
            seeds=options.seeds,
            with_trees=not options.no_trees,
        )
        seconds = found.pop("seconds")
        print(
            f"\n{name}, {options.parties} parties, {options.splits} splits, {np.mean(seconds):.1f} s a card"
        )
        best = found.get("central trees")
        for kind, aucs in found.items():
            gap = "" if best is None else f"   {np.mean(np.subtract(best, aucs)):.4f} below central trees"
            print(f"{kind:16} {np.mean(aucs):.4f}  ({min(aucs):.4f} - {max(aucs):.4f}){gap}", flush=True)


if __name__ == "__main__":
    main()
