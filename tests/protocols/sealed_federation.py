"""A whole sealed federation in one process, for tests: data, members, dealer, any order of delivery."""

from __future__ import annotations

import copy

import numpy as np

from securevfl.protocols import Envelope, SealedDealer, SealedProtocol, drive
from securevfl.protocols.driver import Choose
from securevfl.protocols.sealed import SineSeries, logistic_series, party_of
from securevfl.protocols.sealed.parts import Parts


def unit_rows(generator, width, records, outputs=1):
    """(width, records * outputs) integers; each record's norm is at most 2^14."""
    rows = generator.standard_normal((records, outputs * width)) + 1e-9
    rows /= np.linalg.norm(rows, axis=1, keepdims=True) * (1 + 1e-12)
    whole = np.trunc(rows * 2**14).astype(np.int32)
    return np.ascontiguousarray(whole.reshape(records * outputs, width).T)


class NoDealer:
    """Where members do without one: it deals nothing."""

    def setup(self):
        return []

    def deal(self, *, round, rows=None):  # noqa: A002
        return []


def _adding(dealing, members, label_holder, member):
    """Whose noise can be in a member's total."""
    return Parts(members, label_holder).contributors(member) if dealing == "third" else range(members)


class Federation:
    """Members with random rows, scores, labels; `totals` runs a round, `expected` is it in the clear."""

    def __init__(
        self,
        members: int = 2,
        *,
        records: int = 12,
        width: int = 3,
        outputs: int = 1,
        static: bool | tuple[bool, ...] = True,
        label_holder: int = 0,
        std: int = 0,
        seed: int = 0,
        scale: float = 3.0,
        series: SineSeries | None = None,
        codec: bool = False,
        dealing: str = "dealer",
    ) -> None:
        generator = np.random.default_rng(seed)
        self.static = (static,) * members if isinstance(static, bool) else static
        self.series = series or logistic_series()
        self.codec = codec
        self.protocol = SealedProtocol(
            widths=(width,) * members,
            static=self.static,
            clips=(1.0,) * members,
            label_holder=label_holder,
            records=records,
            batch=records,
            outputs=outputs,
            series=self.series,
            share_stds=tuple(
                tuple(std * (j in _adding(dealing, members, label_holder, m)) for j in range(members))
                for m in range(members)
            ),
            dealing=dealing,
        )
        self.operands = [unit_rows(generator, width, records, 1 if s else outputs) for s in self.static]
        self.scores = [generator.standard_normal((records, outputs)) * scale for _ in range(members)]
        self.labels = (generator.random((records, outputs)) < 0.5).astype(float)
        self.dealer = SealedDealer(self.protocol) if dealing == "dealer" else NoDealer()
        self.parties = [
            party_of(self.protocol, m, operand=self.operands[m] if self.static[m] else None)
            for m in range(members)
        ]
        self.transcript: list[Envelope] = []

    def deliver(self, machines, pending, choose: Choose | None = None):
        """Runs machines to their end, keeping what was sent."""
        codec = self.protocol if self.codec else None
        self.transcript += drive(machines, pending, choose=choose, codec=codec)

    def setup(self, choose: Choose | None = None) -> None:
        machines = [party.setup() for party in self.parties]
        self.deliver(machines, self.dealer.setup(), choose)

    def machines(self, number: int, rows=None):
        """Fresh machines of a round."""
        chosen = slice(None) if rows is None else rows
        return [
            party.round(
                round=number,
                rows=rows,
                scores=self.scores[m][chosen],
                labels=self.labels[chosen] if m == self.protocol.label_holder else None,
                operand=None if self.static[m] else self.columns(m, rows),
            )
            for m, party in enumerate(self.parties)
        ]

    def columns(self, member: int, rows=None):
        """The operand's columns that belong to some records."""
        if rows is None:
            return self.operands[member]
        outputs = 1 if self.static[member] else self.protocol.outputs
        index = (np.asarray(rows)[:, None] * outputs + np.arange(outputs)).reshape(-1)
        return np.ascontiguousarray(self.operands[member][:, index])

    def totals(self, number: int = 0, rows=None, choose: Choose | None = None, **given):
        machines = self.machines(number, rows)
        self.deliver(machines, self.dealer.deal(round=number, rows=rows, **given), choose)
        return [machine.result() for machine in machines]

    def expected(self, member: int, rows=None):
        """The total in the clear, by the series in floating point."""
        chosen = slice(None) if rows is None else rows
        residual = self.series(sum(self.scores)[chosen]) - self.labels[chosen]
        right = residual if self.static[member] else residual.reshape(-1, 1)
        return self.columns(member, rows) * 2.0**-14 @ right

    def bound(self, member: int, rows=None):
        """Largest error of each coordinate.

        Each residual is off by the series' rounding, and by the rounding of each member's phase: half of
        P / 2^32 in the score, times the steepest slope sum |c_k| 2 pi k / P; float64 adds 1e-12 at most.
        """
        series = self.series
        slope = np.abs(series.coefficients) @ np.array(series.harmonics) * 2 * np.pi / series.period
        residual = series.rounding + len(self.parties) * series.period * 2.0**-33 * slope + 1e-12
        return np.abs(self.columns(member, rows)).sum(1, keepdims=True) * 2.0**-14 * residual

    def check(self, totals, rows=None) -> None:
        for member, total in enumerate(totals):
            assert (np.abs(total - self.expected(member, rows)) <= self.bound(member, rows)).all()


def copies(machines):
    """Machines that can be run apart from the originals."""
    return [copy.deepcopy(machine) for machine in machines]
