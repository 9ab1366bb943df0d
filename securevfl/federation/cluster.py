"""The way to a Ray cluster, for sweeps and for simulations whose parties are actors.

Ray has no identities inside a cluster and runs whatever its members send: use it within one organisation
only.
"""

from __future__ import annotations

import os
import socket
from importlib import import_module
from typing import Any

from securevfl.errors import InputError, MissingExtra

REACHABLE_SECONDS = 5.0


def connect(address: str) -> Any:
    """Connects this process to a cluster and returns the module `ray`.

    Args:
        address: Address of a running cluster, ``auto`` for the one of this machine, ``local`` to start one
            here that ends with this process.

    Raises:
        MissingExtra: Ray is not installed.
        InputError: No cluster answers.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when Ray is imported
    try:
        ray: Any = import_module("ray")
    except ImportError as error:
        raise MissingExtra("--ray needs Ray: pip install 'securevfl[ray]'") from error
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {"address": address}
    try:
        _check_reachable(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"no Ray cluster at {address!r}: {first}; start one with 'ray start --head', or use local"
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Tries the port: Ray itself goes on trying a dead one for longer than anybody waits."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError("an address is HOST:PORT, auto or local")
    socket.create_connection((host.strip("[]"), int(port)), timeout=REACHABLE_SECONDS).close()
