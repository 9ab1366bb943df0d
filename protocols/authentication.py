"""Signatures on what workers tell each other through somebody whom they need not trust."""

from __future__ import annotations

from abc import ABC, abstractmethod

from securevfl.protocols.contract import Address
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
