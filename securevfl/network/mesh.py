"""The mesh: one organisation's connections to all others, and the way that messages take through them.

Messages of roles travel directly where the two organisations have a stream, else sealed through the
coordinator. Every message belongs to a phase; what arrives for a phase that has not begun here yet waits,
what belongs to an earlier one is dropped. Control messages go between the coordinator and everybody else.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from securevfl.errors import ProtocolError, SecureVFLError, WireError
from securevfl.network.frames import (
    MAX_FRAME,
    OF_COORDINATOR,
    OF_MEMBERS,
    PHASE_BYTES,
    Frame,
    Kind,
    read_control,
)
from securevfl.network.identity import Identity, check_not_revoked, parse_certificate
from securevfl.network.relay import Introducer, Introduction, PairCipher
from securevfl.network.session import FRAME_COST, Flood, Session, new_incarnation
from securevfl.network.signing import CertificateAuthenticator
from securevfl.network.transport import Handlers, Transport
from securevfl.privacy.messages import Head, Packet
from securevfl.privacy.payloads import Link
from securevfl.protocols.contract import Address
from securevfl.protocols.wire import Value, pack, unpack

MAX_UNREAD = MAX_FRAME + (64 << 20)
"""Bytes of one peer that may wait here, for a role, for a phase or as control messages, before it counts as
flooding: a frame of the largest size, and something beside it. What others send does not count against it."""
CONTROL_COST = 32 << 10
"""Bytes that a waiting control message counts beside its own: ten thousand of them are a flood."""

log = logging.getLogger("securevfl.network")
log.addHandler(logging.NullHandler())

Control = tuple[str, str, dict[str, Any]]


class Controls(asyncio.Queue["Control | SecureVFLError"]):
    """Control messages and events of this process, in order, and how many bytes of each peer's wait.

    Attributes:
        bytes: Peer -> bytes of its control messages that nobody has read yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self._sizes: deque[tuple[str, int]] = deque()

    def hear(self, control: Control, size: int) -> None:
        """A peer's control message."""
        self.put_nowait(control)
        self.bytes[control[0]] += size
        self._sizes[-1] = control[0], size

    def _put(self, item: Control | SecureVFLError) -> None:
        super()._put(item)
        self._sizes.append(("", 0))

    def _get(self) -> Control | SecureVFLError:
        peer, size = self._sizes.popleft()
        self.bytes[peer] -= size
        return super()._get()


class Mesh:
    """All connections of one organisation.

    Attributes:
        shown: Owner -> the newest ledger head that an earlier process of it, or to one of ours, has shown.

    Args:
        identity: Who it is.
        run: Name of the run.
        coordinator: Who coordinates; may be this organisation.
        others: All other organisations of the run.
        address: Where others can dial this organisation; empty if they cannot.
    """

    def __init__(
        self, identity: Identity, *, run: str, coordinator: str, others: Iterable[str], address: str = ""
    ) -> None:
        self.name, self.run, self.coordinator = identity.name, run, coordinator
        self.incarnation = new_incarnation()
        self._passed: Counter[str] = Counter()
        self.sessions = {name: Session(name, self._passed) for name in others}
        self.introducer = Introducer(identity, run=run, incarnation=self.incarnation, address=address)
        self.introductions: dict[str, Introduction] = {}
        self.control = Controls()
        self.on_trouble: Callable[[str, str], None] = lambda peer, reason: None
        self.on_refused: Callable[[str, str], None] = lambda peer, reason: None
        self.on_restart: Callable[[str], None] = lambda peer: None
        self.on_older: Callable[[str, Head, Head], None] = lambda peer, known, head: None
        self.observe: Callable[[Packet], None] = lambda message: None
        self.shown: dict[str, Head] = {}
        self.hosts: Mapping[str, str] = {}
        self.links: dict[str, Link] = {}
        self.messages = self.bytes = 0
        self.agreement = ""
        self.lost_since: dict[str, float] = dict.fromkeys(self.sessions, time.monotonic())
        self.transport = Transport(
            identity,
            run=run,
            incarnation=self.incarnation,
            sessions=self.sessions,
            handlers=Handlers(
                frame=self._frame,
                decode=self._decode,
                connected=self._connected,
                lost=self._lost,
                trouble=lambda peer, reason: self.on_trouble(peer, reason),
                failed=self._failed,
                refused=lambda peer, reason: self.on_refused(peer, reason),
            ),
        )
        self.transport.introduced = identity.name == coordinator
        self._phase = self._marked = self.last_phase = b""
        self._past: set[bytes] = set()
        self._early: list[tuple[bytes, str, Packet]] = []
        self._early_bytes: Counter[str] = Counter()
        self._away_since: dict[str, float] = {}
        self._ciphers: dict[str, PairCipher] = {}
        self._direct: set[str] = {coordinator} - {identity.name}
        if identity.name == coordinator:
            self._direct = set(self.sessions)
        self._changed = asyncio.Event()

    # -- connections ----------------------------------------------------------------------------------------

    def _connected(self, peer: str, restarted: bool) -> None:
        self._check_not_revoked(peer)
        self._away_since[peer] = self.lost_since.pop(peer, time.monotonic())
        log.info("connected", extra={"peer": peer, "restarted": restarted})
        if restarted:
            self.on_restart(peer)
        self._changed.set()

    def _check_not_revoked(self, peer: str) -> None:
        """Whoever dials is not shown the certificate, so that of the introduction is looked at every time.

        A process that is new here introduces itself before it is asked anything, and is looked at then.
        """
        known = self.introductions.get(peer)
        if known is not None and known.incarnation == self.sessions[peer].incarnation:
            check_not_revoked(parse_certificate(known.certificate), self.introducer.identity.revoked)

    def _lost(self, peer: str, broke: bool) -> None:
        """Whoever comes only to break the rules again has been away all the time."""
        since = self._away_since.get(peer, time.monotonic()) if broke else time.monotonic()
        self.lost_since.setdefault(peer, since)
        log.warning("connection lost", extra={"peer": peer})
        self._changed.set()

    def _failed(self, error: SecureVFLError) -> None:
        log.error("cannot go on", extra={"reason": str(error)})
        self.control.put_nowait(error)

    async def change(self) -> None:
        """Waits until a connection comes or goes."""
        self._changed.clear()
        await self._changed.wait()

    def expect(self, name: str) -> None:
        """Another organisation takes part; it may connect from now on."""
        if name != self.name and name not in self.sessions:
            self.sessions[name] = Session(name, self._passed)

    def introduce(self, introductions: Iterable[Introduction]) -> None:
        """Takes up who the others are now; dials those that can be dialled and whose turn is ours.

        Raises:
            CertificateError: An introduction was not signed by the one it names.
        """
        for each in introductions:
            if each.name == self.name or each.name not in self.sessions:
                continue
            known, cipher = self.introductions.get(each.name), self._ciphers.get(each.name)
            same = known is not None and known.incarnation == each.incarnation
            if same and cipher is not None and cipher.via == self._via:
                continue
            self._ciphers[each.name] = self.introducer.meet(each, self._via)
            self.introductions[each.name] = each
            for link in self.links.values():
                self.shown |= {owner: head for owner, head in link.heads.items() if owner == each.name}
            if known is None:
                self._connect_to(each)
        self.transport.introduced = True

    @property
    def _via(self) -> bytes:
        """The coordinator's process."""
        return (
            self.incarnation if self.name == self.coordinator else self.sessions[self.coordinator].incarnation
        )

    def _connect_to(self, other: Introduction) -> None:
        """Of two that both can be dialled, the one whose name comes first dials."""
        mine = self.introducer.introduction.address
        if self.coordinator in (self.name, other.name) or not (mine or other.address):
            return
        self._direct.add(other.name)
        if other.address and not (mine and self.name > other.name):
            # Said by a peer: gRPC would take a word before the colon for a scheme, such as a local socket's.
            self.transport.dial(other.name, f"dns:///{other.address}")

    @property
    def direct(self) -> dict[str, Session]:
        """Sessions that have a stream here; all others go through the coordinator."""
        return {name: session for name, session in self.sessions.items() if name in self._direct}

    async def settled(self, away: Collection[str] = ()) -> None:
        """Waits until every direct peer is connected as the process that introduced itself.

        Args:
            away: Who is not waited for.
        """
        while self.unsettled(away):
            await self.change()

    def unsettled(self, away: Collection[str] = ()) -> list[str]:
        """Direct peers that are not connected, or only as an earlier process, and not known to be away."""
        expected = self._direct - {self.coordinator, *away}
        return sorted(name for name in expected if not self._is_settled(name))

    def _is_settled(self, name: str) -> bool:
        session, known = self.sessions[name], self.introductions.get(name)
        return session.connected and (known is None or session.incarnation == known.incarnation)

    # -- phases ---------------------------------------------------------------------------------------------

    def connect(self, hosts: Mapping[str, str]) -> dict[str, Link]:
        """Links for the addresses that run here; their numbers go on.

        Args:
            hosts: Address -> organisation.
        """
        numbers = {address: link.number for address, link in self.links.items()}
        self.hosts = dict(hosts)
        here = [address for address, host in self.hosts.items() if host == self.name]
        self.links = {address: Link(address, self.post, self.hosts) for address in here}
        for address, link in self.links.items():
            link.number, link.aside = numbers.get(address, 0), asyncio.to_thread
        return self.links

    @contextmanager
    def meeting(self, phase: bytes, names: Iterable[str]) -> Iterator[Link]:
        """A phase in which organisations talk as such, beside the roles that they may host already.

        Neither counters nor views know of it.

        Args:
            phase: Whose messages belong together.
            names: Who takes part.
        """
        kept = self.hosts, self.links, self.observe, self.messages, self.bytes
        self.hosts = {name: name for name in names}
        link = Link(self.name, self.post, self.hosts)
        self.links, self.observe = {self.name: link}, lambda message: None
        try:
            self.begin(phase)
            yield link
        finally:
            self.end()
            self.hosts, self.links, self.observe, self.messages, self.bytes = kept

    def begin(self, phase: bytes) -> None:
        """Starts a phase, with what came early for it.

        Raises:
            ProtocolError: It was there before; what belonged to it then could be sent again.
        """
        self.end()
        if phase in self._past:
            raise ProtocolError(f"{self.coordinator} begins a phase that was there before")
        self._phase, self.last_phase, self._marked = phase, phase, self._mark(phase)
        for link in self.links.values():
            link.forget()
        early, self._early = self._early, []
        self._early_bytes.clear()
        for begun, peer, message in early:
            if begun == self._marked:
                self._deliver(peer, message)

    def authenticator(
        self, channel: str, workers: Mapping[Address, str], agreement: str
    ) -> CertificateAuthenticator:
        """What signs and checks keys in the current phase.

        Args:
            channel: Name of the sum.
            workers: Worker -> its organisation.
            agreement: Digest of what all organisations agreed on.
        """
        known = {**self.introductions, self.name: self.introducer.introduction}
        return CertificateAuthenticator(
            self.introducer.identity,
            run=self.run,
            agreement=agreement,
            phase=self._phase,
            channel=channel,
            workers=workers,
            processes={name: (each.incarnation, each.certificate) for name, each in known.items()},
            passed_by=self.hosts[channel],
        )

    def certificates(self) -> dict[str, bytes]:
        """Organisation -> the certificate with which it introduced itself, checked; this one's included."""
        known = {**self.introductions, self.name: self.introducer.introduction}
        return {name: each.certificate for name, each in known.items()}

    def _mark(self, phase: bytes) -> bytes:
        """What messages of a phase carry: the same only for those who have signed the same agreement."""
        return hashlib.sha256(phase + self.agreement.encode()).digest()[:PHASE_BYTES]

    def end(self) -> None:
        """Ends the phase; what still arrives for it is dropped."""
        self._past |= {self._phase, self._marked}
        self._phase = self._marked = b""

    # -- sending --------------------------------------------------------------------------------------------

    def tell(self, peer: str, kind: str, **fields: Value) -> None:
        """Sends a control message."""
        self.sessions[peer].post(Kind.CONTROL, pack(kind, fields))

    def tell_all(self, kind: str, **fields: Value) -> None:
        """Sends a control message to everybody else."""
        for peer in self.sessions:
            self.tell(peer, kind, **fields)

    def post(self, message: Packet) -> None:
        """Puts a role's message on its way."""
        host = self.hosts.get(message.receiver)
        if host is None:
            raise ProtocolError(
                f"{message.sender} sends {message.kind!r} to unknown address {message.receiver!r}"
            )
        if host == self.name:
            self.links[message.receiver].deliver(message)
            return
        content = self._marked + message.to_bytes()
        self.messages += 1
        self.bytes += len(content) - PHASE_BYTES
        self.observe(message)
        if host in self._direct:
            self.sessions[host].post(Kind.DATA, content)
            return
        cipher = self._ciphers[host]
        fields: dict[str, Value] = {
            "from": self.name,
            "to": host,
            "by": self.incarnation,
            "for": self.introductions[host].incarnation,
            "via": cipher.via,
            "sealed": cipher.seal(content, self.agreement),
        }
        self.sessions[self.coordinator].post(Kind.RELAY, pack("relay", fields))

    # -- receiving ------------------------------------------------------------------------------------------

    def _decode(self, peer: str, frame: Frame) -> Any:
        """What a frame holds, checked for its form; nothing changes here, whatever it is."""
        if frame.kind is Kind.DATA:
            return self._read_data(peer, frame.payload)
        if frame.kind is Kind.RELAY:
            return unpack(frame.payload)
        if self.coordinator not in (peer, self.name):
            raise ProtocolError(f"{peer} is not the coordinator and sends a control message")
        return read_control(frame.payload, OF_COORDINATOR if peer == self.coordinator else OF_MEMBERS)

    def _frame(self, peer: str, frame: Frame, content: Any) -> None:
        if frame.kind is Kind.DATA:
            self._data(peer, *content)
        elif frame.kind is Kind.RELAY:
            self._relay(peer, frame.payload, *content)
        else:
            kind, fields = content
            self._control(peer, kind, fields, len(frame.payload))

    def _make_room(self, peer: str, size: int) -> None:
        """Every peer has a bound of its own, so that one that floods costs nobody else a message."""
        waiting = self._early_bytes[peer] + self.control.bytes[peer]
        for link in self.links.values():
            waiting += link.backlog[peer]
        if waiting + size > MAX_UNREAD:
            raise Flood(f"{peer} floods: {waiting:,} bytes wait, and {size:,} more come")

    def _control(self, peer: str, kind: str, fields: dict[str, Any], size: int) -> None:
        self._make_room(peer, size + CONTROL_COST)
        self.control.hear((peer, kind, fields), size + CONTROL_COST)

    @staticmethod
    def _read_data(peer: str, content: bytes) -> tuple[bytes, Packet]:
        """Mark of the phase, and the message, with the bytes of memory that it takes while it waits."""
        if len(content) < PHASE_BYTES:
            raise WireError(f"{peer} sends a message without a phase")
        try:
            message = Packet.from_bytes(content, PHASE_BYTES)
        except WireError as error:  # it says what is wrong with bytes, not whose they are
            raise WireError(f"{peer} sends what cannot be read: {error}") from error
        message.weight = len(content) + FRAME_COST
        return content[:PHASE_BYTES], message

    def _data(self, peer: str, phase: bytes, message: Packet) -> None:
        if phase == self._marked:
            self._make_room(peer, message.weight)
            self._deliver(peer, message)
            return
        if self.hosts and (message.sender, message.receiver) != (peer, self.name):
            self._check_addresses(peer, message)  # else of a meeting, perhaps, which has not begun here
        if phase not in self._past:
            self._make_room(peer, message.weight)
            self._early.append((phase, peer, message))
            self._early_bytes[peer] += message.weight

    def _check_addresses(self, peer: str, message: Packet) -> None:
        """A peer speaks for the roles that it hosts, to roles here, and shows its own ledger alone."""
        if self.hosts.get(message.sender) != peer or message.receiver not in self.links:
            raise ProtocolError(f"{peer} sends as {message.sender!r} to {message.receiver!r}")
        if message.head is not None and message.head.owner != peer:
            raise ProtocolError(f"{peer} shows a ledger of {message.head.owner!r}")

    def _deliver(self, peer: str, message: Packet) -> None:
        self._check_addresses(peer, message)
        if message.head is not None and (known := self.shown.pop(peer, None)) is not None:
            self._compare(peer, known, message.head)
        self.links[message.receiver].deliver(message)
        self.observe(message)

    def _compare(self, peer: str, known: Head, head: Head) -> None:
        """The first ledger head of a process is above all that earlier processes have shown, or the same."""
        if head.position < known.position or (head.position == known.position and head != known):
            self.on_older(peer, known, head)

    def _relay(self, peer: str, payload: bytes, kind: str, fields: dict[str, Value]) -> None:
        sender, receiver = fields.get("from"), fields.get("to")
        by, process, via, sealed = (fields.get(key) for key in ("by", "for", "via", "sealed"))
        if kind != "relay" or not all(isinstance(each, bytes) for each in (by, process, via, sealed)):
            raise WireError(f"{peer} relays nothing")
        if not isinstance(sender, str) or not isinstance(receiver, str):
            raise WireError(f"{peer} does not say what it relays to whom")
        if self.name == self.coordinator:
            if sender != peer or receiver not in self.sessions or receiver == peer:
                raise ProtocolError(f"{peer} relays from {sender!r} to {receiver!r}")
            # What was for an earlier process, or sealed for an earlier one of ours, is void.
            if (process, via) == (self.sessions[receiver].incarnation, self.incarnation):
                self.sessions[receiver].post(Kind.RELAY, payload, origin=peer)
            return
        if peer != self.coordinator or receiver != self.name or sender not in self.sessions:
            raise ProtocolError(f"{peer} relays from {sender!r} to {receiver!r}")
        known, cipher = self.introductions.get(sender), self._ciphers.get(sender)
        if known is None or cipher is None:
            return
        if (by, process, via) == (known.incarnation, self.incarnation, cipher.via):
            plain = cipher.open(sealed, self.agreement)  # type: ignore[arg-type]
            self._data(sender, *self._read_data(sender, plain))

    async def close(self) -> None:
        """Ends all connections."""
        await self.transport.close()
