"""Drives the machines of secure sums over links, inside asynchronous roles.

Each role that takes part owns a `SumParticipant`. It agrees on keys once per process (where sums go on
without parties that are gone, anew in every phase, so that these can come back), then carries one machine per
protocol address and round. Every envelope that leaves the role travels as a message of its own,
kind and fields as the protocol made them, so that views hold exactly what each observer got. Rounds are
demand-driven: whoever needs a total announces the records, every party joins with what its model gives now.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from securevfl.algorithms.base import ABSENT, Setup
from securevfl.algorithms.channels import Channel
from securevfl.algorithms.exchange import Exchange
from securevfl.algorithms.messages import SumOwn, SumRequest, SumResult
from securevfl.errors import DropoutError, EncodingError, ProtocolError, TrainingDiverged
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Accounted, Contribution, Inside, Passed
from securevfl.privacy.rows import Rows
from securevfl.privacy.views import OPENED
from securevfl.protocols.contract import SETUP_ROUND, Address, Envelope, Machine, Node
from securevfl.protocols.sums.pairwise_aggregator import RecoveringAggregator
from securevfl.protocols.wire import Value
from securevfl.settings.protocols import FACTS

Floats = npt.NDArray[np.float64]

REQUEST = "sum-request"
"""Kind of the message that announces a round."""
WINDOW = 1 << 12  # more rounds than are ever under way at once


def read_request(packet: Packet) -> SumRequest:
    """Reads an announcement; whoever computes something from its records looks whether they exist."""
    fields: Mapping[str, Any] = packet.fields
    return SumRequest(
        channel=str(fields["channel"]),
        number=fields["round"],
        rows=packet.rows,
        purpose=str(fields["purpose"]),
        requester=str(fields["for"]),
        name=fields.get("name"),
    )


class Total(NamedTuple):
    """What the receiver of a round has.

    Attributes:
        passed: What came out of the secure sum.
        own: The receiver's own part, which stayed at home; zeros where it went into the sum like all others.
        missing: Parties that dropped out, whose values are not in the sum.
    """

    passed: Passed
    own: Floats
    missing: tuple[str, ...] = ()

    @property
    def summed(self) -> Floats:
        """What came out of the secure sum, as numbers."""
        values: Floats = self.passed.values
        return values

    @property
    def values(self) -> Floats:
        """The sum over all parties that are not missing."""
        return self.summed + self.own

    @property
    def given(self) -> Passed:
        """The sum, to be handed on.

        Raises:
            ProtocolError: The receiver's own part is not in it.
        """
        if self.own.any():
            raise ProtocolError("a total is handed on without the receiver's own part, which stayed at home")
        return self.passed


@dataclass(eq=False)
class _Round:
    """One round at one participant: its machines, and at the receiver the parts of the total.

    Of the receiver's own party, `own` stayed at home and `entered` went into the sum.
    """

    begun: bool = False
    machines: dict[Address, Accounted] = field(default_factory=dict)
    early: list[tuple[Packet, Envelope]] = field(default_factory=list)
    own: Floats | None = None
    entered: Floats | None = None
    result: Floats | None = None
    missing: tuple[str, ...] = ()
    total: asyncio.Future[Total] | None = None


class SumParticipant:
    """One role's part in all channels of a run.

    The role hands its link over: it takes messages from `receive`, which works off everything that belongs to
    sums, and never from the link itself.

    Args:
        setup: What the run is built from.
        address: The role's address.
        channels: All channels of the run.
    """

    def __init__(self, setup: Setup, address: str, channels: Iterable[Channel]) -> None:
        self.address = address
        self.link = setup.links[address]
        self.gate = setup.gates[setup.hosts[address]]
        self.parties = setup.data.parties
        self.width = setup.plan.embedding
        self.clock = setup.clock
        self.view = setup.views.get(setup.hosts[address])
        self.authenticate = setup.authenticate
        self.channels = {channel.name: channel for channel in channels}
        self.exchanges = {
            name: Exchange(
                self.link,
                each.places,
                each.protocol.read,
                channel=name,
                totals=self.gate.totals,
            )
            for name, each in self.channels.items()
        }
        self.kinds = {kind.kind for channel in self.channels.values() for kind in channel.protocol.messages}
        self._receivers = {name: each.protocol.receivers for name, each in self.channels.items()}
        self._own = {name for name, each in self.channels.items() if setup.hosts[address] == each.receiver}
        self.number = -1
        self._nodes: dict[tuple[str, Address], Node] | None = None
        self._rounds: dict[tuple[str, int], _Round] = {}
        self._early: deque[Packet] = deque()
        self._renews = any(channel.recovers for channel in self.channels.values())
        self._everybody = False
        self.gone: set[str] = set()

    def state(self) -> dict[str, Any]:
        """The number of the last round, as explicit data; keys live in this process alone."""
        return {"number": self.number}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up a saved state."""
        self.number = int(state["number"])

    # -- before the first round -----------------------------------------------------------------------------

    async def begin(self, *, everybody: bool = False) -> None:
        """Starts a phase: forgets what a broken-off one left behind, and agrees on keys if that is due.

        All participants begin a phase together. Keys live in this process alone; a resumed run agrees anew.
        Where sums go on without parties that are gone, every phase has keys of its own, among those present:
        whoever was away, perhaps as a process that has ended, takes part again.

        Args:
            everybody: True for a phase whose sums need all parties, whatever the protocol.
        """
        self._early.clear()
        self._rounds.clear()
        self._everybody = everybody
        if self._nodes is not None and not self._renews:
            return
        self.gone.clear()
        first = self._nodes is None
        self._nodes = {
            (name, address): channel.node(address, self.authenticate)
            for name, channel in self.channels.items()
            for address, place in channel.places.items()
            if place == self.address
        }
        if first:
            self._note_handlers()
        for name in self.channels:
            exchange, head = self.exchanges[name], self.gate.ledger.head
            agreed = {
                address: machine
                for address, node in self._here(name)
                if (machine := exchange.agree(node, head)) is not None
            }
            if agreed:
                await self._run(name, SETUP_ROUND, agreed)
        while any(number == SETUP_ROUND for _, number in self._rounds):
            await self._pump()

    def _here(self, name: str) -> list[tuple[Address, Node]]:
        """This role's nodes in a channel; those without an input first, as they only wait for others."""
        if self._nodes is None:
            raise ProtocolError(f"{self.address} takes part in a sum before it began")
        return sorted((address, node) for (each, address), node in self._nodes.items() if each == name)

    def _note_handlers(self) -> None:
        """Writes down, once, who passes this party's contributions on under which assumption."""
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        for channel in self.channels.values():
            handlers = channel.handlers(self.address) if self.address in self.parties else ()
            if handlers:
                found[FACTS[channel.kind].hides, channel.assumption].update(handlers)
        for (mechanism, assumption), observers in found.items():
            names = tuple(sorted(observers))
            self.gate.hide(mechanism=mechanism, observers=names, assumption=assumption)

    def channel(self, name: str) -> Channel:
        """The channel of that name.

        Raises:
            ProtocolError: The run has none.
        """
        if name not in self.channels:
            raise ProtocolError(f"this run has no sum for {name!r}")
        return self.channels[name]

    # -- taking part ----------------------------------------------------------------------------------------

    async def receive(self) -> Packet:
        """The next message that does not belong to a sum."""
        while True:
            if self._early:
                message = self._early.popleft()
                self.link.let_go(message)
            else:
                message = await self.link.receive()
            if not await self._absorb(message):
                return message

    async def announce(
        self,
        rows: Rows,
        purpose: str,
        *,
        channel: str,
        requester: str = "",
        skip: tuple[str, ...] = (),
        name: str | None = None,
    ) -> SumRequest:
        """Announces a new round to all parties that are present.

        Only one role of a run announces, so that round numbers never repeat.

        Args:
            rows: Records whose values are summed.
            purpose: What the release is for.
            channel: Who obtains the total.
            requester: On whose behalf; by default the one who obtains it.
            skip: Parties that learn of the round in another way.
            name: Of a scoring service: the request's.
        """
        self._check_present(channel)
        self.number += 1
        request = SumRequest(
            channel=channel,
            number=self.number,
            rows=rows,
            purpose=purpose,
            requester=requester or channel,
            name=name,
        )
        for party in self.parties:
            if party not in skip and party not in self.gone:
                await self.link.send(party, request)
        return request

    async def total(self, rows: Rows, purpose: str) -> Total:
        """Announces a round, waits, and returns the total over all parties, one row per record.

        Parties that drop out meanwhile are missing from the total where the protocol recovers; it says which.
        For a role that has no listener beside it; other messages are kept for `receive`.
        """
        request = await self.announce(rows, purpose, channel=self.address)
        await self.open(request)
        return await self.obtain(request)

    async def obtain(self, request: SumRequest) -> Total:
        """Waits for the total of a round that this role receives and takes part in already.

        Like `total`, for a role that has no listener beside it; other messages are kept for `receive`.
        """
        future = self._future(request)
        while not future.done():
            await self._pump()
        return self._close(request)

    async def join(self, request: SumRequest, given: Contribution | Inside) -> None:
        """Takes part in an announced round with this party's values, or with none where they stay inside."""
        self._check_present(request.channel)
        channel, exchange = self.channel(request.channel), self.exchanges[request.channel]
        shape = given.values.shape
        at_home = isinstance(given, Inside)
        entering = self.gate.abstain(shape, noise=channel.noise) if isinstance(given, Inside) else given
        machines = {}
        try:
            for address, node in self._here(request.channel):
                if address >= 0:
                    machine = exchange.enter(node, entering, round=request.number)
                else:
                    machine = exchange.attend(node, round=request.number, shape=shape, head=entering.head)
                machines[address] = machine
        except EncodingError as error:
            raise TrainingDiverged(
                f"{self.address}: values are too large for protocol {channel.kind!r}; lower the learning "
                f"rate or scale the features ({error})"
            ) from error
        if channel.name in self._own:
            own = SumOwn(
                channel=channel.name,
                round=request.number,
                values=Inside(values=given.values if at_home else np.zeros(shape)),
                entered=Inside(values=entering.values),
            )
            await self._hand_over(channel, own)
        await self._run(request.channel, request.number, machines)

    async def open(self, request: SumRequest) -> None:
        """Takes part in an announced round as a role that has no values."""
        shape, head = (len(request.rows), self.width), self.gate.ledger.head
        exchange = self.exchanges[request.channel]
        machines = {
            address: exchange.attend(node, round=request.number, shape=shape, head=head)
            for address, node in self._here(request.channel)
        }
        await self._run(request.channel, request.number, machines)

    async def result(self, request: SumRequest) -> Total:
        """Waits for the total of a round that this role receives, while its listener calls `receive`."""
        await self._future(request)
        return self._close(request)

    async def drop(self, party: str) -> None:
        """Declares a party gone until the next phase. It is never summed as zeros.

        Where the protocol recovers, rounds go on without it and say so; whatever it still sends is ignored.
        Elsewhere rounds that need it fail.

        Raises:
            DropoutError: A round that is under way cannot end without it, or the phase needs everybody.
            ProtocolError: The party is none, or of the organisation that receives the totals.
        """
        if party in self.gone:
            return
        if party not in self.parties:
            raise ProtocolError(f"{party!r} is said to be gone, but is no party")
        mine = [channel for channel in self.channels.values() if channel.name == self.address]
        if any(channel.hosts[party] == channel.receiver for channel in mine):
            raise ProtocolError(
                f"{party} receives the totals; it cannot be gone while {self.address} is here"
            )
        self.gone.add(party)
        if self._everybody:
            raise DropoutError(f"{party} is gone, and this phase needs everybody")
        for (name, number), state in list(self._rounds.items()):
            channel = self.channels[name]
            for machine in list(state.machines.values()):
                for address in _addresses(channel, {party}):
                    await self._leave(channel, machine, address)
            await self._settle(channel, number, state)

    async def _leave(self, channel: Channel, machine: Accounted, address: Address) -> None:
        """Takes a participant out of a round; if too few are left, says by name who is gone."""
        try:
            await self._act(channel, machine, "drop", address)
        except DropoutError as error:
            raise DropoutError(f"without {', '.join(sorted(self.gone))}: {error}") from error

    def _check_present(self, name: str) -> None:
        if self.gone and not self.channel(name).recovers:
            raise DropoutError(
                f"{', '.join(sorted(self.gone))} is gone; a sum without its part would be of another model"
            )

    # -- messages -------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        message = await self.link.receive()
        if not await self._absorb(message):
            self._early.append(message)
            self.link.hold(message)

    async def _absorb(self, message: Packet) -> bool:
        """Works off a message of a sum; False for any other."""
        if message.kind == ABSENT:
            await self.drop(message.sender)
            return False  # the role goes on without it as well
        if message.kind in (SumOwn.kind, SumResult.kind):
            self._take_inside(message)
            return True
        if message.kind not in self.kinds:
            return False
        if message.sender in self.gone:
            return True  # it came too late: the others have opened what takes its masks off
        channel = self._channel_of(message)
        envelope = self.exchanges[channel.name].envelope(message)
        state = self._rounds.setdefault((channel.name, envelope.message.round), _Round())
        if state.begun:
            await self._deliver(channel, envelope)
        else:
            state.early.append((message, envelope))  # the announcement is still under way to this role
            self.link.hold(message)
        return True

    def _channel_of(self, message: Packet) -> Channel:
        channel = self.channels.get(str(message.fields["channel"]))
        if channel is None:
            raise ProtocolError(f"{message.sender} sends {message.kind!r} for no channel of this run")
        return channel

    async def _deliver(self, channel: Channel, envelope: Envelope) -> None:
        key = channel.name, envelope.message.round
        state = self._rounds.setdefault(key, _Round())
        machine = state.machines.get(envelope.receiver)
        if machine is None:
            raise ProtocolError(f"a message of round {key[1]} reached {self.address} after its end")
        await self._act(channel, machine, "receive", envelope)
        await self._settle(channel, key[1], state)

    async def _act(self, channel: Channel, machine: Accounted, what: str, *args: Any) -> None:
        for envelope in await self.exchanges[channel.name].act(machine, what, *args):
            await self._deliver(channel, envelope)

    async def _hand_over(self, channel: Channel, part: SumOwn | SumResult) -> None:
        """Gives the receiver, in the same organisation, its own part or the result."""
        if channel.name != self.address:
            await self.link.send(channel.name, part)
        else:
            entered = part.entered.values if isinstance(part, SumOwn) else None
            self._take(channel, part.round, part.values.values, entered)

    def _take_inside(self, message: Packet) -> None:
        channel = self._channel_of(message)
        if channel.name != self.address or channel.hosts.get(message.sender) != channel.receiver:
            raise ProtocolError(f"{message.sender} is no part of the organisation that obtains this total")
        self._take(channel, message["round"], message["values"], message.fields.get("entered"))

    def _take(self, channel: Channel, number: int, values: Floats, entered: Any) -> None:
        """Takes the receiver's own part and what of it entered the sum; or, if nothing did, the result."""
        state = self._rounds.setdefault((channel.name, number), _Round())
        if entered is None:
            state.result = values.astype(np.float64)
        else:
            state.own, state.entered = values.astype(np.float64), channel.floats(entered)
        self._complete(channel, number, state)

    # -- rounds ---------------------------------------------------------------------------------------------

    async def _run(self, name: str, number: int, machines: Mapping[Address, Accounted]) -> None:
        """Starts machines of a round and feeds them what arrived before."""
        channel = self.channels[name]
        state = self._rounds.setdefault((name, number), _Round())
        state.begun = True
        state.machines.update(machines)
        waiting, state.early = state.early, []
        for address, machine in machines.items():
            await self._act(channel, machine, "start")
            if self.gone:
                present = dict(self._here(name))[address].present
                for gone in _addresses(channel, self.gone) & present:
                    await self._leave(channel, machine, gone)
        for message, envelope in waiting:
            self.link.let_go(message)
            await self._deliver(channel, envelope)
        await self._settle(channel, number, state)

    async def _settle(self, channel: Channel, number: int, state: _Round) -> None:
        """Takes results and puts machines away that are done, and the round with the last of them."""
        for address in [address for address, each in state.machines.items() if each.machine.done]:
            machine = state.machines.pop(address)
            if number != SETUP_ROUND and address in self._receivers[channel.name]:
                state.missing = _missing(channel, machine.machine)
                total = Inside(values=self.gate.totals.open(channel.name, number, machine))
                await self._hand_over(channel, SumResult(channel=channel.name, round=number, values=total))
        if not state.machines and (number == SETUP_ROUND or channel.name != self.address):
            self._rounds.pop((channel.name, number), None)
            self._retire(channel.name, number)

    def _future(self, request: SumRequest) -> asyncio.Future[Total]:
        channel = self.channels[request.channel]
        state = self._rounds.setdefault((channel.name, request.number), _Round())
        state.total = asyncio.get_running_loop().create_future()
        self._complete(channel, request.number, state)
        return state.total

    def _complete(self, channel: Channel, number: int, state: _Round) -> None:
        """Sets the total once the sum and the receiver's own part are there."""
        if state.total is None or state.total.done() or state.result is None:
            return
        if channel.receiver not in self.parties:
            state.own = state.entered = np.zeros(state.result.shape)
        if state.own is not None and state.entered is not None:
            std = self._std(channel, len(state.missing))
            passed = self.gate.total(channel.name, number, std=std)
            if self.view is not None and channel.opens(words=self.view.words):
                others = passed.values - state.entered
                fields: dict[str, Value] = {"channel": channel.name, "round": number, "values": others}
                if state.missing:
                    fields["missing"] = list(state.missing)
                self.view.note(OPENED, fields, address=self.address, time=self.clock.now())
            state.total.set_result(Total(passed, state.own, state.missing))

    def _std(self, channel: Channel, missing: int) -> float:
        """Of the noise in a total."""
        if channel.noise is None:
            return 0.0
        std: float = channel.noise.noise.total_sigma * (1 - missing / channel.protocol.workers) ** 0.5
        return std

    def _close(self, request: SumRequest) -> Total:
        state = self._rounds.pop((request.channel, request.number))
        self._retire(request.channel, request.number)
        if state.total is None:
            raise ProtocolError(f"nobody waited for the total of round {request.number}")
        return state.total.result()

    def _retire(self, name: str, number: int) -> None:
        """Lets nodes forget which rounds they have used, once these are long past."""
        if number > WINDOW and number % WINDOW == 0:
            for _, node in self._here(name):
                node.retire(number - WINDOW)


def _addresses(channel: Channel, parties: set[str]) -> set[Address]:
    """What these parties play in a channel."""
    return {address for address, place in channel.places.items() if place in parties}


def _missing(channel: Channel, machine: Machine) -> tuple[str, ...]:
    """Parties whose values are not in a total."""
    if not isinstance(machine, RecoveringAggregator):
        return ()
    absent = set(range(channel.protocol.workers)) - set(machine.contributors)
    return tuple(channel.places[address] for address in sorted(absent))
