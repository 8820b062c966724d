"""What happens to a group behind its pass: who leaves, who waits there, and what is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

from quadriga.batching.places import Places, Running, summary
from quadriga.exits import Criterion, ExitCounters, ExitParams
from quadriga.policies.rebatching import AtExit, Range, Rebatcher, Verdict


class ExitGate:
    """Asks the policy and carries its verdict out.

    Args:
        ends: Layers run at each exit, ascending.
        criterion: How a confidence is compared with its threshold.
        is_partial: The model has layers beyond those loaded, so that tokens which leave the deepest
            one below their threshold are breaches.
    """

    def __init__(
        self,
        *,
        ends: Sequence[int],
        places: Places,
        rebatcher: Rebatcher,
        counters: ExitCounters,
        criterion: Criterion,
        is_partial: bool,
    ) -> None:
        self._ends = tuple(ends)
        self._places = places
        self._rebatcher = rebatcher
        self._counters = counters
        self._criterion = criterion
        self._is_partial = is_partial

    def bar(self, exits: ExitParams) -> float:
        """The confidence from which a token passes: c ≥ bar."""
        threshold = exits.threshold
        if threshold >= 1.0:
            return math.inf
        return threshold if self._criterion == "top" else math.nextafter(threshold, math.inf)

    def last_segment(self, exits: ExitParams) -> int:
        """The deepest segment that stays within a request's depth limit; at least the first."""
        last = len(self._ends) - 1
        if exits.max_depth <= 0:
            return last
        within = [i for i, end in enumerate(self._ends) if end <= exits.max_depth]
        return within[-1] if within else 0

    def judge(
        self,
        ran: Range,
        group: list[Running],
        confidences: list[float],
        num_tokens: int,
        now_s: float,
    ) -> tuple[list[Running], int | None]:
        """Who leaves at the exit behind `ran`, and how many may; the others wait there from now."""
        if ran.stop == len(self._ends):
            if self._is_partial:
                self._count_breaches(group, confidences)
            return group, None
        passed = [c >= r.bar for c, r in zip(confidences, group, strict=True)]
        stays = [r for r, p in zip(group, passed, strict=True) if not p]
        place = self._places.waiting[ran.stop - 1]
        at_exit = AtExit(
            ran=ran,
            confidences=confidences,
            thresholds=[r.threshold for r in group],
            passed=passed,
            num_tokens=num_tokens,
            waiting=summary(place.values()),
            remaining=summary(stays),
        )
        verdict = self._rebatcher.judge(at_exit, now_s)
        count = len(group) - len(stays)
        if self._places.num_limited or verdict is Verdict.LEAVE:
            return self._leave(verdict, at_exit, group, now_s), count
        if verdict is Verdict.SPLIT:
            leavers = list(compress(group, passed))
        else:
            leavers, stays = [], group
            self._counters.involuntary_stays += count
        for running in stays:
            self._places.move(running, place, now_s)
        self._counters.buffered += len(stays)
        return leavers, count

    def _leave(
        self, verdict: Verdict, at: AtExit, group: list[Running], now_s: float
    ) -> list[Running]:
        """The general case: rows at the end of their own depth leave whatever the verdict."""
        exit_index = at.ran.stop - 1
        place = self._places.waiting[exit_index]
        leavers = []
        for running, confidence, passed in zip(group, at.confidences, at.passed, strict=True):
            if running.last_segment == exit_index:
                self._count_breaches([running], [confidence])
                leavers.append(running)
            elif verdict is Verdict.LEAVE or (passed and verdict is Verdict.SPLIT):
                self._counters.involuntary_exits += not passed
                leavers.append(running)
            else:
                self._counters.involuntary_stays += passed
                self._places.move(running, place, now_s)
        self._counters.buffered += len(group) - len(leavers)
        return leavers

    def _count_breaches(self, group: Sequence[Running], confidences: Sequence[float]) -> None:
        self._counters.breaches += sum(
            c < r.bar for c, r in zip(confidences, group, strict=True) if r.bar < math.inf
        )
