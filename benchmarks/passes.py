"""How many passes serve under a target epsilon, where every release counts (docs/results/passes.md).

    python -m benchmarks.passes [--quick]

The metric is the exact one of the test part: AUC of two classes, accuracy of more, r2 of numbers. Each seed
draws another split, other first models and, as always, other noise.
"""

from __future__ import annotations

import statistics
import sys

from securevfl import Plan, VerticalData, train
from securevfl.errors import TrainingDiverged

PASSES = (3, 10, 30, 100)
EPSILONS = (0.5, 2.0, 8.0, 32.0)
CHOSEN_ON = {"breast-cancer": 6, "digits": 2}
LOOKED_AT = {"wine": 3, "synthetic:rows=2000": 3, "diabetes": 3}
METRICS = {"binary": "auc", "multiclass": "accuracy", "regression": "r2"}


def measure(data: VerticalData, training: str, epsilon: float, epochs: int, seed: int) -> float | None:
    """The test metric of one run; None where it diverges."""
    plan = Plan(algorithm="vafl-sync", encoder_training=training, epsilon=epsilon, epochs=epochs, seed=seed)
    try:
        return float(train(data, plan).test[METRICS[data.task]])
    except TrainingDiverged:
        return None


def cell(values: list[float | None]) -> str:
    """Mean and standard error, or how many have diverged."""
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return f"{len(values) - len(found)} of {len(values)} diverge"
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
    return f"{statistics.mean(found):.3f} ± {error:.3f}"


def main() -> None:
    """Prints a row per set, mode and epsilon as it is done."""
    quick = "--quick" in sys.argv
    sets = {"wine": 1} if quick else {**CHOSEN_ON, **LOOKED_AT}
    print("| set | encoders | epsilon |", *(f"{passes} |" for passes in PASSES))
    for name, count in sets.items():
        loaded = {seed: VerticalData.load(name, parties=2, seed=seed) for seed in range(1, count + 1)}
        for training in ("raw", "dp", "none"):
            for epsilon in EPSILONS[:1] if quick else EPSILONS:
                cells = [
                    cell([measure(data, training, epsilon, passes, seed) for seed, data in loaded.items()])
                    for passes in PASSES
                ]
                print(f"| {name} | {training} | {epsilon:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
