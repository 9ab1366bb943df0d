"""Who an organisation is on the network: its name, its key and the certificate that binds the two.

A certificate names its organisation twice, as the common name and as the URI ``securevfl:NAME``. Both must
say the same; nothing else in a certificate, and nothing in a message, ever names a peer. Whoever dials checks
that the other side is ``NAME.securevfl``, whatever host or port it was reached at.
"""

from __future__ import annotations

import getpass
import hashlib
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from securevfl.errors import CertificateError, readable

SCHEME = "securevfl:"
DOMAIN = "securevfl"
CA_FILE = "ca.pem"
REVOKED_FILE = "ca.crl"
PASSPHRASE = "SECUREVFL_PASSPHRASE"  # noqa: S105 - the name of an environment variable

log = logging.getLogger("securevfl.network")

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
        revoked: Serial numbers of certificates that the authority has revoked, by the list in the folder as
            it is when somebody is checked.
    """

    name: str
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)
    expires: datetime
    revoked: Container[int] = frozenset()


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
        names = alternative_names(parsed)
        uris = [each.value for each in names if _is_uri(each)]
        served = [str(each.value).lower().rstrip(".") for each in names if isinstance(each, x509.DNSName)]
    except MALFORMED as error:
        raise CertificateError(f"the certificate is malformed: {error}") from error
    if uris != [SCHEME + name]:
        raise CertificateError(
            f"the certificate of {name!r} has the URIs {uris}, expected only {SCHEME + name!r}; "
            "issue it with 'securevfl certificates'"
        )
    others = [each for each in served if each.endswith(f".{DOMAIN}") and each != server_name(name)]
    if others:
        raise CertificateError(
            f"the certificate of {readable(name)!r} also serves as {readable(', '.join(others))}, another "
            "organisation's name; revoke it, and issue one with 'securevfl certificates'"
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
    sealed, certificate_pem, ca_pem = read_key_file(key), read_file(certificate), read_file(ca)
    own, root = parse_certificate(certificate_pem, str(certificate)), parse_certificate(ca_pem, str(ca))
    name = organisation_of(own)
    check_tls_key(own, str(certificate))
    secret = parse_key(sealed, str(key))
    if secret.public_key() != own.public_key():
        raise CertificateError(f"{key} is not the key of {certificate}")
    check_root(root, str(ca))
    check_issuer(own, root, str(certificate))
    check_validity(own, f"the certificate of {name}")
    revoked = RevokedList(ca.with_name(REVOKED_FILE), root)
    check_not_revoked(own, revoked)
    return Identity(
        name=name,
        key_pem=secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        certificate_pem=certificate_pem,
        ca_pem=ca_pem,
        expires=own.not_valid_after_utc,
        revoked=revoked,
    )


class RevokedList(Container[int]):
    """Serial numbers that the authority has revoked, by the newest list that this process has found.

    A list that is put beside the authority's certificate holds from the next check on. One that is older than
    the list before it, damaged or out of date takes nothing back: whoever was revoked could have sent it.

    Args:
        path: Where the list is, if there is one.
        root: The authority.

    Raises:
        CertificateError: As `read_revoked`.
    """

    def __init__(self, path: Path, root: x509.Certificate) -> None:
        self._path, self._root = path, root
        self._stamp = self._look()
        self._made, self._serials = read_revoked(path, root)

    def __contains__(self, serial: object) -> bool:
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            self._renew()
        return serial in self._serials

    def _look(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _renew(self) -> None:
        try:
            made, serials = read_revoked(self._path, self._root)
        except CertificateError as error:
            log.warning("the list of revoked certificates stays", extra={"reason": str(error)})
            return
        if made < self._made:
            reason = f"{self._path} is of {made:%Y-%m-%d %H:%M} UTC, older than the list before it"
            log.warning("the list of revoked certificates stays", extra={"reason": reason})
            return
        self._made, self._serials = made, serials


def read_revoked(
    path: Path, root: x509.Certificate, *, out_of_date: bool = False
) -> tuple[datetime, frozenset[int]]:
    """When the authority made its list, and the serial numbers in it; none, long ago, where there is no list.

    Args:
        path: The list.
        root: The authority.
        out_of_date: Take a list that is, too.

    Raises:
        CertificateError: The list is malformed, not the authority's, or out of date.
    """
    if not path.exists():
        return datetime.min.replace(tzinfo=UTC), frozenset()
    try:
        found = x509.load_pem_x509_crl(read_file(path))
        sound = found.is_signature_valid(root.public_key())  # type: ignore[arg-type]
        made, end = found.last_update_utc, found.next_update_utc
    except MALFORMED as error:
        raise CertificateError(f"{path} is no list of revoked certificates in PEM form") from error
    if not sound:
        raise CertificateError(f"{path} is not signed by the authority {root.subject.rfc4514_string()!r}")
    if end is not None and now() > end and not out_of_date:
        raise CertificateError(f"{path} is out of date since {end:%Y-%m-%d}; ask the authority for a new one")
    return made, frozenset(each.serial_number for each in found)


def check_not_revoked(certificate: x509.Certificate, revoked: Container[int]) -> None:
    """Raises `CertificateError` where the authority has revoked a certificate."""
    if certificate.serial_number in revoked:
        raise CertificateError(
            f"the certificate of {organisation_of(certificate)} is revoked; ask for a new one"
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


MAX_FILE_BYTES = 1 << 16
# What the parser raises for bytes that are no certificate, request or key.
MALFORMED = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
Certified = x509.Certificate | x509.CertificateSigningRequest


def fingerprint(certified: Certified) -> str:
    """SHA-256 of the public key: the same in a request and in every certificate made from it."""
    public = certified.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).hexdigest()


def read_file(path: Path, check: Callable[[Path, os.stat_result], None] = lambda path, opened: None) -> bytes:
    """A small file from outside, once `check` has seen what was opened."""
    try:
        with path.open("rb") as file:
            check(path, os.fstat(file.fileno()))
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise CertificateError(f"{path} is larger than {MAX_FILE_BYTES} bytes; it is no certificate or key")
    return content


def read_key_file(path: Path) -> bytes:
    """A private key's file, which nobody but its owner may read.

    Raises:
        CertificateError: It cannot be read, or others can read it too.
    """
    return read_file(path, check=_check_private)


def _check_private(path: Path, opened: os.stat_result) -> None:
    """Looks at the file that was opened, whatever its name leads to a moment later."""
    if os.name != "posix":
        return
    mode = stat.S_IMODE(opened.st_mode)
    if not stat.S_ISREG(opened.st_mode) or mode & 0o077:
        raise CertificateError(f"others may read {path} (mode {mode:04o}); run: chmod 600 {path}")
    if opened.st_uid not in (os.geteuid(), 0):
        raise CertificateError(f"{path} belongs to another user; run: chown {os.geteuid()} {path}")


def parse_key(pem: bytes, label: str) -> PrivateKey:
    """A P-256 or Ed25519 private key; one with a passphrase takes it from the environment, or asks."""
    password = passphrase(label) if b"ENCRYPTED PRIVATE KEY" in pem else None
    try:
        key = load_pem_private_key(pem, password=password)
    except MALFORMED as error:
        why = "no private key in PEM form" if password is None else "not opened by this passphrase"
        raise CertificateError(f"{label} is {why}") from error
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise CertificateError(f"{label} is neither a P-256 nor an Ed25519 key")


def passphrase(label: str) -> bytes:
    """The passphrase of a key: from the environment, or typed where somebody is at the terminal.

    Raises:
        CertificateError: There is neither.
    """
    given = os.environ.get(PASSPHRASE, "")
    if not given and sys.stdin.isatty():
        given = getpass.getpass(f"passphrase of {label}: ")
    if not given:
        raise CertificateError(f"{label} has a passphrase; set {PASSPHRASE} in the environment")
    return given.encode()


def parse_certificate(content: bytes, label: str = "the certificate") -> x509.Certificate:
    """One certificate in PEM or DER form."""
    try:
        if content.lstrip().startswith(b"-----BEGIN"):
            found = x509.load_pem_x509_certificates(content)
        else:
            found = [x509.load_der_x509_certificate(content)]
    except MALFORMED as error:
        raise CertificateError(f"{label} is no certificate in PEM or DER form") from error
    if len(found) != 1:
        raise CertificateError(f"{label} holds {len(found)} certificates, expected 1")
    return found[0]


def parse_request(content: bytes, label: str) -> x509.CertificateSigningRequest:
    """A signing request in PEM form whose sender holds the key in it."""
    try:
        request = x509.load_pem_x509_csr(content)
        signed = request.is_signature_valid
    except MALFORMED as error:
        raise CertificateError(f"{label} is no certificate request in PEM form") from error
    if not signed:
        raise CertificateError(f"{label} is not signed by the key that it names")
    return request


def describe(certified: Certified) -> dict[str, Any]:
    """Name, issuer, end, days left, hosts and fingerprint of the key; a request has no issuer and no end."""
    try:
        facts: dict[str, Any] = {
            "name": readable(common_name(certified.subject)),
            "issuer": None,
            "expires": None,
            "days": None,
        }
        if isinstance(certified, x509.Certificate):
            end = certified.not_valid_after_utc
            facts["issuer"] = readable(common_name(certified.issuer))
            facts |= {"expires": f"{end:%Y-%m-%d}", "days": (end - now()).days}
        hosts = [readable(str(each.value)) for each in alternative_names(certified) if _is_host(each)]
        return {**facts, "hosts": hosts, "fingerprint": fingerprint(certified)}
    except MALFORMED as error:
        raise CertificateError(f"the certificate is malformed: {error}") from error


def _is_host(name: x509.GeneralName) -> bool:
    return isinstance(name, x509.DNSName | x509.IPAddress)


def describe_file(path: Path) -> dict[str, Any]:
    """As `describe`, of a file with a certificate (PEM or DER) or a request (PEM)."""
    content = read_file(path)
    if b"-----BEGIN CERTIFICATE REQUEST-----" in content:
        return describe(parse_request(content, str(path)))
    return describe(parse_certificate(content, str(path)))
