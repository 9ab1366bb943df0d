"""The contract of carriers: what the schedule asks of whatever moves messages and time between sites.

There are three: `virtual` (one process), `actors` (one process per organisation, on Ray), and the network's
(`securevfl.network.carrier`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from securevfl.algorithms import ServerRole
from securevfl.federation.folder import RunFolder
from securevfl.federation.site import Site
from securevfl.settings.plan import Plan


class Carrier(ABC):
    """Runs the parts of a run at all sites.

    Attributes:
        plan: The resolved plan.
        folder: Where metrics are kept; None keeps them in memory.
    """

    plan: Plan
    folder: RunFolder | None

    @abstractmethod
    async def phase(self, part: str, epoch: int) -> None:
        """Runs one part (`prepare`, `epoch`, `evaluate`, `final`, `predict`) at all sites to its end.

        Args:
            part: Which.
            epoch: For which epoch; 0 is before the first.

        Raises:
            BudgetExceeded: A gate refuses; the part has ended everywhere.
        """

    @property
    @abstractmethod
    def home(self) -> Site:
        """The label holder's site, which measures."""

    @property
    def server(self) -> ServerRole:
        """The label holder's role."""
        role = self.home.server
        if role is None:
            raise TypeError(f"{self.home.name} does not run the server's role")
        return role

    @abstractmethod
    def spent(self) -> dict[str, float]:
        """Mu so far of each owner that is known here."""

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Time, messages and bytes so far, as the label holder counts them."""

    @abstractmethod
    def restore(self) -> int:
        """Takes up the newest state that all sites have; how many epochs are done, -1 before `prepare`."""

    @abstractmethod
    def save(self, epoch: int) -> None:
        """Makes sure that `restore` finds the state after an epoch, 0 for that after `prepare`."""

    @abstractmethod
    async def finish(self, epochs: int, stopped: str | None) -> None:
        """Has every site write what belongs to it."""
