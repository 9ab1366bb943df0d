"""Tree collusion: members of a coalition put their tree messages together and solve them."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from securevfl.attacks.contract import Attack, Evidence, Family, Guess, Info, Score, Truth
from securevfl.attacks.moments import TREES, tree_sums
from securevfl.attacks.scoring import score_count


class TreeLeak(Attack):
    """What one participant's tree messages give away beyond the total over all others."""

    name = "tree-leak"
    family: ClassVar[Family] = "protocol"
    metric = "count"
    summary = "solves the tree messages of one participant for sums that are smaller than the total"
    source = "Gu et al., AFSGD-VP, Algorithms 1 and 2; components of the union of both trees"

    def why_not(self, info: Info) -> str:
        """Only where trees carry the sums, and where the total itself does not give the owner away."""
        if info.plan.protocol not in TREES:
            return f"protocol {info.plan.protocol} uses no trees"
        if not info.seen.get("tree.subtotal"):
            return f"{info.observer} saw no tree message"
        others = set(info.parties) - set(info.observers)
        if len(others) < 2:
            return f"the total alone gives {info.owner} away: everybody else is in the coalition"
        return ""

    def run(self, evidence: Evidence) -> Guess:
        """Every sum over some, not all, other parties with the owner among them."""
        info = evidence.info
        others = frozenset(info.parties) - set(info.observers)
        found = [m for m in tree_sums(evidence) if info.owner in m.parties and m.parties != others]
        sizes = np.array([len(m.parties) for m in found], np.int64)
        values = [m.values.ravel() for m in found]
        return {"sizes": sizes, "values": np.concatenate(values) if values else np.zeros(0)}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        """How many sums were recovered; those over a single party are its very values."""
        sizes = guess["sizes"]
        note = f"{int((sizes == 1).sum())} of them are values of {info.owner} alone"
        return score_count(len(sizes), note=note)


class TreeCollusion(TreeLeak):
    """The same for two participants that pool their views."""

    name = "tree-collusion"
    summary = "solves the pooled tree messages of two participants for sums that are smaller than the total"
    coalition = 2
