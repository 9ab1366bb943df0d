"""Sweeps: many runs, one table of privacy against utility."""

from securevfl.sweeps.engine import SweepProgress, run_sweep
from securevfl.sweeps.executors import Executor, LocalExecutor
from securevfl.sweeps.presets import PRESETS, preset
from securevfl.sweeps.results import Results
from securevfl.sweeps.spec import AuditSettings, Point, Sweep, Target, parse_sweep, read_sweep

__all__ = [
    "PRESETS",
    "AuditSettings",
    "Executor",
    "LocalExecutor",
    "Point",
    "Results",
    "Sweep",
    "SweepProgress",
    "Target",
    "parse_sweep",
    "preset",
    "read_sweep",
    "run_sweep",
]
