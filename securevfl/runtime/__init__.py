"""Links and clocks: where roles run."""

from securevfl.runtime.delays import DELAYS, StepDelay, read_trace
from securevfl.runtime.links import QueueLink
from securevfl.runtime.loop import run_virtual
from securevfl.runtime.virtual import VirtualClock, VirtualNetwork

__all__ = [
    "DELAYS",
    "QueueLink",
    "StepDelay",
    "VirtualClock",
    "VirtualNetwork",
    "read_trace",
    "run_virtual",
]
