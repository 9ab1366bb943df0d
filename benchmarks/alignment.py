"""Private alignment: processor time per ID without and with a helper, memory and wall time, and peers.

`python -m benchmarks.alignment [--ids N]`: N IDs a side with a helper, a million by default; every party is a
process of its own that reads its IDs from a file, the helper is a third. Set SECUREVFL_BENCH_SPU to a Python
interpreter that has spu (it needs numpy below 2), or make build/bench-spu with it; without one the ratios to
it are left out and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import numpy as np

from securevfl.protocols import Envelope, PrivateAlignment
from securevfl.protocols.alignment import curve
from securevfl.protocols.contract import HELPER

BLINDED = 100_000  # IDs a side without a helper
GOAL_BLINDED = 180.0  # microseconds of processor time per ID, both sides together
GOAL_HELPED = 4.0  # per ID and side
GOAL_MEMORY, GOAL_WALL, FULL = 4.0, 120.0, 10_000_000
BEFORE = 315.0  # openmined-psi, as it was used here
_FRAME = struct.Struct("<qqQ")

PEERS = {"ECDH": 100_000, "RR22": 1_000_000}  # protocol of spu -> IDs a side

# Two processes of spu on this machine, files in and files out; what both used.
PEER = r"""
import json, resource, socket, subprocess, sys, time
side, protocol, count, folder, ports = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:]
if side == "both":
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    for rank, shift in ((0, 0), (1, count // 2)):
        with open(f"{folder}/in{rank}.csv", "w") as file:
            file.write("id\n")
            file.writelines(f"person-{i:09d}\n" for i in range(shift, shift + count))
    begun = time.perf_counter()
    children = [
        subprocess.Popen([sys.executable, *sys.argv[:1], str(rank), *sys.argv[2:], *ports], stdout=2)
        for rank in range(2)
    ]
    failed = [child.wait() for child in children]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({"wall": time.perf_counter() - begun, "seconds": used.ru_utime + used.ru_stime}))
    sys.exit(any(failed))
import spu.psi as psi
from spu import libspu
rank = int(side)
desc = libspu.link.Desc()
for index, port in enumerate(ports):
    desc.add_party(f"p{index}", f"127.0.0.1:{port}")
context = libspu.link.create_brpc(desc, rank)
config = psi.PsiExecuteConfig(
    protocol_conf=psi.PsiProtocolConfig(
        protocol=psi.parse_protocol(f"PROTOCOL_{protocol}"),
        broadcast_result=True,
        ecdh_params=psi.EcdhParams(curve=psi.EllipticCurveType.CURVE_25519),
    ),
    input_params=psi.InputParams(path=f"{folder}/in{rank}.csv", selected_keys=["id"], keys_unique=True),
    output_params=psi.OutputParams(path=f"{folder}/out{rank}.csv"),
)
report = psi.psi_execute(config, context)
found = sum(1 for _ in open(f"{folder}/out{rank}.csv")) - 1
if found != count - count // 2:
    sys.exit(f"{found} common")
"""


def processor_time() -> float:
    """Of this process and of those that it has waited for."""
    return sum(
        each.ru_utime + each.ru_stime
        for each in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def ids_of(side: int, count: int, shift: int) -> range:
    """The numbers in a side's IDs; the two sides have half of them in common, in opposite orders."""
    return range(count) if side == 0 else range(count + shift - 1, shift - 1, -1)


def operation() -> float:
    """Seconds of one operation on the curve: there are four for each ID."""
    points = curve.hash_texts(b"bench", [b"%d" % i for i in range(2000)])
    begun = time.process_time()
    curve.blind(b"\7" * 32, points)
    return (time.process_time() - begun) / len(points)


def blinded() -> float:
    """Two parties without a helper; processor time per ID, both sides together, in microseconds."""
    sets = [[f"person-{i:09d}" for i in ids_of(side, BLINDED, BLINDED // 2)] for side in (0, 1)]
    one, begun, wall = operation(), processor_time(), time.perf_counter()
    found = PrivateAlignment(parties=2).align(sets)
    wall = time.perf_counter() - wall
    if any(sets[0][i] != sets[1][j] for i, j in zip(*(each.rows.tolist() for each in found), strict=True)):
        raise SystemExit("the two sides found different records")
    each = 1e6 * (processor_time() - begun) / BLINDED
    verdict = "met" if each <= GOAL_BLINDED else "missed"
    print(
        f"{BLINDED:,} x {BLINDED:,} without a helper: {each:.0f} us of processor time per ID, both sides "
        f"(goal {GOAL_BLINDED:.0f}: {verdict}; before {BEFORE:.0f}); {each / 4e6 / one:.2f} times its four "
        f"operations of {1e6 * one:.1f} us; wall {1e6 * wall / BLINDED:.0f} us per ID"
    )
    return each


# -- with a helper ------------------------------------------------------------------------------------------


def write_frame(pipe: IO[bytes], envelope: Envelope) -> None:
    """Sends an envelope through a pipe."""
    raw = envelope.message.to_bytes()
    pipe.write(_FRAME.pack(envelope.sender, envelope.receiver, len(raw)))
    pipe.write(raw)
    pipe.flush()


def read_frame(pipe: IO[bytes], protocol: PrivateAlignment) -> Envelope | None:
    """The next envelope; None at the end."""
    head = pipe.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return None
    sender, receiver, size = _FRAME.unpack(head)
    return Envelope(sender, receiver, protocol.decode(pipe.read(size)))


def run_party(side: int, file: Path, count: int, out: Path) -> None:
    """One party's process: talks through its pipes, writes its rows and what it needed."""
    protocol = PrivateAlignment(parties=2, kind="helper")
    source, target = sys.stdin.buffer, sys.stdout.buffer
    with file.open(encoding="ascii") as lines:
        machine = protocol.machine(side, (line[:-1] for line in lines), count=count)
        for envelope in machine.start():
            write_frame(target, envelope)
        while not machine.done and (arrived := read_frame(source, protocol)) is not None:
            for envelope in machine.receive(arrived):
                write_frame(target, envelope)
    np.save(out, machine.alignment().rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out.with_suffix(".json").write_text(json.dumps({"seconds": processor_time(), "peak": peak / 2**20}))


def helped(count: int, folder: Path) -> float:
    """Two parties and a helper, each a process, from files; microseconds per ID of all three together."""
    files = [folder / f"ids{side}.txt" for side in (0, 1)]
    for side, file in enumerate(files):
        with file.open("w", encoding="ascii") as out:
            out.writelines(f"person-{i:09d}\n" for i in ids_of(side, count, count // 2))
    begun, wall = processor_time(), time.perf_counter()
    outs = [folder / f"rows{side}.npy" for side in (0, 1)]
    parties = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.alignment",
                "party",
                *map(str, (side, files[side], count, out)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for side, out in enumerate(outs)
    ]
    carry(parties)
    wall = time.perf_counter() - wall
    used = [json.loads(out.with_suffix(".json").read_text()) for out in outs]
    rows = [np.load(out) for out in outs]
    if len(rows[0]) != count - count // 2 or (rows[0] + rows[1] != count + count // 2 - 1).any():
        raise SystemExit("the two sides found different records")
    own = processor_time() - begun - sum(each["seconds"] for each in used)
    peaks = [each["peak"] for each in used] + [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]
    each = 1e6 * max(party["seconds"] for party in used) / count
    figures = [each <= GOAL_HELPED, sum(peaks) <= GOAL_MEMORY, wall <= GOAL_WALL]
    words = ["met" if good else "missed" for good in figures]
    print(
        f"{count:,} x {count:,} with a helper, from disk: {each:.2f} us of processor time per ID and side "
        f"(goal {GOAL_HELPED:g}: {words[0]}), helper {1e6 * own / count:.2f} us; peak memory "
        f"{peaks[0]:.2f} + {peaks[1]:.2f} GB, helper {peaks[2]:.2f} GB (goal {GOAL_MEMORY:g} in all: "
        f"{words[1]}); wall {wall:.0f} s"
        + (f" (goal {GOAL_WALL:.0f} s: {words[2]})" if count == FULL else "")
        + f"; load {os.getloadavg()[0]:.1f}"
    )
    return 1e6 * (own + sum(party["seconds"] for party in used)) / count


def carry(parties: list[subprocess.Popen[bytes]]) -> None:
    """This process is the helper, and passes on what the parties say to each other."""
    protocol = PrivateAlignment(parties=2, kind="helper")
    helper, arrived = protocol.machine(HELPER), queue.Queue[Envelope | None](maxsize=8)

    def listen(pipe: IO[bytes]) -> None:
        while (envelope := read_frame(pipe, protocol)) is not None:
            arrived.put(envelope)
        arrived.put(None)

    for party in parties:
        threading.Thread(target=listen, args=(party.stdout,), daemon=True).start()
    helper.start()
    ended = 0
    while ended < len(parties):
        envelope = arrived.get()
        if envelope is None:
            ended += 1
            continue
        sent = helper.receive(envelope) if envelope.receiver == HELPER else [envelope]
        for each in sent:
            write_frame(parties[each.receiver].stdin, each)  # type: ignore[arg-type]
    for party in parties:
        if party.wait():
            raise SystemExit("a party failed")


# -- peers --------------------------------------------------------------------------------------------------


def peers(ours: dict[str, float], folder: Path) -> None:
    """What spu needs per ID, both sides together, and how that compares."""
    default = Path("build/bench-spu/bin/python")
    interpreter = os.environ.get("SECUREVFL_BENCH_SPU") or (str(default) if default.exists() else "")
    if not interpreter:
        install = f"python -m venv {default.parents[1]} && {default.parent}/pip install spu 'numpy<2'"
        print(f"spu is not installed, so there are no ratios to it: {install}")
        return
    script = folder / "peer.py"
    script.write_text(PEER)
    for protocol, count in PEERS.items():
        command = [interpreter, str(script), "both", protocol, str(count), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"spu {protocol} failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        each = 1e6 * json.loads(done.stdout.splitlines()[-1])["seconds"] / count
        ratios = ", ".join(f"{what} takes {own / each:.2f} times that" for what, own in ours.items())
        print(
            f"spu {protocol}, {count:,} x {count:,}: {each:.1f} us of processor time per ID, both sides; "
            f"{ratios}"
        )


def main() -> None:
    if sys.argv[1:2] == ["party"]:
        side, file, count, out = sys.argv[2:]
        run_party(int(side), Path(file), int(count), Path(out))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=1_000_000)
    options = parser.parse_args()
    ours = {"ours without a helper": blinded()}
    with tempfile.TemporaryDirectory() as folder:
        ours["ours with one"] = helped(options.ids, Path(folder))
        peers(ours, Path(folder))


if __name__ == "__main__":
    main()
