"""What happens to a group behind its pass: who leaves, who waits there, and what is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

from quadriga.checkpoint.exits import Criterion, ExitCounters, ExitParams
from quadriga.policies.rebatching import BatchDecision, ExitGroup, Range, Rebatcher
from quadriga.scheduling.batch_state import BatchState, RunningRow, summary


class ExitGate:
    """Asks the policy and carries its verdict out.

    Args:
        ends: Layers run at each exit, ascending.
        criterion: How a confidence is compared with its threshold.
        is_partial: The model has layers beyond those loaded, so that tokens which leave the deepest
            one below their threshold are breaches.
        parks_strict: Strict sequences wait there instead, for somebody to take them deeper.
    """

    def __init__(
        self,
        *,
        ends: Sequence[int],
        places: BatchState,
        rebatcher: Rebatcher,
        counters: ExitCounters,
        criterion: Criterion,
        is_partial: bool,
        parks_strict: bool = False,
    ) -> None:
        self._ends = tuple(ends)
        self._places = places
        self._rebatcher = rebatcher
        self._counters = counters
        self._criterion = criterion
        self._is_partial = is_partial
        self._parks_strict = parks_strict

    def follow(self, ends: Sequence[int], rebatcher: Rebatcher, *, is_partial: bool) -> None:
        """Follow the loaded depth."""
        self._ends = tuple(ends)
        self._rebatcher = rebatcher
        self._is_partial = is_partial

    @property
    def depth(self) -> int:
        """Layers loaded."""
        return self._ends[-1]

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
        group: list[RunningRow],
        confidences: list[float],
        num_tokens: int,
        now_s: float,
    ) -> tuple[list[RunningRow], int | None]:
        """Who leaves at the exit behind `ran`, and how many may; the others wait there from now."""
        if ran.stop == len(self._ends):
            return self._leave_last(group, confidences, now_s), None
        passed = [c >= r.bar for c, r in zip(confidences, group, strict=True)]
        stays = [r for r, p in zip(group, passed, strict=True) if not p]
        place = self._places.waiting[ran.stop - 1]
        at_exit = ExitGroup(
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
        if self._places.num_limited or verdict is BatchDecision.LEAVE:
            return self._leave(verdict, at_exit, group, now_s), count
        if verdict is BatchDecision.SPLIT:
            leavers = list(compress(group, passed))
        else:
            leavers, stays = [], group
            self._counters.involuntary_stays += count
        for running in stays:
            self._places.move(running, place, now_s)
        self._counters.buffered += len(stays)
        return leavers, count

    def _parks(self, running: RunningRow) -> bool:
        """Whether a sequence needs more depth than there is; one that limits itself does not."""
        return running.is_strict and not 0 < running.state.exits.max_depth <= self._ends[-1]

    def _leave_last(
        self, group: list[RunningRow], confidences: list[float], now_s: float
    ) -> list[RunningRow]:
        """At the deepest exit all leave, but for strict ones that need more depth than there is."""
        if not self._is_partial:
            return group
        parked = (
            [r for r, c in zip(group, confidences, strict=True) if c < r.bar and self._parks(r)]
            if self._parks_strict
            else []
        )
        for running in parked:
            self._places.move(running, self._places.parked[-1], now_s)
        stays = {running.row for running in parked}
        pairs = [(r, c) for r, c in zip(group, confidences, strict=True) if r.row not in stays]
        leavers = [r for r, _ in pairs]
        self._count_breaches(leavers, [c for _, c in pairs])
        return leavers

    def _leave(
        self, verdict: BatchDecision, at: ExitGroup, group: list[RunningRow], now_s: float
    ) -> list[RunningRow]:
        """The general case: rows at the end of their own depth leave whatever the verdict."""
        exit_index = at.ran.stop - 1
        place = self._places.waiting[exit_index]
        leavers = []
        for running, confidence, passed in zip(group, at.confidences, at.passed, strict=True):
            if running.last_segment == exit_index:
                if running.owes and not passed:
                    running.wants = True
                    if running.is_strict:
                        self._places.move(running, self._places.parked[exit_index], now_s)
                        continue
                self._count_breaches([running], [confidence])
                leavers.append(running)
            elif verdict is BatchDecision.LEAVE or (passed and verdict is BatchDecision.SPLIT):
                self._counters.involuntary_exits += not passed
                leavers.append(running)
            else:
                self._counters.involuntary_stays += passed
                self._places.move(running, place, now_s)
        self._counters.buffered += len(group) - len(leavers)
        return leavers

    def _count_breaches(self, group: Sequence[RunningRow], confidences: Sequence[float]) -> None:
        breaches = [
            r for c, r in zip(confidences, group, strict=True) if c < r.bar and r.bar < math.inf
        ]
        deepest = self._ends[-1]
        self._counters.breaches += len(breaches)
        self._counters.limited += sum(0 < r.state.exits.max_depth <= deepest for r in breaches)
