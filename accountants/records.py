"""Release records, what one ledger entry says; and budget filters, which refuse one before it leaves.

A filter stops as soon as the sum of squared mu would exceed the budget. For Gaussian mechanisms chosen
adaptively this keeps the whole interaction mu-GDP (Smith and Thakurta 2022, fully adaptive composition
for Gaussian differential privacy; Koskela, Tobaben and Honkela 2023 for per-record filters), provided
that *which* records are released, and when, does not depend on the private values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri_exp

from securevfl.accountants import checks
from securevfl.accountants.gdp import gdp_epsilon
from securevfl.errors import AccountingError, BudgetExceeded

Written = TypeVar("Written")
Mode: TypeAlias = Literal["strict", "dp-encoder", "frozen", "sealed", "none"]
MODES: tuple[Mode, ...] = ("strict", "dp-encoder", "frozen", "sealed", "none")
MECHANISMS = ("gaussian", "exact", "dp-update", "masked", "encrypted", "randomised-response")
HIDDEN = ("masked", "encrypted")
CHECKED = "malicious: "
"""How the assumption of a session begins whose rows are proved: false proofs take a chance each time."""
SESSIONS = 1024
"""Sessions that a run may prove rows in: one for each kind of opening, and one after every stop."""
PREDICTION, HELD_BACK = "prediction", "held back"
"""Kinds of exact scores that sealed runs open: of new records, and of those a stack is decided on."""


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
        if type(self.observers) is not tuple:
            object.__setattr__(self, "observers", tuple(self.observers))
        if type(self.vectors) is not int or self.vectors < 0:
            object.__setattr__(self, "vectors", checks.count("vectors", self.vectors))
        if self.rows is not None and self.rows is not _checked[0]:  # a batch is often released to several
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
    def is_checked_session(self) -> bool:
        """Whether it begins a session of sealed training in which rows are proved."""
        return self.mechanism in HIDDEN and self.mode == "sealed" and self.assumption.startswith(CHECKED)

    @property
    def is_prediction(self) -> bool:
        """Whether it opens scores of single records outside of sealed training, which is counted apart."""
        return self.mode == "sealed" and self.kind in (PREDICTION, HELD_BACK) and self.mechanism not in HIDDEN

    def _check_rows(self) -> None:
        if self.rows is None or self.mechanism in HIDDEN:
            return
        if self.pays_per_batch:
            if _repeats(self.rows):
                raise AccountingError("rows names a record twice in one batch, which doubles its sensitivity")
        elif self.rows.size != self.vectors:
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
        sigma, sensitivity = self.sigma, self.sensitivity
        if type(sigma) is not float or not 0 < sigma < math.inf:
            sigma = checks.positive("sigma", sigma, hint="a release without noise is exact")
        if sensitivity is None:
            return 2 * checks.positive("clip", self.clip) / sigma
        if type(sensitivity) is not float or not 0 < sensitivity < math.inf:
            sensitivity = checks.positive("sensitivity", sensitivity)
        return sensitivity / sigma


_MOST_KEPT = 1 << 16
_checked: list[NDArray[np.int64] | None] = [None]  # the indices that were checked last, which are read-only


def _indices(rows: object) -> NDArray[np.int64]:
    array = np.asarray(rows)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
        raise AccountingError("rows must be a flat list of record indices of at least 0")
    own = type(array.base) in (bytes, type(None))
    kept = array.dtype == np.int64 and not array.flags.writeable and own
    indices = array if kept else array.astype(np.int64)
    indices.setflags(write=False)
    _checked[0] = indices if indices.size <= _MOST_KEPT else None
    return indices


def _repeats(rows: NDArray[np.int64]) -> bool:
    """Whether a row is named twice; lists that a ledger kept are in order, which saves sorting them."""
    if (rows[1:] > rows[:-1]).all():
        return False
    ordered = np.sort(rows)
    return bool((ordered[1:] == ordered[:-1]).any())


def _counted(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64] | int]:
    """Each row once, in order, and how often it was named."""
    if (rows[1:] > rows[:-1]).all():
        return rows, 1
    return np.unique(rows, return_counts=True)


class Filter:
    """The privacy budget of one owner, against all observers together.

    `check` and `charge` cost microseconds for a batch, whatever has been released before.

    Args:
        mode: The accounting mode; records of another mode are refused.
        budget_mu: The GDP parameter never to be exceeded by any record; infinity counts without refusing.
        records: How many records the owner has; row indices lie below.

    Attributes:
        predicted: How many scores of single records have been opened, all predictions together.
        predictions: By how many entries.
    """

    def __init__(self, *, mode: str, budget_mu: float, records: int) -> None:
        self.mode = checks.choice("mode", mode, MODES)
        self.budget_mu = checks.non_negative("budget_mu", budget_mu)
        self.records = checks.count("records", records, least=1)
        self.predicted = self.predictions = 0
        self._common = 0.0  # squared mu that every record has paid
        self._own: NDArray[np.float64] = np.zeros(records)  # squared mu of each record on top
        self._worst = 0.0  # largest entry of _own
        self._predicted: NDArray[np.bool_] | None = None  # records whose score was opened, mode sealed
        self.sessions = 0  # in which rows were proved

    @property
    def spent_mu(self) -> float:
        """The GDP parameter of the worst record so far."""
        return math.sqrt(self._common + self._worst)

    def spent_epsilon(self, delta: float) -> float:
        """The epsilon of the worst record so far."""
        return gdp_epsilon(self.spent_mu, delta)

    def remaining(self) -> float:
        """The mu that the worst record has left: what is left of the squared budget, as a root."""
        if math.isinf(self.budget_mu):
            return math.inf
        return math.sqrt(max(0.0, self.budget_mu**2 - self._common - self._worst))

    def remaining_releases(self, mu: float) -> float:
        """How many more releases of GDP parameter `mu` the worst record can pay; infinite without a limit."""
        mu = checks.non_negative("mu", mu)
        left = self.remaining()
        if mu == 0 or math.isinf(left):
            return math.inf
        return math.floor((left / mu) ** 2)

    def grow(self, records: int) -> None:
        """Makes room for row indices below `records`; new records have paid what every record has paid."""
        more = checks.count("records", records, least=1) - self.records
        if more > 0:
            self._own = np.concatenate([self._own, np.zeros(more)])
            if self._predicted is not None:
                self._predicted = np.concatenate([self._predicted, np.zeros(more, dtype=bool)])
            self.records += more

    def promises(self, rows: NDArray[np.int64] | None) -> bool:
        """Whether one of these records (None: any record) has paid something, and not everything, so far."""
        paid = self._common + (self._own if rows is None else self._own[rows])
        return bool(((paid > 0) & np.isfinite(paid)).any())

    def check(self, record: ReleaseRecord) -> None:
        """Raise `BudgetExceeded` if the record would break the budget. Nothing is changed."""
        self._demand(record)

    def charge(self, record: ReleaseRecord) -> None:
        """Check the record, then count it."""
        self.spend(record, id)

    def spend(self, record: ReleaseRecord, write: Callable[[ReleaseRecord], Written]) -> Written:
        """Check the record, write it down, count it; what cannot be written is not counted.

        Args:
            record: What is about to be released.
            write: Writes it down; what it returns is returned.
        """
        rows, own, common = self._demand(record)
        sessions = self.sessions + record.is_checked_session
        written = write(record)
        if record.kind == PREDICTION and record.mechanism not in HIDDEN:
            self.predicted, self.predictions = self.predicted + record.vectors, self.predictions + 1
        self._common += common
        self.sessions = sessions
        if rows is not None and rows.size:
            self._own[rows] = own
            self._worst = max(self._worst, float(own.max()))
        if self.mode == "sealed" and record.is_prediction and record.rows is not None:
            if self._predicted is None:
                self._predicted = np.zeros(self.records, dtype=bool)
            self._predicted[record.rows] = True
        return written

    def _demand(self, record: ReleaseRecord) -> tuple[NDArray[np.int64] | None, NDArray[np.float64], float]:
        """Return the rows that pay, what they will have paid, and what everybody pays on top."""
        self._accepts(record)
        if record.is_checked_session and self.sessions >= SESSIONS:
            raise BudgetExceeded(
                f"owner {record.owner!r} has proved its rows in {self.sessions:,} sessions, the most that "
                "the promised delta covers; begin a new run"
            )
        square = record.mu * record.mu
        if (
            record.vectors == 0
            or record.mechanism in HIDDEN
            or (self.mode == "strict" and _is_update(record))
        ):
            return None, self._own[:0], 0.0
        shared = self.mode == "strict" and record.mechanism != "randomised-response"
        if shared or record.rows is None:
            self._allow(record, self._common + square * record.vectors + self._worst)
            return None, self._own[:0], square * record.vectors
        rows, counts = _counted(record.rows)
        if rows.size and rows[-1] >= self.records:
            raise AccountingError(
                f"row index {rows[-1]} is out of range; the owner has {self.records} records"
            )
        if self.mode == "sealed" and record.is_prediction:
            return self._predict(record, rows)
        if self._predicted is not None and self._predicted[rows].any():
            square = math.inf  # its score was opened exactly before
        # A batch lists each of its records once, however often; a release pays for every mention.
        times = record.vectors if record.pays_per_batch else counts
        own = self._own[rows] + square * times
        self._allow(record, self._common + max(self._worst, float(own.max(initial=0.0))))
        return rows, own, 0.0

    def _predict(
        self, record: ReleaseRecord, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.float64], float]:
        """Sealed predictions are counted apart, unless their records have been trained on."""
        if not self._common and not self._own[rows].any():
            return None, self._own[:0], 0.0
        self._allow(record, math.inf)
        return rows, np.full(rows.size, math.inf), 0.0

    def _accepts(self, record: ReleaseRecord) -> None:
        if record.mode != self.mode and record.mechanism not in HIDDEN:
            raise AccountingError(f"record has mode {record.mode!r}; this filter counts mode {self.mode!r}")
        if _is_update(record) and self.mode not in ("strict", "dp-encoder"):
            raise AccountingError(f"a dp-update makes the encoder trained; mode {self.mode!r} cannot hold it")

    def _allow(self, record: ReleaseRecord, square: float) -> None:
        total = math.sqrt(square)
        if total > self.budget_mu:
            raise BudgetExceeded(
                f"owner {record.owner!r} has spent mu {self.spent_mu:.6g} of {self.budget_mu:.6g} in mode "
                f"{self.mode}; {record.kind} of {record.vectors} more vectors would make it {total:.6g}"
            )


def _is_update(record: ReleaseRecord) -> bool:
    return record.mechanism == "dp-update"
