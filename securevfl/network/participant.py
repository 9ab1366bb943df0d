"""A participant: one organisation's process, and what it has come for, be it training or a prediction.

The coordinator and every other organisation do this alike: open the folder, run the parts of its site,
notice who is away, report.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms import ABSENT, SERVER, Algorithm, find_algorithm
from securevfl.data import VerticalData
from securevfl.data.share import OwnTable
from securevfl.errors import (
    NOTICES,
    AgreementError,
    InputError,
    NetworkError,
    ProtocolError,
    RunError,
    SecureVFLError,
)
from securevfl.federation.clock import RealClock
from securevfl.federation.folder import RunFolder
from securevfl.federation.prediction import written_records
from securevfl.federation.schedule import Schedule
from securevfl.federation.site import PARTS, Site, hosts_of
from securevfl.federation.threads import fitting_threads
from securevfl.files import PART
from securevfl.models.seeds import torch_generator
from securevfl.network.agreement import Agreement, Facts
from securevfl.network.config import ParticipantConfig, build_own, load_builder
from securevfl.network.folders import ALIGNMENT_FILE, EVIDENCE_FILE
from securevfl.network.frames import in_words
from securevfl.network.identity import fingerprint, parse_certificate
from securevfl.network.mesh import Control, Mesh
from securevfl.network.progress import RunProgress, run_progress
from securevfl.privacy.ledger import AGREEMENT_FILE, read_agreement
from securevfl.privacy.messages import Head, Packet
from securevfl.protocols.contract import Address
from securevfl.protocols.keys import Authenticator

log = logging.getLogger("securevfl.network")


class Restarted(Exception):
    """Another organisation's process has started anew; everybody goes back to a common checkpoint."""


class Stopped(NetworkError):
    """The coordinator has stopped the run; there is nobody left to tell anything."""


class NotAccepted(InputError):
    """This organisation, by its rules or by a person, does not accept what is proposed."""

    notice = "not-accepted"


class Unforeseen(ProtocolError):
    """An error that nobody foresaw."""

    notice = "failed"

    def __init__(self, what: str, error: BaseException) -> None:
        super().__init__(f"{what}: {type(error).__name__}: {error}")


class PeerStops(ProtocolError):
    """Another organisation has said that it cannot go on.

    Attributes:
        peer: Which.
    """

    def __init__(self, peer: str, notice: str) -> None:
        self.peer, self.notice = peer, notice if notice in NOTICES else "failed"
        super().__init__(f"{peer} stops: {in_words(notice)}")


class Away(NetworkError):
    """Somebody has been away for too long.

    Attributes:
        peer: Who.
    """

    notice = "away"

    def __init__(self, peer: str, text: str) -> None:
        self.peer = peer
        super().__init__(text)


@contextlib.contextmanager
def understanding(peer: str, kind: str) -> Iterator[None]:
    """Whatever a message of the right form but with senseless content leads to, it was not understood.

    Raises:
        ProtocolError: Something went wrong that was not foreseen.
    """
    try:
        yield
    except (SecureVFLError, Restarted):
        raise
    except Exception as error:
        raise Unforeseen(f"{kind!r} of {peer} cannot be processed", error) from error


class Purpose(ABC):
    """What organisations have come together for; each process has one of its own."""

    suffix: ClassVar[str] = ""
    """Follows the run's name in greetings and commitments, so that no purpose passes for another."""
    name: ClassVar[str]
    """What invitations and agreements call it."""
    what: ClassVar[str]
    """What an organisation accepts or does not."""
    back_to: ClassVar[str]
    """Where everybody goes back to when a process starts anew."""
    ids: list[str] | None = None
    """The common IDs, once they are known here."""
    handed_over: tuple[str, ...] = ()
    """What a folder may hold, from an earlier run, before anything is agreed on."""
    numbers: tuple[int, ...] = ()
    """Record numbers that the coordinator tells those with data."""
    salt = b""

    @abstractmethod
    def read_table(self, config: ParticipantConfig) -> OwnTable | None:
        """The organisation's records; None for a helper without data."""

    @contextlib.contextmanager
    def reserved(self, who: Participant) -> Iterator[None]:
        """Makes sure, before anybody is waited for, that the purpose can be met."""
        yield

    @abstractmethod
    def open(self, who: Participant, *, leads: bool) -> dict[str, Any] | None:
        """Takes up what the folder holds; the result, where this organisation has finished before."""

    def check_comparison(self, who: Participant, way: str) -> None:  # noqa: B027 - training takes any
        """Raises `ProtocolError` where IDs may not be compared that way."""

    @abstractmethod
    def remembered(self, who: Participant) -> list[str] | None:
        """The common IDs that an earlier process has found."""

    @abstractmethod
    def take_ids(self, who: Participant, ids: list[str], *, leads: bool) -> None:
        """Keeps the common IDs."""

    def take_numbers(self, who: Participant, numbers: list[int], salt: bytes) -> None:
        """Takes up the record numbers that the coordinator gives to the common IDs."""
        raise ProtocolError("the coordinator numbers records, which this version does not expect here")

    @abstractmethod
    def propose(self, who: Participant, facts: Mapping[str, Facts]) -> Agreement:
        """What the coordinator proposes.

        Args:
            who: The coordinator.
            facts: What the parties have told about their tables.
        """

    @abstractmethod
    def understand(self, who: Participant, text: str) -> Agreement:
        """What the coordinator has proposed, as this organisation understands it."""

    def has_agreed(self) -> bool:
        """Whether this organisation has agreed before, in this folder."""
        return False

    @abstractmethod
    def confirmed(self, who: Participant, agreement: Agreement) -> bool:
        """Whether this organisation has confirmed it before.

        Raises:
            RunError: It has confirmed something else.
        """

    @abstractmethod
    def keep(self, who: Participant, agreement: Agreement) -> None:
        """Writes down what this organisation has confirmed."""

    @abstractmethod
    def build(self, who: Participant, agreement: Agreement) -> Site:
        """The site, with the roles that run here."""

    def begin(self) -> None:  # noqa: B027 - training begins again and again
        """Takes note that the first part begins."""

    def check_restart(self, reason: str) -> None:  # noqa: B027 - training goes back to a checkpoint
        """Raises `NetworkError` where there is no way back from here for a process that has started anew."""

    async def follow(self, schedule: Schedule) -> None:
        """Leads everybody through the schedule."""
        await schedule.train()

    @abstractmethod
    def finish(self, who: Participant) -> None:
        """Writes what belongs here at the end."""

    @abstractmethod
    def result(self, who: Participant, epochs: int) -> dict[str, Any]:
        """What `--json` prints."""

    def close(self, who: Participant) -> None:  # noqa: B027 - training leaves its checkpoints
        """Writes down where things stand, whether they came to their end or not."""


class Participant(ABC):
    """One organisation's process.

    Args:
        config: Its configuration.
        purpose: What it has come for.
        coordinator: Who coordinates.
        others: Everybody else.
    """

    say: Callable[[str], None]
    """Tells a person at the terminal something."""

    def __init__(
        self, config: ParticipantConfig, purpose: Purpose, *, coordinator: str, others: tuple[str, ...]
    ) -> None:
        self.config, self.purpose, self.name = config, purpose, config.identity.name
        self.session = config.run + purpose.suffix
        self.builder = load_builder(config.base, config.encoder) if config.encoder else None
        self.own = purpose.read_table(config)
        self.folder = RunFolder(config.folder)
        self.mesh = Mesh(
            config.identity,
            run=self.session,
            coordinator=coordinator,
            others=others,
            address=config.public or config.listen,
        )
        self.clock = RealClock()
        self._table: OwnTable | None = None
        self.site: Site | None = None
        self.agreement: Agreement | None = None
        self.signatures: dict[str, str] = {}
        self.fresh = True
        self.patience = config.network.patience
        self.epoch = -1
        self.part = "joining"
        self.begun = time.monotonic()
        self.reason: str | None = None
        self.resumed: int | None = None
        self._begun_with = 0.0
        self.on_progress: Callable[[RunProgress], None] = lambda now: None
        self.mesh.on_older, self.mesh.on_refused = self._tell_older, self._tell_refused
        self._refused: set[str] = set()

    # -- the folder -----------------------------------------------------------------------------------------

    def make_folder(self) -> None:
        """Makes the folder, if there is none yet.

        Raises:
            RunError: It cannot be made, or others can put into it what this process would take for its own.
        """
        path = self.folder.path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = path.stat()
        except OSError as error:
            raise RunError(f"folder {path} cannot be made: {error.strerror}") from error
        if os.name == "posix" and (found.st_uid not in (os.geteuid(), 0) or found.st_mode & stat.S_IWOTH):
            raise RunError(
                f"others may write in {path}, where ledger and state are; use a folder of your own, or run: "
                f"chmod o-w {path}"
            )

    def open_folder(self) -> str:
        """Takes up the run that the folder holds, if any; returns the digest agreed on before.

        Raises:
            RunError: The folder holds another run.
        """
        path = self.folder.path
        file = path / AGREEMENT_FILE
        if not file.exists():
            own = {ALIGNMENT_FILE, AGREEMENT_FILE, EVIDENCE_FILE, "ledger", *self.purpose.handed_over}
            if any(each.name.removesuffix(PART) not in own for each in path.iterdir()):
                raise RunError(f"{path} holds something else; choose another folder")
            return ""
        content = read_agreement(path)
        if self.name not in content["homes"]:
            raise RunError(f"{path} belongs to {', '.join(content['homes'])}, not to {self.name}")
        if content["run"] != self.config.run:
            raise RunError(f"{path} belongs to run {content['run']!r}, not to {self.config.run!r}")
        return str(content["digest"])

    def comparable(self, way: str) -> OwnTable:
        """The own records with IDs as they are compared, always made from the table as it was read.

        Raises:
            DataError: Two records have the same ID then, or one has none.
            InputError: There is no table.
        """
        if self.own is None:
            raise InputError(f"{self.name} has no data to align")
        self._table = self._table or self.own
        self.own = self._table.normalised(way)
        return self.own

    def keys(self, names: Iterable[str]) -> dict[str, str]:
        """Organisation -> fingerprint of its key, by the certificate with which it introduced itself.

        Raises:
            AgreementError: One has not.
        """
        certificates = self.mesh.certificates()
        for name in names:
            if name not in certificates:
                raise AgreementError(f"{name} has not introduced itself")
        return {name: fingerprint(parse_certificate(certificates[name])) for name in names}

    def signed(self, agreement: Agreement) -> dict[str, Any]:
        """What `agreement.json` keeps, so that others can verify who has agreed to what."""
        certificates = {name: pem.decode() for name, pem in self.mesh.certificates().items()}
        return {
            "text": agreement.text,
            "signatures": self.signatures,
            "certificates": {name: certificates[name] for name in agreement.members if name in certificates},
            "authority": self.config.identity.ca_pem.decode(),
        }

    def take_signatures(self, agreement: Agreement, signatures: Mapping[str, str]) -> None:
        """Takes up everybody's signatures, and builds the site; before that nothing leaves.

        Raises:
            AgreementError: Somebody has not signed this agreement.
        """
        agreement.verify(signatures, self.mesh.certificates())
        self.signatures = dict(signatures)
        self.purpose.keep(self, agreement)
        self.site = self.purpose.build(self, agreement)

    # -- the site -------------------------------------------------------------------------------------------

    def make_site(
        self,
        agreement: Agreement,
        data: VerticalData,
        clock: RealClock,
        *,
        algorithm: Algorithm | None = None,
        records: int = 0,
    ) -> Site:
        """This organisation's site, on the connections of this process.

        Args:
            agreement: What all organisations agreed on.
            data: Its share of the data.
            clock: Its clock.
            algorithm: What to run instead of the plan's algorithm.
            records: See `Site`.
        """
        plan = agreement.plan

        def authenticate(channel: str, workers: Mapping[Address, str]) -> Authenticator:
            return self.mesh.authenticator(channel, workers, agreement.digest)

        def encoder(party: str) -> Any:
            if self.builder is None or party != self.name:
                return None
            index = data.parties.index(party)
            generator = torch_generator(plan.seed, "encoder", index)
            width, own = data.train[index].shape[1], plan.encoder(party)
            return build_own(self.builder, width, own.embedding, generator=generator)

        self.clock, hosts = clock, hosts_of(plan, data, algorithm or find_algorithm(plan.algorithm))
        site = Site(
            self.name,
            plan,
            data,
            hosts=hosts,
            links=self.mesh.connect(hosts),
            clock=clock,
            folder=self.folder,
            algorithm=algorithm,
            records=records,
            encoder=encoder,
            authenticate=authenticate,
            agreement=agreement.digest,
            restarts=agreement.timetable.restarts,
            quota=agreement.timetable.quota,
        )
        self.mesh.observe = lambda message: site.observe(message, clock.now())
        self.mesh.shown |= site.receipts.heads
        return site

    def _tell_refused(self, peer: str, reason: str) -> None:
        """Whoever waits for a peer should know why it does not come in; once for each, the log has all."""
        if peer in self.mesh.sessions and peer not in self._refused:
            self._refused.add(peer)
            self.say(f"{peer} was refused: {reason}")

    def _tell_older(self, peer: str, known: Head, head: Head) -> None:
        """A peer counts less than it has shown: it may release again what it has released."""
        log.warning("an older ledger", extra={"peer": peer, "known": known.position, "now": head.position})
        self.say(
            f"{peer} goes on with an older ledger: it ends at entry {head.position}, and had entry "
            f"{known.position}. A folder that was put back, or begun anew, does not count what was released "
            "meanwhile; an audit together says so"
        )

    async def work(
        self, phase: bytes, part: str, epoch: int, restore: int | None, absent: Iterable[str] = ()
    ) -> None:
        """Runs one part of the roles here, and keeps the state after it.

        Args:
            phase: Whose messages belong together.
            part: What to run.
            epoch: For which epoch.
            restore: Epoch to go back to first; None to stay.
            absent: Organisations that the server goes on without.
        """
        site = self._built()
        if restore is not None:
            self._restore(site, restore)
        self.fresh = False
        self.part, self.epoch = part, epoch
        log.info("phase begins", extra={"part": part, "epoch": epoch})
        for link in self.mesh.links.values():
            link.phase = PARTS[part]
        self.mesh.begin(phase)
        for peer in absent:
            self.tell_absent(peer)
        try:
            longest = None if part == "score" else self.config.network.phase_timeout or None
            async with asyncio.timeout(longest):
                with fitting_threads(site.plan, site.data):
                    await site.run(part, epoch)
        except TimeoutError as error:
            raise NetworkError(
                f"{part} of epoch {epoch} took more than {self.config.network.phase_timeout:g} s; "
                f"{self._waits()}"
            ) from error
        finally:
            self.mesh.end()
        if part == "prepare":
            self._begun_with = site.spent()
        if part == "epoch" and (now := self.progress()) is not None:
            self.on_progress(now)

    def progress(self) -> RunProgress | None:
        """Where the run is, as far as this organisation knows; None before there is an agreement."""
        if self.site is None:
            return None
        away = tuple(peer for peer, session in self.mesh.direct.items() if not session.connected)
        return run_progress(
            self.site.plan,
            mu=self.site.spent(),
            epoch=self.epoch,
            away=away,
            resumed=self.resumed,
            begun=self._begun_with,
        )

    def keep_state(self, part: str, epoch: int) -> None:
        """Keeps the state after a part that everybody may have to go back to."""
        if part in ("prepare", "epoch"):
            figures = {"messages": self.mesh.messages, "bytes": self.mesh.bytes}
            self._built().save(epoch, time=self.clock.now(), **figures)

    def _restore(self, site: Site, epoch: int) -> None:
        state = site.restore(epoch, fresh=self.fresh)
        if state:
            self.resumed = self.epoch = epoch
            self.say(f"resumed at epoch {epoch}")
        if state and self.fresh:
            self.clock.set(float(state["time"]))
            self.mesh.messages, self.mesh.bytes = int(state["messages"]), int(state["bytes"])

    def _built(self) -> Site:
        if self.site is None:
            raise ProtocolError("a phase begins before there is an agreement")
        return self.site

    def tell_absent(self, peer: str) -> None:
        """Lets the server know that it goes on without an organisation in this phase."""
        self.mesh.links[SERVER].deliver(Packet(kind=ABSENT, sender=peer, receiver=SERVER))

    def _waits(self) -> str:
        waits = [f"{name} waits for {link.waiting}" for name, link in self.mesh.links.items() if link.waiting]
        return "; ".join(waits) or "raise phase_timeout"

    async def stop_task(self, task: asyncio.Task[Any] | None) -> None:
        """Ends what runs here, if anything does."""
        if task is not None and not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, SecureVFLError):
                await task
        self.mesh.end()

    async def watch(self) -> None:
        """Reports whoever has been away for too long."""
        patience, noticed = self.patience, set[str]()
        while True:
            await asyncio.sleep(0.2)
            now = time.monotonic()
            noticed &= set(self.mesh.lost_since)
            for peer, since in list(self.mesh.lost_since.items()):
                if now - since > self.config.network.absence and peer not in noticed:
                    noticed.add(peer)
                    self.mesh.control.put_nowait((peer, "away", {}))
                if self.is_needed(peer) and now - since > patience:
                    trouble = self.mesh.transport.trouble.get(peer)
                    why = f" ({trouble})" if trouble else ""
                    self.mesh.control.put_nowait(
                        Away(
                            peer,
                            f"{peer} has not been reachable for {patience:g} s{why}; what was "
                            "done is kept: start everybody again to go on",
                        )
                    )
                    self.mesh.lost_since[peer] = math.inf

    def is_needed(self, peer: str) -> bool:
        """Whether this organisation itself must hold a connection to a peer."""
        return True

    async def next_control(self) -> Control:
        """The next control message; errors are raised."""
        item = await self.mesh.control.get()
        if isinstance(item, Exception):
            raise item
        return item

    # -- the whole run --------------------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        """Takes part to the end; returns this organisation's result. A folder has one process at a time.

        Raises:
            NetworkError: Somebody has been away for too long, or stops. The run can be taken up again.
            RunError: Another process is at work in the folder, or the folder is not for this run.
            BudgetExceeded: A gate refuses; what was released until then stays counted.
            SecureVFLError: An organisation refuses or fails; the message says which and why.
        """
        with self.purpose.reserved(self):
            self.make_folder()
            with self.folder.locked():
                self._open()
                return await self._live()

    @abstractmethod
    def _open(self) -> None:
        """Takes up what the folder holds."""

    @abstractmethod
    async def _live(self) -> dict[str, Any]:
        """Connects and takes part; returns the result."""

    def records(self) -> list[ReleaseRecord]:
        """This organisation's releases."""
        return written_records(self.folder.path)

    def status(self) -> dict[str, Any]:
        """A snapshot for health checks and metrics."""
        return {
            "organisation": self.name,
            "run": self.session,
            "phase": self.part,
            "epoch": self.epoch,
            "messages": self.mesh.messages,
            "bytes": self.mesh.bytes,
            "refused_connections": self.mesh.transport.refused,
            "connected": sum(session.connected for session in self.mesh.direct.values()),
            "peers": len(self.mesh.direct),
            "unacknowledged": sum(session.waiting for session in self.mesh.sessions.values()),
            "mu": 0.0 if self.site is None else self.site.spent(),
            "guarantee": "" if self.site is None else self.site.plan.guarantee,
            **({} if (now := self.progress()) is None else now.figures),
        }

    async def close(self) -> None:
        """Closes connections and files."""
        try:
            self.purpose.close(self)
        finally:
            await self.mesh.close()
            if self.site is not None:
                self.site.close()
