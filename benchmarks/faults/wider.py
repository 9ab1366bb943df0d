"""Faults in rooms that had none.

Plans, scaling, initial models, rates, time, local steps, encrypted sums, gradients of single records,
collusion, stacks, resuming, foreign programs, accountants, carriers, hidden noise.

They were written down, with the cases they apply to, before any of them was run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.faults import places
from benchmarks.faults.contract import fault, swap
from securevfl.accountants import modes
from securevfl.accountants.records import HELD_BACK
from securevfl.algorithms import channels, local, resolve, vafl
from securevfl.algorithms.flex import FlexParty
from securevfl.algorithms.local import LocalModel
from securevfl.algorithms.sealed.stack import given_back
from securevfl.algorithms.sealed.training import Sealed
from securevfl.federation import site
from securevfl.federation.folder import CHECKPOINT, RunFolder
from securevfl.federation.virtual import VirtualCarrier
from securevfl.models.perturbed import HiddenNoise
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.noise import Noise
from securevfl.protocols.sums.homomorphic import HomomorphicMachine

RESUMED, RECORDED, STACK = ("resumed",), ("recorded",), ("sealed-stack",)


def _first(records: Any, rows: Any = None) -> float:
    """The mean of a party's first feature."""
    values = records[np.arange(records.count) if rows is None else rows]
    return float(values.flatten(1)[:, 0].mean())


# -- plans --------------------------------------------------------------------------------------------------


@fault("plans", "the plan that is written down has twice the noise", ("strict", "frozen", "sealed"))
def plan_states_more_noise() -> None:
    def make(honest: Any) -> Any:
        return lambda self, plan: honest(self, plan.with_changes(sigma=2 * plan.sigma))

    swap(RunFolder, "create", make)


@fault(
    "plans",
    "noise is made for a quarter of the openings, and nothing refuses what the target does not pay for",
    ("sealed-target", "sealed-card"),
)
def plan_target_exceeded() -> None:
    def make(honest: Any) -> Any:
        def calibrate(self: Sealed, plan: Any, data: Any) -> Any:
            found = honest(self, plan, data)
            return found.with_changes(sigma=found.sigma / 2)

        return calibrate

    swap(Sealed, "calibrate", make)
    swap(site, "set_budget", lambda honest: lambda gate, plan, *, reserve=0: None)


# -- scaling, initial models, rates -------------------------------------------------------------------------


@fault("scaling", "columns are scaled by all private rows, not by public bounds", ("frozen", "dp-encoder"))
def scaling_by_rows() -> None:
    def make(honest: Any) -> Any:
        return lambda plan, data: replace(data.scaled("standard"), scaling=honest(plan, data).scaling)

    swap(resolve, "_scale", make)


@fault(
    "initial models",
    "a party's first model has its first record's value in a weight",
    ("frozen", "dp-encoder", "strict"),
)
def start_from_rows() -> None:
    def make(honest: Any) -> Any:
        def planned(plan: Any, data: Any, party: str) -> Any:
            encoder = honest(plan, data, party)
            with torch.no_grad():
                rows = np.asarray(data.train[data.parties.index(party)], np.float64)
                next(encoder.parameters()).view(-1)[0] += float(rows[0, 0])
            return encoder

        return planned

    swap(site, "planned_encoder", make)


@fault("rates", "a party's learning rate follows its raw rows", ("strict", "dp-encoder"))
def rate_from_rows() -> None:
    def make(honest: Any) -> Any:
        def init(self: LocalModel, **given: Any) -> None:
            honest(self, **given)
            for group in [] if self.optimiser is None else self.optimiser.param_groups:
                group["lr"] *= 1.5 + _first(self.records)

        return init

    swap(LocalModel, "__init__", make)


# -- time and steps -----------------------------------------------------------------------------------------


@fault("time", "a party takes longer where its raw values are large", ("strict", "frozen"))
def time_of_values() -> None:
    met: dict[str, float] = {}

    def watched(honest: Any) -> Any:
        def release(self: LocalModel, rows: Any, **given: Any) -> Any:
            met[self.name] = max(0.0, _first(self.records, rows))
            return honest(self, rows, **given)

        return release

    def make(honest: Any) -> Any:
        def build(setup: Any, party: str) -> Any:
            delay = honest(setup, party)
            draw = delay.draw
            delay.draw = lambda: draw() * (1 + 0.1 * met.get(party, 0.0))
            return delay

        return build

    swap(LocalModel, "release", watched)
    swap(vafl, "build_delay", make)


@fault("local steps", "a party says it has time for more steps where its raw values are large", ("flex",))
def steps_by_values() -> None:
    def make(honest: Any) -> Any:
        def report(self: FlexParty, fits: int) -> Any:
            steps, weight = honest(self, fits)
            return steps + int(_first(self.model.records) > 0), weight

        return report

    swap(FlexParty, "_report", make)


# -- encrypted sums -----------------------------------------------------------------------------------------


@fault("encrypted sums", "the total that is decrypted is of one worker alone", ("bfv",))
def encrypted_total_of_one() -> None:
    def make(honest: Any) -> Any:
        def add(self: HomomorphicMachine, sender: Any, message: Any) -> Any:
            if self._added:
                self._missing.discard(sender)
                return [] if self._missing else self._send_total()
            return honest(self, sender, message)

        return add

    swap(HomomorphicMachine, "_add", make)


@fault("encrypted sums", "a worker sends the ciphertexts of its first round again in all others", ("bfv",))
def encrypted_once() -> None:
    kept: dict[Any, Any] = {}

    def make(honest: Any) -> Any:
        def packed(self: HomomorphicMachine, shape: Any, ciphertexts: Any) -> Any:
            if self._encoded is not None:
                ciphertexts = kept.setdefault((self.address, tuple(shape)), ciphertexts)
            return honest(self, shape, ciphertexts)

        return packed

    swap(HomomorphicMachine, "_packed", make)


# -- gradients of single records ----------------------------------------------------------------------------


@fault(
    "gradients of records",
    "each tensor of a record's gradient is clipped by itself",
    ("dp-sums", "private-mlp"),
)
def gradient_clip_by_tensor() -> None:
    def make(honest: Any) -> Any:
        def clipped(encoder: Any, inputs: Any, upstream: Any, clip: float, *, noise: Any = None) -> Any:
            sums = None
            for row in range(len(inputs)):
                own = {name: values[row : row + 1] for name, values in dict(noise or {}).items()}
                found = honest(encoder, inputs[row : row + 1], upstream[row : row + 1], 1e6, noise=own)
                found = [each * min(1.0, clip / max(float(each.norm()), 1e-12)) for each in found]
                sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
            return sums

        return clipped

    swap(local, "clipped_gradient_sum", make)


# -- collusion ----------------------------------------------------------------------------------------------


@fault("collusion", "shares of noise are made as if nobody pooled what it sees", ("collusion",))
def collusion_forgotten() -> None:
    def make(honest: Any) -> Any:
        def noisy(protocol: Any, plan: Any) -> Any:
            found, fewer = honest(protocol, plan), honest(protocol, plan.with_changes(collusion=1))
            drawn = fewer.noise.share
            object.__setattr__(found.noise, "share", drawn)
            return found

        return noisy

    swap(channels, "_noisy", make)


# -- stacks -------------------------------------------------------------------------------------------------


@fault("stacks", "the records whose exact scores are opened at the end were trained on, too", STACK)
def stack_of_trained() -> None:
    def make(honest: Any) -> Any:
        def arrange(self: Sealed, plan: Any, data: Any) -> Any:
            held = honest(self, plan, data)
            whole, last = given_back(held), slice(-held.n_train, None)
            return replace(held, train=tuple(each[last] for each in whole.train), y_train=whole.y_train[last])

        return arrange

    swap(Sealed, "arrange", make)


@fault("stacks", "of the records whose exact scores are opened for a stack only the first pays", STACK)
def stack_counts_one() -> None:
    def make(honest: Any) -> Any:
        def append(self: Ledger, record: Any) -> Any:
            if record.kind == HELD_BACK:
                record = replace(record, rows=record.rows[:1], vectors=1)
            return honest(self, record)

        return append

    swap(Ledger, "append", make)


# -- resuming -----------------------------------------------------------------------------------------------


@fault("resumed runs", "a resumed run begins new ledgers, without what was released before", RESUMED)
def resumed_without_ledgers() -> None:
    def make(honest: Any) -> Any:
        def open_gate(name: str, plan: Any, *, folder: Any, **given: Any) -> Any:
            if folder is not None and (folder.path / CHECKPOINT).exists():
                folder.ledger(name).unlink(missing_ok=True)
            return honest(name, plan, folder=folder, **given)

        return open_gate

    swap(site, "open_gate", make)


@fault("resumed runs", "a resumed run draws the noise again that it drew at its beginning", RESUMED)
def resumed_noise_again() -> None:
    def make(honest: Any) -> Any:
        def open_gate(name: str, plan: Any, **given: Any) -> Any:
            gate = honest(name, plan, **given)
            known = Noise.insecure(1, name)
            known.secure = True
            object.__setattr__(gate, "noise", known)
            return gate

        return open_gate

    swap(site, "open_gate", make)


@fault("resumed runs", "after a break noise is a quarter of what entries say", RESUMED)
def resumed_noise_quarter() -> None:
    def make(honest: Any) -> Any:
        return lambda self, shape, std: honest(self, shape, std / 4 if places.broken else std)

    swap(Noise, "gaussian", make)


# -- foreign programs ---------------------------------------------------------------------------------------


@fault("foreign programs", "a recorded program adds no noise", RECORDED)
def foreign_without_noise() -> None:
    swap(places, "foreign_noise", lambda honest: lambda generator, shape, sigma: np.zeros(shape))


@fault("foreign programs", "a recorded program adds half of the noise that it declares", RECORDED)
def foreign_noise_halved() -> None:
    swap(
        places,
        "foreign_noise",
        lambda honest: lambda generator, shape, sigma: honest(generator, shape, sigma / 2),
    )


@fault("foreign programs", "a recorded program adds the same noise in every epoch", RECORDED)
def foreign_noise_again() -> None:
    def make(honest: Any) -> Any:
        kept: list[Any] = []

        def noise(generator: Any, shape: Any, sigma: float) -> Any:
            if not kept:
                kept.append(honest(generator, shape, sigma))
            return kept[0][: shape[0]]

        return noise

    swap(places, "foreign_noise", make)


# -- accountants, carriers, hidden noise --------------------------------------------------------------------


@fault("accountants", "of all that a record pays for only the dearest counts", ("strict", "sealed"))
def accounts_by_the_dearest() -> None:
    def make(honest: Any) -> Any:
        def mu_of(records: Any, mode: str) -> float:
            return max((honest([each], mode) for each in records), default=0.0)

        return mu_of

    swap(modes, "mu_of", make)


@fault("carriers", "every fifth message reaches another organisation, too", ("strict", "sealed", "two-tree"))
def carrier_copies() -> None:
    count = [0]

    def make(honest: Any) -> Any:
        def observe(self: VirtualCarrier, message: Any, time: float) -> None:
            honest(self, message, time)
            count[0] += 1
            ends = {self.hosts[message.sender], self.hosts[message.receiver]}
            others = [name for name in self.sites if name not in ends]
            if others and count[0] % 5 == 0 and self.sites[others[0]].view is not None:
                self.sites[others[0]].view.record(message, time=time, sent=False)

        return observe

    swap(VirtualCarrier, "_observe", make)


@fault("hidden noise", "noise inside the encoder is taken for part of the gate's", ("hidden",))
def hidden_noise_counts() -> None:
    def make(honest: Any) -> Any:
        return lambda self, shape, std: honest(self, shape, 0.7 * std)

    swap(Noise, "gaussian", make)


@fault("hidden noise", "noise inside the encoder is drawn once", ("hidden",))
def hidden_noise_once() -> None:
    kept: dict[Any, Any] = {}

    def make(honest: Any) -> Any:
        def draw(self: HiddenNoise, like: Any) -> Any:
            return kept.setdefault(tuple(like.shape), honest(self, like))

        return draw

    swap(HiddenNoise, "draw", make)
