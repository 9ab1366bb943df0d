"""Who does what where members deal for each other (`securevfl.protocols.sealed.third`)."""

from __future__ import annotations

from dataclasses import dataclass

Pair = tuple[int, int]
"""(m, j): the product of m's rows and j's share."""


@dataclass(frozen=True)
class Parts:
    """Who does what.

    Args:
        members: How many there are.
        label_holder: H.
    """

    members: int
    label_holder: int

    @property
    def sharing(self) -> tuple[int, int]:
        """H and S, who hold shares of the residuals."""
        return self.label_holder, self._others[0]

    @property
    def second(self) -> int:
        """S."""
        return self._others[0]

    @property
    def dealing(self) -> int:
        """D, who deals wherever it is not about its own rows."""
        return self._others[1]

    @property
    def _others(self) -> list[int]:
        return [m for m in range(self.members) if m != self.label_holder]

    def pairs(self, member: int) -> list[Pair]:
        """(m, j) for a member's rows and every share that somebody else holds."""
        return [(member, j) for j in self.sharing if j != member]

    def dealer_of(self, pair: Pair) -> int:
        """Who deals for a product: neither of the two."""
        member, holder = pair
        return sum(self.sharing) - holder if member == self.dealing else self.dealing

    def contributors(self, member: int) -> frozenset[int]:
        """Whose noise is in a member's total."""
        return frozenset((member, self.dealing, *self.sharing))
