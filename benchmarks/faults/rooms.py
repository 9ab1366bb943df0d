"""Faults in rooms that came after the audit was built: alignment, prediction, totals of evaluations,
scorecards and profiles, authenticated rounds and their proofs, the agreement and its enforcer, joint audits
of runs over a network.

They were written down, with the cases they apply to, before any of them was run.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.faults.contract import fault, swap
from securevfl.accountants.records import Filter
from securevfl.algorithms.sealed import card
from securevfl.algorithms.sealed.card import CardMember
from securevfl.algorithms.sealed.evaluation import Evaluation, Evaluator
from securevfl.algorithms.sealed.member import SealedMember
from securevfl.federation.agreed import Enforcer
from securevfl.federation.schedule import Schedule
from securevfl.federation.site import Site
from securevfl.federation.trained import Trained
from securevfl.network import training as network_training
from securevfl.privacy.gate import Gate
from securevfl.privacy.journal import STATISTIC
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.noise import Noise
from securevfl.privacy.payloads import _KEY, Released
from securevfl.privacy.views import ViewWriter
from securevfl.protocols.alignment import blinded
from securevfl.protocols.sealed import checked, checked_dealer, party, scoring
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.messages import Opening
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sealed.proof import Prover
from securevfl.protocols.sealed.series import Waves
from securevfl.protocols.sealed.session import ProofMachine
from securevfl.protocols.stream import KeyStream

ROOMS = (
    "alignment",
    "prediction",
    "evaluation totals",
    "cards",
    "profile",
    "authenticated",
    "agreement",
    "network",
)
"""Their rooms."""
PREDICTED = ("frozen-predicted", "strict-predicted")
NETWORK = ("network", "network-sealed")
CHECKED = ("sealed-checked", "network-sealed")
EVALUATED = ("sealed", "sealed-checked", "sealed-card")


# -- alignment ----------------------------------------------------------------------------------------------


@fault("alignment", "that records were aligned is not written down", ("network-aligned",))
def alignment_unwritten() -> None:
    swap(Ledger, "note_alignment", lambda honest: lambda self, **said: self.head)


@fault("alignment", "entries say that fewer IDs were brought than were", ("network-aligned",))
def alignment_understated() -> None:
    swap(Ledger, "note_alignment", lambda honest: lambda self, **said: honest(self, **{**said, "ids": 1}))


@fault(
    "alignment", "one organisation trains on the records after those that were found", ("network-aligned",)
)
def alignment_rows_shifted() -> None:
    def make(honest: Any) -> Any:
        def shifted(own: Any, ids: Any) -> list[int]:
            rows: list[int] = honest(own, ids)
            return rows if own.labels is not None or own.block[0, 0] > 0 else [*rows[1:], rows[0]]

        return shifted

    swap(network_training, "rows_of", make)


@fault(
    "alignment",
    "everybody's secret of the alignment is the same and known",
    ("network-aligned",),
    needs="the blinded points, which views do not hold, and a search through known secrets",
)
def alignment_secret_known() -> None:
    def make(honest: Any) -> Any:
        def begun(self: Any, *given: Any, **options: Any) -> None:
            honest(self, *given, **options)
            self._secret = bytes([8] * 32)

        return begun

    swap(blinded.BlindingMachine, "__init__", make)


# -- prediction ---------------------------------------------------------------------------------------------


def _predicted(change: Any) -> None:
    def make(honest: Any) -> Any:
        def release(self: Gate, vectors: Any, *, rows: Any, kind: str, observers: Any) -> Released:
            if kind != "prediction":
                found: Released = honest(self, vectors, rows=rows, kind=kind, observers=observers)
                return found
            return change(honest, self, vectors, rows, observers)

        return release

    swap(Gate, "release", make)


def _exact(honest: Any, gate: Gate, vectors: Any, rows: Any, observers: Any) -> Released:
    found = honest(gate, vectors, rows=rows, kind="prediction", observers=observers)
    said = {"head": found.head, "observers": observers, "kind": "prediction", "rows": rows, "key": _KEY}
    return Released(values=vectors.detach().numpy().astype(np.float32), source=vectors, **said)


@fault("prediction", "embeddings of new records leave without noise", PREDICTED)
def prediction_without_noise() -> None:
    _predicted(_exact)


@fault("prediction", "embeddings of new records leave under an entry of the training", PREDICTED)
def prediction_unwritten() -> None:
    def change(honest: Any, gate: Gate, vectors: Any, rows: Any, observers: Any) -> Released:
        values = gate._protect(vectors.numpy(force=True))
        said = {"head": gate.ledger.released, "observers": observers, "kind": "prediction", "rows": rows}
        return Released(values=values, source=vectors, **said, key=_KEY)

    _predicted(change)


@fault("prediction", "only the first of the predicted records pays", PREDICTED)
def prediction_pays_once() -> None:
    def change(honest: Any, gate: Gate, vectors: Any, rows: Any, observers: Any) -> Released:
        paid = None if rows is None else rows[:1]
        first = honest(gate, vectors[:1], rows=paid, kind="prediction", observers=observers)
        said = {"head": first.head, "observers": observers, "kind": "prediction", "rows": rows, "key": _KEY}
        return Released(values=gate._protect(vectors.numpy(force=True)), source=vectors, **said)

    _predicted(change)


@fault("prediction", "exact scores of records that were trained on are opened", ("sealed-predicted",))
def prediction_of_trained() -> None:
    swap(Filter, "promises", lambda honest: lambda self, rows: False)
    swap(Trained, "number", lambda honest: lambda self, ids, count: np.arange(count, dtype=np.int64))


@fault("prediction", "scores of new records are summed without masks", ("sealed-predicted",))
def prediction_unmasked() -> None:
    def make(honest: Any) -> Any:
        def plain(seed: bytes, purpose: str, *given: Any) -> Any:
            words = honest(seed, purpose, *given)
            return np.zeros_like(words) if purpose.startswith("score/") else words

        return plain

    swap(scoring, "expand", make)


# -- totals of evaluations ----------------------------------------------------------------------------------


@fault("evaluation totals", "totals over the test part have no noise", EVALUATED)
def evaluation_totals_exact() -> None:
    def make(honest: Any) -> Any:
        def quiet(self: SealedParty, target: int) -> Any:
            noise = honest(self, target)
            return np.zeros_like(noise) if isinstance(self.protocol.series, Waves) else noise

        return quiet

    swap(SealedParty, "noise_for", make)


@fault("evaluation totals", "the number of positives has no noise", EVALUATED)
def evaluation_positives_exact() -> None:
    def make(honest: Any) -> Any:
        def counted(self: Evaluator) -> float:
            exact = np.array([float(self._positive.sum())])
            self.gate.keep(STATISTIC, exact, std=self.evaluation.positives_sigma)
            return float(exact[0])

        return counted

    swap(Evaluator, "_positives", make)


@fault("evaluation totals", "labels of training records are totalled, and test records pay", EVALUATED)
def evaluation_of_training_labels() -> None:
    def make(honest: Any) -> Any:
        return property(lambda self: np.asarray(self.setup.data.y_train[: self.evaluation.records]) > 0)

    swap(Evaluator, "_positive", make)


@fault("evaluation totals", "members bring scores of three times the agreed clamp", EVALUATED)
def evaluation_unclamped() -> None:
    swap(Evaluation, "clamp", lambda honest: property(lambda self: 3 * honest.fget(self)))
    swap(Evaluation, "scale", lambda honest: lambda self, spreads: 8 * honest(self, spreads))


# -- scorecards and profiles --------------------------------------------------------------------------------


@fault(
    "cards", "bins are made of exact counts; the noisy ones are written down and not used", ("sealed-card",)
)
def card_bins_exact() -> None:
    def make(honest: Any) -> Any:
        def binned(column: Any, values: Any, noisy: Any, **rest: Any) -> Any:
            def exact(counts: Any, std: float) -> Any:
                noisy(counts, std)
                return np.asarray(counts, np.float64)

            return honest(column, values, exact, **rest)

        return binned

    swap(card, "bin_column", make)


@fault("cards", "totals of the last fit have no noise", ("sealed-card",))
def card_last_fit_exact() -> None:
    def make(honest: Any) -> Any:
        def round(self: CardMember, made: Any, rows: Any, chosen: Any) -> Any:  # noqa: A001
            if self.opening == "last":
                made.noise_for = lambda target: np.zeros(made.protocol.total_shape(target), np.uint64)
            return honest(self, made, rows, chosen)

        return round

    swap(CardMember, "_round", make)


@fault("cards", "the histogram of residuals is counted at a tenth of its cost", ("sealed-card",))
def card_cost_tenth() -> None:
    def make(honest: Any) -> Any:
        def price(self: CardMember) -> tuple[float, float]:
            sensitivity, sigma = honest(self)
            cheap = self.opening in ("residuals", "labels")
            return (sensitivity / 10, sigma) if cheap else (sensitivity, sigma)

        return price

    swap(CardMember, "_price", make)


@fault("profile", "all cells of a column have the same noise", ("sealed-profile",))
def profile_noise_by_column() -> None:
    def make(honest: Any) -> Any:
        def tiled(self: SealedParty, target: int) -> Any:
            noise = honest(self, target)
            noise[:] = noise[np.arange(len(noise)) // 8 * 8]
            return noise

        return tiled

    swap(SealedParty, "noise_for", make)


@fault(
    "profile",
    "the profile that is kept holds rounded counts, not those that were opened",
    ("sealed-profile",),
)
def profile_other_counts() -> None:
    def make(honest: Any) -> Any:
        def rounded(self: CardMember, total: Any) -> None:
            honest(self, np.maximum(np.rint(total / 5) * 5, 0.0))

        return rounded

    swap(CardMember, "_take_histogram", make)


# -- authenticated rounds and proofs ------------------------------------------------------------------------


class _Fixed:
    """In the place of the module `os`: bytes that are the same each time, of one length only."""

    def __init__(self, size: int) -> None:
        self._size = size

    def urandom(self, size: int) -> bytes:
        return bytes([5] * size) if size == self._size else os.urandom(size)


@fault("authenticated", "the dealer's coins are always the same", CHECKED)
def checked_coins_constant() -> None:
    swap(checked_dealer, "os", lambda honest: _Fixed(32))


@fault("authenticated", "commitments are made with a nonce that everybody knows", CHECKED)
def checked_nonce_constant() -> None:
    swap(checked, "os", lambda honest: _Fixed(32))


@fault("authenticated", "one member opens its share of the check before the others have committed", CHECKED)
def checked_opens_early() -> None:
    def make(honest: Any) -> Any:
        def hasty(self: CheckedRound, message: Any) -> Any:
            sent = honest(self, message)
            if self.address == 1 and self._own:
                nonce, word = self._own
                own = Opening(round=self.round, nonce=nonce, word=np.array([word], np.uint64))
                self._openings[self.address] = own
                sent = sent + self._to_all(own)
            return sent

        return hasty

    swap(CheckedRound, "_take_coin", make)


@fault(
    "authenticated",
    "proofs and checks are not verified",
    CHECKED,
    needs="a member that cheats: honest runs do not differ; the tests of cheating members have several",
)
def checked_unverified() -> None:
    swap(ProofMachine, "_verify", lambda honest: lambda self, prover: None)
    swap(CheckedRound, "_verify", lambda honest: lambda self: None)


@fault("authenticated", "one member's rows are three times as long as it proves, and nobody looks", CHECKED)
def checked_rows_longer() -> None:
    def make(honest: Any) -> Any:
        def longer(self: SealedMember) -> Any:
            operand = honest(self)
            return 3 * operand if self.index == 1 else operand

        return longer

    swap(SealedMember, "_operand", make)
    swap(party, "check_operand", lambda honest: lambda *given, **options: None)
    swap(ProofMachine, "_verify", lambda honest: lambda self, prover: None)


@fault("authenticated", "members add no noise to the totals of others", CHECKED)
def checked_noise_for_others_off() -> None:
    def make(honest: Any) -> Any:
        def own(self: SealedParty, target: int) -> Any:
            noise = honest(self, target)
            return noise if target == self.index else np.zeros_like(noise)

        return own

    swap(SealedParty, "noise_for", make)


@fault("authenticated", "the masked bits of a proof have no mask", CHECKED)
def checked_bits_open() -> None:
    def make(honest: Any) -> Any:
        def plain(self: Prover, *given: Any) -> Any:
            return honest(self, *given) & np.uint64(1)

        return plain

    swap(Prover, "opened_bits", make)
    swap(ProofMachine, "_verify", lambda honest: lambda self, prover: None)


# -- the agreement and its enforcer -------------------------------------------------------------------------


@fault("agreement", "phases are not written down", NETWORK)
def phases_unwritten() -> None:
    swap(Ledger, "begin", lambda honest: lambda self, part, epoch, back, announced=None: None)


@fault("agreement", "one epoch more is trained than was agreed on, and nobody refuses", NETWORK)
def agreed_epoch_more() -> None:
    def make(honest: Any) -> Any:
        async def longer(self: Schedule) -> None:
            await self.carrier.phase("epoch", self.plan.epochs + 1)
            await honest(self)

        return longer

    swap(Schedule, "_final_evaluation", make)
    swap(Enforcer, "begin", lambda honest: Enforcer._note)


@fault("agreement", "organisations train with half of the noise that they signed", NETWORK)
def agreed_noise_halved() -> None:
    def make(honest: Any) -> Any:
        def built(self: Site, name: str, plan: Any, *given: Any, **options: Any) -> None:
            honest(self, name, plan.with_changes(sigma=plan.sigma / 2), *given, **options)

        return built

    swap(Site, "__init__", make)


@fault("agreement", "what was agreed on is signed by one organisation alone", NETWORK)
def agreed_by_one() -> None:
    def make(honest: Any) -> Any:
        def written(path: Any, content: Any, *given: Any) -> None:
            signed = dict(list(content["signatures"].items())[:1])
            honest(path, {**content, "signatures": signed}, *given)

        return written

    swap(network_training, "write_json", make)


# -- joint audits of runs over a network --------------------------------------------------------------------


@fault("network", "noise is halved", ("network",))
def network_noise_halved() -> None:
    swap(Noise, "gaussian", lambda honest: lambda self, shape, std: honest(self, shape, std / 2))


@fault("network", "all organisations draw the same noise", ("network",))
def network_noise_shared() -> None:
    secret = os.urandom(16)

    def make(honest: Any) -> Any:
        def begun(self: Noise) -> None:
            honest(self)
            self._stream = KeyStream(secret)

        return begun

    swap(Noise, "__init__", make)


@fault("network", "members add no noise to totals", ("network-sealed",))
def network_sealed_noise_off() -> None:
    swap(
        SealedParty,
        "noise_for",
        lambda honest: lambda self, target: np.zeros_like(honest(self, target)),
    )


@fault("network", "a view leaves out every fifth message that its observer sent", NETWORK)
def network_view_thinned() -> None:
    count: Counter[str] = Counter()

    def make(honest: Any) -> Any:
        def thinned(self: ViewWriter, message: Any, *, time: float, sent: bool) -> None:
            count[self.observer] += sent
            if not (sent and count[self.observer] % 5 == 0):
                honest(self, message, time=time, sent=sent)

        return thinned

    swap(ViewWriter, "record", make)


@fault("network", "every third entry names other records than those that left", NETWORK)
def network_entry_of_others() -> None:
    count: list[int] = []

    def make(honest: Any) -> Any:
        def account(self: Gate, mechanism: Any, *, rows: Any, **rest: Any) -> Any:
            count.append(1)
            wrong = rows is not None and len(count) % 3 == 0 and rows.size > 1
            return honest(self, mechanism, rows=np.sort(rows)[:-1] if wrong else rows, **rest)

        return account

    swap(Gate, "_account", make)
