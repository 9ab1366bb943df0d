"""A recorder for training loops that were not written here, so that `audit` can serve them too.

The recorder writes the same folder as `train`: plan, ledgers, views, models, result. It writes down what the
loop *declares* about clipping and noise; no gate enforces it, and the report says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from torch import nn

from securevfl.accountants.records import ReleaseRecord
from securevfl.errors import PlanError
from securevfl.federation.folder import RunFolder
from securevfl.models import save_module
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.messages import Head, Packet
from securevfl.privacy.rows import Rows
from securevfl.privacy.views import Receipts, ViewWriter
from securevfl.settings.epochs import COUNTED
from securevfl.settings.plan import Plan

DECLARED = "declared by the recorded program; no gate enforced it"
SERVER = "server"


class Recorder:
    """Writes a run folder from somebody's own loop. Use it as a context manager.

    Args:
        folder: The folder to make; it must not exist.
        plan: What the loop does, as a plan: algorithm whose messages it resembles (``vafl-sync`` for split
            learning), how encoders are trained, clip, sigma, delta, data set.
        parties: Names of the parties that hold features.
        label_holder: The organisation with the labels.
    """

    def __init__(
        self, folder: Path | str, plan: Plan, *, parties: tuple[str, ...], label_holder: str
    ) -> None:
        if not parties:
            raise PlanError("a run has at least one party")
        self.files = RunFolder(Path(folder))
        settled = {"fusion": "concat", "head": "linear"}
        open_choices = {name: value for name, value in settled.items() if getattr(plan, name) == "auto"}
        # Attacks that train a model of their own need a number; how many there were, the result says.
        self.plan = plan.with_changes(record_views=True, epochs=plan.epochs or COUNTED, **open_choices)
        self.files.create(self.plan)
        self.hosts = {**{party: party for party in parties}, SERVER: label_holder}
        names = dict.fromkeys(self.hosts.values())
        self._ledgers = {name: Ledger(name, self.files.ledger(name)) for name in names}
        self._views = {name: ViewWriter(self.files.view(name), name) for name in names}
        self._receipts = {name: Receipts(name) for name in names}
        self._number = 0
        self._epoch = 0
        self._result: dict[str, Any] = {}

    def exchange(self, party: str, rows: Any, embeddings: Any, gradients: Any = None) -> None:
        """One step of split learning: a party's embeddings of a batch, and the gradients that came back.

        Args:
            party: Who sent the embeddings.
            rows: Record index of each row (training records first, each at most once).
            embeddings: What really left, noise included: (rows, width).
            gradients: What came back, or None.
        """
        indices = _rows(rows, embeddings)
        head = self._write(party, SERVER, "embedding", indices, noisy=True)
        upload = self._send("embedding", party, SERVER, {"rows": indices, "values": embeddings}, head)
        if gradients is not None:
            head = self._write(self.hosts[SERVER], party, "gradient", indices, noisy=False)
            self._send("gradient", SERVER, party, {"values": gradients}, head, reply_to=upload)

    def evaluation(self, party: str, rows: Any, embeddings: Any) -> None:
        """Embeddings that left for an evaluation or a prediction; they count like all others."""
        indices = _rows(rows, embeddings)
        asked = self._send("embed", SERVER, party, {"rows": indices, "purpose": "evaluation"}, None)
        head = self._write(party, SERVER, "evaluation", indices, noisy=True)
        self._send("embedding", party, SERVER, {"values": embeddings}, head, reply_to=asked)

    def epoch(self, **figures: Any) -> None:
        """Adds a line to the metrics."""
        self._epoch += 1
        self.files.append_metrics({"epoch": self._epoch, **figures})

    def finish(
        self,
        *,
        test: Mapping[str, float],
        encoders: Mapping[str, nn.Module] | None = None,
        head: nn.Module | None = None,
    ) -> None:
        """Writes the result, and the models where they shall be audited too."""
        models = {**dict(encoders or {}), **({SERVER: head} if head is not None else {})}
        if models:
            self.files.model(SERVER).parent.mkdir(exist_ok=True)
        for name, module in models.items():
            save_module(self.files.model(name), module)
        self._result = {
            "algorithm": self.plan.algorithm,
            "protocol": self.plan.protocol,
            "test": dict(test),
            "epochs": self._epoch,
            "labels": "as the recorded program exposes them",
            "guarantee": DECLARED,
        }

    def _write(self, sender: str, receiver: str, kind: str, rows: Rows, *, noisy: bool) -> Head | None:
        """The ledger entry of a release; nothing inside one organisation."""
        if self.hosts[sender] == self.hosts[receiver]:
            return None
        protected = noisy and self.plan.sigma > 0
        record = ReleaseRecord(
            owner=self.hosts[sender],
            observers=(self.hosts[receiver],),
            kind=kind,
            mechanism="gaussian" if protected else "exact",
            clip=self.plan.clip if protected else None,
            sigma=self.plan.sigma if protected else None,
            sensitivity=2 * self.plan.clip if protected else None,
            rows=rows,
            vectors=len(rows),
            mode=self.plan.mode,
        )
        return self._ledgers[record.owner].append(record)

    def _send(
        self,
        kind: str,
        sender: str,
        receiver: str,
        fields: dict[str, Any],
        head: Head | None,
        reply_to: int | None = None,
    ) -> int:
        if sender not in self.hosts or receiver not in self.hosts:
            raise PlanError(f"{sender!r} or {receiver!r} is not a party of this run")
        self._number += 1
        arrays = {name: _array(value) for name, value in fields.items()}
        message = Packet(
            kind=kind,
            sender=sender,
            receiver=receiver,
            fields=arrays,
            number=self._number,
            reply_to=reply_to,
            head=head,
        )
        sends, gets = self.hosts[sender], self.hosts[receiver]
        if sends != gets:
            self._views[gets].record(message, time=float(self._number), sent=False)
            self._views[sends].record(message, time=float(self._number), sent=True)
            if head is not None:
                self._receipts[gets].note(head)
        return self._number

    def close(self) -> None:
        """Closes the files; the folder can be audited from now on."""
        for name, ledger in self._ledgers.items():
            ledger.close()
            self._views[name].close()
            self._receipts[name].save(self.files.path)
        if self._result:
            self.files.write_result(json.loads(json.dumps(self._result)))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _array(value: Any) -> Any:
    """Tensors and lists of numbers as arrays of a type that the wire carries."""
    if isinstance(value, str):
        return value
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    return array.astype(np.int32) if array.dtype.kind in "iu" else array.astype(np.float32)


def _rows(rows: Any, vectors: Any) -> Rows:
    indices = np.asarray(rows.cpu() if hasattr(rows, "cpu") else rows).astype(np.int64)
    if indices.ndim != 1 or len(indices) != len(vectors):
        raise PlanError(f"{len(indices)} row indices were given for {len(vectors)} vectors")
    return indices
