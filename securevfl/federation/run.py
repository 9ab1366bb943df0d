"""Training runs: `train` makes one, `load_run` opens a finished one."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from securevfl.accountants.modes import privacy_matrix
from securevfl.accountants.records import HIDDEN, ReleaseRecord
from securevfl.algorithms import SERVER, Progress, ServerRole, find_algorithm
from securevfl.algorithms.alone import reached_alone
from securevfl.algorithms.constants import theory_notes
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sealed.card import CARDS
from securevfl.algorithms.sealed.tables import RECIPE
from securevfl.data import VerticalData
from securevfl.data.described import files_digest
from securevfl.data.description import is_description
from securevfl.errors import DataError, PlanError, RunError, SecureVFLError, TrainingDiverged
from securevfl.federation.callbacks import Callback, call_each
from securevfl.federation.continued import Profile
from securevfl.federation.folder import RunFolder
from securevfl.federation.prediction import Floats, Predictor, written_records
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.site import load_own, own_arrays
from securevfl.federation.threads import fitting_threads
from securevfl.federation.virtual import SimulatedCarrier, VirtualCarrier
from securevfl.privacy.journal import fingerprint
from securevfl.settings.plan import UNPROTECTED, Plan

WORST_R2 = -3.0
"""Below this a regression has not learnt badly, it has diverged: errors are twice the labels' spread."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run.

    Attributes:
        plan: The plan, with every choice filled in.
        metrics: One line per epoch.
        result: What ``train --json`` prints.
        folder: Where it is, if it was written.
        encoders: The trained encoders by party (only in the process that trained).
        head: The label holder's model (only in the process that trained).
        predictor: Applies the model to new records.
        measure: Computes what the label holder reaches alone (only in the process that trained).
        advise: Finds what `notes` says (only in the process that trained).
    """

    plan: Plan
    metrics: list[dict[str, Any]]
    result: dict[str, Any]
    folder: Path | None = None
    encoders: Mapping[str, nn.Module] = field(default_factory=dict)
    head: nn.Module | None = None
    predictor: Predictor | None = field(default=None, repr=False, compare=False)
    measure: Callable[[], dict[str, Any] | None] = field(default=lambda: None, repr=False, compare=False)
    advise: Callable[[], tuple[str, ...]] = field(default=tuple, repr=False, compare=False)

    def predict(
        self, blocks: Sequence[Any] | Mapping[str, Any], *, ids: Sequence[Any] | None = None
    ) -> Floats:
        """Predicts for new records; their embeddings leave through the gates and count like all others.

        The label holder obtains the result. Its own embeddings stay inside; those of all other parties (on a
        secure sum: their total) are released to it with kind ``prediction``, refused over budget, and written
        to the ledgers. `privacy` and ``result.json`` are brought up to date.

        A sealed run opens the exact sum of all parties' scores of each new record, which is counted apart
        from training (``result["prediction"]``). Records that it was trained on are refused, and so are
        records without IDs: an exact score would void what the run promises.

        Args:
            blocks: New rows of every party, in the order of the parties or by name, in the units of the
                training data before scaling.
            ids: Who the records are. In modes that count per record, a known ID pays for its release, a new
                one starts at nothing. Without IDs nobody can tell new records from old ones, so every record
                pays for every row. Mode ``strict`` counts that way in any case.

        Returns:
            Binary: each row's probability of the second class; multiclass: (rows, classes) probabilities;
            regression: values in the units of the labels.

        Raises:
            DataError: The rows or IDs do not fit.
            BudgetExceeded: A party's gate refuses; what other parties released until then stays counted.
            RunError: The run was written by something else and keeps no model.
        """
        if self.predictor is None:
            raise RunError("this run keeps no model to predict with")
        try:
            return self.predictor.predict(blocks, ids)
        finally:
            self._update_privacy(self.predictor)

    def _update_privacy(self, predictor: Predictor) -> None:
        self.result.update(counted(self.plan, predictor.records()))
        if predictor.folder is not None:
            predictor.folder.write_result(self.result)

    @property
    def test(self) -> dict[str, float | None]:
        """Metrics on the test part."""
        return dict(self.result["test"])

    @property
    def alone(self) -> dict[str, Any] | None:
        """What the label holder reaches alone: ``metric``, ``linear``, ``trees``; None without features.

        A run in memory computes it when it is asked for; a run in a folder has it in its result.
        """
        if "alone" not in self.result:
            self.result["alone"] = self.measure()
        found: dict[str, Any] | None = self.result["alone"]
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What the command prints after `note:`; empty for a run that was opened from its folder.

        How rows were joined, how choices were settled, and where the plan leaves the conditions of its
        paper's theorem. The last looks at everybody's rows, which are at hand in one process.
        """
        return self.advise()

    @property
    def privacy(self) -> dict[str, dict[str, Any]]:
        """What each owner has spent, for its worst observer."""
        return dict(self.result["privacy"])

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last epoch; None if it did not."""
        reason = self.result["stopped"]
        return None if reason is None else str(reason)


def train(
    data: VerticalData,
    plan: Plan | None = None,
    out: Path | str | None = None,
    *,
    resume: bool = False,
    encoders: Mapping[str, nn.Module] | None = None,
    head: nn.Module | None = None,
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    ray: str | None = None,
    profile: Path | str | None = None,
) -> Run:
    """Trains on vertical data, every release gated and accounted for.

    All parties run in this process, on the virtual network, or as actors of a Ray cluster. What the result
    promises is written in ``run.privacy``: for each owner the accounting mode, mu and epsilon towards its
    worst observer.

    Args:
        data: The parties' features and the labels.
        plan: What to do; the default plan is sealed training at epsilon 1.
        out: Folder for the results, which must not exist yet. None keeps everything in memory.
        resume: Go on with the unfinished run in `out`, from its last epoch.
        encoders: Your own encoder for some or all parties.
        head: Your own model for the label holder.
        progress: Called after every step.
        callbacks: Told of the start, of every epoch and of the end; see `securevfl.trackers`.
        ray: Run every organisation but the label holder in a process of its own, on a Ray cluster: its
            address, ``auto`` for the one of this machine, ``local`` to start one for this run. It needs
            `out`, which all machines of the cluster must see, and the plan's own models.
        profile: Folder of a profile of the same data, whose bins and label histogram a scorecard starts from.
            Its ledgers go on in `out`, and the plan's epsilon is what both may cost together.

    Raises:
        PlanError: The plan does not fit itself or the data, or is unprotected and does not say so.
        RunError: The folder exists, cannot be written, or belongs to another plan.
        BudgetExceeded: The budget does not even allow the first step. (If it ends training later, the run is
            returned with `stopped` set.)
    """
    plan = plan or Plan()
    plan.check_protection()
    before = None if profile is None else Profile.open(profile)
    if before is not None:
        plan = before.continued(plan)
    elif plan.profiled and not resume:
        raise PlanError("profile_epsilon follows from a profile; name its folder: train(..., profile=FOLDER)")
    resolved, scaled = resolve(plan, data)
    if out is None and resolved.record_views:
        raise PlanError("views are written to disk; give an output folder to record them")
    folder = None if out is None else RunFolder(Path(out))
    if ray is not None and (folder is None or encoders or head is not None):
        raise PlanError("a run on Ray needs an output folder, and the plan's own encoders and head")
    if resume:
        _check_same_plan(folder, resolved)
    elif folder is not None:
        if before is not None:
            before.check(resolved, scaled)
        folder.create(resolved)
        if before is not None:
            before.hand_over(folder, recorded=resolved.record_views)
    elif before is not None:
        raise PlanError("a profile's ledgers go on in the new run; give an output folder")
    make = partial(VirtualCarrier, encoders=encoders or {}, head=head) if ray is None else _actors_on(ray)
    begun = time.monotonic()
    with nullcontext() if folder is None else folder.locked(), fitting_threads(resolved, scaled):
        given = data if resolved.record_views and not resume else None
        schedule, carrier = _run(
            make, resolved, scaled, folder, progress, callbacks, resume=resume, given=given
        )
    records = carrier.records() if folder is None else written_records(folder.path)
    result = run_result(schedule, carrier, records, wall=time.monotonic() - begun)
    measure = partial(reached_alone, data, holds_features=resolved.label_holder == "party")
    advise = partial(_advice, plan, data, own_models=bool(encoders) or head is not None)
    if folder is not None:
        result["alone"] = measure()
        folder.write_result(result)
    call_each(callbacks, "on_finish", result)
    if not isinstance(carrier, VirtualCarrier):
        return replace(load_run(Path(str(out))), advise=advise)  # the models were trained elsewhere
    return Run(
        plan=resolved,
        metrics=schedule.metrics,
        result=result,
        folder=None if folder is None else folder.path,
        encoders=carrier.encoders,
        head=carrier.head,
        measure=measure,
        advise=advise,
        predictor=Predictor(
            plan=resolved,
            folder=folder,
            encoders=carrier.encoders,
            head=carrier.head,
            trained=carrier.trained(),
            gates=carrier.gates if folder is None else {},
        ),
    )


def _advice(plan: Plan, data: VerticalData, *, own_models: bool) -> tuple[str, ...]:
    """Notes on a plan and its data; of models that are not the plan's own no theorem is known."""
    settled = find_algorithm(plan.algorithm).notes(plan, data)
    return (*data.notes, *settled, *(() if own_models else theory_notes(plan, data)))


def _run(
    make: Callable[..., SimulatedCarrier],
    resolved: Plan,
    scaled: VerticalData,
    folder: RunFolder | None,
    progress: Callable[[Progress], None] | None,
    callbacks: Sequence[Callback],
    *,
    resume: bool,
    given: VerticalData | None,
) -> tuple[Schedule, SimulatedCarrier]:
    """Builds the sites and runs the schedule; a folder in which nothing has begun is removed again.

    Of the rows as they were given, each site keeps a digest, if `given` has them; of described files, too.
    """
    try:
        carrier = make(resolved, scaled, folder=folder, progress=progress)
    except SecureVFLError:
        if folder is not None and not resume:
            folder.remove()  # made a moment ago; nothing has been released
        raise
    schedule = Schedule(carrier, on_epoch=partial(call_each, callbacks, "on_epoch"))
    try:
        if given is not None:
            files = _digest_of_files(resolved.source.data)
            rows = {
                name: (fingerprint(own_arrays(given, name, carrier.hosts)), files)
                for name in carrier.hosts.values()
            }
            carrier.ask("keep_given", rows)
        call_each(callbacks, "on_start", resolved)
        drive(schedule.train())
    except BaseException as error:
        call_each(callbacks, "on_error", error)
        raise
    finally:
        carrier.close()
    return schedule, carrier


def _digest_of_files(named: str) -> Any:
    """The digest of described files that a plan names; None where it names none, or they are elsewhere."""
    try:
        return files_digest(named) if is_description(named) else None
    except DataError:
        return None


def _actors_on(ray: str) -> Callable[..., SimulatedCarrier]:
    """Builds sites on a cluster, which is looked for only then."""

    def make(*given: Any, **options: Any) -> SimulatedCarrier:
        from securevfl.federation import actors

        return actors.ActorCarrier(*given, pool=actors.RayPool(ray), **options)

    return make


def load_run(
    folder: Path | str,
    *,
    encoders: Mapping[str, nn.Module] | None = None,
    head: nn.Module | None = None,
) -> Run:
    """Opens a finished run.

    Args:
        folder: The run's folder.
        encoders: Modules like those that were given to `train`; their parameters are read from the folder.
            Needed only to predict, and only for encoders that are not the plan's own.
        head: The same for the label holder's model.

    Raises:
        RunError: The folder holds no finished run.
    """
    files = RunFolder(Path(folder))
    if not files.path.is_dir():
        raise RunError(f"there is no run folder {files.path}")
    plan, result = files.read_plan(), files.read_result()
    for name, module in {**(encoders or {}), **({} if head is None else {SERVER: head})}.items():
        load_own(files, name, module)
    return Run(
        plan=plan,
        metrics=files.read_metrics(),
        result=result,
        folder=files.path,
        encoders=encoders or {},
        head=head,
        predictor=Predictor(plan=plan, folder=files, encoders=encoders or {}, head=head),
    )


def _check_same_plan(folder: RunFolder | None, plan: Plan) -> None:
    if folder is None:
        raise PlanError("resume needs the folder of the run to go on with")
    saved, now = folder.read_plan().to_flat(), plan.to_flat()
    for name, value in saved.items():
        if now.get(name) != value:
            raise RunError(
                f"{folder.path} belongs to another plan: {name} was {value!r}, now it is {now.get(name)!r}"
            )
    if folder.result_file.exists():
        raise RunError(f"the run in {folder.path} is finished; there is nothing to resume")


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def spending(records: list[ReleaseRecord], plan: Plan) -> dict[str, dict[str, Any]]:
    """Per owner: mode, mu and epsilon towards its worst observer; infinite is None."""
    worst = {
        owner: max(observers.values(), key=lambda spend: spend.mu)
        for owner, observers in privacy_matrix(records, plan.accounted_delta).items()
        if observers
    }
    return {
        owner: {
            "mode": spend.mode,
            "mu": _number(spend.mu),
            "epsilon": _number(spend.epsilon),
            "delta": plan.delta,
            "releases": spend.releases,
            "observer": spend.observer,
        }
        for owner, spend in worst.items()
    }


def counted(plan: Plan, records: list[ReleaseRecord]) -> dict[str, Any]:
    """The part of a result that later releases change: ``privacy``, and of sealed runs ``prediction``."""
    result: dict[str, Any] = {"privacy": spending(records, plan)}
    return result | ({"prediction": predictions(records)} if plan.mode == "sealed" else {})


def predictions(records: list[ReleaseRecord]) -> dict[str, dict[str, Any]]:
    """Per owner: how many scores of single records were opened beside sealed training, and to whom."""
    counted: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.is_prediction:
            mine = counted.setdefault(record.owner, {"scores": 0, "observers": [], "epsilon": None})
            mine["scores"] += record.vectors
            mine["observers"] = sorted({*mine["observers"], *record.observers})
    return counted


def run_result(
    schedule: Schedule, carrier: SimulatedCarrier, records: list[ReleaseRecord], *, wall: float = 0.0
) -> dict[str, Any]:
    """The result of a run in virtual time.

    Args:
        schedule: What was run.
        carrier: Where.
        records: All releases.
        wall: Seconds that it took.
    """
    figures = carrier.figures()
    return result_content(
        carrier.plan,
        records,
        label_holder=carrier.label_holder,
        server=carrier.server,
        epochs=schedule.epochs,
        time={"virtual": figures.pop("time"), "wall": round(wall, 3)},
        stopped=schedule.stopped,
        **figures,
    )


def result_content(
    plan: Plan,
    records: list[ReleaseRecord],
    *,
    label_holder: str,
    server: ServerRole | None,
    epochs: int,
    **figures: Any,
) -> dict[str, Any]:
    """What ``train --json`` prints, on any runtime.

    Args:
        plan: The resolved plan.
        records: The releases that the writer of the result knows of.
        label_holder: Who holds the labels.
        server: The label holder's role; None where it runs elsewhere.
        epochs: Epochs done.
        figures: Time, messages, bytes, why it stopped, and what else a runtime has to say.

    Raises:
        TrainingDiverged: The model is no model: its outputs are not finite, or far worse than a constant.
    """
    if server is not None:
        _check_converged(server, stopped=figures.get("stopped"))
    result = {
        "algorithm": plan.algorithm,
        "model": plan.model,
        **({"recipe": RECIPE} if plan.model in CARDS else {}),
        "protocol": plan.protocol,
        "test": {} if server is None else {name: _number(value) for name, value in server.test.items()},
        **evaluated(server),
        **counted(plan, records),
        "guarantee": plan.guarantee,
        "labels": label_exposure(records, label_holder),
        "epochs": epochs,
        "loss": None if server is None else _number(server.loss),
        **({} if server is None else server.conclusions()),
        **({"absent_rounds": server.absences()} if plan.threshold and server is not None else {}),
        **figures,
    }
    return dict(json.loads(json.dumps(result)))


def warning_of(result: Mapping[str, Any]) -> str:
    """What stands before everything else that is said of an unprotected run; empty for others."""
    exposed = f", labels {result['labels']}" if result.get("labels") else ""
    return f"UNPROTECTED{exposed}. " if result.get("guarantee") == UNPROTECTED else ""


def evaluated(server: ServerRole | None) -> dict[str, Any]:
    """Of sealed models: where the test figures come from, and what the federation itself has opened."""
    if server is None or not server.test_is:
        return {}
    return {"test_is": server.test_is, "evaluation": {n: _number(v) for n, v in server.opened.items()}}


def _check_converged(server: ServerRole, *, stopped: str | None) -> None:
    """A model that is none must not end on a page of success; a budget may well leave metrics unknown.

    What the federation opens of a sealed model may be unknown as well: noise can hide a small class.
    """
    test = server.test
    r2 = test.get("r2")
    if r2 is not None and r2 < WORST_R2:
        raise TrainingDiverged(
            f"training diverged: r2 is {r2:.3g}, far worse than a constant; lower the learning rate, or "
            "raise epsilon"
        )
    unknown = all(value is None for value in test.values())
    if test and not stopped and unknown and test != server.opened:
        raise TrainingDiverged("training diverged: outputs are not finite; lower the learning rate")


def label_exposure(records: list[ReleaseRecord], label_holder: str) -> str:
    """How the labels are exposed, in words."""
    mine = [r for r in records if r.owner == label_holder and r.mechanism not in HIDDEN]
    if mine and all(record.mode == "sealed" for record in mine):
        partial = any("(features)" in record.kind for record in mine)
        covered = "but epsilon covers features only" if partial else "as accounted"
        return f"sealed: only noisy totals of whole batches depend on them, {covered}"
    flipped = [record for record in mine if record.kind == "randomised labels"]
    sent = [record for record in mine if record.kind != "randomised labels"]
    given = sorted({name for record in sent if record.kind == "labels" for name in record.observers})
    tested = sorted({name for record in sent if record.kind == "test labels" for name in record.observers})
    derived = sorted({name for record in sent for name in record.observers} - {*given, *tested})
    noisy = all(record.mechanism == "gaussian" for record in sent)
    ways = []
    if given:
        ways.append(f"shared: all training labels were sent to {', '.join(given)}")
    if tested:
        ways.append(f"all test labels, as they are, to {', '.join(tested)}")
    if derived:
        ways.append(f"exposed: {_gradients_in_words(sent)} go to {', '.join(derived)}")
    if not ways:
        return f"not exposed: {label_holder} sends nothing that depends on labels"
    rest = "all else" if tested else "all"
    guarantees = [
        f"randomised response: {rest} is computed from flipped labels, epsilon {record.epsilon:g} for each"
        for record in flipped
        if record.epsilon is not None and record.mechanism == "randomised-response"
    ]
    return "; ".join([*ways, *(guarantees or ["as accounted" if noisy else "no guarantee"])])


def _gradients_in_words(sent: list[ReleaseRecord]) -> str:
    """What a defence made of the gradients: it is part of the kind, in parentheses."""
    defences = sorted({record.kind.partition("(")[2].rstrip(")") for record in sent} - {""})
    if defences:
        return f"gradients of the loss, changed by {' and '.join(defences)} (a heuristic),"
    exact = any(record.mechanism == "exact" for record in sent)
    return "exact gradients of the loss" if exact else "clipped gradients of the loss with Gaussian noise"
