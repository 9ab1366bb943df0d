"""What every attack must do. A new attack inherits `AttackConformance` and gets these tests for free."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import ClassVar

import numpy as np

from securevfl.attacks.contract import FAMILIES, METRICS, Arrays, Attack, Evidence, Guess, Info, Truth
from securevfl.attacks.registry import ATTACKS
from securevfl.attacks.source import AUXILIARY, TRUTHS
from securevfl.privacy.views import View


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run on which the attack applies: its facts, the view folders, what the attacker and scorer know."""

    info: Info
    views: dict[str, Path]
    auxiliary: Arrays
    truth: Truth


def same(left: Guess, right: Guess) -> bool:
    """Bitwise equality of two guesses."""
    return left.keys() == right.keys() and all(
        (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
        for a, b in ((left[name], right[name]) for name in left)
    )


def poisoned(truth: Truth) -> Truth:
    """Another truth of the same form: values turned round their range, records in reverse order."""
    return {
        name: (values.max() - values if values.dtype != np.bool_ else ~values)[::-1].copy()
        for name, values in truth.items()
    }


class AttackConformance:
    """Inherit, set `attack`, and provide the fixture `case` (best with scope ``class`` or ``module``)."""

    attack: ClassVar[type[Attack]]

    def guess(self, case: Case, seed: int = 3) -> Guess:
        views = {name: View(path) for name, path in case.views.items()}
        evidence = Evidence(
            info=case.info, views=views, auxiliary=case.auxiliary, rng=np.random.default_rng(seed)
        )
        return self.attack().run(evidence)

    def test_is_declared_fully(self) -> None:
        attack = self.attack
        assert ATTACKS[attack.name] is attack
        assert attack.family in FAMILIES and attack.metric in METRICS
        assert attack.summary and "\n" not in attack.summary
        assert {need.name for need in attack.needs} <= set(AUXILIARY)
        assert set(attack.truth) <= set(TRUTHS)

    def test_applies_to_the_case(self, case: Case) -> None:
        found = self.attack().applies(case.info)
        assert found.applicable, found.reason

    def test_without_a_view_it_is_not_applicable_and_says_why(self, case: Case) -> None:
        blind = dataclasses.replace(case.info, seen={}, received={})
        found = self.attack().applies(blind)
        assert not found.applicable and "view" in found.reason

    def test_without_declared_knowledge_it_is_not_applicable_and_says_why(self, case: Case) -> None:
        ignorant = dataclasses.replace(case.info, auxiliary=frozenset(), truths=frozenset())
        found = self.attack().applies(ignorant)
        assert found.applicable == (not self.attack.needs and not self.attack.truth)
        assert found.applicable or found.reason

    def test_uses_no_more_than_it_declares(self, case: Case) -> None:
        allowed = {need.name.replace(" ", "_") for need in self.attack.needs}
        assert {name.split("/")[0] for name in case.auxiliary} <= allowed

    def test_same_seed_same_guess(self, case: Case) -> None:
        assert same(self.guess(case), self.guess(case))

    def test_guess_is_arrays_only(self, case: Case) -> None:
        for values in self.guess(case).values():
            assert isinstance(values, np.ndarray) and values.dtype.kind in "biufU"

    def test_truth_changes_the_score_but_never_the_guess(self, case: Case) -> None:
        before = self.guess(case)
        score = self.attack.score(before, case.truth, case.info)
        other = self.attack.score(before, poisoned(case.truth), case.info)
        assert same(before, self.guess(case))
        if case.truth:
            assert score.score != other.score

    def test_score_is_whole_and_in_range(self, case: Case) -> None:
        score = self.attack.score(self.guess(case), case.truth, case.info)
        assert score.metric == self.attack.metric
        assert score.low <= score.score <= score.high
        bounds = METRICS[score.metric]
        assert bounds.low <= score.low and score.high <= bounds.high
        json.dumps(dataclasses.asdict(score), allow_nan=False)

    def test_info_survives_its_text_form(self, case: Case) -> None:
        assert Info.from_json(case.info.to_json()) == case.info
