"""`securevfl trees`: draw the two trees of a masked sum and say what a coalition learns from them."""

from __future__ import annotations

import json as json_format
from typing import Annotated, Any

import typer


def trees(
    workers: Annotated[int, typer.Argument(help="Number of workers, at least colluders + 2.")],
    collusion: Annotated[
        int, typer.Option("--collusion", help="How many workers may pool what they see: 1 or 2.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Draw the two trees of a masked sum and what each worker and the worst coalition learns."""
    from securevfl.protocols.sums.trees import build_trees, describe, draw

    pair = build_trees(workers, collusion)
    facts = describe(pair)
    if json:
        typer.echo(json_format.dumps(facts))
        return
    typer.echo(draw(pair))
    typer.echo()
    for line in _report(facts, workers):
        typer.echo(line)


def _report(facts: dict[str, Any], workers: int) -> list[str]:
    lines = [
        f"Worker {worker} alone learns {_sums(learned, workers - 1)}."
        for worker, learned in facts["singles"].items()
    ]
    safe = facts["max_collusion"]
    lines.append(f"No coalition of up to {safe} learns more than the total and its own inputs.")
    worst = facts["worst_coalition"]
    if worst is None:
        lines.append("A larger coalition faces a single other worker, whose input the total gives away.")
    else:
        members = ", ".join(worst["members"])
        rest = workers - len(worst["members"])
        lines.append(f"The worst coalition, workers {members}, learns {_sums(worst['learns'], rest)}.")
    return lines


def _sums(learned: list[list[int]], others: int) -> str:
    if len(learned) == 1:
        return f"the total of the other {others}, nothing else"
    shown = [
        f"the input of worker {part[0]}" if len(part) == 1 else f"the sum over workers {_ranges(part)}"
        for part in learned
    ]
    return " and ".join(shown)


def _ranges(workers: list[int]) -> str:
    """Ascending numbers, runs shortened: 1, 2, 3, 5 as "1 to 3, 5"."""
    runs: list[list[int]] = []
    for worker in workers:
        if runs and worker == runs[-1][-1] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
