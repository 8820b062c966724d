"""How long a segment takes for a batch: a small table per segment, kept fresh by what is measured.

    t_s(b, n) = base_s(b) + slope_s · n,    b rows with n context tokens together

`base_s` is piecewise linear between batch sizes that double, because on real machines it is not a
straight line: flat while the weights' bytes decide, linear once the operations do, and the knee is
where rebatching earns its money.

Measurements correct the knots around them (normalised least mean squares). Source: DREX fits
constants once; a recursive least squares fit with forgetting (the usual online form) winds up its
covariance at batch sizes that are not visited, so that the first visit after a while throws it.
"""

from __future__ import annotations

from bisect import bisect_right

_RATE = 0.1  # share of a surprise that is believed
_TRUST = 3.0  # a measurement this many times the forecast, or more, counts as this many times


class SegmentCosts:
    """Forecast of a pass's time.

    A test at an exit is a row of the table of its own, so that ranges with and without it are both
    known: a range is the sum of its segments and of the tested head.

    Args:
        num_segments: Segments of the model.
        max_rows: Largest batch.
    """

    def __init__(self, num_segments: int, max_rows: int) -> None:
        self.num_segments = num_segments
        self.max_rows = max_rows
        self._knots = [1]
        while self._knots[-1] < max_rows:
            self._knots.append(min(2 * self._knots[-1], max_rows))
        # One line per segment, then one per exit's head; seconds at each knot.
        self._base = [[1e-3] * len(self._knots) for _ in range(2 * num_segments)]
        self._slope = [0.0] * num_segments

    @property
    def knots(self) -> tuple[int, ...]:
        """Batch sizes the table knows."""
        return tuple(self._knots)

    def set(self, segment: int, count: int, seconds: float, *, head: bool = False) -> None:
        """Enter a calibrated time at a knot."""
        line = self.num_segments + segment if head else segment
        self._base[line][self._knots.index(count)] = max(seconds, 1e-9)

    def set_slope(self, segment: int, seconds_per_token: float) -> None:
        """Enter what a context token adds to a segment."""
        self._slope[segment] = max(0.0, seconds_per_token)

    def forecast_s(
        self, first: int, stop: int, count: float, num_tokens: float, *, tests: bool
    ) -> float:
        """Seconds for segments [first, stop) over `count` rows, the head behind it if tested."""
        weights = self._weights(count)
        total = 0.0
        for line in self._lines(first, stop, tests):
            base = self._base[line]
            total += sum(base[i] * w for i, w in weights)
        return total + num_tokens * sum(self._slope[first:stop])

    def observe(
        self, first: int, stop: int, count: int, num_tokens: int, seconds: float, *, tests: bool
    ) -> None:
        """Learn from a pass, in proportion to what each part of it was thought to take."""
        expected = self.forecast_s(first, stop, count, num_tokens, tests=tests)
        surprise = min(seconds / expected, _TRUST) - 1.0
        weights = self._weights(count)
        power = sum(w * w for _, w in weights)
        for line in self._lines(first, stop, tests):
            for i, w in weights:
                self._base[line][i] *= max(0.1, 1.0 + _RATE * surprise * w / power)

    def _lines(self, first: int, stop: int, tests: bool) -> list[int]:
        lines = list(range(first, stop))
        return [*lines, self.num_segments + stop - 1] if tests else lines

    def _weights(self, count: float) -> list[tuple[int, float]]:
        """Knots around a batch size, and how much each counts."""
        knots = self._knots
        if count <= 1 or len(knots) == 1:
            return [(0, 1.0)]
        i = min(bisect_right(knots, count), len(knots) - 1)
        share = (count - knots[i - 1]) / (knots[i] - knots[i - 1])
        if share >= 1.0:
            return [(i, share)] if share == 1.0 else [(i - 1, 1.0 - share), (i, share)]
        return [(i - 1, 1.0 - share), (i, share)]
