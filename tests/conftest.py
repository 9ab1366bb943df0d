"""Shared fixtures. Torch uses one thread, so that results do not depend on the machine."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared and slow at times: how long an example takes says nothing about the code.
# The same examples every time, so that a red run means a changed line; HYPOTHESIS_PROFILE=search looks for
# new ones.
slow_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", slow_machine, derandomize=True)
settings.register_profile("search", slow_machine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_disk() -> None:
    """Tests end processes, not machines: what they write need not reach the disk, which takes long.

    Those about syncing put functions of their own in its place.
    """
    os.fsync = lambda descriptor: None


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["SECUREVFL_AUDIT_SECONDS"] = "0"  # training again has tests of its own


@pytest.fixture(scope="session")
def data_folder() -> str:
    """Folder with the papers' data sets, for slow tests only: set SECUREVFL_DATA to use it."""
    folder = os.environ.get("SECUREVFL_DATA")
    if not folder:
        pytest.skip("set SECUREVFL_DATA to the folder with a9a/, mnist/, ... to run this test")
    return folder
