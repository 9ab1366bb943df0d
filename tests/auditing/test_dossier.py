"""The dossier: numbered, never overwritten, verifiable, and its public part tells nothing private."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from securevfl import Plan, Report, VerticalData, audit, train
from securevfl.auditing.auditor import check_folder
from securevfl.auditing.dossier import package_digest, public, read_key, verify_dossier, write_dossier
from securevfl.auditing.page import render, render_public
from securevfl.errors import InputError, RunError

DATA = "synthetic:rows=80,features=6,informative=4"


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    folder = tmp_path_factory.mktemp("dossier") / "run"
    plan = Plan(
        algorithm="vafl",
        epochs=1,
        batch=16,
        sigma=2.0,
        record_views=True,
        source={"data": DATA, "parties": 2},
    )
    train(VerticalData.load(DATA, parties=2), plan, folder)
    return folder, audit(folder, ["gradient-direction", "gradient-norm"], canaries=200, isolated=False)


def key_file(
    path: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
) -> Path:
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def test_dossiers_are_numbered_and_private(audited: tuple[Path, Report], tmp_path: Path) -> None:
    shutil.copytree(audited[0], tmp_path / "run")
    first, second = (write_dossier(audited[1], tmp_path / "run", auditor="A. Nother") for _ in range(2))
    assert first.name.endswith("-1") and second.name.endswith("-2") and first.parent.name == "audits"
    modes = {path.name: path.stat().st_mode & 0o777 for path in first.iterdir()}
    assert modes["report.html"] == modes["report.json"] == 0o600 and modes["public.html"] == 0o644
    found = verify_dossier(first)
    assert found["auditor"] == "A. Nother" and found["signed_by"] is None and len(found["ledgers"]) == 2
    assert found["software"]["package"] == package_digest()


@pytest.mark.parametrize("kind", ["p256", "ed25519"])
def test_a_signed_dossier_shows_every_change(audited: tuple[Path, Report], tmp_path: Path, kind: str) -> None:
    shutil.copytree(audited[0], tmp_path / "run")
    made = ec.generate_private_key(ec.SECP256R1()) if kind == "p256" else ed25519.Ed25519PrivateKey.generate()
    key = read_key(key_file(tmp_path / "key.pem", made))
    folder = write_dossier(audited[1], tmp_path / "run", key=key)
    assert len(verify_dossier(folder)["signed_by"]) == 64
    page = (folder / "report.html").read_text()
    (folder / "report.html").write_text(page.replace("no guarantee", "holds"))
    with pytest.raises(RunError, match=r"report\.html was changed after the audit"):
        verify_dossier(folder)
    (folder / "report.html").write_text(page)
    manifest = json.loads((folder / "dossier.json").read_text())
    (folder / "dossier.json").write_text(json.dumps({**manifest, "auditor": "Somebody Else"}))
    with pytest.raises(RunError, match="does not sign this dossier"):
        verify_dossier(folder)
    (folder / "signature.json").unlink()
    with pytest.raises(RunError, match=r"dossier\.json was changed"):
        verify_dossier(folder)
    (folder / "dossier.json").write_text(json.dumps(manifest))
    (folder / "more.txt").write_text("more")
    with pytest.raises(RunError, match="was added to the dossier"):
        verify_dossier(folder)


def test_keys_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="P-256 or an Ed25519"):
        read_key(key_file(tmp_path / "rsa.pem", rsa.generate_private_key(65537, 2048)))
    (tmp_path / "text.pem").write_text("no key")
    with pytest.raises(InputError, match="no private key"):
        read_key(tmp_path / "text.pem")
    with pytest.raises(RunError, match="is no dossier"):
        verify_dossier(tmp_path)


def test_the_public_part_keeps_private_figures_back(audited: tuple[Path, Report]) -> None:
    content = audited[1].content
    assert content["attacks"] and content["run"]["test"] and content["findings"]
    shown = public(content)
    text = json.dumps(shown) + render_public(shown)
    assert not {"attacks", "findings", "seen"} & shown.keys() and "test" not in shown["run"]
    assert shown["verdict"] == content["verdict"] and shown["canaries"] == content["canaries"]
    private = [
        a[name]
        for a in content["attacks"]
        for name in ("score", "low")
        if a[name] is not None and len(f"{a[name]:.4g}") > 5
    ]
    exact = [value for value in content["run"]["test"].values() if len(f"{value:.4g}") > 5]
    assert private or exact
    for figure in [*private, *exact]:
        assert f"{figure:.4g}" not in text
    for name in {a["name"] for a in content["attacks"]}:
        assert name not in text


def test_digests_of_private_files_tell_nothing(audited: tuple[Path, Report]) -> None:
    """Whoever guesses a record could otherwise compute the report and compare its digest."""
    folders = [write_dossier(audited[1], audited[0]) for _ in range(2)]
    manifests = [json.loads((folder / "dossier.json").read_text()) for folder in folders]
    salt = json.loads((folders[0] / "report.json").read_text())["salt"]
    assert len(salt) == 64
    for name in ("report.json", "report.html"):
        assert manifests[0]["files"][name] != manifests[1]["files"][name]
        assert salt in (folders[0] / name).read_text()
    for name in ("public.json", "public.html", "dossier.json"):
        assert salt not in (folders[0] / name).read_text()
    assert manifests[0]["files"]["public.json"] == manifests[1]["files"]["public.json"]


def test_that_a_replay_was_exact_enough_is_not_shown_to_others(audited: tuple[Path, Report]) -> None:
    content = json.loads(json.dumps(audited[1].content))
    content["owners"] = {"p1": content["owners"]["p1"]}
    (cell,) = content["owners"]["p1"]["observers"].values()
    found = []
    for verdict, reasons in (("holds", []), ("not tested", ["3 messages could not be replayed"])):
        content["verdict"] = verdict
        cell |= {"verdict": verdict, "reasons": reasons, "private": True, "exact_kinds": []}
        found.append(public(content))
        cell["power"] = 0.9  # depends on how many messages could be replayed
    assert found[0] == found[1] and found[0]["verdict"] == "not tested"
    content["verdict"] = cell["verdict"] = "violated"
    assert public(content)["verdict"] == "violated"


def test_the_first_page_begins_with_the_worst(audited: tuple[Path, Report]) -> None:
    content = audited[1].content
    assert content["words"][0] == (
        "p1 can work out the labels of p0: with every record it got the exact gradient, a number that "
        "depends on the label."
    )
    page = render(content)
    assert page.index("work out the labels") < page.index("canary</strong>") < page.index("Who promises what")
    assert 'class="verdict no-guarantee"' in page


def test_worthless_protection_is_never_green(audited: tuple[Path, Report]) -> None:
    content = json.loads(json.dumps(audited[1].content))
    content["verdict"] = "holds"
    cell = content["owners"]["p1"]["observers"]["p0"]
    cell |= {"verdict": "holds", "epsilon_upper": 1e5, "reasons": []}
    del content["owners"]["p0"]
    page = render(content)
    assert 'class="verdict poor"' in page and "holds, but the protection is worthless" in page
    assert '<strong class="holds">' not in page.split("What was tested on this run")[0]


def test_folders_that_are_no_whole_run(audited: tuple[Path, Report], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds 1 runs; name one of them"):
        check_folder(audited[0].parent)
    shutil.copytree(audited[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "ledger")
    with pytest.raises(RunError, match="is not whole: ledger/ is missing; copy the run again"):
        check_folder(tmp_path / "run")
    plan = tmp_path / "run" / "plan.toml"
    plan.write_text("delay_bound = 3\n" + plan.read_text())
    with pytest.raises(RunError, match="cannot be audited by this version"):
        check_folder(tmp_path / "run")
