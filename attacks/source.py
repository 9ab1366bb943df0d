"""A finished run as the audit sees it: public facts, what is true of it, what an attacker is granted.

From a `Source` come the public facts (`Source.info`), the truth that only scorers see (`Source.truth`, named
in `TRUTHS`) and the auxiliary data that an attack declares (`Source.auxiliary`, named in `AUXILIARY`). Arrays
of auxiliary data are called ``<name with underscores>/<array>``; each builder below says which there are.
Records are named by their global index, training part first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from securevfl.accountants.modes import mu_of, weakest_mode
from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms.resolve import resolve
from securevfl.attacks.contract import Arrays, Info, Need, Truth
from securevfl.attacks.rebuild import Deployed
from securevfl.data import VerticalData
from securevfl.data.share import read_outline
from securevfl.errors import AttackError, SecureVFLError
from securevfl.federation.folder import RunFolder
from securevfl.federation.recorder import DECLARED
from securevfl.privacy.ledger import read_records
from securevfl.privacy.views import View
from securevfl.settings.plan import Plan

_Build: TypeAlias = "Callable[[Source, Info, int, np.random.Generator], Arrays]"
_BuildTruth: TypeAlias = "Callable[[Source, Info], NDArray[Any]]"


def _own_features(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``<party>``: all rows of each observer."""
    return {name: source.features(name) for name in info.observers if name in source.parties}


def _own_labels(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``values``: all labels, which the observer holds."""
    return {"values": source.labels}


def _known_labels(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``rows``, ``values``: labels of a few training records, the classes taking turns."""
    labels = source.known.y_train
    order = rng.permutation(len(labels))
    if source.known.task != "regression":
        turns = np.zeros(len(order), np.int64)
        for code in np.unique(labels):
            turns[labels[order] == code] = np.arange(int((labels == code).sum()))
        order = order[np.argsort(turns, kind="stable")]
    rows = order[: count or 40].astype(np.int64)
    return {"rows": rows, "values": labels[rows]}


def _known_records(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``rows``, ``values``: the owner's features of a few training records, at most three quarters."""
    most = max(1, 3 * source.known.n_train // 4)  # somebody must be left to recover
    rows = rng.permutation(source.known.n_train)[: min(count or 40, most)].astype(np.int64)
    return {"rows": rows, "values": source.features(info.owner)[rows]}


def _public_rows(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``rows``, ``labels``, ``features/<party>``: half of the test records in full, as if published."""
    data = source.known
    rows = data.n_train + rng.permutation(data.n_test)[: data.n_test // 2].astype(np.int64)
    rows = rows[: count or None]
    blocks = {f"features/{party}": source.features(party)[rows] for party in data.parties}
    return {"rows": rows, "labels": source.labels[rows], **blocks}


def _bounds(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``values``: public (low, high) of the owner's columns as the encoder sees them, NaN where unknown."""
    data = source.known
    index = data.parties.index(info.owner)
    table = data.bounds[index]
    return {"values": np.full((data.widths[index], 2), np.nan) if table is None else np.array(table)}


def _weights(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``<party or server>/<parameter>``: every model of the run."""
    return {} if source.deployed is None else source.deployed.weights()


def _own_model(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``<party>/<parameter>``: the observers' encoders; the server's model too for the label holder."""
    mine = {*info.observers, *(["server"] if info.has_labels else [])}
    return {
        name: value for name, value in _weights(source, info, 0, rng).items() if name.split("/")[0] in mine
    }


def _predictions(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``values``: what a prediction service answers for every record (probabilities, or the value)."""
    everything = np.arange(source.known.n_train + source.known.n_test)
    return {} if source.deployed is None else {"values": source.deployed.predict(everything)}


def _candidates(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``labels``, ``features/<party>``, ``predictions``, ``embeddings``: records perhaps trained on.

    The embeddings are those of the owner's final encoder, before noise is added.
    """
    rows, _ = source.candidates()
    found = {f"features/{party}": source.features(party)[rows] for party in source.parties}
    if source.deployed is not None:
        found["predictions"] = source.deployed.predict(rows)
        if info.owner in source.parties:
            found["embeddings"] = source.deployed.embed(info.owner, rows)
    return {"labels": source.labels[rows], **found}


def _shadow_records(source: Source, info: Info, count: int, rng: np.random.Generator) -> Arrays:
    """``labels``, ``features/<party>``: records of the same kind, none of them a candidate."""
    _, rows = source.candidates()
    rows = rows[: count or None]
    blocks = {f"features/{party}": source.features(party)[rows] for party in source.parties}
    return {"labels": source.labels[rows], **blocks}


def _members(source: Source, info: Info) -> NDArray[Any]:
    rows, _ = source.candidates()
    return rows < source.known.n_train


# Name -> how it is built, and what must exist for it. The names are what attacks declare.
AUXILIARY: dict[str, tuple[_Build, frozenset[str]]] = {
    "own features": (_own_features, frozenset({"own"})),
    "own labels": (_own_labels, frozenset({"labels held"})),
    "own model": (_own_model, frozenset({"models"})),
    "known labels": (_known_labels, frozenset()),
    "known records": (_known_records, frozenset({"owner"})),
    "public rows": (_public_rows, frozenset()),
    "bounds": (_bounds, frozenset({"owner"})),
    "model weights": (_weights, frozenset({"models"})),
    "predictions": (_predictions, frozenset({"models"})),
    "candidates": (_candidates, frozenset({"models"})),
    "shadow records": (_shadow_records, frozenset()),
}

# Name -> how it is built, and what must exist for it. Only scorers see these.
TRUTHS: dict[str, tuple[_BuildTruth, frozenset[str]]] = {
    "labels": (lambda source, info: source.labels, frozenset()),
    "features": (lambda source, info: source.features(info.owner), frozenset({"owner"})),
    "members": (_members, frozenset({"models"})),
}


Floats = NDArray[np.float32]
_GRANT, _CANDIDATES = 1, 2  # spawn keys: what is granted does not depend on the attack's own seed


class Tally(NamedTuple):
    """Messages of one kind between two roles, as one observer saw them."""

    sender: str
    receiver: str
    kind: str
    sent: bool


class Source:
    """A finished run with its data.

    Args:
        folder: The run folder.
        data: The data the run was trained on, as it was given to `train`; None where it is not at hand.
    """

    def __init__(self, folder: Path | str, data: VerticalData | None = None) -> None:
        self.files = RunFolder(Path(folder))
        self.plan = self.files.read_plan()
        self.given = data
        self.data = None if data is None else resolve(self._scaled_as_recorded(data), data)[1]
        self.outline = read_outline(self.files.path)
        self._tallies: dict[str, dict[Tally, tuple[int, int]]] = {}
        self._infos: dict[tuple[str, tuple[str, ...]], Info] = {}

    def _scaled_as_recorded(self, data: VerticalData) -> Plan:
        """The plan; a foreign program scaled its columns itself, so those without bounds stay as they are."""
        foreign = self.files.result_file.is_file() and self.files.read_result().get("guarantee") == DECLARED
        if foreign and self.plan.scaling == "auto" and data.unbounded:
            return self.plan.with_changes(scaling="none")
        return self.plan

    # -- public facts ---------------------------------------------------------------------------------------

    @cached_property
    def records(self) -> list[ReleaseRecord]:
        """Every release of the run, from verified ledgers."""
        return read_records(self.files.path) if (self.files.path / "ledger").is_dir() else []

    @property
    def observers(self) -> list[str]:
        """Organisations whose views were recorded."""
        return sorted(path.name for path in (self.files.path / "views").glob("*") if path.is_dir())

    def view_folder(self, observer: str) -> Path:
        """Where the observer's view is."""
        return self.files.view(observer)

    def tally(self, observer: str) -> dict[Tally, tuple[int, int]]:
        """Who sent what to whom in the observer's view: number of messages and bytes."""
        if observer not in self._tallies:
            found: dict[Tally, tuple[int, int]] = {}
            for seen in View(self.files.view(observer)).headers():
                key = Tally(seen["sender"], seen["receiver"], seen["kind"], seen["sent"])
                count, size = found.get(key, (0, 0))
                found[key] = (count + 1, size + seen["size"])
            self._tallies[observer] = found
        return self._tallies[observer]

    @property
    def parties(self) -> tuple[str, ...]:
        """Parties with features; without the data, every organisation that has a ledger."""
        if self.data is not None:
            return self.data.parties
        if self.outline is not None:
            return self.outline.parties
        names = sorted(path.stem for path in (self.files.path / "ledger").glob("*.jsonl"))
        return tuple(name for name in names if name != "server")

    @property
    def label_holder(self) -> str:
        """The organisation that hosts the server role."""
        if self.plan.label_holder == "server":
            return "server"
        if self.data is not None:
            return self.data.label_holder
        if self.outline is not None:
            return self.outline.label_holder
        for observer in self.observers:
            if any(key.receiver == "server" and not key.sent for key in self.tally(observer)):
                return observer
        return next(iter(self.parties), "server")

    def mu(self, owner: str, observers: Iterable[str]) -> float:
        """What the owner's ledger promises for a record of its features towards these observers."""
        group = set(observers)
        ledger = [r for r in self.records if r.owner == owner]
        seen = [r for r in ledger if r.mechanism == "dp-update" or group & set(r.observers)]
        return mu_of(seen, weakest_mode(seen))

    def info(self, owner: str, observers: tuple[str, ...]) -> Info:
        """The public facts for an attack of `observers` on `owner`.

        The plan in it does not say which data set it was or where its files are.
        """
        key = (owner, tuple(observers))
        if key not in self._infos:
            self._infos[key] = self._info(*key)
        return self._infos[key]

    def _info(self, owner: str, observers: tuple[str, ...]) -> Info:
        received: Counter[str] = Counter()
        seen: Counter[str] = Counter()
        hosts = {**{party: party for party in self.parties}, "server": self.label_holder}
        for observer in set(observers) & set(self.observers):
            for key, (count, _) in self.tally(observer).items():
                seen[key.kind] += count
                if not key.sent and hosts.get(key.sender, key.sender) == owner:
                    received[key.kind] += count
        data = self.data
        info = Info(
            plan=self.plan.with_changes(source={"data": "", "data_folder": ""}),
            parties=self.parties,
            widths=() if data is None else data.widths,
            label_holder=self.label_holder,
            task="" if data is None else data.task,
            classes=0 if data is None else len(data.classes),
            n_train=0 if data is None else data.n_train,
            n_test=0 if data is None else data.n_test,
            owner=owner,
            observers=observers,
            received=dict(received),
            seen=dict(seen) if set(observers) <= set(self.observers) else {},
            mu=self.mu(owner, observers),
        )
        return self._with_knowledge(info)

    def _with_knowledge(self, info: Info) -> Info:
        wants = {name: wants for name, (_, wants) in [*AUXILIARY.items(), *TRUTHS.items()]}
        lacks = {name: self._lack(name, wanted, info) for name, wanted in wants.items()}
        missing = {name: reason for name, reason in lacks.items() if reason}
        return replace(
            info,
            missing=missing,
            auxiliary=frozenset(set(AUXILIARY) - set(missing)),
            truths=frozenset(set(TRUTHS) - set(missing)),
        )

    def _lack(self, name: str, wants: frozenset[str], info: Info) -> str:
        if self.data is None:
            return f"{name} needs the data of the run; give it with --data"
        if "owner" in wants and info.owner not in self.data.parties:
            return f"{name}: {info.owner} holds no features"
        if "own" in wants and not set(info.observers) & set(self.data.parties):
            return f"{name}: {info.observer} holds no features"
        if "labels held" in wants and not info.has_labels:
            return f"{name}: {info.observer} does not hold the labels"
        if "models" in wants and self.deployed is None:
            return f"{name}: the models of the run are not at hand ({self._no_models})"
        return ""

    # -- private: for scorers and declared knowledge --------------------------------------------------------

    @cached_property
    def deployed(self) -> Deployed | None:
        """The trained models; None where they cannot be rebuilt."""
        self._no_models = "no data"
        if self.data is None:
            return None
        try:
            return Deployed(self.files, self.plan, self.data)
        except SecureVFLError as error:
            self._no_models = str(error)
            return None

    def features(self, party: str) -> Floats:
        """A party's features as its encoder sees them, one flat row per record."""
        data = self.known
        if party not in data.parties:
            raise AttackError(f"{party} holds no features")
        index = data.parties.index(party)
        parts = [_dense(data.train[index]), _dense(data.test[index])]
        return np.concatenate(parts)

    @property
    def known(self) -> VerticalData:
        """The scaled data."""
        if self.data is None:
            raise AttackError("the data of the run is not at hand; give it with --data")
        return self.data

    @property
    def labels(self) -> NDArray[Any]:
        """All labels, training part first."""
        return np.concatenate([self.known.y_train, self.known.y_test])

    def candidates(self, count: int = 2000) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Records for membership attacks, half of them members, and the records left for shadow models."""
        data, generator = self.known, self._generator(_CANDIDATES)
        members = generator.permutation(data.n_train)
        others = data.n_train + generator.permutation(data.n_test)
        each = min(len(members) // 2, len(others) // 2, count // 2)
        chosen = generator.permutation(np.concatenate([members[:each], others[:each]]))
        return chosen, np.concatenate([members[each:], others[each:]])

    def _generator(self, key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.plan.seed, spawn_key=(97, key)))

    def truth(self, names: Iterable[str], info: Info) -> Truth:
        """The truth under each name. Only scorers may have it."""
        return {name: TRUTHS[name][0](self, info) for name in names}

    def auxiliary(self, needs: Iterable[Need], info: Info) -> Arrays:
        """The arrays of declared auxiliary data, and nothing else."""
        arrays: dict[str, NDArray[Any]] = {}
        for need in needs:
            reason = info.missing.get(need.name)
            if reason or need.name not in AUXILIARY:
                raise AttackError(reason or f"there is no auxiliary data called {need.name!r}")
            prefix = need.name.replace(" ", "_")
            found = AUXILIARY[need.name][0](self, info, need.records, self._generator(_GRANT))
            arrays |= {f"{prefix}/{name}": values for name, values in found.items()}
        return arrays


def _dense(block: Any) -> Floats:
    dense = block.toarray() if sparse.issparse(block) else np.asarray(block)
    return np.ascontiguousarray(dense.reshape(len(dense), -1), np.float32)
