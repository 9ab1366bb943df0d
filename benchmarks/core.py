"""The price of federation in one process: exchanges, synchronous steps and the ledger, against plain torch.

Every ratio compares two sides that were measured in this run, in processor time of one thread; the best of
several rounds counts, because load from others only ever adds time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch

from securevfl import Plan, VerticalData
from securevfl.data import make_synthetic
from securevfl.engine import Engine
from securevfl.ledger import Ledger
from securevfl.resolve import resolve

ROUNDS = 5


def engine_for(data: VerticalData, **changes: object) -> Engine:
    plan, scaled = resolve(Plan(scaling="none", **changes), data)  # type: ignore[arg-type]
    return Engine(plan, scaled)


def seconds_per_step(data: VerticalData, **changes: object) -> tuple[float, float]:
    """Processor time of one server step without its ledger, and the time that the ledger took."""
    ledger_time = 0.0
    append = Ledger.append

    def timed(self: Ledger, record: object) -> object:
        nonlocal ledger_time
        begun = time.process_time()
        head = append(self, record)  # type: ignore[arg-type]
        ledger_time += time.process_time() - begun
        return head

    engine = engine_for(data, **changes)
    engine._phase(lambda role: role.prepare())
    engine._phase(lambda role: role.epoch())  # warm-up
    before = getattr(engine.server, "iteration", 0) or engine.server.processed
    Ledger.append = timed  # type: ignore[assignment, method-assign]
    try:
        begun = time.process_time()
        engine._phase(lambda role: role.epoch())
        total = time.process_time() - begun
    finally:
        Ledger.append = append  # type: ignore[method-assign]
    after = getattr(engine.server, "iteration", 0) or engine.server.processed
    steps = after - before
    if not hasattr(engine.server, "iteration"):
        steps = -(-steps // engine.plan.batch)
    return (total - ledger_time) / steps, ledger_time / steps


def by_hand(data: VerticalData, batch: int) -> float:
    """The torch work of one exchange: one encoder, the head on stored embeddings, two steps."""
    engine = engine_for(data, batch=batch)
    encoder, head = engine.setup.encoders["p1"], engine.setup.head
    first, second = (
        torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=1e-4) for module in (encoder, head)
    )
    inputs = torch.tensor(data.train[1])
    labels = torch.tensor(data.y_train)
    table = torch.zeros((data.n_train, len(data.parties), engine.plan.embedding))
    orders = [torch.randperm(data.n_train)[:batch] for _ in range(50)]
    begun = time.process_time()
    for rows in orders:
        values = encoder(inputs[rows])
        table[rows, 1] = values.detach()
        stored = table[rows].requires_grad_()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            head(stored.flatten(1))[:, 0], labels[rows]
        )
        second.zero_grad(set_to_none=True)
        loss.backward()
        second.step()
        first.zero_grad(set_to_none=True)
        assert stored.grad is not None
        values.backward(stored.grad[:, 1])
        first.step()
        loss.item()
    return (time.process_time() - begun) / len(orders)


def exchange() -> None:
    data = make_synthetic(rows=4000, features=123, parties=2)
    hand = min(by_hand(data, 100) for _ in range(ROUNDS))
    whole, ledger = min(seconds_per_step(data, batch=100, label_holder="server") for _ in range(ROUNDS))
    print("asynchronous exchange (2 parties, batch 100, linear):")
    print(f"  torch work by hand {hand * 1e6:.0f} us; exchange without ledger {whole * 1e6:.0f} us")
    goal = 1.3 * hand + 1e-4
    print(f"  goal 1.3 x hand + 100 us = {goal * 1e6:.0f} us: {'met' if whole <= goal else 'MISSED'}")
    print(f"  ledger in memory (two entries, each hashed and signed) {ledger * 1e6:.0f} us")


def synchronous() -> None:
    print("synchronous step, 7 parties, whole runtime with messages, gates, ledgers, against centralised:")
    cases = ((124, "linear", (), 100, 2), (784, "mlp", (18,), 600, 10))
    for features, model, hidden, batch, classes in cases:
        data = make_synthetic(rows=batch * 10, features=features, classes=classes, parties=7)
        shared = {"batch": batch, "model": model, "hidden": hidden or (32,)}
        central = min(seconds_per_step(data, algorithm="central", **shared)[0] for _ in range(ROUNDS))
        whole, ledger = min(seconds_per_step(data, algorithm="vafl-sync", **shared) for _ in range(ROUNDS))
        print(
            f"  {model} {features}, batch {batch}: {central * 1e6:.0f} us centralised, "
            f"{whole / central:.2f} times without ledger, ledger {ledger * 1e6:.0f} us"
        )
    print("  (the batched computation alone: python -m benchmarks.models)")


def syncing() -> None:
    from securevfl.accountants import ReleaseRecord

    with tempfile.TemporaryDirectory() as folder:
        times = {}
        for name, path in (("memory", None), ("disk", Path(folder) / "p1.jsonl")):
            ledger = Ledger("p1", path)
            record = ReleaseRecord(owner="p1", observers=("p0",), mechanism="exact", vectors=1)
            begun = time.perf_counter()
            for _ in range(200):
                ledger.append(record)
            times[name] = (time.perf_counter() - begun) / 200
            ledger.close()
    print(
        f"ledger entry: {times['memory'] * 1e6:.0f} us in memory, {times['disk'] * 1e6:.0f} us synced to disk"
    )


def epoch() -> None:
    data = make_synthetic(rows=32561, features=123, parties=2)
    for name in ("central", "vafl", "vafl-sync"):
        engine = engine_for(data, algorithm=name, batch=100)
        engine._phase(lambda role: role.prepare())
        begun = time.perf_counter()
        engine._phase(lambda role: role.epoch())
        print(f"one epoch of a9a's size (2 parties, batch 100), {name}: {time.perf_counter() - begun:.2f} s")


def main() -> None:
    torch.set_num_threads(1)
    exchange()
    synchronous()
    syncing()
    epoch()


if __name__ == "__main__":
    main()
