"""When the SDK tries again, and how long it waits before."""

from __future__ import annotations

import random
from dataclasses import dataclass

from quadriga.errors import QuadrigaError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential back-off with jitter, or as long as the server says.

    Attributes:
        max_attempts: Calls in all; a stream that made progress starts counting anew.
        first_pause_s: Before the second attempt; doubled each time.
        max_pause_s: Longest pause; a server that asks for more is not waited for.
    """

    max_attempts: int = 5
    first_pause_s: float = 0.1
    max_pause_s: float = 10.0

    def pause_s(self, error: QuadrigaError, attempt: int) -> float | None:
        """Seconds to wait before attempt `attempt + 1`, or None to give up.

        Args:
            attempt: Attempts made so far, at least 1.
        """
        if not error.retryable or attempt >= self.max_attempts:
            return None
        if error.retry_after_s is not None:
            if error.retry_after_s > self.max_pause_s:
                return None
            return error.retry_after_s * random.uniform(1.0, 1.1)
        pause_s = min(self.max_pause_s, self.first_pause_s * 2.0 ** min(attempt - 1, 64))
        return pause_s * random.uniform(0.5, 1.0)
