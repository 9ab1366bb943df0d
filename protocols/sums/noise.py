"""Distributed noise: a secure sum whose total is differentially private and whose noise nobody knows.

Each party adds its own discrete Gaussian share to its fixed-point integers before they are summed. The shares
are sized so that the honest parties' shares alone have at least the wanted standard deviation, whatever the
colluders subtract. Noise must be discrete: a sum of rounded real Gaussians is not a rounded Gaussian sum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols.contract import Address, Machine, Message, Node, SecureSum, Shape, name_of
from securevfl.protocols.discrete_gaussian import MAX_STD, DiscreteGaussian
from securevfl.protocols.ring import FixedPoint, Ring
from securevfl.protocols.stream import KeyStream
from securevfl.protocols.sums.tree_sums import PlainTreeSum

TAIL = 12
"""Room for noise, in standard deviations of a share: exceeded with probability 2 exp(-72) < 1e-30."""

_UP = 1 + 2.0**-48  # more than the roundings of the few float operations below

# A discrete Gaussian of variance v is, up to a factor, a real Gaussian of variance v - 9 rounded at random to
# an integer (by a discrete Gaussian of variance 9 around it). By Poisson summation each normaliser is 1 up to
# e = 2 sum_k exp(-2 pi^2 9 k^2) < 2e-77, so probabilities agree up to (1 + e) / (1 - e); two worlds: 4.2 e.
ROUNDING_VARIANCE = 9
ROUNDING_GAP = 1e-76


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedNoise:
    """The noise of a sum of M shares, calibrated against t of the M parties.

    Against an observer who knows t shares, the total carries a sum of M - t independent discrete Gaussians.
    It is as private as real Gaussian noise of std `honest_sigma` on values of `sensitivity`, up to `slack`:
    any accountant for Gaussian noise can take these figures, each rounded toward more privacy. (Taking the
    discrete noise's own std instead is unsound: at std 4 it claims a delta that is 10 % too small.) A share
    that is missing from the total (a dropped party) counts like a known one: include such parties in
    `colluders`.

    Args:
        parties: M, the number of shares.
        colluders: t, the number of shares an observer knows, 0 to M - 1. A party that sees the total and
            holds a share is one of them.
        sigma: Standard deviation wanted on the total, in the units of the values.
        fixed_point: The ring of the sum.
    """

    parties: int
    colluders: int
    sigma: float | Fraction
    fixed_point: FixedPoint = dataclasses.field(default_factory=FixedPoint)

    def __post_init__(self) -> None:
        if self.parties < 1 or not 0 <= self.colluders < self.parties:
            raise InputError(
                f"{self.colluders} colluders among {self.parties} parties leave no honest noise;"
                f" at most {self.parties - 1} are possible"
            )
        if not math.isfinite(self.sigma) or self.sigma <= 0:
            raise InputError(f"sigma is {self.sigma}; a positive number is needed")
        if self.share_std > MAX_STD:
            raise InputError(
                f"sigma {self.sigma} is too large for {self.fixed_point.fraction_bits} fraction bits;"
                " use fewer"
            )

    @property
    def honest(self) -> int:
        """The number of shares that stay unknown."""
        return self.parties - self.colluders

    @cached_property
    def share_std(self) -> int:
        """Standard deviation of a share in ring units: the least s with (M - t) s^2 - 9 >= (sigma 2^f)^2."""
        wanted = Fraction(self.sigma) ** 2 * (1 << 2 * self.fixed_point.fraction_bits)
        square = (wanted + ROUNDING_VARIANCE) / self.honest
        root = math.isqrt(math.ceil(square))
        return root if root * root >= square else root + 1

    @cached_property
    def honest_sigma(self) -> float:
        """Std of a real Gaussian that protects no better than the honest shares; `sigma` or slightly more."""
        variance = self.honest * self.share_std**2 - ROUNDING_VARIANCE
        return math.sqrt(variance) * self.fixed_point.resolution / _UP

    @cached_property
    def total_sigma(self) -> float:
        """Standard deviation of the noise on the total: what utility pays."""
        return self.share_std * math.sqrt(self.parties) * self.fixed_point.resolution

    @property
    def tau(self) -> float:
        """How far the honest shares' sum is from a discrete Gaussian; see `convolution_gap`."""
        return convolution_gap(self.share_std, self.honest)

    def slack(self, dimension: int) -> float:
        """The price of discrete shares, per release of `dimension` values.

        If real Gaussian noise of std `honest_sigma` is (epsilon, delta)-DP, this total is
        (epsilon + slack, exp(slack / 2) delta)-DP. Slacks of several releases add up.
        """
        return dimension * (self.tau + ROUNDING_GAP)

    def sensitivity(self, change: float, dimension: int) -> float:
        """How far a total moves in L2 norm, after rounding, if one record's values move by `change`.

        Args:
            change: L2 distance of the real values: 2C for vectors clipped to C that are replaced.
            dimension: Number of values, each of which may round by half a step in both worlds.
        """
        if not change >= 0 or dimension < 0:
            raise InputError(f"a change of {change} in {dimension} values makes no sense")
        return (change + math.sqrt(dimension) * self._resolution) * _UP

    @cached_property
    def _resolution(self) -> float:
        return self.fixed_point.resolution

    @cached_property
    def _shares(self) -> tuple[DiscreteGaussian, np.dtype[Any], np.dtype[Any]]:
        """The distribution of a share, whose tables take long to make, and the ring's types."""
        signed = np.dtype(np.int32 if self.fixed_point.bits == 32 else np.int64)
        return DiscreteGaussian(self.share_std), signed, self.fixed_point.dtype

    def share(self, size: int, stream: KeyStream) -> Ring:
        """One party's secret share as ring elements; fresh at every call."""
        distribution, signed, ring = self._shares
        # The ring reduces modulo 2^bits.
        return distribution.sample(size, stream).astype(signed).view(ring)


def convolution_gap(std: int, count: int) -> float:
    """How far a sum of discrete Gaussians is from one: 10 sum_{k < count} exp(-2 pi^2 std^2 k / (k + 1)).

    Half of it bounds the log-ratio of the probabilities of any one integer under the two distributions
    (Kairouz, Liu and Steinke 2021, Corollary 12, for std >= 1/2). Rounded up, so that it is zero only for a
    single summand.
    """
    if count == 1:
        return 0.0
    rate = 2 * math.pi**2 * float(std) ** 2
    terms = (math.exp(-rate * k / (k + 1) * (2 - _UP)) for k in range(1, count))
    return math.nextafter(10 * math.fsum(terms) * _UP, math.inf)


class NoisySum(SecureSum):
    """Any exact secure sum, with a discrete Gaussian share in each worker's input.

    Nobody, the receivers included, learns more than the noisy total and what the inner sum itself shows to
    coalitions. The total is differentially private against up to `colluders` workers together with all
    participants without an input, as `noise` states for accountants. All workers are assumed to add the
    noise they should; one who omits it counts as a colluder. The `PlainTreeSum` is refused: its partial sums
    carry only few shares.

    A retry (a further attempt of a round) carries the same share, so it is the same release; its value must
    be the same, too. Shares are kept until `retire`. If parties drop out and the inner sum goes on without
    them, their noise is missing: count them in `colluders`. Two totals of one round over different survivors
    differ by the dropped parties' noisy values alone: never open a second one.

    Args:
        inner: `TwoTreeSum`, `PairwiseMaskSum` or `BFVSum`.
        sigma: Standard deviation against the colluders, in the units of the values.
        colluders: How many workers may pool their knowledge; at least 1 if a worker receives the total.
    """

    def __init__(self, inner: SecureSum, *, sigma: float | Fraction, colluders: int = 1) -> None:
        super().__init__(workers=inner.workers, fixed_point=inner.fixed_point)
        if isinstance(inner, PlainTreeSum) or inner.max_total is None:
            raise InputError(
                f"{type(inner).__name__} cannot carry distributed noise;"
                " use TwoTreeSum, PairwiseMaskSum or BFVSum"
            )
        if colluders < 1 and any(address >= 0 for address in inner.receivers):
            raise InputError(
                "a worker that receives the total knows its own share; colluders must be at least 1"
            )
        self.inner = inner
        self.messages: tuple[type[Message], ...] = inner.messages  # type: ignore[misc]
        self.noise = DistributedNoise(
            parties=inner.workers, colluders=colluders, sigma=sigma, fixed_point=inner.fixed_point
        )
        self.max_integer = inner.max_total // inner.workers - TAIL * self.noise.share_std
        if self.max_integer < 1:
            raise InputError(
                f"noise of std {self.noise.total_sigma:.3g} leaves no room for values;"
                " use fewer fraction bits"
            )

    @property
    def max_total(self) -> int | None:
        """That of the inner sum."""
        return self.inner.max_total

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Those of the inner sum."""
        return self.inner.addresses

    @property
    def receivers(self) -> tuple[Address, ...]:
        """Those of the inner sum."""
        return self.inner.receivers

    def node(self, address: Address, inner: Node | None = None) -> NoisyNode:
        """Fresh secret state with a noise stream keyed by the operating system.

        Args:
            address: Of the participant.
            inner: Its node of the inner sum, where that was made with arguments of its own, such as an
                authenticator.

        Raises:
            ProtocolError: The inner node is another participant's, or of another sum.
        """
        if inner is not None and (inner.address != address or inner.protocol is not self.inner):
            raise ProtocolError(f"the inner node is not that of {name_of(address)} in the inner sum")
        return NoisyNode(self, address, inner or self.inner.node(address))

    def encode(self, value: npt.ArrayLike) -> Ring:
        """One worker's ring elements without noise; refuses what would leave no room for the noise."""
        ring = self.inner.encode(value)
        signed = ring.view(np.int32 if self.fixed_point.bits == 32 else np.int64)
        if signed.size and not -self.max_integer <= signed.min() <= signed.max() <= self.max_integer:
            limit = self.max_integer * self.fixed_point.resolution
            raise EncodingError(f"with this noise, values must stay within {limit:.6g}; clip them")
        return ring


class NoisyNode(Node):
    """Adds this worker's share and hands the result to the inner sum's node."""

    protocol: NoisySum

    def __init__(self, protocol: NoisySum, address: Address, inner: Node) -> None:
        super().__init__(protocol, address)
        self._inner = inner
        self._stream = KeyStream.from_os_entropy()
        self._shares: dict[int, tuple[bytes, Ring]] = {}

    def setup(self) -> Machine | None:
        """The inner sum's setup."""
        return self._inner.setup()

    @property
    def present(self) -> frozenset[Address]:
        """Those of the inner sum."""
        return self._inner.present

    def retire(self, before: int) -> None:
        """Forgets rounds below `before`, their shares included."""
        super().retire(before)
        self._inner.retire(before)
        self._shares = {number: kept for number, kept in self._shares.items() if number >= before}

    def _round(self, encoded: Ring | None, shape: Shape, **where: int) -> Machine:
        if encoded is None:
            return self._inner.round(None, shape=shape, **where)
        digest, share = self._share(encoded, where["round"])
        encoded += share
        machine = self._inner.round(encoded, shape=encoded.shape, **where)
        self._shares[where["round"]] = digest, share
        return machine

    def _share(self, encoded: Ring, number: int) -> tuple[bytes, Ring]:
        digest = hashlib.sha256(repr(encoded.shape).encode() + encoded.tobytes()).digest()
        # Fresh noise on a retry would let the receiver average it out.
        if number not in self._shares:
            return digest, self.protocol.noise.share(encoded.size, self._stream).reshape(encoded.shape)
        if self._shares[number][0] != digest:
            raise ProtocolError(
                f"round {number} is retried with another value; its noise would show the difference"
            )
        return self._shares[number]
