"""What the rest of the house has to know about each secure sum, in one place.

A name stands for a sum of `securevfl.protocols.sums`; `securevfl.algorithms.channels` builds it. Ledgers,
forecasts, attacks and audits go by these facts, not by a name.
"""

from __future__ import annotations

from typing import NamedTuple


class SumFacts(NamedTuple):
    """One protocol.

    Attributes:
        hides: How contributions are hidden from those who pass them on, as ledgers say it: ``masked`` or
            ``encrypted`` (a `HomomorphicSum`); empty where they are not.
        assumption: What must hold for that; braces stand for the number of parties that may collude.
        tree: True where values are added along trees (a `TreeSum`), so that parties pass on what others
            contributed.
        rounding: How far a total may be from the exact one, as parties round their values.
        seconds: Processor time of a step beside that of the algorithm, for forecasts.
    """

    hides: str
    assumption: str
    tree: bool
    rounding: float
    seconds: float

    @property
    def parts_are_read(self) -> bool:
        """Whether other parties read what one contributes on its way."""
        return self.tree and not self.hides


_POOL = "at most {} parties pool what they see"
_APART = "key holder and aggregator do not collude"

FACTS = {
    "plain": SumFacts("", "", False, 2.0**-33, 0.0),
    "plain-tree": SumFacts("", "", True, 2.0**-33, 2e-3),
    "two-tree": SumFacts("masked", f"masks come from AES-128-CTR; {_POOL}", True, 2.0**-33, 3e-3),
    "pairwise": SumFacts("masked", f"masks come from X25519 and AES-128-CTR; {_POOL}", False, 2.0**-33, 3e-3),
    "ckks": SumFacts("encrypted", f"CKKS at 128 bits; {_APART}", False, 2.0**-21, 6e-3),
    "bfv": SumFacts("encrypted", f"BFV at 128 bits; {_APART}", False, 2.0**-21, 4e-3),
}
"""Every protocol that a plan may name."""
PROTOCOLS = tuple(FACTS)

TREE_SUMS = tuple(name for name, facts in FACTS.items() if facts.tree)
ENCRYPTED = tuple(name for name, facts in FACTS.items() if facts.hides == "encrypted")
HIDING = tuple(name for name, facts in FACTS.items() if facts.hides)
