"""`securevfl` and `python -m securevfl`: Ctrl-C while the command line is loaded ends in one line, too."""

import os
import signal
from types import FrameType


def main() -> None:
    """Runs the command line; while it is loaded there is nothing to leave in order."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # somebody else decides
        from securevfl.cli import main as run
    else:
        signal.signal(signal.SIGINT, _end)
        from securevfl.cli import main as run

        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _end(number: int, frame: FrameType | None) -> None:
    """Ends at once: an exception would be lost where Python imports, or become another one."""
    os.write(2, b"securevfl: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
