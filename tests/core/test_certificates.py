"""The consortium's authority: what its certificates say, what it refuses, and that gRPC's TLS agrees."""

from __future__ import annotations

import asyncio
import json
import re
import stat
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given
from hypothesis import strategies as st
from in_process import run_shell

from securevfl.cli import main
from securevfl.errors import CertificateError
from securevfl.network import identity
from securevfl.network.authority import (
    Authority,
    certify,
    check_hosts,
    create_authority,
    issue,
    load_authority,
    request,
    sign,
)
from securevfl.network.identity import (
    Identity,
    check_name,
    describe,
    describe_file,
    load_identity,
    load_identity_files,
    organisation_of,
    parse_key,
    server_name,
)

Names = list[x509.GeneralName]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return create_authority(tmp_path / "ca", name="North consortium")


@pytest.fixture
def bank(authority: Authority, tmp_path: Path) -> Path:
    issue(authority, ["bank"], out=tmp_path, hosts=["localhost", "192.0.2.7"])
    return tmp_path / "bank"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def subject(*names: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])


def csr(
    path: Path, name: str, names: Names, *extensions: x509.ExtensionType, key: object | None = None
) -> Path:
    """A request as somebody else's tool would write it."""
    secret = key or ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject(name))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    algorithm = None if isinstance(secret, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    path.write_bytes(builder.sign(secret, algorithm).public_bytes(Encoding.PEM))  # type: ignore[arg-type]
    return path


def named(authority: Authority, common: list[str], names: Names) -> x509.Certificate:
    """A certificate that the authority's key signed, with names of the test's choice."""
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        subject_name=subject(*common),
        issuer_name=authority.certificate.subject,
        public_key=ec.generate_private_key(ec.SECP256R1()).public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now,
        not_valid_after=now + timedelta(days=1),
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority.key, hashes.SHA256())  # type: ignore[arg-type]


def travel(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    monkeypatch.setattr(identity, "now", lambda: datetime.now(UTC) + timedelta(days=days))


# -- what is in a certificate -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["p256", "ed25519"])
def test_root_may_only_sign_organisations(tmp_path: Path, key: str) -> None:
    root = create_authority(tmp_path / "ca", name="North consortium", key=key).certificate
    kind = {"p256": ec.EllipticCurvePublicKey, "ed25519": ed25519.Ed25519PublicKey}[key]
    assert isinstance(root.public_key(), kind)
    constraints = root.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and constraints.value.ca and constraints.value.path_length == 0
    usage = root.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical and usage.value.key_cert_sign and not usage.value.digital_signature
    assert load_authority(tmp_path / "ca").certificate == root


def test_certificate_says_who_and_what_for(authority: Authority, bank: Path) -> None:
    made = x509.load_pem_x509_certificate((bank / "bank.pem").read_bytes())
    find = made.extensions.get_extension_for_class
    assert find(x509.BasicConstraints).critical and not find(x509.BasicConstraints).value.ca
    usage = find(x509.KeyUsage)
    assert usage.critical and usage.value.digital_signature and not usage.value.key_cert_sign
    uses = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert set(find(x509.ExtendedKeyUsage).value) == uses
    names = find(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["securevfl:bank"]
    assert names.get_values_for_type(x509.DNSName) == ["bank.securevfl", "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7"]
    assert made.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=4)
    assert made.not_valid_after_utc < authority.certificate.not_valid_after_utc
    made.verify_directly_issued_by(authority.certificate)


def test_serials_and_keys_are_fresh(authority: Authority, tmp_path: Path) -> None:
    made = issue(authority, ["a", "b", "c"], out=tmp_path)
    assert (
        len({each.serial_number for each in made})
        == len({describe(each)["fingerprint"] for each in made})
        == 3
    )
    assert [organisation_of(each) for each in made] == ["a", "b", "c"]


def test_keys_are_readable_by_their_owner_alone(bank: Path, tmp_path: Path) -> None:
    request("shop", out=tmp_path / "own")
    for folder, name in ((tmp_path / "ca", "ca"), (bank, "bank"), (tmp_path / "own" / "shop", "shop")):
        assert mode(folder) == 0o700 and mode(folder / f"{name}.key") == 0o600


def test_identity_is_read_back(bank: Path, tmp_path: Path) -> None:
    found = load_identity(bank)
    assert found.name == "bank" == organisation_of(found.certificate_pem)
    assert found.ca_pem == (tmp_path / "ca" / "ca.pem").read_bytes()
    assert 89 <= (found.expires - datetime.now(UTC)).days <= 90
    assert "PRIVATE" not in repr(found) and "BEGIN" not in repr(found)
    der = x509.load_pem_x509_certificate(found.certificate_pem).public_bytes(Encoding.DER)
    assert organisation_of(der) == "bank"


def test_own_key_is_certified_by_request(authority: Authority, tmp_path: Path) -> None:
    asked = request("clinic", out=tmp_path, hosts=["Clinic.example.org", "::1"])
    made = sign(authority, "clinic", tmp_path / "clinic" / "clinic.csr", out=tmp_path)
    assert load_identity(tmp_path / "clinic").name == "clinic"
    assert describe(made)["fingerprint"] == describe(asked)["fingerprint"]
    assert describe(made)["hosts"] == ["clinic.securevfl", "clinic.example.org", "::1"]
    renewed = sign(authority, "clinic", tmp_path / "clinic" / "clinic.csr", out=tmp_path / "renewed")
    assert renewed.serial_number != made.serial_number and renewed.public_key() == made.public_key()


# -- what a request cannot get ------------------------------------------------------------------------------


def test_request_cannot_make_an_authority(authority: Authority, tmp_path: Path) -> None:
    uses = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign crl_sign encipher_only decipher_only"
    )
    everything = x509.KeyUsage(**dict.fromkeys(uses.split(), True))
    greedy = csr(tmp_path / "x.csr", "shop", [], x509.BasicConstraints(ca=True, path_length=None), everything)
    made = sign(authority, "shop", greedy, out=tmp_path)
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not made.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert organisation_of(made) == "shop"


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([x509.UniformResourceIdentifier("securevfl:bank")], "asks for the name 'securevfl:bank'"),
        ([x509.DNSName("bank.securevfl")], "reserved"),
        ([x509.DNSName("BANK.SecureVFL")], "reserved"),
        ([x509.DNSName("securevfl")], "reserved"),
        ([x509.DNSName("bank.securevfl.")], "neither a host name"),
        ([x509.DNSName("*.securevfl")], "neither a host name"),
        ([x509.DNSName("*.example.org")], "neither a host name"),
        ([x509.RFC822Name("root@example.org")], "asks for the name"),
        ([x509.DNSName(f"h{i}.example.org") for i in range(33)], "33 hosts are too many"),
    ],
)
def test_request_cannot_get_anothers_name(
    authority: Authority, tmp_path: Path, names: Names, reason: str
) -> None:
    with pytest.raises(CertificateError, match=reason):
        sign(authority, "shop", csr(tmp_path / "x.csr", "shop", names), out=tmp_path)
    assert not (tmp_path / "shop").exists()


def test_request_of_another_is_not_signed(authority: Authority, tmp_path: Path) -> None:
    file = csr(tmp_path / "x.csr", "bank", [])
    with pytest.raises(CertificateError, match="request of 'bank', expected 'shop'"):
        sign(authority, "shop", file, out=tmp_path)


def test_request_with_a_foreign_key_is_not_signed(authority: Authority, tmp_path: Path) -> None:
    file = csr(tmp_path / "x.csr", "shop", [])
    body = bytearray(x509.load_pem_x509_csr(file.read_bytes()).public_bytes(Encoding.DER))
    body[-1] ^= 1  # the end of the signature
    file.write_bytes(x509.load_der_x509_csr(bytes(body)).public_bytes(Encoding.PEM))
    with pytest.raises(CertificateError, match="not signed by the key that it names"):
        sign(authority, "shop", file, out=tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        ed25519.Ed25519PrivateKey.generate,
        lambda: ec.generate_private_key(ec.SECP384R1()),
        lambda: rsa.generate_private_key(65537, 2048),
    ],
)
def test_request_for_a_key_that_tls_cannot_use(
    authority: Authority, tmp_path: Path, make: Callable[[], object]
) -> None:
    file = csr(tmp_path / "x.csr", "shop", [], key=make())
    with pytest.raises(CertificateError, match="not P-256"):
        sign(authority, "shop", file, out=tmp_path)


# -- nothing is overwritten, nothing is half done -----------------------------------------------------------


def test_nothing_is_overwritten(authority: Authority, bank: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CertificateError, match=r"ca\.key exists already"):
        create_authority(tmp_path / "ca", name="Other")
    with pytest.raises(CertificateError, match=r"bank\.key exists already"):
        issue(authority, ["shop", "bank"], out=tmp_path)
    with pytest.raises(CertificateError, match=r"bank\.key exists already"):
        request("bank", out=tmp_path)
    with pytest.raises(CertificateError, match=r"bank\.pem exists already"):
        sign(authority, "bank", csr(tmp_path / "x.csr", "bank", []), out=tmp_path)
    (tmp_path / "x.csr").unlink()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_another_authoritys_root_is_not_replaced(authority: Authority, tmp_path: Path) -> None:
    request("shop", out=tmp_path)
    (tmp_path / "shop" / "ca.pem").write_text("another root")
    with pytest.raises(CertificateError, match=r"ca\.pem exists already"):
        sign(authority, "shop", tmp_path / "shop" / "shop.csr", out=tmp_path)
    assert not (tmp_path / "shop" / "shop.pem").exists()


def test_link_in_the_way_is_not_followed(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "shop.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CertificateError, match="exists already"):
        issue(authority, ["shop"], out=tmp_path)
    assert not (tmp_path / "elsewhere").exists()


# -- what an organisation refuses to start with -------------------------------------------------------------


def test_others_may_not_read_the_key(bank: Path) -> None:
    for wrong in (0o640, 0o604, 0o620):
        (bank / "bank.key").chmod(wrong)
        with pytest.raises(CertificateError, match=f"mode {wrong:04o}.*chmod 600 "):
            load_identity(bank)
    (bank / "bank.key").chmod(0o400)
    assert load_identity(bank).name == "bank"


def test_certificate_of_another_authority(bank: Path, tmp_path: Path) -> None:
    foreign = create_authority(tmp_path / "other", name="North consortium")
    (bank / "ca.pem").write_bytes(foreign.certificate_pem)
    with pytest.raises(CertificateError, match="not issued by the authority 'CN=North consortium'"):
        load_identity(bank)


def test_key_of_another_certificate(authority: Authority, bank: Path, tmp_path: Path) -> None:
    issue(authority, ["bank"], out=tmp_path / "again")
    with pytest.raises(CertificateError, match=r"bank\.key is not the key of"):
        load_identity_files(
            key=tmp_path / "again" / "bank" / "bank.key", certificate=bank / "bank.pem", ca=bank / "ca.pem"
        )


@pytest.mark.parametrize(
    ("days", "reason"),
    [
        (90.5, "certificate of bank expired less than a day ago"),
        (92.5, "certificate of bank expired 2 days ago, on 20"),
        (-1, "check this machine's clock"),
        (400, "authority's certificate .* expired 35 days ago"),
    ],
)
def test_time_is_checked(bank: Path, monkeypatch: pytest.MonkeyPatch, days: float, reason: str) -> None:
    travel(monkeypatch, days)
    with pytest.raises(CertificateError, match=reason):
        load_identity(bank)


def test_expired_authority_issues_nothing(
    bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    travel(monkeypatch, 365.5)
    with pytest.raises(CertificateError, match="expired less than a day ago"):
        load_authority(tmp_path / "ca")


def test_organisation_as_authority_is_refused(bank: Path) -> None:
    (bank / "ca.pem").write_bytes((bank / "bank.pem").read_bytes())
    with pytest.raises(CertificateError, match="not the certificate of an authority"):
        load_identity(bank)


def test_folder_must_hold_one_key(bank: Path, tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="found none"):
        load_identity(tmp_path / "nowhere")
    (bank / "shop.key").write_bytes(b"")
    with pytest.raises(CertificateError, match=r"found bank\.key, shop\.key"):
        load_identity(bank)


@pytest.mark.parametrize("name", ["bank.key", "bank.pem", "ca.pem"])
@pytest.mark.parametrize(
    "content", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", b"\x30\x82"]
)
def test_damaged_file_is_named(bank: Path, name: str, content: bytes) -> None:
    (bank / name).write_bytes(content)
    with pytest.raises(CertificateError, match=name.replace(".", r"\.")):
        load_identity(bank)
    (bank / name).write_bytes(b"x" * 70_000)
    with pytest.raises(CertificateError, match="larger than 65536 bytes"):
        load_identity(bank)
    (bank / name).unlink()
    with pytest.raises(CertificateError):
        load_identity(bank)


def test_authority_with_the_wrong_key(bank: Path, tmp_path: Path) -> None:
    other = create_authority(tmp_path / "other", name="x")
    (tmp_path / "ca" / "ca.pem").write_bytes(other.certificate_pem)
    with pytest.raises(CertificateError, match=r"ca\.key is not the key of"):
        load_authority(tmp_path / "ca")


# -- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("common", "names"),
    [
        (["bank"], []),
        (["bank"], [x509.UniformResourceIdentifier("securevfl:shop")]),
        (["bank"], [x509.DNSName("bank.securevfl")]),
        (["bank"], [x509.UniformResourceIdentifier(f"securevfl:{name}") for name in ("bank", "shop")]),
        (["bank"], [x509.UniformResourceIdentifier(u) for u in ("securevfl:bank", "https://example.org")]),
        (["bank", "shop"], [x509.UniformResourceIdentifier("securevfl:bank")]),
        ([], [x509.UniformResourceIdentifier("securevfl:bank")]),
        (["Bank"], [x509.UniformResourceIdentifier("securevfl:Bank")]),
        (["../bank"], [x509.UniformResourceIdentifier("securevfl:../bank")]),
    ],
)
def test_name_must_be_unambiguous(authority: Authority, common: list[str], names: Names) -> None:
    with pytest.raises(CertificateError):
        organisation_of(named(authority, common, names))


@given(st.binary(max_size=200))
def test_garbage_names_nobody(content: bytes) -> None:
    for text in (content, b"-----BEGIN CERTIFICATE-----\n" + content):
        with pytest.raises(CertificateError):
            organisation_of(text)


@given(st.text(max_size=70))
def test_only_dns_labels_are_names(name: str) -> None:
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789-")
    good = 0 < len(name) <= 63 and set(name) <= allowed and name[0] != "-" != name[-1] and name != "ca"
    if good:
        assert server_name(name) == f"{name}.securevfl"
    else:
        with pytest.raises(CertificateError):
            check_name(name)


@pytest.mark.parametrize(
    "name", ["", "ca", "Bank", "bank_1", "a.b", "-a", "a-", "a" * 64, "ä", "a\n", "../a"]
)
def test_names_that_are_refused(authority: Authority, tmp_path: Path, name: str) -> None:
    with pytest.raises(CertificateError, match="cannot be an organisation's name"):
        issue(authority, ["good", name], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "host", ["", "a b", "-a.org", "a..b", "300.1.1.1", "1.2.3", "a" * 64, "fe80::1%eth0", "a.org:80", "ü.org"]
)
def test_hosts_that_are_refused(host: str) -> None:
    with pytest.raises(CertificateError, match="neither a host name nor an address"):
        check_hosts([host])


def test_hosts_are_listed_once() -> None:
    assert check_hosts(["A.org", "a.org", "::0001", "::1", "10.0.0.1"]) == ["a.org", "::1", "10.0.0.1"]


# -- command line -------------------------------------------------------------------------------------------


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["securevfl", "certificates", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        return (code, *capfd.readouterr())

    return call


@pytest.mark.parametrize("key", ["p256", "ed25519"])
def test_commands_from_root_to_identity(cli, tmp_path: Path, key: str) -> None:
    code, out, err = cli("init", "--name", "North", "--key", key, "--json")
    assert code == 0 and err == "" and json.loads(out)["certificates"][0]["days"] == 364
    code, out, _ = cli("issue", "bank", "shop", "--host", "localhost", "--days", 30)
    assert code == 0 and "bank, issued by North, 29 days left" in out and "shop.securevfl, localhost" in out
    code, asked, _ = cli("request", "clinic")
    assert code == 0 and "Send clinic/clinic.csr" in asked
    code, signed, _ = cli("sign", "clinic", "--csr", "clinic/clinic.csr")
    assert code == 0 and describe_file(tmp_path / "clinic" / "clinic.csr")["fingerprint"] in signed
    code, out, _ = cli("show", "clinic/clinic.csr", "clinic/clinic.pem", "ca/ca.pem")
    assert code == 0 and "request of clinic" in out and out.count("fingerprint") == 3
    assert [load_identity(tmp_path / name).name for name in ("bank", "shop", "clinic")] == [
        "bank",
        "shop",
        "clinic",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["issue", "bank", "--folder", "nowhere"], "nowhere holds no authority"),
        (["init", "--name", "x", "--folder", "new", "--key", "rsa"], "choose one of p256, ed25519"),
        (["init", "--name", "", "--folder", "new"], "cannot be an authority's name"),
        (["init", "--name", "a\x1b[2J", "--folder", "new"], "cannot be an authority's name"),
        (["init", "--name", "x", "--folder", "new", "--days", "0"], "choose 1 to 3650"),
        (["init", "--name", "x"], "ca/ca.key exists already"),
        (["issue", "Bank"], "cannot be an organisation's name"),
        (["issue", "a", "b", "a"], "named twice: ['a']"),
        (["issue", "a", "--days", "366"], "at most 364"),
        (["issue", "a", "--days", "-1"], "choose 1 to 3650"),
        (["issue", "a", "--host", "b.securevfl"], "reserved"),
        (["issue", "a", "--out", "ca/ca.pem"], "cannot be written"),
        (["sign", "a", "--csr", "missing.csr"], "missing.csr cannot be read: No such file"),
        (["sign", "a", "--csr", "ca/ca.pem"], "no certificate request in PEM form"),
        (["show", "ca/ca.key"], "ca.key is no certificate"),
        (["show", "ca"], "cannot be read: Is a directory"),
    ],
)
def test_bad_input_is_one_line(cli, tmp_path: Path, arguments: list[str], reason: str) -> None:
    create_authority(tmp_path / "ca", name="North")
    code, out, err = cli(*arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and reason in err, err


def test_names_from_outside_cannot_drive_the_terminal(cli, tmp_path: Path) -> None:
    csr(tmp_path / "x.csr", "\x1b[2Jbank", [x509.DNSName("a\x1b[2J.org")])
    code, out, _ = cli("show", "x.csr")
    assert code == 0 and "\x1b" not in out


# -- gRPC ---------------------------------------------------------------------------------------------------


async def greet(server: Identity, client: Identity, expected: str) -> str:
    """Who the server takes the client for, over mutual TLS on loopback."""
    grpc = pytest.importorskip("grpc", reason="needs securevfl[network]")

    async def answer(_: bytes, context) -> bytes:  # type: ignore[no-untyped-def]
        return organisation_of(context.auth_context()["x509_pem_cert"][0]).encode()

    handler = grpc.method_handlers_generic_handler("t", {"Who": grpc.unary_unary_rpc_method_handler(answer)})
    endpoint = grpc.aio.server()
    endpoint.add_generic_rpc_handlers((handler,))
    pair = [(server.key_pem, server.certificate_pem)]
    port = endpoint.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair, server.ca_pem, True))
    await endpoint.start()
    credentials = grpc.ssl_channel_credentials(client.ca_pem, client.key_pem, client.certificate_pem)
    options = [("grpc.ssl_target_name_override", server_name(expected))]
    try:
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
            return bytes(await channel.unary_unary("/t/Who")(b"", timeout=20)).decode()
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    finally:
        await endpoint.stop(None)


@pytest.mark.parametrize("key", ["p256", "ed25519"])
def test_tls_knows_the_organisations(tmp_path: Path, key: str) -> None:
    root = create_authority(tmp_path / "ca", name="North", key=key)
    issue(root, ["bank", "shop"], out=tmp_path)
    bank, shop = load_identity(tmp_path / "bank"), load_identity(tmp_path / "shop")
    assert asyncio.run(greet(bank, shop, "bank")) == "shop"
    assert asyncio.run(greet(shop, bank, "shop")) == "bank"
    assert asyncio.run(greet(bank, shop, "clinic")) == "UNAVAILABLE"


def test_tls_refuses_a_foreign_authority(authority: Authority, bank: Path, tmp_path: Path) -> None:
    foreign = create_authority(tmp_path / "other" / "ca", name="North consortium")
    issue(foreign, ["bank", "shop"], out=tmp_path / "other")
    issue(authority, ["shop"], out=tmp_path)
    ours, theirs = load_identity(bank), load_identity(tmp_path / "other" / "shop")
    posing = Identity(**{**vars(theirs), "ca_pem": ours.ca_pem})
    assert asyncio.run(greet(ours, theirs, "bank")) == "UNAVAILABLE"
    assert asyncio.run(greet(ours, posing, "bank")) == "UNAVAILABLE"
    impostor = load_identity(tmp_path / "other" / "bank")
    assert asyncio.run(greet(impostor, load_identity(tmp_path / "shop"), "bank")) == "UNAVAILABLE"


def test_tls_refuses_certificates_that_an_organisation_made(
    authority: Authority, bank: Path, tmp_path: Path
) -> None:
    issue(authority, ["shop"], out=tmp_path)
    shop = load_identity(tmp_path / "shop")
    own = x509.load_pem_x509_certificate(shop.certificate_pem)
    posing = Authority(key=parse_key(shop.key_pem, "shop"), certificate=own)
    key = ec.generate_private_key(ec.SECP256R1())
    made = certify(posing, "clinic", key.public_key(), [], 1)
    assert organisation_of(made) == "clinic"  # names alone prove nothing
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    chain = made.public_bytes(Encoding.PEM) + shop.certificate_pem
    clinic = Identity(**{**vars(shop), "name": "clinic", "key_pem": key_pem, "certificate_pem": chain})
    assert asyncio.run(greet(load_identity(bank), clinic, "bank")) == "UNAVAILABLE"
    assert asyncio.run(greet(clinic, load_identity(bank), "clinic")) == "UNAVAILABLE"


def test_tls_refuses_an_expired_certificate(
    authority: Authority, bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from securevfl.network import authority as building

    monkeypatch.setattr(building, "now", lambda: datetime.now(UTC) - timedelta(days=3))
    issue(authority, ["shop"], out=tmp_path, days=1)
    with pytest.raises(CertificateError, match="shop expired 2 days ago"):
        load_identity(tmp_path / "shop")
    files = {path.name: path.read_bytes() for path in (tmp_path / "shop").iterdir()}
    late = Identity(
        name="shop",
        key_pem=files["shop.key"],
        certificate_pem=files["shop.pem"],
        ca_pem=files["ca.pem"],
        expires=datetime.now(UTC),
    )
    assert asyncio.run(greet(load_identity(bank), late, "bank")) == "UNAVAILABLE"
    assert asyncio.run(greet(late, load_identity(bank), "shop")) == "UNAVAILABLE"


def test_the_page_runs_as_written(tmp_path: Path, monkeypatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "certificates.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    run_shell("\n".join(blocks))
    for name in ("clinic.pem", "ca.pem"):
        (tmp_path / "signed" / "clinic" / name).rename(tmp_path / "clinic" / name)
    for name in ("bank", "shop", "clinic"):
        assert load_identity(tmp_path / name).name == name
