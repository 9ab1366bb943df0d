"""Machines whose clocks are wrong, or jump: unmodified commands, over a C library that tells another time.

TLS asks the operating system and not Python, so what Python takes for the time is not enough to try it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from victims import Consortium

DAY = 86_400
CLOCK = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Seconds by which the wall clock is wrong, read anew each time. */
static long wrong_by(void) {
  long found = 0;
  FILE *file = fopen(getenv("WRONG_BY"), "r");
  if (file) { if (fscanf(file, "%ld", &found) != 1) found = 0; fclose(file); }
  return found;
}
int clock_gettime(clockid_t which, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, which, now);
  if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += wrong_by();
  return failed;
}
time_t time(time_t *into) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (into) *into = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval *into, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  into->tv_sec = now.tv_sec;
  into->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler on Linux"
    ),
]


class Machines:
    """A bank and a clinic, each with a clock of its own."""

    def __init__(self, folder: Path, **days: float) -> None:
        self.folder, self.victims = folder, Consortium(folder)
        (folder / "clock.c").write_text(CLOCK)
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", folder / "clock.so", folder / "clock.c"], check=True, timeout=120
        )
        for name in ("bank", "clinic"):
            self.set(name, days.get(name, 0))

    def set(self, name: str, days: float) -> None:
        """Makes a machine's clock wrong by so many days."""
        new = self.folder / f"{name}.new"
        new.write_text(str(int(days * DAY)))
        new.replace(self.folder / f"{name}.clock")

    def start(self, name: str) -> subprocess.Popen[str]:
        """An organisation's process."""
        command = "serve" if name == "bank" else "join"
        return subprocess.Popen(
            [
                *(sys.executable, "-c", "from securevfl.cli import main; main()"),
                *(command, "--config", str(self.folder / name / "config.toml")),
            ],
            env={
                **os.environ,
                "LD_PRELOAD": str(self.folder / "clock.so"),
                "WRONG_BY": str(self.folder / f"{name}.clock"),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.mark.parametrize(
    ("name", "days", "said"),
    [
        ("clinic", 100, "the certificate of clinic expired 10 days ago"),
        ("clinic", -2, "check this machine's clock"),
        ("bank", 100, "the certificate of bank expired 10 days ago"),
        ("bank", -2, "check this machine's clock"),
    ],
)
def test_a_machine_whose_certificates_are_out_of_their_time_says_so(
    tmp_path: Path, name: str, days: float, said: str
) -> None:
    process = Machines(tmp_path, **{name: days}).start(name)
    assert said in process.communicate(timeout=240)[0] and process.returncode == 2


@pytest.mark.parametrize(("name", "days"), [("bank", 100), ("clinic", -400)])
def test_a_clock_that_jumps_while_processes_train_changes_nothing(
    tmp_path: Path, name: str, days: float
) -> None:
    """It jumps once the first checkpoint is written; at the start the bank's is 80 days ahead."""
    machines = Machines(tmp_path, bank=80)
    config = tmp_path / "bank" / "config.toml"
    config.write_text(config.read_text().replace("epochs = 2", "epochs = 40"))
    processes = {each: machines.start(each) for each in ("bank", "clinic")}
    try:
        while not (tmp_path / "clinic" / "run" / "checkpoints").exists():
            assert processes["clinic"].poll() is None
            time.sleep(0.02)
        machines.set(name, days)
        ended = {each: process.communicate(timeout=240)[0] for each, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    assert [process.returncode for process in processes.values()] == [0, 0], ended
    assert "40 epochs" in ended["clinic"]
