"""Inference attacks on views, and the canary audit.

`ATTACKS` names every attack. It is built on first use, so that the statistics can be imported without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from securevfl.attacks.contract import Attack

    ATTACKS: dict[str, type[Attack]]

__all__ = ["ATTACKS"]


def __getattr__(name: str) -> Any:
    if name != "ATTACKS":
        raise AttributeError(f"module 'securevfl.attacks' has no attribute {name!r}")
    from securevfl.attacks.registry import ATTACKS

    return ATTACKS
