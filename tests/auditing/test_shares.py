"""Whose noise is in totals that members open who may do anything: what a joint audit says of each promise."""

import math
import shutil

import numpy as np
import pytest

from securevfl import Plan, audit, train
from securevfl.algorithms.resolve import resolve
from securevfl.auditing.evidence import VARIANCE, Outcome
from securevfl.auditing.shares import MemberNoise
from securevfl.auditing.verdicts import Finding, Verdict
from securevfl.data import VerticalData
from securevfl.protocols.sealed.checked import CheckedRound
from securevfl.protocols.sealed.checked_party import CheckedParty

LEVEL = 1e-8
OPENINGS, WIDTH = 60, 20


def _data(parties, columns=WIDTH, records=200):
    generator = np.random.default_rng(0)
    blocks = [generator.uniform(-1, 1, (records, columns)) for _ in range(parties)]
    labels = (sum(block[:, 0] for block in blocks) > 0).astype(int)
    return VerticalData.from_arrays(blocks, labels, bounds=(-1, 1), task="binary", seed=0)


def _noise(parties=2, **fields):
    """Member noise of a resolved plan, and how much each member adds to each total."""
    flat = {"algorithm": "sealed", "model": "linear", "epochs": OPENINGS, "epsilon": 8.0, **fields}
    plan, data = resolve(Plan.from_flat({**flat, "adversary": "malicious"}), _data(parties))
    found = MemberNoise.of(plan, data)
    return found, np.sqrt(np.array(found._list[0].variances))


def _judge(parties=2, *, openings=OPENINGS, change, seed=0, **fields):
    """Verdicts by (owner, observer) after openings whose noise `change` makes of what is drawn."""
    found, stds = _noise(parties, **fields)
    generator = np.random.default_rng(seed)
    for place, name in enumerate(found.members):
        std = next(s for n, s in found._shares if n == name and math.isclose(s, math.hypot(*stds[place])))
        kept = {}
        for t in range(openings):
            drawn = [generator.normal(0, stds[place][j], WIDTH) for j in range(parties)]
            first = [kept.setdefault(j, e) for j, e in enumerate(drawn)]
            total = sum(change(j, t, e, first[j]) for j, e in enumerate(drawn))
            found.add(name, total / std, std)
    outcomes = found.judge(dict.fromkeys(found.tests, LEVEL))
    verdicts = {}
    for owner in found.members:
        for observer in set(found.members) - {owner}:
            before = Finding(
                promise=f"{owner} against {observer}",
                path="noisy totals",
                verdict=Verdict.HOLDS,
                tested=(VARIANCE,),
            )
            verdicts[owner, observer] = found.conclude(before, outcomes)
    return verdicts, found.somebody(outcomes)


def _honest(j, t, drawn, first):
    return drawn


def _omits(member):
    return lambda j, t, drawn, first: drawn * (j != member)


def _repeats(member):
    return lambda j, t, drawn, first: first if j == member else drawn


def _words(verdicts):
    return {pair: finding.verdict.value for pair, finding in verdicts.items()}


def test_nothing_is_said_about_runs_whose_members_are_trusted():
    plan = Plan.from_flat({"algorithm": "sealed", "model": "linear", "epsilon": 8.0})
    assert MemberNoise.of(*resolve(plan, _data(2))) is None


@pytest.mark.parametrize("parties", [2, 3])
def test_noise_of_everybody_holds(parties):
    verdicts, unnamed = _judge(parties, change=_honest, openings=2 * OPENINGS)
    assert set(_words(verdicts).values()) == {"holds"} and not unnamed


@pytest.mark.parametrize("act", [_omits, _repeats])
@pytest.mark.parametrize("member", [0, 1])
def test_of_two_members_the_one_without_noise_is_named_and_the_others_promise_holds(member, act):
    verdicts, unnamed = _judge(change=act(member))
    cheater, honest = f"p{member}", f"p{1 - member}"
    assert _words(verdicts) == {(cheater, honest): "violated", (honest, cheater): "holds"}
    assert f"{cheater} left out or repeated its noise" in verdicts[cheater, honest].reasons[0]
    assert any(f"{cheater} left out" in each for each in verdicts[honest, cheater].tested)
    assert not unnamed


def test_of_three_the_label_holders_noise_was_counted_on_by_others():
    """Collusion 1: what a party is promised against another counts on the label holder's noise."""
    verdicts, _ = _judge(3, change=_omits(0))
    assert _words(verdicts) == {
        ("p0", "p1"): "violated",
        ("p0", "p2"): "violated",
        ("p1", "p0"): "holds",
        ("p2", "p0"): "holds",
        ("p1", "p2"): "violated",
        ("p2", "p1"): "violated",
    }
    assert "times larger" in verdicts["p1", "p2"].reasons[0]


def test_members_that_add_alike_cannot_be_told_apart():
    verdicts, unnamed = _judge(3, change=_omits(1), openings=2 * OPENINGS)
    assert unnamed[0].promise == "one of p1, p2" and unnamed[0].verdict is Verdict.VIOLATED
    found = _words(verdicts)
    assert found["p0", "p1"] == found["p1", "p2"] == "not tested"
    # Whichever of the two it was, against the label holder each counted on both.
    assert found["p1", "p0"] == found["p2", "p0"] == "violated"


def test_a_promise_that_allows_for_two_colluders_counts_on_its_own_noise_alone():
    verdicts, unnamed = _judge(3, change=_omits(1), openings=2 * OPENINGS, collusion=2)
    found = _words(verdicts)
    assert unnamed and found["p0", "p1"] == found["p0", "p2"] == "holds"
    assert found["p1", "p0"] == found["p2", "p0"] == "not tested"


def test_equal_shares_of_two_members_name_nobody():
    verdicts, unnamed = _judge(change=_omits(1), protect="features")
    assert set(_words(verdicts).values()) == {"not tested"}
    assert unnamed[0].promise == "one of p0, p1"


def test_what_no_single_member_explains_is_laid_to_nobody_but_who_must_have_left_some_out():
    verdicts, unnamed = _judge(change=lambda j, t, drawn, first: drawn * 0.3)
    assert unnamed and _words(verdicts)["p0", "p1"] == "violated"


def test_so_few_totals_that_nobody_would_miss_a_members_noise_are_no_test():
    """The label holder adds most of the noise; the other's would be missed in more totals only."""
    found = _words(_judge(change=_honest, openings=8)[0])
    assert found == {("p0", "p1"): "holds", ("p1", "p0"): "not tested"}


def test_lies_that_put_more_into_totals_contradict_no_promise():
    found, _ = _noise()
    outcomes = [Outcome("excess", Verdict.VIOLATED, "what was added is not the declared noise")]
    before = Finding(
        promise="p0 against p1", path="noisy totals", verdict=Verdict.VIOLATED, reasons=("excess",)
    )
    after = found.conclude(before, outcomes)
    assert after.verdict is Verdict.NOT_TESTED and "contradicts nobody's promise" in after.reasons[0]
    assert not found.somebody(outcomes)


def test_honest_runs_are_called_short_no_more_often_than_the_level_says():
    """At one in a hundred and 300 runs three are expected; twelve or more come once in ten thousand."""
    found, stds = _noise()
    generator, wrong = np.random.default_rng(5), 0
    for _ in range(300):
        found._seen.clear()
        for place, name in enumerate(found.members):
            std = next(s for n, s in found._shares if n == name and math.isclose(s, math.hypot(*stds[place])))
            for _ in range(10):
                found.add(name, generator.normal(size=WIDTH), std)
        levels = dict.fromkeys(found.tests, 0.01 / len(found.tests))
        wrong += any(each.verdict is Verdict.VIOLATED for each in found.judge(levels))
    assert wrong < 12


# -- whole runs ---------------------------------------------------------------------------------------------


class _Silent(CheckedRound):
    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _start(self):
        self._noise = {m: np.zeros_like(words) for m, words in self._noise.items()}
        return super()._start()


class _Lying(CheckedRound):
    __module__ = CheckedRound.__module__  # whoever cheats has changed the shipped machine

    def _start(self):
        self._phase = np.random.default_rng(self.round).integers(0, 1 << 32, self._phase.shape, np.uint32)
        return super()._start()


@pytest.mark.parametrize(
    ("kind", "records", "expected"),
    [
        (CheckedRound, 60, ("holds", "holds")),
        (_Silent, 60, ("holds", "violated")),
        (_Lying, 2000, ("not tested", "not tested")),
    ],
)
def test_without_the_dealers_keys_the_audit_of_a_run_tells_harmless_from_harmful(
    tmp_path, monkeypatch, kind, records, expected
):
    honest = CheckedParty.round

    def round_(self, **given):
        machine = honest(self, **given)
        machine.__class__ = kind if self.index == 1 else CheckedRound
        return machine

    monkeypatch.setattr(CheckedParty, "round", round_)
    data = _data(2, columns=32, records=records)
    flat = {"algorithm": "sealed", "model": "linear", "epochs": 30, "epsilon": 8.0, "record_views": True}
    train(data, Plan.from_flat({**flat, "adversary": "malicious"}), tmp_path / "run")
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "run" / "journal" / "dealer")  # with its keys more could be told
    report = audit(tmp_path / "run", attacks="none", canaries=-1, data=data)
    owners = report.content["owners"]
    found = (owners["p0"]["observers"]["p1"]["verdict"], owners["p1"]["observers"]["p0"]["verdict"])
    assert found == expected
    assert report.verdict == min(expected, key=["violated", "not tested", "holds"].index)
