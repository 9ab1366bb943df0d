"""The time that roles live in: virtual, on a loop whose time jumps to the next timer, or real.

Virtually nothing ever sleeps: where a real loop would wait for a timer, the virtual one sets its clock
forward. Callbacks run in the order in which asyncio would run them, so a run is a function of its seeds.
Where a real loop would wait for ever, nobody can wake anybody any more: that is reported as a deadlock.
"""

from __future__ import annotations

import asyncio
import selectors
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from securevfl.errors import DeadlockError
from securevfl.privacy.messages import Stop

T = TypeVar("T")
_AT_ONCE = 1e-9  # asyncio runs timers that are due within its clock's resolution


class _Selector(selectors.SelectSelector):
    """Polls no file: where a loop would wait, `wait` is told for how long, None for ever."""

    def __init__(self, wait: Callable[[float | None], None]) -> None:
        super().__init__()
        self.wait = wait

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self.wait(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; `time` is in the run's time units and starts where it is told."""

    def __init__(self, start: float = 0.0, explain: Callable[[], str] = str) -> None:
        self.now, self._explain = start, explain
        super().__init__(_Selector(self._wait))

    def _wait(self, timeout: float | None) -> None:
        if timeout is None:
            raise DeadlockError(f"every role waits and nothing is under way: {self._explain()}")
        self.now += timeout

    def time(self) -> float:
        """The virtual time."""
        return self.now


class SteppedLoop(VirtualLoop):
    """A loop whose clock somebody else moves; where it would wait, it stops."""

    wake: float | None = None

    def _wait(self, timeout: float | None) -> None:
        if timeout is None or timeout >= _AT_ONCE:
            self.wake = None if timeout is None else self.now + timeout
            self.stop()

    def run_until_idle(self, now: float) -> float | None:
        """Runs whatever can run at that time; returns when the next timer is due."""
        self.now = now
        self.run_forever()
        return self.wake


def run_virtual(
    main: Coroutine[Any, Any, T], *, start: float = 0.0, explain: Callable[[], str] = str
) -> tuple[T, float]:
    """Runs a coroutine to its end in virtual time; returns its result and the time at the end.

    Raises:
        DeadlockError: All tasks wait for something that cannot happen.
    """
    loop = None
    try:
        with undisturbed():
            loop = VirtualLoop(start, explain)
        return loop.run_until_complete(main), loop.time()
    except KeyboardInterrupt:
        if loop is not None:
            loop.set_exception_handler(lambda *_: None)  # the interrupted task is no news to anybody
        raise
    finally:
        with undisturbed():
            main.close()
            if loop is not None:
                _cancel_rest(loop)
                loop.close()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Lets Ctrl-C wait for a moment: a loop that is half made or half closed cannot be put away."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cancel_rest(loop: VirtualLoop) -> None:
    """Ends tasks that a deadlock or an interrupt left behind, so that none is destroyed while pending."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        # An interrupt may have taken a task's wake-up with it; that task cannot even be cancelled any more.
        with suppress(DeadlockError):
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


class VirtualClock:
    """Virtual time, as the loop that runs the roles keeps it."""

    def now(self) -> float:
        """Time units since the run began."""
        return asyncio.get_running_loop().time()

    async def sleep_until(self, when: float, stop: Stop | None = None) -> bool:
        """Waits for a point in time; returns False if `stop` was set first."""
        if stop is not None and stop.is_set():
            return False
        loop = asyncio.get_running_loop()
        if when <= loop.time():
            return True
        sleeper: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_at(when, _wake, sleeper)
        if stop is not None:
            stop.sleepers.add(sleeper)
        try:
            return await sleeper
        finally:
            timer.cancel()
            if stop is not None:
                stop.sleepers.discard(sleeper)


def _wake(sleeper: asyncio.Future[bool]) -> None:
    if not sleeper.done():
        sleeper.set_result(True)


MAX_TIME_UNIT = 86400.0
"""Seconds that a simulated time unit may last at most."""


class RealClock:
    """Seconds since the run began, going on where a checkpoint left off.

    Computation and network take the time they take. The delays that a plan simulates are slept only if a time
    unit is given.

    Args:
        unit: Seconds that a simulated time unit lasts; 0 does not sleep.
    """

    def __init__(self, unit: float = 0.0) -> None:
        self.unit = unit
        self.set(0.0)

    def set(self, now: float) -> None:
        """Makes it this time now."""
        self._origin = time.monotonic() - now * (self.unit or 1.0)

    def now(self) -> float:
        """Time since the run began: in time units, or in seconds where none is given."""
        return (time.monotonic() - self._origin) / (self.unit or 1.0)

    async def sleep_until(self, when: float, stop: asyncio.Event | None = None) -> bool:
        """Waits for a point in time; returns False if `stop` was set first."""
        if stop is not None and stop.is_set():
            return False
        delay = (when - self.now()) * self.unit
        if delay <= 0:
            await asyncio.sleep(0)
            return stop is None or not stop.is_set()
        if stop is None:
            await asyncio.sleep(delay)
            return True
        try:
            async with asyncio.timeout(delay):
                await stop.wait()
        except TimeoutError:
            return True
        return False
