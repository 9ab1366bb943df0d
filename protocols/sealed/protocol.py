"""Sealed gradients: batch gradients of a model that is split over parties, with no per-record value opened.

Party m holds rows X_m and computes scores u_m; one member holds the labels y; a dealer without input deals
correlated randomness. The residuals r = f(sum of u_m) - y stay secret-shared, and each party obtains nothing
but the noisy total X_m' r over the batch, of its own columns. One round:

1. The dealer sends each member a seed and what a seed cannot hold (`Deal`).
2. Each sends its score as a masked phase (`Phase`): the sum of all is uniform and public to the members.
3. Each turns its shares of the masks' waves into a share r_j of the residuals, by public factors only.
4. Each sends j -> m the blinded share B_j = r_j - V_j and q_mj = E_m' V_j + c'_mj + e_mj (`Share`), where
   E_m = X_m - U_m is m's masked operand, opened once (or anew each round where X_m changes) (`Operand`).
5. m adds X_m' (r_m + sum B_j) + c_m + sum q_mj + e_mm = X_m' r + sum_j e_mj.

e_mj is member j's secret discrete Gaussian noise on m's total; the self-share e_mm is never subtracted.

Threat model: all members follow the protocol; any `t` of them pool what they see; the dealer colludes with
nobody and sees no message between members. Then a coalition's view can be simulated from uniform words and
the noisy totals. Whoever sees both dealer and members sees everything.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, InputError
from securevfl.protocols.contract import Message, read_message
from securevfl.protocols.ring import FixedPoint, Ring
from securevfl.protocols.sealed.field import FIELD
from securevfl.protocols.sealed.kernel import ADDED_BITS, Kernel
from securevfl.protocols.sealed.large import Chosen, Left, SeedMask, held_pieces, stream_of
from securevfl.protocols.sealed.messages import CHECKED_MESSAGES, PEERS
from securevfl.protocols.sealed.parts import Parts
from securevfl.protocols.sealed.proof import ProofClaim
from securevfl.protocols.sealed.residues import T
from securevfl.protocols.sealed.series import WAVE_BITS, SineSeries, Waves
from securevfl.protocols.wire import Value, unpack

OPERAND_BITS = 14
RESIDUAL_BITS = 2 * WAVE_BITS
TOTAL_BITS = OPERAND_BITS + RESIDUAL_BITS
RESIDUAL_ROOM = 1 << 30
"""Checked: added to one V_j, so that no residual plus V is negative."""
DEALT, THIRD, ENCRYPTED = "dealer", "third", "encrypted"
"""Where masks come from: a dealer, the member whom a product does not concern, or ciphertexts of two."""
PACKED_BITS = 12
"""Fraction bits of operands that ciphertexts hold; their residuals have 20."""
TAIL = 12
"""Room for noise in the range check, in standard deviations of each share."""
LEAST_FRACTION = 9
"""Fraction bits of residuals below which a ring of 32 bits is too coarse for a histogram."""

WORDS = FixedPoint(bits=64, fraction_bits=TOTAL_BITS)
PHASES = FixedPoint(bits=32, fraction_bits=0)
SCORES = FixedPoint(bits=64, fraction_bits=32)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Seed(Message):
    """Dealer to member, once: the seed of the mask on its static operand."""

    kind: ClassVar[str] = "sealed-seed"
    secret: ClassVar[tuple[str, ...]] = ("seed",)
    seed: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Operand(Message):
    """Member to all others: its masked left operand, (width, rows)."""

    kind: ClassVar[str] = "sealed-operand"
    uniform: ClassVar[tuple[str, ...]] = ("words",)
    words: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Deal(Message):
    """Dealer to member, every round: a seed, the correction c_m, and to member 0 the wave shares."""

    kind: ClassVar[str] = "sealed-deal"
    uniform: ClassVar[tuple[str, ...]] = ("product", "waves")
    secret: ClassVar[tuple[str, ...]] = ("seed",)
    seed: bytes
    product: npt.NDArray[Any]
    waves: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Phase(Message):
    """Member to all others: its masked scores as phases, (rows, outputs)."""

    kind: ClassVar[str] = "sealed-phase"
    uniform: ClassVar[tuple[str, ...]] = ("words",)
    words: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Share(Message):
    """Member j to member m: the blinded residual share and m's masked, noisy product."""

    kind: ClassVar[str] = "sealed-share"
    uniform: ClassVar[tuple[str, ...]] = ("blinded", "product")
    blinded: npt.NDArray[Any]
    product: npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScoreDeal(Message):
    """Dealer to member, for a prediction: a seed; to the label holder all masks' sum and keys of tags.

    In a service the parties' key is one that they share.
    """

    kind: ClassVar[str] = "sealed-score-deal"
    uniform: ClassVar[tuple[str, ...]] = ("words",)
    secret: ClassVar[tuple[str, ...]] = ("seed", "keys")
    common: ClassVar[tuple[str, ...]] = ("keys",)
    seed: bytes
    words: npt.NDArray[Any]
    keys: bytes


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MaskedScores(Message):
    """Member to label holder: masked scores to predict from, with a tag of agreement and records."""

    kind: ClassVar[str] = "sealed-score"
    uniform: ClassVar[tuple[str, ...]] = ("words",)
    summed: ClassVar[tuple[str, ...]] = ("words",)
    words: npt.NDArray[Any]
    tag: bytes


MESSAGES: tuple[type[Message], ...] = (
    Seed,
    Operand,
    Deal,
    Phase,
    Share,
    ScoreDeal,
    MaskedScores,
    *CHECKED_MESSAGES,
    *PEERS,
)


def read(kind: str, fields: dict[str, Value]) -> Message:
    """Checks the fields of a message whose binary form a transport has decoded."""
    return read_message(MESSAGES, kind, fields, "sealed training")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SealedProtocol:
    """Public configuration of sealed gradients; it holds no secret.

    Args:
        widths: Columns of each member's operand; 0 for a label holder without features.
        static: Whether a member's operand stays the same for all rounds (a linear model's rows), or is
            masked anew each round (per-record Jacobians of a network).
        clips: Bound C_m of the L2 norm of what one record adds to member m's operand.
        label_holder: Index of the member that holds the labels.
        records: Records of a static operand.
        batch: The most records of one round.
        outputs: Scores per record.
        series: The function of the summed score, of which the labels are subtracted; `Waves` to total all
            waves of one score as they are (metrics); None where the label holder's labels themselves are
            totalled (label histograms): no scores, no phases, no waves.
        label_low: Least label.
        label_high: Largest label.
        share_stds: [m][j]: integer standard deviation of member j's noise on m's total, in units of
            2^-`total_bits`; 0 for none.
        entry: Bound of a single entry of an operand, where it is less than the clips: 1 for one-hot operands.
        checked: Whether members prove their rows and labels and every opening is authenticated, so that a
            member that cheats is caught before anything depends on it.
        groups: Checked: sizes of each member's groups of one-hot columns, whose entries are 0 or 2^14; empty
            where norms are proved.
        complement: Checked: the second of two outputs is 1 less the first label.
        dealing: Where masks come from: `DEALT`, `THIRD` or `ENCRYPTED`.
        fraction: None for words of 64 bits. Else words of operands, blinded shares and totals have 32 bits:
            entries of operands are 0 or 1 without fraction bits, residuals have so many, and a member may
            open fewer columns than its width; the shape of its masked operand says how many.

    Raises:
        InputError: The parts do not fit each other.
        EncodingError: A total could leave the ring.
    """

    widths: tuple[int, ...]
    static: tuple[bool, ...]
    clips: tuple[float, ...]
    label_holder: int
    records: int
    batch: int
    outputs: int
    series: SineSeries | Waves | Kernel | None
    label_low: float = 0.0
    label_high: float = 1.0
    share_stds: tuple[tuple[int, ...], ...]
    entry: float = math.inf
    checked: bool = False
    groups: tuple[tuple[int, ...], ...] = ()
    complement: bool = False
    dealing: str = DEALT
    fraction: int | None = None

    def __post_init__(self) -> None:
        members = len(self.widths)
        if members < 2 or not 0 <= self.label_holder < members:
            raise InputError(f"{members} members, label holder {self.label_holder}; at least 2 are needed")
        square = len(self.share_stds) == members and all(len(row) == members for row in self.share_stds)
        if len(self.static) != members or len(self.clips) != members or not square:
            raise InputError(f"static, clips and share_stds need one entry for each of {members} members")
        if isinstance(self.series, Waves) and self.outputs != self.series.outputs:
            raise InputError(f"{self.outputs} outputs; the waves of a score make {self.series.outputs}")
        if min(self.widths) < 0 or self.outputs < 1 or not 0 < self.batch <= self.records:
            raise InputError("widths, outputs, batch and records must be positive, batch at most records")
        if any(std < 0 for row in self.share_stds for std in row) or not all(c >= 0 for c in self.clips):
            raise InputError("clips and noise cannot be negative")
        if self.narrow and (self.checked or self.entry != 1.0 or not all(self.static)):
            raise InputError("words of 32 bits are for static operands of 0 and 1 that nobody proves")
        if self.fraction is not None and not 0 <= self.fraction <= RESIDUAL_BITS:
            raise InputError(f"{self.fraction} fraction bits; 0 to {RESIDUAL_BITS} are possible")
        for member in range(members):
            self._check_range(member)
        if self.dealing != DEALT:
            self._check_dealing()
        if self.checked:
            self._check_claims()

    def _check_dealing(self) -> None:
        """What cannot be had without a dealer is refused, and noise that would get into no total."""
        if self.checked or not all(self.static):
            raise InputError("without a dealer members follow the protocol and operands stay the same")
        possible = {THIRD: self.members > 2, ENCRYPTED: self.members == 2}
        if not possible.get(self.dealing, False):
            raise InputError(f"dealing {self.dealing!r} among {self.members} members is not possible")
        if self.dealing == ENCRYPTED:
            return
        parts = Parts(self.members, self.label_holder)
        for member, stds in enumerate(self.share_stds):
            outside = [j for j, std in enumerate(stds) if std and j not in parts.contributors(member)]
            if outside and self.widths[member]:
                raise InputError(
                    f"noise of members {outside} cannot reach the total of member {member}: "
                    "size the shares for those who contribute"
                )

    def _check_claims(self) -> None:
        """What proofs cannot show is refused."""
        if not all(self.static):
            raise InputError("operands that change every round would need a proof every round")
        if (self.label_low, self.label_high) != (0.0, 1.0):
            raise InputError("only labels that are 0 or 1 can be proved")
        if (self.groups and len(self.groups) != self.members) or (self.complement and self.outputs != 2):
            raise InputError("groups need one entry per member, and complements two outputs")
        if self.residual_bound * 2.0**RESIDUAL_BITS >= RESIDUAL_ROOM:
            raise InputError("residuals are too large to be authenticated")
        _ = self.claims

    def _check_range(self, member: int) -> None:
        largest = min(self.clips[member], self.entry)
        # A record of an operand that changes multiplies all its residuals at once.
        residual = self.residual_bound * (1 if self.static[member] else math.sqrt(self.outputs))
        signal = self.batch * largest * (residual + self.cutting / 2)
        noise = TAIL * sum(self.share_stds[member])
        half, unit = self._room, 2.0**self.total_bits
        if not signal * unit + noise < half:
            raise EncodingError(
                f"the total of member {member} may reach {signal + noise / unit:.3g}, but the"
                f" ring holds {half / unit:.3g}; use smaller batches, a smaller clip or less noise"
            )

    @property
    def _room(self) -> float:
        """Half of the ring, or of the residues."""
        return T / 2 if self.dealing == ENCRYPTED else 2.0 ** (self.words.bits - 1)

    @property
    def sines(self) -> SineSeries | Waves:
        """The series, where phases are masked and waves are shared.

        Raises:
            InputError: There is none.
        """
        if self.series is None or isinstance(self.series, Kernel):
            raise InputError("this protocol has no waves")
        return self.series

    @property
    def total_bits(self) -> int:
        """Fraction bits of totals and of the noise on them."""
        return ADDED_BITS + PACKED_BITS if self.dealing == ENCRYPTED else self.words.fraction_bits

    @property
    def narrow(self) -> bool:
        """Whether words have 32 bits."""
        return self.fraction is not None

    @property
    def fewer(self) -> bool:
        """Whether an operand may have fewer columns than its width allows, which its holder then tells."""
        return self.narrow or (self.dealing == ENCRYPTED and self.entry == 1.0)

    @property
    def words(self) -> FixedPoint:
        """The ring of operands, blinded shares and totals."""
        return WORDS if self.fraction is None else FixedPoint(bits=32, fraction_bits=self.fraction)

    @property
    def operand_one(self) -> int:
        """What stands for 1 in an operand."""
        return 1 if self.narrow else 1 << OPERAND_BITS

    @property
    def residual_bits(self) -> int:
        """Fraction bits of residuals that are totalled."""
        if self.dealing == ENCRYPTED:
            return ADDED_BITS
        return RESIDUAL_BITS if self.fraction is None else self.fraction

    @property
    def cut(self) -> int:
        """Low bits that every member drops of its residual share.

        Shares s_j of 64 bits add up to r modulo 2^64. Without their low c bits they add up, modulo 2^(64-c),
        to r / 2^c less what was dropped: at most one unit each, never a wrap.
        """
        return RESIDUAL_BITS - self.residual_bits if self.narrow and self.series is not None else 0

    @property
    def cutting(self) -> float:
        """How far apart residuals can get that were equal before: a unit for every member."""
        return self.members * 2.0**-self.residual_bits if self.cut else 0.0

    @functools.cached_property
    def claims(self) -> tuple[ProofClaim, ...]:
        """What every member proves."""
        groups = self.groups or ((),) * self.members
        labels = self.records * (1 if self.complement else self.outputs) if self.labelled else 0
        return tuple(
            ProofClaim(
                prover=member,
                width=self.widths[member],
                records=self.records,
                bound=math.floor(self.clips[member] * 2.0**OPERAND_BITS),
                groups=groups[member] if self.widths[member] else (),
                labels=labels if member == self.label_holder else 0,
            )
            for member in range(self.members)
        )

    @property
    def labelled(self) -> bool:
        """Whether the label holder brings labels; where waves are totalled they are in its operand."""
        return not isinstance(self.series, Waves)

    @property
    def blind_bits(self) -> int:
        """v: every V_j is below 2^v, so that residuals and all V_j together stay below p."""
        return ((FIELD.p - 2 * RESIDUAL_ROOM) // self.members).bit_length() - 1

    @property
    def members(self) -> int:
        """How many take part, the dealer apart."""
        return len(self.widths)

    @property
    def residual_bound(self) -> float:
        """R: bound of |f(u) - y| for any score, as the shares evaluate it; without a series of |y|."""
        if self.series is None:
            return max(abs(self.label_low), abs(self.label_high))
        if isinstance(self.series, Waves):
            return self.series.bound
        low, high = self.series.range
        return max(high - self.label_low, self.label_high - low) + self.series.rounding

    @property
    def residual_change(self) -> float:
        """Bound of the change of a residual whose label stays."""
        if self.series is None:
            return 0.0
        if isinstance(self.series, Waves):
            return 2 * self.series.bound
        low, high = self.series.range
        return high - low + 2 * self.series.rounding

    def decode(self, data: bytes | memoryview) -> Message:
        """Decodes any message of sealed training from its binary form."""
        return read(*unpack(data))

    def total_shape(self, member: int) -> tuple[int, int]:
        """Shape of a member's total: one column per output, or one in all where outputs share parameters."""
        return self.widths[member], self.outputs if self.static[member] else 1

    def total_std(self, member: int) -> float:
        """Standard deviation of the noise on each value of a member's total, all shares together."""
        return math.hypot(*self.share_stds[member]) * 2.0**-self.total_bits

    def operand_shape(self, member: int, rows: int) -> tuple[int, int]:
        """Shape of a member's operand in a round over so many records."""
        return self.widths[member], rows if self.static[member] else rows * self.outputs

    def right(self, member: int, words: Ring) -> Ring:
        """Residual words (rows, outputs) in the layout that member's operand multiplies."""
        return words if self.static[member] else words.reshape(-1, 1)

    def phase_shape(self, rows: int) -> tuple[int, int]:
        """(rows, scores): one score for each output, or one whose waves are the outputs."""
        return rows, 1 if isinstance(self.series, Waves) else self.outputs

    def blinded_shape(self, member: int, rows: int) -> tuple[int, int]:
        """(rows, outputs) of the blinded shares that a member gets; it needs none to total nothing."""
        return rows if self.widths[member] else 0, self.outputs

    def count(self, rows: npt.NDArray[np.int64] | None) -> int:
        """Records of a round over these rows, all by default.

        Raises:
            InputError: They are more than a batch, or none.
        """
        found = self.records if rows is None else len(rows)
        if not 0 < found <= self.batch:
            raise InputError(f"a round over {found} records; 1 to {self.batch} are possible")
        return found

    def operand_unit(self, member: int) -> int:
        """What an entry of a proved operand is multiplied by: one-hot columns are proved as bits."""
        return 1 << OPERAND_BITS if self.groups and self.groups[member] else 1

    def wave_shape(self, rows: int) -> tuple[int, int, int, int]:
        """(2, harmonics, rows, scores): sines, then cosines."""
        waves = 0 if self.series is None or isinstance(self.series, Kernel) else len(self.series.coefficients)
        return 2, waves, *self.phase_shape(rows)


def narrow_fraction(records: int) -> int | None:
    """Fraction bits with which totals of so many residuals fill a quarter of 32 bits; None where too few."""
    left = 29 - records.bit_length()
    return min(left, RESIDUAL_BITS) if left >= LEAST_FRACTION else None


INTEGERS = (np.int16, np.int32)


def check_operand(
    operand: npt.NDArray[Any], clip: float, outputs: int = 1, *, one: int = 1 << OPERAND_BITS
) -> None:
    """Raises `EncodingError` unless each record's integers have an L2 norm of at most clip * 2^14.

    Args:
        operand: (width, records * outputs) of int16 or int32; a record's outputs lie next to each other.
        clip: The bound.
        outputs: Columns per record.
        one: What stands for 1.
    """
    if operand.dtype not in INTEGERS or operand.ndim != 2 or operand.shape[1] % outputs:
        raise EncodingError(f"an operand of type {operand.dtype} and shape {operand.shape} is not offered")
    squares = np.einsum("dn,dn->n", operand, operand, dtype=np.float64)  # exact below 2^53
    largest = float(squares.reshape(-1, outputs).sum(1).max(initial=0.0))
    if largest > (clip * one) ** 2:
        raise EncodingError(
            f"a record has norm {math.sqrt(largest) / one:.6g}, above the clip {clip};"
            " clip rows and round toward zero"
        )


def expand(seed: bytes, purpose: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.uint64) -> Ring:
    """Uniform words that dealer and member both derive from a seed, for one purpose."""
    return stream_of(seed, purpose).words(shape, dtype)


PIECE, ROWS = 1 << 15, 64
"""Integers that are widened at a time, and in how many rows at most: they stay in the cache."""


def ring_product(left: Left, right: Ring) -> Ring:
    """The product left @ right modulo 2^64, or 2^32 where both have words of 32 bits.

    Args:
        left: (width, records); as right, or int16 or int32 integers that stand for their residues.
        right: (records, columns) of uint64 or uint32.

    Raises:
        InputError: Shapes or types do not fit.
    """
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        raise InputError(f"a product of shapes {left.shape} and {right.shape} does not exist")
    if right.dtype not in (np.uint64, np.uint32) or left.dtype not in (right.dtype, *INTEGERS):
        raise InputError(f"a ring product of {left.dtype} by {right.dtype} is not offered")
    if isinstance(left, SeedMask):
        return left.product(right)
    if isinstance(left, Chosen):
        parts = [ring_product(piece, right[place]) for place, piece in left.pieces()]
        return np.asarray(np.sum(parts, axis=0, dtype=right.dtype))
    out = np.empty((left.shape[0], right.shape[1]), right.dtype)
    for column, values in enumerate(np.ascontiguousarray(right.T)):
        for place, piece in held_pieces(left):
            out[place, column] = _by_vector(piece, values)
    return out


def _by_vector(left: npt.NDArray[Any], values: Ring) -> Ring:
    if left.itemsize == values.itemsize:
        product: Ring = np.einsum("dn,n->d", left.view(values.dtype), values)
        return product
    total = np.zeros(left.shape[0], np.uint64)
    for first in range(0, left.shape[0], ROWS):
        here = slice(first, first + ROWS)
        step = PIECE // min(ROWS, left.shape[0])
        for start in range(0, left.shape[1], step):
            # Sign extension, then the same bits read as unsigned: the residue modulo 2^64.
            piece = left[here, start : start + step].astype(np.int64).view(np.uint64)
            total[here] += np.einsum("dn,n->d", piece, values[start : start + step])
    return total
