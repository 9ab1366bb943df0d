"""What was agreed to happen, and the enforcer at each site that refuses everything else, whoever asks.

A `Timetable` follows from plan and data alone, so that every organisation finds the same. A site asks its
`Enforcer` before a part begins and, through its gate, before anything is released in it: a part, an epoch, an
evaluation or a set of records that the timetable does not contain is refused. Going back after a crash is
part of every agreement; it is counted, and there is a limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.accountants.records import Filter
from securevfl.errors import AgreementError, QuotaExceeded
from securevfl.privacy.chain import PHASE, Entry
from securevfl.settings.plan import Plan

TRAINING = ("prepare", "epoch", "evaluate", "final")
PREDICTION = ("predict",)
SCORING = ("score",)
RESTARTS = 20
"""How often a run over a network may go back unless the coordinator's configuration says otherwise."""
TEST_LABELS = "test labels"
"""Of test records, the label holder may hand these out before the first epoch; to evaluate, in FDML."""
_ORDER = {"prepare": 0, "predict": 0, "score": 0, "epoch": 1, "evaluate": 2, "final": 3}


@dataclass(frozen=True, kw_only=True)
class Quota:
    """How much a scoring service may open with one model, earlier predictions with it included.

    Attributes:
        people: Scores of single records.
        requests: Requests between the organisations; each may be of many records.
    """

    people: int
    requests: int

    def check(self, owner: str, vectors: int, budget: Filter) -> None:
        """Raises `QuotaExceeded` where a release would open more, by what the ledger has counted."""
        people, requests = budget.predicted + vectors, budget.predictions + 1
        if people > self.people:
            raise QuotaExceeded(
                f"{owner}: {budget.predicted} of {self.people} people were scored; "
                f"{vectors} more exceed the quota"
            )
        if requests > self.requests:
            raise QuotaExceeded(f"{owner}: all {self.requests} requests of the quota were made")


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """The parts of a run and the records in them.

    Attributes:
        parts: The parts that there are.
        epochs: How many epochs at most.
        evaluate_every: After how many epochs the test part is evaluated in between; 0 never.
        evaluations: How often the test part is evaluated at most, the final evaluation included.
        n_train: Training records, or those of a prediction; their indices come first.
        n_test: Test records.
        per_epoch: Vectors of one kind that an organisation releases in one epoch at most.
        restarts: How often everybody may go back after a crash; None sets no limit.
        quota: Of a scoring service: how much it may open; None elsewhere.
        begun: Epochs that the profile has had which the run goes on from; nothing of them comes again.
    """

    parts: tuple[str, ...]
    epochs: int
    evaluate_every: int
    evaluations: int
    n_train: int
    n_test: int
    per_epoch: int
    restarts: int | None = None
    quota: Quota | None = None
    begun: int = 0

    @classmethod
    def of_training(
        cls, plan: Plan, *, parties: int, n_train: int, n_test: int, restarts: int | None = None
    ) -> Timetable:
        """The timetable of a resolved plan.

        In an epoch all parties together process parties * n_train records; one of them alone may do so, each
        a second time to refresh what the server keeps, and a snapshot takes each once more. What is under way
        when an epoch ends adds a batch.
        """
        every = plan.evaluate_every
        return cls(
            parts=TRAINING,
            epochs=plan.epochs,
            evaluate_every=every,
            evaluations=((plan.epochs - 1) // every if every else 0) + 1,
            n_train=n_train,
            n_test=n_test,
            per_epoch=(2 * parties + 2) * (n_train + min(plan.batch, n_train)),
            restarts=restarts,
            begun=int(plan.profiled and restarts is not None),
        )

    @classmethod
    def of_prediction(cls, records: int, quota: Quota | None = None) -> Timetable:
        """One prediction of some records; with a quota, a service that scores any of them on request."""
        return cls(
            parts=SCORING if quota else PREDICTION,
            quota=quota,
            epochs=0,
            evaluate_every=0,
            evaluations=0,
            n_train=records,
            n_test=0,
            per_epoch=records,
            restarts=0,
        )

    def content(self) -> dict[str, Any]:
        """As it stands in an agreement."""
        content = {**asdict(self), "parts": list(self.parts)}
        if self.quota is None:
            del content["quota"]
        if not self.begun:
            del content["begun"]
        return content

    def check(self, part: str, epoch: int) -> None:
        """Raises `AgreementError` unless a part of an epoch is one that there is."""
        if part not in self.parts:
            raise AgreementError(f"{part!r} was not agreed on; the parts are {', '.join(self.parts)}")
        if not 0 <= epoch <= self.epochs or (part == "epoch" and not epoch):
            raise AgreementError(f"{part} of epoch {epoch} was not agreed on; there are {self.epochs} epochs")
        if part in ("prepare", "predict", "score") and epoch:
            raise AgreementError(f"{part} of epoch {epoch} was not agreed on; it comes before the first")
        if self.begun and (part == "prepare" or (part == "epoch" and epoch <= self.begun)):
            raise AgreementError(f"{part} of epoch {epoch} belongs to the profile, which is over")
        due = self.evaluate_every and epoch and epoch % self.evaluate_every == 0 and epoch < self.epochs
        if part == "evaluate" and not due:
            raise AgreementError(f"an evaluation after epoch {epoch} was not agreed on")


class Enforcer:
    """Refuses what the timetable does not contain.

    Args:
        timetable: What was agreed on.
        history: Entries of the site's ledger, from which it takes what was begun before.
        budget: What the site's ledger has counted; a quota is checked against it.
        owner: Whose site it is.

    Attributes:
        restarts: How often the run has gone back so far.
    """

    def __init__(
        self,
        timetable: Timetable,
        history: Iterable[Entry] = (),
        budget: Filter | None = None,
        owner: str = "this site",
    ) -> None:
        self.timetable, self._budget, self._owner = timetable, budget, owner
        self.restarts = 0
        self._begun: tuple[int, int] | None = None
        self._over, self._part = False, ""
        self._released: dict[tuple[str, tuple[str, ...]], int] = {}
        self._asked: dict[tuple[str, tuple[str, ...]], set[int]] = {}
        for entry in history:
            if entry.content.get("kind") == PHASE:
                self._note(entry.content["part"], entry.content["epoch"], entry.content.get("back"))

    def begin(self, part: str, epoch: int, back: int | None = None) -> None:
        """Takes note that a part begins.

        Args:
            part: Which.
            epoch: Of which epoch.
            back: The epoch whose end everybody goes back to first; None to go on from here.

        Raises:
            AgreementError: It was not agreed on; nothing has changed.
        """
        self.timetable.check(part, epoch)
        if back is None:
            self._check_order(part, epoch)
        else:
            self._check_back(part, epoch, back)
        self._note(part, epoch, back)

    def end(self, epochs: int) -> None:
        """Checks how many epochs training is said to have had, where it ends.

        Raises:
            AgreementError: They are more than this site has begun.
        """
        begun = 0 if self._begun is None else self._begun[0]
        if self.timetable.epochs and not 0 <= epochs <= begun:
            raise AgreementError(f"the run is said to have had {epochs} epochs; {begun} were begun here")

    def _check_order(self, part: str, epoch: int) -> None:
        """Everything comes once and in order; one that was away may have missed parts."""
        if self._begun is None:
            return
        if self._over:
            raise AgreementError(f"{part} of epoch {epoch} begins after the end of what was agreed on")
        # An epoch that a gate refuses ends early: the final evaluation then names the one before it.
        before = (self._begun[0] - 1, 0) if part == "final" else self._begun
        if (epoch, _ORDER[part]) <= before:
            raise AgreementError(f"{part} of epoch {epoch} begins again, which was agreed on once")

    def _check_back(self, part: str, epoch: int, back: int) -> None:
        if (epoch, _ORDER[part]) <= (back, _ORDER["epoch"]) or (
            back < 0 and part not in ("prepare", "predict", "score")
        ):
            raise AgreementError(f"{part} of epoch {epoch} does not follow the end of epoch {back}")
        most = self.timetable.restarts
        if most is not None and self._begun is not None and self.restarts >= most:
            raise AgreementError(f"the run has gone back {self.restarts} times; {most} were agreed on")

    def _note(self, part: str, epoch: int, back: int | None) -> None:
        if back is not None and self._begun is not None:
            self.restarts += 1
        self._begun, self._part = (epoch, _ORDER[part]), part
        self._over = part in ("final", "predict", "score")
        self._released.clear()
        self._asked.clear()

    # -- what is released in a part -------------------------------------------------------------------------

    def check_release(
        self, kind: str, observers: tuple[str, ...], rows: npt.NDArray[np.int64] | None, vectors: int
    ) -> None:
        """Raises `AgreementError` where a release is not part of what has begun.

        Args:
            kind: What it is for.
            observers: Who sees it.
            rows: The records; None stands for all.
            vectors: How many vectors leave.
        """
        if not vectors:
            return
        table, budget, key = self.timetable, self._budget, (kind, observers)
        if table.quota is not None and budget is not None:
            table.quota.check(self._owner, vectors, budget)
            return
        tests = self._part in ("evaluate", "final") or kind == TEST_LABELS
        if rows is not None and rows.size and self._part != "predict":
            low, high = (table.n_train, table.n_train + table.n_test) if tests else (0, table.n_train)
            first, last = _span(rows)
            if first < low or last >= high:
                raise AgreementError(
                    f"{self._owner} is asked for other records than {self._part} was agreed on for"
                )
        # Totals of sealed training are opened of one batch again and again.
        if self._part != "epoch" and rows is not None and (budget is None or budget.mode != "sealed"):
            self._check_once(key, rows)
        released = self._released.get(key, 0) + vectors
        if released > table.per_epoch:
            raise AgreementError(
                f"{self._owner} is asked for {released:,} vectors in one {self._part}; "
                f"at most {table.per_epoch:,} were agreed on"
            )
        self._released[key] = released

    def _check_once(self, key: tuple[str, tuple[str, ...]], rows: npt.NDArray[np.int64]) -> None:
        asked = self._asked.setdefault(key, set())
        found = set(rows.tolist())
        if len(found) < rows.size or not asked.isdisjoint(found):
            raise AgreementError(f"{self._owner} is asked for a record twice in one {self._part}")
        asked |= found


_MOST_KEPT = 1 << 16
_spanned: list[tuple[npt.NDArray[np.int64] | None, tuple[int, int]]] = [(None, (0, 0))]


def _span(rows: npt.NDArray[np.int64]) -> tuple[int, int]:
    """The lowest and the highest index. What a record names cannot change, so it is looked through once."""
    known, span = _spanned[0]
    if rows is not known:
        span = int(rows.min()), int(rows.max())
        if rows.size <= _MOST_KEPT:
            _spanned[0] = rows, span
    return span
