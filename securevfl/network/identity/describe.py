"""What is in a certificate or a request, for people and for JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cryptography import x509

from securevfl.errors import CertificateError
from securevfl.network.identity.identity import alternative_names, common_name, now
from securevfl.network.identity.pem import (
    MALFORMED,
    Certified,
    fingerprint,
    parse_certificate,
    parse_request,
    read_file,
)


def describe(certified: Certified) -> dict[str, Any]:
    """Name, issuer, end, days left, hosts and fingerprint of the key; a request has no issuer and no end."""
    try:
        facts: dict[str, Any] = {
            "name": _readable(common_name(certified.subject)),
            "issuer": None,
            "expires": None,
            "days": None,
        }
        if isinstance(certified, x509.Certificate):
            end = certified.not_valid_after_utc
            facts["issuer"] = _readable(common_name(certified.issuer))
            facts |= {"expires": f"{end:%Y-%m-%d}", "days": (end - now()).days}
        hosts = [_readable(str(each.value)) for each in alternative_names(certified) if _is_host(each)]
        return {**facts, "hosts": hosts, "fingerprint": fingerprint(certified)}
    except MALFORMED as error:
        raise CertificateError(f"the certificate is malformed: {error}") from error


def _readable(text: str) -> str:
    """Text from outside that may go to a terminal."""
    return text if text.isprintable() else ascii(text)


def _is_host(name: x509.GeneralName) -> bool:
    return isinstance(name, x509.DNSName | x509.IPAddress)


def describe_file(path: Path) -> dict[str, Any]:
    """As `describe`, of a file with a certificate (PEM or DER) or a request (PEM)."""
    content = read_file(path)
    if b"-----BEGIN CERTIFICATE REQUEST-----" in content:
        return describe(parse_request(content, str(path)))
    return describe(parse_certificate(content, str(path)))
