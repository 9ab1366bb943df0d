"""Gradients as a label holder's answers: through its defence and its gate."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from securevfl.algorithms.base import Setup
from securevfl.privacy.defences import DEFENCES
from securevfl.privacy.gate import Mechanism
from securevfl.privacy.payloads import Inside, Released
from securevfl.privacy.rows import Rows


class GradientAnswers:
    """Lets gradients of the batch's mean loss out, one row per record, as the plan's defence changes them."""

    def __init__(self, setup: Setup) -> None:
        plan = setup.plan
        self.name = plan.defence
        self.defence = DEFENCES[plan.defence]
        self.level = plan.defence_level or self.defence.level
        self.gate = setup.gates[setup.label_holder]
        self.labels = np.asarray(setup.data.y_train)
        # What a party learns is in its later embeddings, and in a plain tree other parties read these.
        others = tuple(sorted(set(setup.hosts.values()) - {setup.label_holder}))
        self.readers = others if plan.protocol == "plain-tree" else ()
        self.mechanism = Mechanism(clip=plan.gradient_clip, sigma=self.level * plan.gradient_clip)

    def release(self, gradient: Tensor, *, rows: Rows, observers: tuple[str, ...]) -> Released | Inside:
        """What may be sent; without observers nothing is changed, and it stays inside."""
        values = gradient.numpy(force=True)
        if not observers:
            return Inside(values=values)
        observers = self.readers or observers
        if self.defence.counted:
            # A record's own gradient is its share of the mean, times the number of records.
            return self.gate.release_noisy(
                values.astype(np.float64) * len(rows),
                self.mechanism,
                rows=rows,
                kind="gradient",
                observers=observers,
                divisor=len(rows),
            )
        if self.name == "none":
            return self.gate.release_exact(values, rows=rows, kind="gradient", observers=observers)
        return self.gate.release_exact(
            values,
            rows=rows,
            kind=f"gradient ({self.name})",
            observers=observers,
            change=lambda each: self.defence.change(each, self.labels[rows], self.level, self.gate.noise),
        )
