"""Shared fixtures. Torch uses one thread, so that results do not depend on the machine."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Machines are shared and slow at times: how long an example takes says nothing about the code.
# The same examples every time, so that a red run means a changed line; HYPOTHESIS_PROFILE=search looks for
# new ones.
slow_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", slow_machine, derandomize=True)
settings.register_profile("search", slow_machine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Below a shell's `make test &` interrupts are ignored, and commands honour that; some tests interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is loaded with the tests stays until the end: nobody looks for garbage in it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class _Entropy:
    """In the place of `os.urandom`: the same bytes whenever the same test asks, others in every other test.

    Verdicts on noise are wrong at some level, and canaries certify 95 %: with fresh noise a sound change
    would fail once in a while. Other processes, forked ones too, have the operating system's bytes, else
    those of different organisations would draw alike.
    """

    def __init__(self) -> None:
        self._real, self._process = os.urandom, os.getpid()
        self.begin("collection")

    def begin(self, name: str) -> None:
        self._name, self._calls = name, itertools.count()

    def __call__(self, size: int) -> bytes:
        if os.getpid() != self._process:
            return self._real(size)
        return hashlib.shake_256(f"{self._name} {next(self._calls)}".encode()).digest(size)


_entropy = _Entropy()
if settings.get_current_profile_name() == "same":
    os.urandom = _entropy


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _entropy.begin(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
    """What several tests share does not depend on which of them comes first."""
    if request.scope == "function":
        return (yield)
    _entropy.begin(f"{request.node.nodeid} {fixturedef.argname} {getattr(request, 'param', '')}")
    made = yield
    _entropy.begin(f"{request._pyfuncitem.nodeid} after {fixturedef.argname}")
    return made


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
