"""Faults in rooms that were built anew after the audit had been tried: what is handed on, ledgers that are
read entry by entry, predictions whose rows are kept, cards that go on from a profile, recorded words.

They were written down, with the cases they apply to, before any of them was run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.faults.contract import fault, swap
from securevfl.algorithms.fdml import FDMLServer
from securevfl.algorithms.prediction import KIND
from securevfl.algorithms.sealed.card import CardMember
from securevfl.algorithms.sealed.prediction import ScoringMember
from securevfl.algorithms.sealed.rows import dense
from securevfl.federation.continued import Profile
from securevfl.privacy import schemas
from securevfl.privacy.gate import Gate
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.passing import Arrivals
from securevfl.privacy.payloads import _KEY, Contribution, Passed, Released
from securevfl.protocols.sealed import checked_dealer
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.sums.noise import DistributedNoise

PREDICTED = ("frozen-predicted", "strict-predicted")
CONTINUED, WORDS = ("card-continued",), ("sealed-words",)


# -- what is handed on --------------------------------------------------------------------------------------


def _passed(passed: Passed, values: Any) -> Passed:
    return Passed(values=values, reach=passed.reach, source=passed.source, key=_KEY)


@fault("handed on", "sums that are handed on carry labels in their third digit", ("fdml", "fdml-sums"))
def handed_on_labels() -> None:
    def make(honest: Any) -> Any:
        async def send(self: FDMLServer, pull: Any, total: Passed, outputs: Any) -> None:
            labels = np.asarray(self.setup.data.y_train)[pull.rows].reshape(-1, 1)
            await honest(self, pull, _passed(total, total.values + 1e-2 * labels), outputs)

        return send

    swap(FDMLServer, "_send_sum", make)


@fault("handed on", "the newest values of one party are handed on in place of the sum", ("fdml",))
def handed_on_one() -> None:
    def make(honest: Any) -> Any:
        return lambda self, index: _passed(honest(self, index), np.array(self._values[index][:, 1]))

    swap(Arrivals, "sums", make)


@fault("handed on", "a total is handed on and used without the noise that is kept", ("fdml-sums", "two-tree"))
def handed_on_shrunk() -> None:
    def make(honest: Any) -> Any:
        def total(self: Gate, *given: Any, **options: Any) -> Passed:
            found: Passed = honest(self, *given, **options)
            return _passed(found, found.values / 2)

        return total

    swap(Gate, "total", make)


@fault(
    "handed on", "scores that are handed on are those of the records in reverse", ("svrg-sums", "afsgd-sums")
)
def handed_on_reversed() -> None:
    def make(honest: Any) -> Any:
        def hand_on(self: Gate, passed: Passed, *, kind: str, **options: Any) -> Released:
            given = _passed(passed, passed.values[::-1].copy()) if kind == "scores" else passed
            found: Released = honest(self, given, kind=kind, **options)
            return found

        return hand_on

    swap(Gate, "hand_on", make)


# -- ledgers ------------------------------------------------------------------------------------------------


@fault(
    "chain", "all organisations sign their ledgers with the same key, which is known", ("strict", "sealed")
)
def chain_key_known() -> None:
    def make(honest: Any) -> Any:
        def begin(self: Ledger) -> None:
            from securevfl.privacy import ledger

            kept = ledger.Ed25519PrivateKey
            key = Ed25519PrivateKey.from_private_bytes(bytes(32))
            ledger.Ed25519PrivateKey = type("Fixed", (), {"generate": staticmethod(lambda: key)})
            try:
                honest(self)
            finally:
                ledger.Ed25519PrivateKey = kept

        return begin

    swap(Ledger, "_begin_session", make)


@fault("chain", "a session's signing key is kept for the next one", PREDICTED)
def chain_key_again() -> None:
    keys: dict[str, Any] = {}

    def make(honest: Any) -> Any:
        def begin(self: Ledger) -> None:
            from securevfl.privacy import ledger

            kept = ledger.Ed25519PrivateKey
            key = keys.setdefault(self.owner, kept.generate())
            ledger.Ed25519PrivateKey = type("Fixed", (), {"generate": staticmethod(lambda: key)})
            try:
                honest(self)
            finally:
                ledger.Ed25519PrivateKey = kept

        return begin

    swap(Ledger, "_begin_session", make)


@fault(
    "chain",
    "every fifth release of the training is written down as one for new records",
    ("strict", "frozen"),
)
def chain_as_prediction() -> None:
    count = [0]

    def make(honest: Any) -> Any:
        def append(self: Ledger, record: Any) -> Any:
            count[0] += 1
            return honest(self, replace(record, kind=KIND) if count[0] % 5 == 0 else record)

        return append

    swap(Ledger, "append", make)


# -- predictions --------------------------------------------------------------------------------------------


def _released(change: Any) -> None:
    """Changes what leaves for new records; entries stay as they are."""

    def make(honest: Any) -> Any:
        def fresh(self: Gate, vectors: Any, values: Any, rows: Any, kind: str, *given: Any) -> Released:
            found: Released = honest(self, vectors, values, rows, kind, *given)
            changed = change(self, np.asarray(values, np.float64), found.values, kind)
            if changed is not None:
                object.__setattr__(found, "values", changed.astype(np.float32))
            return found

        return fresh

    swap(Gate, "_release_fresh", make)


@fault("kept predictions", "new records get half of the noise", PREDICTED)
def predicted_noise_halved() -> None:
    _released(lambda gate, exact, noisy, kind: (exact + noisy) / 2 if kind == KIND else None)


@fault("kept predictions", "all new records of a request get the same noise", PREDICTED)
def predicted_noise_repeated() -> None:
    _released(lambda gate, exact, noisy, kind: exact + (noisy - exact)[:1] if kind == KIND else None)


@fault(
    "kept predictions", "new records get the noise that records of the training had", ("frozen-predicted",)
)
def predicted_noise_of_training() -> None:
    kept: dict[str, list[Any]] = {}

    def change(gate: Gate, exact: Any, noisy: Any, kind: str) -> Any:
        if kind != KIND:
            kept.setdefault(gate.owner, []).append(noisy - exact)
            return None
        return exact + np.concatenate(kept[gate.owner])[: len(exact)]

    _released(change)


@fault("kept predictions", "values of new records are forty times as long as the clip", ("frozen-predicted",))
def predicted_unclipped() -> None:
    def change(gate: Gate, exact: Any, noisy: Any, kind: str) -> Any:
        return None if kind != KIND else noisy + 40 * exact

    _released(change)


@fault("kept predictions", "the rows that are kept are not those that were predicted", ("frozen-predicted",))
def predicted_other_rows() -> None:
    def make(honest: Any) -> Any:
        return lambda self, rows: honest(self, np.roll(rows, 1, axis=0))

    swap(Gate, "keep_predicted", make)


@fault("kept predictions", "totals of new records have no noise", ("sums-predicted",))
def predicted_shares_off() -> None:
    purpose = [""]

    def watched(honest: Any) -> Any:
        def contribute(self: Gate, vectors: Any, *, kind: str, **options: Any) -> Contribution:
            purpose[0] = kind
            found: Contribution = honest(self, vectors, kind=kind, **options)
            return found

        return contribute

    def make(honest: Any) -> Any:
        def share(self: DistributedNoise, *given: Any) -> Any:
            drawn = honest(self, *given)
            return np.zeros_like(drawn) if purpose[0] == KIND else drawn

        return share

    swap(Gate, "contribute", watched)
    swap(DistributedNoise, "share", make)


@fault("kept predictions", "a party lets more than its clip into totals of new records", ("sums-predicted",))
def predicted_sums_unclipped() -> None:
    def make(honest: Any) -> Any:
        def contribute(self: Gate, vectors: Any, *, kind: str, noise: Any, **options: Any) -> Contribution:
            found: Contribution = honest(self, vectors, kind=kind, noise=noise, **options)
            if kind == KIND and noise is not None:
                more = noise.encode(400 * np.clip(vectors.numpy(force=True), -0.5, 0.5).astype(np.float64))
                object.__setattr__(found, "values", found.values + more)
            return found

        return contribute

    swap(Gate, "contribute", make)


@fault("kept predictions", "a member's scores of new records carry its first feature", ("sealed-predicted",))
def predicted_feature_in_scores() -> None:
    def make(honest: Any) -> Any:
        def scores(self: ScoringMember) -> Any:
            address, data = self.exchange.link.address, self.setup.data
            found = honest(self)
            if self.holds_labels or address not in data.parties:
                return found
            first = dense(data.train[data.parties.index(address)])[:, :1]
            return found + 0.01 * first.reshape(len(first), *([1] * (found.ndim - 1)))

        return scores

    swap(ScoringMember, "own_scores", make)


# -- cards that go on from a profile ------------------------------------------------------------------------


@fault("continued cards", "the ledgers of the profile are left behind", CONTINUED)
def continued_without_ledgers() -> None:
    import shutil

    def make(honest: Any) -> Any:
        def hand_over(self: Profile, target: Any, **options: Any) -> None:
            honest(self, target, **options)
            for name in ("ledger", "receipts"):
                shutil.rmtree(target.path / name, ignore_errors=True)

        return hand_over

    swap(Profile, "hand_over", make)


@fault("continued cards", "what the profile counted is rounded when a card takes it up", CONTINUED)
def continued_other_counts() -> None:
    def make(honest: Any) -> Any:
        def load(self: CardMember, state: Any) -> None:
            honest(self, state)
            for feature in self.features:
                if feature.counts is not None:
                    counts = {name: np.round(value) for name, value in vars(feature.counts).items()}
                    feature.counts = type(feature.counts)(**counts)

        return load

    swap(CardMember, "load", make)


@fault("continued cards", "members add no noise to what is opened after the profile", CONTINUED)
def continued_noise_off() -> None:
    continued = [False]

    def watched(honest: Any) -> Any:
        def hand_over(self: Profile, *given: Any, **options: Any) -> None:
            continued[0] = True
            honest(self, *given, **options)

        return hand_over

    def make(honest: Any) -> Any:
        def noise_for(self: SealedParty, target: int) -> Any:
            noise = honest(self, target)
            return np.zeros_like(noise) if continued[0] else noise

        return noise_for

    swap(Profile, "hand_over", watched)
    swap(SealedParty, "noise_for", make)


# -- recorded words -----------------------------------------------------------------------------------------


@fault("recorded words", "the dealer locks all seeds with a key that everybody knows", WORDS)
def words_lock_known() -> None:
    def make(honest: Any) -> Any:
        return lambda key, seed, **place: honest(bytes(len(key)), seed, **place)

    swap(checked_dealer, "lock", make)


@fault("recorded words", "all rounds' seeds are locked with the same pad", WORDS)
def words_lock_repeated() -> None:
    def make(honest: Any) -> Any:
        def lock(key: bytes, seed: bytes, *, round: int, member: int) -> bytes:  # noqa: A002
            found: bytes = honest(key, seed, round=0, member=member)
            return found

        return lock

    swap(checked_dealer, "lock", make)


@fault("recorded words", "views keep seeds in the open", ("sealed-words", "sealed-checked", "sealed"))
def words_seeds_open() -> None:
    for kind, schema in list(schemas.MESSAGES.items()):
        if schema.secret:
            schemas.MESSAGES[kind] = replace(schema, secret=())


@fault("recorded words", "a member's noise for one total is that for another with the other sign", WORDS)
def words_noise_opposed() -> None:
    def make(honest: Any) -> Any:
        def noise_for(self: SealedParty, target: int) -> Any:
            noise = honest(self, target)
            place = noise.shape, self.protocol.share_stds[target][self.index]
            kept = self.__dict__.setdefault("opposed", {})
            target_before, before = kept.pop(place, (target, noise))
            if target_before == target:
                kept[place] = target, noise
                return noise
            return np.uint64(0) - before

        return noise_for

    swap(SealedParty, "noise_for", make)
