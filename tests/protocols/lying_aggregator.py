"""An aggregator that tells every worker other lists, with worker 0 as its accomplice."""

from __future__ import annotations

import dataclasses

import numpy as np

from securevfl.errors import ProtocolError
from securevfl.protocols import AGGREGATOR, Envelope
from securevfl.protocols.sums.pairwise import Confirmations, Survivors


def relist(envelope, survivors):
    """A list of survivors for the same receiver."""
    return Envelope(
        envelope.sender, envelope.receiver, dataclasses.replace(envelope.message, survivors=survivors)
    )


def confirm_and_open(protocol, nodes, driver, told):
    """Tells honest workers lists of survivors, passes on all marks that help, and returns what they open.

    Worker 0 colludes and makes the marks that its keys allow. Returns opener -> owner -> share.
    """
    envelopes = {e.receiver: e for e in driver.pending if isinstance(e.message, Survivors)}
    marks = {}
    for worker, survivors in told.items():
        (reply,) = driver.machines[worker].receive(relist(envelopes[worker], survivors))
        peers = [peer for peer in protocol.graph.neighbours(worker) if peer in survivors]
        marks[worker] = dict(zip(peers, reply.message.marks, strict=True))
    opened = {}
    for worker in told:
        machine = driver.machines[worker]
        statement = machine._statement(machine._survivors)
        rows = {0: np.frombuffer(nodes[0].pairs[worker].mark(statement), np.uint8)}
        rows |= {
            peer: marks[peer][worker]
            for peer in told
            if peer != worker
            and driver.machines[peer]._statement(driver.machines[peer]._survivors) == statement
        }
        where = {"round": machine.round, "attempt": machine.attempt}
        message = Confirmations(
            **where, confirmed=sorted(rows), marks=np.stack([rows[peer] for peer in sorted(rows)])
        )
        owners = sorted(machine._shares)
        try:
            (reply,) = machine.receive(Envelope(AGGREGATOR, worker, message))
        except ProtocolError as error:
            assert "are needed, nothing is opened" in str(error)
            continue
        table = zip(owners, reply.message.shares, strict=True)
        opened[worker] = {owner: row.tobytes() for owner, row in table}
    return opened
