"""What every member of sealed training does: sessions, iterations, learning from its totals, predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from securevfl.accountants.records import HELD_BACK
from securevfl.algorithms.base import SERVER, Setup
from securevfl.algorithms.sealed.evaluation import UNKNOWN, Evaluator
from securevfl.algorithms.sealed.exchange import SealedExchange, ahead, hidden
from securevfl.algorithms.sealed.models import OperandRows, SealedModel, build_model, encoder_form, is_linear
from securevfl.algorithms.sealed.rows import Preparation, prepare_rows, records_named
from securevfl.algorithms.sealed.settings import BIAS, SealedGeometry
from securevfl.algorithms.steps import (
    Batches,
    build_delay,
    build_optimiser,
    load_optimiser_state,
    optimiser_state,
)
from securevfl.errors import ProtocolError, TrainingDiverged
from securevfl.models.seeds import numpy_generator
from securevfl.privacy.journal import TOTAL
from securevfl.privacy.payloads import Accounted
from securevfl.privacy.rows import Rows
from securevfl.protocols.contract import Machine
from securevfl.protocols.sealed import party_of
from securevfl.protocols.sealed.checked_party import CheckedParty
from securevfl.protocols.sealed.encrypted import EncryptedParty
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.protocol import DEALT, SealedProtocol

POOL = 4
"""Correlations that are made ahead, at most, beside the round that uses the last one."""

LARGE_BATCH = 1 << 16


def shared_schedule(settings: SealedGeometry) -> Batches | None:
    """The public batches that everybody draws alike; None where each iteration takes all records.

    Large ones are made of blocks of neighbours, so that rows are read and masks are made in pieces.
    """
    if settings.iterations == 1:
        return None
    generator = numpy_generator(settings.plan.seed, "batches", 0)
    size, block = settings.batch, 1
    if size >= LARGE_BATCH:
        block = next(b for b in range(min(8192, size // 32), 0, -1) if size % b == 0)
    return Batches(settings.data.n_train, size, generator, block=block)


class SealedMember:
    """One member's state and behaviour; roles say when.

    Args:
        setup: What the run is built from.
        settings: What all roles agree on.
        address: The member's address.
    """

    def __init__(self, setup: Setup, settings: SealedGeometry, address: str) -> None:
        self.setup, self.settings, self.address = setup, settings, address
        self.index = settings.members.index(address)
        self.link = setup.links[address]
        self.gate = setup.gates[setup.hosts[address]]
        self.exchange = SealedExchange(self.link, settings, self.gate)
        self.observers = tuple(sorted({setup.hosts[m] for m in settings.members} - {setup.hosts[address]}))
        self.batches = shared_schedule(settings)
        self.delay = None if address == SERVER else build_delay(setup, address)
        self.labels = self._labels() if self.index == settings.label_holder else None
        self.preparation: Preparation | None = None
        self.model: SealedModel | None = None
        self.optimiser: torch.optim.Optimizer | None = None
        self.steps = 0
        self.sums: list[Tensor] = []
        self.averaged = 0
        self.evaluator = Evaluator(setup, settings, self.exchange, self.gate, self.observers)
        self.tested: npt.NDArray[np.float64] | None = None
        self._party: SealedParty | None = None
        self._cost = settings.cost(self.index)

    # -- preparation ----------------------------------------------------------------------------------------

    @property
    def _is_static(self) -> bool:
        return self.address == SERVER or is_linear(self.setup, self.address)

    def prepare(self) -> None:
        """Prepares the rows (noisy means pass the gate) and builds the model."""
        if self._is_static and self.address != SERVER:
            biased = self.index == self.settings.label_holder
            clip = self.settings.clips[self.index] * ((1 - BIAS * BIAS) ** 0.5 if biased else 1.0)
            self.preparation = prepare_rows(self.settings, self.index, self.gate, self.observers, clip=clip)
        self._build()

    def _build(self) -> None:
        party = None if self.address == SERVER else self.index
        self.model = build_model(
            self.setup, party, self.preparation, biased=self.index == self.settings.label_holder
        )
        if self.model.static:
            for parameter in self.model.parameters:
                torch.nn.init.zeros_(parameter)
        rate = self.setup.server_rate if party is None else self.setup.rate(self.address)
        rate *= self.settings.unit_rate
        plan = self.setup.plan
        groups = [{"params": self.model.parameters, "weight_decay": plan.l2}]
        self.optimiser = build_optimiser(groups, plan, rate, self.address)

    def _labels(self) -> npt.NDArray[np.float64]:
        """(records, outputs); those of a regression between -1 and 1."""
        data, plan = self.setup.data, self.setup.plan
        if data.task == "multiclass":
            return np.asarray(np.eye(data.outputs)[data.y_train])
        labels = np.asarray(data.y_train, np.float64).reshape(-1, 1)
        if data.task == "regression":
            low, high = plan.settings.label_low, plan.settings.label_high
            labels = np.clip(2 * (labels - low) / (high - low) - 1, -1, 1)
        return labels

    @property
    def ready_model(self) -> SealedModel:
        """The model, which `prepare` or `load` has built."""
        if self.model is None:
            raise ProtocolError(f"{self.address} trains before it has prepared its rows")
        return self.model

    # -- the protocol ---------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Starts a phase: the dealer says where all go on, or that masks are dealt anew.

        A session lasts as long as all processes do and no phase is broken off half-way.
        """
        if await self.exchange.begin(session=self._party is not None):
            self._party = await self._open_session()

    async def _open_session(self) -> SealedParty:
        """Fresh masks for the static operands, and a note of what hides the rest."""
        party = self._new_party(self._protocol())
        machine, plan = party.setup(), self.setup.plan
        await self.exchange.follow(hidden(self.exchange, self.gate, machine, party.protocol, plan))
        return party

    def _new_party(self, protocol: SealedProtocol) -> SealedParty:
        labels = self._session_labels() if protocol.checked else None
        operand = self._operand()
        if protocol.checked and operand is not None:
            operand = operand.astype(np.int32)  # proofs square it
        return party_of(protocol, self.index, operand=operand, labels=labels, noise=self.gate.noise.stream)

    def _session_labels(self) -> npt.NDArray[np.float64] | None:
        """Labels as a checked session proves them, once for all its rounds."""
        return self.labels

    def _protocol(self) -> SealedProtocol:
        return self.settings.protocol(*member_shapes(self.setup, self.settings))

    def _operand(self) -> OperandRows | None:
        """The static operand, if there is one."""
        model = self.ready_model
        return model.operand(None) if model.static else None

    @property
    def _session(self) -> SealedParty:
        if self._party is None:
            raise ProtocolError(f"{self.address} has no session; a phase starts with one")
        return self._party

    # -- training -------------------------------------------------------------------------------------------

    async def iterate(self) -> int:
        """One iteration; returns the number of records in it.

        A session that is checked, or without a dealer, does not outlive an iteration that is broken off, for
        whatever reason: masks, keys and coins serve once, and what was not verified is never judged again.
        """
        party = self._session
        if party.protocol.checked or party.protocol.dealing != DEALT:
            self._party = None
        if self.delay is not None:
            await self.setup.clock.sleep_until(self.setup.clock.now() + self.delay.draw())
        rows = None if self.batches is None else self.batches.next()
        chosen = np.arange(self.setup.data.n_train, dtype=np.int64) if rows is None else rows
        number = self.exchange.round
        await self.exchange.follow(*self._ahead(party, [(number, rows)]))
        machine = self._round(party, rows, chosen)
        sensitivity, sigma = self._price()
        opening = self.gate.open_totals(
            machine,
            rows=chosen,
            sensitivity=sensitivity,
            sigma=sigma,
            kind=self._kind(),
            observers=self.observers,
        )
        await self.exchange.follow(opening, *self._ahead(party, self._upcoming(number + 1)))
        std = party.protocol.total_std(self.index)
        self._learn(self.gate.keep(TOTAL, machine.result(), std=std), len(chosen))
        self._party = party
        return len(chosen)

    def _ahead(self, party: SealedParty, rounds: Sequence[tuple[int, Rows | None]]) -> list[Accounted]:
        """What makes correlations for rounds, unless the first one has its own: then others have, too."""
        if not isinstance(party, EncryptedParty) or not rounds or party.holds(*rounds[0]):
            return []
        return ahead(self.exchange, self.gate, party, rounds, self.setup.plan)

    def _upcoming(self, number: int) -> list[tuple[int, Rows | None]]:
        """The rounds from a number on that correlations are made ahead for."""
        count = min(POOL, self._remaining() - 1)
        batches = [None] * count if self.batches is None else self.batches.upcoming(count)
        return list(enumerate(batches, number))

    def _remaining(self) -> int:
        """Iterations that this session still serves."""
        return self.setup.plan.epochs * self.settings.iterations - self.steps

    def _round(self, party: SealedParty, rows: Rows | None, chosen: Rows) -> Machine:
        model, bound = self.ready_model, self.settings.score_bound(self.index)
        scores = np.clip(model.scores(rows), -bound, bound)
        labels = None if self.labels is None else self.labels[chosen]
        if labels is not None and self.settings.label_range == (0.0, 0.0):
            # Inside the score: what a regression misses, or half a period for the record's own class.
            moved = self.settings.series.period / 2 if self.settings.weighted else -1.0
            scores, labels = scores + moved * labels, np.zeros_like(labels)
        if isinstance(party, CheckedParty):
            return party.round(round=self.exchange.next_round(), rows=rows, scores=scores)
        return party.round(
            round=self.exchange.next_round(),
            rows=rows,
            scores=scores,
            labels=labels,
            operand=None if model.static else model.operand(rows),
        )

    def _price(self) -> tuple[float, float]:
        """Sensitivity and sigma of the next opening."""
        return self._cost

    def _kind(self) -> str:
        """What the ledger calls it."""
        return f"totals ({self.setup.plan.settings.protect})"

    def _learn(self, total: npt.NDArray[np.float64], count: int) -> None:
        """A step on the noisy total, kept within the bound: post-processing of what was opened."""
        model, plan = self.ready_model, self.setup.plan
        if self.optimiser is None:
            raise ProtocolError(f"{self.address} has nothing to learn with")
        model.set_gradients(total, count, ridge=self.settings.ridge)
        self.optimiser.step()
        self.steps += 1
        with torch.no_grad():
            norm = float(torch.sqrt(sum((p.square().sum() for p in model.parameters), torch.zeros(()))))
            if not np.isfinite(norm):
                raise TrainingDiverged(f"{self.address}: weights are not finite; lower the learning rate")
            if norm > plan.settings.weight_bound:
                for parameter in model.parameters:
                    parameter.mul_(plan.settings.weight_bound / norm)
            self._average(model)

    def _average(self, model: SealedModel) -> None:
        total = self.setup.plan.epochs * self.settings.iterations
        if self.steps <= total * (1 - self.setup.plan.settings.average_last):
            return
        if not self.sums:
            self.sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters]
        self.averaged += 1
        for mine, parameter in zip(self.sums, model.parameters, strict=True):
            mine += parameter

    # -- evaluation -----------------------------------------------------------------------------------------

    async def evaluate(self) -> npt.NDArray[np.float64] | None:
        """Opens noisy totals over the test part; the label holder gets figures, where the task has any."""
        self.tested, constant = self._test_scores()
        if not self.evaluator.evaluation.offered:
            return None
        shift = constant if self.index == self.settings.label_holder else 0.0
        return await self.evaluator.open(self.tested, spread=self._spread(), shift=shift)

    async def open_held_back(self) -> npt.NDArray[np.float64] | None:
        """With a stack, at the end: exact scores of the records that were held back, to the label holder.

        Returns:
            At the label holder: its own scores and the sums of all.
        """
        held, data = self.evaluator.evaluation.held, self.setup.data
        if not held or self.tested is None or self.steps < self.setup.plan.epochs * self.settings.iterations:
            return None
        await self.begin()
        rows = np.arange(data.n_train, data.n_train + held, dtype=np.int64)
        machine = self._session.score(
            self.tested[:held],
            round=self.exchange.next_round(),
            agreed=self.setup.agreement.encode(),
            records=records_named(rows),
        )
        if self.index == self.settings.label_holder:  # it only receives
            await self.exchange.follow(machine)
            return np.column_stack([self.tested[:held], machine.result()])
        to = (self.setup.label_holder,)
        await self.exchange.follow(
            self.gate.open_scores(machine, rows=rows, vectors=held, observers=to, kind=HELD_BACK)
        )
        return None

    def conclude(self) -> None:
        """Leaves what was learnt in the modules, where nothing is evaluated."""

    def _test_scores(self) -> tuple[npt.NDArray[np.float64], float]:
        """Scores of the test part by the model as it is now, and the constant in them."""
        model = self.ready_model
        with self._averaged_weights(model):
            return model.test_scores(), model.constant

    def _spread(self) -> float:
        """How far scores spread, by noisy totals alone."""
        return UNKNOWN

    def _averaged_weights(self, model: SealedModel) -> _Averaged:
        finished = self.steps >= self.setup.plan.epochs * self.settings.iterations
        means = [each / self.averaged for each in self.sums] if self.averaged else []
        return _Averaged(model, means, keep=finished)

    # -- state ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but secrets: masks and seeds end with the process."""
        model = self.ready_model
        preparation = self.preparation
        return {
            "parameters": {str(i): p.detach() for i, p in enumerate(model.parameters)},
            "optimiser": {} if self.optimiser is None else optimiser_state(self.optimiser),
            "preparation": None if preparation is None else dict(vars(preparation)),
            "batches": None if self.batches is None else self.batches.state(),
            "delay": None if self.delay is None else self.delay.state(),
            "steps": self.steps,
            "sums": {str(i): each for i, each in enumerate(self.sums)},
            "averaged": self.averaged,
            "evaluations": self.evaluator.done,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a saved state."""
        saved = state["preparation"]
        if saved is not None:
            centre, scale = (np.asarray(saved[name], np.float64) for name in ("centre", "scale"))
            self.preparation = Preparation(centre=centre, scale=scale, clip=float(saved["clip"]))
        self._build()
        with torch.no_grad():
            for number, parameter in enumerate(self.ready_model.parameters):
                parameter.copy_(state["parameters"][str(number)])
        if self.optimiser is not None:
            load_optimiser_state(self.optimiser, state["optimiser"])
        if self.batches is not None:
            self.batches.load(state["batches"])
        if self.delay is not None:
            self.delay.load(state["delay"])
        self.steps, self.averaged = int(state["steps"]), int(state["averaged"])
        self.evaluator.done = int(state["evaluations"])
        self.sums = [state["sums"][str(i)] for i in range(len(state["sums"]))]


class _Averaged:
    """Puts averaged weights into a model for a while, or for good when training is over."""

    def __init__(self, model: SealedModel, means: list[Tensor], *, keep: bool) -> None:
        self._model, self._means, self._keep = model, means, keep
        self._before: list[Tensor] = []

    def __enter__(self) -> None:
        if self._means:
            self._before = [p.detach().clone() for p in self._model.parameters]
            self._write(self._means)

    def __exit__(self, *_: object) -> None:
        if self._before and not self._keep:
            self._write(self._before)

    def _write(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters, values, strict=True):
                parameter.copy_(value)


def member_shapes(setup: Setup, settings: SealedGeometry) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Width of every member's operand and whether it is static: public facts about the models."""
    widths, static = [], []
    for index, name in enumerate(settings.members):
        biased = index == settings.label_holder
        fast = name == SERVER or is_linear(setup, name)
        if name == SERVER:
            width = 1
        elif fast:
            width = setup.data.widths[index] + biased
        else:
            width = sum(p.numel() for p in encoder_form(setup, name).parameters() if p.requires_grad)
        widths.append(int(width))
        static.append(fast)
    return tuple(widths), tuple(static)
