"""Jobs: everything that an attack gets, as files in a folder of its own, and the process that runs them.

The folder holds ``job.json`` (the attack's name, public facts, seed), ``auxiliary.npz`` and ``views/``. The
attack leaves ``guess.npz`` or ``error.txt``. Nothing is pickled in either direction, nothing names the run.

Run as a program, this module is the attack process: it takes job folders from standard input, one per line,
and answers each with lines ``progress <share>`` and one line ``done``; the result lies in the job's folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

import numpy as np

from securevfl.attacks.contract import Arrays, Attack, Evidence, Guess, Info
from securevfl.errors import AttackError, SecureVFLError
from securevfl.privacy.views import View

GUESS, ERROR = "guess.npz", "error.txt"
_KINDS = "biufU"  # plain numbers and text; objects would need pickle


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Writes arrays under their names."""
    np.savez(path, **{f"array/{name}": values for name, values in arrays.items()})  # type: ignore[arg-type]


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Reverses `save_arrays`; objects are refused."""
    with np.load(path, allow_pickle=False) as file:
        return {name.removeprefix("array/"): file[name] for name in file.files}


def check_guess(attack: type[Attack], guess: object) -> Guess:
    """A guess that is named arrays of plain values.

    Raises:
        AttackError: It is something else.
    """
    if not isinstance(guess, Mapping) or not guess:
        raise AttackError(f"{attack.name} returned {type(guess).__name__}; expected named arrays")
    for name, values in guess.items():
        if not isinstance(values, np.ndarray) or values.dtype.kind not in _KINDS:
            found = getattr(values, "dtype", type(values).__name__)
            raise AttackError(f"{attack.name} returned {name!r} as {found}; expected an array of numbers")
    return guess


def attack_generator(attack: type[Attack], info: Info, seed: int) -> np.random.Generator:
    """The attack's generator: another one for each attack, owner, observer and seed."""
    text = f"{attack.name}/{info.owner}/{info.observer}"
    words = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    return np.random.default_rng([seed, *words.tolist()])


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attack on one owner by one observer or coalition.

    Attributes:
        attack: The attack.
        info: The public facts.
        views: Observer -> folder of its view.
        auxiliary: The declared auxiliary data.
        seed: Seed of the attack's own choices.
    """

    attack: type[Attack]
    info: Info
    views: Mapping[str, Path]
    auxiliary: Arrays
    seed: int = 0

    def execute(self, progress: Callable[[float], None]) -> Guess:
        """Runs the attack in this process."""
        evidence = Evidence(
            info=self.info,
            views={observer: View(folder) for observer, folder in self.views.items()},
            auxiliary=self.auxiliary,
            rng=attack_generator(self.attack, self.info, self.seed),
            progress=progress,
        )
        return check_guess(self.attack, self.attack().run(evidence))

    def write(self, folder: Path) -> None:
        """Writes the job; views are linked where the file system allows it, else copied."""
        for observer, source in self.views.items():
            place = folder / "views" / observer
            place.mkdir(parents=True)
            for file in sorted(source.iterdir()):
                _link_or_copy(file, place / file.name)
        save_arrays(folder / "auxiliary.npz", self.auxiliary)
        content = {
            "attack": f"{self.attack.__module__}:{self.attack.__qualname__}",
            "info": self.info.to_json(),
            "observers": list(self.views),
            "seed": self.seed,
        }
        (folder / "job.json").write_text(json.dumps(content), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Reverses `write`."""
        content = json.loads((folder / "job.json").read_text(encoding="utf-8"))
        module, _, name = content["attack"].partition(":")
        return cls(
            attack=getattr(import_module(module), name),
            info=Info.from_json(content["info"]),
            views={observer: folder / "views" / observer for observer in content["observers"]},
            auxiliary=load_arrays(folder / "auxiliary.npz"),
            seed=content["seed"],
        )


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        target.chmod(0o600)


Report: TypeAlias = Callable[[float], None]


class AttackProcess:
    """One process that runs jobs, one after the other; started when needed, killed at a timeout."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: Job, *, timeout: float, progress: Report) -> Guess:
        """Runs a job.

        Raises:
            AttackError: The attack broke off, took too long, or returned something else than arrays.
        """
        with tempfile.TemporaryDirectory(prefix="attack-") as name:
            folder = Path(name)
            job.write(folder)
            self._serve(folder, timeout, progress, job.attack.name)
            if (folder / ERROR).exists():
                raise AttackError((folder / ERROR).read_text(encoding="utf-8"))
            return load_arrays(folder / GUESS)

    def _serve(self, folder: Path, timeout: float, progress: Report, name: str) -> None:
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise AttackError("the attack process has no pipes")
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            for line in process.stdout:
                word, _, share = line.strip().partition(" ")
                if word == "done":
                    return
                progress(float(share))
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        self.close()
        raise AttackError(
            f"{name} took longer than {timeout:g} s" if late.is_set() else f"the process of {name} died"
        )

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "securevfl.attacks.jobs"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=tempfile.gettempdir(),
            )
        return self._process

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __enter__(self) -> AttackProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class InProcess:
    """Runs jobs in this process: for tests and debugging, without isolation or timeout."""

    def run(self, job: Job, *, timeout: float, progress: Report) -> Guess:
        """Runs a job; see `AttackProcess.run`."""
        return job.execute(progress)

    def close(self) -> None:
        """Nothing to end."""


def main() -> None:
    """Serves jobs until standard input ends."""
    # What an attack prints must not be mistaken for a report.
    with os.fdopen(os.dup(1), "w", buffering=1) as reports:
        os.dup2(2, 1)

        def progress(share: float) -> None:
            reports.write(f"progress {share:.4f}\n")

        for line in sys.stdin:
            folder = Path(line.rstrip("\n"))
            try:
                save_arrays(folder / GUESS, Job.read(folder).execute(progress))
            except SecureVFLError as error:
                (folder / ERROR).write_text(str(error), encoding="utf-8")
            except Exception as error:
                (folder / ERROR).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            reports.write("done\n")


if __name__ == "__main__":
    main()
