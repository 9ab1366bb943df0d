"""Homomorphic sums: what worker, aggregator and key holder spend, against Paillier (phe), in one run.

Paillier is measured on a few values and scaled, since every value costs the same there. Set
SECUREVFL_BENCH_PEER to a Python interpreter that has phe (and gmpy2, which makes it several times faster), or
make build/bench-peers with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.protocols import CKKSSum
from securevfl.protocols.sums.bfv import PARAMETERS as BFV
from securevfl.protocols.sums.encryption import Encryption, Parameters

PARTIES = 8
CHUNKS = 8  # short rounds, the best of many: other load on the machine then hardly shows
ROUNDS = 20
GOAL_SECONDS = 0.5

PEER = """
import json, time
from phe import paillier
public, private = paillier.generate_paillier_keypair(n_length=3072)
best = {}
def timed(name, act):
    start = time.perf_counter(); result = act(); seconds = time.perf_counter() - start
    best[name] = min(best.get(name, seconds), seconds)
    return result
for value in [0.5, -1.25, 3.0, 7.5, 2.0, -9.0]:
    encoded = paillier.EncodedNumber.encode(public, value, precision=2**-20)
    number = timed("encrypt", lambda: public.encrypt(encoded))
    total = timed("add", lambda: number + number)
    timed("decrypt", lambda: private.decrypt(total))
print(json.dumps(best))
"""


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = act()
    return time.perf_counter() - start, result


def measure(parameters: Parameters) -> dict[str, float]:
    """Seconds per value of each step, the best of some rounds, and bytes per value."""
    key = Encryption.generate(parameters)
    worker = Encryption.from_public_key(parameters, key.public_key())
    aggregator = Encryption.without_key(parameters)
    size = CHUNKS * parameters.slots
    numbers = np.arange(size).astype(parameters.dtype) / (1 if parameters.exact else size)
    numbers = numbers.astype(parameters.dtype)
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        times: dict[str, float] = {}
        times["worker"], sent = timed(lambda: worker.encrypt(numbers))
        vectors = [worker.load(data) for data in sent]
        times["of which serialise"], _ = timed(lambda v=vectors: [worker.dump(vector) for vector in v])
        totals = [aggregator.load(data) for data in sent]
        times["add, per worker"], _ = timed(
            lambda s=sent, t=totals: [total.add_(aggregator.load(d)) for total, d in zip(t, s, strict=True)]
        )
        received = [aggregator.dump(total) for total in totals]
        times["decrypt"], _ = timed(lambda r=received: [key.decrypt(key.load(data)) for data in r])
        for name, seconds in times.items():
            best[name] = min(best.get(name, np.inf), seconds / size)
    best["bytes"] = sum(map(len, sent)) / size
    return best


def measure_peer() -> dict[str, float] | str:
    """Seconds per value with phe, or why there are none."""
    default = Path("build/bench-peers/bin/python")
    interpreter = os.environ.get("SECUREVFL_BENCH_PEER") or (str(default) if default.exists() else "")
    if not interpreter:
        install = f"python -m venv {default.parents[1]} && {default.parent}/pip install phe gmpy2"
        return f"peer not installed: {install}"
    done = subprocess.run([interpreter, "-c", PEER], capture_output=True, text=True)
    if done.returncode:
        return f"peer failed: {done.stderr.strip().splitlines()[-1]}"
    times: dict[str, float] = json.loads(done.stdout)
    return times


def main() -> dict[str, Any]:
    """Prints the table and returns the figures."""
    results = {"BFV 4096 [60,49]": measure(BFV), "CKKS 8192 [60,60]": measure(CKKSSum(workers=8).parameters)}
    peer = measure_peer()
    print("Homomorphic sums, seconds per million values")
    for name, steps in results.items():
        cells = ", ".join(f"{step} {1e6 * seconds:.3f}" for step, seconds in steps.items() if step != "bytes")
        print(f"  {name}: {cells}; {steps['bytes']:.1f} bytes per value")
    worker = 1e6 * results["BFV 4096 [60,49]"]["worker"]
    verdict = "met" if worker <= GOAL_SECONDS else "missed"
    print(f"  BFV per party: {worker:.3f} s, goal {GOAL_SECONDS} s {verdict}")
    if isinstance(peer, str):
        print(f"  Paillier (phe, 3072 bits): {peer}")
        return {"sums": results, "peer": None}
    print(f"  Paillier (phe, 3072 bits): {', '.join(f'{step} {1e6 * s:.0f}' for step, s in peer.items())}")
    for name, steps in results.items():
        ours = PARTIES * (steps["worker"] + steps["add, per worker"]) + steps["decrypt"]
        theirs = PARTIES * (peer["encrypt"] + peer["add"]) + peer["decrypt"]
        print(f"  {name}: {theirs / ours:,.0f} times faster than Paillier for {PARTIES} parties")
    return {"sums": results, "peer": peer}


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
