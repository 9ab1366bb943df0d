"""A small certificate authority for a consortium, in files: one root, one certificate per organisation.

Nothing here overwrites a file. Everything is checked first and written after that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from securevfl.errors import CertificateError
from securevfl.files import PRIVATE, create
from securevfl.network.identity.authority import (
    Authority,
    certify,
    check_hosts,
    new_authority,
    new_key,
    new_request,
)
from securevfl.network.identity.identity import (
    CA_FILE,
    SCHEME,
    alternative_names,
    check_name,
    check_root,
    check_tls_key,
    common_name,
    server_name,
)
from securevfl.network.identity.pem import (
    MALFORMED,
    PrivateKey,
    parse_certificate,
    parse_key,
    parse_request,
    read_file,
    read_key_file,
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
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


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
