"""How sealed training grows with rows, columns and parties, and an audit with messages: time, memory, files.

Every point is a process of its own, its features in files. `--large` adds the points that take gigabytes;
`--plot FOLDER` draws what was measured; `--audit` measures the audit of sealed runs of a million rows alone.
Exponents are slopes of least squares through the logarithms.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

ITERATIONS = 3
SMALL = {
    "rows": [(10_000, 50, 2), (100_000, 50, 2), (1_000_000, 50, 2)],
    "columns": [(20_000, 10, 2), (20_000, 100, 2), (20_000, 1_000, 2)],
    "parties": [(20_000, 64, 2), (20_000, 64, 4), (20_000, 64, 8), (20_000, 64, 16)],
}
LARGE = {"rows": [(10_000_000, 50, 2)], "columns": [(1_000_000, 1_000, 2)]}
EPOCHS = (2, 4, 8, 16)
AUDITED = [(1_000_000, 1_000_000, 4), (1_000_000, 50_000, 2)]
"""Rows, records of a batch and epochs of sealed runs that are audited."""
MOST = 2_000_000
"""Records of one iteration: more do not fit the ring."""


def main() -> None:
    """Measures, prints, and draws on request."""
    if sys.argv[1:2] == ["--point"]:
        print(json.dumps(POINTS[sys.argv[2]](*map(int, sys.argv[3:-1]), Path(sys.argv[-1]))))
        return
    if "--audit" in sys.argv:
        report("audit", [measured("audit-sealed", *point) for point in AUDITED])
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for axis, points in SMALL.items():
        found[axis] = [measured("sealed", *point) for point in points]
        report(axis, found[axis])
    found["messages"] = [measured("audit", epochs) for epochs in EPOCHS]
    report("messages", found["messages"])
    if "--large" in sys.argv:
        for axis, points in LARGE.items():
            found[f"large, {axis}"] = [measured("sealed", *point) for point in points]
            report(f"large, {axis}", found[f"large, {axis}"])
    if "--plot" in sys.argv:
        draw(found, Path(sys.argv[sys.argv.index("--plot") + 1]))


def measured(kind: str, *sizes: int) -> dict[str, Any]:
    """One point, in a process of its own."""
    with TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        command = [sys.executable, "-m", "benchmarks.growth", "--point", kind, *map(str, sizes), folder]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    return dict(json.loads(done.stdout))


def peak() -> int:
    """Largest resident size of this process so far, in bytes; mapped files count where they were read."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- points -------------------------------------------------------------------------------------------------


def sealed(rows: int, columns: int, parties: int, folder: Path) -> dict[str, Any]:
    """Sealed training of a linear model, its dealer and all members in one process."""
    from securevfl import Plan, VerticalData, train
    from securevfl.algorithms.sealed.member import SealedMember

    batch = min(rows, MOST)
    passes = ITERATIONS if rows <= MOST else 1
    blocks, labels = written(rows, columns // parties, parties, folder)
    begun = peak()
    data = VerticalData.from_arrays(blocks, labels, bounds=(0, 1), test_fraction=0.01)
    plan = Plan(
        model="linear", epochs=passes, batch=batch, settings={"adversary": "semi-honest", "centring": 0.0}
    )
    moments: list[float] = []
    iterate, learn = SealedMember.iterate, SealedMember._learn

    async def begun_at(member: SealedMember) -> int:
        if member.index == 0 and not moments:
            moments.append(time.process_time())
        return await iterate(member)

    def timed(member: SealedMember, *given: Any) -> None:
        if member.index == 0:
            moments.append(time.process_time())
        learn(member, *given)

    SealedMember.iterate, SealedMember._learn = begun_at, timed  # type: ignore[method-assign]
    start = time.process_time()
    train(data, plan, folder / "run")
    each = (moments[-1] - moments[0]) / (len(moments) - 1)  # all of them: the first may work ahead for others
    return {
        "rows": rows,
        "columns": columns,
        "parties": parties,
        "seconds": each * rows / batch,
        "ns": each / (batch * columns) * 1e9,
        "setup": moments[0] - start,
        "peak": peak(),
        "memory": peak() - begun,
        **dict(sizes(folder / "run")),
    }


def recorded(epochs: int, folder: Path) -> dict[str, Any]:
    """A run whose views are recorded."""
    from securevfl import Plan, VerticalData, train

    plan = Plan(algorithm="vafl-sync", sigma=1.0, epochs=epochs, batch=32, record_views=True)
    run = train(VerticalData.load(DATA, parties=2), plan, folder / "run")
    return {"messages": int(run.result["messages"])}


def audit(epochs: int, folder: Path) -> dict[str, Any]:
    """The audit of such a run, in a process that has not trained it."""
    from securevfl import VerticalData
    from securevfl import audit as examine

    command = [sys.executable, "-m", "benchmarks.growth", "--point", "recorded", str(epochs), str(folder)]
    made = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    data = VerticalData.load(DATA, parties=2)
    begun, start = peak(), time.process_time()
    examine(folder / "run", attacks="none", data=data, canaries=-1)
    measured = {"seconds": time.process_time() - start, "memory": peak() - begun}
    return made | measured | dict(sizes(folder / "run"))


def recorded_sealed(rows: int, batch: int, epochs: int, folder: Path) -> dict[str, Any]:
    """A sealed run of two members with five columns each, whose views are recorded."""
    from securevfl import Plan, train

    written(rows, 5, 2, folder, keep=True)
    data, begun = _kept(rows, folder), time.process_time()
    plan = Plan(model="linear", epochs=epochs, batch=batch, epsilon=1.0, record_views=True)
    run = train(data, plan, folder / "run")
    return {"training": time.process_time() - begun, "messages": int(run.result["messages"])}


def audit_sealed(rows: int, batch: int, epochs: int, folder: Path) -> dict[str, Any]:
    """Reconciliation and replay of such a run, in a process that has not trained it."""
    from securevfl.attacks.source import Source
    from securevfl.auditing.reconciliation import reconcile
    from securevfl.auditing.replay import replay
    from securevfl.auditing.verdicts import ErrorBudget

    given = [str(each) for each in (rows, batch, epochs, folder)]
    command = [sys.executable, "-m", "benchmarks.growth", "--point", "recorded-sealed", *given]
    made = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    data, begun, start = _kept(rows, folder), peak(), time.process_time()
    source, budget = Source(folder / "run", data), ErrorBudget(delta=1e-7, epsilon=1.0)
    releases, wrong = len(source.records), 0
    spent: dict[str, Any] = {"releases": releases, "ledgers": time.process_time() - start}
    for task in (reconcile, replay):
        start = time.process_time()
        wrong += sum(each.verdict.value != "holds" for each in task(source, budget))
        spent[task.__name__] = time.process_time() - start
    sized = {"rows": rows, "batch": batch, "epochs": epochs}
    return sized | made | spent | {"peak": peak(), "memory": peak() - begun, "not holds": wrong}


def _kept(rows: int, folder: Path) -> Any:
    from securevfl import VerticalData

    blocks = [np.memmap(folder / f"{party}.f32", np.float32, "r", shape=(rows, 5)) for party in range(2)]
    return VerticalData.from_arrays(blocks, np.load(folder / "labels.npy"), bounds=(0, 1), test_fraction=0.01)


DATA = "synthetic:rows=4000,features=20,informative=8"
POINTS = {
    "sealed": sealed,
    "recorded": recorded,
    "audit": audit,
    "recorded-sealed": recorded_sealed,
    "audit-sealed": audit_sealed,
}


def written(
    rows: int, width: int, parties: int, folder: Path, *, keep: bool = False
) -> tuple[list[Any], Any]:
    """Every party's features in a file, and labels that depend on all of them."""
    generator, scores = np.random.default_rng(0), np.zeros(rows)
    for party in range(parties):
        with (folder / f"{party}.f32").open("wb") as file:
            for start in range(0, rows, 50_000):
                piece = generator.random((min(50_000, rows - start), width), dtype=np.float32)
                scores[start : start + len(piece)] += piece[:, 0] - 0.5
                file.write(piece.data)
    labels = (scores + generator.normal(size=rows) * 0.3 > 0).astype(np.int64)
    if keep:
        np.save(folder / "labels.npy", labels)
    files = [folder / f"{party}.f32" for party in range(parties)]
    return [np.memmap(file, np.float32, "r", shape=(rows, width)) for file in files], labels


def sizes(run: Path) -> Iterator[tuple[str, int]]:
    """Bytes of what a run has left behind."""
    for name in ("ledger", "views", "journal", "models"):
        yield name, sum(path.stat().st_size for path in (run / name).rglob("*") if path.is_file())
    yield "folder", sum(path.stat().st_size for path in run.rglob("*") if path.is_file())


# -- what is shown ------------------------------------------------------------------------------------------


def exponent(points: list[dict[str, Any]], along: str, what: str) -> float:
    """Slope of log `what` over log `along`."""
    return float(np.polyfit(*(np.log([max(1e-9, p[name]) for p in points]) for name in (along, what)), 1)[0])


def report(axis: str, points: list[dict[str, Any]]) -> None:
    """One line per point, and exponents where there are several."""
    for point in points:
        shown = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in point.items()}
        print(axis, *(f"{name}={value}" for name, value in shown.items()), flush=True)
    if len(points) > 1 and axis in points[0]:
        grown = ", ".join(f"{what} {exponent(points, axis, what):.2f}" for what in GROWTH)
        print(f"{axis}: exponents {grown}", flush=True)


GROWTH = {"seconds": "processor time of a pass", "memory": "memory", "folder": "run folder"}


def draw(found: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """All axes side by side, each figure relative to its first point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    axes = [name for name in found if not name.startswith("large")]
    figure, panels = plt.subplots(1, len(axes), figsize=(3.2 * len(axes), 3.2), layout="constrained")
    for panel, axis in zip(panels, axes, strict=True):
        points = found[axis] + [p for p in found.get(f"large, {axis}", ()) if axis == "rows"]
        across = [point[axis] for point in points]
        for what, label in GROWTH.items():
            panel.loglog(across, [point[what] / points[0][what] for point in points], "o-", label=label)
        panel.loglog(across, [value / across[0] for value in across], "k:", label="linear")
        panel.set_xlabel(axis)
        panel.set_xticks(across, [f"{value:.0e}" if value > 9999 else str(value) for value in across])
        panel.xaxis.set_minor_formatter("")
        panel.yaxis.set_minor_formatter("")
    panels[0].set_ylabel("relative to the smallest")
    panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(folder / "growth.png", dpi=110)
    (folder / "growth.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
