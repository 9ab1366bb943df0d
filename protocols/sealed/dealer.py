"""The dealer of sealed training: correlated randomness for every round, from nothing but fresh entropy."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from securevfl.errors import InputError, ProtocolError
from securevfl.protocols.contract import DEALER, MAX_ROUND, SETUP_ROUND, Envelope, Message
from securevfl.protocols.ring import Ring
from securevfl.protocols.sealed.large import Left, SeedMask, blocks, choose, operand_mask, stream_of
from securevfl.protocols.sealed.protocol import Deal, ScoreDeal, SealedProtocol, Seed, expand, ring_product
from securevfl.protocols.sealed.scoring import score_mask, tag_key
from securevfl.protocols.sealed.series import WAVE_BITS, SineSeries, Waves
from securevfl.protocols.stream import KEY_BYTES, apply_masks

Rows = npt.NDArray[np.int64]
Drawn = tuple[list[bytes], list[Ring]]
"""Of one round: every member's seed, and what it gets of products."""
AHEAD = 4
"""Rounds whose products are made together, at most, where the masks are made anew for them."""


class SealedDealer:
    """Deals one message per member and round. It receives nothing and has no input.

    Promises: what it deals is uniform and independent from round to round. It must see no message between
    members: together with any one of them it could unmask everything. Seeds of a round are not kept once it
    is dealt; the masks of static operands, or of large ones their seeds, live in memory as long as this
    object.

    Args:
        protocol: The public configuration.
    """

    def __init__(self, protocol: SealedProtocol) -> None:
        self.protocol = protocol
        self._operands: dict[int, Ring | SeedMask] | None = None
        self._next_round = 0
        self._ahead: list[Drawn] = []

    def setup(self) -> list[Envelope]:
        """Deals the masks of static operands; calling it again begins a new session with new masks."""
        protocol = self.protocol
        seeds = [os.urandom(KEY_BYTES) for _ in range(protocol.members)]
        self._operands = {
            member: operand_mask(seed, protocol.operand_shape(member, protocol.records), protocol.words.dtype)
            for member, seed in enumerate(seeds)
            if protocol.static[member]
        }
        self._next_round, self._ahead = 0, []
        return [self._to(member, Seed(round=SETUP_ROUND, seed=seed)) for member, seed in enumerate(seeds)]

    def continued(self, protocol: SealedProtocol) -> SealedDealer:
        """The dealer of another configuration over the same static operands, with the masks they have."""
        if self._operands is None:
            raise ProtocolError("the dealer has not dealt the operands' masks yet")
        other = SealedDealer(protocol)
        other._operands = {m: mask[: protocol.widths[m]] for m, mask in self._operands.items()}
        other._next_round = self._next_round
        return other

    @staticmethod
    def _to(member: int, message: Message) -> Envelope:
        return Envelope(DEALER, member, message)

    def deal(self, *, round: int, rows: Rows | None = None, more: int = 0) -> list[Envelope]:  # noqa: A002
        """The messages of one round over the given records, all by default.

        Args:
            round: Its number.
            rows: The records.
            more: How many rounds over all records follow.

        Raises:
            ProtocolError: The masks were not dealt yet, or the round number is not above the last one's.
        """
        self._claim(round)
        count = self.protocol.count(rows)
        seeds, products = self._draw(rows, count, more)
        waves = self._waves(seeds, count)
        return [
            self._to(
                member,
                Deal(
                    round=round,
                    seed=seed,
                    product=products[member],
                    waves=waves if member == 0 else np.empty(0, np.uint64),
                ),
            )
            for member, seed in enumerate(seeds)
        ]

    def _blind(self, member: int, seed: bytes, shape: tuple[int, ...]) -> Ring:
        """V_j of a member."""
        return expand(seed, "blind", shape, self.protocol.words.dtype)

    def _claim(self, round: int) -> None:  # noqa: A002
        if self._operands is None:
            raise ProtocolError("the dealer has not dealt the operands' masks yet")
        if not self._next_round <= round < MAX_ROUND:
            raise ProtocolError(f"round {round} was dealt before; randomness is never used twice")
        self._next_round = round + 1

    def _waves(self, seeds: list[bytes], count: int) -> Ring:
        """Member 0's share of the waves of the summed phase mask; the others expand theirs."""
        protocol = self.protocol
        shape = protocol.phase_shape(count)
        if protocol.series is None:
            return np.empty(0, np.uint64)
        mask = np.zeros(shape, np.uint32)
        for seed in seeds:
            apply_masks(mask, [stream_of(seed, "phase")], [])
        waves = np.empty(protocol.wave_shape(count), np.uint64)
        for here in blocks(count):
            waves[:, :, here] = waves_of(mask[here], protocol.sines)
        # All but member 0 expand their shares from their seeds, so that only one share has to travel.
        return apply_masks(waves, [], [stream_of(seed, "waves") for seed in seeds[1:]])

    def _blinds(self, seeds: list[bytes], count: int) -> list[Ring]:
        shape = count, self.protocol.outputs
        return [self._blind(member, seed, shape) for member, seed in enumerate(seeds)]

    def _draw(self, rows: Rows | None, count: int, more: int) -> Drawn:
        """A round's seeds and products; to run through masks once for several rounds takes half the time."""
        streamed = any(isinstance(mask, SeedMask) for mask in (self._operands or {}).values())
        several = streamed and rows is None and all(self.protocol.static)
        if not (self._ahead and several):
            self._ahead = self._drawn(min(AHEAD, 1 + more) if several else 1, rows, count)
        return self._ahead.pop()

    def _drawn(self, number: int, rows: Rows | None, count: int) -> list[Drawn]:
        drawn = [[os.urandom(KEY_BYTES) for _ in range(self.protocol.members)] for _ in range(number)]
        blinds = [self._blinds(seeds, count) for seeds in drawn]
        return list(zip(drawn, self._products(drawn, blinds, rows), strict=True))

    def _products(
        self, drawn: list[list[bytes]], blinds: list[list[Ring]], rows: Rows | None
    ) -> list[list[Ring]]:
        """c_m = U_m' sum_{j != m} V_j - sum_{j != m} c'_mj for every round and member m."""
        protocol = self.protocol
        everything = [np.sum(each, axis=0, dtype=each[0].dtype) for each in blinds]
        products: list[list[Ring]] = [[] for _ in drawn]
        for member, seed in enumerate(drawn[0]):
            rights = [protocol.right(member, s - b[member]) for s, b in zip(everything, blinds, strict=True)]
            mask = self._mask_of(member, seed, rows, len(everything[0]))
            found = np.hsplit(ring_product(mask, np.hstack(rights)), len(drawn))
            for seeds, dealt, product in zip(drawn, products, found, strict=True):
                for other, theirs in enumerate(seeds):
                    if other != member:
                        product -= expand(theirs, f"product/{member}", product.shape, product.dtype)
                dealt.append(np.ascontiguousarray(product))
        return products

    def _mask_of(self, member: int, seed: bytes, rows: Rows | None, count: int) -> Left:
        if not self.protocol.static[member] or self._operands is None:
            return expand(seed, "operand", self.protocol.operand_shape(member, count))
        return choose(self._operands[member], rows)

    def deal_scores(self, *, round: int, count: int, agreed: bytes = b"") -> list[Envelope]:  # noqa: A002
        """Masks that cancel in the sum of all members' scores of `count` records, for the label holder.

        Args:
            round: Number of the round.
            count: How many records.
            agreed: What was agreed on: the masks of members that know of another agreement do not cancel.
        """
        self._claim(round)
        if count < 1:
            raise InputError(f"a prediction of {count} records; at least 1 is needed")
        holder, shape = self.protocol.label_holder, (count, self.protocol.outputs)
        seeds = [os.urandom(KEY_BYTES) for _ in range(self.protocol.members)]
        total = np.zeros(shape, np.uint64)
        keys = b"".join(tag_key(seed) for member, seed in enumerate(seeds) if member != holder)
        for member, seed in enumerate(seeds):
            if member != holder:
                total += score_mask(seed, agreed, shape)
        return [
            self._to(
                member,
                ScoreDeal(
                    round=round,
                    seed=b"" if member == holder else seed,
                    words=total if member == holder else np.empty(0, np.uint64),
                    keys=keys if member == holder else b"",
                ),
            )
            for member, seed in enumerate(seeds)
        ]


def waves_of(mask: Ring, series: SineSeries | Waves) -> Ring:
    """c_k sin(k a) and c_k cos(k a) at 2^14; powers of exp(i a) by repeated multiplication."""
    angle = mask * (2 * np.pi / 2.0**32)
    power = np.cos(angle) + 1j * np.sin(angle)
    step = power.copy() if series.harmonics[1:2] == (2,) else power * power
    out = np.empty((2, len(series.coefficients), *mask.shape), np.int64)
    for index, coefficient in enumerate(series.coefficients):
        scale = coefficient * 2.0**WAVE_BITS
        np.rint(power.imag * scale, out=out[0, index], casting="unsafe")
        np.rint(power.real * scale, out=out[1, index], casting="unsafe")
        power *= step
    return out.view(np.uint64)
