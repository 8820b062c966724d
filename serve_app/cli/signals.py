"""SIGINT, SIGTERM and SIGHUP to a command that serves: how often it was asked to stop."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 1.0
"""`timeout` signals its child and then the whole group, and `make` passes SIGTERM on: one request
to stop may come as several signals, all within this time."""
SIGNAL_STATUS = 128


class StopSignals:
    """Counts requests to stop while it is entered; the handlers from before come back afterwards.

    Enter it on the main thread. A request raises KeyboardInterrupt there as long as `interrupts`
    holds: what the one before interrupted may still wait for its threads. Code that ends a service
    in order sets it to False, and requests are only counted then. SIGHUP counts unless it is
    ignored, as it is under `nohup`.

    Attributes:
        interrupts: Whether a request raises KeyboardInterrupt.
        num_requests: Requests so far.
        last: The signal of the latest request.
    """

    def __init__(self) -> None:
        self.interrupts = True
        self.num_requests = 0
        self.last = signal.SIGINT
        self._counted_s = float("-inf")
        self._earlier: dict[signal.Signals, Any] = {}

    @property
    def exit_status(self) -> int:
        """Of a command that ended at once, without the order that it owes."""
        return SIGNAL_STATUS + self.last

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            earlier = signal.getsignal(number)
            if number is signal.SIGHUP and earlier is signal.SIG_IGN:
                continue
            self._earlier[number] = earlier
            signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._counted_s < REPEAT_S:
            return
        self._counted_s = now_s
        self.num_requests += 1
        self.last = signal.Signals(number)
        if self.interrupts:
            raise KeyboardInterrupt
