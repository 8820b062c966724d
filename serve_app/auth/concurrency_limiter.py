"""Room for calls that may last and are no generations, so that they never use up Serve's own limit.

Serve lets an ingress have so many calls at once and keeps all others waiting, without an end. What
generates is counted by the front desk, and refused in time. Whoever opens thousands of health
watches, for which nobody needs a key, or sends thousands of bodies slowly, would otherwise keep all
others out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quadriga.errors import Overloaded

MAX_BODIES = 512
"""Requests at once whose body is not here yet."""
MAX_WATCHES = 64
"""Health watches at once; more are told the state once."""
MAX_READERS = 4
"""Connections at once that follow one request: one that broke may not be noticed at once."""
RETRY_S = 1.0


class ConcurrencyLimiter:
    """A bounded number of calls of one kind at once.

    Args:
        what: What they do, for the refusal.
    """

    def __init__(self, limit: int, what: str) -> None:
        self._limit = limit
        self._what = what
        self.num_taken = 0

    @property
    def is_full(self) -> bool:
        return self.num_taken >= self._limit

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take one place. Raises: Overloaded."""
        if self.is_full:
            raise Overloaded(
                f"{self.num_taken} calls at once {self._what}, the limit; retry shortly",
                retry_after_s=RETRY_S,
            )
        self.num_taken += 1
        try:
            yield
        finally:
            self.num_taken -= 1
