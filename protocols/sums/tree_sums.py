"""Sums along trees: the plain one of the paper's Algorithm 1, and Algorithm 2 with masks on the ring."""

from __future__ import annotations

from securevfl.errors import TopologyError
from securevfl.protocols.contract import Address, SecureSum
from securevfl.protocols.ring import FixedPoint
from securevfl.protocols.sums.tree_machine import MaskTotal, Subtotal, TreeNode
from securevfl.protocols.sums.trees import ParentMap, TreePair, build_trees


class PlainTreeSum(SecureSum):
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
        self._pair = TreePair(tree, tree)
        _check_workers(self._pair, workers)

    @property
    def parent_maps(self) -> tuple[ParentMap, ...]:
        """The one tree."""
        return (self._pair.t1,)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The vertices of the trees."""
        return tuple(sorted(self._pair.vertices))

    @property
    def receivers(self) -> tuple[Address, ...]:
        """The root of the first tree."""
        return (self._pair.roots[0],)

    def node(self, address: Address) -> TreeNode:
        """Fresh secret state for one participant."""
        return TreeNode(self, address)


class TwoTreeSum(SecureSum):
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
        _check_workers(pair, workers)
        if coordinator and not pair.has_coordinator:
            raise TopologyError("these trees have no coordinator; add it as a vertex or use build_trees")
        if pair.max_collusion() < collusion:
            raise TopologyError(
                f"these trees withstand {pair.max_collusion()} colluders, not {collusion}; use build_trees"
            )
        self.trees = pair if root is None else pair.rooted_at(root)
        self.collusion = collusion

    @property
    def parent_maps(self) -> tuple[ParentMap, ...]:
        """T1 and T2."""
        return (self.trees.t1, self.trees.t2)

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


def _check_workers(pair: TreePair, workers: int) -> None:
    if pair.workers != workers:
        raise TopologyError(f"the trees join {pair.workers} workers, not {workers}")
