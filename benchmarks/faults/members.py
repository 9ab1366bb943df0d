"""Faults of sealed runs in which members deal for themselves, of cards for numbers, of several classes and of
profiles; and in rooms that no list names: what files are for, and what a result states.

They were written down, with the cases they apply to, before any of them was run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.faults.contract import fault, swap
from securevfl.algorithms.sealed.card import CardMember
from securevfl.algorithms.sealed.member import SealedMember
from securevfl.algorithms.sealed.settings import SealedGeometry
from securevfl.federation import run as runs
from securevfl.federation.folder import RunFolder
from securevfl.privacy.gate import Gate
from securevfl.privacy.journal import Journal
from securevfl.privacy.ledger import Ledger
from securevfl.protocols.sealed import pairs, party, scoring, third
from securevfl.protocols.sealed.encrypted import EncryptedParty, PoolMachine
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.stream import KeyStream

PAIR, TRIO = ("pair",), ("trio",)
DEALERLESS = ("pair", "trio")
NUMBERS, CLASSES, PROFILE = ("number-card",), ("classes",), ("sealed-profile",)


# -- members deal for themselves ----------------------------------------------------------------------------


def _noise(change: Any) -> None:
    def make(honest: Any) -> Any:
        return lambda self, target: change(self, target, honest(self, target))

    swap(SealedParty, "noise_for", make)


@fault("without a dealer", "members add no noise", DEALERLESS)
def dealerless_noise_off() -> None:
    _noise(lambda member, target, noise: np.zeros_like(noise))


@fault("without a dealer", "each member adds noise to its own total alone", DEALERLESS)
def dealerless_noise_own() -> None:
    _noise(lambda member, target, noise: noise if target == member.index else np.zeros_like(noise))


@fault("without a dealer", "masks of factors and residuals are the same in every round", PAIR)
def pair_masks_again() -> None:
    kept: dict[Any, Any] = {}

    def make(honest: Any) -> Any:
        def new(self: PoolMachine, rows: Any) -> Any:
            made = honest(self, rows)
            first = kept.setdefault(self._party.index, (made.factors, made.blind))
            made.factors, made.blind = first[0].copy(), first[1].copy()
            return made

        return new

    swap(PoolMachine, "_new", make)


@fault("without a dealer", "masks of factors and residuals are one", PAIR)
def pair_masks_one() -> None:
    def make(honest: Any) -> Any:
        def new(self: PoolMachine, rows: Any) -> Any:
            made = honest(self, rows)
            made.factors, made.blind = np.ones_like(made.factors), np.ones_like(made.blind)
            return made

        return new

    swap(PoolMachine, "_new", make)


@fault(
    "without a dealer",
    "ciphertexts are made with randomness that is known",
    PAIR,
    needs="the seed: ciphertexts are those of a sound generator; only the code or its package digest tells",
)
def pair_randomness_known() -> None:
    def make(honest: Any) -> Any:
        def begun(self: EncryptedParty, *given: Any, **options: Any) -> None:
            honest(self, *given, **options)
            self._stream = KeyStream(bytes([7] * 16))

        return begun

    swap(EncryptedParty, "__init__", make)


@fault("without a dealer", "members' rows travel without a mask", TRIO)
def trio_rows_open() -> None:
    def make(honest: Any) -> Any:
        def plain(seed: bytes, purpose: str, *given: Any) -> Any:
            words = honest(seed, purpose, *given)
            return np.zeros_like(words) if purpose.startswith("operand/") else words

        return plain

    swap(third, "expand", make)


@fault("without a dealer", "members' scores travel without a mask", TRIO)
def trio_phases_open() -> None:
    def make(honest: Any) -> Any:
        def plain(seed: bytes, purpose: str, *given: Any) -> Any:
            words = honest(seed, purpose, *given)
            return np.zeros_like(words) if purpose.startswith("phase/") else words

        return plain

    swap(third, "expand", make)


@fault("without a dealer", "all pairs of members share the same seed", TRIO)
def trio_seed_shared() -> None:
    class Fixed:
        def urandom(self, size: int) -> bytes:
            return bytes([9] * size)

    swap(pairs, "os", lambda honest: Fixed())


@fault("without a dealer", "that members hand each other masked values is not written down", DEALERLESS)
def dealerless_unwritten() -> None:
    def make(honest: Any) -> Any:
        def hide(self: Gate, machine: Any = None, *, observers: Any, **said: Any) -> Any:
            budget, self.budget = self.budget, _Silent(self.ledger)
            try:
                return honest(self, machine, observers=observers, **said)
            finally:
                self.budget = budget

        return hide

    swap(Gate, "hide", make)


class _Silent:
    """In the place of a budget: nothing is written."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def spend(self, record: Any, write: Any) -> Any:
        return self._ledger.released


@fault("without a dealer", "predicted scores travel without masks", ("pair-predicted",))
def pair_prediction_open() -> None:
    for module in (pairs, scoring):
        swap(module, "score_mask", lambda honest: lambda *given: np.zeros_like(honest(*given)))


@fault("without a dealer", "the second member's rows are twice as long as was agreed on", DEALERLESS)
def dealerless_rows_longer() -> None:
    def make(honest: Any) -> Any:
        def longer(self: SealedMember) -> Any:
            operand = honest(self)
            return 2 * operand if self.index == 1 else operand

        return longer

    swap(SealedMember, "_operand", make)
    swap(party, "check_operand", lambda honest: lambda *given, **options: None)


# -- cards for numbers --------------------------------------------------------------------------------------


def _opened(opening: str, change: Any) -> None:
    """Noise in the rounds of one kind of opening becomes change(noise)."""

    def make(honest: Any) -> Any:
        def round(self: CardMember, made: Any, rows: Any, chosen: Any) -> Any:  # noqa: A001
            if self.opening == opening:
                sound = made.noise_for
                made.noise_for = lambda target: change(sound(target))
            try:
                return honest(self, made, rows, chosen)
            finally:
                if self.opening == opening:
                    del made.noise_for

        return round

    swap(CardMember, "_round", make)


@fault("cards for numbers", "the histogram of labels has no noise", NUMBERS)
def numbers_histogram_exact() -> None:
    _opened("labels", np.zeros_like)


@fault("cards for numbers", "the histogram of residuals has half of its noise", NUMBERS)
def numbers_residuals_halved() -> None:
    _opened("residuals", lambda noise: (noise.view(np.int64) // 2).view(np.uint64))


@fault("cards for numbers", "the constant is the exact mean of the labels", NUMBERS)
def numbers_constant_exact() -> None:
    def make(honest: Any) -> Any:
        def taken(self: CardMember, total: Any) -> None:
            honest(self, total)
            if self._holds_labels:
                self.bias = float(np.mean(self.labels))

        return taken

    swap(CardMember, "_take_histogram", make)


@fault("cards for numbers", "labels outside of their public bounds are used as they are", NUMBERS)
def numbers_labels_unbounded() -> None:
    def make(honest: Any) -> Any:
        def labels(self: SealedMember) -> Any:
            plan, found = self.setup.plan.settings, np.asarray(self.setup.data.y_train, np.float64)
            return (2 * (found - plan.label_low) / (plan.label_high - plan.label_low) - 1).reshape(-1, 1) * 3

        return labels

    swap(SealedMember, "_labels", make)


@fault("cards for numbers", "all openings are counted at a third of their cost", NUMBERS)
def numbers_cost_third() -> None:
    def make(honest: Any) -> Any:
        def price(self: CardMember) -> tuple[float, float]:
            sensitivity, sigma = honest(self)
            return sensitivity / 3, sigma

        return price

    swap(CardMember, "_price", make)


# -- several classes ----------------------------------------------------------------------------------------


@fault("several classes", "noise is made for one class, and there are three", CLASSES)
def classes_counted_as_one() -> None:
    def make(honest: Any) -> Any:
        def shifts(self: SealedGeometry) -> Any:
            found = honest(self)
            smaller = {"residual_bound", "residual_change", "label_change"}
            return replace(found, **{name: getattr(found, name) / np.sqrt(3) for name in smaller})

        return shifts

    swap(SealedGeometry, "_class_shifts", make)


@fault("several classes", "only the first class gets noise", CLASSES)
def classes_noise_first() -> None:
    def change(member: Any, target: int, noise: Any) -> Any:
        noise[:, 1:] = 0
        return noise

    _noise(change)


@fault("several classes", "all classes get the same noise", CLASSES)
def classes_noise_same() -> None:
    def change(member: Any, target: int, noise: Any) -> Any:
        noise[:] = noise[:, :1]
        return noise

    _noise(change)


@fault(
    "several classes", "a record's own class is moved by a third of what residuals are bounded for", CLASSES
)
def classes_labels_moved() -> None:
    def make(honest: Any) -> Any:
        return lambda self: honest(self) / 3

    swap(SealedMember, "_labels", make)


# -- profiles -----------------------------------------------------------------------------------------------


@fault("profiles", "the last ten cells of a profile have no noise", PROFILE)
def profile_tail_exact() -> None:
    def change(member: Any, target: int, noise: Any) -> Any:
        noise[-10:] = 0
        return noise

    _noise(change)


@fault("profiles", "the opening of a profile is counted at half of its cost", PROFILE)
def profile_cost_halved() -> None:
    def make(honest: Any) -> Any:
        def price(self: CardMember) -> tuple[float, float]:
            sensitivity, sigma = honest(self)
            return sensitivity / 2, sigma

        return price

    swap(CardMember, "_price", make)


# -- rooms that no list names -------------------------------------------------------------------------------


@fault("results", "the result states half of the epsilon that the ledgers add up to", ("frozen", "sealed"))
def result_epsilon_halved() -> None:
    def make(honest: Any) -> Any:
        def stated(records: Any, plan: Any) -> Any:
            found = honest(records, plan)
            return {
                owner: {**spent, "epsilon": spent["epsilon"] and spent["epsilon"] / 2}
                for owner, spent in found.items()
            }

        return stated

    swap(runs, "spending", make)


@fault("results", "the result says that labels are not exposed", ("strict", "fdml"))
def result_labels_hidden() -> None:
    swap(runs, "label_exposure", lambda honest: lambda *given: "not exposed")


@fault("files", "everybody on the machine may read views and journals", ("frozen", "sealed"))
def files_readable() -> None:
    def make(honest: Any) -> Any:
        def written(self: RunFolder, result: Any) -> None:
            honest(self, result)
            for part in ("views", "journal"):
                for path in (self.path / part).rglob("*"):
                    path.chmod(0o755 if path.is_dir() else 0o644)

        return written

    swap(RunFolder, "write_result", make)


@fault("files", "the values without noise are kept beside the noisy ones", ("frozen", "dp-encoder"))
def journal_keeps_exact() -> None:
    def make(honest: Any) -> Any:
        def perturb(self: Gate, values: Any) -> Any:
            noisy = honest(self, values)
            if self.journal is not None and type(self.journal) is Journal:
                self.journal.keep("release", np.asarray(values), std=0.0, where="exact")
            return noisy

        return perturb

    swap(Gate, "_protect", make)


@fault(
    "models",
    "the label holder's model is trained on one more exact step at the end",
    ("frozen", "dp-encoder"),
)
def head_exact_step() -> None:
    def make(honest: Any) -> Any:
        def written(self: RunFolder, result: Any) -> None:
            path = self.model("server")
            if path.is_file():
                values = {name: value * 1.01 for name, value in load_file(path).items()}
                save_file(values, path)
            honest(self, result)

        return written

    swap(RunFolder, "write_result", make)
