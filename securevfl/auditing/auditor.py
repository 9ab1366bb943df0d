"""`audit`: attacks a finished run with what its observers really saw, and compares with what is promised."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from securevfl import __version__
from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms.resolve import load_planned
from securevfl.attacks import ATTACKS
from securevfl.attacks.canary.audit import CanaryResult, canary_audits
from securevfl.attacks.contract import Attack
from securevfl.attacks.registry import find_attack
from securevfl.attacks.runner import Outcome, evaluate_all
from securevfl.attacks.source import Source
from securevfl.auditing.checks import (
    FAILED,
    Check,
    check_bypass,
    check_integrity,
    check_keys,
    check_messages,
    check_noise,
    check_sums,
)
from securevfl.auditing.matrix import Findings, matrix
from securevfl.auditing.report import Report, headline, sentences
from securevfl.data import VerticalData
from securevfl.errors import DataError, RunError
from securevfl.federation.run import Run, predictions
from securevfl.settings.plan import Plan

Step = Callable[[str, float], None]


def audit(
    run: Run | Path | str,
    attacks: str | Iterable[str] = "all",
    *,
    data: VerticalData | None = None,
    canaries: int = 0,
    seed: int = 0,
    workers: int = 1,
    isolated: bool = True,
    progress: Step = lambda what, share: None,
) -> Report:
    """Audits a run: integrity, matrix of promises, attacks on the recorded views, canaries through the gate.

    Args:
        run: The run, or its folder.
        attacks: ``all``, ``none``, or names of attacks.
        data: The data it was trained on. Without it, the plan's data set is loaded by name where possible;
            attacks that need the truth and cannot have it are reported as not applicable.
        canaries: Canary trials; 0 takes the default of the mode, negative skips the canary audit.
        seed: Seed of attacks and canaries.
        workers: Attack processes at once.
        isolated: False runs attacks in this process, for tests.
        progress: Called with what is being done and the share done.

    Raises:
        RunError: The folder holds no run.
        AttackError: An attack is unknown.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    if folder is None:
        raise RunError("only runs with a folder can be audited; train with out=...")
    chosen = _chosen(attacks)
    known, reason = (data, "") if data is not None else _data_of(folder)
    source = Source(folder, known)
    progress("ledgers", 0.0)
    checks = [check_integrity(source)]
    if checks[0].status == FAILED:
        return _finish(source, [], checks, {}, reason)
    checks += [check_keys(source), *check_messages(source), *check_bypass(source)]
    checks += [*check_sums(source), *check_noise(source)]
    measured = {} if canaries < 0 else _canaries(source, canaries, seed, progress)
    outcomes = _attack(source, chosen, seed, workers, isolated, progress)
    return _finish(source, outcomes, checks, measured, reason)


def _chosen(attacks: str | Iterable[str]) -> list[type[Attack]]:
    if attacks == "all":
        return list(ATTACKS.values())
    names = [attacks] if isinstance(attacks, str) else list(attacks)
    return [] if names == ["none"] else [find_attack(name) for name in names]


def _data_of(folder: Path) -> tuple[VerticalData | None, str]:
    """The data set that the plan names; None with the reason where it cannot be loaded."""
    plan_file = folder / "plan.toml"
    if not plan_file.is_file():
        raise RunError(f"{folder} holds no run: there is no plan.toml in it")
    plan = Plan.from_toml(plan_file)
    if not plan.source.data:
        return None, "the plan names no data set; give the data with --data"
    try:
        return load_planned(plan), ""
    except DataError as error:
        return None, str(error)


def _canaries(source: Source, trials: int, seed: int, progress: Step) -> dict[str, CanaryResult]:
    """Canary audits of the gate that all owners of the run share, if any of them promises something."""
    promises = any(_is_promise(record) for record in source.records)
    plan = source.plan
    if not promises or plan.sigma <= 0 or plan.insecure_reproducible_noise:
        return {}
    if _facts(source, "")["guarantee"] != "as accounted":
        return {}  # the releases did not pass our gate, so there is no gate to audit
    return canary_audits(
        plan,
        parties=source.parties,
        label_holder=source.label_holder,
        records=256 if source.data is None else source.data.n_train,
        trials=trials,
        seed=seed,
        progress=lambda name, share: progress(f"canaries ({name})", share),
    )


def _is_promise(record: ReleaseRecord) -> bool:
    return record.mechanism == "gaussian" and math.isfinite(record.mu)


def _attack(
    source: Source, chosen: list[type[Attack]], seed: int, workers: int, isolated: bool, progress: Step
) -> list[Outcome]:
    if not chosen:
        return []

    def report(done: int, total: int, outcome: Outcome) -> None:
        progress(f"attack {outcome.name}", done / total)

    return evaluate_all(source, chosen, seed=seed, workers=workers, isolated=isolated, progress=report)


def _finish(
    source: Source,
    outcomes: list[Outcome],
    checks: list[Check],
    canaries: dict[str, CanaryResult],
    no_data: str,
) -> Report:
    tampered = checks[0].status == FAILED
    findings = Findings(source=source, outcomes=outcomes, checks=checks, canaries=canaries)
    content: dict[str, Any] = {
        "run": _facts(source, no_data, tampered=tampered),
        "owners": {} if tampered else matrix(findings),
        "attacks": [outcome.to_mapping() for outcome in outcomes],
        "checks": [check.to_mapping() for check in checks],
        "canaries": {name: result.to_mapping() for name, result in canaries.items()},
        "seen": [] if tampered else _who_saw_what(source),
        "environment": _environment(),
    }
    report = Report(content=content)
    content["verdict"] = report.verdict
    content["words"] = [headline(content, report.verdict), *sentences(content)]
    return Report(content=json.loads(json.dumps(content)))


def _facts(source: Source, no_data: str, *, tampered: bool = False) -> dict[str, Any]:
    """What the run was; a run that has not finished is audited as far as it got."""
    plan = source.plan
    result: dict[str, Any] = {}
    if source.files.result_file.is_file():
        result = source.files.read_result()
    return {
        "folder": source.files.path.name,
        "algorithm": plan.algorithm,
        "protocol": plan.protocol,
        "mode": plan.mode,
        "data": plan.source.data,
        "parties": list(source.parties),
        "label_holder": source.label_holder,
        "clip": plan.clip,
        "sigma": plan.sigma,
        "delta": plan.delta,
        "epochs": result.get("epochs"),
        "test": result.get("test", {}),
        "labels": result.get("labels", ""),
        "prediction": predictions(source.records) if plan.mode == "sealed" and not tampered else {},
        "guarantee": result.get("guarantee", "as accounted"),
        "finished": bool(result),
        "views": source.observers,
        "truth": no_data or "at hand",
    }


def _who_saw_what(source: Source) -> list[dict[str, Any]]:
    """What each observer received: sender, kind, messages, bytes."""
    return [
        {"observer": observer, "sender": key.sender, "kind": key.kind, "messages": count, "bytes": size}
        for observer in source.observers
        for key, (count, size) in sorted(source.tally(observer).items())
        if not key.sent
    ]


def _environment() -> dict[str, str]:
    packages = ("torch", "numpy", "cryptography", "dp-accounting", "prv-accountant", "tenseal")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"securevfl": __version__, "python": platform.python_version(), **versions}
