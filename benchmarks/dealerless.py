"""Sealed training without a dealer: the work ahead and online, beside a peer; AUC with a dealer and without.

Times are processor seconds of all roles in one process. The peer is SecretFlow's SPU with protocol Cheetah,
which has no dealer either: set SECUREVFL_BENCH_SPU to a Python interpreter that has it, or make
build/bench-spu. With --utility RUNS: test AUC with a dealer and without at equal epsilon, by seed, on sets
from SECUREVFL_DATA (one folder per set), those of --sets; --kept FILE keeps every run there, and goes on from
it; --simulated leaves the encryption out, not its arithmetic (`benchmarks.clear`), which takes a tenth of the
time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.clear import in_the_clear
from benchmarks.scorecards import split_data
from benchmarks.sealed import PEER_INSTALL, RECORDS, Federation, peer_python, peer_step
from securevfl import Plan, VerticalData, train
from securevfl.protocols import drive
from securevfl.protocols.sealed import Kernel, logistic_series, party_of

PEER_ROWS, PEER_GOAL = 4096, 30.0
FOLDERS = {
    "a9a": "a9a",
    "uci-credit": "uci_credit",
    "adult": "adult",
    "give-me-some-credit": "give_me_some_credit",
    "magic": "magic",
    "bank": "bank_marketing",
}
"""Sets of --utility and their folders."""
NAMED = ("a9a", "uci-credit", "adult")
"""Those that the product knows; the others are read from described files."""
USUAL = ("a9a", "uci-credit")


def without_dealer(records: int = RECORDS, width: int = 60, rounds: int = 4) -> None:
    """Two members that encrypt, three of whom the third one deals: what is done ahead, and what remains."""
    print(f"\nwithout a dealer, {records:,} records x {width} columns, all roles in one process")
    print(f"{'members':>8} {'set-up s, MB':>14} {'ahead us, bytes':>18} {'online us, bytes':>18}")
    for parties in (2, 3):
        one = Dealerless(parties, records, width)
        made, ahead = one.spent(one.setup), one.spent(lambda one=one: one.prepare(rounds))
        online = one.spent(lambda one=one: [one.iterate() for _ in range(rounds)])
        each = [(s / rounds / records * 1e6, b / rounds / records) for s, b in (ahead, online)]
        figures = " ".join(f"{seconds:>10.2f} {size:>7.0f}" for seconds, size in each)
        print(f"{parties:>8} {made[0]:>7.2f} {made[1] / 1e6:>6.0f} {figures}")
    print("goals: two members 12 us and 220 bytes ahead, 0.5 us online; three members 1.0 us, 140 bytes")


class Dealerless:
    """Members alone."""

    def __init__(self, parties: int, records: int, width: int) -> None:
        federation = Federation(parties, 1, width)
        generator = np.random.default_rng(1)
        limit = int(2**14 / width**0.5)
        self.protocol = dataclasses.replace(
            federation.protocol,
            records=records,
            batch=records,
            series=Kernel() if parties == 2 else logistic_series(),
            share_stds=((116 << (32 if parties == 2 else 42),) * parties,) * parties,
            dealing="encrypted" if parties == 2 else "third",
        )
        operands = [
            generator.integers(-limit, limit, (width, records), dtype=np.int32) for _ in range(parties)
        ]
        self.scores = [generator.standard_normal((records, 1)) for _ in range(parties)]
        self.labels = generator.integers(0, 2, (records, 1)).astype(float)
        self.parties = [party_of(self.protocol, m, operand=rows) for m, rows in enumerate(operands)]
        self.bytes, self.number = 0, 0

    def spent(self, act: Callable[[], Any]) -> tuple[float, int]:
        """Processor seconds and bytes of messages."""
        before, start = self.bytes, time.process_time()
        act()
        return time.process_time() - start, self.bytes - before

    def _drive(self, machines: list[Any]) -> None:
        for envelope in drive(machines):
            values = vars(envelope.message).values()
            self.bytes += sum(v.nbytes for v in values if isinstance(v, np.ndarray))
            self.bytes += sum(len(v) for v in values if isinstance(v, bytes))

    def setup(self) -> None:
        self._drive([party.setup() for party in self.parties])

    def prepare(self, rounds: int) -> None:
        if self.protocol.dealing == "encrypted":
            self._drive([party.prepare([(n, None) for n in range(rounds)]) for party in self.parties])

    def iterate(self) -> None:
        given = enumerate(self.parties)
        self._drive(
            [
                party.round(round=self.number, scores=self.scores[m], labels=None if m else self.labels)
                for m, party in given
            ]
        )
        self.number += 1


def against_cheetah(width: int = 60) -> None:
    """One gradient step of two members, on both sides in one run; ours with what is made ahead for it.

    Of SPU's sigmoids only that of three segments is tried: with all of them it takes many minutes.
    """
    python = peer_python()
    print(f"\none gradient step, {PEER_ROWS:,} records, two members of {width} columns, no dealer")
    if python is None:
        print(f"peer not installed: {PEER_INSTALL}, or set SECUREVFL_BENCH_SPU")
        return
    one = Dealerless(2, PEER_ROWS, width)
    one.setup()
    ahead = one.spent(lambda: one.prepare(4))[0] / 4
    online = one.spent(lambda: [one.iterate() for _ in range(4)])[0] / 4
    peer = peer_step(python, "CHEETAH", "SEG3", PEER_ROWS, 2 * width, 2, 1)
    ours, theirs = ((ahead + online) / PEER_ROWS * 1e6, peer["seconds"] / PEER_ROWS * 1e6)
    ratio = theirs / ours
    print(f"sealed, ahead and online  {ours:.2f} microseconds per record")
    print(f"  of it online            {online / PEER_ROWS * 1e6:.2f}")
    print(f"SPU {peer['version']}, Cheetah    {theirs:.2f} microseconds per record")
    print(f"ratio                     {ratio:.0f} times faster (goal {PEER_GOAL:.0f})")


def loaded(name: str, seed: int) -> VerticalData:
    """A set between two parties, half of the columns each."""
    if name in NAMED:
        place = Path(os.environ["SECUREVFL_DATA"]) / FOLDERS[name]
        return VerticalData.load(name, parties=2, seed=seed, folder=place)
    return split_data(FOLDERS[name], seed, 2)


def utility(
    runs: int, kept: Path, *, simulated: bool, sets: Sequence[str] = USUAL, epsilon: float = 1.0
) -> None:
    """Test AUC with a dealer and without, the simulator's exact figure, by seed."""
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    found = {(row["set"], row["seed"], row["dealer"]): row["auc"] for row in rows}
    for seed, name in itertools.product(range(runs), sets):
        missing = [dealer for dealer in ("auto", "none") if (name, seed, dealer) not in found]
        data = loaded(name, seed) if missing else None
        for dealer in missing:
            settings = {"algorithm": "sealed", "epsilon": epsilon, "seed": seed, "dealer": dealer}
            with in_the_clear() if simulated else nullcontext():
                auc = found[name, seed, dealer] = train(data, Plan.from_flat(settings)).test["auc"]
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"set": name, "seed": seed, "dealer": dealer, "auc": auc}) + "\n")
    compare(found, epsilon)


def compare(found: dict[tuple[str, int, str], float], epsilon: float) -> None:
    """Means, and the mean difference of runs with the same seed with its standard error."""
    print(f"\ntest AUC at epsilon {epsilon:g}, two members, by seed of the split")
    print(f"{'set':<12} {'runs':>5} {'dealer':>8} {'none':>8} {'difference':>11} {'std error':>10}")
    for name in FOLDERS:
        seeds = [s for n, s, dealer in found if n == name and dealer == "none" and (n, s, "auto") in found]
        if len(seeds) < 2:
            continue
        dealt, alone = (np.array([found[name, s, dealer] for s in seeds]) for dealer in ("auto", "none"))
        apart = alone - dealt
        error = apart.std(ddof=1) / len(apart) ** 0.5
        figures = f"{dealt.mean():>8.4f} {alone.mean():>8.4f} {apart.mean():>+11.4f} {error:>10.4f}"
        print(f"{name:<12} {len(seeds):>5} {figures}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--utility", type=int, default=0, metavar="RUNS")
    parser.add_argument("--kept", type=Path, default=Path("build/dealerless.jsonl"))
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--sets", nargs="+", choices=FOLDERS, default=USUAL)
    options = parser.parse_args()
    if options.utility:
        utility(options.utility, options.kept, simulated=options.simulated, sets=options.sets)
        return
    without_dealer()
    against_cheetah()


if __name__ == "__main__":
    main()
