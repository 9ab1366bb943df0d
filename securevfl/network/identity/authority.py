"""The certificates of a consortium's authority, built in memory: what is in them and what never is.

An organisation's certificate is for a P-256 key: gRPC's TLS (BoringSSL) offers no Ed25519 in handshakes. The
root only signs certificates, so its own key may be P-256 or Ed25519.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from securevfl.errors import CertificateError
from securevfl.network.identity.identity import DOMAIN, SCHEME, check_name, now, server_name
from securevfl.network.identity.pem import PrivateKey

KEYS = ("p256", "ed25519")
MAX_DAYS = 3650
MAX_HOSTS = 32
CLOCK_SKEW = timedelta(minutes=5)  # clocks of the organisations may differ by as much

# Labels joined by dots; the last one is no number, or it would be an address that was mistyped.
_HOST = re.compile(r"(?:(?!-)[a-z0-9-]{1,63}(?<!-)\.)*(?!-)(?!\d+$)[a-z0-9-]{1,63}(?<!-)")


@dataclass(frozen=True, kw_only=True)
class Authority:
    """The consortium's root: its key and its certificate."""

    key: PrivateKey
    certificate: x509.Certificate

    @property
    def certificate_pem(self) -> bytes:
        """The certificate that every organisation gets."""
        return self.certificate.public_bytes(Encoding.PEM)


def new_authority(name: str, *, key: str, days: int) -> Authority:
    """A root with a fresh key; `key` is one of `KEYS`."""
    if key not in KEYS:
        raise CertificateError(f"key {key!r} is unknown; choose one of {', '.join(KEYS)}")
    if not name.isprintable() or not name.strip() or len(name) > 64:
        raise CertificateError(f"{name!r} cannot be an authority's name; use 1 to 64 printable characters")
    secret: PrivateKey = new_key() if key == "p256" else ed25519.Ed25519PrivateKey.generate()
    builder = _builder(_subject(name), _subject(name), secret.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return Authority(key=secret, certificate=_sign(builder, secret))


def certify(
    authority: Authority, name: str, public: ec.EllipticCurvePublicKey, hosts: Sequence[str], days: int
) -> x509.Certificate:
    """A certificate that binds an organisation's name and hosts to its key."""
    left = (authority.certificate.not_valid_after_utc - now()).days
    if days > left:
        raise CertificateError(
            f"{days} days are too many: the authority's own certificate allows at most {left}; renew it first"
        )
    builder = _builder(_subject(check_name(name)), authority.certificate.subject, public, days)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    builder = builder.add_extension(_alternative_names(name, hosts), critical=False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return _sign(builder.add_extension(issuer, critical=False), authority.key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey,
    days: int,
) -> x509.CertificateBuilder:
    if not 1 <= days <= MAX_DAYS:
        raise CertificateError(f"{days} days were asked for; choose 1 to {MAX_DAYS}")
    begin = now()
    builder = x509.CertificateBuilder(
        subject_name=subject,
        issuer_name=issuer,
        public_key=public,
        serial_number=x509.random_serial_number(),
        not_valid_before=begin - CLOCK_SKEW,
        not_valid_after=begin + timedelta(days=days),
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def new_request(
    name: str, key: ec.EllipticCurvePrivateKey, hosts: Sequence[str]
) -> x509.CertificateSigningRequest:
    """An organisation's request for a certificate."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(check_name(name)))
    return builder.add_extension(_alternative_names(name, hosts), critical=False).sign(key, hashes.SHA256())


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def _sign(builder: x509.CertificateBuilder, key: PrivateKey) -> x509.Certificate:
    return builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())


def _alternative_names(name: str, hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(SCHEME + name),
        x509.DNSName(server_name(name)),
    ]
    for host in hosts:
        address = _address(host)
        names.append(x509.DNSName(host) if address is None else x509.IPAddress(address))
    return x509.SubjectAlternativeName(names)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def check_hosts(hosts: Sequence[str]) -> list[str]:
    """The hosts without repetition, addresses in their usual form.

    Raises:
        CertificateError: One is neither a host name nor an address, or it claims an organisation's name.
    """
    if len(hosts) > MAX_HOSTS:
        raise CertificateError(f"{len(hosts)} hosts are too many; at most {MAX_HOSTS}")
    return list(dict.fromkeys(_check_host(host) for host in hosts))


def _check_host(host: str) -> str:
    address = _address(host)
    if address is not None:
        return str(address)
    lowered = host.lower()
    if len(host) > 253 or not _HOST.fullmatch(lowered):
        raise CertificateError(f"{host!r} is neither a host name nor an address")
    if lowered.split(".")[-1] == DOMAIN:
        # Peers are told apart by these names: as a host, it would let one organisation pose as another.
        raise CertificateError(f"host {host!r} is reserved: names under .{DOMAIN} belong to organisations")
    return lowered


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return None if "%" in host else ipaddress.ip_address(host)
    except ValueError:
        return None
