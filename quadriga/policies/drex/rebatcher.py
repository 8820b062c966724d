"""The DREX policy: a plan for the regime, a profit test for every split, deadlines above both."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from quadriga.checkpoint.exits import ExitCounters
from quadriga.clock import Clock, ManualClock
from quadriga.policies.drex.costs import SegmentCosts
from quadriga.policies.drex.plan import Demand, Planning, RebatchPlan, make_plan
from quadriga.policies.rebatching import BatchDecision, ExitGroup, Range, Waiting

EXPLORE_EVERY = 64  # decisions, and passes from the front, at the least
EXPLORE_SHARE = 0.005  # of the time, that splits turned round may cost at the most
REPLAN_EVERY = 48  # passes from the front between two looks whether the plan still fits
REPLAN_LATEST = 16  # looks
_DRIFT = 0.04  # relative change of a time, or change of a share, that calls for a new plan
_RATE = 0.05  # of the moving averages
_PRIOR = 0.5  # exit rate that is believed until one was seen
_FIRST_LOOKS = 3  # at every exit, before its rate is believed
_FIRST_SURVEYS = 8  # whatever they cost
SURVEY_EVERY = 8  # passes from the front, where surveys are wanted, at the least
SURVEY_SHARE = 0.02  # of the time, that surveys may cost at the most
PLAN_SHARE = 0.02  # of the time, that making plans may take at the most
_GAP = 1.5  # times a full pass: what a token may take by default
_LEEWAY = 1.05  # of a plan's gaps, which are played, not measured
_SKIPPED_PRIOR = 512.0  # segments of tokens, all thought to be filled in, before some were seen
_FORGET = 0.999  # a pass, of what was skipped and filled in
_LONGEST_OVERHEAD_S = 2e-3  # between two passes; beyond it the replica was idle or disturbed


class DrexRebatcher:
    """Splits while it pays, waits while there is time, and never lets a token leave too early.

    Two levels. The *plan* says which exits are worth testing at all and how large a batch each
    stage behind them should wait for (`plan.py`). Inside it, a *split* at exit i is taken where

        Δ = t_d(b) − (r / m) · t_d(m) − h − (b − r) · f > 0

    (b rows reached the exit, r of them must go on, m is the batch they will go on in, f is what
    filling in the KV of a token that leaves will take, where it is wanted later). Otherwise
    the whole group goes down at once, together with whoever waits there. A deadline that leaves no
    time to wait for m does not stop a split: who leaves, leaves, and those that stay go on in a
    smaller batch before they are late.

    Args:
        deterministic: Take no choice that depends on load and changes an answer: every exit is
            tested for every token, and whoever passes leaves.
        survey_every: Passes from the front from one survey to the next, at least; 0 makes none. A
            survey tests every exit for one group, so that it is known where each of its tokens
            could have left; tokens leave where the plan lets them, as always. It is put off while
            surveys cost more than `SURVEY_SHARE` of the time, by the forecast.
        overhead_s: First guess of what a pass costs beside the runner's own time.
        clock: By which plans are made little by little between passes, all but the first; None:
            each at once.
    """

    def __init__(
        self,
        costs: SegmentCosts,
        *,
        counters: ExitCounters,
        deterministic: bool = False,
        survey_every: int = 0,
        overhead_s: float = 20e-6,
        clock: Clock | None = None,
    ) -> None:
        self.costs = costs
        self._survey_every = self._until_survey = survey_every
        self._surveyed_s = 0.0  # what surveys cost, by the forecast
        self._is_survey = False  # the group that left the front last is tested at every exit
        self.plan = RebatchPlan()
        self.overhead_s = overhead_s
        self._counters = counters
        self._deterministic = deterministic
        self._random = Random(0)
        num_exits = costs.num_segments - 1
        self._left_by = [_PRIOR] * num_exits
        self._times_seen = [0] * num_exits
        self._flush_rows = [0.0] * num_exits  # recent size of the batches behind each exit
        self._until_look = 0
        self._looks = 0
        self._patience = 1  # looks
        self._plans: dict[int, RebatchPlan] = {}  # by the number of sequences, the last of each
        self._planned_for = 0
        self._planning: Planning | None = None  # the next plan, while it is made
        self._plan_clock = clock or ManualClock()
        self._plan_credit_s = float("inf")  # that planning may go on for; below 0 it waits
        self._basis: tuple[float, ...] = ()  # what the plan was made of
        self._until_exploration = EXPLORE_EVERY  # splits
        self._until_probe = EXPLORE_EVERY  # passes from the front; apart, or one starves the other
        self._busy_s = self._turned_s = 0.0
        self._must_go: set[int] = set()  # exits whose waiting rows go on now
        self._probe: int | None = None  # an exit outside the plan, tested this once
        self._last_front_s = 0.0
        self._idle_since_s: float | None = None  # when the last pass was over
        self._pass_from_s = 0.0
        self._tokens_each = 0.0
        self._gaps: dict[int, float] = {}
        self._skipped = self._filled = _SKIPPED_PRIOR  # of late
        self._filled_each = [0.0] * num_exits  # recent, per row that goes on behind each exit
        self._is_flush = False  # the pass under way is for rows that waited, not for a whole group

    def resized(self, before: Sequence[int], ends: Sequence[int]) -> DrexRebatcher:
        """See `Rebatcher.resized`."""
        other = DrexRebatcher(
            self.costs.resized(before, ends),
            counters=self._counters,
            deterministic=self._deterministic,
            survey_every=self._survey_every,
            overhead_s=self.overhead_s,
            clock=self._plan_clock,
        )
        other._busy_s, other._surveyed_s = self._busy_s, self._surveyed_s
        other._random = self._random
        common = min(len(self._left_by), len(other._left_by))
        other._left_by[:common] = self._left_by[:common]
        other._times_seen[:common] = self._times_seen[:common]
        other._flush_rows[:common] = self._flush_rows[:common]
        other._filled_each[:common] = self._filled_each[:common]
        return other

    @property
    def is_surveying(self) -> bool:
        """See `Rebatcher.is_surveying`; deterministic replicas test every exit anyway."""
        return self._is_survey or (self._deterministic and self._survey_every > 0)

    @property
    def left_by(self) -> tuple[float, ...]:
        """Per exit but the last, share of tokens that pass there or earlier, as last seen."""
        return tuple(self._left_by)

    def tests(self, exit_index: int) -> bool:
        """See `Rebatcher.tests`: what the plan says, a probe of an exit outside it aside."""
        return self._deterministic or exit_index in self.plan.exits

    def target_gap_s(self, running: int) -> float:
        """See `Rebatcher.target_gap_s`: one and a half full passes over everybody."""
        gap_s = self._gaps.get(running)
        if gap_s is None:
            gap_s = self._gaps[running] = _GAP * self._full_s(max(1, running))
        return gap_s

    def choose(self, front: Waiting, waiting: Sequence[Waiting], now_s: float) -> Range:
        """See `Rebatcher.choose`: the deepest stage due, else the front, else the fullest."""
        self._note_overhead(now_s)
        for exit_index in range(len(waiting) - 1, -1, -1):
            if not waiting[exit_index].count:
                self._must_go.discard(exit_index)  # all who should have gone on are gone
            elif self._is_due(exit_index, waiting[exit_index], now_s):
                return self._range_from(exit_index + 1)
        if front.count:
            return self._front_range(front, waiting)
        fullest = max(range(len(waiting)), key=lambda i: waiting[i].count)
        return self._range_from(fullest + 1)

    def judge(self, group: ExitGroup, now_s: float) -> BatchDecision:
        """See `Rebatcher.judge`."""
        at = group.ran.stop - 1
        may_leave = len(group.passed) - group.remaining.count
        is_planned = self.tests(at)
        if self._probe == at:
            self._probe = None
        stay_s, profit_s = self.split_s(group) if is_planned else (0.0, 0.0)
        if not is_planned:
            splits = False  # probed: it was worth a look, the plan decides
        elif self._deterministic or not may_leave:
            splits = True  # whoever stays goes on when its stage is due
        else:
            splits = (profit_s > 0) is not self._turns_round(abs(profit_s))
        if not splits:
            self._must_go.add(at)
            self._counters.stays += may_leave > 0
            return BatchDecision.STAY
        if self._is_survey:
            self._must_go.add(at)  # its other exits are tested now, or nobody knows what they said
        self._skipped += may_leave * (self.costs.num_segments - group.ran.stop)
        # The realised profit is this, less what the later flush is measured to take.
        self._counters.splits += may_leave > 0
        self._counters.predicted_profit_s += profit_s
        self._counters.realised_profit_s += stay_s - self.overhead_s
        return BatchDecision.SPLIT

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
        self._skipped *= _FORGET
        self._filled = self._filled * _FORGET + filled
        self.costs.filled_share = min(1.0, self._filled / max(1.0, self._skipped))
        self._busy_s += seconds
        # What is not used is not kept: together it would make the batch wait.
        self._plan_credit_s = min(0.0, self._plan_credit_s) + PLAN_SHARE * seconds
        self._idle_since_s = self._pass_from_s + seconds
        if ran.first == 0:
            self._last_front_s = seconds
        else:
            each = self._filled_each[ran.first - 1]
            self._filled_each[ran.first - 1] += _RATE * (filled / count - each)
        if ran.first and self._is_flush:
            self._counters.realised_profit_s -= seconds
            rows = self._flush_rows[ran.first - 1]
            self._flush_rows[ran.first - 1] += (_RATE if rows else 1.0) * (count - rows)
        if passed is None or ran.stop == self.costs.num_segments:
            return
        at = ran.stop - 1
        if self._is_survey and ran.first and ran.first - 1 not in self.plan.exits:
            return  # those that could have left before are among them
        before = self._left_by[ran.first - 1] if ran.first else 0.0
        seen = before + (1.0 - before) * passed / count
        self._times_seen[at] += 1
        self._left_by[at] += max(_RATE, 1.0 / self._times_seen[at]) * (seen - self._left_by[at])

    def _note_overhead(self, now_s: float) -> None:
        """Learn what a pass costs beside the runner's time, from one pass to the next."""
        if self._idle_since_s is not None:
            between_s = now_s - self._idle_since_s
            if 0.0 <= between_s < _LONGEST_OVERHEAD_S:
                self.overhead_s += _RATE * (between_s - self.overhead_s)
            self._idle_since_s = None
        self._pass_from_s = now_s

    def _is_due(self, exit_index: int, waiting: Waiting, now_s: float) -> bool:
        if exit_index in self._must_go or waiting.count >= self._target(exit_index):
            return True
        # Another pass from the front may come before it: is there time for both?
        stage_s = self.costs.forecast_s(
            exit_index + 1, self.costs.num_segments, waiting.count, waiting.num_tokens, tests=False
        )
        filled = waiting.count * self._filled_each[exit_index]
        if filled:
            entered = waiting.count * (self.costs.num_segments - 1 - exit_index)
            stage_s += self.costs.filling_s(filled, min(filled, entered))
        return now_s + self._last_front_s + stage_s + self.overhead_s > waiting.least_deadline_s

    def _front_range(self, front: Waiting, waiting: Sequence[Waiting]) -> Range:
        self._until_look -= 1
        running = front.count + sum([w.count for w in waiting])
        if self._planning is None and (self._until_look <= 0 or self._is_for_others(running)):
            self._look(running, front, waiting)
        self._plan_on()
        self._is_survey = self._survey_is_due(front)
        if self._is_survey:
            self._probe = None
        elif not self._deterministic:
            self._choose_probe()
        first_exit = min(self._exits(), default=None)
        if first_exit is None:
            return Range(0, self.costs.num_segments, tests=False)
        return Range(0, first_exit + 1)

    def _survey_is_due(self, front: Waiting) -> bool:
        """Whether this pass from the front begins a survey; notes what it costs."""
        if not self._survey_every or self._deterministic or not self._left_by:
            return False
        self._until_survey -= 1
        if self._until_survey > 0:
            return False
        costs, last = self.costs, self.costs.num_segments
        tested_s = sum(
            costs.forecast_s(i, i + 1, front.count, front.num_tokens, tests=i + 1 < last)
            for i in range(last)
        )
        whole_s = costs.forecast_s(0, last, front.count, front.num_tokens, tests=False)
        price_s = max(0.0, tested_s - whole_s) + (last - 1) * self.overhead_s
        is_early = self._counters.surveys < _FIRST_SURVEYS
        if not is_early and self._surveyed_s + price_s > SURVEY_SHARE * self._busy_s:
            return False  # as soon as it can be afforded
        self._until_survey = self._survey_every
        self._surveyed_s += price_s
        self._counters.surveys += 1
        return True

    def _choose_probe(self) -> None:
        """Look at an exit outside the plan now and then, at first until each was seen."""
        self._until_probe -= 1
        outside = [e for e in range(len(self._left_by)) if e not in self.plan.exits]
        unseen = [e for e in outside if self._times_seen[e] < _FIRST_LOOKS]
        if unseen:
            self._probe = unseen[0]
            self._until_look = min(self._until_look, 1)
        elif outside and self._until_probe <= 0:
            self._until_probe = EXPLORE_EVERY
            self._probe = self._random.choice(outside)
        else:
            return
        self._counters.explored += 1

    def _range_from(self, segment: int) -> Range:
        self._is_flush = segment - 1 not in self._must_go
        self._must_go.discard(segment - 1)
        stop = next((e + 1 for e in self._exits() if e >= segment), self.costs.num_segments)
        return Range(segment, stop, tests=stop < self.costs.num_segments)

    def _exits(self) -> tuple[int, ...]:
        """Exits of the plan and the one that is being probed, ascending; in a survey all.

        Where answers must not depend on the load, all as well: rows that arrived waiting at an exit
        may be the first to run here, before there is a plan.
        """
        if self._is_survey or self._deterministic:
            return tuple(range(len(self._left_by)))
        if self._probe is None:
            return self.plan.exits
        return tuple(sorted({*self.plan.exits, self._probe}))

    def _is_for_others(self, running: int) -> bool:
        """Whether the plan was made for far more or far fewer sequences."""
        return abs(running - self._planned_for) > max(1, self._planned_for // 4)

    def _look(self, running: int, front: Waiting, waiting: Sequence[Waiting]) -> None:
        """Begin a new plan where the old one's reasons no longer hold."""
        self._until_look = REPLAN_EVERY
        self._looks += 1
        tokens = front.num_tokens + sum([w.num_tokens for w in waiting])
        self._tokens_each = tokens / max(1, running)
        self._gaps.clear()
        shares = [max(self._left_by[: i + 1]) for i in range(len(self._left_by))]
        full_s = self._full_s(running)
        parts = [self._stage_s(e, max(1, running // 8), 0.0) / full_s for e in range(len(shares))]
        basis = (*shares, *parts, self.overhead_s / full_s)
        drift = max(
            (abs(a - b) for a, b in zip(basis, self._basis, strict=False)), default=float("inf")
        )
        if self._plans and self._is_for_others(running):
            self._planned_for = min(self._plans, key=lambda count: abs(count - running))
            self.plan = self._plans[self._planned_for]
        is_time = drift > _DRIFT and self._looks >= self._patience
        if not (is_time or self._is_for_others(running) or self._looks >= REPLAN_LATEST):
            return
        self._basis, self._looks, self._planned_for = basis, 0, running
        demand = Demand(
            running=running,
            tokens_each=self._tokens_each,
            left_by=shares,
            overhead_s=self.overhead_s,
            max_gap_s=_LEEWAY * self.target_gap_s(running),
        )
        self._planning = make_plan(self.costs, demand, must_test=self._deterministic)
        # Planning takes as long as some passes: the longer the replica runs, the rarer it is.
        self._patience = min(2 * self._patience, REPLAN_LATEST)

    def _plan_on(self) -> None:
        """Go on with the plan that is being made, for as long as passes have paid for it."""
        while self._planning is not None and self._plan_credit_s >= 0.0:
            started_s = self._plan_clock.now_s()
            try:
                next(self._planning)
            except StopIteration as end:
                self._planning, self.plan = None, end.value
                self._plans[self._planned_for] = self.plan
            took_s = self._plan_clock.now_s() - started_s
            self._plan_credit_s -= took_s
            self._pass_from_s += took_s  # a pass costs none of it

    def _full_s(self, count: int) -> float:
        return self.costs.forecast_s(
            0, self.costs.num_segments, count, count * self._tokens_each, tests=False
        )

    def _target(self, exit_index: int) -> int:
        plan = self.plan
        if exit_index in plan.exits:
            return plan.targets[plan.exits.index(exit_index)]
        return 1  # rows at an exit the plan has dropped wait for nobody

    def _stage_s(self, exit_index: int, count: float, num_tokens: float) -> float:
        ran = self._stage_range(exit_index)
        return self.costs.forecast_s(ran.first, ran.stop, count, num_tokens, tests=ran.tests)

    def _stage_range(self, exit_index: int) -> Range:
        first = exit_index + 1
        stop = next((e + 1 for e in self.plan.exits if e >= first), self.costs.num_segments)
        return Range(first, stop, tests=stop < self.costs.num_segments)

    def flush_batch(self, at: int, count: int) -> int:
        """The batch in which `count` rows at an exit will go on: as planned, or as of late."""
        expected = self._flush_rows[at] or self._target(at)
        return max(count, min(self._target(at), round(expected)), 1)

    def split_s(self, group: ExitGroup) -> tuple[float, float]:
        """What carrying the whole group down costs now, and Δ, what splitting saves of it.

        Whoever waits there anyway would go down with the whole group; that much is not its cost.
        """
        at = group.ran.stop - 1
        alone = group.waiting.count
        tokens_each = group.num_tokens / len(group.passed)
        both = len(group.passed) + alone
        stay_s = self._stage_s(at, both, both * tokens_each)
        stay_s -= self._flush_share_s(at, alone, tokens_each)
        saved_s = stay_s - self._flush_share_s(at, group.remaining.count, tokens_each)
        leavers = len(group.passed) - group.remaining.count
        return stay_s, saved_s - self.overhead_s - self.skip_s(at, leavers)

    def skip_s(self, at: int, leavers: int) -> float:
        """What filling in the KV of those who leave at an exit will take."""
        filled = leavers * (self.costs.num_segments - 1 - at)
        entered = filled * (1.0 - self._left_by[at])  # each run of leavers ends in one that stays
        return self.costs.filled_share * self.costs.filling_s(filled, entered)

    def _flush_share_s(self, at: int, count: int, tokens_each: float) -> float:
        """What `count` rows cost in the flush they will be in."""
        if not count:
            return 0.0
        batch = self.flush_batch(at, count)
        return count / batch * self._stage_s(at, batch, batch * tokens_each)

    def _turns_round(self, price_s: float) -> bool:
        """Whether this decision is taken against the forecast, so that all times stay fresh."""
        self._until_exploration -= 1
        if self._until_exploration > 0:
            return False
        if self._turned_s + price_s > EXPLORE_SHARE * self._busy_s:
            return False  # as soon as it can be afforded
        self._until_exploration = EXPLORE_EVERY
        self._turned_s += price_s
        self._counters.explored += 1
        return True
