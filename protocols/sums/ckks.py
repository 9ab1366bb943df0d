"""Approximate homomorphic sum with the CKKS scheme."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, InputError, ProtocolError
from securevfl.protocols.contract import AGGREGATOR, KEY_HOLDER, Address
from securevfl.protocols.discrete_gaussian import MAX_STD, DiscreteGaussian
from securevfl.protocols.ring import Ring
from securevfl.protocols.stream import KeyStream
from securevfl.protocols.sums.encryption import Parameters
from securevfl.protocols.sums.homomorphic import HomomorphicNode, HomomorphicSum

DEGREE = 8192
RANGE_BITS = 58  # the total times the scale stays a factor two below half the 60-bit data prime
SCALE_BITS = range(30, 51)
MAX_WORKERS = 1 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flooding:
    """How far noise hides the decryption error when a CKKS total is shown to others than the key holder.

    Decrypted CKKS numbers carry an error that depends on the secret key; enough of them give the key away.
    The key holder adds discrete Gaussian noise with std >= B sqrt(values * decryptions) 2^bits / sqrt(2 pi),
    B being the error bound. All opened totals together then differ from totals of an exact scheme by a total
    variation of at most 2^-bits. `CKKSSum.flooding_std` tells the noise; it is large, and BFV needs none.

    Args:
        bits: Statistical security; 40 is customary.
        decryptions: How many totals may be opened under one key. Further rounds are refused.
        values: The largest number of values in a total.
    """

    bits: int
    decryptions: int
    values: int

    def __post_init__(self) -> None:
        for name in ("bits", "decryptions", "values"):
            if getattr(self, name) < 1:
                raise InputError(f"flooding needs {name} >= 1, not {getattr(self, name)}")


class CKKSSum(HomomorphicSum):
    """A sum under CKKS encryption: approximate, for a key holder that keeps the total to itself.

    Roles, threat model, collusion and dropout are those of `BFVSum`. The total carries an error of about
    1e-9 sqrt(workers) at the default scale (`error_bound`), and that error depends on the secret key (Li and
    Micciancio 2021). The total is therefore kept by the key holder; opening it to the workers is refused
    unless `flooding` is given, which adds the noise that `Flooding` describes. A key holder that publishes
    `result()`, or what it computes from it, by other means takes the same risk, unless `grid_bits` is given:
    inputs are then rounded to a grid that is coarser than the error, and so is the total. It is exact, a
    function of the inputs alone, and tells nothing about the key.

    Args:
        workers: Number of inputs, 2 to 1024.
        key_holder: The address that makes the key pair: `KEY_HOLDER` (no input) or a worker.
        aggregator: The address that adds: `AGGREGATOR` (no input) or a worker other than the key holder.
        announce: Whether the key holder sends the flooded total to all workers; needs `flooding`.
        flooding: The noise that makes announced totals safe for the key.
        scale_bits: Binary digits after the point, 30 to 50. Values need workers * |v| < 2^(58 - scale_bits).
        grid_bits: Binary digits that inputs and totals are rounded to; None rounds neither.
    """

    def __init__(
        self,
        *,
        workers: int,
        key_holder: Address = KEY_HOLDER,
        aggregator: Address = AGGREGATOR,
        announce: bool = False,
        flooding: Flooding | None = None,
        scale_bits: int = 40,
        grid_bits: int | None = None,
    ) -> None:
        if workers > MAX_WORKERS:
            raise InputError(f"CKKS sums allow at most {MAX_WORKERS} workers, not {workers}")
        if scale_bits not in SCALE_BITS:
            raise InputError(f"a scale of {scale_bits} bits is not offered; use 30 to 50")
        if announce and flooding is None:
            raise InputError(
                "a CKKS total shown to others endangers the secret key;"
                " pass flooding=Flooding(...) or use BFVSum"
            )
        parameters = Parameters(degree=DEGREE, coefficient_bits=(60, 60), scale_bits=scale_bits)
        super().__init__(
            workers=workers,
            parameters=parameters,
            key_holder=key_holder,
            aggregator=aggregator,
            announce=announce,
        )
        self.flooding = flooding
        self.grid_bits = grid_bits
        if grid_bits is not None and self.error_bound * 2.0**grid_bits >= 0.5:
            raise InputError(
                f"a grid of {grid_bits} bits is finer than the error of {workers} workers"
                f" ({self.error_bound:.3g}); use fewer bits or BFVSum"
            )
        if announce and self._flooding_integer_std > MAX_STD:
            raise InputError(
                f"flooding needs noise of std {self.flooding_std:.3g}, more than announced integers hold;"
                " ask for fewer bits or decryptions, or use BFVSum, which is exact"
            )

    @property
    def max_total(self) -> None:
        """CKKS totals are approximate."""
        return

    @property
    def max_abs(self) -> float:
        """Magnitudes below this are accepted."""
        return 2.0 ** (RANGE_BITS - self.parameters.scale_bits) / self.workers

    @property
    def error_bound(self) -> float:
        """A bound on the error of each number of a decrypted total.

        A fresh ciphertext's noise polynomial has coefficients of variance (1 + 2N/3) / 12 (rounding when the
        special prime is divided out, times the ternary secret) and 1/12 from encoding; a slot adds N of them.
        Ten standard deviations of the workers' sum, plus 2^-46 of the largest total for SEAL's float64
        transform, which was measured at less than a quarter of that.
        """
        slot_std = math.sqrt(DEGREE * self.workers * ((1 + 2 * DEGREE / 3) / 12 + 1 / 12))
        return (10 * slot_std + 2.0 ** (RANGE_BITS - 46)) / self.parameters.scale

    @property
    def flooding_std(self) -> float:
        """Standard deviation of the noise on announced totals; 0 without flooding."""
        return self._flooding_integer_std / self.parameters.scale

    @property
    def _flooding_integer_std(self) -> int:
        if self.flooding is None:
            return 0
        # Rounding to the announced integers moves two neighbouring totals apart by at most one more unit.
        bound = self.error_bound * self.parameters.scale + 1
        spread = math.sqrt(self.flooding.values * self.flooding.decryptions)
        return math.ceil(bound * spread * 2.0**self.flooding.bits / math.sqrt(2 * math.pi))

    def encode(self, value: npt.ArrayLike) -> Ring:
        """One worker's floats, checked; CKKS has no ring elements to pass."""
        array = np.asarray(value)
        if array.dtype.kind not in "fib":
            raise EncodingError(f"values of type {array.dtype} cannot be encoded; CKKS takes floats")
        floats = array.astype(np.float64)
        if not np.all(np.abs(floats) < self.max_abs):  # false for NaN too
            raise EncodingError(
                f"a CKKS sum of {self.workers} workers at scale 2^{self.parameters.scale_bits} needs finite"
                f" |value| < {self.max_abs:.6g}; clip the values, lower the scale or use BFVSum"
            )
        return self._on_grid(floats)

    def _on_grid(self, floats: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        if self.grid_bits is None:
            return floats
        return np.asarray(np.rint(floats * 2.0**self.grid_bits) / 2.0**self.grid_bits)

    def open_total(self, numbers: npt.NDArray[Any], node: HomomorphicNode) -> npt.NDArray[np.int64]:
        """The total on an integer grid plus flooding noise, drawn from a fresh cryptographic stream."""
        noise = DiscreteGaussian(self._flooding_integer_std)
        integers = np.rint(numbers * self.parameters.scale).astype(np.int64)
        return integers + noise.sample(integers.size, KeyStream.from_os_entropy()).reshape(integers.shape)

    def decode_total(self, total: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The floats of an announced total."""
        return np.asarray(total / self.parameters.scale, dtype=np.float64)

    def keep_total(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The decrypted total: as it is, for the key holder alone, or exact on the grid."""
        return self._on_grid(np.asarray(numbers, dtype=np.float64))

    def check_size(self, size: int) -> None:
        """Flooding is computed for a number of values; larger totals are refused."""
        if self.announce and self.flooding is not None and size > self.flooding.values:
            raise ProtocolError(f"flooding was set for {self.flooding.values} values, the total has {size}")

    def claim_opening(self, node: HomomorphicNode) -> None:
        """Flooding is computed for a number of decryptions; further ones are refused."""
        if self.announce and self.flooding is not None and node.openings >= self.flooding.decryptions:
            raise ProtocolError(
                f"the key has opened {node.openings} totals, as many as its flooding allows; set up a new key"
            )
