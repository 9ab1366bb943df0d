"""BFV ciphertexts for correlations that two members make: what one encrypts, the other multiplies and closes.

Ring degree 8192, coefficient primes of 60, 60, 60 bits and one of 38 for keys (218 bits: 128-bit security by
the homomorphic encryption standard), plaintexts modulo t. `close` is what makes an answer tell its receiver,
who holds the key, nothing but the plaintext: a fresh encryption of zero hides the multiplier in c1, noise
uniform on [-2^127, 2^127) hides it in c0, and the switch to one prime leaves 131 KB.

The library reads and writes files only: they are anonymous memory (`memfd_create`), never a path of a disk.
Flooding and packed coefficients are injected by writing its uncompressed format, which `Cipher` checks first.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from securevfl.errors import MissingExtra, ProtocolError
from securevfl.protocols.sealed.residues import T, Words
from securevfl.protocols.stream import KeyStream

DEGREE = 8192
ROWS = 512
"""Records of one packed polynomial; it holds 16 columns of them."""
COLUMNS = DEGREE // ROWS
PRIME_BITS = (60, 60, 60, 38)
FLOOD_BITS = 128
ENCRYPTION = f"BFV n {DEGREE}, primes {' '.join(map(str, PRIME_BITS))}, t {T}, flooding {FLOOD_BITS}"
"""What members must agree on to read each other's ciphertexts, and to be safe from each other's answers."""
FORMAT = (0xA15E, 16, 4, 3)
"""Magic, header size and version that the library writes."""
_HEADER = "<HBBBBHQ"
MOST_BYTES = 1 << 20
"""Of one serialised object."""


def pack(pieces: Sequence[bytes]) -> bytes:
    """Several serialised objects as one."""
    return b"".join(struct.pack("<I", len(piece)) + piece for piece in pieces)


def unpack(data: bytes, count: int) -> list[bytes]:
    """What `pack` made.

    Raises:
        ProtocolError: They are not so many.
    """
    pieces, place = [], 0
    while place + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, place)
        pieces.append(data[place + 4 : place + 4 + size])
        place += 4 + size
        if size > MOST_BYTES or len(pieces) > count:
            break
    if place != len(data) or len(pieces) != count:
        raise ProtocolError(f"a message has other ciphertexts than the {count} that are expected")
    return pieces


def save(item: Any) -> bytes:
    """An object of the library as bytes, through anonymous memory."""
    memory = _memory()
    try:
        item.save(f"/proc/self/fd/{memory}")
        return os.pread(memory, os.fstat(memory).st_size, 0)
    finally:
        os.close(memory)


def load(item: Any, context: Any, data: bytes) -> Any:
    """The object that bytes stand for, checked against the parameters.

    Raises:
        ProtocolError: They stand for nothing.
    """
    memory = _memory()
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(memory, view) :]
        item.load(context, f"/proc/self/fd/{memory}")
    except (RuntimeError, ValueError, IndexError) as error:
        raise ProtocolError("a message carries no ciphertext of the agreed parameters") from error
    finally:
        os.close(memory)
    return item


def _memory() -> int:
    return os.memfd_create("securevfl", os.MFD_CLOEXEC)


def _header(size: int) -> bytes:
    magic, header, major, minor = FORMAT
    return struct.pack(_HEADER, magic, header, major, minor, 0, 0, header + size)


def _array(words: Words) -> bytes:
    content = np.ascontiguousarray(words, "<u8").tobytes()
    return _header(8 + len(content)) + struct.pack("<Q", words.size) + content


class Cipher:
    """The parameters, which everybody shares, and what needs no key.

    Raises:
        MissingExtra: The library is not installed, or the system has no anonymous memory.
        ProtocolError: The library writes another format than this module was made for.
    """

    def __init__(self) -> None:
        try:
            import tenseal.sealapi as seal
        except ImportError as error:
            raise MissingExtra("sealed training without a dealer needs tenseal; install it") from error
        if not hasattr(os, "memfd_create"):
            raise MissingExtra("sealed training of two members without a dealer needs Linux; name a dealer")
        self.seal = seal
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.BFV)
        parameters.set_poly_modulus_degree(DEGREE)
        primes = seal.CoeffModulus.Create(DEGREE, list(PRIME_BITS))
        parameters.set_coeff_modulus(primes)
        parameters.set_plain_modulus(seal.Modulus(T))
        self.context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        self.primes = [prime.value() for prime in primes][:-1]
        self.evaluator, self.encoder = seal.Evaluator(self.context), seal.BatchEncoder(self.context)
        self._level = self.context.first_parms_id()
        self._check_format()

    def _check_format(self) -> None:
        """Writes a plaintext and a ciphertext in the library's form and reads them back with it."""
        seal, found = self.seal, b""
        words = np.arange(DEGREE, dtype=np.uint64) * np.uint64(T // DEGREE)
        try:
            found = save(self.plain(words))[: struct.calcsize(_HEADER)]
            written = self.plain(words)
            kept = [written.data(i) for i in (0, 1, DEGREE - 1)]
            flood = self._flooding(KeyStream(bytes(16)))
            parts = flood.dyn_array().size(), flood.size(), flood.coeff_modulus_size()
        except (ProtocolError, RuntimeError, AttributeError, TypeError):
            kept, parts = [], (0, 0, 0)
        header = struct.unpack(_HEADER, found)[:4] if found else ()
        wanted = [int(words[i]) for i in (0, 1, DEGREE - 1)]
        if header != FORMAT or kept != wanted or parts != (2 * 3 * DEGREE, 2, 3):
            raise ProtocolError(
                f"tenseal writes ciphertexts in form {header or 'unknown'}, not {FORMAT}: install the "
                "version that constraints.txt names, or name a dealer"
            )
        if len(self.primes) != 3 or any(not 0 < (1 << 60) - p < 1 << 18 for p in self.primes):
            raise ProtocolError(f"{seal.__name__} chose other primes than this version was made for")

    # -- plaintexts -----------------------------------------------------------------------------------------

    def plain(self, coefficients: Words) -> Any:
        """A plaintext polynomial."""
        body = bytes(32) + struct.pack("<Qd", coefficients.size, 1.0) + _array(coefficients)
        return load(self.seal.Plaintext(), self.context, _header(len(body)) + body)

    def slots(self, words: Words) -> Any:
        """A plaintext with a word in each slot; what is missing is 0."""
        found = self.seal.Plaintext()
        self.encoder.encode(words.tolist(), found)
        return found

    def factor(self, plain: Any) -> Any:
        """A plaintext as ciphertexts are multiplied by it."""
        self.evaluator.transform_to_ntt_inplace(plain, self._level)
        return plain

    # -- ciphertexts ----------------------------------------------------------------------------------------

    def read(self, data: bytes) -> Any:
        """A ciphertext as it is multiplied."""
        found = load(self.seal.Ciphertext(), self.context, data)
        formed = found.size() == 2 and found.coeff_modulus_size() == 3 and not found.is_ntt_form()
        if not formed or found.is_transparent():
            raise ProtocolError("a message carries a ciphertext of another form")
        self.evaluator.transform_to_ntt_inplace(found)
        return found

    def combine(self, terms: Sequence[tuple[Any, Any]]) -> Any:
        """The sum of products of ciphertexts and factors."""
        total = self.seal.Ciphertext()
        self.evaluator.multiply_plain(*terms[0], total)
        each = self.seal.Ciphertext()
        for cipher, factor in terms[1:]:
            self.evaluator.multiply_plain(cipher, factor, each)
            self.evaluator.add_inplace(total, each)
        return total

    def close(self, answer: Any, mask: Any, receiver: Receiver, stream: KeyStream) -> bytes:
        """An answer that tells the holder of the key its masked plaintext and nothing else."""
        self.evaluator.transform_from_ntt_inplace(answer)
        self._refresh(answer, receiver)
        self.evaluator.add_inplace(answer, self._flooding(stream))
        self.evaluator.add_plain_inplace(answer, mask)
        self.evaluator.mod_switch_to_next_inplace(answer)
        self.evaluator.mod_switch_to_next_inplace(answer)
        return save(answer)

    def _refresh(self, answer: Any, receiver: Receiver) -> None:
        """Adds a fresh encryption of zero: without it c1 over the c1 that was sent is the multiplier."""
        zero = self.seal.Ciphertext()
        receiver.encryptor.encrypt_zero(zero)
        self.evaluator.add_inplace(answer, zero)

    def _flooding(self, stream: KeyStream) -> Any:
        """(uniform on [-2^127, 2^127), 0), coefficient by coefficient."""
        drawn = stream.words((3, DEGREE))
        low, middle = drawn[0] >> np.uint64(4), drawn[1] >> np.uint64(4)
        top = drawn[2] >> np.uint64(56)  # v = top 2^120 + middle 2^60 + low, 128 bits in all
        c0 = np.concatenate([flooding_residues(top, middle, low, prime) for prime in self.primes])
        words = np.concatenate([c0, np.zeros(3 * DEGREE, np.uint64)])
        body = struct.pack("<4Q", *self._level) + struct.pack("<BQQQdQ", 0, 2, DEGREE, 3, 1.0, 1)
        body += _array(words)
        return load(self.seal.Ciphertext(), self.context, _header(len(body)) + body)


def flooding_residues(top: Words, middle: Words, low: Words, prime: int) -> Words:
    """The number top 2^120 + middle 2^60 + low - 2^127 modulo a prime 2^60 - d with a small d."""
    small = (1 << 60) - prime
    d, mask = np.uint64(small), np.uint64((1 << 30) - 1)
    high = (middle >> np.uint64(30)) * d  # below 2^48
    total = (middle & mask) * d + ((high & mask) << np.uint64(30)) + (high >> np.uint64(30)) * d
    q = np.uint64(prime)
    total = total % q + (top * np.uint64(small * small)) % q + low % q + np.uint64(prime - pow(2, 127, prime))
    return np.asarray(total % q)


class Receiver:
    """Somebody else's public key.

    One that hides nothing is refused; that it was drawn as agreed on nobody can see.

    Raises:
        ProtocolError: It is none.
    """

    def __init__(self, cipher: Cipher, data: bytes) -> None:
        key = load(cipher.seal.PublicKey(), cipher.context, data)
        self.encryptor = cipher.seal.Encryptor(cipher.context, key)
        zero = cipher.seal.Ciphertext()
        self.encryptor.encrypt_zero(zero)
        if zero.is_transparent():
            raise ProtocolError("a message carries no key: what it encrypts is not hidden")


class Keys:
    """A member's own keys, which are never written anywhere; they end with the session."""

    def __init__(self, cipher: Cipher) -> None:
        seal = cipher.seal
        self._cipher = cipher
        generator = seal.KeyGenerator(cipher.context)
        public = seal.PublicKey()
        generator.create_public_key(public)
        self.public = save(public)
        secret = generator.secret_key()
        self._encryptor = seal.Encryptor(cipher.context, public)
        self._encryptor.set_secret_key(secret)
        self._decryptor = seal.Decryptor(cipher.context, secret)

    def encrypt(self, plain: Any) -> bytes:
        """A ciphertext whose second half is a seed."""
        return save(self._encryptor.encrypt_symmetric(plain))

    def decrypt(self, data: bytes) -> Any:
        """The plaintext of an answer."""
        answer = load(self._cipher.seal.Ciphertext(), self._cipher.context, data)
        if answer.size() != 2 or answer.coeff_modulus_size() != 1 or answer.is_ntt_form():
            raise ProtocolError("an answer is a ciphertext of another form")
        plain = self._cipher.seal.Plaintext()
        self._decryptor.decrypt(answer, plain)
        return plain

    def slots(self, data: bytes) -> Words:
        """The words in the slots of an answer."""
        plain = self.decrypt(data)
        return np.array(self._cipher.encoder.decode_uint64(plain), np.uint64)

    def coefficients(self, data: bytes, places: Sequence[int]) -> Words:
        """Some coefficients of an answer."""
        plain = self.decrypt(data)
        known = plain.coeff_count()
        return np.array([plain.data(i) if i < known else 0 for i in places], np.uint64)


@functools.cache
def shared_cipher() -> Cipher:
    """The parameters, made and checked once in a process."""
    return Cipher()
