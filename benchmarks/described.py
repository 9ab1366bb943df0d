"""Sealed training of a `data.toml` whose files are larger than memory: what reading and training take.

Two CSV files of ROWS people, COLUMNS numbers together, are written to FOLDER and removed afterwards; then a
process of its own reads the description and trains a linear model for three iterations, or for one pass where
the ring takes several. Run as

    python -m benchmarks.described ROWS COLUMNS [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.growth import ITERATIONS, MOST, peak

PARTIES = ("bank", "shop")
PIECE = 50_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int)
    parser.add_argument("columns", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read is not None:
        measure(given.read, given.rows, given.columns)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write(Path(folder), given.rows, given.columns // 2)
        command = [sys.executable, "-m", "benchmarks.described", str(given.rows), str(given.columns)]
        subprocess.run(
            [*command, "--read", folder],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
        )


def write(folder: Path, rows: int, width: int) -> None:
    """One file per party, its numbers of four digits, and their description."""
    generator, scores = np.random.default_rng(0), np.zeros(rows)
    text = ['id = "id"\nlabel = "y"\nlabel_holder = "shop"\ntask = "binary"\ntest = 0.01\nmissing = "error"']
    for party in PARTIES:
        names = [f"{party}{i}" for i in range(width)]
        text += [f'[parties.{party}]\nfile = "{party}.csv"\n[parties.{party}.columns]']
        text += [f"{name} = {{ bounds = [0, 1] }}" for name in names]
        with (folder / f"{party}.csv").open("wb") as file:
            labels = ["y"] if party == "shop" else []  # whose scores are whole by then
            file.write((",".join(["id", *names, *labels]) + "\n").encode())
            for start in range(0, rows, PIECE):
                here = scores[start : start + PIECE]
                write_piece(file, start, width, here, generator, labelled=bool(labels))
    (folder / "data.toml").write_text("\n".join(text))


def write_piece(
    file: BinaryIO, start: int, width: int, scores: Any, generator: np.random.Generator, *, labelled: bool
) -> None:
    """Some rows of bytes; scores take up the first number of each."""
    count = len(scores)
    ids = np.array([f"c{i:09d}" for i in range(start, start + count)], "S10").view(np.uint8)
    cells = np.empty((count, width, 7), np.uint8)
    cells[:, :, :3] = np.frombuffer(b",0.", np.uint8)
    cells[:, :, 3:] = generator.integers(48, 58, (count, width, 4), np.uint8)
    scores += (cells[:, 0, 3] - 48) / 10 - 0.45
    parts = [ids.reshape(count, -1), cells.reshape(count, -1)]
    if labelled:
        positive = scores + generator.normal(size=count) * 0.3 > 0
        parts.append(np.stack([np.full(count, 44, np.uint8), 48 + positive.astype(np.uint8)], 1))
    parts.append(np.full((count, 1), 10, np.uint8))
    file.write(np.ascontiguousarray(np.concatenate(parts, 1)).data)


def measure(folder: Path, rows: int, columns: int) -> None:
    """Reads and trains, and says what it took."""
    from securevfl import Plan, VerticalData, train
    from securevfl.algorithms.sealed.member import SealedMember

    begun = time.process_time()
    data = VerticalData.from_description(folder / "data.toml")
    reading = time.process_time() - begun
    print(f"read: {reading:.0f} s of processor time, {peak() / 1e9:.2f} GB at most", flush=True)
    moments: list[tuple[float, float]] = []
    learn = SealedMember._learn

    def timed(member: SealedMember, *given: Any) -> None:
        if member.index == 0:
            used = resource.getrusage(resource.RUSAGE_SELF)
            moments.append((used.ru_utime, used.ru_stime))
        learn(member, *given)

    SealedMember._learn = timed  # type: ignore[method-assign]
    batch = min(rows, MOST)
    plan = Plan(
        model="linear",
        epochs=ITERATIONS if rows <= MOST else 1,
        batch=batch,
        settings={"adversary": "semi-honest", "centring": 0.0},
    )
    found = train(data, plan, folder / "run")
    user, system = np.median(np.diff(moments, axis=0), axis=0) / (batch * columns) * 1e9
    print(f"an iteration: {user:.1f} ns of a record and column, and {system:.1f} ns in the system")
    print(
        f"{len(moments)} iterations, {peak() / 1e9:.2f} GB at most, AUC {found.test['auc']:.3f}", flush=True
    )


if __name__ == "__main__":
    main()
