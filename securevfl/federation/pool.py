"""Sites in Ray actors: one process per organisation, wherever the cluster has room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from securevfl import errors
from securevfl.errors import RunError, SecureVFLError
from securevfl.federation.actors import Share, SteppedSite, unpack_share
from securevfl.federation.cluster import connect
from securevfl.federation.folder import RunFolder
from securevfl.settings.plan import Plan

Answer = tuple[str, Any]


def answer(action: Callable[[], Any]) -> Answer:
    """What an action gave: ("", value), or the name and the text of an error of ours."""
    try:
        return "", action()
    except SecureVFLError as error:
        return type(error).__name__, str(error)


def value_of(given: Answer) -> Any:
    """The value of an answer; an error is raised again on this side."""
    name, value = given
    if name:
        raise getattr(errors, name)(value)
    return value


class SiteActor:
    """Holds one site in a process of its own; errors travel as text."""

    site: Any

    def open(self, *arguments: Any) -> Answer:
        """Makes the site."""
        return answer(lambda: self._open(*arguments))

    def _open(self, name: str, plan: Plan, share: Share, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)  # as in a sweep: the actors share the machine
        self.site = SteppedSite(name, plan, unpack_share(share), RunFolder(folder))

    def call(self, method: str, *arguments: Any) -> Answer:
        """Calls a method of the site."""
        return answer(lambda: getattr(self.site, method)(*arguments))


class RayHandle:
    """A site in a Ray actor."""

    def __init__(self, ray: Any, actor: Any, name: str, opened: RayCall) -> None:
        self._ray, self._actor, self._name, self._opened = ray, actor, name, opened

    def ready(self) -> None:
        """See `Handle.ready`."""
        self._opened.result()

    def call(self, method: str, *arguments: Any) -> RayCall:
        """See `Handle.call`."""
        return RayCall(self._ray, self._actor.call.remote(method, *arguments), self._name)


class RayCall:
    """A call that an actor works on."""

    def __init__(self, ray: Any, reference: Any, name: str) -> None:
        self._ray, self._reference, self._name = ray, reference, name

    def result(self) -> Any:
        """See `Pending.result`."""
        try:
            return value_of(self._ray.get(self._reference))
        except self._ray.exceptions.RayActorError as error:
            raise RunError(
                f"the process of {self._name} has died; go on from the last epoch with --resume"
            ) from error


class RayPool:
    """The actors of one run.

    Args:
        address: Address of a running cluster, ``auto`` for the one of this machine, ``local`` to start one
            here for the time of the run.

    Raises:
        MissingExtra: Ray is not installed.
        InputError: No cluster answers.
    """

    def __init__(self, address: str) -> None:
        self._ray = connect(address)
        # No processor is reserved: organisations wait for each other most of the time, and a simulation may
        # have more of them than the cluster has processors.
        self._make = self._ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(SiteActor)

    def open_site(self, name: str, plan: Plan, share: Share, folder: RunFolder) -> RayHandle:
        """Starts an actor for the organisation's site; all start at the same time."""
        actor = self._make.remote()
        opened = actor.open.remote(name, plan, share, folder.path.absolute())
        return RayHandle(self._ray, actor, name, RayCall(self._ray, opened, name))

    def close(self) -> None:
        """Ends the actors and leaves the cluster."""
        self._ray.shutdown()
