"""Keys, certificates and requests in files: small, well-formed, and keys readable by their owner alone."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from securevfl.errors import CertificateError

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


def read_file(path: Path) -> bytes:
    """A small file from outside."""
    try:
        with path.open("rb") as file:
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
    content = read_file(path)
    mode = path.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        raise CertificateError(f"others may read {path} (mode {mode:04o}); run: chmod 600 {path}")
    return content


def parse_key(pem: bytes, label: str) -> PrivateKey:
    """A P-256 or Ed25519 private key without a passphrase."""
    try:
        key = load_pem_private_key(pem, password=None)
    except MALFORMED as error:
        raise CertificateError(f"{label} is no private key in PEM form without a passphrase") from error
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise CertificateError(f"{label} is neither a P-256 nor an Ed25519 key")


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
