"""`make bench`: every benchmark, one after the other, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = (
    "structure",
    "core",
    "models",
    "protocols",
    "homomorphic",
    "discrete_gaussian",
    "accountants",
    "attacks",
    "afsgd",
    "sealed",
    "dealerless",
    "advice",
    "network",
    "durations",
    "alignment",
    "growth",
    "device",
    "scoring",
)


def main() -> None:
    wanted = sys.argv[1:] or NAMES
    known = {file.stem for file in Path(__file__).parent.glob("[a-z]*.py")}
    if unknown := sorted(set(wanted) - known):
        sys.exit(f"no benchmark is called {unknown[0]!r}; there are {', '.join(sorted(known))}")
    for name in wanted:
        print(f"\n== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
