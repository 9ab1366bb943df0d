"""Exact homomorphic sum with the BFV scheme."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from securevfl.errors import EncodingError, InputError
from securevfl.protocols.contract import AGGREGATOR, KEY_HOLDER, Address
from securevfl.protocols.ring import FixedPoint, Ring
from securevfl.protocols.sums.encryption import Parameters
from securevfl.protocols.sums.homomorphic import HomomorphicNode, HomomorphicSum

PLAIN_MODULUS = 1099511480321  # the largest prime below 2^40 that is 1 modulo 8192
PARAMETERS = Parameters(degree=4096, coefficient_bits=(60, 49), plain_modulus=PLAIN_MODULUS)

# A fresh ciphertext's noise is about 15 per coefficient (the rounding when the special prime is divided out),
# below 2^7 except with probability 1e-16; exact decryption needs a total below q / (2 p) = 2^19.
MAX_WORKERS = 1 << 10


class BFVSum(HomomorphicSum):
    """A sum under BFV encryption: exact, the default homomorphic sum.

    Each worker encrypts its fixed-point integers under the key holder's public key and sends them to the
    aggregator, which adds the ciphertexts and sends one encrypted total to the key holder.

    Who learns what: the aggregator sees ciphertexts and, having no key, nothing else; the key holder learns
    the total; with `announce` the workers learn it too. Nobody learns a single worker's value, as far as the
    total and his own input do not tell it (with two workers they do).

    Collusion: any number of workers together with the aggregator learn no more than the total (and that only
    if it is announced or the key holder is among them). Key holder and aggregator together read every value:
    they must not collude, and cannot be the same participant. The channel between worker and aggregator has
    to be encrypted, or whoever taps it stands in for the aggregator.

    All participants are assumed to follow the protocol (semi-honest). BFV is malleable: a cheating aggregator
    can leave workers out, count one twice or shift the total, and the key holder then opens what it sends.
    The key holder also sees the ciphertext's noise, which is not flooded; it depends on the inputs through
    BFV's rounding by at most one unit per coefficient and worker, against a standard deviation of 15 each.
    Someone who already knows all inputs up to a few candidates can test them by it. Use `TwoTreeSum` or
    `PairwiseMaskSum` where that matters.

    Dropout: every worker, the aggregator and the key holder are needed; a missing one ends the round with
    `DropoutError`. A retry encrypts afresh and shows nothing new.

    Args:
        workers: Number of inputs, 2 to 1024.
        fixed_point: How floats become integers. A worker's integer n is accepted if workers * |n| < p / 2 for
            the plain modulus p, just below 2^40; anything larger is refused, never wrapped.
        key_holder: The address that makes the key pair: `KEY_HOLDER` (no input) or a worker.
        aggregator: The address that adds: `AGGREGATOR` (no input) or a worker other than the key holder.
        announce: Whether the key holder sends the total to all workers.
    """

    def __init__(
        self,
        *,
        workers: int,
        fixed_point: FixedPoint | None = None,
        key_holder: Address = KEY_HOLDER,
        aggregator: Address = AGGREGATOR,
        announce: bool = True,
    ) -> None:
        if workers > MAX_WORKERS:
            raise InputError(f"BFV noise allows at most {MAX_WORKERS} workers, not {workers}")
        super().__init__(
            workers=workers,
            parameters=PARAMETERS,
            key_holder=key_holder,
            aggregator=aggregator,
            announce=announce,
            fixed_point=fixed_point if fixed_point is not None else FixedPoint(bits=64, fraction_bits=20),
        )
        if self.fixed_point.bits != 64:
            raise InputError(f"BFV sums use 64-bit fixed point, not {self.fixed_point.bits} bits")

    @property
    def max_total(self) -> int:
        """Half the plain modulus: a total beyond it would wrap."""
        return (PLAIN_MODULUS - 1) // 2

    @property
    def max_integer(self) -> int:
        """The largest magnitude of one worker's encoded integers."""
        return self.max_total // self.workers

    def encode(self, value: npt.ArrayLike) -> Ring:
        """One worker's integers; refuses what could wrap the total at the plain modulus."""
        ring = super().encode(value)
        signed = ring.view(np.int64)
        if signed.size and (signed.max() > self.max_integer or signed.min() < -self.max_integer):
            # The value itself is not quoted: others are told why a worker stops.
            raise EncodingError(
                f"a value cannot be encoded: a BFV sum of {self.workers} workers with"
                f" {self.fixed_point.fraction_bits} fraction bits needs"
                f" |value| <= {self.max_integer * self.fixed_point.resolution:.6g};"
                " clip it or use fewer fraction bits"
            )
        return ring

    def open_total(self, numbers: npt.NDArray[Any], node: HomomorphicNode) -> npt.NDArray[np.int64]:
        """The exact total; it says nothing that the sum does not."""
        return np.asarray(numbers, dtype=np.int64)

    def decode_total(self, total: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The floats of the fixed-point total."""
        return self.fixed_point.decode(np.ascontiguousarray(total).view(np.uint64).reshape(total.shape))
