"""Links and clocks: where roles run."""

from securevfl.runtime.delays import DELAYS, StepDelay, read_trace
from securevfl.runtime.loop import run_virtual
from securevfl.runtime.virtual import VirtualClock, VirtualLink, VirtualNetwork

__all__ = [
    "DELAYS",
    "StepDelay",
    "VirtualClock",
    "VirtualLink",
    "VirtualNetwork",
    "read_trace",
    "run_virtual",
]
