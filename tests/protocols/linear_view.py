"""What a coalition of a two-tree sum can compute, by exact linear algebra: an oracle and an attacker."""

from __future__ import annotations

from fractions import Fraction

from securevfl.protocols import TreePair

Row = list[int]


def subtree(tree, top):
    """`top` and everybody below it."""
    found = {top}
    grew = True
    while grew:
        below = {child for child, parent in tree.items() if parent in found}
        grew = not below <= found
        found |= below
    return found


def view_rows(pair: TreePair, coalition: frozenset[int], *, totals: bool = True) -> dict[tuple, Row]:
    """Each thing the coalition sees as coefficients of (b_0..b_n, v_0..v_n) of the honest vertices.

    Keys are ("edge", tree, child) and ("total", tree); what the coalition itself put in is taken off.
    """
    honest = sorted(pair.vertices - coalition)
    rows = {}

    def row(members, carries_values):
        masks = [int(vertex in members) for vertex in honest]
        values = [int(carries_values and vertex >= 0 and vertex in members) for vertex in honest]
        return masks + values

    for number, tree in ((1, pair.t1), (2, pair.t2)):
        for child, parent in tree.items():
            if child in coalition or parent in coalition:
                rows["edge", number, child] = row(subtree(tree, child), number == 1)
        if totals:
            rows["total", number] = row(pair.vertices, number == 1)
    return rows


def reduce_rows(rows, modulus: int = 0):
    """Reduced row echelon form over the rationals, or over the integers modulo a prime."""
    work = [[Fraction(x) if not modulus else x % modulus for x in row] for row in rows]
    width = len(work[0]) if work else 0
    done = 0
    for column in range(width):
        pivot = next((i for i in range(done, len(work)) if work[i][column]), None)
        if pivot is None:
            continue
        work[done], work[pivot] = work[pivot], work[done]
        head = work[done][column]
        inverse = 1 / head if not modulus else pow(head, -1, modulus)
        work[done] = [x * inverse if not modulus else x * inverse % modulus for x in work[done]]
        for i, row in enumerate(work):
            if i != done and row[column]:
                factor = row[column]
                work[i] = [
                    x - factor * y if not modulus else (x - factor * y) % modulus
                    for x, y in zip(row, work[done], strict=True)
                ]
        done += 1
    return work[:done]


def learned_space(pair: TreePair, coalition: frozenset[int], modulus: int = 0):
    """The canonical basis of all mask-free combinations of what the coalition sees."""
    honest = len(pair.vertices - coalition)
    reduced = reduce_rows(list(view_rows(pair, coalition).values()), modulus)
    free = [row[honest:] for row in reduced if not any(row[:honest])]
    return reduce_rows(free, modulus)


def predicted_space(pair: TreePair, coalition: frozenset[int], modulus: int = 0):
    """The canonical basis of the sums that `learned_by` names."""
    honest = sorted(pair.vertices - coalition)
    rows = [[int(vertex in part) for vertex in honest] for part in pair.learned_by(coalition)]
    return reduce_rows(rows, modulus)
