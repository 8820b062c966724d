"""Clocks of the experiments: processor time, and one that stands still for what is not measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quadriga.clock import Clock


class ProcessorClock:
    """Processor time: what a machine in use does to others is not in it.

    Args:
        read: `time.thread_time` of the calling thread, or `time.process_time` of all threads.
    """

    def __init__(self, read: Callable[[], float] = time.thread_time) -> None:
        self.now_s = read

    def unix_s(self) -> float:
        return time.time()


class TurnClock:
    """A contestant's own clock: it runs in its turns only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spent_s = 0.0
        self._since_s: float | None = None

    def now_s(self) -> float:
        if self._since_s is None:
            return self._spent_s
        return self._spent_s + self._clock.now_s() - self._since_s

    def unix_s(self) -> float:
        return self._clock.unix_s()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let time pass inside."""
        self._since_s = self._clock.now_s()
        try:
            yield
        finally:
            self._spent_s, self._since_s = self.now_s(), None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no time pass inside, in a turn or not."""
        was_running = self._since_s is not None
        self._spent_s, self._since_s = self.now_s(), None
        try:
            yield
        finally:
            self._since_s = self._clock.now_s() if was_running else None
