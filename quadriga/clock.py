"""Time as a value that is passed in, so that the simulator and the cluster run the same code."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where policies and loops get the time from.

    `now_s` never goes back and is for intervals inside one process; `unix_s` is wall-clock time
    and is for instants that travel between processes (arrival, lease). Deadlines travel as what is
    left of them, and are instants again by the clock of the machine where they arrive.
    """

    def now_s(self) -> float: ...

    def unix_s(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to; for tests and for the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward. Raises: ValueError when `seconds` is negative."""
        if seconds < 0:
            raise ValueError(f"time cannot go back: advance({seconds})")
        self._now_s += seconds
