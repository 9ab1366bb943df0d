"""Audit a split-learning loop that was not written for securevfl: record what really leaves."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from securevfl import Plan, Recorder, VerticalData, audit

SIGMA = 0.5
torch.manual_seed(0)
data = VerticalData.load("breast-cancer", parties=2).scaled("standard")
blocks = [torch.tensor(np.array(block)) for block in data.train]
labels = torch.tensor(np.array(data.y_train))
mine, theirs, top = nn.Linear(blocks[0].shape[1], 4), nn.Linear(blocks[1].shape[1], 4), nn.Linear(8, 1)
optimiser = torch.optim.Adam([p for m in (mine, theirs, top) for p in m.parameters()], lr=0.01)

with tempfile.TemporaryDirectory() as folder:
    plan = Plan(algorithm="vafl-sync", clip=1.0, sigma=SIGMA, embedding=4)
    with Recorder(Path(folder) / "run", plan, parties=("p0", "p1"), label_holder="p0") as recorder:
        for rows in torch.randperm(len(labels)).split(64):
            own, other = mine(blocks[0][rows]), functional.normalize(theirs(blocks[1][rows]))
            sent = (other + SIGMA * torch.randn_like(other)).detach().requires_grad_()
            outputs = top(torch.cat([own, sent], 1))[:, 0]
            loss = functional.binary_cross_entropy_with_logits(outputs, labels[rows])
            optimiser.zero_grad()
            loss.backward()
            other.backward(sent.grad)
            optimiser.step()
            recorder.exchange("p1", rows, sent, sent.grad)
        recorder.finish(test={"loss": loss.item()})
    report = audit(Path(folder) / "run", attacks=["gradient-norm"], data=data)
    for sentence in report.content["words"]:
        print("-", sentence)
