"""Two parties: each blinds the other's list in the order in which it came, and both compare."""

from __future__ import annotations

import numpy as np

from securevfl.protocols.alignment.blinded import BlindingMachine
from securevfl.protocols.alignment.lists import (
    Incoming,
    Outgoing,
    as_points,
    check_distinct,
    check_increasing,
    list_digest,
)
from securevfl.protocols.alignment.script import Rows, Script

LIST, REPLY, BOTH = "list", "reply", "both"


class TwoPartyMachine(BlindingMachine):
    """Either of two parties.

    Both learn the positions of their own list that are common, and the size of the other list.
    """

    def _play(self) -> Script[Rows]:
        (other,) = self._parties
        greeted = yield from self._hello(len(self._texts))
        salt = greeted.salt
        points, order = self._own_list(salt)
        own = points.tobytes()
        promised = yield from self._commit(list_digest(salt, f"{LIST} {self.address}", own))
        theirs = Incoming(greeted.counts[other], self._blind)
        yield from self._exchange({other: Outgoing(own)}, {other: theirs})
        self._check_list(other, salt, f"{LIST} {other}", theirs.raw, promised[other])
        check_increasing(as_points(theirs.raw))
        twice_theirs = theirs.results
        check_distinct(as_points(twice_theirs))

        promised = yield from self._commit(list_digest(salt, f"{REPLY} {self.address}", twice_theirs))
        reply = Incoming(len(self._texts))
        yield from self._exchange({other: Outgoing(twice_theirs)}, {other: reply})
        self._check_list(other, salt, f"{REPLY} {other}", reply.raw, promised[other])
        twice_own = reply.raw
        check_distinct(as_points(twice_own))
        both = twice_own + twice_theirs if self.address < other else twice_theirs + twice_own
        yield from self._agree(list_digest(salt, BOTH, both), "compared other values")
        rows = self._sorted_by_text(order[np.isin(as_points(twice_own), as_points(twice_theirs))])
        # A reply in another order, which its sender stands by, would make wrong records pass for common ones.
        yield from self._confirm(salt, rows)
        return rows
