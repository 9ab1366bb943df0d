"""What happens in the processes of the benchmark: train, audit, and say what came out."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import secrets
import shutil
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # loaded by the first optimiser; once here instead of in every process

from benchmarks.faults import (  # noqa: F401  (they declare faults)
    books,
    later,
    leaning,
    members,
    messages,
    noise,
    rebuilt,
    rooms,
    scoring,
    sealed,
    sums,
    training,
    unnamed,
    wider,
)
from benchmarks.faults.contract import FAULTS, restore
from benchmarks.faults.places import run_case, truth
from securevfl import audit
from securevfl.errors import SecureVFLError

CANARIES = 200
"""Few: the canaries of a gate have tests of their own, here the run is looked at."""
PATIENCE = 240.0
"""Seconds after which a process is ended."""
WITHOUT = "none"
"""Name of the fault that is none."""


def look(case: str, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Audits a run; what the report says, as far as it matters here."""
    start = time.perf_counter()
    try:
        data = truth(case, folder, seed)
        report = audit(folder, "none", data=data, canaries=CANARIES, seed=seed, isolated=False)
    except SecureVFLError as error:
        return {"verdict": "refused", "words": [f"{type(error).__name__}: {error}"], "cells": {}}
    cells = {
        f"{owner} > {observer}": cell["verdict"]
        for owner, about in report.owners.items()
        for observer, cell in about["observers"].items()
    }
    reasons = {reason for _, _, cell in report.cells() for reason in cell["reasons"]}
    reasons |= {reason for found in report.content["findings"] for reason in found["reasons"]}
    return {
        "verdict": report.verdict,
        "cells": cells,
        "words": sorted(reasons),
        "seconds": round(time.perf_counter() - start, 2),
    }


def faulty(name: str, case: str, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Puts a fault into this process, trains and audits; meant for a process of its own."""
    try:
        error = faulty_run(name, case, folder, seed)
    except Exception as crash:  # the fault does not follow the code: nothing that is left behind counts
        return {"crashed": f"{type(crash).__name__}: {crash}"}
    return {"refused": error} if error else {"seen": look(case, folder, seed)}


def _looked(case: str, folder: Path, seed: int = 0) -> dict[str, Any]:
    return {"seen": look(case, folder, seed)}


def pair(name: str, case: str, seed: int = 0) -> dict[str, Any]:
    """One fault in one case: trained and audited by the faulty code, then audited by sound code."""
    top = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        start = time.perf_counter()
        found = apart(faulty, name, case, top / "run", seed)
        line: dict[str, Any] = {"fault": name, "case": case, "seed": seed}
        if "refused" in found:
            line |= {"refused": found["refused"]}
        elif "crashed" in found:
            line |= {who: _broken({"broken": found["crashed"]}) for who in ("faulty", "clean")}
        else:
            line |= {"faulty": found.get("seen") or _broken(found)}
            clean = apart(_looked, case, top / "run", seed)
            line |= {"clean": clean.get("seen") or _broken(clean)}
        return line | {"seconds": round(time.perf_counter() - start, 2)}
    finally:
        shutil.rmtree(top, ignore_errors=True)


def sound(pairs: list[tuple[str, int]]) -> dict[str, Any]:
    """Trains each case with its seed, without a fault, and audits it once."""
    lines = []
    for case, seed in pairs:
        top = Path(tempfile.mkdtemp(prefix="sound-"))
        start = time.perf_counter()
        try:
            error = faulty_run(WITHOUT, case, top / "run", seed)
            said = {"refused": error} if error else {"clean": look(case, top / "run", seed)}
        except Exception as error:
            said = {"clean": _broken({"broken": f"{type(error).__name__}: {error}"})}
        finally:
            shutil.rmtree(top, ignore_errors=True)
        seconds = round(time.perf_counter() - start, 2)
        lines.append({"fault": WITHOUT, "case": case, "seed": seed, **said, "seconds": seconds})
    return {"lines": lines}


def _broken(found: dict[str, Any]) -> dict[str, Any]:
    return {"verdict": "broken", "words": [found["broken"]], "cells": {}}


# -- processes ----------------------------------------------------------------------------------------------


def apart(task: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What a task returns in a process of its own, which starts from sound code and ends with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.faults.work"])
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_inside, args=(writer, task, given), daemon=True)
    process.start()
    writer.close()
    found: dict[str, Any] = {"broken": f"no answer in {PATIENCE:.0f} s"}
    try:
        if reader.poll(PATIENCE):
            found = json.loads(reader.recv_bytes())
    except EOFError:
        found = {"broken": "the process ended without an answer"}
    if process.is_alive() and "broken" in found:
        process.kill()
    process.join()
    return found


def _inside(writer: Any, task: Callable[..., dict[str, Any]], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        found = task(*given)
    except Exception as error:
        found = {"broken": f"{type(error).__name__}: {error}"}
    writer.send_bytes(json.dumps(found).encode())


# -- what a fault changes -----------------------------------------------------------------------------------


def fingerprint(name: str, case: str, folder: Path) -> dict[str, Any]:
    """Digest of everything that a run leaves behind where all entropy is fixed; or why it was refused.

    Two runs of the same code have the same one, so a fault that does nothing shows.
    """
    fix_entropy()
    found = faulty_run(name, case, folder)
    if found:
        return {"digest": found}
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        part = path.relative_to(folder).parts[0]
        if path.is_file() and part in ("ledger", "views", "receipts", "models", "journal"):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    result = json.loads((folder / "result.json").read_text())
    privacy = {
        owner: f"{said['epsilon']:.6g}" for owner, said in result["privacy"].items() if said["epsilon"]
    }
    digest.update(json.dumps([result["test"], privacy]).encode())
    return {"digest": digest.hexdigest()}


def idle(name: str, case: str) -> dict[str, Any]:
    """Whether a fault leaves in a case what a sound run leaves; not where runs do not repeat themselves."""
    top = Path(tempfile.mkdtemp(prefix="idle-"))
    try:
        found = [apart(fingerprint, each, case, top / str(n)) for n, each in enumerate((WITHOUT, name))]
    finally:
        shutil.rmtree(top, ignore_errors=True)
    return {"idle": "digest" in found[0] and found[0] == found[1]}


def patched(names: Sequence[str]) -> dict[str, Any]:
    """Puts faults into this process, one after the other, and takes each out again; names those that fail."""
    broken = {}
    for name in names:
        try:
            FAULTS[name].patch()
        except Exception as error:
            broken[name] = f"{type(error).__name__}: {error}"
        restore()
    return {"broken": broken}


def faulty_run(name: str, case: str, folder: Path, seed: int = 0) -> str:
    """Trains with a fault; the error that refused it, or nothing."""
    if name != WITHOUT:
        FAULTS[name].patch()
    try:
        run_case(case, folder, seed)
    except SecureVFLError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fix_entropy() -> None:
    """Makes every random byte of this process follow from nothing: for processes that compare runs."""
    from securevfl.privacy import ledger
    from securevfl.protocols import keys
    from securevfl.protocols.sums import shamir

    drawn = [0]

    def draw(size: int | None = None) -> bytes:
        drawn[0] += 1
        return hashlib.shake_256(drawn[0].to_bytes(8, "big")).digest(32 if size is None else size)

    os.urandom = draw
    secrets.token_bytes = draw
    shamir.split.__kwdefaults__["draw"] = lambda end: int.from_bytes(draw(64), "big") % end
    for module, name in ((ledger, "Ed25519PrivateKey"), (keys, "X25519PrivateKey")):
        honest = getattr(module, name)
        made = types.SimpleNamespace(generate=lambda honest=honest: honest.from_private_bytes(draw(32)))
        setattr(module, name, made)
    torch.manual_seed(0)


# -- what came out ------------------------------------------------------------------------------------------


def outcome(seen: dict[str, Any], sound: dict[str, Any]) -> str:
    """`refused`, `violated`, `mentioned`, `not tested` or `silent`, against what a sound run is told."""
    if sound["verdict"] == "violated" and _bare(seen["words"]) <= _bare(sound["words"]):
        return "silent"  # a false alarm tells nothing
    if seen["verdict"] in ("violated", "refused", "broken"):
        return str(seen["verdict"])
    lost = [cell for cell, verdict in sound["cells"].items() if seen["cells"].get(cell, "") != verdict]
    if lost or not _bare(seen["words"]) <= _bare(sound["words"]):
        return "mentioned"
    return "not tested" if "not tested" in seen["cells"].values() else "silent"


def _bare(words: list[str]) -> set[str]:
    """Sentences without their figures."""
    return {re.sub(r"[\d.,e+-]+", "#", text) for text in words}
