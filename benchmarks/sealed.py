"""Sealed training: products, an iteration by role, bytes, checks; with --full a million records.

Times are processor seconds, the best of some rounds, so that other load hardly shows. The peer is
SecretFlow's SPU with protocol SEMI2K: set SECUREVFL_BENCH_SPU to a Python interpreter that has it, or make
build/bench-spu; without one the ratio is left out and said so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.protocols import Envelope, SealedDealer, SealedParty, SealedProtocol, drive
from securevfl.protocols.sealed import CheckedDealer, CheckedParty, logistic_series
from securevfl.protocols.sealed.protocol import ring_product

RECORDS, WIDTH, PARTIES = 32_561, 41, 3  # a9a over three parties
STD = 116 * 2**42
ROUNDS = 12
LIMB = 22
GOAL_SECONDS = 0.1
PEER_ROWS = 4096
PEER_GOAL = 20.0
PEER_INSTALL = "python3 -m venv build/bench-spu && build/bench-spu/bin/pip install spu"

# Gradient descent of logistic regression on secret features, labels and weights, all parties as threads of
# one process. Four steps less one: sharing the inputs and opening the result do not count. The fastest of
# SPU's three ways to the logistic function is taken.
PEER = """
import json, sys, time
import jax, numpy as np, spu
from spu.utils import frontend, simulation
rows, columns, parties, repeats = map(int, sys.argv[3:])
generator = np.random.default_rng(0)
features = generator.uniform(-1, 1, (rows, columns)) / columns**0.5
inputs = features, generator.integers(0, 2, rows).astype(float), np.zeros(columns)

def compiled(steps):
    def train(x, y, w):
        for _ in range(steps):
            w = w - x.T @ (jax.nn.sigmoid(x @ w) - y) / rows
        return w
    secret = [spu.Visibility.VIS_SECRET] * 3
    made, _ = frontend.compile(
        frontend.Kind.JAX, train, inputs, {}, ["x", "y", "w"], secret, lambda out: ["out"])
    return made

def seconds(made, mode):
    protocol = getattr(spu.ProtocolKind, sys.argv[1])
    config = spu.RuntimeConfig(protocol=protocol, field=spu.FieldType.FM64)
    config.sigmoid_mode = mode
    simulator = simulation.Simulator(parties, config)
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        simulator(made, *inputs)
        best = min(best, time.process_time() - start)
    return best

one, four = compiled(1), compiled(4)
kinds = [getattr(spu.RuntimeConfig, "SIGMOID_" + name) for name in sys.argv[2].split()]
steps = {str(kind): (seconds(four, kind) - seconds(one, kind)) / 3 for kind in kinds}
kind = min(steps, key=steps.get)
print(json.dumps({"seconds": steps[kind], "sigmoid": kind, "version": spu.__version__}))
"""


def best(act: Callable[[], Any], rounds: int = ROUNDS) -> tuple[float, Any]:
    """Least processor time of some calls, and the last result."""
    seconds, result = float("inf"), None
    for _ in range(rounds):
        start = time.process_time()
        result = act()
        seconds = min(seconds, time.process_time() - start)
    return seconds, result


def limb_product(limbs: list[np.ndarray], right: np.ndarray) -> np.ndarray:
    """The same through BLAS: 22-bit limbs as float64, 512 records at a time, so that sums stay exact."""
    low = np.uint64((1 << LIMB) - 1)
    parts = [((right >> np.uint64(LIMB * i)) & low).astype(np.float64) for i in range(3)]
    total = np.zeros((limbs[0].shape[0], right.shape[1]), np.uint64)
    for start in range(0, right.shape[0], 512):
        here = slice(start, start + 512)
        for i, left in enumerate(limbs):
            for j in range(3 - i):
                piece = (left[:, here] @ parts[j][here]).astype(np.uint64)
                total += piece << np.uint64(LIMB * (i + j))
    return total


def products() -> None:
    generator = np.random.default_rng(0)
    left = generator.integers(0, 2**64, (WIDTH, RECORDS), dtype=np.uint64)
    low = np.uint64((1 << LIMB) - 1)
    limbs = [((left >> np.uint64(LIMB * i)) & low).astype(np.float64) for i in range(3)]
    rows = np.ascontiguousarray(left.T)
    print(f"ring product, {WIDTH} x {RECORDS:,} by k columns, milliseconds")
    print(f"{'k':>4} {'numpy @, rows first':>22} {'BLAS limbs':>12} {'ring_product':>14}")
    for columns in (1, 10):
        right = generator.integers(0, 2**64, (RECORDS, columns), dtype=np.uint64)
        naive, wanted = best(lambda right=right: rows.T @ right, 3)
        through_blas, limbed = best(lambda right=right: limb_product(limbs, right), 5)
        ours, found = best(lambda right=right: ring_product(left, right))
        if not (np.array_equal(found, wanted) and np.array_equal(limbed, wanted)):
            raise SystemExit("products differ")
        print(f"{columns:>4} {naive * 1e3:>22.1f} {through_blas * 1e3:>12.1f} {ours * 1e3:>14.1f}")


class Federation:
    """All roles of the protocol in one process, with processor time by role."""

    def __init__(self, parties: int, records: int, width: int, outputs: int = 1) -> None:
        generator = np.random.default_rng(1)
        self.protocol = SealedProtocol(
            widths=(width,) * parties,
            static=(True,) * parties,
            clips=(1.0,) * parties,
            label_holder=0,
            records=records,
            batch=records,
            outputs=outputs,
            series=logistic_series(),
            share_stds=((STD,) * parties,) * parties,
        )
        limit = int(2**14 / width**0.5)
        self.operands = [
            generator.integers(-limit, limit, (width, records), dtype=np.int32) for _ in range(parties)
        ]
        self.scores = [generator.standard_normal((records, outputs)) for _ in range(parties)]
        self.labels = generator.integers(0, 2, (records, outputs)).astype(float)
        self.dealer = SealedDealer(self.protocol)
        self.parties = [SealedParty(self.protocol, m, operand=rows) for m, rows in enumerate(self.operands)]
        self.bytes = {"dealer": 0, "pair": 0}
        self.time = {"dealer": 0.0, "member": 0.0}
        self.deliver([party.setup() for party in self.parties], self.dealer.setup())
        self.number = 0

    def deliver(self, machines: list[Any], pending: list[Envelope]) -> None:
        for envelope in drive(machines, pending):
            who = "dealer" if envelope.sender < 0 else "pair"
            self.bytes[who] += sum(
                v.nbytes for v in vars(envelope.message).values() if isinstance(v, np.ndarray)
            )

    def iterate(self) -> None:
        start = time.process_time()
        dealt = self.dealer.deal(round=self.number)
        middle = time.process_time()
        machines = [
            party.round(round=self.number, scores=self.scores[m], labels=self.labels if m == 0 else None)
            for m, party in enumerate(self.parties)
        ]
        self.bytes = {"dealer": 0, "pair": 0}
        self.deliver(machines, dealt)
        self.time = {"dealer": middle - start, "member": time.process_time() - middle}
        self.number += 1


def iteration() -> None:
    federation = Federation(PARTIES, RECORDS, WIDTH)
    seconds, _ = best(federation.iterate)
    pairs = PARTIES * (PARTIES - 1)
    print(f"\none full-batch iteration, {RECORDS:,} records, {PARTIES} parties of {WIDTH} columns")
    print(f"all roles in one process  {seconds:.3f} s (goal {GOAL_SECONDS})")
    print(f"  of it the dealer        {federation.time['dealer']:.3f} s (last round)")
    print(f"  each member             {federation.time['member'] / PARTIES:.3f} s (last round)")
    print(f"bytes per ordered pair    {federation.bytes['pair'] / pairs / RECORDS:.2f} per record")
    print(f"bytes from the dealer     {federation.bytes['dealer'] / RECORDS:.2f} per record, to all members")
    print(f"microseconds per record   {seconds / RECORDS * 1e6:.2f}")


class Checked(Federation):
    """The same where members may cheat: proofs at set-up, every opening authenticated."""

    def __init__(self, parties: int, records: int, width: int, outputs: int = 1) -> None:
        super().__init__(parties, records, width, outputs)
        self.protocol = dataclasses.replace(self.protocol, checked=True)
        self.dealer = CheckedDealer(self.protocol)
        self.parties = [
            CheckedParty(self.protocol, m, operand=rows, labels=self.labels if m == 0 else None)
            for m, rows in enumerate(self.operands)
        ]
        self.deliver([self.dealer.session(), *(party.setup() for party in self.parties)], [])

    def iterate(self) -> None:
        machines = [
            party.round(round=self.number, scores=self.scores[m]) for m, party in enumerate(self.parties)
        ]
        self.bytes = {"dealer": 0, "pair": 0}
        self.deliver([self.dealer.iteration(round=self.number), *machines], [])
        self.number += 1


def against_cheats(records: int = RECORDS, width: int = 60, iterations: int = 80) -> None:
    """What it costs that members may cheat: both sides in one run, iterations in turn."""
    print(f"\nmembers that may cheat against members that are trusted, {records:,} records x {width} columns")
    titles = f"{'members':>8} {'outputs':>8} {'set-up s':>16} {'iteration ms':>16} {'ratio':>6}"
    print(f"{titles} {'bytes/record':>14} {'ratio':>6} {f'run of {iterations}':>10}")
    for parties, outputs in ((2, 1), (3, 1), (2, 4)):
        made, sides = [], []
        for kind in (Federation, Checked):
            start = time.process_time()
            sides.append(kind(parties, records, width, outputs))
            made.append(time.process_time() - start)
        made[1] -= made[0]  # the checked federation is first built like the other one
        spent = [0.0, 0.0]
        for _ in range(ROUNDS):
            for place, side in enumerate(sides):
                start = time.process_time()
                side.iterate()
                spent[place] += time.process_time() - start
        each = [total / ROUNDS for total in spent]
        sent = [sum(side.bytes.values()) / records for side in sides]
        whole = [first + iterations * one for first, one in zip(made, each, strict=True)]
        print(
            f"{parties:>8} {outputs:>8} {made[0]:>7.2f} {made[1]:>8.2f}"
            f" {each[0] * 1e3:>7.1f} {each[1] * 1e3:>8.1f}"
            f" {each[1] / each[0]:>6.2f} {sent[0]:>6.0f} {sent[1]:>7.0f} {sent[1] / sent[0]:>6.2f}"
            f" {whole[1] / whole[0]:>10.2f}"
        )
    print("goals: iteration and bytes at most 2.0 times, a run of 80 at most 2.3 times")


def peer_python() -> str | None:
    found = os.environ.get("SECUREVFL_BENCH_SPU") or "build/bench-spu/bin/python"
    probe = [found, "-c", "import spu.utils.simulation"]
    if not Path(found).exists() or subprocess.run(probe, capture_output=True, check=False).returncode:
        return None
    return found


def peer_step(python: str, protocol: str, kinds: str, *sizes: int) -> dict[str, Any]:
    """What SPU takes for one step, with the fastest of some sigmoids: rows, columns, parties, repeats."""
    command = [python, "-c", PEER, protocol, kinds, *map(str, sizes)]
    shown = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return dict(json.loads(shown.splitlines()[-1]))


def against_spu() -> None:
    """The same step, the same records, columns and parties, on both sides in one run."""
    python = peer_python()
    print(f"\none gradient step, {PEER_ROWS:,} records, {PARTIES} parties, {PARTIES * WIDTH} columns in all")
    if python is None:
        print(f"peer not installed: {PEER_INSTALL}, or set SECUREVFL_BENCH_SPU")
        return
    ours, _ = best(Federation(PARTIES, PEER_ROWS, WIDTH).iterate)
    peer = peer_step(python, "SEMI2K", "SEG3 MM1 REAL", PEER_ROWS, PARTIES * WIDTH, PARTIES, 3)
    checked, _ = best(Checked(PARTIES, PEER_ROWS, WIDTH).iterate)
    ratio = peer["seconds"] / checked
    print(f"sealed, members may cheat {checked / PEER_ROWS * 1e6:.2f} microseconds per record")
    print(f"sealed, noise included    {ours / PEER_ROWS * 1e6:.2f} microseconds per record")
    name = f"SPU {peer['version']}, SEMI2K"
    kind = peer["sigmoid"].rpartition(".")[2]
    print(f"{name:<25} {peer['seconds'] / PEER_ROWS * 1e6:.2f} microseconds per record ({kind})")
    verdict = "met" if ratio >= PEER_GOAL else "missed"
    print(f"ratio, members may cheat  {ratio:.0f} times faster (goal {PEER_GOAL:.0f} {verdict})")


def million(records: int = 1_000_000, columns: int = 100) -> None:
    """Two iterations of the whole training at scale, with everybody in this process."""
    from securevfl.data import VerticalData
    from securevfl.federation.run import train
    from securevfl.settings.plan import Plan

    generator = np.random.default_rng(2)
    half = columns // 2
    blocks = [generator.uniform(-1, 1, (records, half)).astype(np.float32) for _ in range(2)]
    labels = (blocks[0][:, 0] + blocks[1][:, 0] > 0).astype(int)
    data = VerticalData.from_arrays(blocks, labels, bounds=(-1, 1), test_fraction=0.01)
    del blocks, labels
    start = time.perf_counter()
    run = train(data, Plan(algorithm="sealed", epochs=2, epsilon=1.0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\n{records:,} records x {columns} columns, two parties, two iterations in all")
    print(f"{time.perf_counter() - start:.1f} s, test AUC {run.test['auc']:.3f}")
    print(f"peak memory {peak:.2f} GB (goal 8)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="also a million records, about 5 GB")
    parser.add_argument("--records", type=int, default=1_000_000, help="records of the full part")
    options = parser.parse_args()
    products()
    iteration()
    against_cheats()
    against_spu()
    if options.full:
        million(options.records)


if __name__ == "__main__":
    main()
