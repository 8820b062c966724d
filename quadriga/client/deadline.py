"""One budget of time for a request and all its attempts."""

from __future__ import annotations

import time

from quadriga.errors import DeadlineExceeded

CANCEL_TIMEOUT_S = 2.0


class Deadline:
    """Counts down from `timeout_s` from now on."""

    def __init__(self, timeout_s: float) -> None:
        self._give_up_s = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Seconds left. Raises: DeadlineExceeded when none are."""
        left_s = self._give_up_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the request was not done within its timeout")
        return left_s

    def left_ms(self) -> int:
        """Milliseconds left, at least one. Raises: DeadlineExceeded when none are."""
        return max(1, int(self.left_s() * 1000))

    def allows(self, pause_s: float) -> bool:
        """Whether anything is left after a pause."""
        return time.monotonic() + pause_s < self._give_up_s
