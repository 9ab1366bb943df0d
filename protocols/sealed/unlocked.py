"""What members really sent in a checked session, made again from their seeds: for audits, after a run.

The dealer locks every seed under a key of its own and sends it along. Whoever has a member's view and the
dealer's key has that member's seeds, and can take the masks off what it sent: what is left of a product is
the member's own noise, whatever anybody else did. Either of the two alone gives nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.checked import Brought, blind
from securevfl.protocols.sealed.field import FIELD, Elements
from securevfl.protocols.sealed.proof import ProofClaim, Secrets
from securevfl.protocols.sealed.protocol import RESIDUAL_BITS, SealedProtocol, expand, ring_product
from securevfl.protocols.stream import derive_key

Signed = npt.NDArray[np.int64]
LOCK_BYTES = 32


def lock(key: bytes, seed: bytes, *, round: int, member: int) -> bytes:  # noqa: A002
    """A seed under a session's key; the same again unlocks it. Every round and member has its own pad."""
    place = round.to_bytes(8, "big", signed=True) + member.to_bytes(4, "big")
    pad = derive_key(key, purpose="sealed/lock", context=place, length=len(seed))
    return bytes(a ^ b for a, b in zip(seed, pad, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """What a member's view keeps of one round, and its seed; masked words are as they were sent.

    Attributes:
        seed: Its own, of this round.
        correction: c_m, from the dealer.
        masked: The others' masked operands, as this member received them.
        blinded: Everybody's blinded residual shares, its own included.
        sent: Products that it sent to the others.
        received: Products that it received from them.
    """

    seed: bytes
    correction: Ring
    masked: dict[int, Ring]
    blinded: dict[int, Elements]
    sent: dict[int, Ring]
    received: dict[int, Ring]

    @property
    def opened(self) -> Elements:
        """d: the residuals plus everybody's V."""
        first, *rest = self.blinded.values()
        for words in rest:
            first = FIELD.add(first, words)
        return first


def own_noise(brought: Brought, kept: Kept, total: npt.NDArray[np.float64] | None) -> dict[int, Signed]:
    """The member's own noise on every total that has any, in units of the ring.

    Nothing of it depends on what others brought: it rests on this member's seed, rows and view alone.

    Args:
        brought: What the member brought to the round.
        kept: What its view and its seed say.
        total: The total that it obtained; None where it obtains none.
    """
    protocol, member, _, rows, operand, _ = brought
    mine = blind(protocol, member, kept.seed, kept.blinded[member].shape)
    found = {}
    for other, product in kept.sent.items():
        masked = kept.masked[other][: protocol.widths[other]] * np.uint64(protocol.operand_unit(other))
        masked = masked if rows is None else np.ascontiguousarray(masked[:, rows])
        bare = expand(kept.seed, f"product/{other}", protocol.total_shape(other))
        found[other] = (product - bare + ring_product(masked, mine)).view(np.int64)
    if total is not None:
        bare = ring_product(operand, kept.opened - mine) + kept.correction
        for product in kept.received.values():
            bare += product
        words = np.rint(total * 2.0**protocol.total_bits).astype(np.int64).view(np.uint64)
        found[member] = (words.reshape(bare.shape) - bare).view(np.int64)
    return found


def phases_of(brought: Brought, seed: bytes) -> Ring:
    """The masked phases that a member sends who tells its scores."""
    phase = np.empty(0, np.uint32) if brought.phase is None else brought.phase
    return phase - expand(seed, "phase", phase.shape, np.uint32)


def residual_excess(protocol: SealedProtocol, seeds: dict[int, bytes], opened: Elements) -> float:
    """How far the largest opened residual reaches, as a share of what the noise is made for."""
    blinds = [blind(protocol, member, seed, opened.shape) for member, seed in seeds.items()]
    residuals = (opened - np.sum(blinds, axis=0, dtype=np.uint64)).view(np.int64)
    # The two ends apart: the absolute value of the least integer is no integer.
    reach = max(int(residuals.max(initial=0)), -int(residuals.min(initial=0)))
    return reach / (protocol.residual_bound * 2.0**RESIDUAL_BITS)


def opened_rows(claim: ProofClaim, seed: bytes, words: Ring, labels: Elements) -> tuple[Signed, Elements]:
    """Rows and labels that somebody opened masked, without their masks."""
    secrets = Secrets(claim, seed)
    rows = (words[: claim.width] - secrets.operand[: claim.width]).view(np.int64)
    return rows, FIELD.sub(labels, secrets.labels).reshape(-1)[: claim.labels]


def is_as_proved(claim: ProofClaim, rows: Signed, labels: Elements) -> bool:
    """Whether rows are as long, or one-hot, and labels 0 or 1, as a proof says."""
    if not ((labels == 0) | (labels == 1)).all():
        return False
    if not claim.groups:
        large = np.abs(rows.astype(np.float64))  # integers beyond 2^53 are far too long anyway
        return bool((np.einsum("dn,dn->n", large, large) <= float(claim.bound) ** 2).all())
    sums = np.add.reduceat(rows, np.cumsum((0, *claim.groups[:-1])), axis=0)
    return bool(((rows == 0) | (rows == 1)).all() and (sums == 1).all())
