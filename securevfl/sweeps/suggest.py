"""Which way to train under a promised epsilon, tried on rows that belong to nobody.

Choosing hyper-parameters by looking at private results spends privacy that no ledger shows. So every
candidate is calibrated and tried on a stand-in: synthetic rows of the data's public shape (number of rows,
widths, kind of task, number of classes), or public rows that the user has. Private values are not looked at,
the share of each class included: the stand-in is balanced.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.algorithms.resolve import planned_releases
from securevfl.data import VerticalData, make_synthetic
from securevfl.data.description import is_description
from securevfl.data.registry import find_info
from securevfl.errors import DataError, PlanError, SecureVFLError
from securevfl.federation.run import Run, train
from securevfl.settings.families import DataSource
from securevfl.settings.plan import Plan
from securevfl.settings.source import load_planned
from securevfl.sweeps.summary import MAIN_METRICS

MOST_ROWS = 12_000  # of the stand-in; more rows make no mode worse that is proposed here

LONG = 0  # stands for as many passes as it takes to converge; they cost nothing once releases are made
STEPS = 1500

# Fields of a plan that `securevfl train` has an option of its own for.
_OPTIONS = (
    "algorithm", "protocol", "model", "encoder_training", "clip", "epsilon", "delta", "epochs", "batch",
    "learning_rate", "parties",
)  # fmt: skip

# Name -> fields; what beats what depends on rows, widths and epsilon, so it is tried.
CANDIDATES: dict[str, dict[str, Any]] = {
    "sealed": {"algorithm": "sealed"},
    "sealed, fewer iterations": {"algorithm": "sealed", "epochs": 20},
    "frozen, narrow": {"algorithm": "vafl", "encoder_training": "none", "embedding": 1, "epochs": LONG},
    "frozen, wide": {"algorithm": "vafl", "encoder_training": "none", "embedding": 4, "epochs": LONG},
    "dp-encoder, one pass": {"algorithm": "vafl", "encoder_training": "dp", "epochs": 1, "batch": 512},
    "dp-encoder, three passes": {"algorithm": "vafl", "encoder_training": "dp", "epochs": 3, "batch": 512},
}
REFERENCES: dict[str, dict[str, Any]] = {
    "label holder alone": {"algorithm": "local", "epochs": LONG},
    "all features in one place": {"algorithm": "central", "epochs": LONG},
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is public about data: no value of any record.

    Attributes:
        rows: Training and test records.
        widths: Features of each party; the label holder's first.
        task: ``binary``, ``multiclass`` or ``regression``.
        classes: Number of classes; 0 for regression.
        bounded: Whether every column has public bounds to scale it by.
    """

    rows: int
    widths: tuple[int, ...]
    task: str
    classes: int
    bounded: bool = True

    @classmethod
    def of(cls, data: VerticalData) -> Shape:
        """The shape of loaded data."""
        holder = data.parties.index(data.label_holder) if data.label_holder in data.parties else 0
        others = tuple(width for place, width in enumerate(data.widths) if place != holder)
        return cls(
            rows=data.n_train + data.n_test,
            widths=(data.widths[holder], *others),
            task=data.task,
            classes=0 if data.task == "regression" else len(data.classes),
            bounded=_is_bounded(data),
        )

    def stand_in(self, seed: int) -> VerticalData:
        """Synthetic rows of this shape; classes are equally frequent, because the true shares are private."""
        return make_synthetic(
            rows=min(self.rows, MOST_ROWS),
            features=sum(self.widths),
            classes=max(self.classes, 2),
            task="regression" if self.task == "regression" else None,
            parties=self.widths,
            seed=seed,
        )


def _is_bounded(data: VerticalData) -> bool:
    return all(table is not None and not np.isnan(table).any() for table in data.bounds)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way of training, as tried on the stand-in.

    Attributes:
        name: What it is.
        plan: The plan with sigma calibrated and every choice filled in; None if it could not be tried.
        fields: The plan's fields as a user would give them.
        metric: The test metric that counts.
        score: Its value on the stand-in, mean over seeds.
        releases: What the busiest record pays for.
        reason: Why it could not be tried.
    """

    name: str
    fields: Mapping[str, Any]
    plan: Plan | None = None
    metric: str = ""
    score: float | None = None
    releases: int = 0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """What to do, and what it rests on.

    Attributes:
        best: The trial to repeat on the private rows.
        trials: All candidates, best first.
        references: The label holder alone, and all features in one place.
        shape: The public shape.
        basis: What the trials were made on, in words.
        warnings: What the user must know.
    """

    best: Trial
    trials: tuple[Trial, ...]
    references: tuple[Trial, ...]
    shape: Shape
    basis: str
    warnings: tuple[str, ...] = ()

    @property
    def worth_it(self) -> bool:
        """True where the best candidate beats the label holder alone on the stand-in."""
        alone = next((t.score for t in self.references if t.fields.get("algorithm") == "local"), None)
        return self.best.score is not None and (alone is None or self.best.score > alone)

    def command(self, given: Mapping[str, Any], out: str = "runs/suggested") -> str:
        """The command line that trains it."""
        words = ["securevfl", "train"]
        data = str(given.get("data", ""))
        for name in data.split(",") if _are_files(data) else [data]:
            words += ["--data", name]
        for name in ("data_folder", "id_column", "label_column"):
            if given.get(name) and given[name] != getattr(DataSource(), name):
                words += [f"--{name.replace('_', '-')}", str(given[name])]
        if not given.get("data_folder") and _needs_folder(data):
            words += ["--data-folder", "DIR"]
        for name, value in self.best.fields.items():
            option = f"--{name.replace('_', '-')}"
            words += [option, _word(value)] if name in _OPTIONS else ["--set", f"{name}={_word(value)}"]
        return shlex.join([*words, "--out", out])


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def public_shape(plan: Plan) -> Shape:
    """The shape of the data that a plan names, from the registry where its files are not at hand.

    Raises:
        DataError: Nothing is known about it.
    """
    info = None if _are_files(plan.source.data) else find_info(plan.source.data)
    if info is None or not info.needs_folder or plan.source.data_folder:
        return Shape.of(load_planned(plan))
    how = plan.source.parties or info.parties
    if how is None:
        raise DataError(
            f"the parties of {plan.source.data!r} follow from its files: give --data-folder or --parties"
        )
    widths = _near_equal(info.features, how) if isinstance(how, int) else tuple(int(str(w)) for w in how)
    classes = {"binary": 2, "regression": 0}.get(
        info.task, 10
    )  # sets of several classes are digits or clothes
    return Shape(rows=info.rows + info.test_rows, widths=widths, task=info.task, classes=classes)


def _needs_folder(data: str) -> bool:
    return not _are_files(data) and find_info(data).needs_folder


def _are_files(data: str) -> bool:
    files = data.endswith((".csv", ".gz", ".zip", ".tsv")) or is_description(data)
    return "," in data.partition(":")[0] or "/" in data or files


def _near_equal(features: int, parties: int) -> tuple[int, ...]:
    if not 1 <= parties <= features:
        raise DataError(f"{features} features cannot be split over {parties} parties")
    return tuple(features // parties + (place < features % parties) for place in range(parties))


def suggest(
    plan: Plan,
    *,
    public: VerticalData | None = None,
    seeds: Sequence[int] = (0, 1),
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Suggestion:
    """Tries all candidates at the plan's epsilon and delta on rows that belong to nobody.

    Args:
        plan: Names the data (`source`) and the target (`epsilon`, `delta`); of the data only the public shape
            is used.
        public: Public rows to try on instead of synthetic ones.
        seeds: Seeds of the trials.
        progress: Called with what is being tried and the share done.

    Raises:
        PlanError: No target epsilon, or no candidate fits the data.
    """
    if not plan.epsilon:
        raise PlanError("a suggestion needs the promise: give --epsilon")
    shape = public_shape(plan)
    if len(shape.widths) < 2:
        raise PlanError("one party alone has nobody to hide from; give data of at least two")
    data = {seed: public if public is not None else shape.stand_in(seed) for seed in seeds}
    promise = {"epsilon": plan.epsilon, "delta": plan.delta}
    # Statistics of private rows are no way to scale them here: without public bounds they stay as they are.
    bounded = shape.bounded and (public is None or _is_bounded(public))
    common: dict[str, Any] = {"parties": plan.source.parties} if plan.source.parties else {}
    common |= {} if bounded else {"scaling": "none"}
    ways = {name: {**_settled(fields, shape), **promise} for name, fields in CANDIDATES.items()}
    todo = [*ways.items(), *((name, _settled(fields, shape)) for name, fields in REFERENCES.items())]
    found = []
    for number, (name, fields) in enumerate(todo):
        progress(name, number / len(todo))
        found.append(_trial(name, {**fields, **common}, data))
    trials, references = found[: len(ways)], found[len(ways) :]
    ranked = sorted(trials, key=lambda t: -math.inf if t.score is None else t.score, reverse=True)
    if ranked[0].score is None:
        raise PlanError(f"no candidate fits this data: {ranked[0].reason}")
    return Suggestion(
        best=ranked[0],
        trials=tuple(ranked),
        references=tuple(references),
        shape=shape,
        basis=_basis(shape, public, len(seeds)),
        warnings=tuple(_warnings(plan, shape, public)),
    )


def _settled(fields: Mapping[str, Any], shape: Shape) -> dict[str, Any]:
    """The fields with the number of passes that gives about `STEPS` steps, between 5 and 100."""
    if fields.get("epochs") != LONG:
        return dict(fields)
    passes = math.ceil(STEPS * Plan(algorithm="local").batch / min(shape.rows, MOST_ROWS))
    return {**fields, "epochs": min(100, max(5, passes))}


def _trial(name: str, fields: Mapping[str, Any], data: Mapping[int, VerticalData]) -> Trial:
    """Trains a candidate on each stand-in, in memory."""
    own = {**fields, "parties": 0}
    try:
        runs = [train(rows, Plan.from_flat({**own, "seed": seed})) for seed, rows in data.items()]
    except SecureVFLError as error:
        return Trial(name=name, fields=fields, reason=str(error))
    metric = next((m for m in MAIN_METRICS if runs[0].test.get(m) is not None), "accuracy")
    scores = [float(run.test.get(metric) or 0.0) for run in runs]
    return Trial(
        name=name,
        fields=fields,
        plan=runs[0].plan,
        metric=metric,
        score=math.fsum(scores) / len(scores),
        releases=_releases(runs[0], next(iter(data.values()))),
    )


def _releases(run: Run, data: VerticalData) -> int:
    """How often the busiest record is released, or opened in a sealed total."""
    if not run.privacy:
        return 0
    if run.plan.mode == "sealed":
        return run.plan.epochs
    return planned_releases(run.plan, data).per_record


def _basis(shape: Shape, public: VerticalData | None, seeds: int) -> str:
    kind = f"{shape.task}" + (f" with {shape.classes} classes" if shape.classes else "")
    widths = " + ".join(map(str, shape.widths))
    if public is not None:
        return (
            f"{public.n_train + public.n_test:,} public rows, mean of {seeds} seeds; no private row was used"
        )
    rows = f"{min(shape.rows, MOST_ROWS):,}"
    return (
        f"{rows} synthetic rows shaped like the data ({widths} features, {kind}), mean of {seeds} seeds; "
        "no private value was used, not even how frequent each class is"
    )


def _warnings(plan: Plan, shape: Shape, public: VerticalData | None) -> list[str]:
    found = []
    if plan.delta * shape.rows >= 1:
        found.append(
            f"delta {plan.delta:g} is not below 1 / {shape.rows:,} rows: it allows exposing whole records"
        )
    if public is None:
        found.append("the figures rank the ways of training; on your own rows the level will be another")
        if shape.rows > MOST_ROWS:
            found.append(
                f"tried with {MOST_ROWS:,} of {shape.rows:,} rows: with more, sealed training does no worse"
            )
    return found


def public_rows(files: Sequence[Path], plan: Plan) -> VerticalData:
    """Public rows from CSV files, one per party."""
    return VerticalData.from_csv(
        list(files), id_column=plan.source.id_column, label_column=plan.source.label_column, seed=plan.seed
    )
