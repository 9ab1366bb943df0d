"""Reads views: which records a message is about, what was said of them, and of which parties.

An upload names its records. An answer to a request does not: its records are those of the request, found by
the request's number in the same view.

Sums over parties are read as moments. From a plain sum the observer has single inputs, from a plain tree
subtotals, from two trees whatever its edges give away, from masked and encrypted sums the totals that it
opened, from training messages the scores and sums that it is told. All values of one moment were computed
with the same weights.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from securevfl.algorithms.channels import build_sum
from securevfl.attacks.contract import Evidence, Info
from securevfl.errors import AttackError
from securevfl.privacy.views import OPENED, Seen, View
from securevfl.protocols.contract import COORDINATOR, Address, SecureSum
from securevfl.protocols.sums.tree_sums import TreeSum
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import TREE_SUMS

Rows = NDArray[np.int64]
Floats = NDArray[np.float64]


class Release(NamedTuple):
    """Vectors of one message, one per record.

    Attributes:
        time: When it left or arrived.
        purpose: ``training``, or what the request said (``initial``, ``refresh``, ``evaluation``).
        rows: The records.
        values: One vector per record.
    """

    time: float
    purpose: str
    rows: Rows
    values: Floats


class Answered(NamedTuple):
    """Gradients that came back for a party's own uploads, one line per visit of a record.

    Attributes:
        rows: The records.
        batch: Which message each line is from, counted from 0.
        gradients: The gradient of the loss with respect to the embedding.
    """

    rows: Rows
    batch: NDArray[np.int64]
    gradients: Floats


def releases(view: View, address: str) -> list[Release]:
    """All embeddings that the role at `address` sent, as this view holds them, in order."""
    return list(_releases(view, address))


def _releases(view: View, address: str) -> Iterator[Release]:
    requests: dict[tuple[str, int], Seen] = {}
    for seen in view.messages("embed", "embedding"):
        if seen.kind == "embed":
            requests[seen.sender, seen.number] = seen
        elif seen.sender == address and "values" in seen.fields:
            yield _release(seen, requests)


def _release(seen: Seen, requests: dict[tuple[str, int], Seen]) -> Release:
    purpose, rows = "training", seen.fields.get("rows")
    if rows is None:
        request = requests.get((seen.receiver, _answered(seen)))
        if request is None:
            raise AttackError(f"message {seen.index} answers a request that is not in the view")
        rows, purpose = request.fields["rows"], str(request.fields["purpose"])
    return Release(seen.time, purpose, *_vectors(seen, rows))


def _vectors(seen: Seen, rows: NDArray[np.int64]) -> tuple[Rows, Floats]:
    values = np.asarray(seen.fields["values"], np.float64)
    if len(values) != len(rows):
        raise AttackError(f"message {seen.index} has {np.shape(values)} values for {len(rows)} records")
    return np.asarray(rows, np.int64), values


def _answered(seen: Seen) -> int:
    return -1 if seen.reply_to is None else seen.reply_to


def replies(view: View, address: str, kind: str) -> Iterator[tuple[Rows, Floats]]:
    """Records and values of the messages that answered the uploads of the role at `address`.

    Where the role took part in a sum instead, they are about the records that were announced last.
    """
    uploads: dict[int, NDArray[np.int64]] = {}
    announced: NDArray[np.int64] | None = None
    for seen in view.messages("embedding", "sum-request", kind):
        if seen.kind == "sum-request":
            announced = seen.fields["rows"]
        elif seen.kind == "embedding":
            if seen.sender == address and "rows" in seen.fields:
                uploads[seen.number] = seen.fields["rows"]
        elif seen.receiver == address and _answered(seen) in uploads:
            yield _vectors(seen, uploads[_answered(seen)])
        elif seen.receiver == address and seen.reply_to is None and announced is not None:
            yield _vectors(seen, announced)


def answers(view: View, address: str) -> Answered:
    """The gradients that came back to the role at `address`, a party without labels.

    Raises:
        AttackError: There are none.
    """
    found = [*replies(view, address, "gradient"), *_derivatives(view, address)]
    if not found:
        raise AttackError(f"the view holds no gradient for {address}")
    batch = np.repeat(np.arange(len(found)), [len(rows) for rows, _ in found])
    return Answered(
        np.concatenate([rows for rows, _ in found]), batch, np.concatenate([values for _, values in found])
    )


def _derivatives(view: View, address: str) -> Iterator[tuple[Rows, Floats]]:
    """What workers without labels get instead: loss derivatives, here as gradients of the batch's mean."""
    asked: dict[int, NDArray[np.int64]] = {}
    for seen in view.messages("sum-request", "derivative", "scores", "update", sent=False):
        if seen.kind == "sum-request":
            asked[int(seen.fields["round"])] = seen.fields["rows"]
        elif seen.receiver == address:
            rows = seen.fields["rows"] if "rows" in seen.fields else asked[int(seen.fields["round"])]
            known, values = _vectors(seen, rows)
            yield known, values / len(known)


def mean_by_record(rows: Rows, values: Floats) -> tuple[Rows, Floats]:
    """Each record once, with the mean of its values."""
    unique, place = np.unique(rows, return_inverse=True)
    total = np.zeros((len(unique), *values.shape[1:]))
    np.add.at(total, place, values)
    counts = np.bincount(place).reshape(-1, *([1] * (values.ndim - 1)))
    return unique, total / counts


def last_by_record(found: list[Release]) -> tuple[Rows, Floats]:
    """Each record once, with the vector that was released last."""
    if not found:
        raise AttackError("the view holds no embedding")
    rows = np.concatenate([one.rows for one in found])
    values = np.concatenate([one.values for one in found])
    unique, first = np.unique(rows[::-1], return_index=True)
    return unique, values[::-1][first]


def embeddings_of(view: View, owner: str, parties: tuple[str, ...], observer: str) -> list[Release]:
    """The owner's embeddings in this view: sent to the observer, or handed to it in snapshots of all."""
    found = releases(view, owner)
    if found or observer not in parties or owner not in parties:
        return found
    index = parties.index(owner)
    return [
        Release(0.0, "training", rows, values[:, index])
        for rows, values in replies(view, observer, "snapshot")
        if values.ndim == 3
    ]


TELL_SUMS = ("sum", "snapshot")
"""Messages with the sum over all parties for the records of a batch; a snapshot, if embeddings are summed."""
Ring = NDArray[np.uint64]
RoundKey = tuple[str, int, int]  # channel, round, attempt


class Moment(NamedTuple):
    """One sum over parties.

    Attributes:
        parties: Whose values are in it.
        rows: The records.
        values: One vector per record.
    """

    parties: frozenset[str]
    rows: Rows
    values: Floats


def moments(evidence: Evidence) -> list[Moment]:
    """Every sum that the observers' views hold, in order of time within each kind."""
    info = evidence.info
    found = [moment for observer, view in evidence.views.items() for moment in _told(view, observer, info)]
    if info.plan.protocol in TREE_SUMS:
        found += [moment for moment in tree_sums(evidence) if moment.values.size]
    return found


def _told(view: View, observer: str, info: Info) -> Iterator[Moment]:
    """Sums and single values that somebody sent as they are."""
    everyone = frozenset(info.parties)
    for party in info.parties:
        if party != observer:
            for one in embeddings_of(view, party, info.parties, observer):
                yield Moment(frozenset({party}), one.rows, one.values)
    for kind in TELL_SUMS:
        for rows, values in replies(view, observer, kind):
            if values.ndim == 2:
                yield Moment(everyone, rows, values)
    requests = _requests(view)
    for seen in view.messages("scores", "update", "plain.value", OPENED, sent=False):
        values = _floats(seen.fields["values"])
        if seen.kind in ("scores", "update"):
            if info.seen.get("labels"):  # passive workers get derivatives instead
                yield Moment(everyone, seen.fields["rows"].astype(np.int64), values)
        elif _announcement(seen) in requests:
            missing = {observer, *seen.fields.get("missing", ())}
            parties = everyone - missing if seen.kind == OPENED else frozenset({seen.sender})
            yield Moment(parties, requests[_announcement(seen)], values)


def _floats(values: NDArray[Any]) -> Floats:
    return np.asarray(values, np.float64)


def _round(seen: Seen) -> RoundKey:
    return str(seen.fields["channel"]), int(seen.fields["round"]), int(seen.fields["attempt"])


def _announcement(seen: Seen) -> tuple[str, int]:
    return str(seen.fields["channel"]), int(seen.fields["round"])


def _requests(view: View) -> dict[tuple[str, int], Rows]:
    """Channel and round -> the records that were announced."""
    return {
        _announcement(seen): seen.fields["rows"].astype(np.int64) for seen in view.messages("sum-request")
    }


# -- trees -------------------------------------------------------------------------------------------------


def sum_of(info: Info, channel: str) -> SecureSum:
    """The public configuration of the sum on a channel."""
    return sum_at(info.plan, info.parties, info.hosts[channel])


def sum_at(plan: Plan, parties: Sequence[str], host: str) -> SecureSum:
    """The public configuration of the sum whose totals an organisation obtains."""
    receiver = parties.index(host) if host in parties else None
    return build_sum(plan.protocol, workers=len(parties), receiver=receiver, collusion=plan.collusion)


_UNKEPT: Ring = np.zeros(0, np.uint64)
"""In the place of words that a view did not keep: what they would give away is known, not its value."""


class TreeRound(NamedTuple):
    """What a coalition saw of one round: the message on each edge, and the total of all masks."""

    edges: dict[tuple[int, Address], Ring]
    masks: Ring | None


def tree_rounds(views: Iterable[View]) -> dict[RoundKey, TreeRound]:
    """The tree messages of pooled views."""
    edges: dict[RoundKey, dict[tuple[int, Address], Ring]] = defaultdict(dict)
    masks: dict[RoundKey, Ring] = {}
    for view in views:
        for seen in view.messages("tree.subtotal", "tree.mask-total"):
            words = seen.fields.get("total", _UNKEPT)
            if seen.kind == "tree.mask-total":
                masks[_round(seen)] = words
            else:
                edges[_round(seen)][int(seen.fields["tree"]), int(seen.fields["from"])] = words
    return {key: TreeRound(found, masks.get(key)) for key, found in edges.items()}


def tree_sums(evidence: Evidence) -> list[Moment]:
    """All sums over honest parties that follow from the coalition's messages, and nothing else.

    They have no values where the views kept no words.
    """
    info = evidence.info
    requests = {key: rows for view in evidence.views.values() for key, rows in _requests(view).items()}
    solvers: dict[str, TreeSolver] = {}
    found = []
    for (channel, number, _), seen in tree_rounds(evidence.views.values()).items():
        if (channel, number) not in requests:
            continue
        solver = solvers.setdefault(channel, TreeSolver(info, channel))
        for parties, values in solver.solve(seen):
            found.append(Moment(parties, requests[channel, number], values))
    return found


class TreeSolver:
    """Solves the messages of a coalition on the public trees of one channel.

    Without the coalition each tree falls into pieces. What a piece sent to members, less what members sent
    into it, is the sum over the piece. Masks cancel where pieces of both trees cover the same workers.
    """

    def __init__(self, info: Info, channel: str) -> None:
        protocol = sum_of(info, channel)
        if not isinstance(protocol, TreeSum):
            raise TypeError(f"{info.plan.protocol} has no trees")
        self.fixed_point = protocol.fixed_point
        self.trees = protocol.parent_maps
        self.parties = info.parties
        places = {**dict(enumerate(info.parties)), COORDINATOR: channel}
        hosts = info.hosts
        self.members = {a for a in protocol.addresses if hosts[places[a]] in info.observers}
        self.honest = set(protocol.addresses) - self.members
        self.pieces = [_pieces(tree, self.honest) for tree in self.trees]
        union = nx.Graph()
        union.add_nodes_from(self.honest)
        for tree in self.trees:
            union.add_edges_from((c, p) for c, p in tree.items() if {c, p} <= self.honest)
        self.groups = [frozenset(group) for group in nx.connected_components(union)]

    def solve(self, seen: TreeRound) -> list[tuple[frozenset[str], Floats]]:
        """Sets of honest parties with their sums."""
        known = [self._piece_sums(number, seen) for number in range(len(self.trees))]
        found = []
        for group in self.groups:
            inside = [[piece for piece in pieces if piece <= group] for pieces in self.pieces]
            workers = frozenset(self.parties[address] for address in group if address >= 0)
            if not workers or any(piece not in known[i] for i, part in enumerate(inside) for piece in part):
                continue
            total = _add(known[0][piece] for piece in inside[0])
            if len(self.trees) == 2:
                total = total - _add(known[1][piece] for piece in inside[1])
            found.append((workers, self.fixed_point.decode(total)))
        return found

    def _piece_sums(self, number: int, seen: TreeRound) -> dict[frozenset[Address], Ring]:
        """The sums over the pieces of a tree, as far as the coalition can tell."""
        tree = self.trees[number]
        edge = {
            child: total for (tree_number, child), total in seen.edges.items() if tree_number == number + 1
        }
        known: dict[frozenset[Address], Ring] = {}
        rooted = None
        for piece in self.pieces[number]:
            top = next(v for v in piece if tree.get(v) not in piece)
            into = [edge[c] for c in self.members if tree.get(c) in piece]
            if top in tree:
                known[piece] = edge[top] - _add(into) if into else edge[top]
            else:
                rooted = piece
        if rooted is not None and number == 1 and seen.masks is not None:
            known[rooted] = self._rest_of_masks(seen.masks, edge, known, tree)
        return known

    def _rest_of_masks(
        self,
        total: Ring,
        edge: Mapping[Address, Ring],
        known: Mapping[frozenset[Address], Ring],
        tree: Mapping[Address, Address],
    ) -> Ring:
        """The mask sum of the piece with the root: the total less all others and the members' own."""
        rest = total
        for value in known.values():
            rest = rest - value
        for member in self.members:
            below = [edge[child] for child, parent in tree.items() if parent == member]
            rest = rest - (edge[member] - _add(below) if below else edge[member])
        return rest


def _pieces(tree: Mapping[Address, Address], honest: set[Address]) -> list[frozenset[Address]]:
    graph = nx.Graph()
    graph.add_nodes_from(honest)
    graph.add_edges_from((child, parent) for child, parent in tree.items() if {child, parent} <= honest)
    return [frozenset(piece) for piece in nx.connected_components(graph)]


def _add(values: Iterable[Ring]) -> Ring:
    return functools.reduce(np.add, values)  # modulo 2^64, as the ring adds
