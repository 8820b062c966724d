"""Recent rates and durations, for forecasts and Retry-After."""

from __future__ import annotations

from collections import deque


class RateMeter:
    """Units per second over a sliding window, idle time included.

    Args:
        window_s: Length of the window; a younger meter divides by its age.
    """

    def __init__(self, *, window_s: float, now_s: float) -> None:
        self._window_s = window_s
        self._started_s = now_s
        self._events: deque[tuple[float, int]] = deque()
        self._total = 0

    def add(self, count: int, *, now_s: float) -> None:
        self._events.append((now_s, count))
        self._total += count
        self._forget(now_s)

    def per_s(self, *, now_s: float) -> float:
        self._forget(now_s)
        age_s = min(self._window_s, max(now_s - self._started_s, 1e-3))
        return self._total / age_s

    def _forget(self, now_s: float) -> None:
        while self._events and self._events[0][0] < now_s - self._window_s:
            self._total -= self._events.popleft()[1]


class Ewma:
    """Exponentially weighted mean; the first sample sets it."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._value: float | None = None

    def add(self, sample: float) -> None:
        self._value = (
            sample if self._value is None else self._value + self._weight * (sample - self._value)
        )

    @property
    def value(self) -> float:
        """The mean; 0 before the first sample."""
        return self._value or 0.0
