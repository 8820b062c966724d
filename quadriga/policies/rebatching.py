"""What a decode batch asks of a rebatching policy: which rows run next, and which leave.

Segments and exits are numbered from 0; exit i is behind segment i, and the last exit is the end of
the loaded model. Rows *wait at exit i* when they did not leave there and their next segment has not
begun; rows ready for a new token wait at the *front*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quadriga.policies.drex.costs import SegmentCosts


@dataclass(frozen=True, slots=True)
class Waiting:
    """Rows in one place.

    Attributes:
        count: Rows.
        num_tokens: Their context tokens, together.
        least_deadline_s: When the most urgent of them should have its token; infinite without
            rows.
    """

    count: int = 0
    num_tokens: int = 0
    least_deadline_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Range:
    """Segments [first, stop) for all rows that wait before segment `first`.

    Attributes:
        tests: Whether the exit behind the range is tested; one that is not costs no head.
    """

    first: int
    stop: int
    tests: bool = True


class BatchDecision(Enum):
    """What happens to a group at a non-final exit."""

    SPLIT = "split"  # rows that pass leave, the others wait at this exit
    STAY = "stay"  # no row leaves: the whole group goes on together, now
    LEAVE = "leave"  # every row leaves, passed or not


@dataclass(frozen=True, slots=True)
class ExitGroup:
    """A group that has reached a non-final exit.

    Attributes:
        ran: What was run.
        confidences, thresholds: Of each row.
        passed: Whether each row may leave here.
        num_tokens: Context tokens of the group.
        waiting: Rows that waited at this exit before.
        remaining: The rows that may not leave.
    """

    ran: Range
    confidences: Sequence[float]
    thresholds: Sequence[float]
    passed: Sequence[bool]
    num_tokens: int
    waiting: Waiting
    remaining: Waiting


class Rebatcher(Protocol):
    """A policy; one per decode loop, called on its thread.

    Attributes:
        costs: What passes take, kept fresh by `observe`.
    """

    costs: SegmentCosts

    @property
    def is_surveying(self) -> bool:
        """Whether the group that left the front last is tested at every exit that it reaches."""

    def choose(self, front: Waiting, waiting: Sequence[Waiting], now_s: float) -> Range:
        """Which range to run next; some row waits before its first segment.

        Args:
            waiting: Per exit but the last, the rows that wait there.
        """

    def judge(self, group: ExitGroup, now_s: float) -> BatchDecision:
        """What to do with a group at a non-final exit that was tested."""

    def observe(
        self,
        ran: Range,
        count: int,
        num_tokens: int,
        seconds: float,
        passed: int | None,
        filled: int = 0,
    ) -> None:
        """A range was run over `count` rows with `num_tokens` of context.

        Args:
            seconds: The runner's own time.
            passed: Rows that may leave at the exit behind it; None where it was not tested.
            filled: Positions × segments whose KV, skipped before, it had to fill in first.
        """

    def tests(self, exit_index: int) -> bool:
        """Whether tokens may leave at a non-final exit as the policy works now."""

    def target_gap_s(self, running: int) -> float:
        """Time between two tokens of a sequence that the policy plans for by default."""

    def resized(self, before: Sequence[int], ends: Sequence[int]) -> Rebatcher:
        """The policy for other segments, with what it learned of those that stay.

        Args:
            before, ends: Layers run at the end of each segment, until now and from now on; one
                begins like the other.
        """
