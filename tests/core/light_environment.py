"""An environment that holds what requirements-light.txt names, and nothing else of what is installed here."""

from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def light_packages() -> set[str]:
    """The packages of requirements-light.txt with everything that they need themselves."""
    lines = (ROOT / "requirements-light.txt").read_text().splitlines()
    waiting = [Requirement(line).name for line in lines if line and not line.startswith("#")]
    found: set[str] = set()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name not in found:
            found.add(name)
            needs = [Requirement(text) for text in distribution(name).requires or []]
            waiting += [r.name for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def link_packages(folder: Path) -> None:
    """Links the light packages into a folder, so that nothing is downloaded."""
    for name in light_packages():
        installed = distribution(name)
        tops = {file.parts[0] for file in installed.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            (folder / top).symlink_to(Path(str(installed.locate_file(top))).resolve())


def link_securevfl(folder: Path) -> None:
    """Links the package as it is installed: three rooms are folders of their own in the source."""
    package = folder / "securevfl"
    package.mkdir()
    for room in ("protocols", "accountants", "attacks"):
        (package / room).symlink_to(ROOT / room)
    for each in (ROOT / "securevfl").iterdir():
        (package / each.name).symlink_to(each)
