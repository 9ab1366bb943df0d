"""What every algorithm shares: the setup it is built from, and the contract of its roles.

An algorithm is a set of asynchronous roles. A role reads another party's state only from messages. Between
epochs all messages are drained and a role is nothing but the data that `state` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from securevfl.data import VerticalData
from securevfl.errors import ProtocolError, RunError
from securevfl.privacy.gate import Gate
from securevfl.privacy.messages import Clock, Packet
from securevfl.privacy.payloads import Link
from securevfl.privacy.schemas import SERVER as SERVER
from securevfl.privacy.views import ViewWriter
from securevfl.protocols.contract import Address
from securevfl.protocols.keys import Authenticator
from securevfl.settings.plan import Plan

ABSENT = "absent"
"""Kind of the message by which the runtime tells the server that its sender is away until the phase ends."""
ONE_ORDER = (
    "all parties walk through the records in one order, and one that was away would have lost its place"
)
"""Why an algorithm with one schedule for all needs everybody."""


Authenticate = Callable[[str, Mapping[Address, str]], Authenticator]
"""Makes what signs the keys of a secure sum, from the sum's name and the organisation of each worker."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is, for whoever shows it."""

    epoch: int
    epochs: int
    done: float
    loss: float | None
    time: float
    spent: Mapping[str, float]
    test: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that roles are built from.

    Attributes:
        plan: The resolved plan.
        data: The scaled data.
        label_holder: Organisation that holds the labels and hosts the server role.
        hosts: Address -> organisation.
        encoders: Each party's encoder.
        head: The server's model.
        gates: Organisation -> its gate.
        links: Address -> its link.
        clock: The runtime's clock.
        device: Where tensors live.
        report: Called with (records processed, loss) after each server step, where somebody watches; None
            for a loss nobody knows.
        views: Organisation -> its view, where it is recorded. What crosses organisations is recorded by the
            runtime; a role writes down only what it works out with secrets of its own.
        authenticate: Makes what signs keys that others pass on; None where all roles run in one place.
        agreement: Digest of what all organisations have signed; empty where there is one process.
    """

    plan: Plan
    data: VerticalData
    label_holder: str
    hosts: Mapping[str, str]
    encoders: Mapping[str, nn.Module]
    head: nn.Module
    gates: Mapping[str, Gate]
    links: Mapping[str, Link]
    clock: Clock
    device: torch.device
    report: Callable[[int, float | None], None] | None
    views: Mapping[str, ViewWriter] = field(default_factory=dict)
    authenticate: Authenticate | None = None
    agreement: str = ""

    def observers(self, address: str, party: str) -> tuple[str, ...]:
        """Who sees what `party` sends to `address`: nobody else if both are one organisation.

        `party` may be an organisation that has no address of its own name: a label holder without features.
        """
        host = self.hosts[address]
        return () if host == self.hosts.get(party, party) else (host,)

    def everyone_but(self, party: str) -> tuple[str, ...]:
        """All organisations but the party's own: who sees what is handed on to everybody."""
        return tuple(sorted(set(self.hosts.values()) - {self.hosts[party]}))

    def observers_of_training(self, party: str) -> tuple[str, ...]:
        """Who sees what `party` sends to the server in training, or gradients that are computed from it.

        Gradients for one party depend on all others' embeddings. The label holder's own embeddings reach
        others in its gradients alone, and those pass its own gate.
        """
        direct = self.observers(SERVER, party)
        return self.everyone_but(party) if direct and self.plan.encoder_training != "none" else direct

    def rate(self, party: str) -> float:
        """The party's learning rate."""
        return float(self.plan.learning_rates.get(party, self.plan.learning_rate))

    def loss(self, party: str = "") -> str:
        """The loss that a party descends on; without a name that of the run."""
        return str(self.plan.losses.get(party, self.plan.loss))

    @property
    def server_rate(self) -> float:
        """The server's learning rate."""
        return self.plan.server_learning_rate or self.plan.learning_rate


class Role(ABC):
    """One participant's part of an algorithm."""

    address: str
    setup: Setup
    kept: ClassVar[tuple[str, ...]] = ()
    """Attributes that make up the role between epochs: data, or parts with their own `state` and `load`."""

    async def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Runs once before the first epoch."""

    @abstractmethod
    async def epoch(self) -> None:
        """Trains until the epoch is over and every message it caused is answered."""

    @abstractmethod
    async def evaluate(self) -> None:
        """Lets the label holder evaluate the test part."""

    def test_scores(self) -> np.ndarray[Any, Any] | None:
        """What this role adds to scores of the test part that nobody opens; for a simulation."""
        return None

    def state(self) -> dict[str, Any]:
        """The role as explicit data: numbers, text, arrays, tensors, in nested dictionaries."""
        return {name: _saved(getattr(self, name)) for name in self.kept}

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state.

        Raises:
            RunError: It is the state of a role that keeps something else.
        """
        missing = [name for name in self.kept if name not in state]
        if missing:
            raise RunError(
                f"the saved state of {self.address} has no {', '.join(missing)}: another role or version has "
                "saved it; start the run anew"
            )
        for name in self.kept:
            setattr(self, name, _restored(getattr(self, name), state[name], self.setup.device))


def _saved(value: Any) -> Any:
    if hasattr(value, "state"):
        return value.state()
    return {key: _saved(each) for key, each in value.items()} if isinstance(value, dict) else value


def _restored(present: Any, saved: Any, device: torch.device) -> Any:
    """What an attribute is set to: itself where it takes up a state of its own, else a copy of the data."""
    if hasattr(present, "load"):
        present.load(saved)
        return present
    if isinstance(present, dict):
        return type(present)({key: _restored(present.get(key), each, device) for key, each in saved.items()})
    if isinstance(saved, torch.Tensor):
        return saved.to(device).clone()
    return np.array(saved) if isinstance(saved, np.ndarray) else saved


def expect(message: Packet, *kinds: str, sender: str = "") -> Packet:
    """The message, if it is what is due; the link has checked its fields and who may send it when.

    Raises:
        ProtocolError: It is of another kind, or of another sender where only one may send it.
    """
    if message.kind not in kinds or message.sender != (sender or message.sender):
        raise ProtocolError(
            f"{message.receiver} received {message.kind!r} from {message.sender} out of turn; due is "
            f"{' or '.join(map(repr, kinds))}{f' from {sender}' if sender else ''}"
        )
    return message


class Finished(Role):
    """A role that has nothing left to learn."""

    async def epoch(self) -> None:
        return


class ServerRole(Role):
    """The role that knows the labels, measures, and decides when an epoch is over."""

    address = SERVER

    processed: int
    epochs_done: int
    loss: float | None
    test: dict[str, float | None]
    predictions: Any
    opened: Mapping[str, float | None] = MappingProxyType({})
    """Noisy figures of the last evaluation, where the federation opens no others."""
    test_is: str = ""
    """Where `test` comes from, in words, where that has to be said."""

    def measure(self, outputs: np.ndarray[Any, Any]) -> None:
        """Takes the test part's scores as a simulation knows them; only roles with `test_scores` need it."""
        raise RunError(f"{self.address} measures for itself")

    def figures(self) -> dict[str, Any]:
        """Figures of the algorithm's own for the line of metrics that an epoch adds."""
        return {}

    def conclusions(self) -> dict[str, Any]:
        """What the label holder alone adds to its result; nobody else gets it."""
        return {}

    def absences(self) -> dict[str, int]:
        """Party -> how many sums have gone on without it; those that were always there are left out."""
        return {}


class Algorithm(ABC):
    """A named way to train. Subclasses build roles; they hold no state."""

    name: ClassVar[str]
    summary: ClassVar[str]
    federated: ClassVar[bool] = True
    protocols: ClassVar[tuple[str, ...]] = ("plain",)
    optimisers: ClassVar[tuple[str, ...]] = ("sgd", "momentum", "adam")
    initial_upload: ClassVar[bool] = False
    helpers: ClassVar[tuple[str, ...]] = ()
    """Organisations without data that take part, such as a dealer; each runs the role of the same address."""

    def assistants(self, plan: Plan) -> dict[str, str]:
        """Address -> organisation of the helpers that a plan has."""
        return {name: name for name in self.helpers}

    def constants(self, plan: Plan, members: int) -> dict[str, str]:
        """Name -> digest or value of numbers that come with the package and everybody must compute with.

        Args:
            plan: Completed.
            members: How many organisations have features or labels.
        """
        return {}

    apart: bool = False
    """Whether organisations run in processes of their own, over a network."""

    @abstractmethod
    def role(self, setup: Setup, address: str) -> Role:
        """The role at one address: a party's, a helper's, or the server's at `SERVER`.

        An organisation builds the roles it hosts and no others; of the others' data, gates and links the
        setup may hold nothing.
        """

    def head_at(self, setup: Setup) -> str:
        """Address of the role that trains the head; its organisation keeps the model."""
        return SERVER

    def combine(self, setup: Setup, parties: Sequence[Role]) -> None:  # noqa: B027 - most compute alone
        """Lets parties that run in one process share computations; what each of them sends is the same."""

    def check(self, plan: Plan, data: VerticalData) -> None:  # noqa: B027 - most have nothing to check
        """Raises `PlanError` before anything starts, if the plan does not fit the algorithm."""

    def complete(self, plan: Plan, data: VerticalData) -> Plan:
        """Settles those of the plan's `auto` choices that the algorithm leaves no choice about."""
        return plan

    def arrange(self, plan: Plan, data: VerticalData) -> VerticalData:
        """The data as the algorithm divides it into training and test part, by public facts alone."""
        return data

    def notes(self, plan: Plan, data: VerticalData) -> tuple[str, ...]:
        """What the user should know of how the plan's `auto` choices were settled."""
        return ()

    def tolerates_absence(self, plan: Plan) -> bool:
        """True where training goes on while a party is away; its server then understands ``ABSENT``."""
        return False

    def fewest(self, plan: Plan) -> int:
        """How many parties must stay where training goes on while others are away; 0 sets no limit."""
        return plan.threshold

    def needs_everybody(self, plan: Plan) -> str:
        """Why sums cannot go on without a party (plan field ``threshold``); empty where they can."""
        return "its roles know no steps without one"

    def answers_with_gradients(self, plan: Plan) -> bool:
        """True where the label holder sends gradients of single records, which a defence may change."""
        return False

    def calibrate(self, plan: Plan, data: VerticalData) -> Plan | None:
        """The plan with its noise settled, where the algorithm counts releases in a way of its own."""
        return None

    def passes(self, plan: Plan, data: VerticalData) -> float:
        """How often the busiest party is expected to visit each of its records, rounded up generously."""
        return float(plan.epochs)

    def updates(self, plan: Plan, data: VerticalData) -> float:
        """How many updates of the busiest party's encoder a record is expected to take part in."""
        return self.passes(plan, data)
