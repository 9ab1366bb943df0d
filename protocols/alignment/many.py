"""Three parties or more: every list is blinded and reordered by everybody, and one of them compares.

Whoever could follow its own list would read its intersection with every single other. So a list goes round:
each party blinds and sorts it, which hides from all others where a value came from. The comparer, party 0,
gets all lists, marks what is in all of them, and the marks go back the way that the list came.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from securevfl.errors import ProtocolError
from securevfl.protocols.alignment.blinded import BlindingMachine
from securevfl.protocols.alignment.lists import (
    Incoming,
    Outgoing,
    Points,
    as_points,
    check_increasing,
    list_digest,
)
from securevfl.protocols.alignment.messages import AlignMarks
from securevfl.protocols.alignment.script import Rows, Script
from securevfl.protocols.contract import Address

COMPARER: Address = 0
Marks = npt.NDArray[np.bool_]


class ManyPartyMachine(BlindingMachine):
    """Any of three or more parties.

    Each learns the positions of its own list that are common to all, and the sizes of all lists. The comparer
    also learns how many values the lists of any subset of parties have in common.
    """

    def _play(self) -> Script[Rows]:
        greeted = yield from self._hello(len(self._texts))
        points, order = self._own_list(greeted.salt)
        digest = list_digest(greeted.salt, f"list {self.address}", points.tobytes())
        promised = yield from self._commit(digest)
        final, orders = yield from self._go_round(points, greeted.salt, greeted.counts, promised)
        marks = yield from self._compare(final, greeted.counts)
        marks = yield from self._go_back(marks, orders, greeted.counts)
        rows = self._sorted_by_text(order[marks])
        yield from self._confirm(greeted.salt, rows)
        return rows

    # -- lists go round -------------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        return len(self._parties) + 1

    @property
    def _next(self) -> Address:
        return (self.address + 1) % self._count

    @property
    def _previous(self) -> Address:
        return (self.address - 1) % self._count

    def _owner(self, stage: int) -> Address:
        """Whose list is here after so many steps."""
        return (self.address - stage) % self._count

    def _go_round(
        self, points: Points, salt: bytes, counts: dict[Address, int], promised: dict[Address, bytes]
    ) -> Script[tuple[Points, list[Rows]]]:
        """Passes lists on; returns the one that ends here, and how each was reordered here."""
        orders = []
        for stage in range(1, self._count):
            owner = self._owner(stage)
            arriving = Incoming(counts[owner], self._blind)
            yield from self._exchange({self._next: Outgoing(points.tobytes())}, {self._previous: arriving})
            check_increasing(as_points(arriving.raw))
            if stage == 1:
                self._check_list(owner, salt, f"list {owner}", arriving.raw, promised[owner])
            blinded = as_points(arriving.results)
            order = np.argsort(blinded, kind="stable")
            points = blinded[order]
            check_increasing(points)  # what was different and is the same now would tell who sent it
            orders.append(order)
        return points, orders

    # -- one compares ---------------------------------------------------------------------------------------

    def _compare(self, final: Points, counts: dict[Address, int]) -> Script[Marks]:
        """The comparer's marks for the list that ended here."""
        if self.address != COMPARER:
            yield from self._exchange({COMPARER: Outgoing(final.tobytes())}, {})
            return (yield from self._marks(COMPARER, len(final)))
        takes = {other: Incoming(counts[(other + 1) % self._count]) for other in self._parties}
        yield from self._exchange({}, takes)
        lists = {other: as_points(incoming.raw) for other, incoming in takes.items()}
        for each in lists.values():
            check_increasing(each)
        common = functools.reduce(lambda a, b: a[np.isin(a, b)], lists.values(), final)
        for other, each in lists.items():
            self._send_marks(other, np.isin(each, common))
        return np.isin(final, common)

    def _go_back(self, marks: Marks, orders: list[Rows], counts: dict[Address, int]) -> Script[Marks]:
        """Marks take the way back that the lists came; returns those of the own list."""
        for stage in range(self._count - 1, 0, -1):
            before = np.empty_like(marks)
            before[orders[stage - 1]] = marks
            self._send_marks(self._previous, before)
            marks = yield from self._marks(self._next, counts[self._owner(stage - 1)])
        return marks

    def _send_marks(self, receiver: Address, marks: Marks) -> None:
        self._send(receiver, AlignMarks(round=self.round, bits=np.packbits(marks).tobytes()))

    def _marks(self, sender: Address, count: int) -> Script[Marks]:
        bits = (yield from self._get(sender, AlignMarks)).bits
        return read_marks(bits, count)


def read_marks(bits: bytes, count: int) -> Marks:
    """One mark per value.

    Raises:
        ProtocolError: There are more or fewer.
    """
    if len(bits) != -(-count // 8):
        raise ProtocolError(f"{len(bits)} bytes of marks came for {count} values")
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(bool)
