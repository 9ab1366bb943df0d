"""Who an organisation is on the network: its name, its key and the certificate that binds the two.

A certificate names its organisation twice, as the common name and as the URI ``securevfl:NAME``. Both must
say the same; nothing else in a certificate, and nothing in a message, ever names a peer. Whoever dials checks
that the other side is ``NAME.securevfl``, whatever host or port it was reached at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from securevfl.errors import CertificateError
from securevfl.network.identity.pem import (
    MALFORMED,
    Certified,
    fingerprint,
    parse_certificate,
    parse_key,
    read_file,
    read_key_file,
)

SCHEME = "securevfl:"
DOMAIN = "securevfl"
CA_FILE = "ca.pem"

# A DNS label in lower case, so that names that look alike cannot differ.
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What an organisation shows to its peers, and what it checks them against.

    Attributes:
        name: The organisation.
        key_pem: Its private key.
        certificate_pem: Its certificate.
        ca_pem: The certificate of the consortium's authority.
        expires: When its certificate ends.
    """

    name: str
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)
    expires: datetime


def now() -> datetime:
    """The time that certificates are checked against."""
    return datetime.now(UTC)


def check_name(name: str) -> str:
    """The name, if an organisation may have it.

    Raises:
        CertificateError: It may not.
    """
    if not _NAME.fullmatch(name) or f"{name}.pem" == CA_FILE:
        raise CertificateError(
            f"{name!r} cannot be an organisation's name; "
            "use up to 63 small letters, digits and inner hyphens, such as 'north-bank', but not 'ca'"
        )
    return name


def server_name(name: str) -> str:
    """The TLS server name under which an organisation is dialled."""
    return f"{check_name(name)}.{DOMAIN}"


def common_name(name: x509.Name) -> str:
    """The common name, which must be there once.

    Raises:
        CertificateError: It is not.
    """
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(found) != 1:
        raise CertificateError(f"the subject has {len(found)} common names, expected 1")
    return str(found[0].value)


def alternative_names(certified: Certified) -> list[x509.GeneralName]:
    """The subject's alternative names, none if the extension is absent."""
    try:
        return list(certified.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def organisation_of(certificate: bytes | x509.Certificate) -> str:
    """The organisation that a certificate names. Whether to trust the certificate is for TLS to decide.

    Args:
        certificate: In PEM or DER form, or parsed.

    Raises:
        CertificateError: It is no certificate, or it does not name exactly one organisation.
    """
    parsed = certificate if isinstance(certificate, x509.Certificate) else parse_certificate(certificate)
    try:
        name = common_name(parsed.subject)
        uris = [each.value for each in alternative_names(parsed) if _is_uri(each)]
    except MALFORMED as error:
        raise CertificateError(f"the certificate is malformed: {error}") from error
    if uris != [SCHEME + name]:
        raise CertificateError(
            f"the certificate of {name!r} has the URIs {uris}, expected only {SCHEME + name!r}; "
            "issue it with 'securevfl certificates'"
        )
    return check_name(name)


def _is_uri(name: x509.GeneralName) -> bool:
    return isinstance(name, x509.UniformResourceIdentifier)


def load_identity(folder: Path) -> Identity:
    """Reads an organisation's folder: ``NAME.key``, ``NAME.pem`` and ``ca.pem``.

    Raises:
        CertificateError: As `load_identity_files`, or the folder does not hold exactly one key.
    """
    keys = sorted(Path(folder).glob("*.key"))
    if len(keys) != 1:
        found = ", ".join(path.name for path in keys) or "none"
        raise CertificateError(f"{folder} must hold one organisation's key, NAME.key; found {found}")
    return load_identity_files(
        key=keys[0], certificate=keys[0].with_suffix(".pem"), ca=Path(folder) / CA_FILE
    )


def load_identity_files(*, key: Path, certificate: Path, ca: Path) -> Identity:
    """Reads and checks an organisation's key and certificates.

    Raises:
        CertificateError: A file is missing or malformed, others may read the key, the key belongs to another
            certificate, the certificate comes from another authority, or it is not valid now.
    """
    key_pem, certificate_pem, ca_pem = read_key_file(key), read_file(certificate), read_file(ca)
    own, root = parse_certificate(certificate_pem, str(certificate)), parse_certificate(ca_pem, str(ca))
    name = organisation_of(own)
    check_tls_key(own, str(certificate))
    if parse_key(key_pem, str(key)).public_key() != own.public_key():
        raise CertificateError(f"{key} is not the key of {certificate}")
    check_root(root, str(ca))
    check_issuer(own, root, str(certificate))
    check_validity(own, f"the certificate of {name}")
    return Identity(
        name=name,
        key_pem=key_pem,
        certificate_pem=certificate_pem,
        ca_pem=ca_pem,
        expires=own.not_valid_after_utc,
    )


def check_tls_key(certified: Certified, label: str) -> ec.EllipticCurvePublicKey:
    """The public key, if gRPC can use it: its TLS takes no Ed25519 key in a handshake."""
    key = certified.public_key()
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise CertificateError(
        f"{label} is for a key that is not P-256; gRPC's TLS takes Ed25519 only for the authority's signature"
    )


def check_issuer(certificate: x509.Certificate, root: x509.Certificate, label: str) -> None:
    """Raises `CertificateError` unless the root's key signed the certificate."""
    try:
        certificate.verify_directly_issued_by(root)
    except (InvalidSignature, *MALFORMED) as error:
        raise CertificateError(
            f"{label} was not issued by the authority {root.subject.rfc4514_string()!r} "
            f"(key {fingerprint(root)[:16]})"
        ) from error


def check_root(root: x509.Certificate, label: str) -> None:
    """Raises `CertificateError` unless a certificate is a valid authority's, signed by itself."""
    try:
        constraints = root.extensions.get_extension_for_class(x509.BasicConstraints).value
        is_authority = constraints.ca
    except (x509.ExtensionNotFound, *MALFORMED):
        is_authority = False
    if not is_authority:
        raise CertificateError(f"{label} is not the certificate of an authority")
    check_issuer(root, root, label)
    check_validity(root, f"the authority's certificate {label}")


def check_validity(certificate: x509.Certificate, label: str) -> None:
    """Raises `CertificateError` if a certificate has ended or not begun."""
    time, begin, end = now(), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if time > end:
        raise CertificateError(f"{label} expired {_days((time - end).days)} ago, on {end:%Y-%m-%d}; renew it")
    if time < begin:
        raise CertificateError(
            f"{label} is valid only from {begin:%Y-%m-%d %H:%M} UTC; it is {time:%Y-%m-%d %H:%M} UTC here: "
            "check this machine's clock"
        )


def _days(count: int) -> str:
    return "less than a day" if count == 0 else f"{count} day{'s' if count > 1 else ''}"
