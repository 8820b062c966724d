"""Measures of a serving engine: the cost of its steps, and recent rates and durations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quadriga.core.relative_time import CompactPickleMixin


@dataclass(slots=True)
class StepTotals(CompactPickleMixin):
    """Sums over all steps that are over; a step with exits is one range of layers.

    Attributes:
        steps: How many.
        busy_s: In steps, and between two of them while there was work.
        sequences: In the step's batch.
        tokens: Decode: KV tokens that the step attended to. Prefill: prompt tokens computed.
    """

    steps: int = 0
    busy_s: float = 0.0
    sequences: int = 0
    tokens: int = 0

    def copy(self) -> StepTotals:
        """A snapshot for other threads."""
        return StepTotals(self.steps, self.busy_s, self.sequences, self.tokens)


class StepMeter:
    """Times an engine's steps from the beginning of one to the beginning of the next.

    What lies between them (tokens on their way, commands of the event loop) makes the batch wait
    too, so it counts; waiting for work does not.

    Attributes:
        totals: Without the step that is under way.
    """

    def __init__(self) -> None:
        self.totals = StepTotals()
        self._began_s = 0.0
        self._sequences = self._tokens = 0
        self._is_open = False

    def begin(self, now_s: float) -> None:
        """A step may begin; the one before is over."""
        self._close(now_s)
        self._began_s = now_s

    def ran(self, num_sequences: int, num_tokens: int) -> None:
        """It had work."""
        self._is_open = True
        self._sequences += num_sequences
        self._tokens += num_tokens

    def rest(self, now_s: float) -> None:
        """No other follows at once."""
        self._close(now_s)

    def busy_s(self, now_s: float) -> float:
        """`StepTotals.busy_s`, with the step that is under way so far."""
        return self.totals.busy_s + (now_s - self._began_s if self._is_open else 0.0)

    def _close(self, now_s: float) -> None:
        if not self._is_open:
            return
        totals = self.totals
        totals.steps += 1
        totals.busy_s += now_s - self._began_s
        totals.sequences += self._sequences
        totals.tokens += self._tokens
        self._sequences = self._tokens = 0
        self._is_open = False


@dataclass(slots=True)
class PrefixTotals(CompactPickleMixin):
    """What came of looking prompts up, since the start.

    Attributes:
        queries: Prompt tokens of the sequences that were given rows.
        hits: Those of them whose KV was there.
        evicted: Tokens whose KV was let go, for sequences or for newer prefixes.
        kept: Tokens whose KV is kept now.
    """

    queries: int = 0
    hits: int = 0
    evicted: int = 0
    kept: int = 0

    @property
    def hit_share(self) -> float | None:
        """Share of the tokens that were there; None before the first prompt."""
        return self.hits / self.queries if self.queries else None


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
