"""Evaluation of sealed models: figures from noisy totals alone, paid by the test records, and attacked."""

import math

import numpy as np
import pytest
from scipy.stats import rankdata

from securevfl import Plan, VerticalData, audit, load_run, train
from securevfl.accountants.gdp import gdp_mu
from securevfl.accountants.metric_totals import MetricTotals
from securevfl.algorithms.resolve import resolve
from securevfl.algorithms.sealed.card import geometry_of
from securevfl.algorithms.sealed.evaluation import Evaluation, Evaluator
from securevfl.algorithms.sealed.member import SealedMember
from securevfl.errors import Deviation, ProtocolError
from securevfl.privacy.ledger import read_records
from securevfl.protocols import SealedDealer, SealedParty, drive
from securevfl.protocols.sealed import CheckedDealer, CheckedParty
from securevfl.protocols.sealed.proof import ProofClaim
from securevfl.protocols.sealed.protocol import Phase, Share
from securevfl.protocols.sealed.round import RoundMachine


def people(rows=600, columns=4, parties=2, test=None, seed=0):
    generator = np.random.default_rng(seed)
    blocks = [generator.uniform(-1, 1, (rows, columns)) for _ in range(parties)]
    score = 3 * sum(block[:, 0] for block in blocks)
    labels = (generator.random(rows) < 1 / (1 + np.exp(-score))).astype(float)
    held = {} if test is None else {"test": test}
    return VerticalData.from_arrays(blocks, labels, bounds=(-1, 1), **held)


def sealed(**fields) -> Plan:
    return Plan.from_flat({"algorithm": "sealed", "model": "linear", "epochs": 6, **fields})


def evaluation_of(data, **fields) -> Evaluation:
    plan, scaled = resolve(sealed(**fields), data)
    return Evaluation(settings=geometry_of(plan, scaled))


def opened_on_the_ring(evaluation, scores, labels, *, quiet=()):
    """Totals and positives as the label holder opens them; members in `quiet` add no noise."""
    protocol = evaluation.protocol
    positive = labels > 0
    operand = np.stack([positive, ~positive]).astype(np.int32) << 14
    holder = protocol.label_holder
    parties = [
        SealedParty(protocol, m, operand=operand if m == holder else np.zeros((0, len(labels)), np.int32))
        for m in range(protocol.members)
    ]
    for m in quiet:
        parties[m].noise_for = lambda target: np.zeros(protocol.total_shape(target), np.uint64)
    dealer = SealedDealer(protocol)
    drive([party.setup() for party in parties], dealer.setup())
    machines = [party.round(round=0, scores=scores[m][:, None]) for m, party in enumerate(parties)]
    drive(machines, dealer.deal(round=0))
    return machines[holder].result().reshape(4, -1)


# -- the ring -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parties", [2, 3])
def test_the_ring_opens_the_totals_that_the_mathematics_says(parties):
    evaluation = evaluation_of(people(parties=parties), sigma=1e-3)
    generator = np.random.default_rng(1)
    count = evaluation.settings.data.n_test
    clamp = evaluation.clamp
    scores = generator.uniform(-clamp, clamp, (parties, count))
    labels = (generator.random(count) < 0.3).astype(float)
    found = opened_on_the_ring(evaluation, scores, labels, quiet=range(parties))
    exact = MetricTotals().totals(scores.sum(0), labels)
    # Per record a wave is off by the table's phase (pi 2^-16 k a_k), by both roundings, and by each phase.
    waves = evaluation.protocol.series
    orders = np.array(waves.harmonics)
    phase = np.pi * 2.0**-16 + parties * 2 * np.pi * 2.0**-33 * orders
    each = np.array(waves.coefficients) * phase + 2 * 2.0**-14
    assert (np.abs(found - exact) <= count * each).all()


def test_no_record_lengthens_its_vector_by_more_than_is_counted():
    """One record alone: the norm of what it adds, table and waves rounded, over many phases."""
    evaluation = evaluation_of(people(), sigma=1e-3)
    worst = 0.0
    for seed in range(20):
        score = np.random.default_rng(seed).uniform(-6, 6, (2, 120))
        labels = np.zeros(120)
        labels[0] = 1.0  # the first record's totals are alone in S+, C+
        found = opened_on_the_ring(evaluation, score, labels, quiet=(0, 1))[:2]
        worst = max(worst, float(np.sqrt((found**2).sum())))
    assert 0.999 < worst <= 1 + evaluation.totals.rounding


@pytest.mark.parametrize("change", ["features", "label", "both"])
def test_neighbours_on_the_ring_stay_within_the_sensitivity(change):
    """Brute force: scores at both clamps and between, either label, everything else the same."""
    evaluation = evaluation_of(people(), sigma=1e-3)
    generator = np.random.default_rng(2)
    count, clamp = evaluation.settings.data.n_test, evaluation.clamp
    base = generator.uniform(-clamp, clamp, (2, count))
    labels = (generator.random(count) < 0.5).astype(float)
    farthest = 0.0
    for here, there in [((6, 6), (-6, -6)), ((6, -6), (-6, 6)), ((1, 2), (-4, 6)), ((6, 6), (6, -6))]:
        for label in (0.0, 1.0):
            opened = []
            for scores, y in ((here, label), (there, label if change == "features" else 1 - label)):
                changed, marked = base.copy(), labels.copy()
                changed[:, 0] = here if change == "label" else scores
                marked[0] = y
                totals = opened_on_the_ring(evaluation, changed, marked, quiet=(0, 1))
                # n+ has noise s / sqrt 2, so that it weighs sqrt 2.
                opened.append(np.append(totals.ravel(), math.sqrt(2) * marked.sum()))
            farthest = max(farthest, float(np.linalg.norm(opened[0] - opened[1])))
    # Every other record's rounding differs from run to run, by 2^-13 a wave at most in rms.
    slack = 2.0**-13 * math.sqrt(count * 96)
    assert farthest <= evaluation.sensitivity + slack
    assert farthest > evaluation.sensitivity - slack  # and the bound is met


def test_figures_are_unbiased_and_their_errors_honest():
    """Monte Carlo on the ring: the printed noise error is the deviation of what is printed."""
    data = people(rows=3000, seed=3)
    evaluation = evaluation_of(data, epsilon=1.0)
    generator, count = np.random.default_rng(4), evaluation.settings.data.n_test
    labels = (generator.random(count) < 0.3).astype(float)
    total = generator.standard_normal(count) * 1.3 + labels
    scores = np.stack([total / 2, total / 2])
    ranks, n = rankdata(total), labels.sum()
    exact = (ranks[labels == 1].sum() - n * (n + 1) / 2) / (n * (count - n))
    once = opened_on_the_ring(evaluation, scores, labels, quiet=(0, 1))
    std, trials = evaluation.protocol.total_std(0), 2000
    found, errors = [], []
    for _ in range(trials):
        totals = once + generator.normal(0, std, once.shape)
        positives = n + generator.normal(0, evaluation.positives_sigma)
        known = {"positives": positives, "records": count, "noise": std}
        auc = evaluation.totals.auc(totals, **known, positives_noise=evaluation.positives_sigma)
        found.append(auc.value)
        errors.append(auc.noise_error)
    spread = np.std(found)
    assert abs(np.mean(found) - exact) < 4 * spread / math.sqrt(trials) + 2e-3  # the series' own error
    assert math.sqrt(np.mean(np.square(errors))) == pytest.approx(spread, rel=0.1)


# -- members that cheat -------------------------------------------------------------------------------------


def authenticated(evaluation, scores, operand, *, cheat=lambda machines: None):
    """An evaluation whose members may do anything; the label holder brings this operand."""
    protocol, count = evaluation.protocol, operand.shape[1]
    parties = [
        CheckedParty(protocol, m, operand=operand if m == 0 else np.zeros((0, count), np.int32))
        for m in range(protocol.members)
    ]
    dealer = CheckedDealer(protocol)
    drive([dealer.session(), *(party.setup() for party in parties)])
    machines = [party.round(round=0, scores=scores[m][:, None]) for m, party in enumerate(parties)]
    cheat(machines)
    drive([dealer.iteration(round=0), *machines])
    return machines[0].result().reshape(4, -1)


def _unchecked(claim, rows):
    out = np.zeros(claim.operand_shape, np.int64)
    out[: claim.width] = rows
    return out


@pytest.mark.parametrize("parties", [2, 3])
def test_authenticated_evaluations_open_the_same_and_catch_cheaters(parties, monkeypatch):
    evaluation = evaluation_of(people(rows=200, parties=parties), epsilon=4.0, adversary="malicious")
    count = evaluation.settings.data.n_test
    generator = np.random.default_rng(6)
    scores, labels = generator.uniform(-3, 3, (parties, count)), np.arange(count) % 3 == 0
    operand = np.stack([labels, ~labels]).astype(np.int32) << 14
    exact = MetricTotals().totals(scores.sum(0), labels)
    found = authenticated(evaluation, scores, operand)
    assert np.abs(found - exact).max() < 6 * evaluation.protocol.total_std(0) + 0.01 * count
    # A label that counts twice, or in both classes, would read one record's waves.
    for entry in ((2, 0), (1, 1), (0, 0)):
        wrong = operand.copy()
        wrong[:, 0] = np.array(entry) << 14
        with monkeypatch.context() as patch:
            patch.setattr("securevfl.protocols.sealed.party.check_operand", lambda *_, **named: None)
            patch.setattr(ProofClaim, "extend", _unchecked)
            with pytest.raises(Deviation):
                authenticated(evaluation, scores, wrong)

    def tampers(machines):
        honest = machines[1]._share_residual

        def shifted(deal):
            honest(deal)
            machines[1]._blinded = machines[1]._blinded.copy()
            machines[1]._blinded[7, 3] = (int(machines[1]._blinded[7, 3]) + 2**46) % (2**61 - 1)

        machines[1]._share_residual = shifted

    with pytest.raises(Deviation):
        authenticated(evaluation, scores, operand, cheat=tampers)


# -- what it costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"evaluate_every": 1},
        {"label_holder": "server"},
        {"model": "mlp", "hidden": (3,)},
        {"protect": "features"},
        {"adversary": "malicious", "evaluate_every": 3},
    ],
    ids=["linear", "often", "server", "network", "features", "malicious"],
)
def test_test_records_pay_and_nobody_else(tmp_path, fields):
    data = people()
    run = train(data, sealed(epsilon=2.0, **fields), tmp_path / "run")
    records = read_records(tmp_path / "run")
    mine = [r for r in records if r.kind == "evaluation totals"]
    test_rows = np.arange(data.n_train, data.n_train + data.n_test)
    assert all(np.array_equal(r.rows, test_rows) and r.mechanism == "gaussian" for r in mine)
    for owner in {r.owner for r in mine}:
        paid = [r.mu**2 for r in mine if r.owner == owner]
        assert len(paid) == run.plan.evaluations
        assert math.sqrt(sum(paid)) <= gdp_mu(2.0, 1e-5)
        # Against members that cheat, a tenth of delta is set aside.
        assert math.sqrt(sum(paid)) == pytest.approx(gdp_mu(2.0, run.plan.accounted_delta), rel=1e-3)
    assert all(spend["epsilon"] <= 2.0 for spend in run.privacy.values())
    assert not [r for r in records if r.mechanism == "exact"]


def test_a_budget_below_what_the_noise_would_cost_holds_for_test_records_too(tmp_path):
    plan = Plan(algorithm="sealed", sigma=40.0, epochs=50, budget_epsilon=0.5, settings={"centring": 0.0})
    run = train(people(), plan, tmp_path / "run")
    assert run.stopped is not None and run.result["evaluation"]["auc"] is not None
    assert all(spend["epsilon"] <= 0.5 for spend in run.privacy.values())


def test_in_one_process_the_exact_figure_says_what_it_is():
    run = train(people(rows=3000), sealed(epsilon=20.0, epochs=20))
    assert run.result["test_is"].startswith("exact, by the simulator, outside the federation")
    noisy = run.result["evaluation"]
    assert noisy["accuracy"] is None and noisy["se"] > 0
    assert abs(noisy["auc"] - run.test["auc"]) < 5 * noisy["se"] + 0.01
    assert abs(noisy["loss"] - run.test["loss"]) < 5 * noisy["loss_se"] + 0.01


def test_tasks_without_totals_open_nothing(tmp_path):
    generator = np.random.default_rng(0)
    blocks = list(generator.uniform(-1, 1, (2, 200, 2)))
    labels = np.digitize(blocks[0][:, 0] + blocks[1][:, 0], [-0.5, 0.5])
    data = VerticalData.from_arrays(blocks, labels, bounds=(-1, 1), task="multiclass")
    run = train(data, sealed(epsilon=4.0), tmp_path / "run")
    assert not [r for r in read_records(tmp_path / "run") if "evaluation" in r.kind]
    assert set(run.result["evaluation"].values()) == {None} and run.test["accuracy"] is not None


def test_an_evaluation_that_the_plan_does_not_contain_is_refused(monkeypatch):
    """Whoever asks: every member counts for itself."""
    again = Evaluator.open

    async def twice(self, scores, **known):
        await again(self, scores, **known)
        return await again(self, scores, **known)

    monkeypatch.setattr(Evaluator, "open", twice)
    with pytest.raises(ProtocolError, match="all that the plan contains"):
        train(people(), sealed(sigma=50.0))


# -- attacks ------------------------------------------------------------------------------------------------


def explained(columns, features):
    """R^2 of features of people that were not used to fit, from what was seen of them, by least squares."""
    design = np.column_stack([columns, np.ones(len(columns))])
    half = len(design) // 2
    weights = np.linalg.lstsq(design[:half], features[:half], rcond=None)[0]
    left = ((features[half:] - design[half:] @ weights) ** 2).sum(0)
    return 1 - left / ((features[half:] - features[half:].mean(0)) ** 2).sum(0)


def test_evaluating_most_people_every_epoch_tells_no_features(monkeypatch):
    """The label holder tests 90 % of the records after every epoch and inverts the scores it obtains."""
    rows = 400
    everybody = people(rows=rows, columns=6)
    held = rows * 9 // 10
    blocks = [np.concatenate([a, b]) for a, b in zip(everybody.train, everybody.test, strict=True)]
    labels = np.concatenate([everybody.y_train, everybody.y_test])
    test = ([block[-held:] for block in blocks], labels[-held:])
    data = VerticalData.from_arrays(
        [block[:-held] for block in blocks], labels[:-held], test=test, bounds=(-1, 1)
    )
    scores = []
    scored = SealedMember._test_scores

    def watch(self):
        found = scored(self)
        if self.address == "p1":
            scores.append(found[0][:, 0])
        return found

    seen = []
    received = RoundMachine._receive

    def look(self, sender, message):
        words = getattr(message, "blinded", None) if isinstance(message, Share) else None
        words = message.words if isinstance(message, Phase) else words
        if self.address == 0 and words is not None and len(words) == held:
            turns = words[:, :1].astype(np.float64) * (2 * np.pi / 2.0 ** (8 * words.itemsize))
            seen.extend([np.sin(turns), np.cos(turns)])
        return received(self, sender, message)

    monkeypatch.setattr(SealedMember, "_test_scores", watch)
    monkeypatch.setattr(RoundMachine, "_receive", look)
    run = train(
        data,
        sealed(epsilon=1.0, epochs=12, evaluate_every=1, learning_rate=30.0),
    )
    secret = np.asarray(data.test[1])
    # Control: with the exact scores of every epoch, features of people come back.
    assert np.median(explained(np.stack(scores, 1), secret)) > 0.6
    # What the label holder sees of single test records now: masked phases and blinded waves.
    columns = np.concatenate(seen, axis=1)
    assert columns.shape[1] == 2 * 2 * run.plan.evaluations
    assert np.max(explained(columns, secret)) < 0.1
    assert all(spend["epsilon"] <= 1.0 for spend in run.privacy.values())


def guesses(evaluation, trials, *, quiet):
    """How often a party tells one test label from the published AUC, knowing all else and its own noise."""
    generator = np.random.default_rng(5)
    count = evaluation.settings.data.n_test
    labels = (generator.random(count) < 0.3).astype(float)
    total = np.clip(generator.standard_normal(count) * 1.3 + labels, -5, 5)
    total[0] = 6.0
    holder, stds = evaluation.protocol.label_holder, evaluation.protocol.share_stds
    own = stds[holder][1] * 2.0**-42
    mine = 0.0 if holder in quiet else stds[holder][holder] * 2.0**-42
    positives = 0.0 if holder in quiet else evaluation.positives_sigma
    worlds = []
    for label in (0.0, 1.0):
        labels[0] = label
        worlds.append((evaluation.totals.totals(total, labels), labels.sum()))

    def published(world, noise, count_noise):
        totals, n = world
        return evaluation.figures(totals + noise, positives=n + count_noise, scale=1.0, shift=0.0)[0]

    right = 0
    for trial in range(trials):
        known = generator.normal(0, own, worlds[0][0].shape)
        secret = generator.normal(0, mine, known.shape) if mine else 0.0
        told = published(
            worlds[trial % 2], known + secret, generator.normal(0, positives) if positives else 0
        )
        expected = [published(world, known, 0.0) for world in worlds]
        right += int(abs(told - expected[1]) < abs(told - expected[0])) == trial % 2
    return right


def test_a_published_auc_tells_no_label():
    """With the other member's noise alone it told one in 200 of 200 trials; the label holder's hides it."""
    evaluation = evaluation_of(people(), epsilon=1.0)
    assert guesses(evaluation, 200, quiet=(0,)) == 200
    # Balanced accuracy is at most Phi(mu/2) = .55 under the promise; four standard errors of 400 trials: .10.
    assert guesses(evaluation, 400, quiet=()) <= 400 * 0.66


def test_the_audit_replays_the_evaluation_and_sees_missing_noise(tmp_path, monkeypatch):
    data = people(rows=1000)
    run = train(data, sealed(epsilon=4.0, record_views=True), tmp_path / "run")
    report = audit(load_run(tmp_path / "run"), attacks="none", data=data, canaries=-1)
    assert report.verdict == "holds", report.content["words"]
    honest = SealedParty.noise_for

    def quiet(self, target):
        noise = honest(self, target)
        return np.zeros_like(noise) if self.protocol.outputs > 1 else noise

    monkeypatch.setattr(SealedParty, "noise_for", quiet)
    train(data, sealed(epsilon=4.0, record_views=True), tmp_path / "quiet")
    monkeypatch.undo()
    report = audit(load_run(tmp_path / "quiet"), attacks="none", data=data, canaries=-1)
    assert report.verdict == "violated"
    assert run.plan.evaluations == 1
