"""Secure vertical federated learning: train, account for what leaves each party, attack the result.

Names are loaded on first use, so that ``import securevfl.protocols`` does not load torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would be loaded before the command line can answer Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from securevfl.auditing import Report, audit
    from securevfl.data import VerticalData
    from securevfl.federation.recorder import Recorder
    from securevfl.federation.run import Run, load_run, train
    from securevfl.settings.plan import Plan

__version__ = "0.1.0"

_HOMES = {
    "Report": "securevfl.auditing",
    "VerticalData": "securevfl.data",
    "audit": "securevfl.auditing",
    "Plan": "securevfl.settings.plan",
    "Recorder": "securevfl.federation.recorder",
    "Run": "securevfl.federation.run",
    "train": "securevfl.federation.run",
    "load_run": "securevfl.federation.run",
}

__all__ = ["Plan", "Recorder", "Report", "Run", "VerticalData", "__version__", "audit", "load_run", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'securevfl' has no attribute {name!r}")
    from importlib import import_module

    from securevfl.errors import missing

    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise missing(error) from error


def __dir__() -> list[str]:
    return sorted(__all__)
