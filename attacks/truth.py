"""What is true of a run, and what an attacker is granted to know of it.

`TRUTHS` names what scorers see; `AUXILIARY` names what attacks may declare. Arrays of auxiliary data are
called ``<name with underscores>/<array>``; each builder below says which there are. Records are named by
their global index, training part first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securevfl.attacks.contract import Arrays, Info

if TYPE_CHECKING:
    from securevfl.attacks.source import Source

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
