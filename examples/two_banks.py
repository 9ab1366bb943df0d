"""Two banks, two CSV files, different rows in different order: only the common customers are used."""

import csv
import tempfile
from pathlib import Path

import numpy as np

from securevfl import Plan, VerticalData, train

generator = np.random.default_rng(0)
customers = np.arange(1000, 1600)
income = generator.normal(3.0, 1.0, customers.size)
debt = generator.normal(1.0, 0.5, customers.size)
default = (debt - 0.4 * income + generator.normal(0, 0.3, customers.size) > 0).astype(int)

with tempfile.TemporaryDirectory() as folder:
    first, second = Path(folder) / "bank-a.csv", Path(folder) / "bank-b.csv"
    with first.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["customer", "debt", "default"])
        rows.writerows([c, f"{d:.4f}", y] for c, d, y in zip(customers[:550], debt, default, strict=False))
    with second.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["customer", "income"])
        order = generator.permutation(np.arange(50, customers.size))
        rows.writerows([customers[i], f"{income[i]:.4f}"] for i in order)

    data = VerticalData.from_csv([first, second], id_column="customer", label_column="default")
    for note in data.notes:
        print("note:", note)
    alone = train(data, Plan(algorithm="local", epochs=20)).test["auc"]
    together = train(data, Plan(algorithm="vafl", epochs=20, sigma=0.5)).test["auc"]
    print(f"AUC of bank A alone {alone:.3f}, together with bank B {together:.3f}")
