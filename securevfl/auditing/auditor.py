"""`audit`: attacks a finished run with what its observers really saw, and compares with what is promised."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from securevfl import __version__
from securevfl.accountants import privacy_matrix
from securevfl.accountants.records import ReleaseRecord
from securevfl.algorithms import find_algorithm
from securevfl.algorithms.sealed.card import CARDS
from securevfl.algorithms.sealed.tables import RECIPE
from securevfl.attacks import ATTACKS
from securevfl.attacks.canary.audit import CanaryResult, canary_audits
from securevfl.attacks.canary.real import shape_of, training_again
from securevfl.attacks.contract import Attack
from securevfl.attacks.protocol import scan_files
from securevfl.attacks.registry import find_attack
from securevfl.attacks.runner import AttackOutcome, evaluate_all
from securevfl.attacks.source import Source
from securevfl.auditing.agreements import check_agreement, deviations
from securevfl.auditing.matrix import EVERYBODY, Findings, matrix, number, overall
from securevfl.auditing.reconciliation import reconcile
from securevfl.auditing.replay import replay
from securevfl.auditing.report import Report
from securevfl.auditing.scoring import check_scoring, scoring_facts
from securevfl.auditing.verdicts import AUDIENCES, CANARIES, HOLDERS, VISIBLE, ErrorBudget, Finding, Verdict
from securevfl.auditing.words import headline, plain, sentences
from securevfl.data import VerticalData
from securevfl.errors import DataError, LedgerError, PlanError, RunError, SecureVFLError
from securevfl.federation.recorder import DECLARED
from securevfl.federation.run import Run, label_exposure, predictions, spending
from securevfl.files import read_json
from securevfl.models.threads import few_threads
from securevfl.privacy.chain import SESSION, LedgerReader, signed_end
from securevfl.privacy.ledger import HeadError, read_agreement, read_homes
from securevfl.privacy.views import holders_of
from securevfl.settings.plan import Plan, plan_file
from securevfl.settings.source import load_planned, shown_data

OnStep = Callable[[str, float], None]


@few_threads(0)
def audit(
    run: Run | Path | str,
    attacks: str | Iterable[str] = "all",
    *,
    data: VerticalData | None = None,
    canaries: int = 0,
    seconds: float = 0.0,
    seed: int = 0,
    workers: int = 1,
    isolated: bool = True,
    progress: OnStep = lambda what, share: None,
) -> Report:
    """Audits a run: books against messages, replay of the noise, attacks on the views, canaries.

    What is tested on the run itself (reconciliation, replay) decides whether a promise holds. Canaries test
    the software, on made-up records; they and attacks can only contradict a promise.

    Args:
        run: The run, or its folder.
        attacks: ``all``, ``none``, or names of attacks.
        data: The data it was trained on. Without it, the plan's data set is loaded by name where possible;
            attacks that need the truth and cannot have it are reported as not applicable.
        canaries: Canary trials; 0 takes the default of the mode, negative skips the canary audit.
        seconds: Processor time for canaries that go through whole training runs on made-up records; 0 for
            none. How many runs it was enough for stands in the report.
        seed: Seed of attacks and canaries.
        workers: Attack processes at once.
        isolated: False runs attacks in this process, for tests.
        progress: Called with what is being done and the share done.

    Raises:
        RunError: The folder holds no run, several, or one that is not whole.
        AttackError: An attack is unknown.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    if folder is None:
        raise RunError("only runs with a folder can be audited; train with out=...")
    chosen = _chosen(attacks)
    check_folder(folder)
    known, reason = (data, "") if data is not None else _data_of(folder)
    source = Source(folder, known)
    progress("ledgers", 0.0)
    integrity = _integrity(source)
    if integrity.verdict is Verdict.VIOLATED:
        return _finish(Findings(source=source, reconciled=[integrity]), seed, reason)
    budget = _budget(source)
    reconciled = [integrity, _no_keys(source), *_kept_private(folder), *check_agreement(folder)]
    reconciled += [*_stated(source), *check_scoring(folder, source.label_holder)]
    reconciled += reconcile(source, budget)
    progress("replay", 0.0)
    replayed = _replay(source, budget)
    measured = {} if canaries < 0 else _canaries(source, canaries, seed, progress)
    again, said = _train_again(source, seconds, seed, progress)
    measured |= again
    evidence = Findings(
        source=source,
        reconciled=reconciled,
        replayed=replayed,
        outcomes=_attack(source, chosen, seed, workers, isolated, progress),
        canaries=measured,
        levels=budget.split(CANARIES, list(measured)) if measured else {},
        budget=budget,
    )
    return _finish(evidence, seed, reason, said)


def check_folder(folder: Path) -> None:
    """Raises `RunError` with one clear line where a folder is not that of a whole run."""
    written = plan_file(folder)
    try:
        plan = Plan.from_toml(written)
    except PlanError as error:
        raise RunError(f"{folder} cannot be audited by this version of securevfl: {error}") from error
    if absent := _unsaid(written.read_text(encoding="utf-8"), plan.to_toml()):
        raise RunError(
            f"{written} does not say {absent}, so it is cut or of another version; copy the run again"
        )
    _check_recipe(folder, plan)
    ledgers = {path.stem for path in (folder / "ledger").glob("*.jsonl")}
    views = {path.name for path in (folder / "views").glob("*") if path.is_dir()}
    lost = sorted(name for name in views if not (folder / "views" / name / "messages.jsonl").is_file())
    if lost or (views and not ledgers):
        what = f"views/{lost[0]}/messages.jsonl" if lost else "ledger/"
        raise RunError(f"{folder} is not whole: {what} is missing; copy the run again")
    if not ledgers and plan.algorithm not in ("central", "local"):
        raise RunError(f"{folder} is not whole: there is no ledger in it; copy the run again")
    _check_ledger_ends(folder)
    models = {path.stem for path in (folder / "models").glob("*.safetensors")}
    finished = (folder / "result.json").is_file() and read_homes(folder) is None
    gone = sorted(path.stem for path in (folder / "models").glob("*.json") if path.stem not in models)
    gone += (
        sorted(ledgers - models - set(find_algorithm(plan.algorithm).helpers)) if finished and models else []
    )
    if gone:
        raise RunError(f"{folder} is not whole: models/{gone[0]}.safetensors is missing; copy the run again")


def _check_recipe(folder: Path, plan: Plan) -> None:
    """Raises `RunError` where a card was made of its totals in another way than this version would."""
    result = folder / "result.json"
    if plan.model in CARDS and result.is_file():
        content = read_json(result)
        made = content.get("recipe", 1) if isinstance(content, dict) else None
        if made != RECIPE:
            raise RunError(
                f"{folder} holds a card of another version (recipe {made}, here {RECIPE}), where the "
                "same totals make another card; audit it with the version that trained it"
            )


def _check_ledger_ends(folder: Path) -> None:
    """Raises `RunError` where a ledger ends as a copy or a process that broke off leaves it.

    Whoever falsifies a ledger ends it after a line. What was not signed when a process died has not left.
    """
    finished = (folder / "result.json").is_file()
    for path in sorted((folder / "ledger").glob("*.jsonl")):
        with path.open("rb") as file:
            file.seek(-min(1, path.stat().st_size), os.SEEK_END)
            torn = file.read() not in (b"", b"\n")
        if torn or (not finished and signed_end(path) < path.stat().st_size):
            raise RunError(
                f"{path} ends in the middle of an entry; copy the run again, or if it was interrupted, go on "
                "with it (securevfl train --resume) before it is audited"
            )


def _unsaid(given: str, whole: str) -> str:
    """The first setting of a whole plan that a file does not name; empty if it names all."""
    content, expected = tomllib.loads(given), tomllib.loads(whole)
    for name, value in expected.items():
        if name not in content and value != {}:
            return name
        lacking = sorted(set(value) - set(content.get(name, {}))) if isinstance(value, dict) else []
        if lacking:
            return f"{name}.{lacking[0]}"
    return ""


def _integrity(source: Source) -> Finding:
    """Verifies all ledgers: chains, signatures, and the heads that observers hold."""
    said: dict[str, Any] = {"promise": EVERYBODY, "path": "ledgers"}
    try:
        count = len(source.records)
    except HeadError as error:
        told = ", ".join(holders_of(source.files.path, error.head))
        reason = f"{error}; so says what {told} keeps, which nobody has signed: one of the two is not true"
        return Finding(**said, verdict=Verdict.VIOLATED, reasons=(reason,))
    except LedgerError as error:
        return Finding(**said, verdict=Verdict.VIOLATED, reasons=(str(error),))
    keys = Counter(
        entry.content["public_key"]
        for path in sorted((source.files.path / "ledger").glob("*.jsonl"))
        for entry in LedgerReader(path).entries(SESSION)
    )
    if again := sum(number > 1 for number in keys.values()):
        reason = f"{again} signing keys return in a later session or another ledger; each begins with its own"
        return Finding(**said, verdict=Verdict.VIOLATED, reasons=(reason,))
    tested = f"chains, signatures and heads held by observers, {count:,} entries"
    return Finding(**said, verdict=Verdict.HOLDS, tested=(tested,))


def _stated(source: Source) -> list[Finding]:
    """Whether the result states what the ledgers add up to, and who has seen labels.

    Of a run over a network each organisation states what it knows, and `gather` adds up what it brings.
    """
    files = source.files
    if not files.result_file.is_file() or read_homes(files.path) is not None:
        return []
    result, wrong = files.read_result(), []
    if result.get("guarantee") == DECLARED:
        return []
    for owner, spent in spending(source.records, source.plan).items():
        said = result.get("privacy", {}).get(owner, {"epsilon": 0.0})["epsilon"]
        least, stated = (math.inf if each is None else each for each in (spent["epsilon"], said))
        if stated < least * (1 - 1e-9):
            wrong.append(f"the result states epsilon {stated:.4g} of {owner}, whose ledger has {least:.4g}")
    wrong += _over_budget(source)
    if result.get("labels") != label_exposure(source.records, source.label_holder):
        wrong.append("the result does not say who has seen labels as the ledgers do")
    if wrong:
        return [Finding(promise=EVERYBODY, path="result", verdict=Verdict.VIOLATED, reasons=tuple(wrong))]
    tested = ("states what the ledgers add up to",)
    return [Finding(promise=EVERYBODY, path="result", verdict=Verdict.HOLDS, tested=tested)]


def _over_budget(source: Source) -> list[str]:
    """Owners whose ledgers add up to more than the plan lets their gates release."""
    plan, most = source.plan, source.plan.budget_epsilon
    if not most or plan.insecure_reproducible_noise:
        return []
    return [
        f"the ledger of {owner} adds up to epsilon {spent['epsilon']:.4g}; the plan's budget is {most:.4g}"
        for owner, spent in spending(source.records, plan).items()
        if (plan.mode == "sealed" or owner != source.label_holder)
        and spent["epsilon"] is not None
        and spent["epsilon"] > most * (1 + 1e-6)
    ]


def _agreed(folder: Path) -> str:
    """Digest of what the organisations of a run over a network signed; empty for any other run."""
    return "" if read_homes(folder) is None else str(read_agreement(folder)["digest"])


def _no_keys(source: Source) -> Finding:
    """Looks for secret keys in every file of the run."""
    found = scan_files(source.files.path)
    said: dict[str, Any] = {"promise": EVERYBODY, "path": "files"}
    if found:
        reason = f"{found} secret keys lie in the run's files"
        return Finding(**said, verdict=Verdict.VIOLATED, reasons=(reason,))
    return Finding(**said, verdict=Verdict.HOLDS, tested=("no secret key in any of them",))


def _kept_private(folder: Path) -> list[Finding]:
    """Whether others on this machine may read what is raw data: views and journals."""
    parts = [folder / part for part in ("views", "journal") if (folder / part).is_dir()]
    if not parts or os.name != "posix":
        return []
    said: dict[str, Any] = {"promise": EVERYBODY, "path": "files"}
    readable = [
        path
        for part in parts
        for path in sorted(part.rglob("*"))
        if path.is_file() and _is_readable(path, (path.parent, part, folder))
    ]
    if readable:
        reason = (
            f"{readable[0].relative_to(folder)}, one of {len(readable)}, can be read by others on this "
            "machine; views and journals are raw data: take the right away (chmod -R go= on their folders) "
            "and ask who has used it"
        )
        return [Finding(**said, verdict=Verdict.VIOLATED, reasons=(reason,))]
    return [Finding(**said, verdict=Verdict.HOLDS, tested=("views and journals are their owners' alone",))]


def _is_readable(path: Path, folders: tuple[Path, ...]) -> bool:
    """Whether the group, or everybody, may read a file and pass the folders on the way to it."""
    reads, passes = path.stat().st_mode, [folder.stat().st_mode for folder in folders]
    return any(
        reads & read and all(mode & enter for mode in passes)
        for read, enter in ((stat.S_IRGRP, stat.S_IXGRP), (stat.S_IROTH, stat.S_IXOTH))
    )


def _budget(source: Source) -> ErrorBudget:
    """The error budget at the weakest promise of the run, the one that a verdict may add least to."""
    spends = privacy_matrix(source.records, source.plan.accounted_delta)
    found = [s.epsilon for row in spends.values() for s in row.values() if math.isfinite(s.epsilon)]
    return ErrorBudget(delta=source.plan.delta, epsilon=max(found, default=0.0))


def _replay(source: Source, budget: ErrorBudget) -> list[Finding]:
    """The noise that was really added; where a promise is worth nothing, at the level for data holders."""
    return replay(source, budget, audience=VISIBLE if budget.alpha(VISIBLE) > 0 else HOLDERS)


def _chosen(attacks: str | Iterable[str]) -> list[type[Attack]]:
    if attacks == "all":
        return list(ATTACKS.values())
    names = [attacks] if isinstance(attacks, str) else list(attacks)
    return [] if names == ["none"] else [find_attack(name) for name in names]


def _data_of(folder: Path) -> tuple[VerticalData | None, str]:
    """The data set that the plan names; None with the reason where it cannot be loaded.

    The plan of a run over a network names none. What a folder that others brought names is not read.
    """
    plan = Plan.from_toml(folder / "plan.toml")
    if not plan.source.data or read_homes(folder) is not None:
        return None, "the plan names no data set; give the data with --data"
    try:
        return load_planned(plan), ""
    except DataError as error:
        return None, str(error)


def _is_ours(source: Source) -> bool:
    """Whether an owner promises something, and what it released passed our gate: else nothing to try."""
    promises = any(_is_promise(record) for record in source.records)
    plan = source.plan
    if not promises or plan.sigma <= 0 or plan.insecure_reproducible_noise:
        return False
    return bool(_facts(source, "")["guarantee"] == "as accounted")


def _train_again(
    source: Source, seconds: float, seed: int, progress: OnStep
) -> tuple[dict[str, CanaryResult], dict[str, Any]]:
    """Canaries through whole training runs, and what the report says about them."""
    if seconds <= 0 or not _is_ours(source):
        return {}, {"seconds": 0.0, "reason": "no time was given for it" if seconds <= 0 else "no promise"}
    data, plan = source.data, source.plan
    classes = plan.embedding if plan.mode == "sealed" and plan.embedding > 1 else 2
    if plan.mode == "sealed" and plan.settings.label_high > plan.settings.label_low:
        classes = 0
    shape = shape_of(
        source.parties,
        source.label_holder,
        widths=() if data is None else data.widths,
        classes=classes,
    )
    try:
        found = training_again(
            plan,
            shape,
            seconds=seconds,
            seed=seed,
            progress=lambda name, share: progress(f"canaries ({name})", share),
        )
    except SecureVFLError as error:
        return {}, {"seconds": seconds, "reason": str(error)}
    return found, {"seconds": seconds, "reason": "" if found else "nothing is promised to the observer"}


def _canaries(source: Source, trials: int, seed: int, progress: OnStep) -> dict[str, CanaryResult]:
    """Canary audits of the gate that all owners of the run share, if any of them promises something."""
    plan = source.plan
    if not _is_ours(source):
        return {}
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
    source: Source, chosen: list[type[Attack]], seed: int, workers: int, isolated: bool, progress: OnStep
) -> list[AttackOutcome]:
    if not chosen:
        return []

    def report(done: int, total: int, outcome: AttackOutcome) -> None:
        progress(f"attack {outcome.name}", done / total)

    return evaluate_all(source, chosen, seed=seed, workers=workers, isolated=isolated, progress=report)


def _finish(evidence: Findings, seed: int, no_data: str, again: dict[str, Any] | None = None) -> Report:
    source = evidence.source
    tampered = evidence.reconciled[0].verdict is Verdict.VIOLATED
    owners = {} if tampered else matrix(evidence)
    content: dict[str, Any] = {
        "verdict": overall(evidence, owners).value,
        "run": _facts(source, no_data, tampered=tampered),
        "owners": owners,
        "attacks": [outcome.to_mapping() for outcome in evidence.outcomes],
        "findings": [finding.to_mapping() for finding in (*evidence.reconciled, *evidence.replayed)],
        "canaries": {
            name: {**result.to_mapping(), "violated": evidence.refuted(name) is not None}
            for name, result in evidence.canaries.items()
        },
        "training_again": again or {"seconds": 0.0, "reason": "the ledgers cannot be trusted"},
        "seen": [] if tampered else _who_saw_what(source),
        "seed": seed,
        "budget": _budget_words(evidence.budget),
        "environment": _environment(),
    }
    content["words"] = [headline(content), *sentences(content)]
    content["plain"] = plain(content)
    return Report(content=json.loads(json.dumps(content)))


def _budget_words(budget: ErrorBudget | None) -> dict[str, Any]:
    if budget is None:
        return {}
    levels = {name: budget.alpha(name) for name in AUDIENCES}
    return {**levels, "added_delta": number(budget.added_delta), "words": budget.sentence()}


def _facts(source: Source, no_data: str, *, tampered: bool = False) -> dict[str, Any]:
    """What the run was; a run that has not finished is audited as far as it got."""
    plan = source.plan
    result: dict[str, Any] = {}
    if source.files.result_file.is_file():
        result = source.files.read_result()
    return {
        "folder": source.files.path.name,
        "adversary": plan.adversary_in_words,
        "dealer": plan.dealer_in_words,
        "agreement": _agreed(source.files.path),
        "algorithm": plan.algorithm,
        "protocol": plan.protocol,
        "mode": plan.mode,
        "data": shown_data(plan.source.data),
        "parties": list(source.parties),
        "label_holder": source.label_holder,
        "clip": plan.clip,
        "sigma": plan.sigma,
        "delta": plan.delta,
        "epochs": result.get("epochs"),
        "test": result.get("test", {}),
        "labels": result.get("labels", ""),
        "prediction": predictions(source.records) if plan.mode == "sealed" and not tampered else {},
        "scoring": {} if tampered else scoring_facts(source.files.path),
        "guarantee": result.get("guarantee", plan.guarantee),
        "finished": bool(result),
        "deviations": [] if tampered else deviations(source.files.path),
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
