"""A synchronous step of seven parties against the same step of one centralised model, in one run.

Both sides do the same arithmetic: linear encoders, sum fusion, and above the sum a bias (logistic regression)
or a rectifier and a linear layer (a network with one hidden layer). Each side's time is the
best of alternating rounds in processor time of one thread, so that load meets all sides alike; only the
ratios mean anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from securevfl.models import (
    Fusion,
    StackedEncoders,
    build_encoder,
    build_head,
    clipped_gradient_sum,
    task_loss,
)

PARTIES = 7
ROUNDS = 60
RECORDS = 6000


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    columns: int
    embedding: int
    head: str
    task: str
    outputs: int
    batch: int


CASES = (
    Case(name="LR 124, batch 100", columns=124, embedding=1, head="sum", task="binary", outputs=1, batch=100),
    Case(
        name="MLP 124-64-1, batch 100",
        columns=124,
        embedding=64,
        head="relu",
        task="binary",
        outputs=1,
        batch=100,
    ),
    Case(
        name="MLP 784-128-10, batch 600",
        columns=784,
        embedding=128,
        head="relu",
        task="multiclass",
        outputs=10,
        batch=600,
    ),
)

Step = Callable[[torch.Tensor], float]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    rows = torch.randn(RECORDS, case.columns, generator=generator(1))
    blocks = [block.contiguous() for block in torch.tensor_split(rows, PARTIES, dim=1)]
    classes = 2 if case.task == "binary" else case.outputs
    labels = torch.randint(0, classes, (RECORDS,), generator=generator(2))
    return blocks, labels


def encoders(case: Case, widths: list[int]) -> list[torch.nn.Module]:
    return [build_encoder("linear", w, case.embedding, generator=generator(m)) for m, w in enumerate(widths)]


def stepper(case: Case, labels: torch.Tensor, parameters: list[torch.Tensor], embed, parties: int) -> Step:
    head = build_head(case.head, case.embedding, case.outputs, generator=generator(9))
    fusion = Fusion("sum", (case.embedding,) * parties)
    optimiser = torch.optim.SGD([*parameters, *head.parameters()], lr=0.05)

    def step(rows: torch.Tensor) -> float:
        loss = task_loss(case.task, head(fusion(embed(rows))), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def sides(case: Case) -> dict[str, Step]:
    blocks, labels = data(case)
    widths = [block.shape[1] for block in blocks]
    joined = torch.cat(blocks, dim=1)
    central = build_encoder("linear", case.columns, case.embedding, generator=generator(0))
    weights = [one.output.weight.detach() for one in encoders(case, widths)]
    central.output.weight.data.copy_(torch.cat(weights, dim=1))
    single = encoders(case, widths)
    stack = StackedEncoders(encoders(case, widths))
    padded = stack.join(blocks)
    singles = [p for one in single for p in one.parameters()]
    return {
        "centralised": stepper(
            case, labels, list(central.parameters()), lambda rows: [central(joined.index_select(0, rows))], 1
        ),
        "one by one": stepper(
            case,
            labels,
            singles,
            lambda rows: [
                one(block.index_select(0, rows)) for one, block in zip(single, blocks, strict=True)
            ],
            PARTIES,
        ),
        "stacked": stepper(
            case, labels, list(stack.parameters()), lambda rows: stack(padded.index_select(1, rows)), PARTIES
        ),
    }


def measure(steps: dict[str, Step], batch: int) -> dict[str, list[float]]:
    """Seconds per step of each side, one figure per round; the sides must report the same losses."""
    rng = np.random.default_rng(0)
    repeats = max(5, 3000 // batch)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(ROUNDS + 1):
        plan = [torch.from_numpy(rng.permutation(RECORDS)[:batch]) for _ in range(repeats)]
        losses = {}
        for name, step in steps.items():
            start = time.process_time()
            for rows in plan:
                losses[name] = step(rows)
            if number:  # the first round warms up
                times[name].append((time.process_time() - start) / repeats)
        if max(losses.values()) - min(losses.values()) > 1e-3:
            raise RuntimeError(f"the sides disagree: {losses}")
    return times


def per_record() -> tuple[float, float]:
    """Seconds of a plain and of a per-record clipped gradient, MLP 112-128-10, batch 600."""
    module = build_encoder("mlp", 112, 10, generator=generator(0), hidden=(128,))
    rows, upstream = torch.randn(600, 112), torch.randn(600, 10)
    plain, clipped = [], []
    for _ in range(ROUNDS):
        start = time.process_time()
        torch.autograd.grad(module(rows), list(module.parameters()), upstream)
        middle = time.process_time()
        clipped_gradient_sum(module, rows, upstream, 1.0)
        plain.append(middle - start)
        clipped.append(time.process_time() - middle)
    return min(plain), min(clipped)


def main() -> None:
    torch.set_num_threads(1)
    title = f"step of {PARTIES} parties"
    print(f"{title:28} {'centralised':>12} {'one by one':>11} {'stacked':>8}   goals: 2.5x, 1.3x")
    for case in CASES:
        times = measure(sides(case), case.batch)
        best = {name: min(values) for name, values in times.items()}
        ratios = [best[name] / best["centralised"] for name in ("one by one", "stacked")]
        print(f"{case.name:28} {best['centralised'] * 1e6:9.0f} us {ratios[0]:10.2f}x {ratios[1]:7.2f}x")
    plain, clipped = per_record()
    print(
        f"per-record clipped gradient, MLP 112-128-10, batch 600: {clipped / plain:.2f} times the plain one"
    )


if __name__ == "__main__":
    main()
