"""The terminal output of a command that serves."""

from __future__ import annotations

import threading
import time
from typing import TextIO

from serve_app.cli.local_stop import Drain

REPORT_INTERVAL_S = 5.0
"""Between two lines about the drain, where they cannot be written over each other."""
REWRITE = "\r\x1b[2K\x1b[?7l{}\x1b[?7h"
"""Rewrites one line of a terminal; longer text is cut and does not begin another line."""


class Console:
    """Lines of text; what a service waits for before it ends is one line, written anew.

    Several threads may use it.

    Args:
        out: A terminal, or what stands for one: a log then gets a line whenever something changed.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._is_terminal = out.isatty()
        self._is_within_line = False
        self._last: tuple[int | None, bool] | None = None
        self._said_s = float("-inf")

    def say(self, text: str) -> None:
        with self._lock:
            start = "\n" if self._is_within_line else ""
            self._is_within_line = False
            print(f"{start}{text}", file=self._out, flush=True)

    def progress(self, text: str) -> None:
        """Say how far a start or an end is, and when that was."""
        self.say(f"  {time.monotonic() - self._began_s:4.0f} s  {text}")

    def report(self, drain: Drain) -> None:
        """Show the state of the drain, where it is due."""
        text = drain_text(drain)
        if not self._is_terminal:
            if self._is_due(drain):
                self.say(text)
            return
        with self._lock:
            self._is_within_line = True
            print(REWRITE.format(text), end="", file=self._out, flush=True)

    def _is_due(self, drain: Drain) -> bool:
        state, now_s = (drain.num_requests, drain.is_hurried), time.monotonic()
        if state == self._last:
            return False
        if drain.num_requests and not drain.is_hurried and now_s - self._said_s < REPORT_INTERVAL_S:
            return False
        self._last, self._said_s = state, now_s
        return True


def drain_text(drain: Drain) -> str:
    """What a service waits for, and how it is ended sooner."""
    count = drain.num_requests
    if count == 0:
        return "stopping: no requests are running; ending the processes"
    what = "the running requests" if count is None else f"{count} running requests"
    if count == 1:
        what = "1 running request"
    if drain.left_s == 0:
        return f"stopping: ending {what} in an error"
    return f"stopping: waiting up to {drain.left_s:.0f} s for {what}; Ctrl-C again ends them now"
