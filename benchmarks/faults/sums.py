"""Faults of noise in secure sums, and of the masks that hide what enters them."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from benchmarks.faults.contract import SUMS, TREES, fault, swap
from securevfl.privacy.gate import Gate
from securevfl.privacy.payloads import _KEY, Contribution
from securevfl.protocols.discrete_gaussian import DiscreteGaussian
from securevfl.protocols.keys import PairKeys
from securevfl.protocols.stream import KeyStream, MaskStream
from securevfl.protocols.sums import tree_sums
from securevfl.protocols.sums.noise import DistributedNoise
from securevfl.protocols.sums.pairwise_worker import SharingWorker, _Worker
from securevfl.protocols.sums.tree_sums import TreeNode
from securevfl.protocols.sums.trees import TreePair

PAIRWISE = ("pairwise",)
RECOVERING = ("pairwise-recovering",)


def _shares(change: Any) -> None:
    """Shares of the noise become change(owner, share, draw)."""
    owner: list[str] = [""]

    def watched(honest: Any) -> Any:
        def entering(self: Gate, *given: Any, **options: Any) -> Any:
            owner[0] = self.owner
            return honest(self, *given, **options)

        return entering

    for name in ("contribute", "abstain"):
        swap(Gate, name, watched)

    def make(honest: Any) -> Any:
        return lambda self, size, stream: change(owner[0], honest(self, size, stream), self)

    swap(DistributedNoise, "share", make)


@fault("sums", "nobody adds its share of the noise", SUMS)
def share_off() -> None:
    _shares(lambda owner, share, noise: np.zeros_like(share))


@fault("sums", "one party adds no share of the noise", SUMS)
def share_missing() -> None:
    _shares(lambda owner, share, noise: np.zeros_like(share) if owner == "p2" else share)


@fault("sums", "shares have half their standard deviation", SUMS)
def share_halved() -> None:
    def change(owner: str, share: Any, noise: DistributedNoise) -> Any:
        weak = DiscreteGaussian(noise.share_std // 2).sample(share.size, KeyStream.from_os_entropy())
        return weak.astype(np.int64).view(share.dtype)

    _shares(change)


@fault("sums", "shares are drawn once and used again", SUMS)
def share_once() -> None:
    kept: dict[Any, Any] = {}
    _shares(lambda owner, share, noise: kept.setdefault((owner, share.size), share))


@fault("sums", "every second value of a share is zero", SUMS)
def share_on_half_the_values() -> None:
    def change(owner: str, share: Any, noise: DistributedNoise) -> Any:
        share = share.copy()
        share[::2] = 0
        return share

    _shares(change)


@fault("sums", "the shares of two parties cancel each other", ("two-tree", "pairwise", "fdml-sums"))
def shares_cancel() -> None:
    drawn: dict[str, list[Any]] = {"p1": [], "p2": []}

    def change(owner: str, share: Any, noise: DistributedNoise) -> Any:
        if owner not in drawn:
            return np.zeros_like(share)
        mine, other = drawn[owner], drawn["p2" if owner == "p1" else "p1"]
        mine.append(share if len(other) <= len(mine) else (0 - other[len(mine)]).astype(share.dtype))
        return mine[-1] if mine[-1].size == share.size else share

    _shares(change)


@fault(
    "sums",
    "shares come from a generator whose seed is known",
    SUMS,
    needs="the seed: the values are those of a sound generator; only the code or its package digest tells",
)
def share_seeded() -> None:
    streams: dict[str, KeyStream] = {}

    def change(owner: str, share: Any, noise: DistributedNoise) -> Any:
        stream = streams.setdefault(owner, KeyStream(owner.encode().ljust(16, b"\0")))
        return DiscreteGaussian(noise.share_std).sample(share.size, stream).astype(np.int64).view(share.dtype)

    _shares(change)


@fault("sums", "entries say twice the noise that honest parties add", SUMS)
def honest_sigma_doubled() -> None:
    swap(DistributedNoise, "honest_sigma", lambda honest: property(lambda self: 2 * honest.func(self)))


@fault("sums", "one party's raw vectors enter a sum past the gate", SUMS)
def contribution_past_the_gate() -> None:
    def make(honest: Any) -> Any:
        def leaking(self: Gate, vectors: Any, **options: Any) -> Contribution:
            noise = options["noise"]
            if self.owner != "p2" or noise is None:
                found: Contribution = honest(self, vectors, **options)
                return found
            values = noise.encode(vectors.detach().double().numpy())
            said = {"observers": options["observers"], "kind": options["kind"], "head": self.ledger.head}
            return Contribution(values=values, source=vectors, key=_KEY, **said)

        return leaking

    swap(Gate, "contribute", make)


# -- masks --------------------------------------------------------------------------------------------------


def _masks(change: Any) -> None:
    """Masks of trees become change(node, mask); they still cancel."""

    def make(honest: Any) -> Any:
        def own(self: TreeNode, encoded: Any) -> Any:
            found = honest(self, encoded)
            if len(found) < 2:
                return found
            masked, mask = found
            other = np.array(change(self, mask), mask.dtype)
            return [masked - mask + other, other]

        return own

    swap(TreeNode, "own", make)


@fault("masks", "one party's mask is zero", TREES)
def mask_zero() -> None:
    _masks(lambda node, mask: np.zeros_like(mask) if node.address == 1 else mask)


@fault("masks", "masks are used again in every round", TREES)
def mask_reused() -> None:
    kept: dict[Any, Any] = {}
    _masks(lambda node, mask: kept.setdefault((id(node), mask.shape), mask.copy()))


@fault("masks", "masks cover the lower half of the words only", TREES)
def mask_lower_half() -> None:
    _masks(lambda node, mask: mask & mask.dtype.type((1 << (mask.itemsize * 4)) - 1))


@fault("masks", "every second word is not masked", TREES)
def mask_every_second() -> None:
    def change(node: TreeNode, mask: Any) -> Any:
        mask = mask.copy()
        mask.reshape(-1)[::2] = 0
        return mask

    _masks(change)


@fault(
    "masks",
    "masks come from a seed of 16 bits",
    TREES,
    needs="a search through all small seeds against the masked words of a view that keeps them",
)
def mask_small_seed() -> None:
    def make(honest: Any) -> Any:
        def begun(self: TreeNode, *given: Any) -> None:
            honest(self, *given)
            if self._masks is not None:
                self._masks = KeyStream(secrets.token_bytes(2).ljust(16, b"\0"))

        return begun

    swap(TreeNode, "__init__", make)


@fault("masks", "values and masks go up the same tree", ("two-tree", "flex-sums"))
def mask_same_tree() -> None:
    def make(honest: Any) -> Any:
        def same(*given: Any, **options: Any) -> TreePair:
            pair = honest(*given, **options)
            return TreePair(pair.t1, pair.t1)

        return same

    swap(tree_sums, "build_trees", make)
    swap(TreePair, "max_collusion", lambda honest: lambda self: 2)


@fault("masks", "pairs of parties use their masks again in every round", PAIRWISE)
def pair_mask_reused() -> None:
    swap(MaskStream, "at", lambda honest: lambda self, round, attempt: honest(self, 0, 0))  # noqa: A006


@fault("masks", "values enter a pairwise sum without masks", (*PAIRWISE, *RECOVERING))
def pair_mask_missing() -> None:
    swap(_Worker, "_masked_input", lambda honest: lambda self, plus, minus: honest(self, [], []))


@fault(
    "masks",
    "the key of a pair is one of 65,536",
    PAIRWISE,
    needs="a search through all small keys against the masked words of a view that keeps them",
)
def pair_key_small() -> None:
    def make(honest: Any) -> Any:
        def begun(self: PairKeys, *given: Any, **options: Any) -> None:
            honest(self, *given, **options)
            self._key = self._key[:2].ljust(32, b"\0")

        return begun

    swap(PairKeys, "__init__", make)


@fault(
    "masks",
    "a worker opens shares before enough others confirm who is there",
    RECOVERING,
    needs="an aggregator that lies: honest runs do not differ; the conformance tests have one",
)
def threshold_ignored() -> None:
    swap(SharingWorker, "_check_confirmed", lambda honest: lambda self, message, survivors: None)


@fault("masks", "a worker's own mask is the same for everybody", RECOVERING)
def self_mask_constant() -> None:
    def make(honest: Any) -> Any:
        def begun(self: SharingWorker, *given: Any, **options: Any) -> None:
            honest(self, *given, **options)
            self._self_seed = bytes(16)

        return begun

    swap(SharingWorker, "__init__", make)
