"""Faults of messages, of labels and of the defences of gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.faults.contract import DEFENCE, LABELS, SEALED, SUMS, fault, swap
from securevfl.federation.site import Site
from securevfl.privacy import defences
from securevfl.privacy import gate as gates
from securevfl.privacy.defences import randomise_labels
from securevfl.privacy.gate import Gate
from securevfl.privacy.messages import Packet
from securevfl.privacy.noise import Noise
from securevfl.privacy.payloads import Link, Released
from securevfl.protocols.stream import KeyStream

EMBEDDINGS = ("strict", "frozen", "dp-encoder", "fdml", "flex")
ASKED = ("strict", "frozen", "dp-encoder")


def _adds(change: Any) -> None:
    """Embeddings leave with the fields that change(fields, raw vectors) gives."""

    def make(honest: Any) -> Any:
        def leaking(self: Link, schema: Any, content: Any, host: str, here: bool) -> Any:
            fields, *rest = honest(self, schema, content, host, here)
            source = getattr(getattr(content, "values", None), "source", None)
            if schema.kind == "embedding" and source is not None and not here:
                fields = change(fields, source.detach().numpy())
            return fields, *rest

        return leaking

    swap(Link, "_fields", make)


@fault("messages", "an undeclared field with raw vectors as floats", EMBEDDINGS)
def field_of_floats() -> None:
    _adds(lambda fields, raw: {**fields, "features": np.array(raw)})


@fault("messages", "an undeclared field with raw vectors as integers", EMBEDDINGS)
def field_of_integers() -> None:
    _adds(lambda fields, raw: {**fields, "features": (raw * 1000).astype(np.int32)})


@fault("messages", "an undeclared word with a raw value", EMBEDDINGS)
def field_of_words() -> None:
    _adds(lambda fields, raw: {**fields, "note": f"{raw[0, 0]:.6f}"})


@fault("messages", "a declared field that this algorithm leaves empty carries a raw value", ASKED)
def optional_float() -> None:
    _adds(lambda fields, raw: {**fields, "weight": float(raw[0, 0])})


@fault("messages", "a declared whole number that this algorithm leaves empty carries a raw value", ASKED)
def optional_integer() -> None:
    _adds(lambda fields, raw: {**fields, "capacity": int(raw[0, 0] * 1e6)})


@fault(
    "messages", "raw vectors as further columns of the declared values", ("strict", "frozen", "dp-encoder")
)
def more_columns() -> None:
    def change(fields: Any, raw: Any) -> Any:
        return {**fields, "values": np.concatenate([fields["values"], raw], axis=1).astype(np.float32)}

    _adds(change)


@fault(
    "messages", "the records of a message stand in the order of their raw values", ("strict", "dp-encoder")
)
def rows_sorted() -> None:
    def change(fields: Any, raw: Any) -> Any:
        if "rows" not in fields:
            return fields
        order = np.argsort(raw[:, 0])
        return {**fields, "rows": fields["rows"][order], "values": fields["values"][order]}

    _adds(change)


@fault("messages", "message numbers skip one where a raw value is positive", EMBEDDINGS)
def number_skipped() -> None:
    def make(honest: Any) -> Any:
        def skipping(self: Link, receiver: str, content: Any, reply_to: int | None = None) -> Packet:
            source = getattr(getattr(content, "values", None), "source", None)
            if source is not None:
                self.number += int(source[0, 0] > 0)
            packet: Packet = honest(self, receiver, content, reply_to)
            return packet

        return skipping

    swap(Link, "_pack", make)


@fault("messages", "values of another organisation's payload are not asked for their observers", ASKED)
def observers_unchecked() -> None:
    """Embeddings are let out for nobody, and a link that no longer asks carries them."""

    def release(honest: Any) -> Any:
        def hidden(self: Gate, vectors: Any, *, rows: Any, kind: str, observers: Any) -> Released:
            released: Released = honest(self, vectors, rows=rows, kind=kind, observers=())
            return released

        return hidden

    def fields(honest: Any) -> Any:
        return lambda self, schema, content, host, here: honest(self, schema, content, host, True)

    swap(Gate, "release", release)
    swap(Link, "_fields", fields)


def _observes(change: Any) -> None:
    """Whatever else change(message) gives travels too, past the links."""

    def make(honest: Any) -> Any:
        def seen(self: Site, message: Packet, time: float) -> None:
            honest(self, message, time)
            for other in change(message):
                honest(self, other, time)

        return seen

    swap(Site, "observe", make)


@fault(
    "messages",
    "a second copy of each noisy message travels",
    ("strict", "frozen", "flex", "two-tree", "sealed"),
)
def message_copied() -> None:
    _observes(lambda message: [message] if message.head is not None else [])


@fault(
    "messages",
    "a second message for each entry travels, with fresh noise",
    ("strict", "dp-encoder", "fdml", "flex"),
)
def message_with_fresh_noise() -> None:
    second: dict[int, Any] = {}

    def make(honest: Any) -> Any:
        def twice(self: Gate, *given: Any) -> Released:
            released: Released = honest(self, *given)
            if released.source is not None and self.mechanism.sigma:
                second[id(released.values)] = (
                    released.values,
                    self._protect(released.source.numpy(force=True)),
                )
            return released

        return twice

    swap(Gate, "_release_fresh", make)

    def change(message: Packet) -> list[Packet]:
        found = second.get(id(message.fields.get("values")))
        if found is None or found[0] is not message.fields["values"]:
            return []
        number = message.number + 1_000_000
        return [replace(message, fields={**message.fields, "values": found[1]}, number=number)]

    _observes(change)


@fault("messages", "a link sends each embedding twice", EMBEDDINGS)
def message_sent_twice() -> None:
    def make(honest: Any) -> Any:
        def twice(self: Link, receiver: str, content: Any, reply_to: int | None = None) -> Packet:
            packet: Packet = honest(self, receiver, content, reply_to)
            if packet.kind == "embedding":
                self._post(packet)
            return packet

        return twice

    swap(Link, "_pack", make)


@fault("messages", "messages of a protocol machine have one more field", (*SUMS, *SEALED))
def masked_field() -> None:
    def make(honest: Any) -> Any:
        return lambda self, content, host, here: {**honest(self, content, host, here), "hint": 1}

    swap(Link, "_masked", make)


# -- labels and defences ------------------------------------------------------------------------------------


@fault("labels", "labels are flipped less often than written", LABELS)
def labels_kept_too_often() -> None:
    swap(defences, "keep_probability", lambda honest: lambda epsilon, classes: honest(4 * epsilon, classes))


@fault("labels", "labels are not flipped at all", LABELS)
def labels_not_flipped() -> None:
    swap(gates, "randomise_labels", lambda honest: lambda labels, classes, epsilon, noise: labels.copy())


@fault("labels", "labels are flipped anew in every epoch", LABELS)
def labels_redrawn() -> None:
    truth: dict[str, Any] = {}

    def make(honest: Any) -> Any:
        def begin(self: Site, part: str, epoch: int) -> bool:
            truth.setdefault(self.name, np.array(self.data.y_train))
            anew = bool(honest(self, part, epoch))
            if part != "epoch" or self.name != self.label_holder or self.gate is None:
                return anew
            classes, epsilon = len(self.data.classes), self.plan.label_epsilon
            drawn = randomise_labels(truth[self.name], classes, epsilon, self.gate.noise)
            self.roles["server"].labels[: len(drawn)] = torch.from_numpy(drawn)
            return anew

        return begin

    swap(Site, "begin", make)


@fault(
    "labels",
    "labels are flipped by a generator whose seed is known",
    LABELS,
    needs="the seed: the flips are those of a sound generator; only the code or its package digest tells",
)
def labels_seeded() -> None:
    def make(honest: Any) -> Any:
        def seeded(labels: Any, classes: int, epsilon: float, noise: Noise) -> Any:
            known = Noise()
            known._stream = KeyStream(bytes(16))
            return honest(labels, classes, epsilon, known)

        return seeded

    swap(gates, "randomise_labels", make)


def _answers(change: Any) -> None:
    """Noisy gradients leave as change(gate, exact, mechanism, released values) makes them."""
    from benchmarks.faults.noise import _with

    def make(honest: Any) -> Any:
        def released(
            self: Gate, values: Any, mechanism: Any, *, divisor: float = 1.0, **where: Any
        ) -> Released:
            found: Released = honest(self, values, mechanism, divisor=divisor, **where)
            exact = gates.clip_exactly(values, mechanism.clip) / divisor
            return _with(found, np.asarray(change(exact, found.values), np.float32))

        return released

    swap(Gate, "release_noisy", make)


@fault("defences", "the noise on gradients is halved", DEFENCE)
def gradient_noise_halved() -> None:
    _answers(lambda exact, noisy: exact + (noisy - exact) / 2)


@fault("defences", "gradients leave without noise", DEFENCE)
def gradient_noise_off() -> None:
    _answers(lambda exact, noisy: exact)


@fault("defences", "the signs of raw gradients decide those of the noisy ones", DEFENCE)
def gradient_signs() -> None:
    _answers(lambda exact, noisy: np.copysign(noisy, exact))


@fault("defences", "gradients of every tenth batch leave without noise", DEFENCE)
def gradient_noise_off_sometimes() -> None:
    count: list[int] = []
    _answers(lambda exact, noisy: exact if (count.append(1) or len(count)) % 10 == 0 else noisy)


@fault(
    "defences", "a declared number beside noisy gradients carries the first record's raw gradient", DEFENCE
)
def gradient_in_rate() -> None:
    raw: list[float] = []

    def remember(exact: Any, noisy: Any) -> Any:
        raw.append(float(exact[0, 0]))
        return noisy

    _answers(remember)

    def make(honest: Any) -> Any:
        def leaking(self: Link, schema: Any, content: Any, host: str, here: bool) -> Any:
            fields, *rest = honest(self, schema, content, host, here)
            return (fields | {"rate": raw[-1]} if schema.kind == "gradient" and raw else fields), *rest

        return leaking

    swap(Link, "_fields", make)
