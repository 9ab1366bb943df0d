"""Release records: what one ledger entry says, as the modes' arithmetic needs it."""

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri_exp

from securevfl.accountants import checks
from securevfl.errors import AccountingError

Mode: TypeAlias = Literal["strict", "dp-encoder", "frozen", "sealed", "none"]
MODES: tuple[Mode, ...] = ("strict", "dp-encoder", "frozen", "sealed", "none")
MECHANISMS = ("gaussian", "exact", "dp-update", "masked", "encrypted", "randomised-response")
HIDDEN = ("masked", "encrypted")
PREDICTIONS = ("evaluation", "prediction")


def pure_mu(epsilon: float) -> float:
    """Return the smallest mu such that every epsilon-DP mechanism is mu-GDP.

    The trade-off function of epsilon-DP has its corner on the diagonal at alpha = 1/(1+e^epsilon); G_mu is
    convex, so it lies below as soon as it passes through that corner: Phi(-mu/2) = alpha.
    """
    if epsilon == math.inf:
        return math.inf
    return max(0.0, float(-2 * ndtri_exp(-np.logaddexp(0.0, checks.non_negative("epsilon", epsilon)))))


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseRecord:
    """One entry of an owner's ledger.

    Attributes:
        owner: Whose records are at stake.
        observers: Who received it. A `dp-update` has none: it counts against everybody.
        kind: What it was for, in the ledger's own words (training, refresh, evaluation, prediction, ...).
        mechanism: One of `MECHANISMS`.
        clip: L2 clip norm of a released vector, or of a per-record gradient for `dp-update`.
        sigma: Standard deviation of the noise.
        sensitivity: L2 sensitivity under replace-one; 2 * clip if not given.
        rows: Indices of the records concerned. For a release one entry per vector, repeats allowed; for
            `dp-update` and mode `sealed` the records of the batch. None stands for every record.
        vectors: How many vectors left, or how many updates or openings the batch took part in.
        ids_visible: Whether the observers know which records these are.
        mode: The accounting mode under which the entry was written.
        epsilon: Of randomised response only.
        assumption: Of masked and encrypted entries: what must hold for the observer to learn nothing.
        mu: GDP parameter of one vector, update or opening, derived from the fields above.
    """

    owner: str
    observers: tuple[str, ...] = ()
    kind: str = "training"
    mechanism: str
    clip: float | None = None
    sigma: float | None = None
    sensitivity: float | None = None
    rows: NDArray[np.int64] | None = None
    vectors: int = 1
    ids_visible: bool = True
    mode: str = "strict"
    epsilon: float | None = None
    assumption: str = ""
    mu: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.mechanism not in MECHANISMS or self.mode not in MODES:
            checks.choice("mechanism", self.mechanism, MECHANISMS)
            checks.choice("mode", self.mode, MODES)
        object.__setattr__(self, "observers", tuple(self.observers))
        if type(self.vectors) is not int or self.vectors < 0:
            object.__setattr__(self, "vectors", checks.count("vectors", self.vectors))
        object.__setattr__(self, "rows", _indices(self.rows))
        object.__setattr__(self, "mu", self._mu())
        if self.mechanism in HIDDEN and not self.assumption:
            object.__setattr__(self, "assumption", f"the {self.mechanism} values tell the observer nothing")
        self._check_rows()

    @property
    def pays_per_batch(self) -> bool:
        """Whether each listed row pays for all `vectors`, as in updates and sealed openings."""
        return self.mechanism == "dp-update" or self.mode == "sealed"

    @property
    def is_prediction(self) -> bool:
        """Whether it opens scores of single records outside of sealed training, which is counted apart."""
        return self.mode == "sealed" and self.kind in PREDICTIONS and self.mechanism not in HIDDEN

    def _check_rows(self) -> None:
        if self.rows is None or self.mechanism in HIDDEN:
            return
        if self.pays_per_batch and np.unique(self.rows).size != self.rows.size:
            raise AccountingError("rows names a record twice in one batch, which doubles its sensitivity")
        if not self.pays_per_batch and self.rows.size != self.vectors:
            raise AccountingError(
                f"rows has {self.rows.size} entries but vectors is {self.vectors}; expected one per vector"
            )

    def _mu(self) -> float:
        if self.mechanism in HIDDEN:
            return 0.0
        if self.mechanism == "randomised-response":
            return pure_mu(checks.non_negative("epsilon", self.epsilon))
        if self.mechanism == "exact" or self.mode == "none":
            return math.inf
        sigma = checks.positive("sigma", self.sigma, hint="a release without noise is exact")
        if self.sensitivity is not None:
            return checks.positive("sensitivity", self.sensitivity) / sigma
        return 2 * checks.positive("clip", self.clip) / sigma


def _indices(rows: object) -> NDArray[np.int64] | None:
    if rows is None:
        return None
    array = np.asarray(rows)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
        raise AccountingError("rows must be a flat list of record indices of at least 0")
    indices = array.astype(np.int64)
    indices.setflags(write=False)
    return indices
