"""One participant's part in a sum along one or two trees: its messages, its machine, its secret state."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from securevfl.errors import DropoutError, InputError, ProtocolError
from securevfl.protocols.contract import Address, Envelope, Machine, Message, Node, name_of
from securevfl.protocols.ring import Ring
from securevfl.protocols.stream import KeyStream
from securevfl.protocols.sums.trees import ParentMap, TreePair

if TYPE_CHECKING:
    from securevfl.protocols.sums.tree_sums import PlainTreeSum, TwoTreeSum


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Subtotal(Message):
    """The sum over the sender's subtree, sent to its parent in that tree (1 or 2)."""

    kind = "tree.subtotal"
    tree: int
    total: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MaskTotal(Message):
    """The sum of all masks, from the root of T2 to the root of T1 where these differ."""

    kind = "tree.mask-total"
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

    def __init__(self, node: TreeNode, shape: tuple[int, ...] | None, **where: int) -> None:
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

    def __init__(self, protocol: PlainTreeSum | TwoTreeSum, address: Address) -> None:
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

    def _round(
        self,
        encoded: Ring | None,
        shape: tuple[int, ...] | None,
        round: int,  # noqa: A002
        attempt: int,
    ) -> TreeMachine:
        if encoded is None and shape is None and not any(children for children, _ in self.places):
            raise InputError(f"{name_of(self.address)} has no children to learn the shape from; pass shape")
        machine = TreeMachine(self, shape, round=round, attempt=attempt)
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
