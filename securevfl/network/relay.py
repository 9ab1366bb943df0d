"""End-to-end encryption of what two organisations send each other through the coordinator.

Organisations that cannot reach each other hand their messages to the coordinator, which must not be able to
read, change, reorder or replay them. Each process introduces itself with a fresh X25519 key, signed with the
key of its certificate; two introductions give one AES-256-GCM key per direction. The coordinator passes the
introductions on, but cannot sign one.

Promised against a coordinator that does what it likes: it learns who sends how many bytes to whom and when,
and can stop the traffic. Not promised: secrecy of past traffic if both processes' memories are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from securevfl.errors import CertificateError, ProtocolError
from securevfl.network.identity import (
    Identity,
    check_issuer,
    check_not_revoked,
    check_validity,
    organisation_of,
    parse_certificate,
)
from securevfl.network.signing import sign, verify
from securevfl.protocols.wire import Value, pack
from securevfl.settings.codec import is_address

_PURPOSE = "securevfl introduction 1"


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """How an organisation's process makes itself known to the others.

    Attributes:
        name: The organisation.
        incarnation: Its process.
        public_key: The process's X25519 key.
        certificate: The organisation's certificate.
        signature: By the certificate's key, over all of the above and the run.
        address: Where others can dial it; empty if they cannot.
    """

    name: str
    incarnation: bytes
    public_key: bytes
    certificate: bytes
    signature: bytes
    address: str = ""

    def signed(self, run: str) -> bytes:
        """What the signature covers."""
        return pack(
            _PURPOSE,
            {
                "run": run,
                "name": self.name,
                "incarnation": self.incarnation,
                "key": self.public_key,
                "address": self.address,
            },
        )

    def fields(self) -> dict[str, Value]:
        """As fields of a message."""
        return dict(vars(self))

    def check(self, run: str, identity: Identity) -> None:
        """Checks certificate and signature.

        Args:
            run: Name of the run.
            identity: Who checks: its authority, and what that has revoked.

        Raises:
            CertificateError: The certificate is not of this name and authority, is revoked, or did not sign
                this; or its address is more than a host and a port.
        """
        certificate = parse_certificate(self.certificate, f"the certificate of {self.name}")
        if organisation_of(certificate) != self.name:
            raise CertificateError(f"an introduction of {self.name} with another's certificate")
        if self.address and not is_address(self.address):
            raise CertificateError(f"{self.name} introduces itself with an address that is not host:port")
        check_issuer(certificate, parse_certificate(identity.ca_pem), f"the certificate of {self.name}")
        check_not_revoked(certificate, identity.revoked)
        check_validity(certificate, f"the certificate of {self.name}")
        try:
            verify(self.certificate, self.name, self.signed(run), self.signature)
        except InvalidSignature as error:
            raise CertificateError(f"the introduction of {self.name} is not signed by it") from error


def read_introduction(fields: dict[str, Value]) -> Introduction:
    """Reads an introduction from a message's fields.

    Raises:
        ProtocolError: Something is missing.
    """
    texts = {key: fields.get(key) for key in ("name", "address")}
    raws = {key: fields.get(key) for key in ("incarnation", "public_key", "certificate", "signature")}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ProtocolError("an introduction without a name")
    if not all(isinstance(raw, bytes) for raw in raws.values()):
        raise ProtocolError("an introduction without key, certificate or signature")
    return Introduction(**texts, **raws)  # type: ignore[arg-type]


class Introducer:
    """This process's own introduction, and the secret behind it."""

    def __init__(self, identity: Identity, *, run: str, incarnation: bytes, address: str = "") -> None:
        self.identity, self.run = identity, run
        self._secret = X25519PrivateKey.generate()
        self._met: set[tuple[bytes, bytes]] = set()
        unsigned = Introduction(
            name=identity.name,
            incarnation=incarnation,
            public_key=self._secret.public_key().public_bytes_raw(),
            certificate=identity.certificate_pem,
            signature=b"",
            address=address,
        )
        signature = sign(identity, unsigned.signed(run))
        self.introduction = Introduction(**{**vars(unsigned), "signature": signature})

    def meet(self, other: Introduction, via: bytes = b"") -> PairCipher:
        """The cipher with another process; its introduction is checked first.

        Args:
            other: Who it is.
            via: The coordinator's process. What one of them had not passed on is lost with it, and the next
                message would not be the one that is expected; so each has ciphers of its own.

        Raises:
            CertificateError: The introduction was not signed by the one it names.
            ProtocolError: Its key is unusable, or was met before: a second cipher with the same keys would
                count from the beginning and use every nonce twice.
        """
        other.check(self.run, self.identity)
        if (other.public_key, via) in self._met:
            raise ProtocolError(f"an introduction of {other.name} comes back; a process is met once")
        try:
            shared = self._secret.exchange(X25519PublicKey.from_public_bytes(other.public_key))
        except ValueError as error:
            raise ProtocolError(f"{other.name} introduces itself with an unusable key") from error
        self._met.add((other.public_key, via))
        me, them = self.introduction, other
        own, theirs = (_key(shared, self.run, via, *pair) for pair in ((me, them), (them, me)))
        return PairCipher(own=own, other=theirs, peer=other.name, via=via)


def _key(shared: bytes, run: str, via: bytes, sender: Introduction, receiver: Introduction) -> bytes:
    info = pack(
        "securevfl relay 1",
        {
            "run": run,
            "via": via,
            "from": sender.name,
            "to": receiver.name,
            "from_process": sender.incarnation,
            "to_process": receiver.incarnation,
            "from_key": sender.public_key,
            "to_key": receiver.public_key,
        },
    )
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(shared)


class PairCipher:
    """Seals what goes to one other process and opens what comes from it, in order and once."""

    def __init__(self, *, own: bytes, other: bytes, peer: str, via: bytes) -> None:
        self.peer, self.via = peer, via
        self._seal, self._open = AESGCM(own), AESGCM(other)
        self._sealed = self._opened = 0

    def seal(self, plain: bytes, agreement: str = "") -> bytes:
        """The next message, sealed; its number is the nonce, so no nonce comes twice."""
        self._sealed += 1
        return self._seal.encrypt(self._sealed.to_bytes(12, "big"), plain, agreement.encode())

    def open(self, sealed: bytes, agreement: str = "") -> bytes:
        """The next message of the other side, which has signed the same agreement.

        Raises:
            ProtocolError: It was changed, is not the next one, or comes from somebody else.
        """
        try:
            plain = self._open.decrypt((self._opened + 1).to_bytes(12, "big"), sealed, agreement.encode())
        except InvalidTag as error:
            raise ProtocolError(
                f"a relayed message of {self.peer} was changed, repeated or left out on its way"
            ) from error
        self._opened += 1
        return plain
