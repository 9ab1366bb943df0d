"""Imports flow one way, inside the core too; no cycles; rooms stay light; every package is shipped."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {"protocols": ROOT / "protocols", "accountants": ROOT / "accountants", "attacks": ROOT / "attacks"}
CORE = ROOT / "securevfl"
# Lowest first; a room imports from rooms before it, never from one beside it or after it.
LAYERS = (
    ("errors", "interrupts"),
    ("files", "transfers"),
    ("protocols", "accountants"),
    ("privacy", "data", "models", "theory"),
    ("settings",),
    ("algorithms",),
    ("federation",),
    ("network",),
    ("attacks",),
    ("pages",),
    ("auditing",),
    ("sweeps", "sklearn", "trackers"),
    ("cli",),
    ("__main__",),
)
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file; CPython 3.11.7 can lose count of its recursion, then it is asked again."""
    for _ in range(5):
        try:
            return ast.parse(path.read_text())
        except SystemError:
            continue
    return ast.parse(path.read_text())


def _package(path: Path) -> str:
    for room, folder in ROOMS.items():
        if path.is_relative_to(folder):
            return ".".join(["securevfl", room, *path.relative_to(folder).parent.parts])
    return ".".join(["securevfl", *path.relative_to(CORE).parent.parts])


def _module(path: Path) -> str:
    return _package(path) if path.name == "__init__.py" else f"{_package(path)}.{path.stem}"


FILES = sorted([p for folder in ROOMS.values() for p in folder.rglob("*.py")] + list(CORE.rglob("*.py")))
MODULES = {_module(path): path for path in FILES}


def _statements(tree: ast.Module, *, at_run_time: bool) -> Iterator[ast.stmt]:
    """All statements; those that only a type checker sees are left out on request."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.stmt):
            yield node
        for _, value in ast.iter_fields(node):  # imports stand in lists of statements, never in expressions
            if isinstance(value, list) and value and not isinstance(value[0], ast.expr):
                left += [each for each in value if isinstance(each, ast.AST)]


@cache
def imported(path: Path, *, at_run_time: bool = False) -> frozenset[str]:
    """Modules that a file imports, also inside functions; relative ones resolved."""
    parts = _package(path).split(".")
    names: set[str] = set()
    for node in _statements(parsed(path), at_run_time=at_run_time):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            found = {f"{module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else module for name in found}
    return frozenset(names)


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "securevfl" and len(parts) > 1 else ""


def test_imports_flow_one_way() -> None:
    wrong = []
    for path in FILES:
        own = _room(_module(path))
        if not own:  # the package itself names everything and loads nothing
            continue
        assert own in LEVEL, f"{path} is in no room; LAYERS says where rooms stand"
        others = {name for name in imported(path) if _room(name) not in ("", own)}
        above = sorted(name for name in others if LEVEL[_room(name)] >= LEVEL[own])
        wrong += [f"{path.relative_to(ROOT)} ({own}) imports {above}"] if above else []
    assert not wrong


def test_no_cycles() -> None:
    """Not even through imports inside functions."""
    graph = nx.DiGraph(
        (module, name)
        for module, path in MODULES.items()
        for name in imported(path, at_run_time=True)
        if name in MODULES and module != "securevfl" and name != "securevfl"
    )
    cycles = [sorted(each) for each in nx.strongly_connected_components(graph) if len(each) > 1]
    assert not cycles


@pytest.mark.parametrize("name", ["errors.py", "files.py"])
def test_what_is_below_everything_needs_python_alone(name: str) -> None:
    roots = {module.partition(".")[0] for module in imported(CORE / name)}
    assert roots - {"securevfl"} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "room",
    ["securevfl", "securevfl.errors", "securevfl.protocols", "securevfl.accountants", "securevfl.sweeps"],
)
def test_light_rooms_load_no_torch(room: str) -> None:
    code = f"import sys, {room}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["securevfl.settings.plan", "securevfl.cli"])
def test_a_name_is_checked_before_anything_heavy_is_loaded(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'numpy', 'networkx'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_class_has_a_name_of_its_own() -> None:
    """One meaning per name, over the whole package; every paper's theorems have constants of their own."""
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(_module(path))
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert twice == {"Constants": ["securevfl.theory.afsgd", "securevfl.theory.vafl"]}


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
