"""Predictions, recomputed: what left for new records, against the trained models and the rows that were kept.

Where views are recorded, each party keeps in its journal the rows of the new records that it embeds, with the
place of the ledger entry under which they leave, and whoever opens a total or a score keeps that. The kept
models give what would have left, or been opened, without noise. Models are read, not trained, so nothing
amplifies rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from scipy import stats
from torch import nn

from securevfl.accountants.records import PREDICTION
from securevfl.algorithms import SERVER, Algorithm
from securevfl.algorithms.base import Role
from securevfl.algorithms.messages import Prediction
from securevfl.algorithms.prediction import Predicting, PredictingParty, PredictingServer
from securevfl.algorithms.sealed.prediction import ScoringParty, ScoringServer, SealedPredicting
from securevfl.attacks.source import Source
from securevfl.auditing.evidence import NOISE_TESTS, NoiseEvidence, conclude
from securevfl.auditing.verdicts import Finding, Verdict
from securevfl.data import VerticalData
from securevfl.errors import SecureVFLError
from securevfl.federation.site import checked_encoder, load_own, planned_head
from securevfl.federation.trained import Trained
from securevfl.federation.virtual import VirtualCarrier
from securevfl.privacy.chain import LedgerReader
from securevfl.privacy.gate import clip_exactly
from securevfl.privacy.journal import PREDICTED, SCORED, Array
from securevfl.privacy.noise import Floats
from securevfl.privacy.views import View

PATH, EXCESS, LEAN, SAME = "predictions", "excess", "lean", "recomputed from models and rows"
_SAME_VALUES = 1e-4
_NO_ROWS = "the rows of records that were predicted are not in the journal of {}; record them: --record-views"
_NO_MODEL = "the model of {} is not here; bring the folders of all organisations together: securevfl gather"
_UNSEEN = "no view holds all that {} let out for new records; record them: --record-views"
_UNPAIRED = (
    "what {} let out for new records cannot be told apart by what was opened: requests came again, were "
    "refused, or their totals were not kept"
)


class _Missing(Exception):
    """What keeps predictions from being recomputed; the words say how to supply it."""


class Predicted:
    """What owners released for new records.

    Args:
        source: The run.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.pairs = sorted(
            {
                (record.owner, observer)
                for record in source.records
                if record.kind == PREDICTION
                for observer in record.observers
            }
        )
        self.owners = sorted({owner for owner, _ in self.pairs})
        self.tests = [_test(owner, test) for owner in self.owners for test in (*NOISE_TESTS, EXCESS, LEAN)]
        self._opens = source.plan.mode == "sealed" or source.plan.protocol != "plain"

    def findings(self, levels: Mapping[str, float]) -> list[Finding]:
        """One for each owner and observer."""
        found = {}
        for owner in self.owners:
            try:
                found[owner] = self._judge(owner, levels)
            except _Missing as missing:
                found[owner] = _untested(owner, str(missing))
            except SecureVFLError as error:
                found[owner] = _untested(owner, f"recomputing failed: {error}")
        return [replace(found[owner], promise=f"{owner} against {other}") for owner, other in self.pairs]

    def noise(self, owner: str) -> Iterator[tuple[Floats, float]]:
        """Noise of an owner's own on predictions, with its claimed std; none where sums carry it."""
        if self.source.data is None or self._opens or not self.source.plan.sigma:
            return
        try:
            for values, exact, std in self._sent(owner):
                yield values - exact, std
        except (_Missing, SecureVFLError):
            return

    def _judge(self, owner: str, levels: Mapping[str, float]) -> Finding:
        if self.source.data is None:
            raise _Missing("replay needs the data of the run; give it with --data")
        evidence, gap, lean, vectors = NoiseEvidence(limit=0.0), 0.0, 0.0, 0
        for values, exact, std in self._opened if self._opens else self._sent(owner):
            if exact.shape != values.shape:
                return _violated(
                    owner, f"vectors of shape {values.shape}, where the model gives {exact.shape}"
                )
            if not std:
                gap = max(gap, float(np.abs(values - exact).max() / max(1e-3, np.abs(exact).max())))
                continue
            largest = float(np.abs(values).max(initial=0.0))
            released = None if self._opens else values
            evidence.add(values - exact, std, released=released, largest=largest)
            norms = np.linalg.norm(exact, axis=1)
            along = ((values - exact) * exact).sum(1)[norms > 0] / norms[norms > 0]
            lean, vectors = lean + float(along.sum()) / std, vectors + len(along)
        if gap > _SAME_VALUES:
            return self._other(owner)
        if not self.source.plan.sigma or self.source.plan.mode == "sealed":
            return Finding(promise=owner, path=PATH, verdict=Verdict.HOLDS, tested=(SAME,))
        if evidence.variance.excessive(levels[_test(owner, EXCESS)]):
            return _violated(owner, "what was added to the model's values is not the declared noise")
        # Along the model's own values Gaussian noise is standard normal; other values would lean away.
        if 2 * stats.norm.sf(abs(lean) / max(1, vectors) ** 0.5) < levels[_test(owner, LEAN)]:
            return _violated(owner, "what left is not what the model gives for the records, with noise")
        outcomes = evidence.judge({test: levels[_test(owner, test)] for test in NOISE_TESTS})
        return conclude(owner, PATH, outcomes)

    def _other(self, owner: str) -> Finding:
        """Other values than the models give; among members that may do anything they are one's own harm."""
        if self.source.plan.mode == "sealed" and self.source.plan.settings.adversary == "malicious":
            return _untested(owner, "a member brought other scores than its model gives; whose is not known")
        return _violated(owner, "what left is not what the model gives for the records")

    # -- what left ------------------------------------------------------------------------------------------

    def _entries(self, owner: str) -> list[int]:
        """Places of an owner's entries for new records, in order."""
        reader = LedgerReader(self.source.files.ledger(owner))
        return [entry.index for entry in reader.entries(PREDICTION)]

    def _rows(self, owner: str) -> dict[int, Array]:
        """Place in the ledger -> rows; of a place that was refused at first, the last.

        Raises:
            _Missing: Those of an entry are not there, or the model is not.
        """
        folder = self.source.files.journal(owner)
        lines = View(folder).messages(PREDICTED) if folder.is_dir() else ()
        kept = {int(seen.fields["where"]): seen.fields["values"] for seen in lines}
        if not set(self._entries(owner)) <= kept.keys():
            raise _Missing(_NO_ROWS.format(owner))
        self._check_models(owner)
        return kept

    def _check_models(self, *parties: str) -> None:
        for party in parties:
            if party in self.source.known.parties and not self.source.files.model(party).is_file():
                raise _Missing(_NO_MODEL.format(party))

    def _sent(self, owner: str) -> Iterator[tuple[Floats, Floats, float]]:
        """Values that an owner sent, what its model gives, and the noise of each.

        As the receiver has them or, without its view, as the owner has.
        """
        source, plan, rows = self.source, self.source.plan, self._rows(owner)
        views = [name for name in (source.label_holder, owner) if name in source.observers]
        if not views:
            raise _Missing(_UNSEEN.format(owner))
        before, places = set[bytes](), set[int]()
        for seen in View(source.view_folder(views[0])).messages(Prediction.kind):
            values = np.asarray(seen.fields["values"], np.float64)
            if seen.head is None or seen.head[0] != owner or values.tobytes() in before:
                continue  # or of a request that came again
            before.add(values.tobytes())
            if seen.head[1] not in rows:
                raise _Missing(_NO_ROWS.format(owner))
            places.add(seen.head[1])
            exact = self._embedded(owner, rows[seen.head[1]])
            yield values, clip_exactly(exact, plan.clip) if plan.sigma else exact, plan.sigma
        if not set(self._entries(owner)) <= places:
            raise _Missing(_UNSEEN.format(owner))

    @cached_property
    def _opened(self) -> list[tuple[Floats, Floats, float]]:
        """Totals, or scores, that the label holder opened, what the models give, and the noise of each."""
        holder, totals, own = self.source.label_holder, list[Floats](), list[Array | None]()
        folder, last = self.source.files.journal(holder), None
        for seen in View(folder).messages(PREDICTED, SCORED) if folder.is_dir() else ():
            if seen.kind == SCORED:
                totals.append(np.asarray(seen.fields["values"], np.float64))
                own.append(last)
            last = seen.fields["values"] if seen.kind == PREDICTED else None
        brought = {owner: self._rows(owner) for owner in self.owners}
        for owner in self.owners:
            if not totals or len(self._entries(owner)) != len(totals):
                raise _Missing(_UNPAIRED.format(owner))
        found = []
        for number, total in enumerate(totals):
            rows = {owner: brought[owner][self._entries(owner)[number]] for owner in self.owners}
            if self.source.plan.mode == "sealed":
                found.append((total, self._scores({**rows, holder: own[number]}, total), 0.0))
            else:
                found.append((total, *self._sum(rows)))
        return found

    # -- what models give -----------------------------------------------------------------------------------

    def _embedded(self, owner: str, rows: Array) -> Floats:
        role = self._roles.get(owner)
        if not isinstance(role, PredictingParty):
            raise SecureVFLError(f"{owner} is no party of the run")
        with torch.no_grad():
            found: Floats = role.encoder.eval()(torch.from_numpy(np.array(rows))).double().numpy()
        return found

    def _sum(self, rows: Mapping[str, Array]) -> tuple[Floats, float]:
        """The sum of all parties' embeddings as they enter it, and the std of its noise."""
        plan, server = self.source.plan, self._roles[SERVER]
        parts = [self._embedded(owner, each) for owner, each in rows.items()]
        exact: Floats = np.sum([clip_exactly(e, plan.clip) if plan.sigma else e for e in parts], axis=0)
        noise = server.sums.channels[SERVER].noise if isinstance(server, PredictingServer) else None
        return exact, noise.noise.total_sigma if noise is not None else plan.sigma * len(parts) ** 0.5

    def _scores(self, rows: Mapping[str, Array | None], total: Floats) -> Floats:
        """The sum of all members' scores."""
        data = self.source.known
        self._check_models(*data.parties)
        blocks = [rows.get(party) for party in data.parties]
        if any(block is None or len(block) != len(total) for block in blocks):
            raise _Missing(_UNPAIRED.format(self.source.label_holder))
        taken = Trained.of(data, messages=0, time=0.0).with_rows(blocks, len(total))
        roles = self._carrier(taken, SealedPredicting(np.arange(len(total)))).roles
        members = [r.member for r in roles if isinstance(r, ScoringParty | ScoringServer)]
        found: Floats = np.sum([each.own_scores() for each in members if each is not None], axis=0)
        return found.reshape(total.shape)

    @cached_property
    def _roles(self) -> dict[str, Role]:
        """Roles as they predict, with the models that were kept."""
        data = self.source.known
        roles = self._carrier(data, Predicting(np.arange(data.n_train), all_new=True)).roles
        parties = {role.address: role for role in roles if isinstance(role, PredictingParty)}
        return {**parties, SERVER: next(role for role in roles if isinstance(role, PredictingServer))}

    def _carrier(self, data: VerticalData, algorithm: Algorithm) -> VirtualCarrier:
        source, plan = self.source, self.source.plan
        encoders: dict[str, nn.Module] = {p: checked_encoder(plan, data, p, gate=None) for p in data.parties}
        head = planned_head(plan, data)
        for name, module in {**encoders, SERVER: head}.items():
            if source.files.model(name).is_file():
                load_own(source.files, name, module)
        return VirtualCarrier(plan, data, encoders=encoders, head=head, algorithm=algorithm)


def _test(owner: str, test: str) -> str:
    return f"{owner}, {PATH}: {test}"


def _untested(owner: str, reason: str) -> Finding:
    return Finding(promise=owner, path=PATH, verdict=Verdict.NOT_TESTED, reasons=(reason,))


def _violated(owner: str, reason: str) -> Finding:
    return Finding(promise=owner, path=PATH, verdict=Verdict.VIOLATED, reasons=(reason,))
