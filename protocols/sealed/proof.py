"""The set-up proof: rows no longer than declared, one-hot columns, labels 0 or 1, without showing any.

A prover opens E = Z + U over the integers, U in [0, 2^60) from the dealer, and e = y + U_y for labels. A
verifier holds, from the dealer, a secret point tau and what U's polynomials are there (`VerifierKeys`); the
prover does not know tau. What is proved of Z = E - U, for every record:

- `norm`: four slack columns fill the squares up to exactly B^2. 64 random projections of all rows, shown by
  their bits to be small, leave entries below 2^(2 half), so that equality modulo p is equality of integers.
- one-hot (`groups`): every entry is a bit, and the bits of each group add up to 1.
- labels: every one is a bit.

Two coins of the dealer, drawn when everybody has what comes before, choose projections and weights.

Soundness, for each prover and verifier, by degrees: 16 + 1 for norms (or 16 + 1 for bits and 2 for groups),
26 + 1 for the projections' bits, 13 + 2 for what they add up to, 16 + 1 for labels: at most 80 / p in all,
and 2^-64 for the projections. A record's values are hidden perfectly but for E, whose distribution moves by
|Z| 2^-60 per entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols.sealed.field import FIELD, Elements, Field
from securevfl.protocols.sealed.polynomials import Packing
from securevfl.protocols.sealed.squares import four_squares
from securevfl.protocols.stream import KeyStream, derive_key

MASK_BITS = 60
PROJECTIONS = 64
LENGTH = 8
"""Columns, and labels, in one polynomial."""
SLACK = 4
HALVES = ((255, 13), (4095, 12))
"""Most columns -> half the bits of a projection: width 4^bits stays below p."""
_TAIL = 91.0
"""Projections of honest rows leave their bits with a probability of 2 exp(-91) each, below 2^-130."""
LARGEST_BOUND = 1 << 20

Integers = npt.NDArray[np.int64]


def coin_stream(coin: bytes, session: bytes, purpose: str) -> KeyStream:
    """What a coin decides for one purpose in one session."""
    return KeyStream(derive_key(coin, purpose=f"sealed/coin/{purpose}", context=session))


def seed_stream(seed: bytes, purpose: str) -> KeyStream:
    """Secret words of a dealt seed for one purpose of the proof."""
    return KeyStream(derive_key(seed, purpose=f"sealed/proof/{purpose}"))


@dataclass(frozen=True, kw_only=True)
class ProofClaim:
    """What one member proves; public.

    Args:
        prover: Index of the member.
        width: Columns of its operand; 0 for none.
        records: Records.
        bound: B, the largest norm in integers; not used for one-hot columns.
        groups: Sizes of the groups of one-hot columns; empty where norms are proved.
        labels: How many labels it brings; 0 for none.
        field: 2^61 - 1, but for tests.
    """

    prover: int
    width: int
    records: int
    bound: int = 0
    groups: tuple[int, ...] = ()
    labels: int = 0
    field: Field = FIELD

    def __post_init__(self) -> None:
        if self.groups and sum(self.groups) != self.width:
            raise InputError(f"groups of {sum(self.groups)} columns do not make {self.width}")
        if self.shows_norms and not (0 < self.bound <= LARGEST_BOUND and self.columns <= HALVES[-1][0]):
            raise InputError(
                f"a norm proof for {self.width} columns of norm {self.bound} is not offered: at most"
                f" {HALVES[-1][0] - SLACK} columns, and a clip of {LARGEST_BOUND >> 14}"
            )

    @property
    def shows_norms(self) -> bool:
        """Whether rows are bounded by their norm."""
        return bool(self.width and not self.groups)

    @cached_property
    def columns(self) -> int:
        """Columns of Z: operand, slack, and zeros up to a multiple of LENGTH."""
        needed = self.width + (SLACK if self.shows_norms else 0)
        return -(-needed // LENGTH) * LENGTH

    @cached_property
    def half(self) -> int:
        """Bits of a projection in one polynomial."""
        return next(half for most, half in HALVES if self.columns <= most)

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """Records that are projected together: as many as keep honest projections in range."""
        if not self.shows_norms:
            return ()
        most = max(1, int(4.0 ** (2 * self.half - 1) / (_TAIL * self.bound**2)))
        return tuple(slice(s, min(s + most, self.records)) for s in range(0, self.records, most))

    @property
    def operand_shape(self) -> tuple[int, int]:
        """Of E and U."""
        return self.columns, self.records

    @property
    def bits_shape(self) -> tuple[int, int]:
        """Of the projections' bits."""
        return (self.half if self.blocks else 0), 2 * len(self.blocks) * PROJECTIONS * self.columns

    @property
    def labels_shape(self) -> tuple[int, int]:
        """Of the labels, packed."""
        return LENGTH, -(-self.labels // LENGTH)

    @cached_property
    def parts(self) -> tuple[tuple[str, Packing, int], ...]:
        """Name, packing and sent words of every polynomial."""
        packed, found = Packing(LENGTH, self.field), []
        if self.shows_norms:
            bits = Packing(self.half, self.field)
            found += [
                ("norm", packed, 2 * LENGTH + 1),
                ("bits", bits, self.half + 1),
                ("line", bits, self.half + 1),
            ]
        elif self.width:
            found.append(("columns", packed, LENGTH + 1))
        if self.labels:
            found.append(("labels", packed, LENGTH + 1))
        return tuple(found)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to prove."""
        return not self.parts

    # -- from operand and labels to what is masked ----------------------------------------------------------

    def extend(self, operand: npt.NDArray[np.int32]) -> Integers:
        """Z: the operand, its slack, zeros.

        Raises:
            EncodingError: A row is too long, or not one-hot.
        """
        out = np.zeros(self.operand_shape, np.int64)
        out[: self.width] = operand
        if self.shows_norms:
            left = self.bound**2 - np.einsum("dn,dn->n", out, out)
            if left.min(initial=0) < 0:
                raise EncodingError("a record is longer than declared; clip rows and round toward zero")
            out[self.width : self.width + SLACK] = four_squares(left)
        elif self.width:
            starts = np.cumsum((0, *self.groups[:-1]))
            sums = np.add.reduceat(out[: self.width], starts, axis=0)
            if not (((out == 0) | (out == 1)).all() and (sums == 1).all()):
                raise EncodingError("columns are not one-hot in every group")
        return out

    def pack_labels(self, labels: Elements) -> Elements:
        """Labels, and zeros up to a whole number of polynomials."""
        out = np.zeros(self.labels_shape, np.uint64)
        out.reshape(-1)[: self.labels] = labels.reshape(-1)
        return out

    def check_opened(self, words: npt.NDArray[np.uint64]) -> Elements:
        """E as field elements, once it is in the range that honest rows give.

        Raises:
            ProtocolError: It is not: E = U + 1 + p would pass for a bit.
        """
        room = self.bound if self.shows_norms else 1
        signed = words.view(np.int64)
        least, low = int(signed.min(initial=0)), -room if self.shows_norms else 0
        if least < low or int(signed.max(initial=0)) >= (1 << MASK_BITS) + room:
            raise ProtocolError("its masked rows are out of range")
        # Hardly ever does a row fall below its mask; all else is an element of the large field as it is.
        return words if not least and self.field.bits > MASK_BITS else self.field.reduce(signed)

    # -- what coins decide ----------------------------------------------------------------------------------

    def projections(self, coin: bytes, session: bytes, block: int) -> npt.NDArray[np.float64]:
        """R of one block: (64, records), entries -1, 0, 0, 1 with equal chances."""
        part = self.blocks[block]
        count = part.stop - part.start
        stream = coin_stream(coin, session, f"project/{self.prover}/{block}")
        words = np.unpackbits(stream.words((2, PROJECTIONS, -(-count // 8)), np.uint8), axis=2, count=count)
        return np.asarray(np.subtract(words[0], words[1], dtype=np.float64, casting="unsafe"))

    def weights(self, coin: bytes, session: bytes, name: str, count: int) -> Elements:
        """Random factors of one polynomial's columns."""
        return self.field.draw(coin_stream(coin, session, f"weights/{self.prover}/{name}"), count)

    def column_weights(self, coin: bytes, session: bytes) -> Elements:
        """Of the operand's polynomials: one factor per record where squares of a row are added up."""
        packs = self.columns // LENGTH
        if not self.shows_norms:
            return self.weights(coin, session, "columns", packs * self.records)
        return np.tile(self.weights(coin, session, "norm", self.records), packs)

    def line_weights(self, coin: bytes, session: bytes) -> tuple[Elements, Elements]:
        """Factors (blocks, 64) of projections and (columns,) of columns, whose products weigh the numbers."""
        rows = self.weights(coin, session, "rows", len(self.blocks) * PROJECTIONS)
        return rows.reshape(-1, PROJECTIONS), self.weights(coin, session, "line", self.columns)

    def bit_weights(self, rows: Elements, columns: Elements) -> Elements:
        """Factors of the bits' polynomials: lower halves first, then the upper ones, times 2^half."""
        lower = self.field.mul(rows.reshape(-1, 1), columns[None]).reshape(-1)
        return np.concatenate([lower, self.field.shift(lower, self.half)])

    def projected(self, first: bytes, second: bytes, session: bytes, elements: Elements) -> int:
        """Sum of (weights x projections x elements) over all blocks: of E, or of U."""
        field = self.field
        rows, columns = self.line_weights(second, session)
        total = 0
        for block, part in enumerate(self.blocks):
            mixed = self._mix(rows[block], self.projections(first, session, block))
            total += field.dot(mixed, field.combine([int(c) for c in columns], elements[:, part]))
        return total % field.p

    def _mix(self, factors: Elements, signs: npt.NDArray[np.float64]) -> Elements:
        """Factors' signs, with signs -1, 0, 1: limbs of 16 bits times 64 terms are exact."""
        out = np.zeros(signs.shape[1], np.uint64)
        for limb in range(4):
            piece = ((factors >> np.uint64(16 * limb)) & np.uint64(0xFFFF)).astype(np.float64)
            out = self.field.add(out, self.field.shift(self._signed(piece @ signs), 16 * limb))
        return out

    def _signed(self, values: npt.NDArray[np.float64]) -> Elements:
        return (values.astype(np.int64) % self.field.p).view(np.uint64)

    def grouped(self, second: bytes, session: bytes, elements: Elements) -> int:
        """Sum of weights x elements with one factor per record and per group: of E, or of U."""
        records, groups = self.group_weights(second, session)
        each = [int(factor) for factor, size in zip(groups, self.groups, strict=True) for _ in range(size)]
        return self.field.dot(records, self.field.combine(each, elements[: self.width]))

    def group_weights(self, second: bytes, session: bytes) -> tuple[Elements, Elements]:
        """Factors of records and of groups."""
        return (
            self.weights(second, session, "group-records", self.records),
            self.weights(second, session, "groups", len(self.groups)),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class VerifierKeys:
    """What the dealer gives a verifier about one prover: values at a secret point.

    Attributes:
        point: tau.
        operand: Of U's polynomials, their tops negative.
        bits: Of the masks of bits.
        labels: Of the masks of labels.
        masks: Of each polynomial's mask, in the order of `ProofClaim.parts`.
    """

    point: int
    operand: Elements
    bits: Elements
    labels: Elements
    masks: Elements


class Secrets:
    """What dealer and prover expand alike: masks of the opened values, and for one verifier tops and masks.

    Args:
        claim: What is proved.
        seed: The prover's seed.
    """

    def __init__(self, claim: ProofClaim, seed: bytes) -> None:
        self.claim = claim
        self.operand = seed_stream(seed, "operand").words(claim.operand_shape)
        self.operand >>= np.uint64(64 - MASK_BITS)
        self.bits = claim.field.draw(seed_stream(seed, "bits"), claim.bits_shape)
        self.labels = claim.field.draw(seed_stream(seed, "labels"), claim.labels_shape)

    def tops(self, pair: bytes, name: str, count: int) -> Elements:
        """Random tops towards one verifier."""
        return self.claim.field.draw(seed_stream(pair, f"tops/{name}"), count)

    def mask(self, pair: bytes, name: str, packing: Packing) -> Elements:
        """The mask of one polynomial towards one verifier, at 0, 1, 2, ..."""
        stream = seed_stream(pair, f"mask/{name}")
        made = {"norm": packing.norm_mask, "line": packing.line_mask}
        return made.get(name, packing.bits_mask)(stream)

    def keys(self, pair: bytes, point: int) -> VerifierKeys:
        """What the dealer gives the verifier."""
        claim = self.claim
        values = {"operand": self.operand.reshape(LENGTH, -1), "bits": self.bits, "labels": self.labels}
        packings = {"operand": LENGTH, "bits": claim.half if claim.blocks else 1, "labels": LENGTH}
        found = {
            name: Packing(packings[name], claim.field).at(
                rows, point, claim.field.negative(self.tops(pair, name, rows.shape[1]))
            )
            if rows.size
            else np.empty(0, np.uint64)
            for name, rows in values.items()
        }
        masks = [packing.evaluate(self.mask(pair, name, packing), point) for name, packing, _ in claim.parts]
        return VerifierKeys(point=point, **found, masks=np.array(masks, np.uint64))

    def corrections(
        self, pairs: dict[int, bytes], first: bytes, second: bytes, session: bytes
    ) -> dict[int, int]:
        """Kappa for every verifier, told with the second coin: what the masks add to the linear check."""
        claim = self.claim
        if claim.groups:
            return dict.fromkeys(pairs, claim.grouped(second, session, self.operand))
        if not claim.shows_norms:
            return dict.fromkeys(pairs, 0)
        common = claim.projected(first, second, session, self.operand)
        bits = Packing(claim.half, claim.field)
        return {
            h: (common - _number(self.mask(pair, "line", bits), claim)) % claim.field.p
            for h, pair in pairs.items()
        }


def _number(line: Elements, claim: ProofClaim) -> int:
    """Sum of 2^(l - 1) F(l): the weighted numbers that the bits stand for."""
    return sum(int(word) << place for place, word in enumerate(line[1:])) % claim.field.p


class Prover:
    """Knows Z, labels and all masks.

    Args:
        secrets: From the dealer's seed.
        operand: The member's operand; (0, records) for none. Bits where columns are one-hot.
        labels: Field elements; empty for none.
    """

    def __init__(self, secrets: Secrets, operand: npt.NDArray[np.int32], labels: Elements) -> None:
        self._secrets, self._claim = secrets, secrets.claim
        self._rows = self._claim.extend(operand)
        self._labels = self._claim.pack_labels(labels)
        self._bits = np.zeros(self._claim.bits_shape, np.int64)
        self._known: dict[str, dict[str, list[list[int]]]] = {}

    def opened(self) -> npt.NDArray[np.uint64]:
        """E."""
        return np.asarray(self._rows.view(np.uint64) + self._secrets.operand)

    def opened_labels(self) -> Elements:
        """e_y."""
        return self._claim.field.add(self._labels, self._secrets.labels)

    def opened_bits(self, coin: bytes, session: bytes) -> Elements:
        """The masked bits of the projections that the first coin asks for."""
        claim, half = self._claim, self._claim.half
        numbers = [
            claim.projections(coin, session, block) @ self._rows[:, part].T.astype(np.float64)
            for block, part in enumerate(claim.blocks)
        ]
        if numbers:
            whole = np.stack(numbers).reshape(-1).astype(np.int64) + (1 << (2 * half - 1))
            if whole.min() < 0 or whole.max() >> (2 * half):
                raise ProtocolError(
                    "a projection left its range, which honest rows do once in 2^80 runs; resume"
                )
            both = np.concatenate([whole & ((1 << half) - 1), whole >> half])
            self._bits = (both[None] >> np.arange(half)[:, None]) & 1
        return claim.field.add(self._bits.view(np.uint64), self._secrets.bits)

    def prove(self, pair: bytes, first: bytes, second: bytes, session: bytes) -> Elements:
        """What one verifier is told."""
        claim, secrets, words = self._claim, self._secrets, []
        for name, packing, _ in claim.parts:
            values, weights, tops = self._columns(name, pair, second, session)
            if name == "line":
                plain = packing.line_values(values, tops, weights)
            else:
                bound = claim.bound if name == "norm" else 1
                plain = packing.squares(
                    values,
                    tops,
                    weights,
                    bound=bound,
                    bits=name != "norm",
                    known=self._known.setdefault(name, {}),
                )
            masked = claim.field.add(plain, secrets.mask(pair, name, packing))
            words.append(masked if name in ("norm", "line") else packing.without_zeros(masked))
        return np.concatenate(words) if words else np.empty(0, np.uint64)

    def _columns(
        self, name: str, pair: bytes, second: bytes, session: bytes
    ) -> tuple[Integers, Elements, Elements]:
        """Values, weights and tops of one polynomial."""
        claim = self._claim
        if name in ("norm", "columns"):
            values = self._rows.reshape(LENGTH, -1)
            kind, weights = "operand", claim.column_weights(second, session)
        elif name == "labels":
            values, kind = self._labels.view(np.int64), "labels"
            weights = claim.weights(second, session, "labels", values.shape[1])
        else:
            values, kind = self._bits, "bits"
            weights = (
                claim.weights(second, session, "bits", values.shape[1])
                if name == "bits"
                else claim.bit_weights(*claim.line_weights(second, session))
            )
        return values, weights, self._secrets.tops(pair, kind, values.shape[1])


class Verifier:
    """Checks one prover's opened values.

    Args:
        claim: What it claims.
        keys: From the dealer.
    """

    def __init__(self, claim: ProofClaim, keys: VerifierKeys) -> None:
        self._claim, self._keys = claim, keys
        lengths = {"operand": claim.columns // LENGTH * claim.records, "bits": claim.bits_shape[1]}
        for name, count in {**lengths, "labels": claim.labels_shape[1], "masks": len(claim.parts)}.items():
            claim.field.check(getattr(keys, name), (count,))

    def check(
        self,
        *,
        opened: Elements,
        bits: Elements,
        labels: Elements,
        proof: Elements,
        first: bytes,
        second: bytes,
        correction: int,
        session: bytes,
    ) -> None:
        """Raises unless the proof holds.

        Args:
            opened: E, from `ProofClaim.check_opened`.
            bits: Masked bits of the projections.
            labels: Masked labels.
            proof: What the prover told.
            first: The coin that chose projections.
            second: The coin that chose weights.
            correction: kappa.
            session: The session's name.

        Raises:
            ProtocolError: It does not hold.
        """
        claim, keys, field = self._claim, self._keys, self._claim.field
        field.check(proof, (sum(count for _, _, count in claim.parts),))
        start = 0
        for place, (name, packing, count) in enumerate(claim.parts):
            words, start = proof[start : start + count], start + count
            full = words if name in ("norm", "line") else packing.with_zeros(words)
            expected = self._at_point(name, opened, bits, labels, second, session) + int(keys.masks[place])
            if packing.evaluate(full, keys.point) != expected % field.p:
                raise ProtocolError(f"its proof of {_TITLES[name]} does not fit what it opened")
            if name == "norm":
                self._check_norm(full, second, session)
            if name == "line":
                self._check_line(full, opened, first, second, correction, session)
        if claim.groups:
            self._check_groups(opened, second, correction, session)

    def _at_point(
        self, name: str, opened: Elements, bits: Elements, labels: Elements, second: bytes, session: bytes
    ) -> int:
        """What the polynomial must be at the secret point."""
        claim, keys, field = self._claim, self._keys, self._claim.field
        if name in ("norm", "columns"):
            values, key = opened.reshape(LENGTH, -1), keys.operand
            weights = claim.column_weights(second, session)
        elif name == "labels":
            values, key = labels, keys.labels
            weights = claim.weights(second, session, "labels", values.shape[1])
        else:
            values, key = bits, keys.bits
            if name == "line":
                weights = claim.bit_weights(*claim.line_weights(second, session))
            else:
                weights = claim.weights(second, session, "bits", values.shape[1])
        at = field.sub(Packing(len(values), field).at(values, keys.point), key)
        if name == "line":
            return field.dot(weights, at)
        square = field.mul(at, at)
        return field.dot(weights, square if name == "norm" else field.sub(square, at))

    def _check_norm(self, words: Elements, second: bytes, session: bytes) -> None:
        claim, field = self._claim, self._claim.field
        each = field.total(claim.weights(second, session, "norm", claim.records))
        if field.total(words[1 : LENGTH + 1]) != claim.bound**2 * each % field.p:
            raise ProtocolError("its rows are longer than declared")

    def _check_line(
        self, words: Elements, opened: Elements, first: bytes, second: bytes, correction: int, session: bytes
    ) -> None:
        claim, field = self._claim, self._claim.field
        rows, columns = claim.line_weights(second, session)
        middle = field.total(rows) * field.total(columns) << (2 * claim.half - 1)
        if (
            _number(words, claim)
            != (claim.projected(first, second, session, opened) + middle - correction) % field.p
        ):
            raise ProtocolError("its rows have entries far out of range")

    def _check_groups(self, opened: Elements, second: bytes, correction: int, session: bytes) -> None:
        claim, field = self._claim, self._claim.field
        records, groups = claim.group_weights(second, session)
        wanted = field.total(records) * field.total(groups)
        if (claim.grouped(second, session, opened) - correction - wanted) % field.p:
            raise ProtocolError("its one-hot columns do not add up to one in every group")


_TITLES = {
    "norm": "row norms",
    "bits": "small entries",
    "line": "small entries",
    "columns": "one-hot columns",
    "labels": "labels that are 0 or 1",
}
