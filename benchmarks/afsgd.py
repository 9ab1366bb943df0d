"""AFSGD-VP: what masks cost in a whole run of a9a's size, and what SAGA remembers of a million records.

Times are processor seconds of one thread; both sides are measured in this run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from pathlib import Path

import torch

from securevfl import Plan, VerticalData
from securevfl.algorithms.resolve import resolve
from securevfl.data import make_synthetic
from securevfl.federation.folder import RunFolder
from securevfl.federation.schedule import Schedule, drive
from securevfl.federation.virtual import VirtualCarrier

WORKERS, EPOCHS = 8, 10
GOAL_MASKS, GOAL_BYTES = 3.0, 16


def seconds(data: VerticalData, protocol: str) -> float:
    """Processor time of a whole run of ten epochs, ledgers in memory."""
    plan = Plan(
        algorithm="afsgd",
        protocol=protocol,
        epochs=EPOCHS,
        batch=data.n_train // 100,
        scaling="none",
        unprotected=True,
    )
    carrier = VirtualCarrier(*resolve(plan, data))
    begun = time.process_time()
    drive(Schedule(carrier).train())
    return time.process_time() - begun


def masks(data: VerticalData) -> None:
    plain, masked = seconds(data, "plain-tree"), seconds(data, "two-tree")
    size = f"{data.n_train:,} x {sum(data.widths)}"
    print(f"AFSGD, {size}, {WORKERS} workers, {EPOCHS} epochs of 100 steps per worker:")
    print(f"  plain-tree {plain:.1f} s, two-tree {masked:.1f} s, {masked / plain:.2f} times;", end=" ")
    print(f"goal {GOAL_MASKS:g} times: {'met' if masked <= GOAL_MASKS * plain else 'MISSED'}")


def peak_bytes(data: VerticalData, algorithm: str) -> int:
    """Peak of what a run allocates, its data aside; ledgers go to disk."""
    plan = Plan(
        algorithm=algorithm,
        protocol="plain-tree",
        epochs=1,
        batch=data.n_train // 20,
        scaling="none",
        unprotected=True,
    )
    resolved, scaled = resolve(plan, data)
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        folder.create(resolved)
        tracemalloc.start()
        try:
            carrier = VirtualCarrier(resolved, scaled, folder=folder)
            drive(Schedule(carrier).train())
            carrier.close()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def memory(records: int) -> None:
    data = make_synthetic(rows=records * 5 // 4, features=6, parties=3)
    sgd, saga = peak_bytes(data, "afsgd"), peak_bytes(data, "afsaga")
    each = (saga - sgd) / data.n_train / len(data.parties)
    print(f"peak memory of a run on {data.n_train:,} records, 3 workers: SGD {sgd / 1e6:.0f} MB,", end=" ")
    print(f"SAGA {saga / 1e6:.0f} MB: {each:.1f} bytes per record and worker;", end=" ")
    print(f"goal {GOAL_BYTES}: {'met' if each <= GOAL_BYTES else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data-folder", type=Path, help="folder of a9a; without it, synthetic data of its size"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.data_folder is None:
        masks(make_synthetic(rows=32561 * 5 // 4, features=123, parties=WORKERS))
    else:
        masks(VerticalData.load("a9a", parties=WORKERS, folder=chosen.data_folder))
    memory(1_000_000)


if __name__ == "__main__":
    main()
