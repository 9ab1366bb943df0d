"""Masked sums: a client's step against Flower's SecAgg+ functions, and tree sums against their floor.

Both sides of every ratio are measured in the same run. Set SECUREVFL_BENCH_PEER to a Python interpreter that
has flwr, or make build/bench-peers with it; without one the ratio to the peer is left out and said so.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from securevfl.protocols import (
    Driver,
    FixedPoint,
    PairwiseMaskSum,
    TwoTreeSum,
    run_round,
    run_setup,
)
from securevfl.protocols.stream import KeyStream
from securevfl.protocols.sums import shamir
from securevfl.protocols.sums.pairwise import MaskedInput, RelayedShares

PARTIES = 8
SIZES = (1_000_000, 10_000_000)
RING = FixedPoint(bits=32, fraction_bits=16)
PEER_GOAL = 11.0
FLOOR_GOAL = 3.0
PLOT = Path("build/benchmarks/protocols.png")

# What a SecAgg+ client does with its vector: quantise, one self mask, a mask per peer, reduce.
PEER = """
import json, os, sys, time
import numpy as np
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    parameters_addition, parameters_mod, parameters_subtraction)
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
size, peers, repeats = map(int, sys.argv[1:])
values = np.random.default_rng(0).normal(size=size)
seeds = [os.urandom(32) for _ in range(peers + 1)]
best = float("inf")
for _ in range(repeats):
    start = time.perf_counter()
    masked = quantize([values], 8.0, 1 << 22)
    masked = parameters_addition(masked, pseudo_rand_gen(seeds[0], 1 << 32, [values.shape]))
    for number, seed in enumerate(seeds[1:]):
        change = parameters_addition if number % 2 else parameters_subtraction
        masked = change(masked, pseudo_rand_gen(seed, 1 << 32, [values.shape]))
    masked = parameters_mod(masked, 1 << 32)
    best = min(best, time.perf_counter() - start)
print(json.dumps({"seconds": best, "bytes": masked[0].nbytes}))
"""


def best_of(repeats: int, act: Callable[[], object]) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def ready(protocol: PairwiseMaskSum | TwoTreeSum):
    nodes = {address: protocol.node(address) for address in protocol.addresses}
    run_setup(nodes)
    return nodes


def client_step(size: int, repeats: int) -> tuple[float, int]:
    """A worker's whole round before unmasking: encode, share seeds, open the neighbours' shares, mask."""
    protocol = PairwiseMaskSum(workers=PARTIES, fixed_point=RING)
    nodes = ready(protocol)
    values = np.random.default_rng(0).normal(size=size)
    seconds = []
    for number in range(repeats):
        start = time.perf_counter()
        worker = nodes[3].round(values, round=number)
        shares = worker.start()
        spent = time.perf_counter() - start
        others = {
            address: node.round(np.zeros(1) if address >= 0 else None, round=number)
            for address, node in nodes.items()
            if address != 3
        }
        driver = Driver({**others, 3: worker})
        for machine in others.values():
            driver.pending += machine.start()
        driver.pending += shares
        while not isinstance(driver.pending[0].message, RelayedShares):
            driver.step()
        relay = next(envelope for envelope in driver.pending if envelope.receiver == 3)
        start = time.perf_counter()
        (masked,) = worker.receive(relay)
        seconds.append(spent + time.perf_counter() - start)
    return min(seconds), masked.message.values.nbytes


def peer_python() -> str | None:
    found = os.environ.get("SECUREVFL_BENCH_PEER") or "build/bench-peers/bin/python"
    probe = [found, "-c", "import flwr.common.secure_aggregation"]
    if not Path(found).exists() or subprocess.run(probe, capture_output=True, check=False).returncode:
        return None
    return found


def peer_step(python: str, size: int, repeats: int) -> tuple[float, int]:
    command = [python, "-c", PEER, str(size), str(PARTIES - 1), str(repeats)]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return found["seconds"], found["bytes"]


def bench_client() -> None:
    python = peer_python()
    print(f"Pairwise client step, {PARTIES} parties: 1 self mask, {PARTIES - 1} pair masks")
    for size in SIZES:
        repeats = 60_000_000 // size  # short steps more often: other load on the machine then hardly shows
        seconds, sent = client_step(size, repeats)
        line = f"  {size:>10,} values: {seconds * 1e3:8.2f} ms, {sent / size:.0f} bytes per value"
        if python is not None:
            theirs, their_bytes = peer_step(python, size, repeats)
            ratio = theirs / seconds
            verdict = "met" if ratio >= PEER_GOAL else "missed"
            line += (
                f"; Flower SecAgg+ {theirs * 1e3:8.1f} ms, {their_bytes / size:.0f} bytes per value:"
                f" {ratio:.1f} times faster (goal {PEER_GOAL:.0f} {verdict})"
            )
        print(line)
    if python is None:
        print(
            "  peer not installed: python3 -m venv build/bench-peers"
            " && build/bench-peers/bin/pip install flwr, or set SECUREVFL_BENCH_PEER"
        )


def tree_floor(size: int) -> float:
    """Copy what the messages carry and draw the masks, nothing else; every buffer is new, as in the sum."""
    source = np.ones(size, dtype=np.uint64)
    stream = KeyStream.from_os_entropy()
    messages = 2 * (PARTIES - 1) + 1

    def act() -> None:
        kept = [stream.words(size) for _ in range(PARTIES)]
        kept += [source.copy() for _ in range(messages)]

    return best_of(5, act)


def bench_trees(size: int = 1_000_000) -> None:
    protocol = TwoTreeSum(workers=PARTIES)
    values = list(np.random.default_rng(0).normal(size=(PARTIES, size)))
    floor = tree_floor(size)
    seconds = best_of(5, lambda: protocol.sum(values))
    ratio = seconds / floor
    print(f"TwoTreeSum, {PARTIES} x {size:,} values, all roles in one process and thread")
    print(
        f"  {seconds * 1e3:.1f} ms; floor of copies and keystream {floor * 1e3:.1f} ms: ratio {ratio:.2f}"
        f" (goal {FLOOR_GOAL:.0f} {'met' if ratio <= FLOOR_GOAL else 'missed'})"
    )


def bench_setup() -> None:
    print(f"Setup, {PARTIES} parties")
    for hybrid in (False, True):
        protocol = PairwiseMaskSum(workers=PARTIES, hybrid=hybrid)
        seconds = best_of(10, lambda protocol=protocol: ready(protocol)) / PARTIES
        name = "X25519 + ML-KEM-768" if hybrid else "X25519"
        print(f"  key agreement, {name}: {seconds * 1e3:.2f} ms per party")
    points = range(1, PARTIES + 1)
    share = best_of(20, lambda: shamir.split(1234, 5, points))
    shares = shamir.split(1234, 5, points)[:5]
    recover = best_of(20, lambda: shamir.combine(shares, shamir.weights(points[:5])))
    print(f"  Shamir, 5 of {PARTIES}: share {share * 1e3:.3f} ms, recover {recover * 1e3:.3f} ms")


def round_seconds(protocol: PairwiseMaskSum | TwoTreeSum, size: int, repeats: int = 5) -> float:
    nodes = ready(protocol)
    values = list(np.random.default_rng(0).normal(size=(protocol.workers, size)))
    numbers = iter(range(repeats))
    return best_of(repeats, lambda: run_round(nodes, values, round=next(numbers)))


KINDS: dict[str, Callable[[int], PairwiseMaskSum | TwoTreeSum]] = {
    "two trees": lambda q: TwoTreeSum(workers=q),
    "pairwise, nobody drops": lambda q: PairwiseMaskSum(workers=q, threshold=q),
    "pairwise, recovering": lambda q: PairwiseMaskSum(workers=q),
    "pairwise, 6 neighbours": lambda q: PairwiseMaskSum(workers=q, neighbours=6),
}


def bench_growth() -> None:
    parties, sizes = (8, 16, 32, 64), (100, 1_000, 10_000, 100_000, 1_000_000)
    print("Seconds per round and party, all roles in one process")
    curves = {}
    for name, make in KINDS.items():
        by_parties = [round_seconds(make(q), 800) / q for q in parties]
        by_size = [round_seconds(make(8), size, 3) / 8 for size in sizes]
        curves[name] = (by_parties, by_size)
        shown = ", ".join(f"{q}: {s * 1e6:.0f} us" for q, s in zip(parties, by_parties, strict=True))
        print(f"  {name}, 800 values, parties {shown}")
        shown = ", ".join(f"{n:,}: {s * 1e3:.2f} ms" for n, s in zip(sizes, by_size, strict=True))
        print(f"  {name}, 8 parties, values {shown}")
    plot(parties, sizes, curves)


def recovery_round(
    protocol: PairwiseMaskSum, nodes, values, number: int, drop: int | None
) -> tuple[int, int]:
    """One round in which a worker may drop out before its masked input is in; messages and bytes sent."""
    machines = {
        address: node.round(values[address] if address >= 0 else None, round=number, shape=values[0].shape)
        for address, node in nodes.items()
    }
    driver = Driver(machines)
    driver.start()
    while driver.pending:
        if drop in driver.machines and isinstance(driver.pending[0].message, MaskedInput):
            driver.drop(drop)
        driver.step()
    machines[protocol.receivers[0]].result()
    sent = driver.transcript
    return len(sent), sum(len(envelope.message.to_bytes()) for envelope in sent)


def bench_recovery(parties: int = 5, shape: tuple[int, int] = (100, 16), repeats: int = 200) -> None:
    """What it costs that training can go on without a party: a batch of embeddings, round by round."""
    print(f"Pairwise round of training, {parties} parties, {shape[0]} x {shape[1]} values, in one process")
    values = list(np.random.default_rng(0).normal(size=(parties, *shape)))
    cases = {
        "everybody must stay": (parties, None),
        f"threshold {parties - 1}, nobody drops": (parties - 1, None),
        f"threshold {parties - 1}, one drops": (parties - 1, parties - 1),
    }
    for name, (threshold, drop) in cases.items():
        protocol = PairwiseMaskSum(workers=parties, threshold=threshold)
        nodes = ready(protocol)
        numbers = iter(range(repeats))
        seconds = best_of(
            repeats - 1,
            lambda p=protocol, n=nodes, left=numbers, d=drop: recovery_round(p, n, values, next(left), d),
        )
        messages, size = recovery_round(protocol, nodes, values, next(numbers), drop)
        print(f"  {name}: {seconds * 1e3:.2f} ms, {messages} messages, {size:,} bytes")
    seconds = best_of(50, lambda: ready(PairwiseMaskSum(workers=parties, threshold=parties - 1)))
    print(f"  key agreement at the beginning of a phase: {seconds * 1e3:.2f} ms")


def plot(parties, sizes, curves) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, (by_parties, by_size) in curves.items():
        left.loglog(parties, by_parties, marker="o", label=name)
        right.loglog(sizes, by_size, marker="o", label=name)
    left.set(xlabel="parties (800 values)", ylabel="seconds per round and party")
    right.set(xlabel="values (8 parties)")
    right.legend()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, dpi=120)
    plt.close(figure)
    print(f"  plotted in {PLOT}")


def main() -> None:
    bench_client()
    bench_trees()
    bench_setup()
    bench_recovery()
    bench_growth()


if __name__ == "__main__":
    main()
