"""A small certificate authority for a consortium: one root, one certificate per organisation.

An organisation's certificate is for a P-256 key: gRPC's TLS (BoringSSL) offers no Ed25519 in handshakes. The
root only signs certificates, so its own key may be P-256 or Ed25519. Nothing here overwrites a file:
everything is checked first and written after that.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from securevfl.errors import CertificateError
from securevfl.files import PRIVATE, create, write_bytes
from securevfl.network.identity import (
    CA_FILE,
    DOMAIN,
    MALFORMED,
    PASSPHRASE,
    REVOKED_FILE,
    SCHEME,
    PrivateKey,
    alternative_names,
    check_issuer,
    check_name,
    check_root,
    check_tls_key,
    common_name,
    now,
    parse_certificate,
    parse_key,
    parse_request,
    read_file,
    read_key_file,
    read_revoked,
    server_name,
)

CA_KEY_FILE = "ca.key"


def create_authority(folder: Path, *, name: str, key: str = "p256", days: int = 365) -> Authority:
    """Makes the consortium's root in a folder: ``ca.key`` and ``ca.pem``.

    Args:
        folder: Where to keep it. Whoever reads ``ca.key`` can pose as any organisation.
        name: What to call it; for people to read.
        key: ``p256`` or ``ed25519``.
        days: How long it lasts.

    Raises:
        CertificateError: The input is unusable, or a file exists already.
    """
    root = new_authority(name, key=key, days=days)
    _write_new(Path(folder), {CA_KEY_FILE: _key_pem(root.key), CA_FILE: root.certificate_pem})
    return root


def load_authority(folder: Path) -> Authority:
    """Reads what `create_authority` made.

    Raises:
        CertificateError: A file is missing, malformed, open to others or expired, or the two do not match.
    """
    key_file, file = Path(folder) / CA_KEY_FILE, Path(folder) / CA_FILE
    if not key_file.exists():
        raise CertificateError(f"{folder} holds no authority; make one with: securevfl certificates init")
    key = parse_key(read_key_file(key_file), str(key_file))
    certificate = parse_certificate(read_file(file), str(file))
    check_root(certificate, str(file))
    if key.public_key() != certificate.public_key():
        raise CertificateError(f"{key_file} is not the key of {file}")
    return Authority(key=key, certificate=certificate)


# -- one certificate per organisation -----------------------------------------------------------------------


def issue(
    authority: Authority, names: Sequence[str], *, out: Path, hosts: Sequence[str] = (), days: int = 90
) -> list[x509.Certificate]:
    """Makes a key and a certificate for each organisation, in ``out/NAME/``, with a copy of the root's.

    Args:
        authority: The consortium's root.
        names: The organisations.
        out: Where their folders go.
        hosts: Host names and addresses to put into the certificates besides ``NAME.securevfl``.
        days: How long the certificates last.

    Raises:
        CertificateError: The input is unusable, or a file exists already; nothing was written.
    """
    twice = {name for name in names if names.count(name) > 1}
    if not names or twice:
        raise CertificateError(
            f"organisations named twice: {sorted(twice)}" if twice else "no organisation given"
        )
    checked = check_hosts(hosts)
    keys = {check_name(name): new_key() for name in names}
    made = {name: certify(authority, name, key.public_key(), checked, days) for name, key in keys.items()}
    plans = {
        name: {f"{name}.key": _key_pem(keys[name]), **_certificate_files(authority, name, made[name])}
        for name in names
    }
    for name, files in plans.items():
        _check_free(Path(out) / name, files)
    for name, files in plans.items():
        _write_new(Path(out) / name, files)
    return list(made.values())


def request(name: str, *, out: Path, hosts: Sequence[str] = ()) -> x509.CertificateSigningRequest:
    """Makes an organisation's own key and its request: ``out/NAME/NAME.key`` and ``out/NAME/NAME.csr``.

    Raises:
        CertificateError: The input is unusable, or a file exists already.
    """
    key = new_key()
    made = new_request(name, key, check_hosts(hosts))
    _write_new(
        Path(out) / name, {f"{name}.key": _key_pem(key), f"{name}.csr": made.public_bytes(Encoding.PEM)}
    )
    return made


def sign(authority: Authority, name: str, csr: Path, *, out: Path, days: int = 90) -> x509.Certificate:
    """Certifies the key of an organisation that keeps it to itself: ``out/NAME/NAME.pem`` and ``ca.pem``.

    Only name, hosts and key are taken from the request; whatever else it asks for is left out.

    Args:
        authority: The consortium's root.
        name: The organisation that sent the request, as the consortium knows it.
        csr: Its request.
        out: Where the organisation's folder goes.
        days: How long the certificate lasts.

    Raises:
        CertificateError: The request is malformed, not signed by its own key, for another organisation or for
            a key that TLS cannot use; or a file exists already.
    """
    asked = parse_request(read_file(csr), str(csr))
    hosts = requested_hosts(asked, check_name(name), str(csr))
    made = certify(authority, name, check_tls_key(asked, str(csr)), hosts, days)
    _write_new(Path(out) / name, _certificate_files(authority, name, made))
    return made


def revoke(authority: Authority, certificates: Sequence[Path], *, folder: Path, days: int = 30) -> int:
    """Adds certificates to the authority's list, ``ca.crl``, which everybody puts beside ``ca.pem``.

    Args:
        authority: The consortium's root.
        certificates: Which; none renews the list as it is.
        folder: The authority's folder.
        days: How long the list is good for; a new one must come before that.

    Returns:
        How many certificates are revoked now.

    Raises:
        CertificateError: One is malformed or was not issued by this authority.
    """
    if not 1 <= days <= MAX_DAYS:
        raise CertificateError(f"{days} days were asked for; choose 1 to {MAX_DAYS}")
    path, begin = Path(folder) / REVOKED_FILE, now()
    serials = set(read_revoked(path, authority.certificate, out_of_date=True)[1])
    for each in certificates:
        certificate = parse_certificate(read_file(each), str(each))
        check_issuer(certificate, authority.certificate, str(each))
        serials.add(certificate.serial_number)
    builder = x509.CertificateRevocationListBuilder(
        issuer_name=authority.certificate.subject, last_update=begin, next_update=begin + timedelta(days=days)
    )
    for serial in sorted(serials):
        entry = x509.RevokedCertificateBuilder(serial_number=serial, revocation_date=begin).build()
        builder = builder.add_revoked_certificate(entry)
    algorithm = None if isinstance(authority.key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    write_bytes(path, builder.sign(authority.key, algorithm).public_bytes(Encoding.PEM))
    return len(serials)


def requested_hosts(asked: x509.CertificateSigningRequest, name: str, label: str) -> list[str]:
    """The hosts that a request asks for, once its name is the expected one."""
    try:
        found = common_name(asked.subject)
        names = alternative_names(asked)
    except MALFORMED as error:
        raise CertificateError(f"{label} is malformed: {error}") from error
    if found != name:
        raise CertificateError(f"{label} is a request of {found!r}, expected {name!r}")
    own = (x509.UniformResourceIdentifier(SCHEME + name), x509.DNSName(server_name(name)))
    others = [each for each in names if each not in own]
    for each in others:
        if not isinstance(each, x509.DNSName | x509.IPAddress):
            raise CertificateError(f"{label}, a request of {name}, asks for the name {each.value!r} too")
    return check_hosts([str(each.value) for each in others])


# -- files --------------------------------------------------------------------------------------------------


def _key_pem(key: PrivateKey) -> bytes:
    """The key's file; sealed with the passphrase in the environment, if there is one."""
    given = os.environ.get(PASSPHRASE, "")
    sealing = BestAvailableEncryption(given.encode()) if given else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, sealing)


def _certificate_files(authority: Authority, name: str, made: x509.Certificate) -> dict[str, bytes]:
    return {f"{name}.pem": made.public_bytes(Encoding.PEM), CA_FILE: authority.certificate_pem}


def _check_free(folder: Path, files: Mapping[str, bytes]) -> list[str]:
    """The files that have to be written; one that is there already must be the authority's, unchanged."""
    present = [name for name in files if os.path.lexists(folder / name)]
    same = [name for name in present if name == CA_FILE and read_file(folder / name) == files[name]]
    for name in present:
        if name not in same:
            raise CertificateError(
                f"{folder / name} exists already and is not overwritten; choose another folder"
            )
    return [name for name in files if name not in same]


def _write_new(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files that do not exist yet; keys are readable by their owner alone from the first byte on."""
    wanted = _check_free(folder, files)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in wanted:
            mode = PRIVATE if name.endswith(".key") else 0o644
            create(folder / name, files[name], mode)
    except OSError as error:
        raise CertificateError(f"{error.filename or folder} cannot be written: {error.strerror}") from error


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
