"""Scoring on request with a sealed model: one round between the organisations, on masks made ahead.

Every member has its scores of all people ready. The label holder asks the parties for some of them under the
next masks of the pool, adds its own and takes the masks off; while a pool serves, the dealer deals the next.
Members that trained without a dealer share seeds when they come together, and need no other pool.
Exact sums are opened, which no epsilon covers: a person that training has promised anything is refused.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

from securevfl.algorithms.base import SERVER, Algorithm, Finished, Role, ServerRole, Setup
from securevfl.algorithms.messages import End, ScoreAsk, ScoreRefused, SealedReady
from securevfl.algorithms.sealed.card import geometry_of
from securevfl.algorithms.sealed.exchange import SealedExchange, hidden
from securevfl.algorithms.sealed.prediction import ScoringMember, scoring_protocol
from securevfl.algorithms.sealed.roles import in_label_units
from securevfl.algorithms.sealed.settings import DEALER, SealedGeometry, dealing_organisation
from securevfl.algorithms.serving import (
    Dispatcher,
    RecordPlaces,
    Refused,
    Round,
    beside,
    dispatcher_of,
    reason_of,
)
from securevfl.errors import BudgetExceeded, Deviation, ProtocolError, RunError
from securevfl.privacy.messages import Packet
from securevfl.privacy.rows import Rows
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.pairs import PairedParty
from securevfl.protocols.sealed.pool import PairPool, PooledMachine, ScorePool, deal_pool, opened
from securevfl.protocols.sealed.protocol import DEALT, SCORES, MaskedScores, ScoreDeal
from securevfl.settings.plan import Plan


class PoolMember:
    """What a party and the label holder have in common: scores of all people, and the masks dealt so far."""

    def __init__(self, setup: Setup, settings: SealedGeometry, address: str, numbers: Rows) -> None:
        self.scoring = member = ScoringMember(setup, settings, address, numbers)
        self.setup, self.settings, self.address, self.gate = setup, settings, address, member.gate
        self.exchange: SealedExchange = member.exchange
        self.link, self.protocol = self.exchange.link, scoring_protocol(settings)
        self.words = SCORES.encode(member.own_scores(), self.protocol.members)
        self.places = RecordPlaces(numbers)
        self.pools: dict[int, ScorePool] = {}
        self.wanted = -1

    async def begin(self) -> None:
        """Asks for the first masks."""
        await self.want(0)

    async def want(self, number: int) -> None:
        """Tells the dealer, once, that this member is ready for a pool."""
        if number > self.wanted:
            self.wanted = number
            await self.link.send(DEALER, SealedReady(round=number, stage=0))

    async def take_pool(self, message: Packet) -> None:
        """Takes up what the dealer dealt; the first pool asks for the second at once.

        Raises:
            ProtocolError: It is no pool that was asked for.
        """
        deal = self.exchange.envelope(message).message
        if message.sender != DEALER or not isinstance(deal, ScoreDeal) or deal.round != self.wanted:
            raise ProtocolError(f"{self.address} received {message.kind!r} from {message.sender} out of turn")
        agreed = self.setup.agreement.encode()
        self.pools[deal.round] = ScorePool(self.protocol, self.exchange.index, deal, agreed=agreed)
        if not deal.round:
            await self.want(1)

    async def use(self, number: int) -> None:
        """Goes on to a pool: those before it are forgotten, the one after it is wanted."""
        for old in [each for each in self.pools if each < number]:
            del self.pools[old]
        await self.want(number + 1)


class PairMember(PoolMember):
    """The same where nobody deals: the members share seeds, of which they make all masks themselves."""

    async def begin(self) -> None:
        """Shares a seed with everybody, new whenever they come together."""
        await self.exchange.begin(session=False)
        party = PairedParty(self.protocol, self.exchange.index, **self.scoring.nothing())
        setup = hidden(self.exchange, self.gate, party.setup(), self.protocol, self.setup.plan)
        await self.exchange.follow(setup)
        agreed = self.setup.agreement.encode()
        self.pools[0] = PairPool(self.protocol, self.exchange.index, party.seeds, agreed=agreed)

    async def want(self, number: int) -> None:
        """There is one pool, and it has no end."""


def pool_member(setup: Setup, settings: SealedGeometry, address: str, numbers: Rows) -> PoolMember:
    """A member, by who deals."""
    made = PoolMember if settings.dealing == DEALT else PairMember
    return made(setup, settings, address, numbers)


class PoolParty(Finished):
    """A party: answers what the label holder asks."""

    def __init__(self, setup: Setup, settings: SealedGeometry, party: str, numbers: Rows) -> None:
        self.address = party
        self.member = pool_member(setup, settings, party, numbers)
        self.holder = settings.members[settings.label_holder]
        self._early: list[Packet] = []

    async def evaluate(self) -> None:
        member = self.member
        await member.begin()
        while True:
            message = await member.exchange.receive()
            if message.kind == ScoreDeal.kind:
                await member.take_pool(message)
                early, self._early = self._early, []
                for each in early:
                    member.link.let_go(each)
                    await self._asked(each)
            elif message.kind == ScoreAsk.kind and message.sender == self.holder:
                await self._asked(message)
            elif message.kind == End.kind:
                return
            else:
                raise ProtocolError(f"{self.address} received {message.kind!r} from {message.sender}")

    async def _asked(self, message: Packet) -> None:
        """Answers, or says why not; masks that are still under way are waited for."""
        number = message["pool"]
        if number > max(self.member.pools, default=-1) and number <= self.member.wanted:
            self._early.append(message)
            self.member.link.hold(message)
            return
        reason = await self._answer(message)
        if reason:
            refusal = ScoreRefused(round=message["round"], reason=reason)
            await self.member.link.send(self.holder, refusal)

    async def _answer(self, message: Packet) -> str:
        """Opens the scores; returns why it does not."""
        member, name, rows = self.member, message["name"], message.rows
        pool, places = member.pools.get(message["pool"]), member.places.find(rows)
        if places is None:
            return "unknown"
        start = message["start"]
        if pool is None or start < pool.next or len(rows) > pool.left - (start - pool.next):
            return "masks"
        await member.use(pool.round)

        def build(words: Ring) -> PooledMachine:
            return pool.answer(words, round=message["round"], start=start, name=name, rows=rows)

        to = (member.setup.hosts[self.holder],)
        try:
            machine = member.gate.open_scores_once(name, member.words[places], build, rows=rows, observers=to)
        except RunError:
            return "disk"
        except BudgetExceeded as refused:
            return "known" if member.gate.budget.promises(rows) else reason_of(refused)
        await member.exchange.act(machine, "start")
        return ""


@dataclass(kw_only=True, eq=False)
class _Open:
    """A round under way: what is summed so far, who is missing, and why it gives nothing."""

    asked: Round
    pool: ScorePool
    start: int
    total: Ring
    missing: set[str]
    failed: Refused | ProtocolError | None = None


class PoolHolder:
    """The label holder as a member: asks, adds up, and takes the masks off."""

    def __init__(self, setup: Setup, settings: SealedGeometry, numbers: Rows, dispatcher: Dispatcher) -> None:
        address = settings.members[settings.label_holder]
        self.member, self.dispatcher, self.setup = (
            pool_member(setup, settings, address, numbers),
            dispatcher,
            setup,
        )
        self.parties = [each for each in settings.members if each != address]
        self._open: dict[int, _Open] = {}
        self._number = self._pool = 0
        self._dealt = asyncio.Event()

    async def serve(self) -> None:
        """Answers rounds until there are no more."""
        await self.member.begin()
        await beside(self._listen(), self._ask_all())

    async def _ask_all(self) -> None:
        await self._masks(0)  # there are none before every member has taken up its part
        with self.dispatcher.open():
            while (asked := await self.dispatcher.next()) is not None:
                await self._ask(asked)

    async def _ask(self, asked: Round) -> None:
        places = self.member.places.find(asked.rows)
        if places is None:
            self.dispatcher.settle(asked, Refused("unknown", self.setup.label_holder))
            return
        pool = await self._masks(len(asked.rows))
        self._number, start = self._number + 1, pool.next
        total = self.member.words[places] - pool.masks(start, name=asked.name, rows=asked.rows)
        self._open[self._number] = _Open(
            asked=asked, pool=pool, start=start, total=total, missing=set(self.parties)
        )
        question = ScoreAsk(
            round=self._number, name=asked.name, rows=asked.rows, pool=pool.round, start=start
        )
        for party in self.parties:
            await self.member.link.send(party, question)

    async def _masks(self, count: int) -> ScorePool:
        """A pool with enough places."""
        while (pool := self.member.pools.get(self._pool)) is None or pool.left < count:
            if pool is not None:
                self._pool += 1
            if self._pool not in self.member.pools:
                self._dealt.clear()
                await self._dealt.wait()
            await self.member.use(self._pool)
        return pool

    async def _listen(self) -> None:
        while True:
            message = await self.member.exchange.receive()
            if message.kind == ScoreDeal.kind:
                await self.member.take_pool(message)
                self._dealt.set()
            else:
                self._take(message)

    def _take(self, message: Packet) -> None:
        """Takes a party's answer or refusal.

        Raises:
            ProtocolError: It answers nothing that it was asked.
        """
        known = message.kind in (MaskedScores.kind, ScoreRefused.kind)
        state = self._open.get(message["round"]) if known else None
        if state is None or message.sender not in state.missing:
            raise ProtocolError(f"{message.sender} sends {message.kind!r}, which answers no question")
        if message.kind == ScoreRefused.kind:
            state.failed = Refused(message["reason"], self.setup.hosts[message.sender])
        else:
            self._add(state, message)
        state.missing.discard(message.sender)
        if not state.missing:
            del self._open[message["round"]]
            self._settle(state)

    def _add(self, state: _Open, message: Packet) -> None:
        """Adds an answer, if it is one to this question."""
        envelope, asked = self.member.exchange.envelope(message), state.asked
        try:
            state.total = state.total + state.pool.verify(
                envelope.sender,
                cast(MaskedScores, envelope.message),
                start=state.start,
                name=asked.name,
                rows=asked.rows,
            )
        except ProtocolError as found:
            how = found.how if isinstance(found, Deviation) else str(found)
            state.failed = Deviation(how, self.setup.hosts[message.sender])

    def _settle(self, state: _Open) -> None:
        try:
            if state.failed is not None:
                raise state.failed
            found = in_label_units(self.setup, opened(state.total))
        except (Refused, ProtocolError) as error:
            self.dispatcher.settle(state.asked, error)
            return
        self.dispatcher.settle(state.asked, found.double().numpy(force=True))


class HolderParty(Finished):
    """The label holder's own party, for which its server talks."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def evaluate(self) -> None:
        return


class PoolServer(Finished, ServerRole):
    """The label holder: serves, and ends the phase for everybody."""

    def __init__(self, setup: Setup, settings: SealedGeometry, numbers: Rows, dispatcher: Dispatcher) -> None:
        self.link = setup.links[SERVER]
        self.holder = PoolHolder(setup, settings, numbers, dispatcher)

    async def evaluate(self) -> None:
        await self.holder.serve()
        dealers = (DEALER,) if DEALER in self.link.hosts else ()
        for address in (*self.holder.parties, *dealers):
            await self.link.send(address, End())


class ScoreDealerRole(Finished):
    """The dealer: deals a pool whenever all members are ready for it."""

    address = DEALER

    def __init__(self, setup: Setup, settings: SealedGeometry) -> None:
        self.link, self.settings = setup.links[DEALER], settings
        self.exchange, self.protocol = SealedExchange(self.link, settings), scoring_protocol(settings)
        self.agreed = setup.agreement.encode()

    async def evaluate(self) -> None:
        number, ready = 0, set[str]()
        while True:
            message = await self.link.receive()
            if message.kind == End.kind:
                return
            due = (SealedReady.kind, number, 0)
            if (message.kind, message["round"], message["stage"]) != due or message.sender in ready:
                raise ProtocolError(f"dealer received {message.kind!r} from {message.sender} out of turn")
            ready.add(message.sender)
            if ready >= set(self.settings.members):
                await self.exchange.deal(deal_pool(self.protocol, round=number, agreed=self.agreed))
                number, ready = number + 1, set()


class SealedServing(Algorithm):
    """Scores on request with a sealed model; nobody chooses it by name.

    Args:
        numbers: Record index of everybody who may be scored.
        dispatcher: At the label holder: where requests come in.
    """

    name = "score-sealed"
    summary = "applies a sealed model on request"
    helpers = (DEALER,)

    def assistants(self, plan: Plan) -> dict[str, str]:
        """The dealer, if the model was trained with one."""
        return dealing_organisation(plan)

    def __init__(self, numbers: Rows, dispatcher: Dispatcher | None) -> None:
        self.numbers, self.dispatcher = numbers, dispatcher

    def role(self, setup: Setup, address: str) -> Role:
        """The label holder, a party, or the dealer."""
        settings = geometry_of(setup.plan, setup.data)
        if address == DEALER:
            return ScoreDealerRole(setup, settings)
        if address == SERVER:
            return PoolServer(setup, settings, self.numbers, dispatcher_of(self.dispatcher))
        if address == settings.members[settings.label_holder]:
            return HolderParty(address)
        return PoolParty(setup, settings, address, self.numbers)
