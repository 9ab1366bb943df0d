"""Budget filters: refuse the release that would break the budget, before it leaves.

A filter stops as soon as the sum of squared mu would exceed the budget. For Gaussian mechanisms chosen
adaptively this keeps the whole interaction mu-GDP (Smith and Thakurta 2022, fully adaptive composition
for Gaussian differential privacy; Koskela, Tobaben and Honkela 2023 for per-record filters), provided
that *which* records are released, and when, does not depend on the private values.
"""

import math

import numpy as np
from numpy.typing import NDArray

from securevfl.accountants import checks
from securevfl.accountants.gdp import gdp_epsilon
from securevfl.accountants.records import HIDDEN, MODES, ReleaseRecord
from securevfl.errors import AccountingError, BudgetExceeded


class Filter:
    """The privacy budget of one owner, against all observers together.

    `check` and `charge` cost microseconds for a batch, whatever has been released before.

    Args:
        mode: The accounting mode; records of another mode are refused.
        budget_mu: The GDP parameter never to be exceeded by any record; infinity counts without refusing.
        records: How many records the owner has; row indices lie below.
    """

    def __init__(self, *, mode: str, budget_mu: float, records: int) -> None:
        self.mode = checks.choice("mode", mode, MODES)
        self.budget_mu = checks.non_negative("budget_mu", budget_mu)
        self.records = checks.count("records", records, least=1)
        self._common = 0.0  # squared mu that every record has paid
        self._own: NDArray[np.float64] = np.zeros(records)  # squared mu of each record on top
        self._worst = 0.0  # largest entry of _own
        self._predicted: NDArray[np.bool_] | None = None  # records whose score was opened, mode sealed

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
        rows, own, common = self._demand(record)
        self._common += common
        if rows is not None and rows.size:
            self._own[rows] = own
            self._worst = max(self._worst, float(own.max()))
        if self.mode == "sealed" and record.is_prediction and record.rows is not None:
            if self._predicted is None:
                self._predicted = np.zeros(self.records, dtype=bool)
            self._predicted[record.rows] = True

    def _demand(self, record: ReleaseRecord) -> tuple[NDArray[np.int64] | None, NDArray[np.float64], float]:
        """Return the rows that pay, what they will have paid, and what everybody pays on top."""
        self._accepts(record)
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
        rows, counts = np.unique(record.rows, return_counts=True)
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
