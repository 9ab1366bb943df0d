"""Things that were right once, shown again: signatures, copies of folders, names, lists of the authority."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from crashes import finish, processes
from cryptography import x509
from federation import Federation
from test_network_transport import Attacker, refusal, waiting

from securevfl import audit
from securevfl.errors import AgreementError, CertificateError
from securevfl.network import authority as authorities
from securevfl.network import identity
from securevfl.network.authority import create_authority, issue, load_authority, revoke, sign
from securevfl.network.coordinator import Coordinator
from securevfl.network.gathering import gather
from securevfl.network.identity import load_identity, organisation_of
from securevfl.network.member import Member
from securevfl.network.relay import Introducer
from securevfl.network.session import new_incarnation
from securevfl.privacy.ledger import read_agreement
from securevfl.settings.plan import Plan

PLAN = Plan(algorithm="vafl-sync", epochs=2, batch=16, sigma=4.0, seed=3)
PAIR = ("bank", "clinic")
Heard = list[dict[str, Any]]


# -- honest signatures as evidence --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Heard]]:
    """Two runs of the same agreement, and what the honest coordinator signed in each."""
    folders, heard = [tmp_path_factory.mktemp(each) for each in ("first", "second")], list[Heard]()
    begin = Member._begin

    async def listening(self: Member, fields: dict[str, Any]) -> None:
        heard[-1].append(fields)
        await begin(self, fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Member, "_begin", listening)
        for folder in folders:
            heard.append([])
            asyncio.run(Federation(folder, PLAN, parties=PAIR).run())
    assert len({read_agreement(folder / "clinic")["digest"] for folder in folders}) == 1
    return folders, heard


def accuse(folder: Path, phases: Sequence[dict[str, Any]]) -> None:
    """Lines that an honest clinic writes where it refuses a phase."""
    about = {"by": "bank", "asked": "begin", "reason": "epoch of epoch 3 was not agreed on"}
    about["agreement"] = str(read_agreement(folder)["digest"])
    raw = [{k: v.hex() if isinstance(v, bytes) else v for k, v in each.items()} for each in phases]
    (folder / "evidence.jsonl").write_text("".join(json.dumps(about | each) + "\n" for each in raw))


def judged(folder: Path) -> tuple[str, list[str]]:
    """The verdict, and what is said of the coordinator."""
    report = audit(folder, attacks="none")
    reasons = [reason for each in report.content["findings"] for reason in each["reasons"]]
    return str(report.verdict), [each for each in reasons if "asked for what was not agreed on" in each]


@pytest.mark.parametrize("run", [0, 1], ids=["this run", "another run of the same agreement"])
def test_phases_that_were_agreed_on_accuse_nobody(
    tmp_path: Path, honest: tuple[list[Path], list[Heard]], run: int
) -> None:
    """A member keeps what it was honestly asked for, and says that it refused it."""
    folders, heard = honest
    for name in PAIR:
        shutil.copytree(folders[0] / name, tmp_path / name)
    accuse(tmp_path / "clinic", heard[run])
    gather([tmp_path / name for name in PAIR], tmp_path / "joint")
    for folder in (tmp_path / "clinic", tmp_path / "joint"):
        verdict, said = judged(folder)
        assert verdict != "violated"
        assert len(said) == 4 and all("nothing that bank has signed says so" in each for each in said)


class Again(Coordinator):
    """Begins the second epoch a second time."""

    async def phase(self, part: str, epoch: int) -> None:
        await super().phase(part, epoch)
        if (part, epoch) == ("epoch", 2):
            enforcer: Any = self.home._enforcer
            enforcer.begin = enforcer.check_release = lambda *given: None
            await super().phase(part, epoch)


def test_a_phase_that_was_not_agreed_on_accuses_whoever_has_the_earlier_ones(tmp_path: Path) -> None:
    """By itself it could be one after a crash; all that the same process signed before it show otherwise."""
    federation = Federation(tmp_path, PLAN, parties=PAIR)
    plain = federation.coordinator()
    bank = Again(replace(federation.server, data=None))
    bank.config, bank.own = plain.config, plain.own
    clinic = federation.member("clinic")

    async def play() -> list[Any]:
        async with asyncio.timeout(240):
            return await asyncio.gather(bank.run(), clinic.run(), return_exceptions=True)

    found = asyncio.run(play())
    assert isinstance(found[1], AgreementError) and "begins again" in str(found[1])
    verdict, said = judged(tmp_path / "clinic")
    assert verdict == "violated" and said[0].endswith("; signed by bank")
    evidence = tmp_path / "clinic" / "evidence.jsonl"
    line = json.loads(evidence.read_text())
    for change in ({"epoch": 1}, {"agreement": "0" * 64}, {"phase": "00" * 16}, {"part": "final"}):
        evidence.write_text(json.dumps(line | change) + "\n")
        assert judged(tmp_path / "clinic")[0] != "violated", change


# -- a folder that was put back -----------------------------------------------------------------------------


@pytest.mark.parametrize("older", [True, False], ids=["put back", "as it was"])
def test_others_are_told_of_a_folder_that_was_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """A party dies before its third epoch; its folder is put back as it was before the second."""
    saved, begin = tmp_path / "saved", Member._begin

    async def saving(self: Member, fields: dict[str, Any]) -> None:
        if (fields["part"], fields["epoch"]) == ("epoch", 2) and not saved.exists():
            shutil.copytree(self.folder.path, saved)
        await begin(self, fields)

    async def play() -> list[str]:
        found = processes(Federation(tmp_path / "run", PLAN.with_changes(epochs=3), parties=PAIR))
        for each in found.values():
            each.start()
        clinic = found["clinic"]
        clinic.crash_when_told("begin", 4)  # prepare, two epochs, and this one
        async with asyncio.timeout(240):
            await clinic.crashed.wait()
        await clinic.crash()
        if older:
            shutil.rmtree(tmp_path / "run" / "clinic")
            shutil.copytree(saved, tmp_path / "run" / "clinic")
        clinic.start()
        await finish(found)
        return [each for each in found["bank"].said if "older ledger" in each]

    monkeypatch.setattr(Member, "_begin", saving)
    told = asyncio.run(play())
    assert len(told) == older
    assert not older or told[0].startswith("clinic goes on with an older ledger: it ends at entry")


# -- certificates and lists of the authority ----------------------------------------------------------------


@pytest.fixture
def consortium(tmp_path: Path) -> Path:
    issue(create_authority(tmp_path / "ca", name="test"), ["bank", "clinic", "shop"], out=tmp_path)
    return tmp_path


@pytest.mark.parametrize("other", ["bank.securevfl", "*.securevfl", "Bank.SecureVFL", "bank.securevfl."])
def test_a_certificate_that_serves_as_another_is_nobodys(
    consortium: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """One authority copies into certificates whatever a request asks for, as other tools can be told to."""
    honest = authorities._alternative_names

    def generous(name: str, hosts: Sequence[str]) -> x509.SubjectAlternativeName:
        return x509.SubjectAlternativeName([*honest(name, hosts), x509.DNSName(other)])

    with monkeypatch.context() as patch:
        patch.setattr(authorities, "_alternative_names", generous)
        asked = consortium / "asked"
        authorities.request("mill", out=asked)
        with pytest.raises(CertificateError, match=r"neither a host name|reserved: names under"):
            sign(load_authority(consortium / "ca"), "mill", asked / "mill" / "mill.csr", out=consortium)
        issue(load_authority(consortium / "ca"), ["mill"], out=consortium / "theirs")
        patch.setattr(identity, "DOMAIN", "elsewhere")  # the liar's own process does not look at this
        patch.setattr(identity, "server_name", lambda name: f"{name}.securevfl")
        mill = load_identity(consortium / "theirs" / "mill")
    with pytest.raises(CertificateError, match="also serves as"):
        organisation_of(mill.certificate_pem)
    with pytest.raises(CertificateError, match="also serves as"):
        load_identity(consortium / "theirs" / "mill")
    shown = Introducer(mill, run="test", incarnation=new_incarnation()).introduction
    with pytest.raises(CertificateError, match="also serves as"):
        shown.check("test", load_identity(consortium / "bank"))

    async def play() -> str:
        federation = Federation(consortium / "run", PLAN, parties=("bank", "mill"))
        federation.server = replace(federation.server, identity=load_identity(consortium / "bank"))
        async with waiting(federation):
            attacker = Attacker(federation, mill)
            try:
                return await refusal(attacker.open(attacker.hello()))
            finally:
                await attacker.close()

    assert "also serves as" in asyncio.run(play())


def listed(consortium: Path, *names: str, at: timedelta = timedelta(0)) -> bytes:
    """The authority's list of these, made at a time."""
    folder = consortium / f"ca-{'-'.join(names)}"
    shutil.copytree(consortium / "ca", folder, dirs_exist_ok=True)
    made = authorities.now() + at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(authorities, "now", lambda: made)
        files = [consortium / each / f"{each}.pem" for each in names]
        revoke(load_authority(consortium / "ca"), files, folder=folder)
    return (folder / "ca.crl").read_bytes()


def test_a_process_that_runs_takes_newer_lists_and_no_older_ones(
    consortium: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A service runs for months: a list that comes meanwhile holds, and whoever is on it cannot undo it."""
    old, new = listed(consortium, "shop", at=timedelta(days=-1)), listed(consortium, "shop", "clinic")
    path, bank = consortium / "bank" / "ca.crl", load_identity(consortium / "bank")
    clinic = Introducer(load_identity(consortium / "clinic"), run="test", incarnation=new_incarnation())
    clinic.introduction.check("test", bank)
    other = create_authority(consortium / "other", name="other")
    revoke(other, [], folder=consortium / "other")
    foreign = (consortium / "other" / "ca.crl").read_bytes()
    put(path, old)
    clinic.introduction.check("test", bank)
    for content in (new, old, foreign, b"nothing", None):
        caplog.clear()
        put(path, content)
        with pytest.raises(CertificateError, match="clinic is revoked"):
            clinic.introduction.check("test", bank)
        warned = [each.levelno for each in caplog.records]
        assert warned == ([] if content == new else [logging.WARNING]), content


def put(path: Path, content: bytes | None) -> None:
    """Another file under the name, as `cp` or `mv` would leave it; none for None."""
    path.unlink(missing_ok=True)
    if content is not None:
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").rename(path)
        os.utime(path, ns=(0, zlib.crc32(content) << 20))
