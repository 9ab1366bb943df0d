"""A sum of private vectors: nobody sees a single one, and two dropped parties do not matter."""

import numpy as np

from securevfl.protocols import PairwiseMaskSum, TwoTreeSum, build_trees

salaries = [np.array([salary, 1.0]) for salary in (52_000, 61_500, 48_250, 70_000)]
total, count = TwoTreeSum(workers=4, collusion=2).sum(salaries)
print(f"mean salary {total / count:,.2f}")

total, count = PairwiseMaskSum(workers=4).sum(salaries)
print(f"mean salary {total / count:,.2f}, with pairwise masks")

trees = build_trees(4, collusion=2)
print("workers 0 and 1 together learn only the sum of", *trees.learned_by({0, 1}))
