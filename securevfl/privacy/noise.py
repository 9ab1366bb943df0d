"""Noise from a cryptographic stream.

Every noise value of the toolkit, on any device, is drawn here on the CPU from AES-128-CTR keyed by the
operating system's entropy. The key is kept nowhere else and never stored: whoever knows the noise of a run
can subtract it, so its seed is a secret like the data.

Limits. Gaussians are float64 Box-Muller values: the tail ends at 8.57 standard deviations (probability
1e-17) and the float grid is not the real line. The gate therefore snaps what it releases to a lattice of
2^-20 standard deviations, far above the float64 grid, so that low-order bits carry nothing about the value
below the noise. Secure sums use exact discrete Gaussians instead.
"""

from __future__ import annotations

import math
import os

import numpy as np
import numpy.typing as npt

from securevfl.errors import PlanError
from securevfl.protocols.stream import KeyStream, derive_key

Floats = npt.NDArray[np.float64]

_UNIT = 2.0**-53


class Noise:
    """A source of uniform and Gaussian noise.

    Attributes:
        secure: False where the values can be reproduced from a known seed; every guarantee is void then.
    """

    def __init__(self) -> None:
        self._stream = KeyStream.from_os_entropy()
        self._process = os.getpid()
        self.secure = True

    @classmethod
    def insecure(cls, seed: int, purpose: str) -> Noise:
        """Reproducible noise for debugging. It protects nobody."""
        if seed < 0:
            raise PlanError(f"seed {seed} is negative; use 0 or more")
        noise = cls()
        secret = seed.to_bytes(16, "little")
        noise._stream = KeyStream(derive_key(secret, purpose=f"insecure-noise/{purpose}"))
        noise.secure = False
        return noise

    def __getstate__(self) -> dict[str, bool]:
        """A copy or a pickle never holds the key: it would repeat the noise."""
        return {"secure": self.secure}

    def __setstate__(self, state: dict[str, bool]) -> None:
        self.__init__()  # type: ignore[misc]
        self.secure = state["secure"]

    def _unit(self, count: int) -> Floats:
        """Uniform values in (0, 1], on a grid of 2^-53, never zero."""
        words = self.stream.words(count, np.uint64)
        return ((words >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * _UNIT

    def uniform(self, shape: tuple[int, ...], half_width: float) -> Floats:
        """Uniform values on [-half_width, half_width]."""
        return ((self._unit(math.prod(shape)) * 2.0 - 1.0) * half_width).reshape(shape)

    def gaussian(self, shape: tuple[int, ...], std: float) -> Floats:
        """Independent Gaussian values with mean 0."""
        count = math.prod(shape)
        pairs = (count + 1) // 2
        unit = self._unit(2 * pairs)
        radius = np.sqrt(-2.0 * np.log(unit[:pairs])) * std
        angle = unit[pairs:] * (2.0 * np.pi)
        values = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return values[:count].reshape(shape)

    def perturb(self, values: npt.ArrayLike, std: float) -> Floats:
        """The values with Gaussian noise, on the lattice: the one way in which noisy values are made.

        They are added in float64 and rounded to multiples of a power of two, so that low-order bits tell
        nothing about the value below the noise. Conversion to float32 keeps them on the lattice, because what
        does not fit its 24 bits is rounded to a coarser power of two.
        """
        exact, step = np.asarray(values, np.float64), lattice(std)
        return np.rint((exact + self.gaussian(exact.shape, std)) / step) * step

    @property
    def stream(self) -> KeyStream:
        """The stream itself, for the discrete noise of secure sums.

        A forked process has a copy of the key and would repeat another's noise, so it takes a new one.
        """
        if self.secure and self._process != os.getpid():
            self._stream, self._process = KeyStream.from_os_entropy(), os.getpid()
        return self._stream


def lattice(std: float) -> float:
    """The step of the lattice: 2^-20 standard deviations, or the next lower power of two."""
    return float(2.0 ** (math.floor(math.log2(std)) - 20))


def snap(values: Floats, std: float) -> Floats:
    """Rounds to the lattice of some noise."""
    step = lattice(std)
    return np.rint(values / step) * step
