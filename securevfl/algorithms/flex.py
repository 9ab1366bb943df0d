"""Flex-VFL: rounds with a timeout, in which each party takes as many local steps as it can (Alg. 1 and 2).

Castiglia, Wang, Patterson: Flexible Vertical Federated Learning with Heterogeneous Parties, 2023.

At the start of a round every party uploads its embeddings of the round's batch, and the server hands all of
them, with its own model, to everybody (with sum fusion: their sum). Server and parties then train on that
snapshot until the timeout. A round takes twice the latency (the paper's t_comm) plus the timeout.

Each party releases its embeddings of a batch once per round, however many steps follow, but to **all** other
organisations. With private labels only the server sees them: it answers with the gradient, which depends on
the others' embeddings too, and the party's local steps reuse that gradient (Liu et al., FedBCD).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from securevfl.algorithms.base import ONE_ORDER, SERVER, Algorithm, Role, Setup, expect
from securevfl.algorithms.channels import check_holder_sum
from securevfl.algorithms.linear_steps import HeadSteps, loss_slope, others_part, weight_slope, written_out
from securevfl.algorithms.local import Learner, build_local_model, trainable
from securevfl.algorithms.messages import HEAD, Gradient, Snapshot
from securevfl.algorithms.roles import GradientAnswers, SharingParty, SharingServer
from securevfl.algorithms.steps import (
    MOMENTUM,
    Groups,
    PlainSGD,
    decayed,
    fastest_step,
    known_steps,
    regularised,
    speed_of,
)
from securevfl.data import VerticalData
from securevfl.errors import PlanError, ProtocolError
from securevfl.models import Fusion, task_loss
from securevfl.models.encoders import LinearEncoder
from securevfl.privacy.messages import Packet
from securevfl.privacy.payloads import Contribution, Inside, Released
from securevfl.privacy.rows import Rows, fixed
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import PROTOCOLS
from securevfl.transfers import to_device

Floats = npt.NDArray[np.float32]
MOST_STEPS = 10_000
"""Local steps in one round at most: random durations can be arbitrarily short."""
LOCAL_OPTIMISERS = ("sgd", "momentum", "proximal", "decaying")


# -- local steps --------------------------------------------------------------------------------------------


def capacity(timeout: float, pace: float) -> int:
    """Steps of duration `pace` that fit the timeout; at least one, as the algorithm assumes."""
    if timeout >= pace * MOST_STEPS:
        return MOST_STEPS
    # A billionth absorbs the rounding of quotients that are whole numbers, such as 0.3 / 0.1.
    return max(1, math.floor(timeout / pace + 1e-9))


def round_end(begun: float, timeout: float, steps: int, pace: float, *, wait: bool) -> float:
    """When local training ends: after the steps, and not before the timeout where everybody waits for it."""
    return begun + max(timeout if wait else 0.0, steps * pace)


def gradient_weights(kind: str, steps: int, *, rate: float, proximal: float) -> npt.NDArray[np.float64]:
    """The weight w_t of each of a round's gradients, t = 0 .. steps - 1 (Flex-VFL, eq. 6 to 8).

    A round starts from theta_0, takes tau steps, and its whole update can be written as
    ``eta * sum_t w_t g_t``. The weights say how strongly an optimiser amplifies gradients; the adaptive
    algorithm divides its rate by the largest of them.

    Args:
        kind: One of `LOCAL_OPTIMISERS`.
        steps: tau, the number of local steps.
        rate: eta, the round's learning rate.
        proximal: Coefficient mu of the proximal term.
    """
    left = np.arange(steps, 0, -1, dtype=np.float64)  # tau - t
    match kind:
        case "sgd":
            return np.ones(steps)
        case "momentum":
            return np.asarray((1 - MOMENTUM**left) / (1 - MOMENTUM))
        case "proximal":
            # The paper prints the exponent tau - t + 1; its own recursion gives tau - 1 - t.
            return np.asarray((1 - rate * proximal) ** (left - 1))
        case "decaying":
            return np.asarray(1 / np.sqrt(np.arange(1, steps + 1, dtype=np.float64)))
    raise PlanError(f"no weights are known for optimiser {kind!r}; use one of {', '.join(LOCAL_OPTIMISERS)}")


class LocalSGD(PlainSGD):
    """SGD whose memory lasts one round: plain, with momentum, proximal, or with a rate eta / sqrt(t + 1).

    Call `begin` at the start of a round.
    """

    def __init__(self, groups: Groups, *, kind: str, proximal: float) -> None:
        momentum = MOMENTUM if kind == "momentum" else 0.0
        super().__init__(groups, lr=0.0, momentum=momentum)
        self.kind = kind
        self.proximal = proximal
        self.rate = 0.0
        self.taken = 0
        self._anchors: list[Tensor] = []

    def begin(self, rate: float) -> None:
        """Starts a round: forgets momentum, remembers where the round starts."""
        self.state.clear()
        self.rate, self.taken = rate, 0
        if self.kind == "proximal":
            self._anchors = [p.detach().clone() for p in self._parameters()]

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One local step on the gradients that are there."""
        rate = self.rate / math.sqrt(self.taken + 1) if self.kind == "decaying" else self.rate
        with torch.no_grad():
            for parameter, anchor in zip(self._parameters(), self._anchors, strict=False):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter - anchor, alpha=self.proximal)
        for group in self.param_groups:
            group["lr"] = rate
        self.taken += 1
        super().step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # see `PlainSGD`

    @np.errstate(over="ignore", invalid="ignore")  # a model that diverges is refused when it is let out
    def walk(self, weights: Floats, slope: Callable[[Floats], Floats], steps: int) -> Floats:
        """So many steps of one weight without a graph, as `step` takes them; returns where they lead.

        Args:
            weights: Where the round starts.
            slope: The gradient at given weights.
            steps: How many.
        """
        decay, start, memory = float(self.param_groups[0]["weight_decay"]), weights, np.zeros_like(weights)
        for taken in range(steps):
            gradient = slope(weights)
            if self.kind == "proximal":
                gradient = gradient + self.proximal * (weights - start)
            if decay:
                gradient = gradient + decay * weights
            if self.kind == "momentum":
                memory = gradient = MOMENTUM * memory + gradient
            rate = self.rate / math.sqrt(taken + 1) if self.kind == "decaying" else self.rate
            weights = weights - rate * gradient
        return weights

    def largest_weight(self, steps: int) -> float:
        """The largest weight of a round of so many steps at the present rate."""
        if self.kind == "sgd":
            return 1.0  # as all of them
        return float(gradient_weights(self.kind, steps, rate=self.rate, proximal=self.proximal).max())


def build_local_optimiser(module: nn.Module, plan: Plan, name: str) -> LocalSGD | None:
    """The optimiser that the plan gives to a party or to the server; None where there is nothing to learn."""
    groups = regularised(module.named_parameters(), plan, name)
    kind = plan.optimisers.get(name, plan.optimiser)
    return LocalSGD(groups, kind=kind, proximal=plan.settings.proximal) if groups else None


# -- roles --------------------------------------------------------------------------------------------------


class FlexServer(SharingServer):
    """The server: collects embeddings, shares them, takes local steps of its own.

    Args:
        steps: From how many steps fit at each party and at the server, how many all take; None for each its
            own.
        adaptive: True to set everybody's rate from the steps and weights of the round before.
        waits_for_timeout: True where a round lasts at least until the timeout.
    """

    kept = (*SharingServer.kept, "top", "round", "reported", "last_steps", "last_rates")

    def __init__(
        self,
        setup: Setup,
        *,
        steps: Callable[[Mapping[str, int]], int | None],
        adaptive: bool,
        waits_for_timeout: bool,
    ) -> None:
        super().__init__(setup, share_labels=not setup.plan.settings.private_labels)
        self.choose_steps, self.adaptive, self.waits_for_timeout = steps, adaptive, waits_for_timeout
        self.answers = GradientAnswers(setup)
        self.optimiser = build_local_optimiser(setup.head, setup.plan, SERVER)
        self.top = Learner(SERVER, setup.head, self.optimiser)
        self.pace = 1.0 / speed_of(setup.plan, SERVER)
        self.written_out = written_out(setup.head) and len(trainable(setup.head)) == len(
            list(setup.head.parameters())
        )
        self.round = 0
        self.last_steps: dict[str, int] = {}
        self.last_rates: dict[str, float] = {}
        self.reported: list[Any] = [0, 0.0]

    async def _train(self) -> None:
        for _ in range(self.batches.per_pass):
            await self._round(fixed(self.batches.next()))
        self.top.check_finite()

    async def _round(self, rows: Rows) -> None:
        """Algorithm 1, lines 3 to 16."""
        uploads = await self._gather(rows)
        snapshot = await self._snapshot(uploads, rows)
        steps = self._steps(uploads)
        rates = self._rates(uploads)
        gradients, loss = self._gradients(snapshot, rows)
        own = self.setup.plan.losses if self.setup.plan.settings.private_labels else {}
        tables = {} if self.setup.plan.settings.private_labels else self._tables(snapshot)
        for party, message in uploads.items():
            facts = {"steps": steps[party], "rate": rates[party]}
            gradient = self._gradients(snapshot, rows, party)[0] if party in own else gradients
            await self._answer(message, rows, facts, tables, gradient)
        await self._local_steps(snapshot, rows, steps[SERVER], rates[SERVER])
        self.round += 1
        self.last_steps, self.last_rates = steps, rates
        self._count(len(rows) * len(self.parties), loss)

    async def _snapshot(self, uploads: Mapping[str, Packet], rows: Rows) -> Tensor:
        """All parties' embeddings (rows, parties, width); on a secure sum, their sum (rows, width)."""
        if self.secure:
            return await self._total(rows, "embedding")
        return self._table(uploads, len(rows))

    def _steps(self, uploads: Mapping[str, Packet]) -> dict[str, int]:
        capacities = {party: int(message["capacity"]) for party, message in uploads.items()}
        capacities[SERVER] = capacity(self.setup.plan.settings.timeout, self.pace)
        common = self.choose_steps(capacities)
        return capacities if common is None else dict.fromkeys(capacities, common)

    def _rates(self, uploads: Mapping[str, Packet]) -> dict[str, float]:
        """Everybody's learning rate in this round (Alg. 2, line 17: A / (tau * w), of the round before)."""
        setup = self.setup
        rates = {party: setup.rate(party) for party in self.parties} | {SERVER: setup.server_rate}
        rates = {name: rate * decayed(setup.plan, self.round + 1) for name, rate in rates.items()}
        if not self.adaptive:
            return rates
        reports = {party: (int(m["steps"]), float(m["weight"])) for party, m in uploads.items()}
        reports[SERVER] = self._own_report(rates[SERVER])
        return {name: rate / (reports[name][0] * reports[name][1]) for name, rate in rates.items()}

    def _own_report(self, rate: float) -> tuple[int, float]:
        if self.round == 0 and self.optimiser is not None:
            steps = capacity(self.setup.plan.settings.timeout, self.pace)
            self.optimiser.rate = rate
            return steps, self.optimiser.largest_weight(steps)
        steps, weight = self.reported if self.round else (1, 1.0)
        return steps, weight

    def _gradients(self, snapshot: Tensor, rows: Rows, party: str = "") -> tuple[Tensor, float]:
        """Gradients of the mean loss (the run's, or a party's) with respect to the snapshot, and the loss."""
        private = self.setup.plan.settings.private_labels
        inputs = snapshot.clone().requires_grad_(private)
        with torch.set_grad_enabled(private):
            loss = self._mean_loss(self._outputs(inputs), rows, party)
        gradients = torch.autograd.grad(loss, inputs)[0].cpu() if private else snapshot
        return gradients, float(loss.detach())

    def _fused(self, vectors: Tensor) -> Tensor:
        return self.fusion.join_table(vectors) if vectors.ndim == 3 else vectors

    def _outputs(self, vectors: Tensor) -> Tensor:
        outputs: Tensor = self.top.module(self._fused(vectors))
        return outputs

    async def _answer(
        self,
        message: Packet,
        rows: Rows,
        facts: Mapping[str, Any],
        tables: Mapping[str, npt.NDArray[Any]],
        gradient: Tensor,
    ) -> None:
        """Sends the snapshot, or with private labels the gradient, through the label holder's gate."""
        if self.setup.plan.settings.private_labels:
            await self._reply(message, self.answers.content(message.sender, gradient.numpy(), rows, **facts))
            return
        given = self._exact(tables, message.sender, rows=rows, kind="snapshot")
        await self._reply(message, Snapshot(shared=given, **facts))

    def _tables(self, snapshot: Tensor) -> dict[str, npt.NDArray[Any]]:
        """What the parties are sent of a snapshot and of the server's model."""
        summed = self.fusion.kind == "sum" and snapshot.ndim == 3
        shared = snapshot.sum(dim=1) if summed else snapshot
        state = {HEAD + name: tensor for name, tensor in self.top.module.state_dict().items()}
        return {
            name: np.array(tensor.numpy(force=True)) for name, tensor in {"values": shared, **state}.items()
        }

    async def _local_steps(self, snapshot: Tensor, rows: Rows, steps: int, rate: float) -> None:
        begun = self.setup.clock.now()
        if self.optimiser is not None:
            self.optimiser.begin(rate)
            fused = self._fused(snapshot)
            labels, task, chosen = self.labels[self._index(rows)], self.setup.data.task, self.setup.loss()
            if self.written_out:
                head = HeadSteps(self.top.module, fused.numpy())
                slope = loss_slope(task, chosen, labels.numpy(), fixed=head.fixed)
                head.put(self.optimiser.walk(head.weights, weight_slope(head.features, slope), steps))
            for _ in range(0 if self.written_out else steps):
                self.optimiser.zero_grad(set_to_none=True)
                loss = task_loss(task, self.top.module(fused), labels, loss=chosen)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimiser.step()
            self.reported = [steps, self.optimiser.largest_weight(steps)]
            end = round_end(
                begun, self.setup.plan.settings.timeout, steps, self.pace, wait=self.waits_for_timeout
            )
            await self.setup.clock.sleep_until(end)

    def figures(self) -> dict[str, Any]:
        """Rounds so far, and steps and rates of the last one."""
        return {"rounds": self.round, "steps": self.last_steps, "rates": self.last_rates}


class FlexParty(SharingParty):
    """A party. Its embeddings go to everybody; with private labels, only gradients computed from them do.

    Args:
        waits_for_timeout: True where a round lasts at least until the timeout.
    """

    kept = (*SharingParty.kept, "reported")

    def __init__(self, setup: Setup, party: str, *, waits_for_timeout: bool) -> None:
        plan = setup.plan
        private = plan.settings.private_labels
        observers = setup.observers_of_training(party) if private else setup.everyone_but(party)
        model = build_local_model(setup, party, observers=observers)
        self.optimiser: LocalSGD | None = None
        if model.trains:
            model.optimiser = self.optimiser = build_local_optimiser(setup.encoders[party], plan, party)
        super().__init__(setup, party, model=model, observers=observers, share_labels=not private)
        self.waits_for_timeout = waits_for_timeout
        self.head = copy.deepcopy(setup.head).requires_grad_(False)
        self.fusion = Fusion(plan.fusion, plan.widths(setup.data.parties))
        # Somebody's own encoder may be a bare nn.Linear, whose steps are written out for heads alone.
        linear = isinstance(model.encoder, LinearEncoder) and not model.private
        self.written_out = linear and written_out(model.encoder) and (private or written_out(self.head))
        self.reported: list[Any] | None = None

    async def _round(self, rows: Rows) -> None:
        pace = self.delay.draw()
        fits = capacity(self.setup.plan.settings.timeout, pace)
        steps, weight = self._report(fits)
        facts = {"capacity": fits, "steps": steps, "weight": weight}
        answer, released = await self._upload(rows, facts, learning=False)
        begun, steps = self.setup.clock.now(), self._checked_steps(answer)
        self._train(answer, released, rows, steps)
        end = round_end(begun, self.setup.plan.settings.timeout, steps, pace, wait=self.waits_for_timeout)
        await self.setup.clock.sleep_until(end)

    def _report(self, fits: int) -> tuple[int, float]:
        """Steps and largest weight of the round before; for the first one, what this round will have."""
        if self.optimiser is None:
            return 1, 1.0
        if self.reported is None:
            self.optimiser.rate = self.setup.rate(self.address)
            return fits, self.optimiser.largest_weight(fits)
        steps, weight = self.reported
        return steps, weight

    def _checked_steps(self, answer: Packet) -> int:
        steps = int(answer["steps"])
        if steps < 1:
            raise ProtocolError(f"{self.address} was told to take {steps} steps")
        return steps

    def _train(
        self, answer: Packet, released: Released | Contribution | Inside, rows: Rows, steps: int
    ) -> None:
        """The local steps of a round (Alg. 1, lines 12 to 14)."""
        if self.optimiser is None:
            return
        due = Gradient.kind if self.setup.plan.settings.private_labels else Snapshot.kind
        self.optimiser.begin(float(expect(answer, due)["rate"]))
        if self.written_out:
            self._walk(answer, released, rows, steps)
            return
        values = to_device(np.array(answer["values"], np.float32), self.setup.device)
        if due == Snapshot.kind:
            self._take_head(answer)
            values = self._without_own(values, released)
        inputs, private = self.model.records[rows], self.model.private
        labels = None if due == Gradient.kind else self._labels_of(rows)
        for _ in range(steps):
            source = self.model.embed(inputs)
            if labels is None:
                self.model.learn(source, values, rows)
            elif private:
                own = source.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self._loss(own, values, labels), own)
                self.model.learn(source, gradient, rows)
            else:
                self.model.descend(self._loss(source, values, labels))
        self.reported = [steps, self.optimiser.largest_weight(steps)]

    def _walk(
        self, answer: Packet, released: Released | Contribution | Inside, rows: Rows, steps: int
    ) -> None:
        """The local steps of a linear model below a linear head."""
        if self.optimiser is None or not isinstance(self.model.encoder, LinearEncoder):
            raise TypeError(f"the steps of {self.address} are not written out")
        mechanism, weight = self.model.gate.mechanism, self.model.encoder.output.weight
        given: Floats = np.asarray(answer["values"], np.float32)
        if answer.kind == Gradient.kind:
            slope: Callable[[Floats], Floats] = lambda vectors: given  # noqa: E731
        else:
            own = released.source.detach().numpy() if isinstance(released, Contribution) else released.values
            head = {name: self._part(answer, name, each) for name, each in self.head.named_parameters()}
            fixed, mix = others_part(self.fusion, given, own, self.index, head.get("weight"), head["bias"])
            labels, loss = self._labels_of(rows).numpy(), self.setup.loss(self.address)
            slope = loss_slope(self.setup.data.task, loss, labels, fixed=fixed, mix=mix)
        features = self.model.records[rows].numpy()
        down = weight_slope(features, slope, mechanism.clip if mechanism.sigma else None)
        found = self.optimiser.walk(weight.detach().numpy().T, down, steps)
        with torch.no_grad():
            weight.copy_(torch.from_numpy(found.T))
        self.reported = [steps, self.optimiser.largest_weight(steps)]

    def _part(self, answer: Packet, name: str, expected: Tensor) -> Floats:
        """A part of the server's model as it was at the start of the round."""
        found: Floats = np.asarray(answer[HEAD + name], np.float32)
        if found.shape != tuple(expected.shape):
            raise ProtocolError(f"{self.address} received a head whose {name} is of shape {found.shape}")
        return found

    def _take_head(self, answer: Packet) -> None:
        """Loads the server's model as it was at the start of the round."""
        state = {
            name: to_device(np.array(answer[HEAD + name]), self.setup.device)
            for name in self.head.state_dict()
        }
        self.head.load_state_dict(state)

    def _without_own(self, shared: Tensor, released: Released | Contribution | Inside) -> Tensor:
        """The others' part of the snapshot: their sum, or all embeddings, one's own to be replaced."""
        if self.fusion.kind == "sum":
            if isinstance(released, Contribution):
                source: Tensor = released.source
                return shared - source.detach()
            return shared - to_device(np.array(released.values, np.float32), shared.device)
        return shared.transpose(0, 1)

    def _loss(self, own: Tensor, others: Tensor, labels: Tensor) -> Tensor:
        """The batch's mean loss with the party's own, fresh embeddings."""
        if self.fusion.kind == "sum":
            fused = others + own
        else:
            parts = [each[:, :width] for each, width in zip(others, self.fusion.widths, strict=True)]
            fused = self.fusion([own if i == self.index else each for i, each in enumerate(parts)])
        task, chosen = self.setup.data.task, self.setup.loss(self.address)
        return task_loss(task, self.head(fused), labels, loss=chosen)


# -- the algorithms -----------------------------------------------------------------------------------------


class Flex(Algorithm):
    """As many local steps as fit the timeout."""

    name = "flex"
    summary = "each round as many local steps as fit the timeout at each party's speed; shares labels"
    protocols = PROTOCOLS
    optimisers = LOCAL_OPTIMISERS
    adaptive = False
    waits_for_timeout = True
    counts_steps = True

    def needs_everybody(self, plan: Plan) -> str:
        """Rounds are of all parties."""
        return ONE_ORDER

    def check(self, plan: Plan, data: VerticalData) -> None:
        """Secure sums must be possible, and are not kept from round to round; a step must fit the timeout."""
        if plan.protocol != "plain" and plan.encoder_training == "none":
            raise PlanError(
                f"{self.name} sums the same frozen embeddings anew in every pass; "
                "use protocol 'plain' or algorithm 'vafl', which release each record once"
            )
        check_holder_sum(plan, data)
        if self.counts_steps:
            _check_timeout(plan, known_steps(plan, data.parties))

    def steps(self, capacities: Mapping[str, int]) -> int | None:
        """How many steps everybody takes, given how many would fit; None leaves it to each of them."""
        return None

    def answers_with_gradients(self, plan: Plan) -> bool:
        """Only where the labels stay with the server."""
        return plan.settings.private_labels and plan.encoder_training != "none"

    def role(self, setup: Setup, address: str) -> Role:
        """The server, or a party."""
        if address != SERVER:
            return FlexParty(setup, address, waits_for_timeout=self.waits_for_timeout)
        return FlexServer(
            setup, steps=self.steps, adaptive=self.adaptive, waits_for_timeout=self.waits_for_timeout
        )

    def updates(self, plan: Plan, data: VerticalData) -> float:
        """Every local step is an update of all records of the batch."""
        most = max(1, math.floor(plan.settings.timeout / fastest_step(plan, data.parties) + 1e-9))
        return float(plan.epochs * most)


def _check_timeout(plan: Plan, steps: Mapping[str, tuple[float, ...]]) -> None:
    """Raises `PlanError` if the plan says already that no step fits the timeout, or any number of them."""
    if plan.simulation.delays == "poisson":
        raise PlanError(
            "delays 'poisson' has steps that take no time, of which any number would fit the timeout; "
            "use 'constant', 'exponential' or 'trace'"
        )
    for name, durations in steps.items():
        shortest, longest = min(durations, default=math.inf), max(durations, default=0.0)
        # A trace may have rounds in which a party is too busy; it takes its one step late then.
        if plan.simulation.delays != "trace" and longest > plan.settings.timeout * (1 + 1e-9):
            raise PlanError(
                f"timeout {plan.settings.timeout:g} is too short for one local step of {name}, which takes "
                f"{longest:g}; set timeout to at least that or raise its speed"
            )
        if plan.settings.timeout > shortest * MOST_STEPS:
            raise PlanError(
                f"timeout {plan.settings.timeout:g} has room for more than {MOST_STEPS} local steps of "
                f"{name}, which takes {shortest:g} for one; lower timeout"
            )


class FlexAdaptive(Flex):
    """Learning rates follow each party's number of steps and optimiser."""

    name = "flex-adaptive"
    summary = "flex with rates A / (steps * largest weight) from the round before; shares labels"
    adaptive = True


class SyncMin(Flex):
    """Everybody takes as many steps as the slowest can."""

    name = "sync-min"
    summary = "baseline of flex: all take the number of steps that the slowest manages; shares labels"
    waits_for_timeout = False

    def steps(self, capacities: Mapping[str, int]) -> int | None:
        """The slowest one's number."""
        return min(capacities.values())


class SyncMax(Flex):
    """Everybody takes as many steps as the fastest can, however long that lasts."""

    name = "sync-max"
    summary = "baseline of flex: all take the number of steps that the fastest manages; shares labels"
    waits_for_timeout = False

    def steps(self, capacities: Mapping[str, int]) -> int | None:
        """The fastest one's number."""
        return max(capacities.values())

    def updates(self, plan: Plan, data: VerticalData) -> float:
        """The fastest one may be the server."""
        server = 1.0 / speed_of(plan, SERVER)
        return max(super().updates(plan, data), float(plan.epochs * capacity(plan.settings.timeout, server)))


class PBCD(Flex):
    """Parallel block coordinate descent: one step per round."""

    name = "p-bcd"
    summary = "baseline of flex: one local step per round; shares labels"
    waits_for_timeout = False
    counts_steps = False

    def steps(self, capacities: Mapping[str, int]) -> int | None:
        """One."""
        return 1

    def updates(self, plan: Plan, data: VerticalData) -> float:
        """One per round."""
        return float(plan.epochs)
