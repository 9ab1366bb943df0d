"""Additively homomorphic encryption of number vectors, by TenSEAL (Microsoft SEAL).

This module knows nothing of roles: it makes keys, and turns vectors into ciphertexts that can be added. Bytes
from outside are treated as hostile. TenSEAL reads its own frames (protocol buffers) trustingly: one that
announces numbers but holds no ciphertext crashes the process, one with other encryption parameters makes it
compute huge tables, and one for a context may carry a secret key. So its frames are taken off before sending
and rebuilt on receipt: only SEAL's own objects, which SEAL validates, cross the wire, with bounded lengths,
and the level, form, scale and size of a ciphertext are checked.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from securevfl.errors import ProtocolError, needed

_BYTES_1, _BYTES_2 = b"\x0a", b"\x12"  # tags of the length-delimited fields 1 and 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorFrame:
    """Field 1: the sizes; field 2: the ciphertext; then, for CKKS, the scale."""

    slots: int
    tail: bytes

    @property
    def head(self) -> bytes:
        """All before the ciphertext's length."""
        return _BYTES_1 + _sized(_varint(self.slots)) + _BYTES_2

    def wrap(self, ciphertext: bytes) -> bytes:
        """The frame that TenSEAL reads."""
        return self.head + _sized(ciphertext) + self.tail

    def unwrap(self, framed: bytes) -> bytes:
        """The ciphertext in a frame that TenSEAL wrote."""
        size, start = _read_varint(framed, len(self.head))
        ciphertext = framed[start : start + size]
        if self.wrap(ciphertext) != framed:
            raise unknown_form()
        return ciphertext


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextFrame:
    """Field 1: the parameters; field 2: a message of the public key (field 1) and settings."""

    parameters: bytes
    settings: bytes

    @classmethod
    def split(cls, framed: bytes) -> tuple[ContextFrame, bytes]:
        """The frame and the public key of a context that TenSEAL wrote without other keys."""
        size, start = _read_varint(framed, 1)
        parameters = framed[start : start + size]
        _, inner = _read_varint(framed, start + size + 1)
        key_size, key_start = _read_varint(framed, inner + 1)
        key = framed[key_start : key_start + key_size]
        frame = cls(parameters=parameters, settings=framed[key_start + key_size :])
        if frame.wrap(key) != framed:
            raise unknown_form()
        return frame, key

    def wrap(self, key: bytes) -> bytes:
        """A public context with this key."""
        inner = _BYTES_1 + _sized(key) + self.settings
        return _BYTES_1 + _sized(self.parameters) + _BYTES_2 + _sized(inner)


def unknown_form() -> ProtocolError:
    """The installed TenSEAL writes something else than the versions this was made for."""
    return ProtocolError("this version of TenSEAL writes an unknown form; install tenseal 0.3.16 to 0.3.18")


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while position < len(data):
        byte = data[position]
        number |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            break
    return number, position


_OVERHEAD = 1024  # SEAL's headers and the compressor's framing around the coefficients

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """Parameters of a scheme; SEAL enforces 128 bits of security (log2 q <= 109 / 218 at 4096 / 8192).

    Args:
        degree: Degree of the polynomial ring.
        coefficient_bits: Sizes of the coefficient primes; the last is SEAL's special prime, without data.
        plain_modulus: BFV's plaintext prime, 1 modulo 2 * degree so that all slots can be used; 0 for CKKS.
        scale_bits: CKKS' binary scale; 0 for BFV.
    """

    degree: int
    coefficient_bits: tuple[int, ...]
    plain_modulus: int = 0
    scale_bits: int = 0

    @property
    def exact(self) -> bool:
        """BFV computes exactly modulo the plain modulus; CKKS approximates."""
        return self.plain_modulus > 0

    @property
    def slots(self) -> int:
        """Numbers per ciphertext."""
        return self.degree if self.exact else self.degree // 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numbers before encryption and after decryption."""
        return np.dtype(np.int64 if self.exact else np.float64)

    @property
    def scale(self) -> float:
        """The number by which CKKS multiplies before rounding; SEAL writes 1 for BFV."""
        return 2.0**self.scale_bits

    @property
    def max_key_bytes(self) -> int:
        """Upper limit of a public key: two polynomials, 8 bytes per coefficient and prime."""
        return 16 * self.degree * len(self.coefficient_bits) + _OVERHEAD

    @property
    def max_ciphertext_bytes(self) -> int:
        """Upper limit of one ciphertext: two polynomials, 8 bytes per coefficient and data prime."""
        return 16 * self.degree * (len(self.coefficient_bits) - 1) + _OVERHEAD

    def chunks(self, size: int) -> int:
        """How many ciphertexts hold `size` numbers."""
        return -(-size // self.slots)


class Encryption:
    """A TenSEAL context with one of three amounts of key: secret and public, public only, none of use.

    Build it by `generate`, `from_public_key` or `without_key`.
    """

    def __init__(self, parameters: Parameters, context: Any) -> None:
        self.parameters = parameters
        self._context = context

    @classmethod
    def generate(cls, parameters: Parameters) -> Encryption:
        """A fresh key pair. The secret key never leaves this object: no method writes it."""
        return cls(parameters, _new_context(parameters))

    @classmethod
    def without_key(cls, parameters: Parameters) -> Encryption:
        """What an aggregator needs to add ciphertexts: the parameters, and nobody's key."""
        encryption = cls.generate(parameters)
        encryption._context.make_context_public()
        return encryption

    @classmethod
    def from_public_key(cls, parameters: Parameters, key: bytes) -> Encryption:
        """Loads another party's public key.

        Raises:
            ProtocolError: The bytes are no public key of these parameters.
        """
        tenseal = needed("tenseal")

        if not 0 < len(key) <= parameters.max_key_bytes:
            raise ProtocolError(
                f"public key has {len(key)} bytes; 1 to {parameters.max_key_bytes} are expected"
            )
        framed = _context_frame(parameters).wrap(key)
        context = _guard("public key", lambda: tenseal.context_from(framed, n_threads=1))
        check_public(context)
        return cls(parameters, context)

    @property
    def is_private(self) -> bool:
        """Whether the secret key is here."""
        return bool(self._context.is_private())

    def public_key(self) -> bytes:
        """The public key in SEAL's form: no secret, relinearisation or Galois key goes with it."""
        framed = self._context.serialize(
            save_public_key=True, save_secret_key=False, save_galois_keys=False, save_relin_keys=False
        )
        return ContextFrame.split(framed)[1]

    def encrypt(self, numbers: npt.NDArray[Any]) -> list[bytes]:
        """Encrypts a flat array, the last ciphertext filled up with zeros."""
        slots = self.parameters.slots
        chunks = self.parameters.chunks(numbers.size)
        padded = np.zeros(chunks * slots, dtype=numbers.dtype)
        padded[: numbers.size] = numbers
        return [self.dump(self._vector(chunk.tolist())) for chunk in padded.reshape(chunks, slots)]

    def load(self, data: bytes) -> Any:
        """Loads one ciphertext from outside and checks that it is a fresh or summed one of these parameters.

        Raises:
            ProtocolError: It is not.
        """
        tenseal = needed("tenseal")

        limit = self.parameters.max_ciphertext_bytes
        if not 0 < len(data) <= limit:
            raise ProtocolError(f"ciphertext has {len(data)} bytes; 1 to {limit} are expected")
        framed = self._frame.wrap(data)
        build = tenseal.bfv_vector_from if self.parameters.exact else tenseal.ckks_vector_from
        vector = _guard("ciphertext", lambda: build(self._context, framed))
        parts = vector.ciphertext()
        if len(parts) != 1 or not self._is_plain_ciphertext(parts[0]):
            raise ProtocolError("ciphertext is not one that this sum's workers or aggregator produce")
        return vector

    def dump(self, vector: Any) -> bytes:
        """One ciphertext in SEAL's form."""
        return self._frame.unwrap(vector.serialize())

    def decrypt(self, vector: Any) -> npt.NDArray[Any]:
        """The numbers of one ciphertext.

        Raises:
            ProtocolError: The secret key is not here, or BFV's noise has grown past exact decryption.
        """
        if not self.is_private:
            raise ProtocolError("only the key holder can decrypt")
        if self.parameters.exact:
            budget = self._context.data.decryptor().invariant_noise_budget(vector.ciphertext()[0])
            if budget < 1:
                raise ProtocolError("ciphertext is too noisy to decrypt; it is no sum of fresh ciphertexts")
        return np.array(vector.decrypt(), dtype=self.parameters.dtype)

    def _vector(self, numbers: list[Any]) -> Any:
        tenseal = needed("tenseal")

        # The classes below tenseal's Python wrappers: those copy the list once more and cost a quarter.
        native = tenseal._ts_cpp
        if self.parameters.exact:
            return native.BFVVector(self._context.data, numbers)
        return native.CKKSVector(self._context.data, numbers, self.parameters.scale)

    @cached_property
    def _frame(self) -> VectorFrame:
        tail = b"" if self.parameters.exact else b"\x19" + struct.pack("<d", self.parameters.scale)
        return VectorFrame(slots=self.parameters.slots, tail=tail)

    @cached_property
    def _data_level(self) -> list[int]:
        # SEAL's hash over scheme, degree and all moduli but the special prime.
        level: list[int] = self._context.data.seal_context().first_parms_id()
        return level

    def _is_plain_ciphertext(self, ciphertext: Any) -> bool:
        return (
            ciphertext.size() == 2
            and ciphertext.parms_id() == self._data_level
            and ciphertext.is_ntt_form() != self.parameters.exact
            and ciphertext.scale == self.parameters.scale
            and not ciphertext.is_transparent()  # one that decrypts without the key
        )


def check_public(context: Any) -> None:
    """Raises `ProtocolError` unless a received context holds a public key and no other."""
    if context.is_private() or context.has_secret_key():
        raise ProtocolError("the received context holds a secret key; only its owner may have it")
    if not context.has_public_key() or context.has_relin_keys() or context.has_galois_keys():
        raise ProtocolError("the received context must hold a public key and no evaluation keys")


def _new_context(parameters: Parameters) -> Any:
    tenseal = needed("tenseal")

    scheme = tenseal.SCHEME_TYPE.BFV if parameters.exact else tenseal.SCHEME_TYPE.CKKS
    context = tenseal.context(
        scheme,
        parameters.degree,
        plain_modulus=parameters.plain_modulus,
        coeff_mod_bit_sizes=list(parameters.coefficient_bits),
        n_threads=1,
    )
    if not parameters.exact:
        context.global_scale = parameters.scale
    return context


@lru_cache(maxsize=8)
def _context_frame(parameters: Parameters) -> ContextFrame:
    # A throw-away key pair: only its parameters and settings are kept.
    framed = _new_context(parameters).serialize(True, False, False, False)
    return ContextFrame.split(framed)[0]


def _guard(what: str, build: Callable[[], _T]) -> _T:
    """SEAL reports bad input by several exception types; all mean the same to us."""
    try:
        return build()
    except (ValueError, RuntimeError, MemoryError, TypeError, IndexError) as error:
        raise ProtocolError(f"{what} cannot be read: {error}") from error
