"""A small attack for tests of the machinery: guesses labels from the size of the gradients it received."""

from __future__ import annotations

import os
import time
from typing import ClassVar

import numpy as np

from securevfl.attacks.contract import Attack, Evidence, Family, Guess, Info, Need, Score, Truth
from securevfl.errors import AttackError


class Probe(Attack):
    name = "probe"
    family: ClassVar[Family] = "label"
    metric = "accuracy"
    summary = "ranks records by the sign of their gradient"
    kinds = ("gradient",)
    needs = (Need("known labels", 10),)
    truth = ("labels",)

    def run(self, evidence: Evidence) -> Guess:
        rows, signs = [], []
        uploads = {seen.number: seen for seen in evidence.view.messages("embedding", sent=True)}
        for seen in evidence.view.messages("gradient", sent=False):
            evidence.progress(0.5)
            rows.append(uploads[seen.reply_to].fields["rows"])
            signs.append(seen.fields["values"][:, 0])
        direction = evidence.rng.choice([-1.0, 1.0])
        return {"rows": np.concatenate(rows), "guess": np.concatenate(signs) * direction > 0}

    @classmethod
    def score(cls, guess: Guess, truth: Truth, info: Info) -> Score:
        right = float((truth["labels"][guess["rows"]] == guess["guess"]).mean())
        return Score(metric="accuracy", score=right, low=right / 2, high=(1 + right) / 2, baseline=0.5)


class Sleeper(Probe):
    name = "sleeper"

    def run(self, evidence: Evidence) -> Guess:
        time.sleep(60)
        return {"nothing": np.zeros(1)}


class Crasher(Probe):
    name = "crasher"

    def run(self, evidence: Evidence) -> Guess:
        os._exit(3)


class Failer(Probe):
    name = "failer"

    def run(self, evidence: Evidence) -> Guess:
        print("done")  # must not be taken for the end of the job
        raise AttackError("the view ends too early")


class Careless(Probe):
    name = "careless"

    def run(self, evidence: Evidence) -> Guess:
        return {"thing": np.array([object()])}


class Spy(Probe):
    """Looks for anything beyond what it was given."""

    name = "spy"

    def run(self, evidence: Evidence) -> Guess:
        folder = evidence.view.folder
        around = sorted(str(path.relative_to(folder.parents[1])) for path in folder.parents[1].rglob("*"))
        return {
            "files": np.array(around),
            "names": np.array(sorted(evidence.auxiliary)),
            "folder": np.array([str(folder)]),
        }
