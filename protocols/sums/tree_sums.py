"""Sums along trees: the plain one of the paper's Algorithm 1, and Algorithm 2 with masks on the ring."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from securevfl.errors import DropoutError, InputError, ProtocolError, TopologyError
from securevfl.protocols.contract import Address, Envelope, Machine, Message, Node, SecureSum, Shape, name_of
from securevfl.protocols.ring import FixedPoint, Ring
from securevfl.protocols.stream import KeyStream
from securevfl.protocols.sums.trees import ParentMap, TreePair, build_trees


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subtotal(Message):
    """The sum over the sender's subtree, sent to its parent in that tree (1 or 2)."""

    kind = "tree.subtotal"
    uniform = ("total",)
    tree: int
    total: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MaskTotal(Message):
    """The sum of all masks, from the root of T2 to the root of T1 where these differ."""

    kind = "tree.mask-total"
    uniform = ("total",)
    total: np.ndarray


class _Lane:
    """One tree as one participant sees it: what it has summed, whom it waits for, where it sends."""

    __slots__ = ("parent", "sent", "total", "waiting")

    def __init__(self, children: tuple[Address, ...], parent: Address | None) -> None:
        self.total: Ring | None = None
        self.waiting = set(children)
        self.parent = parent
        self.sent = False

    def add(self, sender: Address, array: Ring) -> None:
        if self.total is not None:
            np.add(self.total, array, out=self.total)
        self.waiting.discard(sender)


class TreeMachine(Machine):
    """One participant of a tree sum: adds what its children send and passes the sum to its parent."""

    def __init__(self, node: TreeNode, shape: Shape, **where: int) -> None:
        super().__init__(node.address, **where)
        self._node = node
        self._ring = node.protocol.fixed_point
        self._shape = shape
        self._lanes = [_Lane(*place) for place in node.places]
        self._mask_source = node.mask_source
        self._mask_total: Ring | None = None

    def contribute(self, own: list[Ring]) -> None:
        """Sets this participant's own summand of each tree."""
        for lane, summand in zip(self._lanes, own, strict=True):
            lane.total = summand

    @property
    def done(self) -> bool:
        """Whether both trees have passed this participant."""
        return self._mask_source is None and all(lane.sent for lane in self._lanes)

    def result(self) -> npt.NDArray[np.float64]:
        """The sum, at the root of the first tree."""
        if self._lanes[0].parent is not None:
            return super().result()
        total = self._lanes[0].total
        if not self.done or total is None:
            raise ProtocolError(f"round {self.round} is not done; the sum is not known yet")
        # Where both trees have one root, the total of all masks is its own of T2; else T2's root has sent it.
        masks = self._mask_total if self._mask_total is not None else self._lanes[-1].total
        return self._ring.decode(total if len(self._lanes) == 1 or masks is None else total - masks)

    def _start(self) -> list[Envelope]:
        return [envelope for index in range(len(self._lanes)) for envelope in self._advance(index)]

    def _receive(self, sender: Address, message: Message) -> list[Envelope]:
        if isinstance(message, MaskTotal):
            return self._receive_masks(sender, message)
        if not isinstance(message, Subtotal):
            raise ProtocolError(f"{type(message).__name__} does not belong to a tree sum")
        if message.tree not in range(1, len(self._lanes) + 1):
            raise ProtocolError(f"message is for tree {message.tree}; trees are 1 to {len(self._lanes)}")
        lane = self._lanes[message.tree - 1]
        if sender not in lane.waiting:
            raise ProtocolError(
                f"{name_of(self.address)} expects nothing from {name_of(sender)} in tree {message.tree}"
            )
        array = self._ring.check(message.total, self._shape)
        fresh = self._shape is None
        if fresh:
            self._shape = array.shape
            self.contribute(self._node.own(np.zeros(array.shape, dtype=array.dtype)))
        lane.add(sender, array)
        return self._start() if fresh else self._advance(message.tree - 1)

    def _receive_masks(self, sender: Address, message: MaskTotal) -> list[Envelope]:
        if self._mask_source is None or sender != self._mask_source or not self._lanes[1].sent:
            raise ProtocolError(f"{name_of(self.address)} expects no mask total from {name_of(sender)}")
        self._mask_total = self._ring.check(message.total, self._shape)
        self._mask_source = None
        return []

    def _advance(self, index: int) -> list[Envelope]:
        """Sends a lane's total on once all its children are in."""
        lane = self._lanes[index]
        if lane.sent or lane.waiting or lane.total is None:
            return []
        lane.sent = True
        lane.total.flags.writeable = False  # it may now be read by its receiver in the same process
        if lane.parent is not None:
            message = Subtotal(round=self.round, attempt=self.attempt, tree=index + 1, total=lane.total)
            return [Envelope(self.address, lane.parent, message)]
        if index == 1 and self._node.mask_target is not None:
            total = MaskTotal(round=self.round, attempt=self.attempt, total=lane.total)
            return [Envelope(self.address, self._node.mask_target, total)]
        return []

    def _drop(self, address: Address) -> list[Envelope]:
        if address == self.address or address not in self._node.protocol.addresses:
            raise ProtocolError(f"{name_of(address)} cannot drop out of the round of {name_of(self.address)}")
        lost = any(address in lane.waiting for lane in self._lanes)
        unsent = any(lane.parent == address and not lane.sent for lane in self._lanes)
        if lost or unsent or address == self._mask_source:
            raise DropoutError(
                f"{name_of(address)} is gone before round {self.round} was summed: a tree cannot recover;"
                " retry without it"
            )
        return []


class TreeNode(Node):
    """A participant of a tree sum; for masked sums it keeps the stream its masks come from."""

    def __init__(self, protocol: TreeSum, address: Address) -> None:
        super().__init__(protocol, address)
        trees = protocol.parent_maps
        self.places = [
            (tuple(child for child, parent in tree.items() if parent == address), tree.get(address))
            for tree in trees
        ]
        self.mask_source, self.mask_target = _mask_link(trees, address)
        # The stream only ever moves on, so no two queries, elements or retries share a mask.
        self._masks = KeyStream.from_os_entropy() if len(trees) == 2 else None

    def own(self, encoded: Ring) -> list[Ring]:
        """The participant's summand for each tree; uses up `encoded`."""
        return [encoded] if self._masks is None else [encoded, self._masks.mask(encoded)]

    def _round(self, encoded: Ring | None, shape: Shape, **where: int) -> TreeMachine:
        if encoded is None and shape is None and not any(children for children, _ in self.places):
            raise InputError(f"{name_of(self.address)} has no children to learn the shape from; pass shape")
        machine = TreeMachine(self, shape, **where)
        if shape is not None:
            if encoded is None:
                encoded = np.zeros(shape, dtype=self.protocol.fixed_point.dtype)
            machine.contribute(self.own(encoded))
        return machine


def _mask_link(trees: tuple[ParentMap, ...], address: Address) -> tuple[Address | None, Address | None]:
    """From whom this participant gets the mask total, and to whom it sends it."""
    if len(trees) < 2:
        return None, None
    first, second = TreePair(*trees).roots
    if first == second:
        return None, None
    return (second if address == first else None), (first if address == second else None)


class TreeSum(SecureSum):
    """What sums along trees share: the participants are the vertices, the root of T1 receives the sum.

    Attributes:
        trees: T1 and T2.
        parent_maps: The trees that carry messages.
    """

    trees: TreePair
    parent_maps: tuple[ParentMap, ...]

    def _use(self, trees: TreePair, *, masked: bool) -> None:
        if trees.workers != self.workers:
            raise TopologyError(f"the trees join {trees.workers} workers, not {self.workers}")
        self.trees = trees
        self.parent_maps = (trees.t1, trees.t2) if masked else (trees.t1,)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The vertices of the trees."""
        return tuple(sorted(self.trees.vertices))

    @property
    def receivers(self) -> tuple[Address, ...]:
        """The root of the first tree."""
        return (self.trees.roots[0],)

    def node(self, address: Address) -> TreeNode:
        """Fresh secret state for one participant."""
        return TreeNode(self, address)


class PlainTreeSum(TreeSum):
    """Algorithm 1 of the AFSGD-VP paper: partial sums travel up one tree, unmasked.

    Threat model: none of the participants is curious. Every host learns the sum over each child's subtree,
    and of a child without children its very input. It is the baseline that `TwoTreeSum` is measured against.

    Who learns what: the root learns the sum, every host its children's subtotals. Collusion: none is
    withstood. Dropout: `DropoutError` at the neighbour; retry without the worker.

    Args:
        workers: Number of workers.
        tree: Parent map; by default the paper's pairwise tree with root 0.
        fixed_point: How floats become ring elements.
    """

    messages = (Subtotal,)

    def __init__(
        self, *, workers: int, tree: ParentMap | None = None, fixed_point: FixedPoint | None = None
    ) -> None:
        super().__init__(workers=workers, fixed_point=fixed_point)
        if tree is None:
            tree = TreePair.pairwise(range(workers), range(workers)).t1
        self._use(TreePair(tree, tree), masked=False)


class TwoTreeSum(TreeSum):
    """Algorithm 2 of the AFSGD-VP paper, on the ring and with trees that are proven to hide.

    Each participant draws a uniform mask, sends value plus mask up T1 and the mask up T2; the root of T1
    subtracts the mask total. Messages travel over authenticated, encrypted channels.

    Threat model: participants follow the protocol but up to `collusion` of them, the coordinator included,
    pool everything they see. They learn their own inputs and the total, nothing else (computationally, as
    masks come from AES-128-CTR). The pair of trees is verified for that at construction. A participant that
    deviates can spoil the sum, not open it.

    Who learns what: the root of T1 learns the sum; everybody else uniform ring elements. Not promised: what
    the totals of many rounds tell together (they can determine the inputs of a training run).

    Dropout: the dropped worker's neighbours raise `DropoutError`; retry the round without it on new trees.

    Args:
        workers: Number of workers, at least `collusion` + 2.
        collusion: How many participants may pool their views: 1 or 2.
        trees: A tree pair to use; by default `build_trees(workers, collusion)`.
        coordinator: Let an external coordinator without input be the root and receive the sum.
        root: The participant that receives the sum; by default the root of `trees`.
        fixed_point: How floats become ring elements.

    Raises:
        TopologyError: The trees do not withstand such a coalition.
    """

    messages = (Subtotal, MaskTotal)

    def __init__(
        self,
        *,
        workers: int,
        collusion: int = 1,
        trees: TreePair | None = None,
        coordinator: bool = False,
        root: Address | None = None,
        fixed_point: FixedPoint | None = None,
    ) -> None:
        super().__init__(workers=workers, fixed_point=fixed_point)
        pair = trees if trees is not None else build_trees(workers, collusion, coordinator=coordinator)
        self._use(pair, masked=True)
        if coordinator and not pair.has_coordinator:
            raise TopologyError("these trees have no coordinator; add it as a vertex or use build_trees")
        if pair.max_collusion() < collusion:
            raise TopologyError(
                f"these trees withstand {pair.max_collusion()} colluders, not {collusion}; use build_trees"
            )
        if root is not None:
            self._use(pair.rooted_at(root), masked=True)
        self.collusion = collusion
