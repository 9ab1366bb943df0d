"""Whether to train together under a promised epsilon, how, and what to expect.

The proposed settings follow from public facts alone: task, columns, number of rows, epsilon. Choosing them by
private results would be a release that no ledger shows. The forecast does look at the asker's own rows, and
stays with the asker: the proposal is tried on parts of the training part, scored on rows that were held back
from it, and set beside what the label holder reaches alone. Nobody's test part is touched for it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.accountants.gdp import gdp_epsilon, gdp_mu
from securevfl.data import VerticalData
from securevfl.data.split import divide_rows
from securevfl.errors import PlanError, SecureVFLError
from securevfl.settings.families import DataSource
from securevfl.settings.plan import Plan
from securevfl.settings.source import named_files, rows_at_hand

TRIALS = 4
LEVEL = 0.9
"""Nominal level of the forecast interval."""
MOST_ROWS = 12_000
"""Rows of one trial; noise is scaled so that it weighs as much as it will on all rows."""
HELD_BACK = 0.2
CANDIDATES: tuple[dict[str, Any], ...] = (
    {"algorithm": "sealed"},
    {"algorithm": "sealed", "model": "scorecard"},
    {"algorithm": "sealed", "model": "linear", "scaling": "none"},
)
"""The first that the data's public facts allow is proposed."""
_OPTIONS = ("algorithm", "model", "epsilon", "delta", "parties")
"""Fields that `securevfl train` has an option of its own for."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """What to do, and what to expect of it.

    Attributes:
        fields: The proposed plan, as a user would give it; None where none fits the data.
        plan: The same with every choice settled; None where none fits.
        metric: The test metric that is forecast.
        expected: Its forecast.
        low: Lower end of the forecast interval for one run.
        high: Its upper end.
        error: Standard error of the forecast.
        alone: What the label holder reaches alone (``linear``, ``trees``); None if it has no features.
        basis: What the forecast rests on, in words.
        reasons: Why candidates do not fit.
        warnings: What the user must know.
        absent: Parties whose files are not at hand. Then `low` is the lower end for columns that are
            worth nothing, and nothing above it is known.
    """

    fields: Mapping[str, Any] | None
    plan: Plan | None
    metric: str = ""
    expected: float | None = None
    low: float | None = None
    high: float | None = None
    error: float = 0.0
    alone: Mapping[str, Any] | None = None
    basis: str = ""
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def best_alone(self) -> float | None:
        """The better of the label holder's own models."""
        known = [value for name, value in (self.alone or {}).items() if name in ("linear", "trees")]
        return max((value for value in known if value is not None), default=None)

    @property
    def worth_it(self) -> bool | None:
        """Whether clearly more is expected than the label holder reaches alone; None where that is not known.

        A gain that is smaller than the forecast's own standard error is none.
        """
        if self.expected is None:
            return False if self.fields is None else None
        return True if self.best_alone is None else self.expected > self.best_alone + self.error

    def command(self, source: DataSource) -> str | None:
        """The command line that trains it, into a free folder; None where nothing fits, or files are away."""
        if self.fields is None or self.absent:
            return None
        words = ["securevfl", "train"]
        for name in named_files(source.data) or [source.data]:
            words += ["--data", name]
        for name in ("data_folder", "id_column", "label_column"):
            if getattr(source, name) != getattr(DataSource(), name):
                words += [f"--{name.replace('_', '-')}", str(getattr(source, name))]
        for name, value in self.fields.items():
            option = f"--{name.replace('_', '-')}"
            words += [option, _word(value)] if name in _OPTIONS else ["--set", f"{name}={_word(value)}"]
        return shlex.join([*words, "--out", _free_folder()])


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, float) and f"{value:g}" != str(value) else f"{value}"


def _free_folder() -> str:
    names = ("runs/suggested", *(f"runs/suggested-{number}" for number in range(2, 10_000)))
    return next(name for name in names if not Path(name).exists())


def suggest(
    plan: Plan,
    *,
    at_hand: tuple[VerticalData, tuple[str, ...]] | None = None,
    public: VerticalData | None = None,
    trials: int = TRIALS,
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> Suggestion:
    """Proposes a plan for the data and the target of a plan, and forecasts its result.

    Args:
        plan: Names the data (`source`) and the target (`epsilon`, `delta`).
        at_hand: The data as `rows_at_hand` found it; None to look for it.
        public: Public rows to forecast on instead of those of the data.
        trials: How often the proposal is tried, two at least.
        progress: Called with what is being done and the share done.

    Raises:
        PlanError: No target epsilon, or one party alone.
        DataError: The data cannot be read.
    """
    if not plan.epsilon:
        raise PlanError("a suggestion needs the promise: give --epsilon")
    data, absent = rows_at_hand(plan, stand_ins=public is None) if at_hand is None else at_hand
    if len(data.parties) < 2:
        raise PlanError("one party alone has nobody to hide from; give data of at least two")
    from securevfl.algorithms.alone import reached_alone  # torch: once the data has been found
    from securevfl.algorithms.resolve import resolve

    common = {"parties": plan.source.parties} if plan.source.parties else {}
    promise = {"epsilon": plan.epsilon, "delta": plan.delta}
    rows, warnings = public or data, tuple(_warnings(plan, data))
    progress("the label holder alone", 0.0)
    alone = reached_alone(rows)
    reasons: list[str] = []
    for candidate in CANDIDATES:
        fields = {**candidate, **promise, **common}
        chosen = Plan.from_flat({**candidate, **promise, "seed": plan.seed})
        try:
            settled, _ = resolve(chosen, data)
            tried = chosen.with_changes(model=settled.model)
            metric, scores = _forecast(tried, rows, trials, progress)
        except SecureVFLError as error:
            reasons.append(f"{candidate.get('model', 'auto')}: {error}")
            continue
        expected, deviation, low, high = _interval(metric, scores, data if public is None else rows)
        whole = {"expected": expected, "error": deviation, "low": low, "high": high}
        known = {"low": low} if absent else whole
        return Suggestion(
            fields=fields, plan=settled, metric=metric, **known, alone=alone, absent=absent,
            basis=_basis(rows, trials, public is not None), reasons=tuple(reasons), warnings=warnings,
        )  # fmt: skip
    return Suggestion(fields=None, plan=None, alone=alone, reasons=tuple(reasons), warnings=warnings)


def _forecast(
    plan: Plan, data: VerticalData, trials: int, progress: Callable[[str, float], None]
) -> tuple[str, list[float]]:
    """The metric and its value on held-back rows, once per trial, each with rows and noise of its own.

    Noise weighs the less the more rows there are: with fewer rows, mu is raised by as much.
    """
    from securevfl.algorithms.alone import main_metric
    from securevfl.federation.run import train

    scores, metric = [], ""
    for trial in range(trials):
        progress(f"trial {trial + 1} of {trials}", (trial + 1) / (trials + 1))
        part = held_back(data, plan.seed + 1 + trial)
        mu = gdp_mu(plan.epsilon, plan.delta) * data.n_train / part.n_train
        run = train(part, plan.with_changes(epsilon=gdp_epsilon(mu, plan.delta)))
        metric = main_metric(run.test)
        scores.append(float(run.test.get(metric) or 0.0))
    return metric, scores


def held_back(data: VerticalData, seed: int) -> VerticalData:
    """A part of the training rows, some of them held back as its test part; the true test part is unused."""
    kept, apart = divide_rows(data.y_train, classes=data.task != "regression", fraction=HELD_BACK, seed=seed)
    few = np.random.default_rng(seed)
    kept, apart = (np.sort(few.permutation(rows)[:MOST_ROWS]) for rows in (kept, apart))
    return replace(
        data,
        train=tuple(block[kept] for block in data.train),
        test=tuple(block[apart] for block in data.train),
        y_train=data.y_train[kept],
        y_test=data.y_train[apart],
        ids_train=data.ids_train[kept],
        ids_test=data.ids_train[apart],
        described=tuple(
            replace(each, train=each.train[kept], test=each.train[apart]) for each in data.described
        ),
    )


def _interval(metric: str, scores: Sequence[float], data: VerticalData) -> tuple[float, float, float, float]:
    """Mean of the trials, its error, a t-interval for one more run with the error of its own test part."""
    from scipy.special import stdtrit

    count, middle = len(scores), math.fsum(scores) / len(scores)
    spread = math.fsum((score - middle) ** 2 for score in scores) / (count - 1)
    sampling = 0.0
    if metric != "r2":
        # Of an AUC the rarer class decides; m (1 - m) / n bounds its variance from above.
        rarest = min(np.bincount(data.y_test.astype(np.int64))) if metric == "auc" else data.n_test
        sampling = min(0.25, max(0.0, middle * (1 - middle))) / max(1, int(rarest))
    variance = max(spread, sampling)
    reach = float(stdtrit(count - 1, (1 + LEVEL) / 2)) * math.sqrt(variance * (1 + 1 / count))
    low, high = middle - reach, min(1.0, middle + reach)
    return middle, math.sqrt(variance / count), low if metric == "r2" else max(0.0, low), high


def _basis(data: VerticalData, trials: int, public: bool) -> str:
    rows = min(MOST_ROWS, round(data.n_train * (1 - HELD_BACK)))
    if public:
        return f"{trials} trials with {rows:,} of {data.n_train:,} public rows"
    return (
        f"{trials} trials with {rows:,} of {data.n_train:,} rows; they stay here, and the settings do not "
        "depend on them"
    )


def _warnings(plan: Plan, data: VerticalData) -> list[str]:
    rows = data.n_train + data.n_test
    if plan.delta * rows < 1:
        return []
    return [f"delta {plan.delta:g} is not below 1 / {rows:,} rows: it allows exposing whole records"]


def public_rows(files: Sequence[Path], plan: Plan) -> VerticalData:
    """Public rows from CSV files, one per party."""
    return VerticalData.from_csv(
        list(files), id_column=plan.source.id_column, label_column=plan.source.label_column, seed=plan.seed
    )
