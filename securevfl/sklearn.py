"""Scikit-learn estimators: column groups are parties, and predictions pass the gates.

A simulation in one process, for pipelines and searches: whoever calls `fit` holds all columns anyway. What
the parties would have shown each other is in `privacy_`, training and predictions together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from securevfl.data import VerticalData
from securevfl.data.split import divide_columns
from securevfl.errors import DataError
from securevfl.federation.run import Run, train
from securevfl.settings.plan import Plan

__all__ = ["VerticalClassifier", "VerticalRegressor"]

Floats = npt.NDArray[np.float64]


class _Vertical(BaseEstimator):  # type: ignore[misc]
    """What both estimators share."""

    run_: Run

    def __init__(
        self,
        *,
        parties: int | Sequence[int] | Mapping[str, Sequence[Any]] = 2,
        algorithm: str = "vafl-sync",
        epochs: int = 30,
        batch: int = 32,
        learning_rate: float = 0.1,
        optimiser: str = "adam",
        model: str = "linear",
        sigma: float = 0.0,
        epsilon: float = 0.0,
        unprotected: bool = False,
        clip: float = 1.0,
        encoder_training: str = "raw",
        protocol: str = "plain",
        random_state: Any = 0,
        plan_fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.parties = parties
        self.algorithm = algorithm
        self.epochs = epochs
        self.batch = batch
        self.learning_rate = learning_rate
        self.optimiser = optimiser
        self.model = model
        self.sigma = sigma
        self.epsilon = epsilon
        self.unprotected = unprotected
        self.clip = clip
        self.encoder_training = encoder_training
        self.protocol = protocol
        self.random_state = random_state
        self.plan_fields = plan_fields

    @property
    def privacy_(self) -> dict[str, dict[str, Any]]:
        """What each party has spent so far, for its worst observer: training and predictions."""
        check_is_fitted(self, "run_")
        return self.run_.privacy

    def _plan(self) -> Plan:
        own = {
            "algorithm": self.algorithm,
            "epochs": self.epochs,
            "batch": self.batch,
            "learning_rate": self.learning_rate,
            "optimiser": self.optimiser,
            "model": self.model,
            "sigma": self.sigma,
            "epsilon": self.epsilon,
            "unprotected": self.unprotected,
            "clip": self.clip,
            "encoder_training": self.encoder_training,
            "protocol": self.protocol,
            "seed": int(check_random_state(self.random_state).randint(2**31 - 1)),
        }
        return Plan.from_flat({**own, **(self.plan_fields or {})})

    def _groups(self, columns: int) -> list[npt.NDArray[np.intp]]:
        """Column numbers of each party; a number of parties above that of the columns means one each."""
        names = getattr(self, "feature_names_in_", None)
        labels = [f"x{i}" for i in range(columns)] if names is None else [str(name) for name in names]
        wanted = min(self.parties, columns) if isinstance(self.parties, int) else self.parties
        shares = divide_columns(wanted, {"all": tuple(labels)})
        self.parties_ = [name for name, _ in shares]
        return [numbers for _, numbers in shares]

    def _fit(self, X: Any, checked: npt.NDArray[Any], target: npt.NDArray[Any], task: str) -> Run:
        self._columns = self._groups(checked.shape[1])
        blocks = self._blocks(checked)
        # Callers measure on rows of their own. A row of zeros, nobody's record, is the run's test part.
        nobody = [np.zeros((1, block.shape[1])) for block in blocks]
        data = VerticalData.from_arrays(
            blocks,
            target,
            _ids(X),
            test=(nobody, target[:1]),
            parties=self.parties_,
            task=task,
            name=type(self).__name__,
        )
        return train(data, self._plan())

    def _blocks(self, X: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        return [X[:, numbers] for numbers in self._columns]

    def _outputs(self, X: Any) -> Floats:
        check_is_fitted(self, "run_")
        checked = validate_data(self, X, reset=False, dtype=np.float64)
        return self.run_.predict(self._blocks(checked), ids=_ids(X))


class VerticalClassifier(ClassifierMixin, _Vertical):  # type: ignore[misc]
    """A classifier on columns that several parties hold; the first party has the labels.

    Set `epsilon`, or `sigma` and `clip`; without noise nothing is promised, and `fit` asks for the word
    `unprotected=True`.
    Predictions are released through the gates and count in `privacy_`; over a budget they raise
    `BudgetExceeded`. In modes that count per record, rows are told apart by the index of a data frame; rows
    of an array cannot be, so that every record pays for each of them.

    Args:
        parties: Number of near-equal column groups (at most one per column), list of column counts, or
            mapping from party names to column names or numbers.
        algorithm: Name of the algorithm.
        epochs: Passes over the data.
        batch: Records per step.
        learning_rate: Rate of parties and server.
        optimiser: ``sgd``, ``momentum`` or ``adam``.
        model: Encoder of every party: ``linear`` or ``mlp``.
        sigma: Noise on each released value; 0 releases exactly.
        epsilon: Target; the noise is calibrated to it for training. Excludes `sigma`.
        unprotected: Train with neither noise nor a target.
        clip: L2 bound of a released vector.
        encoder_training: ``raw``, ``dp`` or ``none``.
        protocol: ``plain`` or a secure sum.
        random_state: Decides initial models and batch order, never noise.
        plan_fields: Any other setting of a `securevfl.Plan`, by name, those of the algorithm included.

    Attributes:
        classes_: The labels.
        parties_: Names of the parties.
        run_: The training run.
        privacy_: What each party has spent so far.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, where they have any.
    """

    def fit(self, X: Any, y: Any) -> VerticalClassifier:
        """Trains on the columns of X, split over the parties."""
        checked, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"found one class, {self.classes_[0]!r}; a classifier needs at least two classes")
        task = "binary" if len(self.classes_) == 2 else "multiclass"
        self.run_ = self._fit(X, checked, codes, task)
        return self

    def predict_proba(self, X: Any) -> Floats:
        """Probability of each class, one row per record."""
        outputs = self._outputs(X)
        return np.column_stack([1 - outputs, outputs]) if outputs.ndim == 1 else outputs

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The most probable class of each record."""
        chances = self.predict_proba(X)
        labels: npt.NDArray[Any] = self.classes_[chances.argmax(axis=1)]
        return labels


class VerticalRegressor(RegressorMixin, _Vertical):  # type: ignore[misc]
    """A regressor on columns that several parties hold; the first party has the labels.

    Arguments and attributes are those of `VerticalClassifier`, without ``classes_``.
    """

    def fit(self, X: Any, y: Any) -> VerticalRegressor:
        """Trains on the columns of X, split over the parties."""
        checked, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        self.run_ = self._fit(X, checked, np.asarray(target, np.float64), "regression")
        return self

    def predict(self, X: Any) -> Floats:
        """The value of each record, in the units of y."""
        return self._outputs(X)


def _ids(X: Any) -> list[Any] | None:
    """The index of a data frame, where it tells records apart; None for anything else."""
    index = getattr(X, "index", None)
    if index is None or callable(index):  # a list has a method of that name
        return None
    values = np.asarray(index)
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
        values = values.astype(np.str_)
    if values.ndim != 1 or values.dtype.kind not in "iuU" or np.unique(values).size != values.size:
        return None
    return list(values.tolist())
