"""Replay: what clean runs get, and what it says of runs whose product was broken while they trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from securevfl import Plan, VerticalData, load_run, train
from securevfl.algorithms import local
from securevfl.algorithms import resolve as resolving
from securevfl.algorithms.local import planned_encoder
from securevfl.algorithms.prediction import PredictingParty
from securevfl.algorithms.sealed.prediction import ScoringMember
from securevfl.attacks.source import Source
from securevfl.auditing import replay as replays
from securevfl.auditing.replay import replay
from securevfl.auditing.verdicts import HOLDERS, ErrorBudget, Finding, Verdict, worst
from securevfl.data.columns import Column
from securevfl.federation import site as sites
from securevfl.federation.folder import RunFolder
from securevfl.federation.site import Site
from securevfl.models import load_module, save_module
from securevfl.privacy import gate as gates
from securevfl.privacy import journal as journals
from securevfl.privacy.gate import Gate
from securevfl.privacy.journal import ORIGIN
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.noise import Noise, snap
from securevfl.privacy.views import View
from securevfl.protocols.sealed.party import SealedParty
from securevfl.protocols.stream import KEY_BYTES, KeyStream
from securevfl.protocols.sums.noise import DistributedNoise
from securevfl.settings.source import load_planned

BUDGET = ErrorBudget(delta=1e-5, epsilon=2.0)
STRICT: dict[str, Any] = {"algorithm": "vafl-sync", "sigma": 2.0, "epochs": 3, "embedding": 4}
DP = {**STRICT, "encoder_training": "dp", "gradient_sigma": 2.0}
FROZEN = {**STRICT, "encoder_training": "none"}
SUMS = {**STRICT, "fusion": "sum"}
HIDDEN = {**STRICT, "model": "mlp", "hidden": (4,), "hidden_noise": (0.3,)}
SEALED: dict[str, Any] = {"algorithm": "sealed", "epsilon": 2.0, "epochs": 24}
NETWORK = {**SEALED, "epochs": 4, "model": "mlp"}
SHORT = {**SEALED, "epochs": 6}  # a fault that spoils every total shows in a quarter of them
CASES: dict[str, dict[str, Any]] = {
    "strict": STRICT,
    "asynchronous": {**STRICT, "algorithm": "vafl"},
    "fdml": {**STRICT, "algorithm": "fdml", "embedding": 0},
    "flex": {**STRICT, "algorithm": "flex"},
    "frozen": FROZEN,
    "dp-encoder": DP,
    "two-tree": {**SUMS, "protocol": "two-tree"},
    "pairwise": {**SUMS, "protocol": "pairwise"},
    "plain-tree": {**SUMS, "protocol": "plain-tree"},
    "afsgd": {"algorithm": "afsgd", "sigma": 2.0, "epochs": 2, "protocol": "two-tree"},
    "flipped labels": {**STRICT, "label_epsilon": 1.0},
    "noisy gradients": {**STRICT, "defence": "noise", "defence_level": 5},
    "hidden noise": HIDDEN,
    "sealed": SEALED,
    "sealed network": NETWORK,
}


def make_data(parties: int = 3, width: int = 4) -> VerticalData:
    rng = np.random.default_rng(0)
    blocks = [rng.normal(size=(160, width)).clip(-3, 3) for _ in range(parties)]
    labels = (sum(block[:, 0] for block in blocks) + rng.normal(size=160) > 0).astype(int)
    return VerticalData.from_arrays(blocks, labels, bounds=[np.array([[-3.0, 3.0]] * width)] * parties)


DATA = make_data()
UNPOWERED = ("statistics", "randomised labels", "updates", "noise inside encoders")


def trained(folder: Path, **fields: Any) -> Path:
    train(DATA, Plan(batch=32, record_views=True, seed=1, **fields), out=folder / "run")
    return folder / "run"


def judged(folder: Path, **options: Any) -> list[Finding]:
    return replay(Source(folder, DATA), BUDGET, **options)


@pytest.mark.parametrize("case", CASES)
def test_a_clean_run_holds_on_every_path(case: str, tmp_path: Path) -> None:
    found = judged(trained(tmp_path, **CASES[case]))
    assert found
    assert worst(found) is Verdict.HOLDS, [f for f in found if f.verdict is not Verdict.HOLDS]
    noisy = [f for f in found if f.path not in UNPOWERED]
    assert all(finding.power and finding.power > 0.65 for finding in noisy)


# -- faults --------------------------------------------------------------------------------------------------

PERTURB, GAUSSIAN, SHARE = Noise.perturb, Noise.gaussian, DistributedNoise.share


def halved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Noise, "gaussian", lambda self, shape, std: GAUSSIAN(self, shape, std / 2))


def off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Noise, "perturb", lambda self, values, std: np.asarray(values, np.float64))


def off_lattice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Noise, "perturb", lambda self, v, std: v + GAUSSIAN(self, np.shape(v), std))


def same_for_all_rows(patch: pytest.MonkeyPatch) -> None:
    def perturb(self: Noise, values: Any, std: float) -> Any:
        return snap(np.asarray(values, np.float64) + GAUSSIAN(self, np.shape(values)[-1:], std), std)

    patch.setattr(Noise, "perturb", perturb)


def same_in_all_iterations(patch: pytest.MonkeyPatch) -> None:
    drawn: dict[Any, Any] = {}

    def gaussian(self: Noise, shape: Any, std: float) -> Any:
        return drawn.setdefault((id(self), shape, std), GAUSSIAN(self, shape, std))

    patch.setattr(Noise, "gaussian", gaussian)


def small_in_one_epoch(patch: pytest.MonkeyPatch) -> None:
    original, small = Site.begin, [1.0]

    def begin(self: Site, part: str, number: int) -> bool:
        epoch = self.server.epochs_done if self.server is not None else None
        if epoch is not None:
            small[0] = 0.5 if part == "epoch" and epoch == 1 else 1.0
        return original(self, part, number)

    patch.setattr(Site, "begin", begin)
    patch.setattr(Noise, "gaussian", lambda self, shape, std: GAUSSIAN(self, shape, std * small[0]))


def unclipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gates, "clip_rows", lambda vectors, clip: 5 * vectors)
    patch.setattr(gates, "clip_exactly", lambda values, clip: 5 * values)


def understated(patch: pytest.MonkeyPatch) -> None:
    original = Ledger.append

    def append(self: Ledger, record: Any) -> Any:
        if record.kind == "refresh" or (record.rows is not None and 7 in record.rows.tolist()):
            return self.head
        return original(self, record)

    patch.setattr(Ledger, "append", append)


def update_not_used(patch: pytest.MonkeyPatch) -> None:
    original = Gate.noisy_update

    def noisy_update(self: Gate, sums: Any, *, rows: Any) -> Any:
        original(self, sums, rows=rows)
        return list(sums)

    patch.setattr(Gate, "noisy_update", noisy_update)


def sent_without(patch: pytest.MonkeyPatch) -> None:
    original = Gate._release_fresh

    def release(self: Gate, vectors: Any, values: Any, *rest: Any) -> Any:
        released = original(self, vectors, values, *rest)
        object.__setattr__(released, "values", values.astype(np.float32))
        return released

    patch.setattr(Gate, "_release_fresh", release)


def share_missing(patch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def share(self: DistributedNoise, size: int, stream: Any) -> Any:
        calls[0] += 1
        return SHARE(self, size, stream) * (calls[0] % self.parties > 0)

    patch.setattr(DistributedNoise, "share", share)


def self_share_missing(patch: pytest.MonkeyPatch) -> None:
    original = SealedParty.noise_for

    def noise_for(self: SealedParty, target: int) -> Any:
        return original(self, target) * np.uint64(target != self.index)

    patch.setattr(SealedParty, "noise_for", noise_for)


def sealed_noise_off(patch: pytest.MonkeyPatch) -> None:
    original = SealedParty.noise_for
    patch.setattr(SealedParty, "noise_for", lambda self, target: original(self, target) * np.uint64(0))


def sealed_noise_again(patch: pytest.MonkeyPatch) -> None:
    original, drawn = SealedParty.noise_for, {}

    def again(self: SealedParty, target: int) -> Any:
        fresh = original(self, target)
        return drawn.setdefault((self.index, target, fresh.shape), fresh)  # evaluations have other shapes

    patch.setattr(SealedParty, "noise_for", again)


def labels_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gates, "randomise_labels", lambda labels, classes, epsilon, noise: labels)


def leaning_inwards(patch: pytest.MonkeyPatch) -> None:
    def perturb(self: Noise, values: Any, std: float) -> Any:
        exact = np.asarray(values, np.float64)
        noise = GAUSSIAN(self, exact.shape, std)
        return snap(exact - noise * np.sign((noise * exact).sum(-1, keepdims=True)), std)

    patch.setattr(Noise, "perturb", perturb)


def inner_noise(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def weak(patch: pytest.MonkeyPatch) -> None:
        original = Noise.uniform
        patch.setattr(Noise, "uniform", lambda self, shape, half: change(original(self, shape, half)))

    return weak


def same_for_every_record(noise: Any) -> Any:
    return np.repeat(noise[:1], len(noise), axis=0)


def clipped_by_tensor(patch: pytest.MonkeyPatch) -> None:
    honest = local.clipped_gradient_sum

    def clipped(encoder: Any, inputs: Any, upstream: Any, clip: float, **noise: Any) -> Any:
        records = [
            honest(encoder, inputs[row : row + 1], upstream[row : row + 1], 1e6) for row in range(len(inputs))
        ]
        short = [[each * min(1.0, clip / max(float(each.norm()), 1e-12)) for each in own] for own in records]
        return [torch.stack(each).sum(0) for each in zip(*short, strict=True)]

    patch.setattr(local, "clipped_gradient_sum", clipped)


TWO_TREE, PAIRWISE = CASES["two-tree"], CASES["pairwise"]
FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = [
    *((fault, plan) for fault in (halved, off) for plan in (STRICT, CASES["asynchronous"], FROZEN, DP)),
    (off, CASES["plain-tree"]),
    (off, SHORT),
    (halved, CASES["noisy gradients"]),
    *((off_lattice, plan) for plan in (STRICT, DP)),
    *((same_for_all_rows, plan) for plan in (STRICT, FROZEN)),
    *((same_in_all_iterations, plan) for plan in (STRICT, DP)),
    (small_in_one_epoch, {**STRICT, "epochs": 8}),
    *((unclipped, plan) for plan in (STRICT, FROZEN, DP)),
    *((understated, plan) for plan in (STRICT, SHORT)),
    (update_not_used, DP),
    *((sent_without, plan) for plan in (STRICT, FROZEN)),
    *((share_missing, {**plan, "epochs": 5}) for plan in (TWO_TREE, PAIRWISE)),
    *((self_share_missing, plan) for plan in ({**SEALED, "epochs": 60}, NETWORK)),
    *((sealed_noise_off, plan) for plan in (SHORT, NETWORK)),
    *((sealed_noise_again, plan) for plan in (SHORT, NETWORK)),
    (labels_kept, CASES["flipped labels"]),
    *((leaning_inwards, plan) for plan in (STRICT, FROZEN)),
    *((inner_noise(change), HIDDEN) for change in (lambda noise: noise / 2, same_for_every_record)),
    (clipped_by_tensor, {**DP, "model": "mlp", "gradient_clip": 0.05, "gradient_sigma": 0.05}),
]


@pytest.mark.parametrize(
    ("fault", "plan"),
    [pytest.param(*each, marks=pytest.mark.slow if each[1]["epochs"] > 24 else ()) for each in FAULTS],
    ids=[f"{fault.__name__}-{plan['algorithm']}-{number}" for number, (fault, plan) in enumerate(FAULTS)],
)
def test_a_fault_during_training_is_found_by_a_clean_audit(
    fault: Callable[[pytest.MonkeyPatch], None], plan: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        folder = trained(tmp_path, **plan)
    assert worst(judged(folder)) is Verdict.VIOLATED


def test_what_no_single_owner_shows_all_of_them_together_may() -> None:
    """Every owner's noise leans by four standard deviations: too little for one of them, not for all four."""
    rng, level = np.random.default_rng(0), 1e-9

    def path(lean: float) -> replays._Path:
        found = replays._Path(replays.NoiseEvidence(limit=0.0), 0.0)
        for _ in range(16):
            beyond, exact = rng.normal(size=(2, 1, 30))
            noise = rng.normal(size=(1, 30))
            noise += (
                (lean - float(np.vdot(noise, beyond)) / np.linalg.norm(beyond))
                * beyond
                / np.linalg.norm(beyond)
            )
            found.add("epoch 1", exact + noise, exact, 1.0, 0.0, False, beyond)
        return found

    leaning, honest = [path(1.0) for _ in range(4)], [path(0.0) for _ in range(4)]
    assert {replays._lean([each], level).verdict for each in leaning} == {Verdict.HOLDS}
    assert replays._lean(leaning, level).verdict is Verdict.VIOLATED
    assert replays._lean(honest, level).verdict is Verdict.HOLDS


def test_encoders_that_never_learn_are_kept_to_the_last_bit(tmp_path: Path) -> None:
    folder = trained(tmp_path, **FROZEN)
    path = RunFolder(folder).model("p1")
    state = load_file(path)
    name = min(state)
    state[name].view(-1)[0] *= 1 + 2**-20
    save_file(state, path)
    (found,) = [f for f in judged(folder) if f.verdict is Verdict.VIOLATED]
    assert found.promise == "p1 against p0" and "stayed as it was" in found.reasons[0]


# -- what is not tested, and what must not be said -----------------------------------------------------------


def test_without_views_data_or_journal_nothing_is_tested(tmp_path: Path) -> None:
    folder = trained(tmp_path, **STRICT)
    assert {f.verdict for f in replay(Source(folder), BUDGET)} == {Verdict.NOT_TESTED}
    assert RunFolder(folder).forget_evidence() == ["views", "journal"]
    (reason,) = {reason for finding in judged(folder) for reason in finding.reasons}
    assert "--record-views" in reason
    assert load_run(folder).privacy


def test_other_data_is_no_violation(tmp_path: Path) -> None:
    """One value of one party is another: the promise was not tested, it was not broken."""
    folder = trained(tmp_path, **STRICT)
    blocks = [np.array(block) for block in DATA.train]
    blocks[1][0, 0] += 1
    findings = replay(Source(folder, replace(DATA, train=tuple(blocks))), BUDGET)
    assert {finding.verdict for finding in findings} == {Verdict.NOT_TESTED}
    assert any("not what p1 trained on" in reason for finding in findings for reason in finding.reasons)


def test_a_run_that_was_resumed_is_not_tested(tmp_path: Path) -> None:
    folder = trained(tmp_path, **STRICT)
    ledger = folder / "ledger" / "p1.jsonl"
    kept = Ledger("p1", ledger)
    kept.append(Source(folder, DATA).records[-1])
    kept.close()
    assert "resumed" in judged(folder)[0].reasons[0]


def test_answers_in_another_order_over_a_network_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer was empty, so every later one comes a place earlier, and has another batch's shape."""
    plan = Plan(algorithm="vafl", sigma=2.0, epochs=3, embedding=4, batch=30, record_views=True, seed=1)
    train(DATA, plan, out=tmp_path / "run")

    class Earlier(replays._Sent):
        def __init__(self, source: Source) -> None:
            super().__init__(source)
            self._places["p1"]["server", "p1", "gradient"].pop()

    monkeypatch.setattr(replays, "_Sent", Earlier)
    monkeypatch.setattr(replays, "read_homes", lambda folder: {})
    found = judged(tmp_path / "run")
    assert {finding.verdict for finding in found} == {Verdict.NOT_TESTED}
    assert all("answers something else" in reason for finding in found for reason in finding.reasons)
    assert all("order over a network" in reason for finding in found for reason in finding.reasons)


def test_rounding_elsewhere_is_no_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that rounds differently ends with other last digits; the verdict stays."""
    folder = trained(tmp_path, **STRICT)
    begun = replays._Kept.keep

    def keep(self: Any, kind: str, values: Any, **where: Any) -> Any:
        kept = begun(self, kind, values, **where)
        return kept * np.float32(1 + 2e-7) if kind == "model" else kept

    monkeypatch.setattr(replays._Kept, "keep", keep)
    assert worst(judged(folder)) is Verdict.HOLDS


def test_chaos_is_not_tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where last digits decide, nothing is concluded from values that cannot be recomputed."""
    folder = trained(tmp_path, **STRICT)
    monkeypatch.setattr(replays, "_LAST_DIGITS", 1.0)
    path = RunFolder(folder).model("p1")
    evidence = replays._Evidence(Source(folder, DATA), _Nothing(), shake=0.0)
    module = replays._Carrier(evidence).encoders["p1"]
    load_module(path, module)
    for parameter in module.parameters():
        parameter.data *= 1.00001
    save_module(path, module)
    assert Verdict.NOT_TESTED in {finding.verdict for finding in judged(folder)}
    assert Verdict.VIOLATED not in {finding.verdict for finding in judged(folder)}


class _Nothing:
    def note(self, *_: Any, **__: Any) -> None:
        """Keeps nothing."""


def predicted(folder: Path, records: int = 60) -> dict[str, Verdict]:
    """Verdicts on the predictions of p1 and on its training, after some records were predicted."""
    rows = np.random.default_rng(3).normal(size=(3, records, 4)).clip(-3, 3)
    load_run(folder).predict(list(rows), ids=list(range(900, 900 + records)))
    return {f.path: f.verdict for f in judged(folder) if f.promise == "p1 against p0"}


@pytest.mark.parametrize("case", ["strict", "frozen", "dp-encoder", "fdml"])
def test_predictions_are_recomputed(case: str, tmp_path: Path) -> None:
    found = predicted(trained(tmp_path, **CASES[case]))
    assert set(found.values()) == {Verdict.HOLDS}
    assert "predictions" in found


def test_exact_predictions_are_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(tmp_path, **{**STRICT, "sigma": 0.0, "unprotected": True})
    assert predicted(folder) == {"predictions": Verdict.HOLDS}


def test_predictions_of_other_values_are_violated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, honest = trained(tmp_path, **FROZEN), PredictingParty._embed
    monkeypatch.setattr(
        PredictingParty, "_embed", lambda self, rows: 10 * self.records[np.arange(len(honest(self, rows)))]
    )
    assert predicted(folder, 1000)["predictions"] is Verdict.VIOLATED


@pytest.mark.parametrize("patch", [halved, off])
def test_predictions_without_their_noise_are_violated(
    patch: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained(tmp_path, **FROZEN)
    patch(monkeypatch)
    found = predicted(folder)
    assert found["predictions"] is Verdict.VIOLATED
    assert found["embeddings"] is Verdict.HOLDS


@pytest.mark.parametrize("case", ["two-tree", "pairwise", "plain-tree", "afsgd", "sealed", "sealed network"])
def test_predictions_by_sums_are_recomputed(case: str, tmp_path: Path) -> None:
    folder = trained(tmp_path, **{**CASES[case], "epochs": 1})
    rows = np.random.default_rng(4).normal(size=(3, 7, 4)).clip(-3, 3)
    load_run(folder).predict(list(rows), ids=list(range(800, 807)))
    assert predicted(folder)["predictions"] is Verdict.HOLDS


def test_totals_of_predictions_without_their_noise_are_violated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, honest = trained(tmp_path, **CASES["two-tree"]), DistributedNoise.share
    monkeypatch.setattr(DistributedNoise, "share", lambda self, *given: 0 * honest(self, *given))
    assert predicted(folder)["predictions"] is Verdict.VIOLATED


def test_sealed_scores_of_other_models_are_violated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, honest = trained(tmp_path, **{**SEALED, "epochs": 1}), ScoringMember.own_scores
    with monkeypatch.context() as faulty:
        faulty.setattr(ScoringMember, "own_scores", lambda self: honest(self) + 0.001 * self.exchange.index)
        rows = np.random.default_rng(4).normal(size=(3, 7, 4)).clip(-3, 3)
        load_run(folder).predict(list(rows), ids=list(range(800, 807)))
    found = {f.promise: f.verdict for f in judged(folder) if f.path == "predictions"}
    assert set(found.values()) == {Verdict.VIOLATED}


def test_predictions_with_noise_of_the_training_are_violated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as faulty:  # every process begins the same stream
        faulty.setattr(KeyStream, "from_os_entropy", lambda: KeyStream(bytes(KEY_BYTES)))
        folder = trained(tmp_path, **FROZEN)
        load_run(folder).predict(list(DATA.train), ids=list(range(900, 900 + DATA.n_train)))
    reasons = [reason for f in judged(folder) for reason in f.reasons]
    assert any("came again in predictions" in reason for reason in reasons)


def test_predictions_that_no_view_holds_are_not_tested(tmp_path: Path) -> None:
    folder = trained(tmp_path, **STRICT)
    assert predicted(folder)["predictions"] is Verdict.HOLDS
    for observer in ("p0", "p1", "p2"):
        path = folder / "views" / observer / "messages.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"kind": "prediction"' not in line))
    rows = np.random.default_rng(4).normal(size=(3, 7, 4)).clip(-3, 3)
    load_run(folder).predict(list(rows), ids=list(range(800, 807)))
    found = {f.path: f for f in judged(folder) if f.promise == "p1 against p0"}["predictions"]
    assert found.verdict is Verdict.NOT_TESTED and "no view holds all" in found.reasons[0]


def test_predictions_of_a_model_that_is_not_here_are_not_tested(tmp_path: Path) -> None:
    folder = trained(tmp_path, **FROZEN)
    predicted(folder)
    RunFolder(folder).model("p1").unlink()
    (found,) = [f for f in judged(folder) if (f.promise, f.path) == ("p1 against p0", "predictions")]
    assert found.verdict is Verdict.NOT_TESTED and "model of p1" in found.reasons[0]


def test_a_journal_of_predictions_alone_is_no_evidence_of_training(tmp_path: Path) -> None:
    folder = trained(tmp_path, **STRICT)
    RunFolder(folder).forget_evidence()
    assert predicted(folder)["all releases"] is Verdict.NOT_TESTED


def test_data_holders_may_use_a_larger_level(tmp_path: Path) -> None:
    folder = trained(tmp_path, **STRICT)
    visible, private = judged(folder)[0], judged(folder, audience=HOLDERS)[0]
    assert (private.power or 0) > (visible.power or 1)


@pytest.mark.parametrize(
    ("made", "verdict"),
    [("", Verdict.VIOLATED), ("1.0.0", Verdict.NOT_TESTED), ("unsaid", Verdict.NOT_TESTED)],
)
def test_a_first_model_that_holds_rows_is_not_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, verdict: Verdict
) -> None:
    """Encoders that see no records must begin without them; another torch may draw others, and journals
    of before do not say whether a model was drawn at all."""
    keep = Gate.keep

    def unsaid(self: Gate, kind: str, *values: Any, **said: Any) -> Any:
        return None if kind == ORIGIN else keep(self, kind, *values, **said)

    def planned(plan: Plan, data: VerticalData, party: str) -> torch.nn.Module:
        encoder = planned_encoder(plan, data, party)
        if party == "p1":
            with torch.no_grad():
                next(encoder.parameters())[0, 0] += float(np.mean(data.train[1][:, 0]))
        return encoder

    with monkeypatch.context() as patch:
        patch.setattr(sites, "planned_encoder", planned)
        if made == "unsaid":
            patch.setattr(Gate, "keep", unsaid)
        elif made:
            patch.setattr(torch, "__version__", made)
        folder = trained(tmp_path, **FROZEN)
    found = {each.promise: each for each in judged(folder)}["p1 against p0"]
    assert found.verdict is verdict and "the first model of p1" in found.reasons[0]


@pytest.mark.parametrize(("given", "verdict"), [(DATA, Verdict.VIOLATED), (None, Verdict.NOT_TESTED)])
def test_rows_that_were_scaled_by_their_own_statistics_are_not_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: VerticalData | None, verdict: Verdict
) -> None:
    """The plan says public. With other data at hand nobody can tell."""
    scale = resolving._scale
    with monkeypatch.context() as patch:
        patch.setattr(
            resolving,
            "_scale",
            lambda plan, data: replace(data.scaled("standard"), scaling=scale(plan, data).scaling),
        )
        folder = trained(tmp_path, **FROZEN)
    found = replay(Source(folder, given or make_data(parties=3, width=4).scaled("public")), BUDGET)
    assert {each.verdict for each in found} == {verdict}, found
    assert "trained on" in found[0].reasons[0]


def test_a_journal_that_has_lost_lines_is_no_absent_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, lost = journals.Journal.keep, (journals.DATA, journals.MODEL)

    def losing(self: journals.Journal, kind: str, values: Any, **said: Any) -> Any:
        return values if kind in lost else keep(self, kind, values, **said)

    with monkeypatch.context() as patch:
        patch.setattr(journals.Journal, "keep", losing)
        folder = trained(tmp_path, **STRICT)
    found = judged(folder)
    assert worst(found) is Verdict.VIOLATED and "kept no model" in str(found)


@pytest.mark.parametrize("change", ["rows", "files", "nothing"])
def test_rows_that_were_read_otherwise_from_the_same_files_are_not_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """With other files nobody can tell."""
    (tmp_path / "data.toml").write_text(
        'id = "id"\nlabel = "y"\nlabel_holder = "a"\ntask = "binary"\n'
        '[parties.a]\nfile = "a.csv"\ncolumns.x = { bounds = [0, 1] }\n'
        '[parties.b]\nfile = "b.csv"\ncolumns.z = { bounds = [0, 1] }\n'
    )
    (tmp_path / "a.csv").write_text("id,x,y\n" + "".join(f"{n},0.{n},{n % 2}\n" for n in range(80)))
    (tmp_path / "b.csv").write_text("id,z\n" + "".join(f"{n},{'' if n % 4 else n / 80}\n" for n in range(80)))
    honest = Column.code
    plan = Plan(batch=32, record_views=True, source={"data": str(tmp_path / "data.toml")}, **FROZEN)
    with monkeypatch.context() as patch:
        if change == "rows":
            patch.setattr(Column, "code", lambda self, raw: honest(self, np.where(np.isnan(raw), 0.9, raw)))
        folder = train(load_planned(plan), plan, out=tmp_path / "run").folder
    if change == "files":
        (tmp_path / "b.csv").write_text((tmp_path / "b.csv").read_text().replace("\n4,0.05", "\n4,0.06"))
    assert folder is not None
    found = replay(Source(folder, load_planned(plan)), BUDGET)
    expected = {"rows": Verdict.VIOLATED, "files": Verdict.NOT_TESTED, "nothing": Verdict.HOLDS}[change]
    assert {each.verdict for each in found} == {expected}, found


@pytest.mark.parametrize("width", [4, 7])
def test_a_model_that_its_owner_brought_is_not_tested(tmp_path: Path, width: int) -> None:
    own = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 4))
    plan = Plan(batch=32, record_views=True, **(FROZEN | {"epochs": 1}))
    train(DATA, plan, out=tmp_path / "run", encoders={"p1": own})
    found = judged(tmp_path / "run")
    assert {each.verdict for each in found} == {Verdict.NOT_TESTED}
    assert "p1 brought a model of its own" in found[0].reasons[0]


# -- the journal ---------------------------------------------------------------------------------------------


def test_a_journal_is_private_and_holds_no_share_of_noise(tmp_path: Path) -> None:
    folder = trained(tmp_path, **TWO_TREE) / "journal"
    assert sorted(path.name for path in folder.iterdir()) == ["p0", "p1", "p2"]
    for owner in folder.iterdir():
        assert owner.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in owner.iterdir())
    assert {seen.kind for seen in View(folder / "p1")} == {"data", "model", "origin"}  # opens no total
    assert {seen.kind for seen in View(folder / "p0")} == {"data", "model", "origin", "total"}


def test_runs_without_views_keep_no_journal(tmp_path: Path) -> None:
    train(DATA, Plan(**STRICT), out=tmp_path / "run")
    assert not (tmp_path / "run" / "journal").exists()
