"""When refused callers are to come back, and the places that are reserved for them.

A time to come back holds only if callers that arrive meanwhile cannot take the place. So each
refused caller gets a reservation, at the end of a line of reservations. (Without it, by a predicted
time alone, half of the returning callers are refused again and wait 1.5 times as long as predicted:
tests/unit/policies/test_retry_reservations.py simulates it.)

    back     places that are free now, and those that come free until then, are enough for all
             reservations before it and for its own, also where places come free late
    walk-in  let in where the places left, and those that come free as expected, are enough for
             every reservation

Not every caller comes back: each reservation counts as much as the share of callers that did. With
no callers coming back, nothing is reserved and all is first come first served.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

MIN_WAIT_S = 0.25
CAUTION = 1.5
"""Standard deviations by which places may come free later than expected, as random events do."""
EARLY_S = 0.02
"""A caller that comes so little before its time is in time."""
PRIOR_RETURNS = 2.0
"""Callers are believed to come back until so many did not."""
KEPT_OUTCOMES = 0.985
"""Of what is known about outcomes, with each further one."""
OUTCOMES_S = 8.0
"""The same is forgotten with this time constant: the next callers may obey."""
LATENESS_WEIGHT = 0.1
LATE_FACTOR = 3.0
"""Of the usual lateness; a place is not kept for longer."""
KEPT_S = (0.2, 2.0)
"""Least and most that a place is kept for."""
REMEMBERED_S = 5.0
"""A caller that comes later than that counts as new: it may be another one that asks the same."""
MAX_RESERVATIONS = 5000
HALF = 0.5  # fractions of places are rounded to the nearest


@dataclass(slots=True)
class RetryReservations:
    """The refused callers of one model, in the order in which they are to come back.

    A caller is known by its `visitor`: who asks, and what. Callers who are alike are as good as one
    another; one without a name gets no reservation.
    """

    _line: list[tuple[float, str]] = field(default_factory=list)
    _by_visitor: dict[str, list[float]] = field(default_factory=dict)
    _missed_to_s: float = -math.inf
    _returned: float = 0.0
    _missed: float = 0.0
    _lateness_s: float = 0.1
    _seen_s: float = 0.0

    def __len__(self) -> int:
        return len(self._line)

    @property
    def return_share(self) -> float:
        """Share of refused callers that come back at their time, as far as is known."""
        came = self._returned + PRIOR_RETURNS
        return came / (came + self._missed)

    def ask(
        self,
        visitor: str,
        free: float,
        free_per_s: float,
        *,
        now_s: float,
        least_free: float = 0.0,
        num_places: int = 1,
    ) -> float | None:
        """Let a caller in, or say when it could come back; `keep` has places kept for it.

        A caller that comes at its time is let in before all others.

        Args:
            free: Free places for the last sequence of its request, behind the others; negative
                where some wait for one already.
            free_per_s: Places that come free in a second; above 0.
            least_free: For a caller that comes at its time: 0 where it may wait for the
                next place that comes free, 1 where it needs one now.
            num_places: That its request needs.

        Returns:
            None, or seconds from now.
        """
        self._pass_time(now_s)
        if self._keeps_reservation(visitor, num_places, now_s):
            if free >= least_free:
                return None
            ahead = self._num_short(free, free_per_s, now_s)
        else:
            if self._may_walk_in(free, free_per_s, now_s):
                return None
            ahead = len(self._line) - self._num_before(self._missed_to_s)
        wanted = 1.0 - free + self.return_share * ahead
        return max(MIN_WAIT_S, _enough(wanted) / free_per_s)

    def keep(self, visitor: str, due_s: float, num_places: int = 1) -> None:
        """Reserve places for a caller that is told to come back then."""
        if visitor and len(self._line) < MAX_RESERVATIONS:
            for _ in range(num_places):
                insort(self._line, (due_s, visitor))
                insort(self._by_visitor.setdefault(visitor, []), due_s)

    def _may_walk_in(self, free: float, free_per_s: float, now_s: float) -> bool:
        """Whether enough is left for the reservations of the next moment, of twice that, …"""
        if free < 1.0:
            return False
        first = self._num_before(self._missed_to_s)
        ahead_s = 0.0
        while True:
            last = bisect_right(self._line, (now_s + ahead_s, chr(0x10FFFF)))
            left = free - 1.0 + ahead_s * free_per_s
            if left < self.return_share * (last - first) - HALF:
                return False
            if last == len(self._line):
                return True
            ahead_s = max(1.0 / free_per_s, 2.0 * ahead_s)

    def _num_short(self, free: float, free_per_s: float, now_s: float) -> int:
        """Reservations up to the last that could not be kept if one more caller came before it.

        A caller that came in vain, because its time was too early, comes again behind those: else
        it would take the place of the next, which would take that of the next.
        """
        first = self._num_before(self._missed_to_s)
        for last in range(len(self._line), first, -1):
            due_s = self._line[last - 1][0]
            left = free - 1.0 + (due_s - now_s) * free_per_s
            if left < self.return_share * (last - first) - HALF:
                return last - first
        return 0

    def _keeps_reservation(self, visitor: str, num_places: int, now_s: float) -> bool:
        """Take the earliest reservation of such a caller, if it is due."""
        times = self._by_visitor.get(visitor)
        if not times or times[0] > now_s + EARLY_S:
            return False
        due_s, num_alike = times[0], min(num_places, bisect_right(times, times[0]))
        at = bisect_left(self._line, (due_s, visitor))
        del times[:num_alike], self._line[at : at + num_alike]
        if not times:
            del self._by_visitor[visitor]
        self._lateness_s += LATENESS_WEIGHT * (max(0.0, now_s - due_s) - self._lateness_s)
        if due_s < self._missed_to_s:  # it was given up too early
            self._missed = max(0.0, self._missed - num_alike)
            self._returned += num_alike
        else:
            self._count(returned=num_alike, missed=0)
        return True

    def _pass_time(self, now_s: float) -> None:
        """Give up late callers, and forget very late ones."""
        known = math.exp(-max(0.0, now_s - self._seen_s) / OUTCOMES_S)
        self._returned, self._missed = known * self._returned, known * self._missed
        self._seen_s = now_s
        kept_s = min(max(LATE_FACTOR * self._lateness_s, KEPT_S[0]), KEPT_S[1])
        before = self._num_before(self._missed_to_s)
        self._missed_to_s = max(self._missed_to_s, now_s - kept_s)
        self._count(returned=0, missed=self._num_before(self._missed_to_s) - before)
        gone = self._num_before(now_s - REMEMBERED_S)
        for _, visitor in self._line[:gone]:
            times = self._by_visitor[visitor]
            del times[0]
            if not times:
                del self._by_visitor[visitor]
        del self._line[:gone]

    def _count(self, *, returned: int, missed: int) -> None:
        kept = KEPT_OUTCOMES ** (returned + missed)
        self._returned = self._returned * kept + returned
        self._missed = self._missed * kept + missed

    def _num_before(self, time_s: float) -> int:
        return bisect_left(self._line, (time_s, ""))


def _enough(wanted: float) -> float:
    """Expected number of events from which at least `wanted` will have happened.

    With x events expected, `CAUTION` standard deviations fewer are x − CAUTION · √x.
    """
    root = (CAUTION + math.sqrt(CAUTION**2 + 4.0 * max(0.0, wanted))) / 2.0
    return root * root
