"""Convergence bounds of the papers, as pure mathematics: constants in, admissible rates and bounds out.

Each module belongs to one paper and says in its docstrings what is printed there, what is wrong with it, and
what is computed instead. `securevfl.algorithms.constants` estimates the constants of a plan.
"""
