"""Links and clocks: where roles run."""

from securevfl.runtime.delays import DELAYS, StepDelay, read_trace
from securevfl.runtime.links import QueueLink
from securevfl.runtime.loop import run_virtual
from securevfl.runtime.stepped import Step, SteppedNetwork, SteppedPhase
from securevfl.runtime.virtual import VirtualClock, VirtualNetwork

__all__ = [
    "DELAYS",
    "QueueLink",
    "Step",
    "StepDelay",
    "SteppedNetwork",
    "SteppedPhase",
    "VirtualClock",
    "VirtualNetwork",
    "read_trace",
    "run_virtual",
]
