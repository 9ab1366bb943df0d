"""Messages over the network: a round trip and a throughput against bare gRPC, and a whole run against one
process.

Everything runs on loopback with mutual TLS, the server of the first two in a process of its own. Both sides
of a comparison are measured in turns and the best round counts, so that other load hardly shows.

Bare gRPC is measured in two ways. A two-way stream reads and writes independently, as every stream must that
carries messages of both sides at any time. A stream that takes turns writes, reads, writes, reads: the least
that gRPC can do, but good for nothing except a call with its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from securevfl.accountants.records import Filter
from securevfl.algorithms.messages import Embedding
from securevfl.data import VerticalData
from securevfl.data.share import OwnTable, split_rows
from securevfl.federation.agreed import Enforcer
from securevfl.federation.run import train
from securevfl.network.agreement import Agreement
from securevfl.network.authority import create_authority, issue
from securevfl.network.config import DataConfig, PartyConfig, ServerConfig
from securevfl.network.consent import Acceptance, AlignmentLimits
from securevfl.network.coordinator import Coordinator
from securevfl.network.identity import Identity, load_identity, server_name
from securevfl.network.member import Member
from securevfl.network.mesh import Mesh
from securevfl.privacy.gate import Gate, Mechanism
from securevfl.privacy.ledger import Ledger
from securevfl.privacy.noise import Noise
from securevfl.privacy.payloads import Released
from securevfl.privacy.schemas import PARTY, SERVER, Content, released
from securevfl.settings.plan import Plan

ROUND_TRIP_GOAL, MESSAGES_GOAL, WALL_GOAL = 1.4, 1000.0, 3.0
ROUNDS, TRIPS, BATCHES = 40, 50, 400
PARTIES = ("p1", "p2", "p3", "p4")


class Ping(Content, kind="ping", senders=(PARTY,)):
    """Asks for its content to come back."""

    values: Any = released("ping", default=None)


class Echo(Content, kind="echo", senders=(SERVER,)):
    """The answer."""

    values: Any = released("echo", default=None)


def let_out(owner: str, values: Any, observers: tuple[str, ...], kind: str) -> Released:
    """Through a gate of its own, without protection."""
    budget = Filter(mode="none", budget_mu=float("inf"), records=len(values))
    gate = Gate(
        owner=owner, mode="none", ledger=Ledger(owner), mechanism=Mechanism(), budget=budget, noise=Noise()
    )
    return gate.release_exact(values, rows=np.arange(len(values)), kind=kind, observers=observers)


def identities(folder: Path) -> dict[str, Identity]:
    names = ("bank", *PARTIES)
    issue(create_authority(folder / "ca", name="bench"), names, out=folder)
    return {name: load_identity(folder / name) for name in names}


# -- the server's process -----------------------------------------------------------------------------------


async def serve(folder: Path) -> None:
    """Sends back what it gets, over bare gRPC and over the whole stack; prints both ports."""
    bank = load_identity(folder / "bank")
    server = grpc.aio.server()
    ways = {"Turns": echo_in_turns, "TwoWay": echo_both_ways}
    handlers = {name: grpc.stream_stream_rpc_method_handler(way) for name, way in ways.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    credentials = grpc.ssl_server_credentials([(bank.key_pem, bank.certificate_pem)], bank.ca_pem, True)
    bare = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    mesh = Mesh(bank, run="bench", coordinator="bank", others=PARTIES)
    port = await mesh.transport.listen("127.0.0.1:0")
    begin(mesh)
    print(bare, port, flush=True)
    link = mesh.links["server"]
    echo = Echo(values=let_out("bank", np.zeros((32, 8), np.float32), PARTIES, "echo"))
    while True:
        message = await link.receive()
        if message.kind == "ping":
            await link.reply(message, echo if "values" in message.fields else Echo())


async def echo_in_turns(_: Any, context: Any) -> None:
    while (data := await context.read()) is not grpc.aio.EOF:
        await context.write(data)


async def echo_both_ways(_: Any, context: Any) -> None:
    waiting: asyncio.Queue[Any] = asyncio.Queue()
    writer = asyncio.create_task(write_all(waiting, context.write))
    while (data := await context.read()) is not grpc.aio.EOF:
        waiting.put_nowait(data)
    writer.cancel()


async def write_all(waiting: asyncio.Queue[Any], write: Callable[[Any], Awaitable[None]]) -> None:
    while True:
        await write(await waiting.get())


def begin(mesh: Mesh) -> None:
    mesh.connect({"server": "bank"} | {name: name for name in PARTIES})
    mesh.begin(bytes(16))


# -- round trips --------------------------------------------------------------------------------------------


Trip = Callable[[bytes], Awaitable[Any]]


@contextlib.asynccontextmanager
async def bare_channel(known: Identity, port: int) -> AsyncIterator[Any]:
    credentials = grpc.ssl_channel_credentials(known.ca_pem, known.key_pem, known.certificate_pem)
    override = [("grpc.ssl_target_name_override", server_name("bank"))]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, override) as channel:
        yield channel


@contextlib.asynccontextmanager
async def in_turns(channel: Any) -> AsyncIterator[Trip]:
    """A stream on which one side writes, then the other."""
    call = channel.stream_stream("/bench/Turns")()

    async def trip(data: bytes) -> Any:
        await call.write(data)
        return await call.read()

    yield trip
    await call.done_writing()


@contextlib.asynccontextmanager
async def both_ways(channel: Any) -> AsyncIterator[Trip]:
    """A stream on which both sides read and write whenever they have something."""
    call = channel.stream_stream("/bench/TwoWay")()
    waiting: asyncio.Queue[bytes] = asyncio.Queue()
    answers: list[asyncio.Future[bytes]] = []

    async def read_all() -> None:
        while isinstance(data := await call.read(), bytes):
            answers.pop().set_result(data)

    async def trip(data: bytes) -> Any:
        answers.append(asyncio.get_running_loop().create_future())
        answer = answers[-1]
        waiting.put_nowait(data)
        return await answer

    tasks = [asyncio.create_task(read_all()), asyncio.create_task(write_all(waiting, call.write))]
    yield trip
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    call.cancel()


@contextlib.asynccontextmanager
async def parties(known: Mapping[str, Identity], port: int) -> AsyncIterator[dict[str, Mesh]]:
    """Four parties, connected, in one phase."""
    found = {name: Mesh(known[name], run="bench", coordinator="bank", others=("bank",)) for name in PARTIES}
    for mesh in found.values():
        mesh.transport.dial("bank", f"127.0.0.1:{port}")
        begin(mesh)
    while not all(mesh.sessions["bank"].connected for mesh in found.values()):
        await asyncio.sleep(0.01)
    yield found
    for mesh in found.values():
        await mesh.close()


async def seconds(trip: Callable[[], Awaitable[Any]]) -> float:
    begin = time.perf_counter()
    for _ in range(TRIPS):
        await trip()
    return (time.perf_counter() - begin) / TRIPS


async def round_trip(known: Mapping[str, Identity], bare_port: int, port: int) -> None:
    payload = np.zeros((32, 8), np.float32)
    ping = Ping(values=let_out("p1", payload, ("bank",), "ping"))
    whole, best = payload.tobytes(), dict.fromkeys(("ours", "both", "turns"), float("inf"))
    async with (
        bare_channel(known["p1"], bare_port) as channel,
        in_turns(channel) as in_turn,
        both_ways(channel) as at_once,
        parties(known, port) as found,
    ):
        link = found["p1"].links["p1"]
        trips: dict[str, Callable[[], Awaitable[Any]]] = {
            "turns": lambda: in_turn(whole),
            "both": lambda: at_once(whole),
            "ours": lambda: link.call("server", ping),
        }
        for _ in range(ROUNDS):
            for name, trip in trips.items():
                best[name] = min(best[name], await seconds(trip))
        messages = await throughput(found)
    ours, both, turns = (1e3 * best[name] for name in ("ours", "both", "turns"))
    print(
        f"round trip of 1 KB: {ours:.3f} ms; a bare two-way gRPC stream {both:.3f} ms: {ours / both:.2f} "
        f"times (goal: at most {ROUND_TRIP_GOAL}); a bare stream that takes turns {turns:.3f} ms: "
        f"{ours / turns:.2f} times"
    )
    print(
        f"4 parties, batches of 100 x 16 float32: {messages:,.0f} messages per second "
        f"(goal: at least {MESSAGES_GOAL:,.0f})"
    )


async def throughput(found: Mapping[str, Mesh]) -> float:
    """Embeddings as fast as the server takes them; the answer to a last call shows that it has them all."""
    block, best = np.zeros((100, 16), np.float32), 0.0
    blocks = {name: let_out(name, block, ("bank",), "embedding") for name in PARTIES}
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(BATCHES // len(PARTIES)):
            for name in PARTIES:
                await found[name].links[name].send("server", Embedding(values=blocks[name]))
        await asyncio.gather(*(found[name].links[name].call("server", Ping()) for name in PARTIES))
        best = max(best, BATCHES / (time.perf_counter() - begin))
    return best


# -- a whole run --------------------------------------------------------------------------------------------


def tables(rows: int, width: int) -> dict[str, OwnTable]:
    generator = np.random.default_rng(0)
    ids = [f"{i:06d}" for i in range(rows)]
    blocks = {name: generator.uniform(-1, 1, (rows, width)).astype(np.float32) for name in ("bank", *PARTIES)}
    labels = (sum(block[:, 0] for block in blocks.values()) > 0).astype(int)
    return {
        name: OwnTable.from_arrays(
            block, ids=ids, labels=labels if name == "bank" else None, bounds=(-1.0, 1.0)
        )
        for name, block in blocks.items()
    }


ACCEPT = Acceptance(
    epsilon=float("inf"),
    members=("bank", *PARTIES),
    algorithms=("vafl",),
    protocols=("plain",),
    test_fraction=0.2,
    evaluations=1,
    alignment=AlignmentLimits(kinds=("none",), ids=1_000_000, times=1),
)


async def over_network(
    folder: Path, plan: Plan, known: Mapping[str, Identity], found: Mapping[str, OwnTable], port: int
) -> dict[str, Any]:
    shared: dict[str, Any] = {"run": "bench", "base": folder}
    server = ServerConfig(
        **shared,
        folder=folder / "bank",
        identity=known["bank"],
        listen=f"127.0.0.1:{port}",
        parties=PARTIES,
        plan=plan,
        align="none",
        time_unit=0.0,
    )
    nodes: list[Any] = [Coordinator(server)]
    for name in PARTIES:
        config = PartyConfig(
            **shared,
            folder=folder / name,
            identity=known[name],
            coordinator="bank",
            address=f"127.0.0.1:{port}",
            accept=ACCEPT,
        )
        nodes.append(Member(config))
    for node in nodes:
        node.own = found[node.name]
        node.config = replace(node.config, data=DataConfig(file="none"))
    results = await asyncio.gather(*(node.run() for node in nodes))
    return dict(results[0])


def together(found: Mapping[str, OwnTable], plan: Plan) -> VerticalData:
    """The same records in one process, with the same split."""
    kept, apart = split_rows(len(found["bank"].ids), 0.2, plan.seed)
    labels, ids = found["bank"].labels, found["bank"].ids
    if labels is None:
        raise ValueError("the bank has no labels")
    return VerticalData.from_arrays(
        {name: table.block[kept] for name, table in found.items()},
        labels[kept],
        ids[kept],
        test=([table.block[apart] for table in found.values()], labels[apart], ids[apart]),
        bounds=(-1.0, 1.0),
    )


def whole_run(known: Mapping[str, Identity], folder: Path) -> None:
    plan = Plan(algorithm="vafl", epochs=3, batch=100, embedding=16, evaluate_every=0, unprotected=True)
    found = tables(2500, 20)
    here, there = [], []
    for turn in range(3):
        begin = time.perf_counter()
        train(together(found, plan), plan, folder / f"here{turn}")
        here.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        result = asyncio.run(over_network(folder / f"there{turn}", plan, known, found, free_port()))
        there.append(time.perf_counter() - begin)
    print(
        f"VAFL, 5 organisations, {result['epochs']} epochs: {min(there):.2f} s over the network, "
        f"{min(here):.2f} s in one process: {min(there) / min(here):.2f} times (goal: at most {WALL_GOAL:g})"
    )


@contextlib.contextmanager
def clocked(*places: tuple[Any, str]) -> Iterator[list[float]]:
    """Processor seconds that some functions take, added up; what one calls of the others counts once."""
    spent, depth, kept = [0.0], [0], [(owner, name, vars(owner)[name]) for owner, name in places]

    def timed(function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            begun = time.process_time()
            depth[0] += 1
            try:
                return function(*given, **named)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[0] += time.process_time() - begun

        return call

    for owner, name, function in kept:
        setattr(owner, name, timed(function))
    try:
        yield spent
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def agreement_share(known: Mapping[str, Identity], folder: Path) -> None:
    """What agreeing, signing, verifying and enforcing take of a networked run, in one run."""
    plan = Plan(algorithm="vafl", epochs=3, batch=100, embedding=16, evaluate_every=0, unprotected=True)
    places = (
        (Agreement, "__post_init__"),
        (Agreement, "sign"),
        (Agreement, "verify"),
        (Enforcer, "begin"),
        (Enforcer, "check_release"),
        (Ledger, "begin"),
        (Member, "_check_signed"),
        (Coordinator, "_begin"),
        (Mesh, "_mark"),
    )
    found = tables(2500, 20)
    with clocked(*places) as spent:
        begun = time.process_time()
        asyncio.run(over_network(folder / "agreed", plan, known, found, free_port()))
        whole = time.process_time() - begun
    print(f"agreement and enforcement: {100 * spent[0] / whole:.2f} % of the run (goal: at most 5 %)")


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = identities(folder)
        command = [sys.executable, "-m", "benchmarks.network", str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            if server.stdout is None:
                raise RuntimeError("the server has no output")
            bare, port = map(int, server.stdout.readline().split())
            asyncio.run(round_trip(known, bare, port))
            server.kill()
        whole_run(known, folder)
        agreement_share(known, folder)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(serve(Path(sys.argv[1])))
    else:
        main()
