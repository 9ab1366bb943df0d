"""Steps on a GPU against the same steps on the CPU; where there is no GPU it says so and measures nothing."""

from __future__ import annotations

import time
from typing import Any

import torch

from securevfl import Plan, VerticalData, train

DATA = "synthetic:rows=20000,features=512,informative=32"
NETWORK = {"model": "mlp", "hidden": (1024, 1024), "embedding": 64, "batch": 2048, "epochs": 2}
CASES: dict[str, dict[str, Any]] = {
    "central": {"algorithm": "central", "optimiser": "sgd"},
    "vafl-sync": {"algorithm": "vafl-sync", "unprotected": True},
    "private updates": {
        "algorithm": "vafl-sync",
        "sigma": 1.0,
        "encoder_training": "dp",
        "gradient_sigma": 1.0,
        "scaling": "none",
    },
}


def seconds(data: VerticalData, case: dict[str, Any], device: str) -> float:
    """Of one run; it ends with figures on the CPU, so the device has finished by then."""
    begun = time.monotonic()
    train(data, Plan(**NETWORK, **case, device=device))
    return time.monotonic() - begun


def main() -> None:
    """Prints both times of every case."""
    if not torch.cuda.is_available():
        print("no GPU: torch finds no CUDA device, so nothing was measured")
        return
    data = VerticalData.load(DATA, parties=2)
    print(f"GPU: {torch.cuda.get_device_name()}")
    for name, case in CASES.items():
        seconds(data, case, "cuda")  # the first run of a process loads kernels
        there, here = seconds(data, case, "cuda"), seconds(data, case, "cpu")
        print(
            f"{name}: {there:.2f} s on the GPU, {here:.2f} s on the CPU, ratio {here / there:.1f}", flush=True
        )


if __name__ == "__main__":
    main()
