"""Split learning with Flower: two clients hold columns of the same people, the server holds the labels.

    FLWR_TELEMETRY_ENABLED=0 python train_with_flower.py FOLDER

It runs in an environment of its own (`pip install "flwr[simulation]"`), because Flower and securevfl want
different versions of protobuf, and needs nothing of securevfl. FOLDER gets the tables, and every exchange as
it happened: `audit_flower.py` turns it into a run that `securevfl audit` can read.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "flower-run").resolve()
PARTIES, COLUMNS, RECORDS, TRAINING, WIDTH = 2, 4, 300, 240, 2
EPOCHS, BATCH, RATE = 2, 40, 0.5


def make_tables() -> None:
    """One table per party, the labels with the first; both sides know the same people."""
    rng = np.random.default_rng(7)
    features = rng.normal(size=(RECORDS, PARTIES * COLUMNS))
    chance = 1 / (1 + np.exp(-features @ rng.normal(size=PARTIES * COLUMNS)))
    labels = (rng.random(RECORDS) < chance).astype(int)
    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez(FOLDER / "tables.npz", features=features, labels=labels)


def tables() -> tuple[Any, Any]:
    """Features of everybody and labels; each role looks at its own part alone."""
    kept = np.load(FOLDER / "tables.npz")
    return kept["features"], kept["labels"]


# -- a client: one party -------------------------------------------------------------------------------------

client = ClientApp()


@client.train()  # type: ignore[misc]
def work(message: Message, context: Context) -> Message:
    """Embeds the records that the server asks for, or learns from the gradients that come back."""
    party = int(context.node_config["partition-id"])
    own = tables()[0][:, party * COLUMNS : (party + 1) * COLUMNS]
    if "model" not in context.state:
        first = np.random.default_rng(party).normal(size=(COLUMNS, WIDTH)) / COLUMNS
        context.state["model"] = ArrayRecord({"weights": Array(first)})
    weights = context.state["model"]["weights"].numpy()
    asked = message.content["ask"]
    rows = np.array(asked["rows"], np.int64)
    if asked["what"] == "learn":
        gradient = message.content["gradient"]["values"].numpy()
        context.state["model"] = ArrayRecord({"weights": Array(weights - RATE * own[rows].T @ gradient)})
        answer = np.zeros(0)
    else:
        answer = own[rows] @ weights
    said = RecordDict(
        {"values": ArrayRecord({"values": Array(answer)}), "who": ConfigRecord({"party": party})}
    )
    return Message(said, reply_to=message)


# -- the server: the label holder ----------------------------------------------------------------------------

server = ServerApp()


def ask(grid: Grid, what: str, rows: Any, gradients: dict[int, Any], nodes: dict[int, int]) -> dict[int, Any]:
    """Asks every party at once; what each answered, by its number."""
    messages = []
    for node in grid.get_node_ids():
        content = RecordDict({"ask": ConfigRecord({"what": what, "rows": rows.tolist()})})
        if what == "learn":
            content["gradient"] = ArrayRecord({"values": Array(gradients[nodes[node]])})
        messages.append(Message(content, message_type="train", dst_node_id=node))
    answers = {}
    for reply in grid.send_and_receive(messages):
        if reply.has_error():
            raise RuntimeError(f"a client failed: {reply.error.reason}")
        party = int(reply.content["who"]["party"])
        nodes[reply.metadata.src_node_id] = party
        answers[party] = reply.content["values"]["values"].numpy()
    return answers


@server.main()  # type: ignore[misc]
def main(grid: Grid, context: Context) -> None:
    """Trains a logistic head on what the parties embed, and keeps every exchange."""
    while len(list(grid.get_node_ids())) < PARTIES:
        time.sleep(0.5)
    labels, rng = tables()[1], np.random.default_rng(1)
    head, nodes, kept = np.full((PARTIES, WIDTH), 0.5), {}, {}
    step = 0
    for _ in range(EPOCHS):
        order = rng.permutation(TRAINING)
        for start in range(0, TRAINING, BATCH):
            rows = np.sort(order[start : start + BATCH])
            seen = ask(grid, "embed", rows, {}, nodes)
            scores = sum(seen[party] @ head[party] for party in range(PARTIES))
            residual = (1 / (1 + np.exp(-scores)) - labels[rows]) / len(rows)
            gradients = {party: np.outer(residual, head[party]) for party in range(PARTIES)}
            for party in range(PARTIES):
                kept |= {f"{step}/{party}/rows": rows, f"{step}/{party}/embeddings": seen[party]}
                kept[f"{step}/{party}/gradients"] = gradients[party]
                head[party] -= RATE * seen[party].T @ residual
            ask(grid, "learn", rows, gradients, nodes)
            step += 1
    np.savez(FOLDER / "exchanges.npz", steps=step, **kept)
    print(f"{step} steps of {PARTIES} parties are in {FOLDER / 'exchanges.npz'}")


if __name__ == "__main__":
    make_tables()
    run_simulation(server_app=server, client_app=client, num_supernodes=PARTIES)
