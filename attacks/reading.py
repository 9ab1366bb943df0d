"""Reads views: which records a message is about, and what was said of them.

An upload names its records. An answer to a request does not: its records are those of the request, found by
the request's number in the same view.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from securevfl.errors import AttackError
from securevfl.privacy.views import Seen, View

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]


class Release(NamedTuple):
    """Vectors of one message, one per record.

    Attributes:
        time: When it left or arrived.
        purpose: ``training``, or what the request said (``initial``, ``refresh``, ``evaluation``).
        rows: The records.
        values: One vector per record.
    """

    time: float
    purpose: str
    rows: Rows
    values: Floats


class Answers(NamedTuple):
    """Gradients that came back for a party's own uploads, one line per visit of a record.

    Attributes:
        rows: The records.
        batch: Which message each line is from, counted from 0.
        gradients: The gradient of the loss with respect to the embedding.
    """

    rows: Rows
    batch: NDArray[np.int64]
    gradients: Floats


def releases(view: View, address: str) -> list[Release]:
    """All embeddings that the role at `address` sent, as this view holds them, in order."""
    return list(_releases(view, address))


def _releases(view: View, address: str) -> Iterator[Release]:
    requests: dict[tuple[str, int], Seen] = {}
    for seen in view.messages("embed", "embedding"):
        if seen.kind == "embed":
            requests[seen.sender, seen.number] = seen
        elif seen.sender == address and "values" in seen.fields:
            yield _release(seen, requests)


def _release(seen: Seen, requests: dict[tuple[str, int], Seen]) -> Release:
    purpose, rows = "training", seen.fields.get("rows")
    if rows is None:
        request = requests.get((seen.receiver, _answered(seen)))
        if request is None:
            raise AttackError(f"message {seen.index} answers a request that is not in the view")
        rows, purpose = request.fields["rows"], str(request.fields["purpose"])
    return Release(seen.time, purpose, *_vectors(seen, rows))


def _vectors(seen: Seen, rows: NDArray[np.int64]) -> tuple[Rows, Floats]:
    values = np.asarray(seen.fields["values"], np.float64)
    if len(values) != len(rows):
        raise AttackError(f"message {seen.index} has {np.shape(values)} values for {len(rows)} records")
    return np.asarray(rows, np.int64), values


def _answered(seen: Seen) -> int:
    return -1 if seen.reply_to is None else seen.reply_to


def replies(view: View, address: str, kind: str) -> Iterator[tuple[Rows, Floats]]:
    """Records and values of the messages that answered the uploads of the role at `address`.

    Where the role took part in a sum instead, they are about the records that were announced last.
    """
    uploads: dict[int, NDArray[np.int64]] = {}
    announced: NDArray[np.int64] | None = None
    for seen in view.messages("embedding", "sum-request", kind):
        if seen.kind == "sum-request":
            announced = seen.fields["rows"]
        elif seen.kind == "embedding":
            if seen.sender == address and "rows" in seen.fields:
                uploads[seen.number] = seen.fields["rows"]
        elif seen.receiver == address and _answered(seen) in uploads:
            yield _vectors(seen, uploads[_answered(seen)])
        elif seen.receiver == address and seen.reply_to is None and announced is not None:
            yield _vectors(seen, announced)


def answers(view: View, address: str) -> Answers:
    """The gradients that came back to the role at `address`, a party without labels.

    Raises:
        AttackError: There are none.
    """
    found = [*replies(view, address, "gradient"), *_derivatives(view, address)]
    if not found:
        raise AttackError(f"the view holds no gradient for {address}")
    batch = np.repeat(np.arange(len(found)), [len(rows) for rows, _ in found])
    return Answers(
        np.concatenate([rows for rows, _ in found]), batch, np.concatenate([values for _, values in found])
    )


def _derivatives(view: View, address: str) -> Iterator[tuple[Rows, Floats]]:
    """What workers without labels get instead: loss derivatives, here as gradients of the batch's mean."""
    asked: dict[int, NDArray[np.int64]] = {}
    for seen in view.messages("sum-request", "derivative", "scores", "update", sent=False):
        if seen.kind == "sum-request":
            asked[int(seen.fields["round"])] = seen.fields["rows"]
        elif seen.receiver == address:
            rows = seen.fields["rows"] if "rows" in seen.fields else asked[int(seen.fields["round"])]
            known, values = _vectors(seen, rows)
            yield known, values / len(known)


def mean_by_record(rows: Rows, values: Floats) -> tuple[Rows, Floats]:
    """Each record once, with the mean of its values."""
    unique, place = np.unique(rows, return_inverse=True)
    total = np.zeros((len(unique), *values.shape[1:]))
    np.add.at(total, place, values)
    counts = np.bincount(place).reshape(-1, *([1] * (values.ndim - 1)))
    return unique, total / counts


def last_by_record(found: list[Release]) -> tuple[Rows, Floats]:
    """Each record once, with the vector that was released last."""
    if not found:
        raise AttackError("the view holds no embedding")
    rows = np.concatenate([one.rows for one in found])
    values = np.concatenate([one.values for one in found])
    unique, first = np.unique(rows[::-1], return_index=True)
    return unique, values[::-1][first]


def embeddings_of(view: View, owner: str, parties: tuple[str, ...], observer: str) -> list[Release]:
    """The owner's embeddings in this view: sent to the observer, or handed to it in snapshots of all."""
    found = releases(view, owner)
    if found or observer not in parties or owner not in parties:
        return found
    index = parties.index(owner)
    return [
        Release(0.0, "training", rows, values[:, index])
        for rows, values in replies(view, observer, "snapshot")
        if values.ndim == 3
    ]
