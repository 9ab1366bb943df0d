"""Ctrl-C: it ends a command at once while modules are loaded, and is an exception once something is begun.

Python and others' modules lose what is raised while they are imported, or make something else of it: commands
went on, ended in a traceback, or in an abort of the process.
"""

import os
import signal
from types import FrameType


def end_at_once() -> None:
    """Ends the process at the next Ctrl-C, in one line; whoever ignores or handles it otherwise goes on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def end_in_order() -> None:
    """Has Ctrl-C raise `KeyboardInterrupt` again: everything is loaded, and something is begun."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"securevfl: interrupted\n")
    os._exit(130)
