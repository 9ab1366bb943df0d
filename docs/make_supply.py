"""Makes `requirements.lock`, and from it the software bill of materials and a check against advisories.

    python docs/make_supply.py lock        # requirements.lock: what a process that trains needs, with hashes
    python docs/make_supply.py sbom        # build/sbom.json: CycloneDX 1.6
    python docs/make_supply.py advisories  # pip-audit on the lock, where it and its database are at hand

The lock names versions and hashes, never where they come from; it is for the platform that made it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
LOCK, SBOM = ROOT / "requirements.lock", ROOT / "build" / "sbom.json"
EXTRAS = ("network",)
_LINE = re.compile(r"^([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$")


def name_of(text: str) -> str:
    """A package's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", text).lower()


def needed() -> set[str]:
    """Everything that securevfl needs at run time, directly or not."""
    found: set[str] = set()
    waiting = [("securevfl", EXTRAS)]
    while waiting:
        package, extras = waiting.pop()
        for text in metadata.requires(package) or ():
            asked = Requirement(text)
            marks = [{"extra": extra} for extra in extras] or [{"extra": ""}]
            if asked.marker and not any(asked.marker.evaluate(mark) for mark in marks):
                continue
            if name_of(asked.name) not in found and name_of(asked.name) != "securevfl":
                found.add(name_of(asked.name))
                waiting.append((asked.name, tuple(asked.extras)))
    return found


def lock() -> None:
    """Asks pip for the hashes of the versions in constraints.txt, without installing anything."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", str(report)]
        given = ["-r", str(ROOT / "constraints.txt")]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *given], check=True)  # noqa: S603
        packages = json.loads(report.read_text(encoding="utf-8"))["install"]
    wanted, lines = needed(), []
    for each in packages:
        about, archive = each["metadata"], each["download_info"]["archive_info"]
        if name_of(about["name"]) in wanted:
            sha256 = archive["hashes"]["sha256"]
            lines.append(f"{name_of(about['name'])}=={about['version']} --hash=sha256:{sha256}")
    missing = wanted - {line.partition("==")[0] for line in lines}
    if missing:
        raise SystemExit(f"constraints.txt has no version of {', '.join(sorted(missing))}")
    LOCK.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")


def locked() -> list[tuple[str, str, str]]:
    """Name, version and hash of everything in the lock."""
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    found = [match.groups() for line in lines if (match := _LINE.match(line))]
    if len(found) != len(lines):
        raise SystemExit(f"{LOCK} has a line that is not of the form name==version --hash=sha256:...")
    return [(name, version, sha256) for name, version, sha256 in found]


def sbom() -> None:
    """Writes the bill of materials."""
    components: list[dict[str, Any]] = []
    for name, version, sha256 in locked():
        components.append(
            {
                "type": "library",
                "bom-ref": f"pkg:pypi/{name}@{version}",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version}",
                "hashes": [{"alg": "SHA-256", "content": sha256}],
                **_licence(name),
            }
        )
    own = {"type": "application", "bom-ref": "securevfl", "name": "securevfl"}
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, LOCK.read_text(encoding='utf-8'))}",
        "version": 1,
        "metadata": {"component": {**own, "version": metadata.version("securevfl")}},
        "components": components,
    }
    SBOM.parent.mkdir(exist_ok=True)
    SBOM.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{len(components)} components -> {SBOM.relative_to(ROOT)}\n")


def _licence(name: str) -> dict[str, Any]:
    """What a package says about its licence, where it is installed and says it in a word."""
    try:
        said = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return {}
    text = said.get("License-Expression") or ""
    return {"licenses": [{"expression": text}]} if text else {}


def advisories() -> None:
    """Looks the lock up in a database of advisories; what was not looked up does not count as passed."""
    if importlib.util.find_spec("pip_audit") is None:
        raise SystemExit("not checked: install pip-audit where its database can be reached")
    options = ["--require-hashes", "--disable-pip", "-r", str(LOCK)]
    done = subprocess.run([sys.executable, "-m", "pip_audit", *options], check=False)  # noqa: S603
    raise SystemExit(done.returncode)


COMMANDS = {"lock": lock, "sbom": sbom, "advisories": advisories}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]]()
