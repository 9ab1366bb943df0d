"""A job: everything that an attack process gets, as files in a folder of its own, and what it hands back.

The folder holds ``job.json`` (the attack's name, public facts, seed), ``auxiliary.npz`` and ``views/``. The
attack leaves ``guess.npz`` or ``error.txt``. Nothing is pickled in either direction, nothing names the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from securevfl.attacks.contract import Arrays, Attack, Evidence, Guess, Info
from securevfl.errors import AttackError
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
