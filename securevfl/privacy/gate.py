"""The gate: everything that leaves a party passes it.

A release passes five steps, in this order: the vectors are checked and clipped, the budget is asked, the
ledger entry is written and synced to disk, noise is added, and only then does the caller get something to
send: a payload that is bound to its entry, see `securevfl.privacy.payloads`. Links carry nothing else. Over
budget, `BudgetExceeded` is raised and nothing leaves. Training, refreshes, evaluation and prediction all pass
here and all count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.accountants.records import PREDICTION, Filter, ReleaseRecord
from securevfl.errors import BudgetExceeded, EgressError, PlanError, RunError, TrainingDiverged
from securevfl.privacy.answers import Answers
from securevfl.privacy.defences import randomise_labels
from securevfl.privacy.journal import (
    GRADIENT,
    INNER,
    LABELS,
    PREDICTED,
    RELEASE,
    SCORED,
    STATISTIC,
    TOTAL,
    UPDATE,
    Array,
    Journal,
)
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.messages import Head
from securevfl.privacy.noise import Noise
from securevfl.privacy.passing import Arrivals, Totals
from securevfl.privacy.payloads import _KEY, Accounted, Contribution, Passed, Released
from securevfl.privacy.rows import Rows
from securevfl.protocols.contract import Machine, is_shipped
from securevfl.protocols.sums.noise import DistributedNoise, NoisySum
from securevfl.transfers import to_device

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """How a party's vectors are protected: clipped to L2 norm `clip`, then Gaussian noise of std `sigma`.

    With sigma 0 nothing is clipped and the release is exact: its epsilon is infinite.
    """

    clip: float = 1.0
    sigma: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise PlanError(f"clip is {self.clip}; it must be a number above 0")
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise PlanError(f"sigma is {self.sigma}; it must be 0 (no noise) or more")


EXACT = Mechanism()
SEALED = "securevfl.protocols.sealed."
"""Where the machines are that hide whatever they are made of."""
HANDED_ON = ("sum", "scores", "loss", "metrics")
"""What one who obtained others' releases may hand on without an entry of its own."""


# A sum of discrete Gaussians of std s >= 2^14 is a continuous Gaussian of std sqrt(s^2 - 16^2) rounded by a
# discrete Gaussian of std 16 (Peikert 2010, Theorem 3.1; the error is below exp(-5000)): post-processing.
MIN_SHARE_STD = 1 << 14
_ROUNDED = 1 - 2.0**-20


def clip_rows(vectors: Tensor, clip: float) -> Tensor:
    """Scales each row to L2 norm at most `clip`; differentiable."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min(1e-30)
    return vectors * (clip / norms).clamp(max=1.0)


class Gate:
    """One owner's gate.

    Args:
        owner: The party.
        mode: The accounting mode, derived from the plan.
        ledger: Where every release is written first.
        mechanism: Protection of embeddings.
        update: Protection of local updates in mode ``dp-encoder``: clip and noise of the summed gradient.
        budget: The filter that refuses a release; it also keeps what is spent.
        noise: Source of noise. If it is reproducible, the ledger says that nothing is promised.
        release_once: Keep what was released and send the same bytes again at no further cost. Only where the
            encoder never changes.

    Attributes:
        journal: Where noisy values are kept for a replay; None keeps none.
        allows: Raises where a release (kind, observers, rows, vectors) is not part of what its site has
            agreed to; a bare gate has no site.
        answers: What was released for requests that have a name; None where none have.
        totals: Of sums, on their way from the machine that opened them to the role that asked.
    """

    def __init__(
        self,
        *,
        owner: str,
        mode: str,
        ledger: Ledger,
        mechanism: Mechanism,
        update: Mechanism | None = None,
        budget: Filter,
        noise: Noise,
        release_once: bool = False,
    ) -> None:
        self.owner = owner
        self.mode = mode
        self.ledger = ledger
        self.mechanism = mechanism
        self.update = update
        self.budget = budget
        self.noise = noise
        self.journal: Journal | None = None
        self.predicted: Journal | None = None
        self.allows: Callable[[str, tuple[str, ...], Rows | None, int], None] | None = None
        self.answers: Answers | None = None
        self.totals = Totals()
        self._cache: dict[tuple[str, ...], _Cache] | None = {} if release_once else None
        self._arrivals: dict[str, Arrivals] = {}

    def release(
        self, vectors: Tensor, *, rows: Rows | None, kind: str, observers: tuple[str, ...], name: str = ""
    ) -> Released:
        """Releases one vector per row to the observers.

        Args:
            vectors: One row per record.
            rows: The records; None where they cannot be told from earlier ones, so that every record pays.
            kind: What the release is for. A record that comes for ``prediction`` may have other features than
                before, so what was released once is not sent again.
            observers: Organisations that will see it.
            name: Of a request of a scoring service: what was released under it is released again, at no cost.

        Raises:
            BudgetExceeded: The release would break the budget; nothing was written or sent.
            TrainingDiverged: A vector is not finite.
        """
        if name and (known := self._answered(name, rows)) is not None:
            head = self.ledger.released
            return Released(values=known, head=head, observers=observers, kind=kind, rows=rows, key=_KEY)
        values = self._checked(vectors, rows)
        if self._cache is None or rows is None or kind == "prediction":
            return self._release_fresh(vectors, values, rows, kind, observers, name)
        cache = self._cache.setdefault(observers, _Cache(width=vectors.shape[1]))
        missing = cache.missing(rows)
        if missing.any():
            chosen = vectors[to_device(np.flatnonzero(missing), vectors.device)]
            fresh = self._release_fresh(chosen, values[missing], rows[missing], kind, observers)
            cache.store(rows[missing], fresh.values)
        return Released(
            values=cache.fetch(rows),
            head=self.ledger.released,
            observers=observers,
            kind=kind,
            rows=rows,
            source=vectors,
            key=_KEY,
        )

    def _checked(self, vectors: Tensor, rows: Rows | None) -> npt.NDArray[Any]:
        """The vectors as an array, once they are known to be finite and one per row."""
        if vectors.ndim != 2 or (rows is not None and vectors.shape[0] != len(rows)):
            count = "unknown" if rows is None else len(rows)
            raise PlanError(f"{self.owner} releases {tuple(vectors.shape)} vectors for {count} rows")
        values = vectors.numpy(force=True)
        if not np.isfinite(values).all():
            raise TrainingDiverged(
                f"{self.owner}: embeddings are not finite; lower the learning rate or scale the features"
            )
        return values

    def contribute(
        self,
        vectors: Tensor,
        *,
        rows: Rows | None,
        kind: str,
        observers: tuple[str, ...],
        noise: NoisySum | None,
        name: str = "",
    ) -> Contribution:
        """Lets one vector per row into a secure sum whose total the observers obtain.

        What is written down is what the total reveals: with distributed noise, that the observers together
        with the colluders that `noise` is made for see at least its honest share of Gaussian noise on this
        party's vectors; without it, what this party's own noise promises alone, or an exact release where it
        has none. That the contribution itself stays hidden is the secure sum's promise, see `hide`.

        Args:
            vectors: One row per record.
            rows: The records; None as in `release`.
            kind: What the release is for.
            observers: Organisations that obtain the total, or something computed from it.
            noise: The noisy sum that the vectors enter; None where each party adds its own, if any.
            name: As in `release`.

        Raises:
            BudgetExceeded: The release would break the budget; nothing was written or sent.
            TrainingDiverged: A vector is not finite.
        """
        said: dict[str, Any] = {"kind": kind, "observers": observers}
        if name and (known := self._answered(name, rows)) is not None:
            values = known.astype(np.float64) if noise is None else known
            return Contribution(values=values, head=self.ledger.released, source=None, **said, key=_KEY)
        if noise is None and self.mechanism.sigma:
            alone = self.release(vectors, rows=rows, kind=kind, observers=observers, name=name)
            return Contribution(
                values=alone.values.astype(np.float64), head=alone.head, source=alone.source, **said, key=_KEY
            )
        values = self._checked(vectors, rows).astype(np.float64)
        count = vectors.shape[0]
        where: dict[str, Any] = {"rows": rows, "vectors": count, **said}
        if noise is None:
            account = partial(self._account, EXACT, **where)
            head = self._answering(name, rows, values, account) if name else account()
            return Contribution(values=values, head=head, source=vectors, **said, key=_KEY)
        if noise.noise.share_std < MIN_SHARE_STD:
            raise PlanError(f"{self.owner}: noise of std {noise.noise.sigma} is below the sum's resolution")
        source = clip_rows(vectors, self.mechanism.clip)
        protection, change = _distributed(noise.noise, self.mechanism.clip, vectors.shape[1])
        encoded = noise.encode(clip_exactly(values, self.mechanism.clip))
        account = partial(self._account, protection, sensitivity=change, **where)
        if name:
            share = noise.noise.share(encoded.size, self.noise.stream).reshape(encoded.shape)
            head = self._answering(name, rows, encoded + share, account)
        else:
            head = account()
            share = noise.noise.share(encoded.size, self.noise.stream).reshape(encoded.shape)
        return Contribution(values=encoded + share, head=head, source=source, **said, key=_KEY)

    def abstain(self, shape: tuple[int, ...], *, noise: NoisySum | None) -> Contribution:
        """What enters a sum for a party whose values stay at home: zeros, and its share of the noise."""
        values: npt.NDArray[Any] = np.zeros(shape)
        if noise is not None:  # zeros are zeros on the ring
            values = noise.noise.share(values.size, self.noise.stream).reshape(shape)
        return Contribution(
            values=values, head=self.ledger.released, observers=(), kind="nothing", source=None, key=_KEY
        )

    def hide(
        self, machine: Machine | None = None, *, mechanism: str, observers: tuple[str, ...], assumption: str
    ) -> Accounted:
        """Writes down, once for the run, who handles this party's contributions without reading them.

        Args:
            machine: The machine that hands them out; None where every round has one of its own.
            mechanism: ``masked`` or ``encrypted``.
            observers: Organisations that pass such values on.
            assumption: What must hold for them to learn nothing.

        Raises:
            BudgetExceeded: It would be one session more than the promised delta covers; nothing was written.
        """
        record = ReleaseRecord(
            owner=self.owner,
            observers=observers,
            kind="contributions",
            mechanism=mechanism,
            mode=self.mode,
            assumption=assumption,
        )
        _check_sealed(machine)
        head = self.budget.spend(record, self.ledger.append)
        return Accounted(machine=machine, head=head, observers=observers, key=_KEY)

    def open_totals(
        self,
        machine: Machine | None,
        *,
        rows: Rows,
        sensitivity: float,
        sigma: float,
        kind: str,
        observers: tuple[str, ...],
    ) -> Accounted:
        """Writes down that noisy totals over these records, all parties' together, are about to be opened.

        Args:
            machine: The machine that does it; None where an entry stands for a replay without one.
            rows: The batch.
            sensitivity: L2 sensitivity of the totals, in the unit of `sigma`.
            sigma: Noise that the observers cannot subtract; 0 for none.
            kind: What the totals are for.
            observers: Organisations that obtain a total, or something computed from it.

        Returns:
            The machine, which may be driven from now on.

        Raises:
            BudgetExceeded: The opening would break the budget; nothing was written.
        """
        _check_sealed(machine)
        mechanism = Mechanism(clip=self.mechanism.clip, sigma=sigma)
        head = self._account(
            mechanism, rows=rows, vectors=1, kind=kind, observers=observers, sensitivity=sensitivity
        )
        return Accounted(machine=machine, head=head, observers=observers, key=_KEY)

    def open_scores(
        self,
        machine: Machine,
        *,
        rows: Rows | None,
        vectors: int,
        observers: tuple[str, ...],
        kind: str = PREDICTION,
    ) -> Accounted:
        """Writes down that a sealed model's exact scores of single records are about to be opened.

        Args:
            machine: The machine that does it.
            rows: The records; None where they cannot be told from those that were trained on.
            vectors: How many records.
            observers: Organisations that obtain the scores.
            kind: ``prediction`` or ``held back``.

        Raises:
            BudgetExceeded: A record was trained on, or tested with, and its exact score would void a promise.
        """
        _check_sealed(machine)
        self._check_not_promised(rows, vectors)
        head = self._account(EXACT, rows=rows, vectors=vectors, kind=kind, observers=observers)
        return Accounted(machine=machine, head=head, observers=observers, key=_KEY)

    def _check_not_promised(self, rows: Rows | None, vectors: int) -> None:
        """Raises `BudgetExceeded` where the exact score of a record would void what it was promised."""
        if self.budget.promises(rows):
            which = "without IDs some may be" if rows is None else "some are"
            raise BudgetExceeded(
                f"{self.owner}: of {vectors} records to predict, {which} records that the run trained on or "
                "tested with, and an exact score would void their epsilon; give records that it never saw, "
                "with their IDs"
            )

    def open_scores_once(
        self,
        name: str,
        values: npt.NDArray[np.uint64],
        build: Callable[[npt.NDArray[np.uint64]], Machine],
        *,
        rows: Rows,
        observers: tuple[str, ...],
    ) -> Accounted:
        """As `open_scores`, for a request that may come again: its scores are written down once.

        Args:
            name: The request's.
            values: This member's scores as ring elements.
            build: Makes the machine that opens them, masked anew, from those that are opened: of a request
                that comes again those of the first time, whatever they would be now.
            rows: The records.
            observers: Organisations that obtain the scores.

        Raises:
            BudgetExceeded: As `open_scores`.
            AgreementError: The name was for other records.
        """
        known = self._answered(name, rows)
        if known is not None:
            machine = build(known)
            _check_sealed(machine)
            return Accounted(machine=machine, head=self.ledger.released, observers=observers, key=_KEY)
        count = len(rows)
        self._check_not_promised(rows, count)
        machine = build(values)
        _check_sealed(machine)
        account = partial(
            self._account, EXACT, rows=rows, vectors=count, kind=PREDICTION, observers=observers
        )
        head = self._answering(name, rows, values, account)
        return Accounted(machine=machine, head=head, observers=observers, key=_KEY)

    def _answered(self, name: str, rows: Rows | None) -> npt.NDArray[Any] | None:
        """What was released before for a request; None where it has no name, or has not come before."""
        if not name:
            return None
        if self.answers is None or rows is None:
            raise PlanError(f"{self.owner} keeps no answers to requests")
        return self.answers.find(name, rows)

    def _answering(
        self, name: str, rows: Rows | None, values: npt.NDArray[Any], account: Callable[[], Head]
    ) -> Head:
        """Keeps what is about to be released for a request, then writes its entry."""
        if self.answers is None or rows is None:
            raise PlanError(f"{self.owner} keeps no answers to requests")
        with self.answers.keeping(name, rows, values, position=self.ledger.head.position + 1):
            return account()

    def noisy_statistic(
        self,
        values: npt.NDArray[np.float64],
        *,
        rows: Rows,
        change: float,
        counted: float,
        sigma: float,
        kind: str,
        observers: tuple[str, ...],
    ) -> npt.NDArray[np.float64]:
        """Adds noise to a statistic of the party's own records, so that weights may depend on it.

        Args:
            values: The exact statistic.
            rows: The records it is made of.
            change: How far one replaced record moves it; the noise's std is in the same unit.
            counted: The sensitivity to write down, at least `change`: more where others release the like of
                the same records at the same time.
            sigma: Noise of each value; 0 for none.
            kind: What it is.
            observers: Organisations that see something computed from it.
        """
        if not counted >= change > 0:
            raise PlanError(f"{self.owner}: a statistic that moves by {change} cannot count as {counted}")
        self.open_totals(None, rows=rows, sensitivity=counted, sigma=sigma, kind=kind, observers=observers)
        return self.keep(STATISTIC, self.noise.perturb(values, sigma), std=sigma) if sigma else values

    def keep(self, kind: str, values: Array, *, std: float, where: str = "") -> Array:
        """Keeps noisy values, or totals just opened, in the private journal; in a replay, gives those kept.

        Args:
            kind: What they are, a kind of `securevfl.privacy.journal`.
            values: With their noise.
            std: Of the noise in each value.
            where: Names them within their kind; the newest ledger entry by default.
        """
        if self.journal is None:
            return values
        return self.journal.keep(kind, values, std=std, where=where or str(self.ledger.releases))

    def keep_predicted(self, rows: Array) -> None:
        """Keeps rows of new records in the private journal, before what is made of them leaves.

        Args:
            rows: As the model takes them.
        """
        if self.predicted is not None:
            self.predicted.keep(PREDICTED, rows, std=0.0, where=str(self.ledger.head.position + 1))

    def keep_scored(self, values: Array) -> None:
        """Keeps a total, or scores, of new records that this organisation has opened.

        Args:
            values: With their noise, if any.
        """
        if self.predicted is not None:
            self.predicted.keep(SCORED, values, std=0.0, where="")

    def noisy_counts(
        self, *, rows: Rows, sensitivity: float, sigmas: Sequence[float], observers: tuple[str, ...]
    ) -> Callable[[npt.NDArray[np.float64], float], npt.NDArray[np.float64]]:
        """Writes down counts of the party's records on several levels, then adds noise to them.

        What is counted on a level depends on the noisy counts of the one before, so that all levels are
        accounted for before the first of them is looked at.

        Args:
            rows: The records that are counted.
            sensitivity: How far one replaced record moves the counts of one level, all parties' together.
            sigmas: Noise of each level; 0 for none.
            observers: Organisations that see something computed from the counts.

        Returns:
            noisy(counts, std): The counts with Gaussian noise, on the lattice.
        """
        for sigma in sigmas:
            self.open_totals(
                None, rows=rows, sensitivity=sensitivity, sigma=sigma, kind="bins", observers=observers
            )
        secret, place, calls = all(sigmas), self.ledger.releases, itertools.count()

        def noisy(counts: npt.NDArray[np.float64], std: float) -> npt.NDArray[np.float64]:
            if not secret:
                return counts
            return self.keep(
                STATISTIC, self.noise.perturb(counts, std), std=std, where=f"{place}-{next(calls)}"
            )

        return noisy

    def _release_fresh(
        self,
        vectors: Tensor,
        values: npt.NDArray[Any],
        rows: Rows | None,
        kind: str,
        observers: tuple[str, ...],
        name: str = "",
    ) -> Released:
        mechanism, count = self.mechanism, len(values)
        source = clip_rows(vectors, mechanism.clip) if mechanism.sigma else vectors
        if name:
            protected = self._protect(values) if mechanism.sigma else values.astype(np.float32)
            account = partial(
                self._account, mechanism, rows=rows, vectors=count, kind=kind, observers=observers
            )
            head = self._answering(name, rows, protected, account)
        else:
            head = self._account(mechanism, rows=rows, vectors=count, kind=kind, observers=observers)
            protected = self._protect(values) if mechanism.sigma else values.astype(np.float32)
            if mechanism.sigma and self.journal is not None:
                protected = self.keep(RELEASE, protected, std=mechanism.sigma)
        return Released(
            values=protected, head=head, observers=observers, kind=kind, rows=rows, source=source, key=_KEY
        )

    def _protect(self, values: npt.NDArray[Any]) -> Vectors:
        clipped = clip_exactly(values.astype(np.float64), self.mechanism.clip)
        return self.noise.perturb(clipped, self.mechanism.sigma).astype(np.float32)

    def release_exact(
        self,
        values: npt.NDArray[Any] | Mapping[str, npt.NDArray[Any]],
        *,
        rows: Rows,
        kind: str,
        observers: tuple[str, ...],
        change: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]] | None = None,
    ) -> Released:
        """Releases something without protection, such as labels, or gradients of the labels.

        Args:
            values: One row per record, or several arrays by name that are computed from these records.
            rows: The records.
            kind: What it is.
            observers: Organisations that will see it.
            change: A heuristic defence, applied after the entry is written. It promises nothing.
        """
        head = self._account(EXACT, rows=rows, vectors=len(rows), kind=kind, observers=observers)
        if not isinstance(values, np.ndarray):
            copies = {name: np.array(value) for name, value in values.items()}
            return Released(values=copies, head=head, observers=observers, kind=kind, rows=rows, key=_KEY)
        changed = (
            np.array(values) if change is None else change(values.astype(np.float64)).astype(values.dtype)
        )
        return Released(values=changed, head=head, observers=observers, kind=kind, rows=rows, key=_KEY)

    def release_noisy(
        self,
        values: npt.NDArray[np.float64],
        mechanism: Mechanism,
        *,
        rows: Rows,
        kind: str,
        observers: tuple[str, ...],
        divisor: float = 1.0,
    ) -> Released:
        """Releases one vector per row with a protection of its own, such as noisy gradients, as float32.

        Args:
            values: One row per record.
            mechanism: How they are protected.
            rows: The records.
            kind: What it is.
            observers: Organisations that will see it.
            divisor: Divides what was protected, at the end.

        Raises:
            BudgetExceeded: The release would break the budget; nothing was written or sent.
        """
        clipped = clip_exactly(values, mechanism.clip)
        head = self._account(mechanism, rows=rows, vectors=len(rows), kind=kind, observers=observers)
        noisy = (self.noise.perturb(clipped, mechanism.sigma) / divisor).astype(np.float32)
        noisy = self.keep(GRADIENT, noisy, std=mechanism.sigma / divisor)
        return Released(values=noisy, head=head, observers=observers, kind=kind, rows=rows, key=_KEY)

    def total(self, channel: str, number: int, *, std: float = 0.0) -> Passed:
        """The total of a round that a machine of this organisation opened; with noise it is kept.

        Args:
            channel: The sum.
            number: Its round.
            std: Of the noise in each value.
        """
        values, reach = self.totals.take(channel, number)
        self.keep_scored(values)
        if std:
            values = self.keep(TOTAL, values, std=std, where=f"{channel}/{number}")
        return Passed(values=values, reach=reach, key=_KEY)

    def hand_on(
        self, passed: Passed, *, kind: str, observers: tuple[str, ...], dtype: type | None = None
    ) -> Released:
        """Lets out what was computed from others' releases and totals alone, such as their sum.

        Its owners have counted it when they let their parts out; this gate adds no entry, and makes sure that
        this organisation's own part was let out to these observers.

        Args:
            passed: From `total`, or from `securevfl.privacy.passing`.
            kind: What it is: one of `HANDED_ON`.
            observers: Organisations that will see it.
            dtype: Of the array that leaves; by default its own.

        Raises:
            EgressError: It was made otherwise, or has a part that was not let out to one of them.
        """
        if kind not in HANDED_ON:
            raise PlanError(f"{self.owner}: {kind!r} is not handed on; only {', '.join(HANDED_ON)} are")
        if type(passed) is not Passed or getattr(passed, "_made_with", None) is not _KEY:
            raise EgressError(
                f"{self.owner}: {type(passed).__name__} cannot be handed on; others' releases and totals can"
            )
        if passed.reach is not None and not passed.reach.issuperset(observers):
            other = min(set(observers) - passed.reach)
            raise EgressError(f"{self.owner}: its own part of a {kind} was not let out to {other}")
        values = passed.values
        given = values.astype(dtype or values.dtype) if isinstance(values, np.ndarray) else values
        return Released(values=given, head=self.ledger.released, observers=observers, kind=kind, key=_KEY)

    def randomise_labels(
        self, labels: npt.NDArray[Any], *, classes: int, epsilon: float, observers: tuple[str, ...]
    ) -> npt.NDArray[Any]:
        """Flips the training labels by randomised response, to be used instead of the true ones from now on.

        To be called once in a run: drawing again costs epsilon again, and is written down again.
        """
        everybody, kind = np.arange(len(labels), dtype=np.int64), "randomised labels"
        self._account(
            EXACT, rows=everybody, vectors=len(labels), kind=kind, observers=observers, epsilon=epsilon
        )
        return self.keep(LABELS, randomise_labels(labels, classes, epsilon, self.noise), std=0.0)

    def clipped_sum(self, compute: Callable[[float], list[Tensor]]) -> list[Tensor]:
        """A sum of per-record gradients, each clipped as `noisy_update` promises.

        Args:
            compute: Makes the sum of gradients that are clipped to a norm.
        """
        if self.update is None:
            raise PlanError(f"{self.owner}: a private update needs a mechanism for updates")
        return compute(self.update.clip)

    def noisy_update(self, sums: Sequence[Tensor], *, rows: Rows) -> list[Tensor]:
        """Adds noise to a sum of clipped per-record gradients, so that the encoder may depend on it.

        Raises:
            BudgetExceeded: The update would break the budget; the encoder must stay as it is.
        """
        if self.update is None or self.update.sigma <= 0:
            raise PlanError(f"{self.owner}: local updates have no noise; set gradient_sigma above 0")
        count = 1 if self.noise.secure else len(rows)  # an exact release names each vector's record
        self._account(
            self.update, rows=rows, vectors=count, kind="update", observers=(), protection="dp-update"
        )
        exact = torch.cat([each.detach().flatten() for each in sums])
        noisy = self.noise.perturb(exact.numpy(force=True), self.update.sigma).astype(np.float32)
        kept = self.keep(UPDATE, noisy, std=self.update.sigma)
        pieces = torch.split(to_device(kept, exact.device, exact.dtype), [each.numel() for each in sums])
        return [piece.reshape(each.shape) for piece, each in zip(pieces, sums, strict=True)]

    def arrivals(self, name: str, shape: tuple[int, ...], *, device: torch.device) -> Arrivals:
        """A new place for what arrives, which this gate keeps between epochs under a name."""
        self._arrivals[name] = Arrivals(shape, device=device)
        return self._arrivals[name]

    def state(self) -> dict[str, Any]:
        """What was released once and may be sent again, and what arrived; spending is kept in the ledger."""
        caches = enumerate((self._cache or {}).items())
        released = {str(i): {"observers": list(key), **cache.state()} for i, (key, cache) in caches}
        arrived = {name: each.state() for name, each in self._arrivals.items()}
        return {"released": released, "arrived": arrived}

    def load(self, state: dict[str, Any], *, fresh: bool = True) -> None:
        """Takes up a saved state; roles have no business here.

        Args:
            state: What `state` gave.
            fresh: True in a new process, which has no other memory of what was released once.
        """
        if not self._arrivals.keys() <= state.get("arrived", {}).keys():
            raise RunError(f"another version has saved the state of {self.owner}'s gate; start the run anew")
        for saved in state["released"].values() if fresh else ():
            if self._cache is not None:
                self._cache[tuple(saved["observers"])] = _Cache.restored(saved)
        for name, place in self._arrivals.items():
            place._load(state["arrived"][name])

    def _account(
        self,
        mechanism: Mechanism,
        *,
        rows: Rows | None,
        vectors: int,
        kind: str,
        observers: tuple[str, ...],
        sensitivity: float | None = None,
        protection: str = "gaussian",
        epsilon: float | None = None,
    ) -> Head:
        """Checks that the release was agreed on, asks the budget and writes the entry, in this order.

        `kind`, a word that others may choose, changes no cost.
        """
        if self.allows is not None:
            self.allows(kind, observers, rows, vectors)
        noisy, promised = mechanism.sigma > 0, "exact"
        if self.noise.secure and epsilon is not None:
            promised = "randomised-response"
        elif self.noise.secure and noisy:
            promised = protection
        record = ReleaseRecord(
            owner=self.owner,
            observers=observers,
            kind=kind,
            mechanism=promised,
            clip=mechanism.clip if noisy else None,
            sigma=mechanism.sigma if noisy else None,
            sensitivity=(sensitivity or 2 * mechanism.clip) if noisy else None,
            rows=rows,
            vectors=vectors,
            ids_visible=True,
            mode=self.mode,
            epsilon=epsilon,
        )
        return self.budget.spend(record, self.ledger.append)


def _check_sealed(machine: Machine | None) -> None:
    """Raises for machines of sums: what they send may be the values, which enter as a contribution."""
    if machine is not None and not is_shipped(machine, place=SEALED):
        raise EgressError(f"{type(machine).__name__} is not a machine of a protocol that hides all it sends")


@lru_cache(maxsize=64)
def _distributed(noise: DistributedNoise, clip: float, width: int) -> tuple[Mechanism, float]:
    """What a sum's noise promises for vectors of a width, and how far one of them moves the total."""
    protection = Mechanism(clip=clip, sigma=noise.honest_sigma * _ROUNDED)
    return protection, noise.sensitivity(2 * clip, width)


def clip_exactly(values: npt.NDArray[np.float64], clip: float) -> npt.NDArray[np.float64]:
    """Clips once more in float64: float32 rounding may have left a norm just above the bound."""
    norms = np.sqrt(np.einsum("ij,ij->i", values, values))
    over = norms > clip
    if over.any():
        values = values.copy()
        # 2^-50 covers the rounding of the norm, the quotient and the product (a few units of 2^-53).
        values[over] *= (clip / norms[over] * (1 - 2.0**-50))[:, None]
    return values


class InnerNoise:
    """Noise for the inside of encoders, kept in a gate's journal for a replay. It promises nothing.

    Args:
        gate: The owner's.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def uniform(self, shape: tuple[int, ...], half_width: float) -> npt.NDArray[np.float64]:
        """Independent values, uniform on [-half_width, half_width]."""
        return self._keep(self._gate.noise.uniform(shape, half_width), half_width / math.sqrt(3))

    def gaussian(self, shape: tuple[int, ...], std: float) -> npt.NDArray[np.float64]:
        """Independent normal values with mean zero."""
        return self._keep(self._gate.noise.gaussian(shape, std), std)

    def _keep(self, values: npt.NDArray[np.float64], std: float) -> npt.NDArray[np.float64]:
        return self._gate.keep(INNER, values.astype(np.float32), std=std)


class _Cache:
    """Released vectors by row."""

    def __init__(self, width: int) -> None:
        self._values: Vectors = np.zeros((0, width), np.float32)
        self._known: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def _grow(self, rows: Rows) -> None:
        size = int(rows.max(initial=-1)) + 1
        if size > len(self._known):
            extra = max(size, 2 * len(self._known)) - len(self._known)
            self._known = np.concatenate([self._known, np.zeros(extra, np.bool_)])
            self._values = np.concatenate(
                [self._values, np.zeros((extra, self._values.shape[1]), np.float32)]
            )

    def missing(self, rows: Rows) -> npt.NDArray[np.bool_]:
        self._grow(rows)
        return ~self._known[rows]

    def store(self, rows: Rows, values: Vectors) -> None:
        self._known[rows] = True
        self._values[rows] = values

    def fetch(self, rows: Rows) -> Vectors:
        return self._values[rows]

    def state(self) -> dict[str, Any]:
        return {"values": self._values, "known": self._known}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> _Cache:
        cache = cls(width=state["values"].shape[1])
        cache._values, cache._known = np.array(state["values"]), np.array(state["known"])
        return cache
