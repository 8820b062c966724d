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
from collections.abc import Sequence

_RATE = 0.1  # share of a surprise that is believed
_TRUST = 3.0  # a measurement this many times the forecast, or more, counts as this many times


class SegmentCosts:
    """Forecast of a pass's time.

    A test at an exit is a row of the table of its own, so that ranges with and without it are both
    known: a range is the sum of its segments and of the tested head.

    Args:
        num_segments: Segments of the model.
        max_rows: Largest batch.

    Attributes:
        fill_s: Of filling in one segment's KV at one position that a token has skipped.
        fill_row_s: Of filling in one segment's KV in a row at all, however many positions it lacks:
            the newest few cost more, and going there costs something.
        spared_s: By which a pass of drafts that follows a `DraftPlan` is shorter than another one.
        filled_share: Of what early tokens skip, the share that is filled in one day; the others
            belong to sequences that end before they go deep again.
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
        self.fill_s = self.fill_row_s = self.spared_s = 0.0
        self.filled_share = 1.0

    @property
    def knots(self) -> tuple[int, ...]:
        """Batch sizes the table knows."""
        return tuple(self._knots)

    def resized(self, before: Sequence[int], ends: Sequence[int]) -> SegmentCosts:
        """The table for other segments; those that stay keep their times.

        A new one is thought to take as long a layer as the known ones do, until it is measured.

        Args:
            before, ends: Layers run at the end of each segment, until now and from now on.
        """
        other = SegmentCosts(len(ends), self.max_rows)
        while len(other._knots) < len(self._knots):
            other.extend(self._knots[len(other._knots)], 1.0)
        common = min(len(before), len(ends))
        head = self._head_line()
        num_known = before[-1]
        for i in range(len(self._knots)):
            # The end of the model has its head's time in its segment's.
            body = [self._base[s][i] for s in range(len(before))]
            body[-1] = max(0.1 * body[-1], body[-1] - head[i])
            per_layer = sum(body) / num_known
            for s, end in enumerate(ends):
                layers = end - (ends[s - 1] if s else 0)
                is_last = s == len(ends) - 1
                other._base[s][i] = body[s] if s < common else per_layer * layers
                other._base[s][i] += head[i] if is_last else 0.0
                if not is_last:
                    was_inner = s < len(before) - 1
                    known = self._base[len(before) + s][i] if was_inner else head[i]
                    other._base[len(ends) + s][i] = known
        slope = sum(self._slope) / num_known
        for s, end in enumerate(ends):
            layers = end - (ends[s - 1] if s else 0)
            other._slope[s] = self._slope[s] if s < common else slope * layers
        other.fill_s, other.fill_row_s = self.fill_s, self.fill_row_s
        other.filled_share, other.spared_s = self.filled_share, self.spared_s
        return other

    def _head_line(self) -> list[float]:
        """What a head takes at each knot: as those of inner exits do, or a guess without any."""
        inner = self._base[self.num_segments : 2 * self.num_segments - 1]
        if not inner:
            return [0.1 * seconds for seconds in self._base[0]]
        return [sum(line[i] for line in inner) / len(inner) for i in range(len(self._knots))]

    def extend(self, count: int, factor: float) -> None:
        """Let the table reach up to a larger count; there all takes so many times as long.

        A pass has more positions than rows where it verifies what was drafted.
        """
        self._knots.append(count)
        for line in self._base:
            line.append(line[-1] * factor)

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
        self,
        first: int,
        stop: int,
        count: int,
        num_tokens: int,
        seconds: float,
        *,
        tests: bool,
        filled: int = 0,
    ) -> None:
        """Learn from a pass, in proportion to what each part of it was thought to take.

        Args:
            filled: Positions × segments whose KV it had to fill in first.
        """
        expected = self.forecast_s(first, stop, count, num_tokens, tests=tests)
        # Rows that lack nothing are few where anything is filled in at all.
        entered = min(filled, count * (stop - max(1, first)))
        filling_s = self.filling_s(filled, entered)
        expected += filling_s
        surprise = min(seconds / expected, _TRUST) - 1.0
        weights = self._weights(count)
        power = sum(w * w for _, w in weights)
        for line in self._lines(first, stop, tests):
            for i, w in weights:
                self._base[line][i] *= max(0.1, 1.0 + _RATE * surprise * w / power)
        if filled:
            # As far as filling is what the pass took its time for.
            factor = max(0.1, 1.0 + _RATE * surprise * filling_s / expected)
            self.fill_s *= factor
            self.fill_row_s *= factor

    def filling_s(self, filled: float, entered: float) -> float:
        """Seconds to fill in `filled` positions × segments of `entered` rows × segments."""
        return self.fill_s * filled + self.fill_row_s * entered

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
