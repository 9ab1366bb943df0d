"""Keys that two workers agree on: X25519, optionally with ML-KEM-768, then HKDF; and signatures on them."""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from securevfl.errors import MissingExtra, ProtocolError
from securevfl.protocols.contract import Address
from securevfl.protocols.stream import MaskStream, derive_key, round_nonce
from securevfl.protocols.wire import pack

SIGNATURE_BYTES = 64
"""Length of a signature: of Ed25519, and of ECDSA on P-256 with both numbers as 32 bytes."""


class Authenticator(ABC):
    """Signs for one worker with a long-term key that the others know, and checks what they signed.

    Whoever implements it binds every signature to the run and to whatever tells this key agreement from
    others, so that no signature is good for another one.
    """

    @abstractmethod
    def sign(self, statement: bytes) -> bytes:
        """This worker's signature, `SIGNATURE_BYTES` long."""

    @abstractmethod
    def verify(self, address: Address, statement: bytes, signature: bytes) -> None:
        """Checks that the worker at an address signed a statement.

        Raises:
            ProtocolError: It did not; says whose signature is wrong.
        """


def key_statement(address: Address, public: bytes) -> bytes:
    """What a worker signs when it offers public keys for masks."""
    return pack("securevfl mask keys 1", {"worker": address, "public": public})


X25519_BYTES = 32
KEM_PUBLIC_BYTES = 1184
KEM_CIPHERTEXT_BYTES = 1088
MARK_BYTES = 16


class PartyKeys:
    """One worker's fresh private keys.

    Args:
        hybrid: Also make an ML-KEM-768 key, so that recorded traffic stays closed to a quantum computer.
    """

    def __init__(self, *, hybrid: bool) -> None:
        self._x25519 = X25519PrivateKey.generate()
        self.public = self._x25519.public_key().public_bytes_raw()
        self._kem: Any = None
        if hybrid:
            self._kem = _generate_kem()
            self.public += self._kem.public_key().public_bytes_raw()

    def exchange(self, peer: bytes) -> bytes:
        """The X25519 secret shared with the owner of a public key."""
        try:
            return self._x25519.exchange(X25519PublicKey.from_public_bytes(peer[:X25519_BYTES]))
        except ValueError as error:
            raise ProtocolError("a worker's public key is not a usable X25519 key") from error

    def encapsulate(self, peer: bytes) -> tuple[bytes, bytes]:
        """A fresh secret for the owner of a hybrid public key, and the ciphertext that brings it there."""
        from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey

        try:
            secret, ciphertext = MLKEM768PublicKey.from_public_bytes(peer[X25519_BYTES:]).encapsulate()
        except ValueError as error:
            raise ProtocolError("a worker's public key is not a usable ML-KEM-768 key") from error
        return secret, ciphertext

    def decapsulate(self, ciphertext: bytes) -> bytes:
        """The secret inside a ciphertext; a forged ciphertext gives a secret that nobody shares."""
        if self._kem is None:
            raise ProtocolError("this key agreement is not hybrid")
        try:
            return bytes(self._kem.decapsulate(ciphertext))
        except ValueError as error:
            raise ProtocolError("an ML-KEM-768 ciphertext is malformed") from error


def _generate_kem() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey

        return MLKEM768PrivateKey.generate()
    except (ImportError, UnsupportedAlgorithm) as error:
        raise MissingExtra("hybrid keys need ML-KEM-768: install cryptography>=47") from error


class PairKeys:
    """What two workers share: streams for masks and round seeds, and a sealed channel in each direction.

    Args:
        secret: The X25519 secret, followed by the ML-KEM secret in hybrid mode.
        context: Both addresses and everything public that the agreement exchanged.
        own: This worker's address.
        peer: The other worker's address.
    """

    def __init__(self, secret: bytes, context: bytes, *, own: int, peer: int) -> None:
        bound = hashlib.sha256(context).digest()
        self._key = derive_key(secret, purpose="pairwise/pair", context=bound, length=32)
        self.adds = own < peer  # of a pair, the lower worker adds the mask and the higher one subtracts it
        self.fingerprint = bound.hex()

    @cached_property
    def masks(self) -> MaskStream:
        """The masks themselves, where nobody may drop out."""
        return MaskStream(derive_key(self._key, purpose="pairwise/mask"))

    @cached_property
    def seeds(self) -> MaskStream:
        """The seeds of each round's masks, where dropouts are recovered."""
        return MaskStream(derive_key(self._key, purpose="pairwise/round-seed"))

    # A key for each direction: both workers may seal in the same round and attempt, that is with one nonce.
    @cached_property
    def _send(self) -> AESGCM:
        return self._channel("up" if self.adds else "down")

    @cached_property
    def _receive(self) -> AESGCM:
        return self._channel("down" if self.adds else "up")

    def _channel(self, way: str) -> AESGCM:
        return AESGCM(derive_key(self._key, purpose=f"pairwise/channel/{way}"))

    def mark(self, statement: bytes) -> bytes:
        """Shows the peer, and nobody else, that this worker stands by a statement."""
        return self._mark("up" if self.adds else "down", statement)

    def check_mark(self, statement: bytes, mark: bytes) -> None:
        """Checks that the peer stands by a statement.

        Raises:
            ProtocolError: It does not, or stands by another.
        """
        if not hmac.compare_digest(mark, self._mark("down" if self.adds else "up", statement)):
            raise ProtocolError("a mark is on another statement")

    def _mark(self, way: str, statement: bytes) -> bytes:
        return hmac.digest(self._mark_keys[way], statement, "sha256")[:MARK_BYTES]

    @cached_property
    def _mark_keys(self) -> dict[str, bytes]:
        ways = ("up", "down")
        return {way: derive_key(self._key, purpose=f"pairwise/mark/{way}", length=32) for way in ways}

    def seal(self, plain: bytes, *, round: int, attempt: int) -> bytes:  # noqa: A002
        """Encrypts for the peer; once per (round, attempt), as the nonce is made of these."""
        return self._send.encrypt(round_nonce(round, attempt)[:12], plain, None)

    def open(self, sealed: bytes, *, round: int, attempt: int) -> bytes:  # noqa: A002
        """Decrypts what the peer sealed in this round and attempt.

        Raises:
            ProtocolError: It was changed on the way, or belongs elsewhere.
        """
        try:
            return self._receive.decrypt(round_nonce(round, attempt)[:12], sealed, None)
        except (InvalidTag, ValueError) as error:
            raise ProtocolError("a sealed share was changed on its way or is of another round") from error
