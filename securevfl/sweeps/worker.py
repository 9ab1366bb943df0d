"""A worker process of a sweep: takes tasks from standard input, one JSON object per line, answers likewise.

It ends with its parent: when standard input closes, it and the attack processes it started are gone at once,
so that a killed sweep leaves nobody who still writes to its folder.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Serves tasks until standard input closes."""
    tasks: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    from securevfl.sweeps.work import run_alone

    # What a run prints must not be mistaken for an answer.
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as answers:
        os.dup2(2, 1)
        while True:
            answers.write(json.dumps(run_alone(tasks.get()), allow_nan=False) + "\n")


def _listen(tasks: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        tasks.put(json.loads(line))
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
