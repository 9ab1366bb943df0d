"""Keys with passphrases, files of others, and certificates that were revoked."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from federation import Federation, identities
from test_network_transport import Attacker, refusal, waiting
from typer.testing import CliRunner

from securevfl.cli import app
from securevfl.errors import CertificateError
from securevfl.network import identity
from securevfl.network.api import load_own
from securevfl.network.authority import create_authority, issue, load_authority, revoke
from securevfl.network.identity import PASSPHRASE, load_identity
from securevfl.network.relay import Introducer
from securevfl.network.session import new_incarnation
from securevfl.network.signing import sign
from securevfl.settings.plan import Plan

SECRET = "four words are enough"


@pytest.fixture
def consortium(tmp_path: Path) -> Path:
    issue(create_authority(tmp_path / "ca", name="test"), ["bank", "clinic"], out=tmp_path)
    return tmp_path


def test_a_key_with_a_passphrase_opens_with_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSPHRASE, SECRET)
    issue(create_authority(tmp_path / "ca", name="test"), ["clinic"], out=tmp_path)
    for path in (tmp_path / "ca" / "ca.key", tmp_path / "clinic" / "clinic.key"):
        assert path.read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    assert sign(load_identity(tmp_path / "clinic"), b"text")
    load_authority(tmp_path / "ca")
    monkeypatch.setenv(PASSPHRASE, SECRET + "!")
    with pytest.raises(CertificateError, match="not opened by this passphrase") as caught:
        load_identity(tmp_path / "clinic")
    assert SECRET not in str(caught.value)
    monkeypatch.delenv(PASSPHRASE)
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        with pytest.raises(CertificateError, match=f"set {PASSPHRASE}"):
            load_identity(tmp_path / "clinic")


def test_the_file_that_is_read_is_the_file_that_is_checked(
    consortium: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is replaced between a look at its name and the reading is looked at as it was opened."""
    seen: list[int] = []
    check = identity._check_private

    def watching(path: Path, opened: os.stat_result) -> None:
        seen.append(opened.st_ino)
        path.unlink()  # the name leads nowhere now
        check(path, opened)

    monkeypatch.setattr(identity, "_check_private", watching)
    key = consortium / "clinic" / "clinic.key"
    number = key.stat().st_ino
    load_identity(consortium / "clinic")
    assert seen == [number]


def test_a_key_of_another_user_is_refused(consortium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = consortium.stat().st_uid + 4711
    monkeypatch.setattr(os, "geteuid", lambda: other)
    key = consortium / "clinic" / "clinic.key"
    if key.stat().st_uid == 0:  # root's files are taken; give it to somebody else
        os.chown(key, 4712, -1)
    with pytest.raises(CertificateError, match="belongs to another user"):
        load_identity(consortium / "clinic")


# -- revocation ---------------------------------------------------------------------------------------------


def revoked(consortium: Path, *names: str, to: str) -> None:
    files = [consortium / name / f"{name}.pem" for name in names]
    assert revoke(load_authority(consortium / "ca"), files, folder=consortium / "ca") == len(names)
    (consortium / to / "ca.crl").write_bytes((consortium / "ca" / "ca.crl").read_bytes())


def test_a_revoked_organisation_is_refused_at_the_door(consortium: Path, tmp_path: Path) -> None:
    revoked(consortium, "clinic", to="bank")
    clinic = load_identity(consortium / "clinic")  # it has not heard of it

    async def play() -> str:
        federation = Federation(tmp_path / "run", Plan(algorithm="vafl", unprotected=True))
        federation.server = replace(federation.server, identity=load_identity(consortium / "bank"))
        async with waiting(federation) as node:
            attacker = Attacker(federation, clinic)
            try:
                found = await refusal(attacker.open(attacker.hello()))
            finally:
                await attacker.close()
            assert not node.mesh.sessions["clinic"].connected
            return found

    assert asyncio.run(play()) == "the certificate of clinic is revoked; ask for a new one"


def test_a_revoked_organisation_cannot_be_introduced_by_others(consortium: Path) -> None:
    clinic = Introducer(load_identity(consortium / "clinic"), run="test", incarnation=new_incarnation())
    clinic.introduction.check("test", load_identity(consortium / "bank"))
    revoked(consortium, "clinic", to="bank")
    with pytest.raises(CertificateError, match="clinic is revoked"):
        clinic.introduction.check("test", load_identity(consortium / "bank"))
    revoked(consortium, "clinic", to="clinic")
    with pytest.raises(CertificateError, match="clinic is revoked"):
        load_identity(consortium / "clinic")


def test_a_revoked_coordinator_is_refused_by_those_who_dial_it(consortium: Path, tmp_path: Path) -> None:
    """TLS knows of no list; the coordinator introduces itself before anybody is asked anything."""
    federation = Federation(
        tmp_path / "run", Plan(algorithm="vafl", unprotected=True), parties=("bank", "clinic")
    )
    federation.server = replace(federation.server, identity=load_identity(consortium / "bank"))
    revoked(consortium, "bank", to="clinic")
    config = replace(federation.members["clinic"], identity=load_identity(consortium / "clinic"))
    federation.members["clinic"] = config

    async def play() -> Any:
        async with waiting(federation):
            return (await asyncio.gather(federation.member("clinic").run(), return_exceptions=True))[0]

    found = asyncio.run(play())
    assert isinstance(found, CertificateError) and "certificate of bank is revoked" in str(found), found
    assert not (tmp_path / "run" / "clinic" / "ledger").exists()


def test_a_revoked_organisation_is_not_dialled_again(consortium: Path, tmp_path: Path) -> None:
    """TLS lets it in where it is dialled; its introduction is looked at with every new stream."""
    plan = Plan(algorithm="vafl", epochs=200, unprotected=True)
    federation = Federation(tmp_path / "run", plan, parties=("bank", "clinic"))
    federation.server = replace(federation.server, identity=load_identity(consortium / "bank"))
    own = load_identity(consortium / "clinic")
    federation.members["clinic"] = replace(federation.members["clinic"], identity=own)

    async def play() -> Any:
        async with waiting(federation):
            clinic = federation.member("clinic")
            task = asyncio.create_task(clinic.run())
            while not clinic.agreement:
                await asyncio.sleep(0.01)
            revoked(consortium, "bank", to="clinic")
            await asyncio.sleep(0.2)
            assert not task.done()  # a stream that stands goes on
            clinic.mesh.transport._streams["bank"].cancel()
            async with asyncio.timeout(30):
                return (await asyncio.gather(task, return_exceptions=True))[0]

    found = asyncio.run(play())
    assert isinstance(found, CertificateError) and "certificate of bank is revoked" in str(found), found


def test_a_list_is_the_authoritys_and_not_too_old(consortium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = create_authority(consortium / "other", name="other")
    revoke(other, [], folder=consortium / "other")
    path = consortium / "bank" / "ca.crl"
    path.write_bytes((consortium / "other" / "ca.crl").read_bytes())
    with pytest.raises(CertificateError, match="not signed by the authority"):
        load_identity(consortium / "bank")
    path.write_bytes(b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n")
    with pytest.raises(CertificateError, match="no list of revoked certificates"):
        load_identity(consortium / "bank")
    revoked(consortium, "clinic", to="bank")
    later = identity.now() + timedelta(days=31)
    monkeypatch.setattr(identity, "now", lambda: later)
    with pytest.raises(CertificateError, match="out of date"):
        load_identity(consortium / "bank")


def test_the_command_adds_to_the_list(consortium: Path) -> None:
    def run(*arguments: Any) -> str:
        done = CliRunner().invoke(app, ["certificates", "revoke", *map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.output

    folder = ("--folder", consortium / "ca")
    assert "1 certificates are revoked" in run(consortium / "clinic" / "clinic.pem", *folder)
    assert '"revoked": 2' in run(consortium / "bank" / "bank.pem", *folder, "--json")
    assert "2 certificates are revoked" in run(*folder)  # renewed as it is


def test_a_key_on_its_way_to_tls_is_never_open_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's TLS reads keys from files alone; whoever finds that file later cannot open it."""
    seen = []

    class Spy:
        def load_cert_chain(self, name: str, password: str) -> None:
            seen.append((Path(name).read_bytes(), Path(name).stat().st_mode & 0o777, Path(name), password))

    load_own(Spy(), identities()["bank"])  # type: ignore[arg-type]
    ((content, mode, path, password),) = seen
    assert mode == 0o600 and not path.exists() and len(password) == 64
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in content and b"BEGIN PRIVATE KEY" not in content
    opened = serialization.load_pem_private_key(content, password.encode())
    assert (
        opened.private_numbers()
        == serialization.load_pem_private_key(  # type: ignore[union-attr]
            identities()["bank"].key_pem, None
        ).private_numbers()
    )  # type: ignore[union-attr]
