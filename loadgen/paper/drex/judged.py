"""Was a decision right? Run both branches on the very state it was taken in, and compare.

A split sends r rows to wait for a batch of m; a stay carries all b down at once. So at an exit the
branches cost, for the same tokens,

    stay:   t(b + w) less the share of the w rows that waited there anyway
    split:  r / m' · t(m') + h + (b - r) · f,  m' the batch that the r rows go on in

and each t is measured by running the passes, in turn, on the rows that are there; h is what a pass
costs beside the runner, f what filling in the KV of a token that leaves will take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from quadriga.checkpoint.exits import ExitCounters
from quadriga.clock import Clock
from quadriga.engine.model_runner import NativeRunner
from quadriga.policies.drex import DrexRebatcher, SegmentCosts
from quadriga.policies.rebatching import BatchDecision, ExitGroup

_REPEATS = 5
ENOUGH = 300
TIE = 0.03  # branches closer than this are equally right


@dataclass(slots=True)
class Decisions:
    """Decisions that were judged.

    Attributes:
        right, ties: Of `count`; a tie counts as right.
        regret_s, best_s: Time lost by the wrong ones, and what the better branches take.
    """

    count: int = 0
    right: int = 0
    ties: int = 0
    regret_s: float = 0.0
    best_s: float = 0.0

    @property
    def share_right(self) -> float | None:
        """None where none was judged."""
        return self.right / self.count if self.count else None


@contextmanager
def rehearsed(native: NativeRunner, rows: Sequence[int]) -> Iterator[None]:
    """Let passes over rows be run for their time alone: afterwards all is as it was.

    Between two segments of a token only; KV that such a pass writes is either what the real pass
    will write again, or is marked as missing again.
    """
    skipped, at_exit, hidden = native.skipped, native.at_exit, native.hidden.clone()
    assert skipped is not None, "there are exits"
    num_filled = skipped.num_filled
    kept = {row: skipped.suspend(row, int(native.positions[row]) + 1) for row in rows}
    yield
    for row, left in kept.items():
        skipped.restore(row, left, native.model.decoder)
    native.at_exit, native.hidden, skipped.num_filled = at_exit, hidden, num_filled


class JudgedRebatcher(DrexRebatcher):
    """DREX whose decisions are followed by running both branches, until enough were judged.

    Args:
        decisions: Where the judgements go.
        native: The engine below the loop, in whatever state the decision found it.
        waiting_rows: Rows of the loop that wait at an exit.
    """

    def __init__(
        self,
        costs: SegmentCosts,
        *,
        counters: ExitCounters,
        decisions: Decisions,
        native: NativeRunner,
        clock: Clock,
        waiting_rows: Callable[[int], list[int]],
    ) -> None:
        super().__init__(costs, counters=counters)
        self._decisions = decisions
        self._native = native
        self._clock = clock
        self._waiting_rows = waiting_rows

    def judge(self, group: ExitGroup, now_s: float) -> BatchDecision:
        """See `Rebatcher.judge`."""
        explored = self._counters.explored
        verdict = super().judge(group, now_s)
        in_plan = group.ran.stop - 1 in self.plan.exits
        if not any(group.passed) or not in_plan or self._counters.explored != explored:
            return verdict  # no choice, or taken against the forecast on purpose
        if self._decisions.count == ENOUGH:
            return verdict
        self._run_both(group, verdict)
        return verdict

    def _run_both(self, group: ExitGroup, verdict: BatchDecision) -> None:
        at = group.ran.stop - 1
        # Only rows that have reached this exit may be passed on: the real pass repeats what a
        # rehearsal writes for them.
        at_exit = self._native.at_exit
        assert at_exit is not None, "a decision follows a pass"
        rows = [*at_exit.index, *self._waiting_rows(at)]
        r, w = group.remaining.count, group.waiting.count
        leavers = len(group.passed) - r
        batch = min(self.flush_batch(at, r + w), len(rows))
        with rehearsed(self._native, rows):
            # What these rows lack of skipped KV is owed by both branches: not timed.
            self._time_s(at, rows)
            times = [
                (self._time_s(at, rows), self._time_s(at, rows[:batch])) for _ in range(_REPEATS)
            ]
        stay_s, flush_s = (median(of) for of in zip(*times, strict=True))
        alone_s = flush_s / batch
        stay_s -= w * alone_s
        split_s = r * alone_s + self.overhead_s + self.skip_s(at, leavers)
        best_s, worst_s = sorted((stay_s, split_s))
        took_s = split_s if verdict is BatchDecision.SPLIT else stay_s
        decisions = self._decisions
        decisions.count += 1
        is_tie = worst_s - best_s <= TIE * abs(worst_s)
        decisions.ties += is_tie
        decisions.right += is_tie or took_s == best_s
        decisions.regret_s += took_s - best_s
        decisions.best_s += best_s

    def _time_s(self, at: int, rows: Sequence[int]) -> float:
        """Time of the stage behind exit `at` for these rows.

        The layers before it run first, as they do in service: or the stage's weights would still be
        in the nearest cache from the last time.
        """
        ran = self._stage_range(at)
        self._native.advance(rows, 0, ran.first)
        started_s = self._clock.now_s()
        self._native.advance(rows, ran.first, ran.stop)
        return self._clock.now_s() - started_s
