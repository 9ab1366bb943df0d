"""What the coordinator and every other organisation do alike: open the folder, align, run phases, report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms import ABSENT, SERVER
from securevfl.data.share import OUTLINE_FILE, OwnTable
from securevfl.errors import (
    DataError,
    EncodingError,
    NetworkError,
    ProtocolError,
    RunError,
    SecureVFLError,
)
from securevfl.federation.folder import RunFolder
from securevfl.federation.prediction import written_records
from securevfl.federation.run import result_content
from securevfl.files import PART, write_json, write_text
from securevfl.network.agreement import (
    ALIGNMENT_FILE,
    Agreement,
    CommonDataError,
    load_alignment,
    save_alignment,
)
from securevfl.network.config import NodeConfig
from securevfl.network.mesh import Control, Mesh
from securevfl.network.own_encoder import load_builder
from securevfl.network.seat import Seat
from securevfl.privacy.ledger import AGREEMENT_FILE, read_agreement
from securevfl.privacy.messages import Packet
from securevfl.privacy.schemas import EVALUATE, PHASES

STAY = -2
"""In place of an epoch to go back to: go on from where you are."""
log = logging.getLogger("securevfl.network")


class Restarted(Exception):
    """Another organisation's process has started anew; everybody goes back to a common checkpoint."""


class Stopped(NetworkError):
    """The coordinator has stopped the run; there is nobody left to tell anything."""


class Unforeseen(ProtocolError):
    """An error that nobody foresaw. Its text may quote data, so others are told only what kind it was.

    Attributes:
        told: What others are told.
    """

    def __init__(self, what: str, error: BaseException) -> None:
        self.told = f"{what}: {type(error).__name__}"
        super().__init__(f"{self.told}: {error}")


def told_of(error: SecureVFLError) -> str:
    """What others are told of an error: nothing that quotes an ID, a label or a value of the table here."""
    if isinstance(error, Unforeseen):
        return error.told
    if isinstance(error, DataError | EncodingError) and not isinstance(error, CommonDataError):
        return "its own data cannot be used, as is said there"
    return str(error)


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


class Node(ABC):
    """One organisation's process.

    Args:
        config: Its configuration.
        coordinator: Who coordinates.
        others: Everybody else.
    """

    suffix: ClassVar[str] = ""
    """Follows the run's name in greetings and commitments, so that no purpose passes for another."""

    def __init__(self, config: NodeConfig, *, coordinator: str, others: tuple[str, ...]) -> None:
        self.config, self.name = config, config.identity.name
        self.session = config.run + self.suffix
        self.builder = load_builder(config.base, config.encoder) if config.encoder else None
        self.own = self.read_table()
        self.folder = RunFolder(config.folder)
        self.mesh = Mesh(
            config.identity,
            run=self.session,
            coordinator=coordinator,
            others=others,
            address=config.public or config.listen,
        )
        self.seat: Seat | None = None
        self.agreement: Agreement | None = None
        self.fresh = True
        self.patience = config.network.patience
        self.epoch = -1
        self.part = "joining"
        self.begun = time.monotonic()
        self.reason: str | None = None

    def read_table(self) -> OwnTable | None:
        """This organisation's records; None for a helper without data."""
        return None if self.config.data is None else self.config.data.read(self.config.base)

    # -- the folder -----------------------------------------------------------------------------------------

    def make_folder(self) -> None:
        """Makes the folder, if there is none yet.

        Raises:
            RunError: It cannot be made.
        """
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise RunError(f"folder {self.folder.path} cannot be made: {error.strerror}") from error

    def open_folder(self) -> str:
        """Takes up the run that the folder holds, if any; returns the digest agreed on before.

        Raises:
            RunError: The folder holds another run.
        """
        path = self.folder.path
        file = path / AGREEMENT_FILE
        if not file.exists():
            own = {ALIGNMENT_FILE, AGREEMENT_FILE}
            if any(each.name.removesuffix(PART) not in own for each in path.iterdir()):
                raise RunError(f"{path} holds something else; choose another folder")
            return ""
        content = read_agreement(path)
        if self.name not in content["homes"]:
            raise RunError(f"{path} belongs to {', '.join(content['homes'])}, not to {self.name}")
        if content["run"] != self.config.run:
            raise RunError(f"{path} belongs to run {content['run']!r}, not to {self.config.run!r}")
        return str(content["digest"])

    def keep_agreement(self, agreement: Agreement) -> None:
        """Writes down what was agreed on, before anything leaves."""
        self.agreement = agreement
        content = {
            "run": self.config.run,
            "homes": [self.name],
            "digest": agreement.digest,
            "organisations": agreement.proposal.organisations,
        }
        # First the file by which a restarted process recognises the folder as its own.
        write_json(self.folder.path / AGREEMENT_FILE, content)
        write_text(self.folder.plan_file, agreement.plan.to_toml())
        write_text(self.folder.path / OUTLINE_FILE, agreement.proposal.outline.to_json() + "\n")

    def keep_ids(self, ids: list[str]) -> None:
        """Keeps the common IDs, for a process that follows and for the audit.

        Raises:
            RunError: The folder's run was agreed on with others; those stay.
        """
        path = self.folder.path
        if (path / AGREEMENT_FILE).exists() and load_alignment(path) not in (None, ids):
            raise RunError(f"the run in {path} has other common records; choose another folder for a new run")
        save_alignment(path, ids)

    def take_seat(self, agreement: Agreement) -> Seat:
        """Builds the roles that run here."""
        if self.seat is None:
            self.seat = Seat(
                self.name,
                plan=agreement.plan,
                data=agreement.data,
                folder=self.folder,
                mesh=self.mesh,
                agreement=agreement.digest,
                unit=agreement.proposal.time_unit,
                builder=self.builder,
            )
        return self.seat

    # -- phases ---------------------------------------------------------------------------------------------

    async def run_part(
        self,
        seat: Seat,
        phase: bytes,
        part: str,
        epoch: int,
        restore: int | None,
        absent: Iterable[str] = (),
    ) -> None:
        """Runs one part of the roles here.

        Args:
            seat: The roles.
            phase: Whose messages belong together.
            part: What to run.
            epoch: For which epoch.
            restore: Epoch to go back to first; None to stay.
            absent: Organisations that the server goes on without.
        """
        if restore is not None:
            seat.restore(restore, fresh=self.fresh)
        self.fresh = False
        self.part, self.epoch = part, epoch
        log.info("phase begins", extra={"part": part, "epoch": epoch})
        for link in self.mesh.links.values():
            link.phase = part if part in PHASES else EVALUATE
        self.mesh.begin(phase)
        for peer in absent:
            self.tell_absent(peer)
        try:
            async with asyncio.timeout(self.config.network.phase_timeout or None):
                await seat.run(part)
        except TimeoutError as error:
            raise NetworkError(
                f"{part} of epoch {epoch} took more than {self.config.network.phase_timeout:g} s; "
                f"{self._waits()}"
            ) from error
        finally:
            self.mesh.end()

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
                        NetworkError(
                            f"{peer} has not been reachable for {patience:g} s{why}; what was "
                            "done is kept: start everybody again to go on"
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

    # -- the result -----------------------------------------------------------------------------------------

    def records(self) -> list[ReleaseRecord]:
        """This organisation's releases."""
        return written_records(self.folder.path)

    def result(self, seat: Seat, epochs: int) -> dict[str, Any]:
        """What the run gave this organisation, as `train --json` prints it."""
        return result_content(
            seat.plan,
            self.records(),
            label_holder=seat.label_holder,
            server=seat.server,
            epochs=epochs,
            organisation=self.name,
            time={"virtual": seat.clock.now(), "wall": round(time.monotonic() - self.begun, 3)},
            messages=self.mesh.messages,
            bytes=self.mesh.bytes,
            stopped=self.reason,
        )

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
            "connected": sum(session.connected for session in self.mesh.sessions.values()),
            "peers": len(self.mesh.sessions),
            "unacknowledged": sum(session.waiting for session in self.mesh.sessions.values()),
            "mu": 0.0 if self.seat is None else self.seat.spent(),
        }

    async def run(self) -> dict[str, Any]:
        """Takes part to the end; returns this organisation's result. A folder has one process at a time.

        Raises:
            NetworkError: Somebody has been away for too long, or stops. The run can be taken up again.
            RunError: Another process is at work in the folder, or the folder is not for this run.
            SecureVFLError: An organisation refuses or fails; the message says which and why.
        """
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

    async def close(self) -> None:
        """Closes connections and files."""
        await self.mesh.close()
        if self.seat is not None:
            self.seat.close()
