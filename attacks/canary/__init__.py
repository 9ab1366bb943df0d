"""The canary audit: certified lower bounds of what the gate and training let out, beside the promise.

The names are loaded on first use, as they need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from securevfl.attacks.canary.audit import CanaryResult, canary_audits

__all__ = ["CanaryResult", "canary_audits"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'securevfl.attacks.canary' has no attribute {name!r}")
    from securevfl.attacks.canary import audit

    return getattr(audit, name)
