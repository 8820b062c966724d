"""Batches that leave together: the policies that rebatching is measured against, and no exits.

Whole batches either leave at an exit or go on; no row waits. `eager` and `majority` let tokens
leave below their threshold (involuntary exits, which change answers); `lazy` lets none, and so
finds few occasions.

Source: DREX, §2 and its baselines (EE-LLM's and Apparate's batches).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import median
from typing import Self

from quadriga.policies.drex.costs import SegmentCosts
from quadriga.policies.rebatching import BatchDecision, ExitGroup, Range, Waiting

_GAP = 1.5


class GroupedExits(ABC):
    """The frame of the grouped policies: every exit is tested, and the batch stays a batch."""

    is_surveying = False

    def __init__(self, costs: SegmentCosts) -> None:
        self.costs = costs

    def choose(self, front: Waiting, waiting: Sequence[Waiting], now_s: float) -> Range:
        """See `Rebatcher.choose`: the group that is under way, else all rows anew."""
        last = self.costs.num_segments - 1
        for exit_index, rows in enumerate(waiting):
            if rows.count:
                segment = exit_index + 1
                return Range(segment, segment + 1, tests=segment < last)
        return Range(0, 1, tests=last > 0)

    def judge(self, group: ExitGroup, now_s: float) -> BatchDecision:
        """See `Rebatcher.judge`."""
        return BatchDecision.LEAVE if self.may_leave(group) else BatchDecision.STAY

    @abstractmethod
    def may_leave(self, group: ExitGroup) -> bool:
        """Whether the whole group leaves."""

    def tests(self, exit_index: int) -> bool:
        """See `Rebatcher.tests`."""
        return True

    def observe(
        self,
        ran: Range,
        count: int,
        num_tokens: int,
        seconds: float,
        passed: int | None,
        filled: int = 0,
    ) -> None:
        """See `Rebatcher.observe`."""
        self.costs.observe(
            ran.first, ran.stop, count, num_tokens, seconds, tests=ran.tests, filled=filled
        )

    def resized(self, before: Sequence[int], ends: Sequence[int]) -> Self:
        """See `Rebatcher.resized`."""
        return type(self)(self.costs.resized(before, ends))

    def target_gap_s(self, running: int) -> float:
        """See `Rebatcher.target_gap_s`."""
        return _GAP * self.costs.forecast_s(
            0, self.costs.num_segments, max(1, running), 0, tests=False
        )


class EagerExits(GroupedExits):
    """All leave when any may."""

    def may_leave(self, group: ExitGroup) -> bool:
        return any(group.passed)


class LazyExits(GroupedExits):
    """All leave when all may."""

    def may_leave(self, group: ExitGroup) -> bool:
        return all(group.passed)


class MajorityExits(GroupedExits):
    """All leave when the median confidence passes the median threshold."""

    def may_leave(self, group: ExitGroup) -> bool:
        return median(group.confidences) >= median(group.thresholds)


class NoExits(GroupedExits):
    """Every token runs every layer; no exit is ever tested."""

    def choose(self, front: Waiting, waiting: Sequence[Waiting], now_s: float) -> Range:
        """See `Rebatcher.choose`; rows wait where another's depth limit cut their pass short."""
        waits = (i + 1 for i, rows in enumerate(waiting) if rows.count)
        return Range(next(waits, 0), self.costs.num_segments, tests=False)

    def observe(self, *_: object, **__: object) -> None:
        """See `Rebatcher.observe`; no choice here depends on times, nor on gaps."""

    def target_gap_s(self, running: int) -> float:
        """See `Rebatcher.target_gap_s`."""
        return 0.0

    def tests(self, exit_index: int) -> bool:
        """See `Rebatcher.tests`."""
        return False

    def may_leave(self, group: ExitGroup) -> bool:
        return False
