"""The DREX policy: a plan for the regime, a profit test for every split, deadlines above both."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from quadriga.exits import ExitCounters
from quadriga.policies.drex.costs import SegmentCosts
from quadriga.policies.drex.plan import Demand, Plan, make_plan
from quadriga.policies.rebatching import AtExit, Range, Verdict, Waiting

EXPLORE_EVERY = 64
REPLAN_EVERY = 48  # passes from the front
_RATE = 0.05  # of the moving average of exit rates
_PRIOR = 0.5  # exit rate that is believed until one was seen
_GAP = 1.5  # times a full pass: what a token may take by default
_CAUTION = 0.85  # share of the allowed gap that a plan may use up


class DrexRebatcher:
    """Splits while it pays, waits while there is time, and never lets a token leave too early.

    Two levels. The *plan* says which exits are worth testing at all and how large a batch each
    stage behind them should wait for (`plan.py`). Inside it, a *split* at exit i is taken where

        Δ = t_d(b) − (r / m) · t_d(m) − h > 0

    (b rows reached the exit, r of them must go on, m is the batch they will go on in), unless the
    wait would break a deadline. Otherwise the whole group goes down at once, together with whoever
    waits there.

    Args:
        deterministic: Take no choice that depends on load and changes an answer: every exit is
            tested for every token, and whoever passes leaves.
    """

    def __init__(
        self,
        costs: SegmentCosts,
        *,
        counters: ExitCounters,
        deterministic: bool = False,
        overhead_s: float = 20e-6,
        seed: int = 0,
    ) -> None:
        self.costs = costs
        self.plan = Plan()
        self._counters = counters
        self._deterministic = deterministic
        self._overhead_s = overhead_s
        self._random = Random(seed)
        self._left_by = [_PRIOR] * (costs.num_segments - 1)
        self._until_plan = 0
        self._planned_for = 0
        self._until_exploration = EXPLORE_EVERY  # splits
        self._until_probe = EXPLORE_EVERY  # passes from the front; apart, or one starves the other
        self._must_go: set[int] = set()  # exits whose waiting rows go on now
        self._probe: int | None = None  # an exit outside the plan, tested this once
        self._last_front_s = 0.0
        self._tokens_each = 0.0
        self._is_flush = False  # the pass under way is for rows that waited, not for a whole group

    @property
    def left_by(self) -> tuple[float, ...]:
        """Per exit but the last, share of tokens that pass there or earlier, as last seen."""
        return tuple(self._left_by)

    def target_gap_s(self, running: int) -> float:
        """See `Rebatcher.target_gap_s`: one and a half full passes over everybody."""
        n = max(1, running)
        full_s = self.costs.forecast_s(
            0, self.costs.num_segments, n, n * self._tokens_each, tests=False
        )
        return _GAP * full_s

    def choose(self, front: Waiting, waiting: Sequence[Waiting], now_s: float) -> Range:
        """See `Rebatcher.choose`: the deepest stage due, else the front, else the fullest."""
        for exit_index in reversed(range(len(waiting))):
            if not waiting[exit_index].count:
                self._must_go.discard(exit_index)  # all who should have gone on are gone
            elif self._is_due(exit_index, waiting[exit_index], now_s):
                return self._range_from(exit_index + 1)
        if front.count:
            return self._front_range(front, waiting)
        fullest = max(range(len(waiting)), key=lambda i: waiting[i].count)
        return self._range_from(fullest + 1)

    def judge(self, group: AtExit, now_s: float) -> Verdict:
        """See `Rebatcher.judge`."""
        passed = sum(group.passed)
        if self._deterministic:
            verdict = Verdict.SPLIT
        elif not passed:
            # Nobody can leave. Going on at once costs nothing that waiting would save, unless the
            # stage is more efficient in a larger batch and there is time.
            verdict = self._wait_or_go(group, now_s)
        else:
            verdict = self._split_or_stay(group, now_s)
        if verdict is Verdict.STAY:
            self._must_go.add(group.ran.stop - 1)
            self._counters.stays += passed > 0
        else:  # the realised profit is this, less what the later flush is measured to take
            self._counters.splits += passed > 0
            self._counters.predicted_profit_s += self.profit_s(group)
            self._counters.realised_profit_s += self._stay_s(group) - self._overhead_s
        return verdict

    def observe(
        self, ran: Range, count: int, num_tokens: int, seconds: float, passed: int | None
    ) -> None:
        """See `Rebatcher.observe`."""
        self.costs.observe(ran.first, ran.stop, count, num_tokens, seconds, tests=ran.tests)
        if ran.first == 0:
            self._last_front_s = seconds
        elif self._is_flush:
            self._counters.realised_profit_s -= seconds
        if passed is None or ran.stop == self.costs.num_segments:
            return
        before = self._left_by[ran.first - 1] if ran.first else 0.0
        seen = before + (1.0 - before) * passed / count
        at = ran.stop - 1
        self._left_by[at] += _RATE * (seen - self._left_by[at])

    def _is_due(self, exit_index: int, waiting: Waiting, now_s: float) -> bool:
        if exit_index in self._must_go or waiting.count >= self._target(exit_index):
            return True
        # Another pass from the front may come before it: is there time for both?
        stage_s = self._stage_s(exit_index, waiting.count, waiting.num_tokens)
        return now_s + self._last_front_s + stage_s > waiting.least_deadline_s

    def _front_range(self, front: Waiting, waiting: Sequence[Waiting]) -> Range:
        self._until_plan -= 1
        running = front.count + sum(w.count for w in waiting)
        changed = abs(running - self._planned_for) > max(1, self._planned_for // 4)
        if self._until_plan <= 0 or changed:
            self._replan(running, front, waiting)
        self._until_probe -= 1
        if self._until_probe <= 0:
            self._until_probe = EXPLORE_EVERY
            outside = [e for e in range(len(self._left_by)) if e not in self.plan.exits]
            if outside:
                self._counters.explored += 1
                self._probe = self._random.choice(outside)
        first_exit = min(self._exits(), default=None)
        if first_exit is None:
            return Range(0, self.costs.num_segments, tests=False)
        return Range(0, first_exit + 1)

    def _range_from(self, segment: int) -> Range:
        self._is_flush = segment - 1 not in self._must_go
        self._must_go.discard(segment - 1)
        stop = next((e + 1 for e in self._exits() if e >= segment), self.costs.num_segments)
        return Range(segment, stop, tests=stop < self.costs.num_segments)

    def _exits(self) -> list[int]:
        """Exits of the plan and the one that is being probed, ascending."""
        probe = () if self._probe is None else (self._probe,)
        return sorted({*self.plan.exits, *probe})

    def _replan(self, running: int, front: Waiting, waiting: Sequence[Waiting]) -> None:
        tokens = front.num_tokens + sum(w.num_tokens for w in waiting)
        self._tokens_each = tokens / max(1, running)
        demand = Demand(
            running=running,
            tokens_each=self._tokens_each,
            left_by=[max(self._left_by[: i + 1]) for i in range(len(self._left_by))],
            overhead_s=self._overhead_s,
            max_gap_s=_CAUTION * self.target_gap_s(running),
        )
        self.plan = make_plan(self.costs, demand, must_test=self._deterministic)
        self._planned_for = running
        self._until_plan = REPLAN_EVERY

    def _target(self, exit_index: int) -> int:
        if exit_index in self.plan.exits:
            return max(1, self.plan.targets[self.plan.exits.index(exit_index)])
        return 1  # rows at an exit the plan has dropped wait for nobody

    def _stage_s(self, exit_index: int, count: float, num_tokens: float) -> float:
        ran = self._stage_range(exit_index)
        return self.costs.forecast_s(ran.first, ran.stop, count, num_tokens, tests=ran.tests)

    def _stage_range(self, exit_index: int) -> Range:
        first = exit_index + 1
        stop = next((e + 1 for e in self.plan.exits if e >= first), self.costs.num_segments)
        return Range(first, stop, tests=stop < self.costs.num_segments)

    def _wait_or_go(self, group: AtExit, now_s: float) -> Verdict:
        at = group.ran.stop - 1
        is_probe = at not in self.plan.exits
        self._end_probe(at)
        waiting = group.waiting.count + group.remaining.count
        if is_probe or waiting >= self._target(at) or self._is_late(group, now_s):
            return Verdict.STAY
        return Verdict.SPLIT

    def _split_or_stay(self, group: AtExit, now_s: float) -> Verdict:
        at = group.ran.stop - 1
        if at not in self.plan.exits:  # probed: it was worth a look, the plan decides
            self._end_probe(at)
            return Verdict.STAY
        splits = self.profit_s(group) > 0 and not self._is_late(group, now_s)
        self._until_exploration -= 1
        if self._until_exploration <= 0:
            self._until_exploration = EXPLORE_EVERY
            self._counters.explored += 1
            splits = not splits
        return Verdict.SPLIT if splits else Verdict.STAY

    def profit_s(self, group: AtExit) -> float:
        """Δ: seconds that splitting saves against carrying the whole group down."""
        at = group.ran.stop - 1
        tokens_each = group.num_tokens / len(group.passed)
        flush_s = self._flush_share_s(at, group.remaining.count, tokens_each)
        return self._stay_s(group) - flush_s - self._overhead_s

    def _stay_s(self, group: AtExit) -> float:
        """What carrying the whole group down costs now, beside those that wait there anyway."""
        at = group.ran.stop - 1
        alone = group.waiting.count
        tokens_each = group.num_tokens / len(group.passed)
        both = len(group.passed) + alone
        stay_s = self._stage_s(at, both, both * tokens_each)
        return stay_s - (self._flush_share_s(at, alone, tokens_each) if alone else 0.0)

    def _flush_share_s(self, at: int, count: int, tokens_each: float) -> float:
        """What `count` rows cost in a flush of the planned size."""
        batch = max(self._target(at), count)
        return count / batch * self._stage_s(at, batch, batch * tokens_each)

    def _is_late(self, group: AtExit, now_s: float) -> bool:
        """Whether waiting for the target would break a deadline of those that must go on."""
        at = group.ran.stop - 1
        deadline_s = min(group.remaining.least_deadline_s, group.waiting.least_deadline_s)
        missing = self._target(at) - group.waiting.count - group.remaining.count
        if missing <= 0:
            return False  # they go on at once
        arriving = max(0.25, group.remaining.count)
        wait_s = missing / arriving * self._last_front_s
        batch = self._target(at)
        return now_s + wait_s + self._stage_s(at, batch, batch * self._tokens_each) > deadline_s

    def _end_probe(self, at: int) -> None:
        if self._probe == at:
            self._probe = None
