"""``securevfl`` commands in processes of their own, forked from one that has loaded torch before."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_LOADED = [
    "securevfl.cli",
    "securevfl.network.coordinator",
    "securevfl.network.member",
    "torch.fx.experimental.symbolic_shapes",  # the first backward pass loads sympy with it
    "pydantic.type_adapter",
    "networkx",
    "sklearn.ensemble",
]
_CONTEXT.set_forkserver_preload(_LOADED)
# Waited for, so that its time counts as that of the tests.
atexit.register(multiprocessing.forkserver._forkserver._stop)


@contextmanager
def cold() -> Iterator[None]:
    """For forks of something else: there is one server, and its first caller says what it loads."""
    multiprocessing.forkserver._forkserver._stop()
    try:
        yield
    finally:
        multiprocessing.forkserver._forkserver._stop()
        _CONTEXT.set_forkserver_preload(_LOADED)


def _run(
    arguments: Sequence[str], folder: str, files: Sequence[str], environment: Mapping[str, str], first: str
) -> None:
    from securevfl.cli import main

    gc.freeze()  # what it was forked with is nobody's garbage
    os.chdir(folder)
    os.environ.update(environment)
    tempfile.tempdir = None
    exec(first, {})
    for number, name in enumerate((os.devnull, *files)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(name, flags, 0o600), number)
    # A shell that runs the tests in the background lets them ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["securevfl", *arguments]
    main()


def _file() -> str:
    """A file for what a process prints."""
    number, name = tempfile.mkstemp()
    os.close(number)
    atexit.register(os.unlink, name)
    return name


class Command:
    """One command in a process of its own; what `subprocess.Popen` offers, as far as tests need it.

    Args:
        arguments: What follows ``securevfl``.
        folder: Where it runs.
        out: A file for all that it prints; without it, `communicate` gives it.
        apart: True to keep what goes to standard error apart.
        environment: What it finds in its environment beside this process's.
        first: Python that runs in the process before the command.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path | str = ".",
        out: Path | None = None,
        *,
        apart: bool = False,
        environment: Mapping[str, str] | None = None,
        first: str = "",
    ) -> None:
        said = str(out or _file())
        files = [said, _file() if apart else said]
        self._files = files if apart else files[:1]
        own = {"OMP_NUM_THREADS": "1", **(environment or {})}
        given = [*arguments], str(Path(folder).resolve()), files, own, first
        self._process = _CONTEXT.Process(target=_run, args=given)
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    @classmethod
    def line(cls, code: str, folder: Path, out: Path) -> Command:
        """A line of a document: ``cd PLACE`` perhaps, then one ``securevfl`` command."""
        found = re.fullmatch(r"(?:cd (\S+)(?:;| &&|\n)\s*)?securevfl ([^\n]*)\n?", code)
        assert found is not None, code
        return cls(found[2].split(), folder / (found[1] or "."), out)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("securevfl", timeout or 0)
        return self.returncode

    def has_said(self, text: str) -> bool:
        """Waits until it has printed a text, or ended."""
        while text not in Path(self._files[0]).read_text():
            if self.poll() is not None:
                return text in Path(self._files[0]).read_text()
            time.sleep(0.02)
        return True

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        said = [Path(name).read_text() for name in self._files]
        return said[0], said[1] if len(said) > 1 else ""
