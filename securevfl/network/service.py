"""A scoring service at one organisation: its processes' life, from the configuration to the last answer.

At the label holder an interface for clients, and for each model a coordinator that brings the organisations
together; elsewhere a member for each model. Whoever is lost is waited for, as often as it takes: here the
process goes on, and starts over with the tables as they are then. The label holder's ends when it is told to,
after it has answered what was asked; everybody else's when it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from securevfl.algorithms.serving import Refused
from securevfl.errors import BudgetExceeded, InputError, NetworkError, SecureVFLError
from securevfl.federation.folder import RunFolder
from securevfl.federation.site import SERVING
from securevfl.network.api import ScoringApi
from securevfl.network.config import (
    ParticipantConfig,
    PartyConfig,
    ServerConfig,
    read_party_config,
    read_server_config,
)
from securevfl.network.coordinator import Coordinator
from securevfl.network.dispatcher import ServiceDispatcher
from securevfl.network.member import Confirm, Member, refuse
from securevfl.network.participant import Participant, PeerStops
from securevfl.network.prediction import check_finished
from securevfl.network.serving import ScoringPurpose, scoring_of
from securevfl.settings.codec import read_toml

PAUSE = 1.0
"""Seconds before everybody is brought together again."""
OBSERVED = 10.0
"""Seconds after which the newest ledger heads of others are on disk."""
PASSING = ("failed", "files", "interrupted", "network", "away")
"""What another organisation may recover from; anything else a person has to mend."""


def read_config(path: Path) -> ParticipantConfig:
    """Reads `server.toml` or `party.toml`, whichever it is."""
    return read_party_config(path) if "coordinator" in read_toml(path) else read_server_config(path)


class Service:
    """One organisation's part in a service.

    Args:
        configs: Its configuration in each run whose model is served; the first is the default.
        say: Called with what a person at the terminal should know.
        confirm: Asked whether the agreement is accepted, where there are no rules for that.

    Raises:
        InputError: They do not fit together.
    """

    def __init__(
        self,
        configs: Sequence[ParticipantConfig],
        *,
        say: Callable[[str], None] = lambda text: None,
        confirm: Confirm = refuse,
    ) -> None:
        self.configs, self.say, self.confirm = list(configs), say, confirm
        leads = {isinstance(config, ServerConfig) for config in configs}
        if len(leads) != 1 or len({config.run for config in configs}) < len(configs):
            raise InputError("all --config must be of the same organisation, each of another run")
        self.leads = leads.pop()
        for config in configs:
            scoring_of(config)
            check_finished(RunFolder(config.folder))
        self.dispatchers: dict[str, ServiceDispatcher] = {}
        self.api: ScoringApi | None = None
        self.nodes: dict[str, Participant] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    async def run(self) -> None:
        """Serves until `stop` is called.

        Raises:
            SecureVFLError: Something is wrong that no waiting mends.
        """
        async with contextlib.AsyncExitStack() as opened:
            if self.leads:
                await self._open_api(opened)
            try:
                async with asyncio.TaskGroup() as group:
                    self._tasks = [group.create_task(self._keep(config)) for config in self.configs]
                    watching = group.create_task(self._write_observed())
                    await asyncio.wait(self._tasks)
                    watching.cancel()
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _open_api(self, opened: contextlib.AsyncExitStack) -> None:
        for config in self.configs:
            scoring = scoring_of(config)
            dispatcher = ServiceDispatcher(
                config.run,
                config.folder / SERVING / "requests.db",
                queue=scoring.queue,
                batch=scoring.batch,
                rounds=scoring.rounds,
                timeout=scoring.timeout,
            )
            self.dispatchers[config.run] = dispatcher
            opened.push_async_callback(dispatcher.close)
        first = self.configs[0]
        chosen = first.folder / SERVING / "default.json"
        self.api = ScoringApi(scoring_of(first), first.identity, self.dispatchers, chosen)
        await opened.enter_async_context(self.api)
        self.say(f"clients ask at {self.api.host}:{self.api.port}")

    async def _write_observed(self) -> None:
        """Keeps the newest ledger heads of others, by which their ledgers are checked later, and views.

        A disk that is full for a while ends nothing: they stay in memory until they can be written.
        """
        said = ""
        while True:
            await asyncio.sleep(OBSERVED)
            try:
                for node in self.nodes.values():
                    if node.site is not None:
                        node.site.write_observed()
                said = ""
            except SecureVFLError as error:
                if said != (said := str(error)):
                    self.say(f"{error}; the service goes on, and tries again")

    def node(self, config: ParticipantConfig) -> Participant:
        """A new process's part in one run."""
        file = config.base / scoring_of(config).file
        if isinstance(config, ServerConfig):
            return Coordinator(config, ScoringPurpose(file, self.dispatchers[config.run]), say=self.say)
        if not isinstance(config, PartyConfig):
            raise InputError("a configuration of neither the coordinator nor another organisation")
        return Member(config, ScoringPurpose(file), confirm=self.confirm, say=self.say)

    async def _keep(self, config: ParticipantConfig) -> None:
        """Takes part in one run, again and again."""
        while not self._ending:
            node = self.nodes[config.run] = self.node(config)
            try:
                await node.run()
                if self.leads:
                    return
                self.say("the label holder's service has ended; waiting for it")
            except BudgetExceeded:
                if not self.leads:
                    raise
                self.dispatchers[config.run].refuse_all(Refused("budget", "an organisation"))
            except (NetworkError, PeerStops) as error:
                if isinstance(error, PeerStops) and error.notice not in PASSING:
                    raise
                self.say(f"{error}; everybody is waited for")
            await asyncio.sleep(PAUSE)

    def stop(self) -> None:
        """Ends the service: the label holder answers what was asked; a second call does not wait for that.

        Nor does anybody wait for an organisation that is away: after a request's time every client was
        answered or told to ask again, and what is open stands in the request log.
        """
        if self._ending or not self.leads:
            self._leave()
        else:
            longest = max(scoring_of(config).timeout for config in self.configs)
            asyncio.get_running_loop().call_later(longest, self._leave)
        self._ending = True
        for dispatcher in self.dispatchers.values():
            dispatcher.drain()

    def _leave(self) -> None:
        for task in self._tasks:
            task.cancel()

    def status(self) -> dict[str, Any]:
        """A snapshot for health checks: of the first run."""
        node = next(iter(self.nodes.values()), None)
        return {} if node is None else node.status()
