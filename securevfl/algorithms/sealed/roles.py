"""The roles of sealed training: parties, the label holder, the dealer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from securevfl.algorithms.base import SERVER, Role, ServerRole, Setup
from securevfl.algorithms.local import Records
from securevfl.algorithms.messages import SealedBegin, SealedHello, SealedOpened, SealedOutputs, SealedReady
from securevfl.algorithms.sealed.card import CardGeometry, CardMember
from securevfl.algorithms.sealed.class_card import ClassCardMember
from securevfl.algorithms.sealed.evaluation import FEDERATED, FIGURES, SIMULATED, UNOPENED, Evaluation
from securevfl.algorithms.sealed.exchange import SealedExchange
from securevfl.algorithms.sealed.member import SealedMember, member_shapes, shared_schedule
from securevfl.algorithms.sealed.settings import DEALER, SealedGeometry
from securevfl.algorithms.sealed.stack import decide
from securevfl.errors import ProtocolError
from securevfl.models import evaluate, metric_names, metrics
from securevfl.privacy.journal import LOCK
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Inside
from securevfl.privacy.rows import Rows
from securevfl.protocols.contract import DEALER as DEALER_PLACE
from securevfl.protocols.contract import SETUP_ROUND, Envelope
from securevfl.protocols.sealed.checked_dealer import CheckedDealer, DealerMachine
from securevfl.protocols.sealed.dealer import SealedDealer
from securevfl.protocols.sealed.messages import Ready
from securevfl.protocols.sealed.protocol import SealedProtocol


def in_label_units(setup: Setup, outputs: Any) -> torch.Tensor:
    """Opened scores as the loss knows them: of regression in the units of the labels, and in their range."""
    values = torch.from_numpy(np.asarray(outputs, np.float64))
    if setup.data.task == "regression":
        low, high = setup.plan.settings.label_low, setup.plan.settings.label_high
        values = low + (values.clamp(-1, 1) + 1) / 2 * (high - low)
    return values.float()


def member_of(setup: Setup, settings: SealedGeometry, address: str) -> SealedMember:
    """The member at an address, by the model."""
    if not isinstance(settings, CardGeometry):
        return SealedMember(setup, settings, address)
    made = ClassCardMember if setup.data.task == "multiclass" else CardMember
    return made(setup, settings, address)


class PartyRole(Role):
    """A party. The label holder's own party tells the server, inside its organisation, how far it is."""

    def __init__(self, setup: Setup, settings: SealedGeometry, party: str) -> None:
        self.address = party
        self.settings = settings
        self.member = member_of(setup, settings, party)
        self._reports = setup.hosts[party] == setup.hosts[SERVER]

    async def prepare(self) -> None:
        self.member.prepare()

    async def epoch(self) -> None:
        await self.member.begin()
        for _ in range(self.settings.iterations):
            count = await self.member.iterate()
            if self._reports:
                await self.member.link.send(SERVER, SealedOpened(count=count))

    async def evaluate(self) -> None:
        if not self.settings.evaluates:
            self.member.conclude()
            return
        figures = await self.member.evaluate()
        if figures is not None:
            await self.member.link.send(SERVER, SealedOutputs(values=Inside(values=figures[None])))
        opened = await self.member.open_held_back()
        if opened is not None:
            await self.member.link.send(SERVER, SealedOutputs(values=Inside(values=opened)))

    def test_scores(self) -> np.ndarray[Any, Any] | None:
        return self.member.tested

    def state(self) -> dict[str, Any]:
        return self.member.state()

    def load(self, state: dict[str, Any]) -> None:
        self.member.load(state)


class SealedServer(ServerRole):
    """The label holder: measures the test part, counts iterations, and is a member if it has no features.

    It never learns a training loss: that would be another release.
    """

    def __init__(self, setup: Setup, settings: SealedGeometry) -> None:
        self.setup, self.settings = setup, settings
        self.link = setup.links[SERVER]
        self.member = None if settings.holds_features else member_of(setup, settings, SERVER)
        self.evaluation = Evaluation(settings=settings)
        self.processed = 0
        self.epochs_done = 0
        self.loss: float | None = None
        self.test: dict[str, float | None] = {}
        self.held_back: np.ndarray[Any, Any] | None = None
        self.simulated: np.ndarray[Any, Any] | None = None

    async def prepare(self) -> None:
        if self.member is not None:
            self.member.prepare()

    async def epoch(self) -> None:
        if self.member is not None:
            await self.member.begin()
        for _ in range(self.settings.iterations):
            if self.member is not None:
                count = await self.member.iterate()
            else:
                count = int((await self._from_home(SealedOpened.kind))["count"])
            self.processed += count * len(self.setup.data.parties)
            if self.setup.report is not None:
                self.setup.report(self.processed, None)
        self.epochs_done += 1

    async def _from_home(self, kind: str) -> Packet:
        message = await self.link.receive()
        if message.kind != kind or self.setup.hosts[message.sender] != self.setup.hosts[SERVER]:
            raise ProtocolError(f"server received {message.kind!r} from {message.sender} out of turn")
        return message

    async def evaluate(self) -> None:
        if not self.settings.evaluates:
            return
        figures = None if self.member is None else await self.member.evaluate()
        if self.member is None and self.evaluation.offered:
            figures = np.array((await self._from_home(SealedOutputs.kind))["values"])[0]
        self.test = dict.fromkeys(metric_names(self.setup.data.task, self.setup.data.outputs))
        if figures is not None:
            self.test |= {
                name: float(value) if math.isfinite(value) else None
                for name, value in zip(FIGURES, figures, strict=True)
            }
        self.opened, self.test_is = dict(self.test), UNOPENED if figures is None else FEDERATED
        if self.evaluation.held and self.epochs_done >= self.setup.plan.epochs:
            self.held_back = np.array((await self._from_home(SealedOutputs.kind))["values"], np.float64)

    def test_scores(self) -> np.ndarray[Any, Any] | None:
        return None if self.member is None else self.member.tested

    def measure(self, outputs: np.ndarray[Any, Any]) -> None:
        """Takes the exact figures of a simulation, which no organisation of the federation knows."""
        data, held = self.setup.data, self.evaluation.held
        if self.held_back is not None:
            self.simulated = np.asarray(outputs, np.float64)[held:, 0]
        self.predictions = in_label_units(self.setup, outputs)[held:]
        labels = torch.from_numpy(np.array(data.y_test[held:]))
        self.test, self.test_is = metrics(data.task, self.predictions, labels), SIMULATED

    def conclusions(self) -> dict[str, Any]:
        """With a stack: what the label holder chooses to use at the end; nobody hears of it."""
        if self.held_back is None:
            return {}
        data, held, holder = self.setup.data, self.evaluation.held, self.setup.label_holder
        own, total = self.held_back.T
        if self.simulated is not None:
            block = data.test[data.parties.index(holder)]
            records = Records(block, block[:0], self.setup.device)
            mine = evaluate(self.setup.encoders[holder], records[np.arange(held, len(data.y_test))])
            own, total = np.append(own, mine[:, 0].cpu().double().numpy()), np.append(total, self.simulated)
        return {"stack": decide(data, own, total, held=held, seed=self.setup.plan.seed)}

    def state(self) -> dict[str, Any]:
        return {
            "member": None if self.member is None else self.member.state(),
            "processed": self.processed,
            "epochs_done": self.epochs_done,
            "test": self.test,
            "opened": dict(self.opened),
            "test_is": self.test_is,
        }

    def load(self, state: dict[str, Any]) -> None:
        if self.member is not None:
            self.member.load(state["member"])
        self.processed, self.epochs_done = int(state["processed"]), int(state["epochs_done"])
        self.test, self.opened, self.test_is = state["test"], state["opened"], state["test_is"]


def dealer_of(protocol: SealedProtocol) -> SealedDealer:
    """The dealer of a protocol."""
    return CheckedDealer(protocol) if protocol.checked else SealedDealer(protocol)


class DealerRole(Role):
    """The dealer: waits until all members are ready, then deals. It learns the schedule and nothing else."""

    address = DEALER

    def __init__(self, setup: Setup, settings: SealedGeometry) -> None:
        self.setup, self.settings = setup, settings
        self.link = setup.links[DEALER]
        self.exchange = SealedExchange(self.link, settings)
        self.batches = shared_schedule(settings)
        self.dealer = dealer_of(self._protocol(0))
        self._dealers: dict[str, SealedDealer] = {}
        self._round = 0
        self._done = 0

    def _protocol(self, done: int) -> SealedProtocol:
        """The configuration after so many epochs; every opening of a scorecard has its own."""
        settings = self.settings
        if isinstance(settings, CardGeometry):
            return settings.protocol_of(settings.opening_after(done))
        return settings.protocol(*member_shapes(self.setup, settings))

    def _session(self, done: int) -> str:
        """What masked operands the next opening uses: those of an earlier one, where it has the same."""
        settings = self.settings
        if isinstance(settings, CardGeometry):
            return settings.session_of(settings.opening_after(done))
        return ""

    async def _hear(self, kind: str) -> list[Packet]:
        """One message of this kind from every member."""
        heard: dict[str, Packet] = {}
        while len(heard) < len(self.settings.members):
            message = await self.link.receive()
            if message.kind != kind or message.sender not in self.settings.members or message.sender in heard:
                raise ProtocolError(f"dealer received {message.kind!r} from {message.sender} out of turn")
            heard[message.sender] = message
        return list(heard.values())

    async def _all_ready(self, round: int) -> None:  # noqa: A002
        for message in await self._hear(SealedReady.kind):
            if (message["round"], message["stage"]) != (round, 0):
                raise ProtocolError(f"{message.sender} is in round {message['round']}, not in {round}")

    async def _serve(self, machine: DealerMachine) -> None:
        """Deals what a checked session or round needs, step by step."""
        await self.exchange.deal(machine.start())
        while not machine.done:
            message = await self.link.receive()
            if message.kind != SealedReady.kind:
                raise ProtocolError(f"dealer received {message.kind!r} from {message.sender} out of turn")
            said = Ready(round=message["round"], stage=message["stage"])
            member = self.settings.members.index(message.sender)
            await self.exchange.deal(machine.receive(Envelope(member, DEALER_PLACE, said)))

    async def _begin(self) -> None:
        """Starts a phase, or a new session if one has lost its."""
        hellos = await self._hear(SealedHello.kind)
        name, protocol = self._session(self._done), self._protocol(self._done)
        kept = self._dealers.pop(name, None)
        fresh = kept is None or not all(hello["session"] for hello in hellos)
        if kept is None or fresh:
            self.dealer = dealer_of(protocol)
        else:
            self.dealer = kept if kept.protocol == protocol else kept.continued(protocol)
        await self._lead(hellos, self.dealer, fresh=fresh)
        shared = {each: dealer for each, dealer in self._dealers.items() if each == "histograms"}
        self._dealers = shared | {name: self.dealer}

    async def _lead(self, hellos: list[Packet], dealer: SealedDealer, *, fresh: bool) -> None:
        """All go on above every round that anybody has used; where masks are new, they are dealt."""
        self._round = max(self._round, *(int(hello["round"]) for hello in hellos))
        for member in self.settings.members:
            await self.link.send(member, SealedBegin(fresh=fresh, round=self._round))
        if fresh:
            await self._all_ready(SETUP_ROUND)
            if isinstance(dealer, CheckedDealer):
                machine = dealer.session()
                self._keep_lock(dealer.lock_key)
                await self._serve(machine)
            else:
                await self.exchange.deal(dealer.setup())

    def _keep_lock(self, key: bytes) -> None:
        """Keeps, where words are to be recorded, what locks the seeds in the members' views."""
        gate = self.setup.gates.get(self.setup.hosts[DEALER])
        if gate is not None and self.setup.plan.record_words:
            gate.keep(LOCK, np.frombuffer(key, np.uint8), std=0.0, where=f"round {self._round}")

    async def _next_round(self) -> int:
        await self._all_ready(self._round)
        self._round += 1
        return self._round - 1

    async def epoch(self) -> None:
        await self._begin()
        for _ in range(self.settings.iterations):
            number = await self._next_round()
            rows = None if self.batches is None else self.batches.next()
            await self._deal(self.dealer, number, rows, more=self._more)
        self._done += 1

    @property
    def _more(self) -> int:
        """How many rounds like this one follow in the session, at least if nobody stops before."""
        alike = self.batches is None and not isinstance(self.settings, CardGeometry)
        return self.settings.plan.epochs - self._done - 1 if alike else 0

    async def _deal(self, dealer: SealedDealer, number: int, rows: Rows | None, more: int = 0) -> None:
        """Deals for one round."""
        if isinstance(dealer, CheckedDealer):
            await self._serve(dealer.iteration(round=number, rows=rows))
        else:
            await self.exchange.deal(dealer.deal(round=number, rows=rows, more=more))

    async def evaluate(self) -> None:
        """Deals for one evaluation, whose masks are its own: those of training stay."""
        evaluation = Evaluation(settings=self.settings)
        if evaluation.offered:
            dealer = dealer_of(evaluation.protocol)
            await self._lead(await self._hear(SealedHello.kind), dealer, fresh=True)
            await self._deal(dealer, await self._next_round(), None)
        if evaluation.held and self._done >= self.settings.plan.epochs:
            await self._begin()
            number = await self._next_round()
            agreed = self.setup.agreement.encode()
            await self.exchange.deal(
                self.dealer.deal_scores(round=number, count=evaluation.held, agreed=agreed)
            )

    def state(self) -> dict[str, Any]:
        return {"batches": None if self.batches is None else self.batches.state(), "done": self._done}

    def load(self, state: dict[str, Any]) -> None:
        self._done = int(state["done"])
        if self.batches is not None:
            self.batches.load(state["batches"])
