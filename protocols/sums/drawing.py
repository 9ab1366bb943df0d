"""Tree pairs for people: both trees as text, and what each worker and the worst coalition learns."""

from __future__ import annotations

import itertools
from typing import Any

from securevfl.protocols.contract import COORDINATOR
from securevfl.protocols.sums.trees import ParentMap, TreePair


def draw(pair: TreePair) -> str:
    """Both trees as indented text, roots first."""
    blocks = []
    titles = ("T1 (values plus masks)", "T2 (masks)")
    for title, tree, root in zip(titles, (pair.t1, pair.t2), pair.roots, strict=True):
        blocks.append("\n".join([title, label(root), *_branches(tree, root, "")]))
    return "\n\n".join(blocks)


def describe(pair: TreePair) -> dict[str, Any]:
    """What every single participant and the worst coalition learns, as plain data for JSON.

    `singles` lists, for each participant, the sets of other workers whose sum it learns; one set is the total
    alone. `worst_coalition` is a smallest coalition that learns more than the total, None if none does.
    """
    worst = worst_coalition(pair)
    return {
        "workers": pair.workers,
        "coordinator": pair.has_coordinator,
        "t1": {label(child): label(parent) for child, parent in sorted(pair.t1.items())},
        "t2": {label(child): label(parent) for child, parent in sorted(pair.t2.items())},
        "roots": [label(root) for root in pair.roots],
        "max_collusion": pair.max_collusion(),
        "significantly_different": pair.is_significantly_different(),
        "singles": {label(vertex): _sets(pair, (vertex,)) for vertex in sorted(pair.vertices)},
        "worst_coalition": None
        if worst is None
        else {"members": [label(vertex) for vertex in worst], "learns": _sets(pair, worst)},
    }


def worst_coalition(pair: TreePair) -> tuple[int, ...] | None:
    """A smallest coalition that learns more than the total; if possible one that isolates a single worker."""
    size = pair.max_collusion() + 1
    if size > pair.workers - 2:
        return None
    around = [_neighbours(pair, worker) for worker in range(pair.workers)]
    candidates = [tuple(sorted(group)) for group in around if len(group) == size]
    if size < 3:  # three are always some worker's neighbours, two or one need not be
        candidates += itertools.combinations(sorted(pair.vertices), size)
    return next((coalition for coalition in candidates if len(pair.learned_by(coalition)) > 1), None)


def _neighbours(pair: TreePair, worker: int) -> set[int]:
    edges = [*pair.t1.items(), *pair.t2.items()]
    return {a if b == worker else b for a, b in edges if worker in (a, b)}


def label(vertex: int) -> str:
    """The short name of a participant in drawings and JSON."""
    return "coordinator" if vertex == COORDINATOR else str(vertex)


def _sets(pair: TreePair, coalition: tuple[int, ...]) -> list[list[int]]:
    return [sorted(part) for part in pair.learned_by(coalition)]


def _branches(tree: ParentMap, host: int, indent: str) -> list[str]:
    lines = []
    children = sorted(child for child, parent in tree.items() if parent == host)
    for number, child in enumerate(children):
        last = number == len(children) - 1
        lines.append(f"{indent}{'└── ' if last else '├── '}{label(child)}")
        lines += _branches(tree, child, indent + ("    " if last else "│   "))
    return lines
