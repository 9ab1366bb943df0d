"""The attack process: takes job folders from standard input, one per line, and reports on standard output.

It answers each with lines ``progress <share>`` and one line ``done``; the result lies in the job's folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from securevfl.attacks.jobs import ERROR, GUESS, Job, save_arrays
from securevfl.errors import SecureVFLError


def main() -> None:
    """Serves jobs until standard input ends."""
    # What an attack prints must not be mistaken for a report.
    with os.fdopen(os.dup(1), "w", buffering=1) as reports:
        os.dup2(2, 1)

        def progress(share: float) -> None:
            reports.write(f"progress {share:.4f}\n")

        for line in sys.stdin:
            folder = Path(line.rstrip("\n"))
            try:
                save_arrays(folder / GUESS, Job.read(folder).execute(progress))
            except SecureVFLError as error:
                (folder / ERROR).write_text(str(error), encoding="utf-8")
            except Exception as error:
                (folder / ERROR).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
            reports.write("done\n")


if __name__ == "__main__":
    main()
