"""Imports flow one way, rooms stay light, and every package is shipped."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"protocols": ROOT / "protocols", "accountants": ROOT / "accountants", "attacks": ROOT / "attacks"}
CORE = ROOT / "securevfl"
# What each layer may import from inside the package, lowest first.
UPPER = ("auditing", "sweeps", "sklearn", "trackers", "cli")


def imported(path: Path) -> set[str]:
    """Modules that a file imports, absolute and relative ones resolved."""
    package = _package(path)
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def _package(path: Path) -> str:
    for room, folder in ROOMS.items():
        if path.is_relative_to(folder):
            return ".".join(["securevfl", room, *path.relative_to(folder).parent.parts])
    return ".".join(["securevfl", *path.relative_to(CORE).parent.parts])


def layer(module: str) -> str:
    parts = module.split(".")
    if parts[0] != "securevfl" or len(parts) == 1:
        return "outside"
    if parts[1] in ("errors", "files"):
        return parts[1]
    if parts[1] in ROOMS:
        return parts[1]
    return "upper" if parts[1] in UPPER else "core"


ALLOWED = {
    "errors": {"outside"},
    "files": {"outside", "errors"},
    "protocols": {"outside", "errors", "files", "protocols"},
    "accountants": {"outside", "errors", "files", "accountants"},
    "core": {"outside", "errors", "files", "protocols", "accountants", "core"},
    "attacks": {"outside", "errors", "files", "protocols", "accountants", "core", "attacks"},
    "upper": {"outside", "errors", "files", "protocols", "accountants", "core", "attacks", "upper"},
}
FILES = sorted([p for folder in ROOMS.values() for p in folder.rglob("*.py")] + list(CORE.rglob("*.py")))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_flow_one_way(path: Path) -> None:
    package = _package(path)
    own = layer(f"{package}.{path.stem}" if package == "securevfl" else package)
    if path == CORE / "__init__.py":
        return
    wrong = {name for name in imported(path) if layer(name) not in ALLOWED[own]}
    assert not wrong, f"{path} ({own}) imports {sorted(wrong)}"


@pytest.mark.parametrize("name", ["errors.py", "files.py"])
def test_what_is_below_everything_needs_python_alone(name: str) -> None:
    roots = {module.partition(".")[0] for module in imported(CORE / name)}
    assert roots - {"securevfl"} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "room", ["securevfl", "securevfl.errors", "securevfl.protocols", "securevfl.accountants"]
)
def test_light_rooms_load_no_torch(room: str) -> None:
    code = f"import sys, {room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_package_is_shipped() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {_package(path) for path in FILES if path.name == "__init__.py"}
    assert found == listed


def test_exports_exist() -> None:
    import securevfl
    from securevfl import accountants, attacks, data, models, protocols

    for module in (securevfl, protocols, accountants, attacks, data, models):
        for name in module.__all__:
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = securevfl.nothing
