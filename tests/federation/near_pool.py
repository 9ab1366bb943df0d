"""Where a test makes the sites that would be actors on Ray: in this process, behind the same door."""

from __future__ import annotations

from typing import Any

from securevfl.federation.actors import answer, value_of
from securevfl.federation.folder import RunFolder
from securevfl.federation.stepped import PackedShare, SteppedSite, unpack_share
from securevfl.settings.plan import Plan


class Done:
    """An answer in the form in which it leaves an actor."""

    def __init__(self, given: tuple[str, Any]) -> None:
        self._given = given

    def result(self) -> Any:
        return value_of(self._given)


class NearPool:
    """Sites in this process, behind the same door as those in actors."""

    def __init__(self, address: str) -> None:
        self.address, self.closed = address, False
        self.sites: dict[str, SteppedSite] = {}

    def open_site(self, name: str, plan: Plan, share: PackedShare, folder: RunFolder) -> Any:
        site = SteppedSite(name, plan, unpack_share(share), folder)
        self.sites[name] = site

        class Handle:
            def call(self, method: str, *arguments: Any) -> Done:
                return Done(answer(lambda: getattr(site, method)(*arguments)))

            def ready(self) -> None:
                """It is made at once."""

        return Handle()

    def close(self) -> None:
        self.closed = True
