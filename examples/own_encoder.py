"""Your own encoder (a CNN on image halves), and the ready-made LSTM on sequences."""

import torch
from torch import nn

from securevfl import Plan, VerticalData, train


class HalfImage(nn.Module):
    """A small CNN for half of an 8 x 8 digit: 4 rows of 8 pixels."""

    def __init__(self, embedding: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 8, embedding)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows.reshape(-1, 1, 4, 8))


torch.manual_seed(0)
digits = VerticalData.load("digits", parties=2)
encoders = {party: HalfImage(embedding=16) for party in digits.parties}
plan = Plan(algorithm="vafl", embedding=16, epochs=5, optimiser="adam", learning_rate=0.01, unprotected=True)
print("two halves of a digit:", train(digits, plan, encoders=encoders).test)

# The same digits as sequences: each party reads its 4 rows of 8 pixels one pixel after the other.
plan = Plan(
    algorithm="vafl",
    model="lstm",
    embedding=16,
    epochs=2,
    optimiser="adam",
    learning_rate=0.02,
    batch=128,
    unprotected=True,
)
print("as sequences:", train(digits, plan).test)
