"""What the Tab key offers for the values of options; nothing heavy is loaded for it."""

from __future__ import annotations

from pathlib import Path

from securevfl.settings.families import ALGORITHM_FAMILIES, MODELS
from securevfl.settings.plan import KINDS
from securevfl.settings.protocols import PROTOCOLS


def algorithms(incomplete: str) -> list[str]:
    """Names of algorithms."""
    return [name for name in ALGORITHM_FAMILIES if name.startswith(incomplete)]


def protocols(incomplete: str) -> list[str]:
    """Names of protocols."""
    return [name for name in PROTOCOLS if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Names of models."""
    return [name for name in MODELS if name.startswith(incomplete)]


def settings(incomplete: str) -> list[str]:
    """Names that --set takes, with the sign that follows."""
    return [f"{name}=" for name in KINDS if name.startswith(incomplete)]


def presets(incomplete: str) -> list[str]:
    """Names of ready sweeps."""
    from securevfl.sweeps.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def data_sets_and_draft(incomplete: str) -> list[str]:
    """What `securevfl data` takes: a data set, files, or the word that writes a description of them."""
    return [*(["draft"] if "draft".startswith(incomplete) else []), *data_sets(incomplete)]


def data_sets(incomplete: str) -> list[str]:
    """Data sets by name, then descriptions, tables and folders that begin alike."""
    from securevfl.data.registry import DATASETS

    known = [name for name in DATASETS if name.startswith(incomplete)]
    start = Path(incomplete)
    folder, stem = (start, "") if incomplete.endswith("/") else (start.parent, start.name)
    if not folder.is_dir():
        return known
    files = sorted(each for each in folder.iterdir() if each.name.startswith(stem))
    return known + [
        f"{each}/" if each.is_dir() else str(each)
        for each in files
        if each.is_dir() or each.suffix in (".toml", ".csv", ".tsv", ".gz", ".zip", ".parquet")
    ]
