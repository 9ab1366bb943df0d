"""Secure sums between three processes over TCP; `process`, forty lines, is all that each of them runs.

What a transport of your own has to settle, and where it stands below:

1. Addresses: workers are 0, 1, 2. The aggregator of pairwise masks is a participant without an input, at
   the address AGGREGATOR; process 0 hosts it beside its worker, which the masks' `collusion=1` allows for.
2. Buffering by round: a machine refuses what belongs to another round, and a quick peer may be a round ahead.
   So there is one queue for each sum, receiver and round.
3. Set-up: `node.setup()` is a machine like that of a round, run first, over the same wire; its messages bear
   the round -1. It is None for trees, which need no keys.
4. Who receives: `protocol.receivers`, the aggregator or the root of the first tree; `result()` is for them.

Sums need channels that are encrypted and say who is at the other end: use TLS with certificates
(`asyncio.start_server(..., ssl=...)`), and take the sender from the certificate instead of the header.
"""

import asyncio
import struct
import subprocess
import sys
from collections import defaultdict

from securevfl.protocols import AGGREGATOR, Envelope, PairwiseMaskSum, TwoTreeSum

SUMS = (PairwiseMaskSum(workers=3, collusion=1), TwoTreeSum(workers=3))  # public, the same everywhere
HOME = {0: 0, 1: 1, 2: 2, AGGREGATOR: 0}  # address -> process
HEAD = struct.Struct(">IBii")  # bytes of the message, number of the sum, sender, receiver
ROUNDS = 3


async def process(own: int) -> None:
    ended = asyncio.Semaphore(0)  # counts the peers that have hung up
    queues: defaultdict[tuple[int, int, int], asyncio.Queue[Envelope]] = defaultdict(asyncio.Queue)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(1):
            size, number, sender, receiver = HEAD.unpack(head + await reader.readexactly(HEAD.size - 1))
            message = SUMS[number].decode(await reader.readexactly(size))
            queues[number, receiver, message.round].put_nowait(Envelope(sender, receiver, message))
        writer.close()
        ended.release()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for port in map(int, input().split())]

    def send(number: int, envelopes: list[Envelope]) -> None:
        for each in envelopes:
            data = each.message.to_bytes()
            head = HEAD.pack(len(data), number, each.sender, each.receiver)
            writers[HOME[each.receiver]].write(head + data)

    async def play(number: int, machine) -> None:  # one participant's part in a set-up or a round
        send(number, machine.start())
        while not machine.done:
            send(number, machine.receive(await queues[number, machine.address, machine.round].get()))

    for number, protocol in enumerate(SUMS):
        nodes = {a: protocol.node(a) for a in protocol.addresses if HOME[a] == own}
        await asyncio.gather(*(play(number, m) for node in nodes.values() if (m := node.setup())))
        for turn in range(ROUNDS):
            inputs = {a: [10.0**a, turn] if a >= 0 else None for a in nodes}
            machines = {a: node.round(inputs[a], round=turn) for a, node in nodes.items()}
            await asyncio.gather(*(play(number, machine) for machine in machines.values()))
            for address in set(machines) & set(protocol.receivers):
                print(type(protocol).__name__, "round", turn, "process", own, machines[address].result())
    for writer in writers:
        writer.close()  # what was written is sent first
    for _ in writers:
        await ended.acquire()
    server.close()


if len(sys.argv) == 2:
    asyncio.run(process(int(sys.argv[1])))
else:
    command = [sys.executable, __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    peers = [subprocess.Popen([*command, str(own)], **pipes) for own in range(3)]
    ports = " ".join(peer.stdout.readline().strip() for peer in peers)
    for peer in peers:
        peer.stdin.write(f"{ports}\n")
        peer.stdin.flush()
    for peer in peers:
        print(peer.communicate()[0], end="")
