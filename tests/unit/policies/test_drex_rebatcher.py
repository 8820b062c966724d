"""One decision at a time: profit by hand, deadlines above it, and a look elsewhere now and then."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from quadriga.checkpoint.exits import ExitCounters
from quadriga.clock import ManualClock
from quadriga.policies.drex import DrexRebatcher, RebatchPlan, SegmentCosts, plan
from quadriga.policies.drex.rebatcher import (
    EXPLORE_EVERY,
    EXPLORE_SHARE,
    PLAN_SHARE,
    REPLAN_EVERY,
    REPLAN_LATEST,
)
from quadriga.policies.rebatching import BatchDecision, ExitGroup, Range, Waiting
from tests.unit.policies.drex_plans import costs_by

OVERHEAD_S = 20e-6
NOBODY = Waiting()


def costs_of(base_s: float, row_s: float, *, segments: int = 2) -> SegmentCosts:
    """Every segment takes base_s + row_s · b; heads and context nothing."""
    return costs_by([lambda b: base_s + row_s * b] * segments, head_s=0.0, max_rows=32)


def policy(
    base_s: float = 0.0, row_s: float = 1e-3, *, plan: RebatchPlan | None = None, segments: int = 2
) -> tuple[DrexRebatcher, ExitCounters]:
    counters = ExitCounters()
    rebatcher = DrexRebatcher(costs_of(base_s, row_s, segments=segments), counters=counters)
    rebatcher.plan = plan or RebatchPlan((0,), (8,))
    rebatcher._times_seen = [9] * (segments - 1)
    return rebatcher, counters


def group(
    passed: int,
    stays: int,
    *,
    waiting: int = 0,
    deadline_s: float = math.inf,
    ran: Range | None = None,
) -> ExitGroup:
    count = passed + stays
    return ExitGroup(
        ran=ran or Range(0, 1),
        confidences=[1.0] * passed + [0.0] * stays,
        thresholds=[0.5] * count,
        passed=[True] * passed + [False] * stays,
        num_tokens=10 * count,
        waiting=Waiting(waiting, 10 * waiting) if waiting else NOBODY,
        remaining=Waiting(stays, 10 * stays, deadline_s) if stays else NOBODY,
    )


def test_profit_by_hand() -> None:
    """Stages take 4 + b ms. 10 reach the exit, 6 may leave, 3 wait there; flushes are 8 strong.

    Carried down together:  t(13)           = 17 ms, of which the 3 owe 3 / 8 · t(8) = 4.5 ms
    Split:                  4 / 8 · t(8)    =  6 ms, and 0.02 ms for the splitting
    """
    rebatcher, _ = policy(4e-3, 1e-3)
    found = rebatcher.split_s(group(6, 4, waiting=3))[1]
    assert found == pytest.approx(17e-3 - 4.5e-3 - 6e-3 - OVERHEAD_S)
    # Nobody waits: t(10) − 4 / 8 · t(8) − h.
    assert rebatcher.split_s(group(6, 4))[1] == pytest.approx(14e-3 - 6e-3 - OVERHEAD_S)
    # More stay than a flush was planned for: they are the flush.
    assert rebatcher.split_s(group(1, 11))[1] == pytest.approx(16e-3 - 15e-3 - OVERHEAD_S)


def test_a_split_pays_for_the_kv_that_its_leavers_skip() -> None:
    rebatcher, _ = policy(4e-3, 1e-3)
    before_s = rebatcher.split_s(group(6, 4))[1]
    rebatcher.costs.fill_s = 0.2e-3
    assert rebatcher.split_s(group(6, 4))[1] == pytest.approx(before_s - 6 * 0.2e-3)
    # Of 512 + 100 that were skipped 512 were filled in when a sequence went deep again.
    rebatcher._skipped += 100
    rebatcher.observe(Range(0, 1), 1, 10, 5e-3, None)
    assert rebatcher.costs.filled_share == pytest.approx(512 / 612)
    # All that is missing is filled in by now: a pass that fills says so.
    rebatcher.observe(Range(1, 2, tests=False), 1, 10, 25e-3, None, filled=100)
    assert rebatcher.costs.filled_share == pytest.approx(1.0, abs=2e-3)


def test_splits_where_it_pays_and_books_it() -> None:
    rebatcher, counters = policy(4e-3, 1e-3)
    at = group(6, 4)
    assert rebatcher.judge(at, 0.0) is BatchDecision.SPLIT
    assert (counters.splits, counters.stays) == (1, 0)
    assert counters.predicted_profit_s == pytest.approx(rebatcher.split_s(at)[1])
    assert counters.realised_profit_s == pytest.approx(14e-3 - OVERHEAD_S)
    waiting = [Waiting(8, 80, 0.0)]
    ran = rebatcher.choose(NOBODY, waiting, 0.0)
    assert ran == Range(1, 2, tests=False)
    rebatcher.observe(ran, 8, 80, 5e-3, None)
    assert counters.realised_profit_s == pytest.approx(9e-3 - OVERHEAD_S)


def test_stays_where_a_pass_is_flat_and_goes_on_at_once() -> None:
    rebatcher, counters = policy(10e-3, 0.0, plan=RebatchPlan((0,), (4,)))
    assert rebatcher.judge(group(1, 9), 0.0) is BatchDecision.STAY
    assert (counters.splits, counters.stays) == (0, 1)
    ran = rebatcher.choose(Waiting(5, 50, 9.0), [Waiting(2, 20, math.inf)], 0.0)
    assert ran.first == 1, "the group that stayed goes before the front, full or not"
    ran = rebatcher.choose(Waiting(5, 50, 9.0), [Waiting(2, 20, math.inf)], 0.0)
    assert ran.first == 0, "once"
    assert counters.realised_profit_s == 0.0


def test_a_stay_of_rows_that_are_gone_hurries_nobody_else() -> None:
    rebatcher, _ = policy(10e-3, 0.0)
    rebatcher._planned_for, rebatcher._until_look = 5, REPLAN_EVERY
    assert rebatcher.judge(group(1, 9), 0.0) is BatchDecision.STAY
    assert rebatcher.choose(Waiting(5, 50), [NOBODY], 0.0).first == 0  # cancelled meanwhile
    assert rebatcher.choose(Waiting(5, 50), [Waiting(1, 10)], 0.0).first == 0


def test_a_deadline_makes_a_small_flush_not_a_stay() -> None:
    """4 stay and 4 more are waited for, but there is no time: who may leave still leaves."""
    rebatcher, _ = policy(4e-3, 1e-3)
    rebatcher._planned_for, rebatcher._until_look = 10, 10
    rebatcher.observe(Range(0, 1), 1, 10, 5e-3, None)
    assert rebatcher.judge(group(6, 4, deadline_s=0.01), 0.0) is BatchDecision.SPLIT
    waits = Waiting(4, 40, 0.01)
    assert rebatcher.choose(Waiting(6, 60), [waits], 0.0) == Range(1, 2, tests=False)
    assert rebatcher.choose(Waiting(6, 60), [Waiting(4, 40, 1.0)], 0.0) == Range(0, 1)


def test_time_is_left_for_all_stages_to_come() -> None:
    """Behind exit 0 lie two stages of 5 ms each, and a front pass of 5 ms may come before."""
    rebatcher, _ = policy(4e-3, 1e-3, segments=3, plan=RebatchPlan((0, 1), (8, 8)))
    rebatcher._planned_for, rebatcher._until_look = 5, 10
    rebatcher._times_seen = [9, 9]
    rebatcher.observe(Range(0, 1), 1, 10, 5e-3, None)
    for deadline_s, first in ((0.0149, 1), (0.0152, 0)):
        waiting = [Waiting(1, 10, deadline_s), NOBODY]
        assert rebatcher.choose(Waiting(4, 40), waiting, 0.0).first == first


@pytest.mark.parametrize(("deadline_s", "first"), [(0.100, 0), (0.009, 1)])
def test_a_waiting_row_goes_before_it_is_late(deadline_s: float, first: int) -> None:
    """A front pass takes 5 ms and its stage as long: with less than 10 ms it goes now."""
    rebatcher, _ = policy(4e-3, 1e-3)
    rebatcher.choose(Waiting(4, 40), [NOBODY], 0.0)
    rebatcher.plan = RebatchPlan((0,), (8,))
    rebatcher.observe(Range(0, 1), 1, 10, 5e-3, None)
    assert rebatcher.choose(Waiting(3, 30), [Waiting(1, 10, deadline_s)], 0.0).first == first


def test_a_full_stage_goes_and_the_deepest_first() -> None:
    rebatcher, _ = policy(segments=3, plan=RebatchPlan((0, 1), (4, 4)))
    rebatcher._planned_for, rebatcher._until_look = 10, 10
    ran = rebatcher.choose(Waiting(2, 20), [Waiting(4, 40), Waiting(4, 40)], 0.0)
    assert ran == Range(2, 3, tests=False)
    assert rebatcher.choose(Waiting(6, 60), [Waiting(4, 40), NOBODY], 0.0) == Range(1, 2)
    assert rebatcher.choose(Waiting(6, 60), [Waiting(3, 30), NOBODY], 0.0) == Range(0, 1)
    # Nothing is due and nobody is at the front: the fullest goes.
    assert rebatcher.choose(NOBODY, [Waiting(1, 10), Waiting(3, 30)], 0.0).first == 2


def test_who_cannot_leave_goes_on_when_the_stage_is_due() -> None:
    rebatcher, counters = policy(plan=RebatchPlan((0,), (8,)))
    rebatcher._planned_for, rebatcher._until_look = 10, 10
    assert rebatcher.judge(group(0, 3), 0.0) is BatchDecision.SPLIT
    assert rebatcher.choose(Waiting(5, 50), [Waiting(3, 30)], 0.0).first == 0  # 3 of 8: wait
    assert rebatcher.choose(Waiting(5, 50), [Waiting(8, 80)], 0.0).first == 1  # eight: go
    assert counters.splits == counters.stays == counters.explored == 0


def test_one_decision_in_so_many_is_turned_round() -> None:
    rebatcher, counters = policy(4e-3, 1e-3)
    verdicts = []
    for _ in range(3 * EXPLORE_EVERY):
        verdicts.append(rebatcher.judge(group(6, 4), 0.0))
        rebatcher._busy_s += 1.0
    assert [i for i, v in enumerate(verdicts, 1) if v is BatchDecision.STAY] == [
        EXPLORE_EVERY,
        2 * EXPLORE_EVERY,
        3 * EXPLORE_EVERY,
    ]
    assert counters.explored == 3


def test_turning_round_costs_no_more_than_its_share_of_the_time() -> None:
    rebatcher, counters = policy(4e-3, 1e-3)
    price_s = rebatcher.split_s(group(6, 4))[1]
    for _ in range(100 * EXPLORE_EVERY):
        rebatcher.judge(group(6, 4), 0.0)
        rebatcher.observe(Range(0, 1), 10, 100, 14e-3, None)
    busy_s = 100 * EXPLORE_EVERY * 14e-3
    assert 0.9 * EXPLORE_SHARE * busy_s < counters.explored * price_s <= EXPLORE_SHARE * busy_s


def test_what_a_pass_costs_beside_the_runner_is_learned() -> None:
    rebatcher, _ = policy(4e-3, 1e-3)
    now_s = 0.0
    for i in range(400):
        rebatcher.choose(Waiting(10, 100), [NOBODY], now_s)
        rebatcher.observe(Range(0, 1), 10, 100, 14e-3, 5)
        now_s += 14e-3 + (0.3e-3 if i % 50 else 5.0)  # and now and then nobody is here
    assert rebatcher.overhead_s == pytest.approx(0.3e-3, rel=0.01)


@pytest.mark.parametrize("judged", [1, 2])
@pytest.mark.parametrize("offset", [0, 1])
def test_splits_and_exits_outside_the_plan_both_have_their_turn(judged: int, offset: int) -> None:
    """Whatever the rhythm of passes and decisions: counted together, one would starve the other."""
    rebatcher, counters = policy(4e-3, 1e-3, plan=RebatchPlan((0,), (8,)), segments=3)
    rebatcher._planned_for, rebatcher._until_look = 10, 10**6
    probed = turned = 0
    for _ in range(offset):
        rebatcher.choose(Waiting(10, 100), [NOBODY] * 2, 0.0)
    for _ in range(4 * EXPLORE_EVERY):
        rebatcher.choose(Waiting(10, 100), [NOBODY] * 2, 0.0)
        for _ in range(judged):
            turned += rebatcher.judge(group(6, 4), 0.0) is BatchDecision.STAY
            rebatcher._busy_s += 1.0
        ran = rebatcher.choose(NOBODY, [Waiting(8, 80), NOBODY], 0.0)
        if ran == Range(1, 2):
            probed += 1
            assert rebatcher.judge(group(4, 4, ran=ran), 0.0) is BatchDecision.STAY
            rebatcher.choose(NOBODY, [NOBODY, Waiting(8, 80)], 0.0)
        else:
            assert ran == Range(1, 3, tests=False)
    assert (probed, turned) == (4, 4 * judged)
    assert counters.explored == 4 + 4 * judged


def test_an_exit_outside_the_plan_is_probed_and_can_come_back() -> None:
    """Nothing leaves, so the plan drops the exit; probes notice when that changes."""
    rebatcher, counters = policy(row_s=1e-3)
    for _ in range(200):
        rebatcher.observe(Range(0, 1), 10, 100, 10e-3, 0)
    tested = []
    for i in range(4 * EXPLORE_EVERY):
        ran = rebatcher.choose(Waiting(10, 100), [NOBODY], 0.0)
        if ran.stop == 1:
            tested.append(i)
            assert rebatcher.judge(group(0, 10), 0.0) is BatchDecision.STAY
            rebatcher.observe(ran, 10, 100, 10e-3, 0)
            going_on = rebatcher.choose(NOBODY, [Waiting(10, 100)], 0.0)
            assert going_on == Range(1, 2, tests=False)
        else:
            assert ran == Range(0, 2, tests=False)
    assert rebatcher.plan.exits == ()
    assert [b - a for a, b in pairwise(tested)] == [EXPLORE_EVERY] * 3
    assert counters.explored == len(tested) == 4
    for _ in range(30 * EXPLORE_EVERY):
        ran = rebatcher.choose(Waiting(10, 100), [NOBODY], 0.0)
        if ran.stop == 1:
            rebatcher.judge(group(9, 1), 0.0)
            rebatcher.observe(ran, 10, 100, 10e-3, 9)
    assert rebatcher.plan.exits == (0,)


def test_exit_rates_follow_what_passes() -> None:
    rebatcher, _ = policy(segments=3, plan=RebatchPlan((0, 1), (0, 0)))
    for _ in range(400):
        rebatcher.observe(Range(0, 1), 10, 100, 1e-3, 4)  # 40 % leave at the first
        rebatcher.observe(Range(1, 2), 6, 60, 1e-3, 3)  # half of the others at the second
    assert rebatcher.left_by == pytest.approx((0.4, 0.7), abs=0.01)


def test_plans_are_made_anew_when_the_batch_changes_or_time_has_passed() -> None:
    rebatcher, _ = policy(row_s=1e-3)
    rebatcher.choose(Waiting(16, 160), [NOBODY], 0.0)
    marked = rebatcher.plan = RebatchPlan((0,), (2,))
    rebatcher.choose(Waiting(15, 150), [NOBODY], 0.0)
    assert rebatcher.plan is marked
    rebatcher.choose(Waiting(8, 80), [NOBODY], 0.0)
    assert rebatcher.plan is not marked
    marked = rebatcher.plan = RebatchPlan((0,), (2,))
    for _ in range(REPLAN_EVERY * REPLAN_LATEST - 1):
        rebatcher.choose(Waiting(8, 80), [NOBODY], 0.0)
        assert rebatcher.plan is marked
    rebatcher.choose(Waiting(8, 80), [NOBODY], 0.0)
    assert rebatcher.plan is not marked


def test_plans_are_made_anew_when_their_reasons_are_gone() -> None:
    rebatcher, _ = policy(row_s=1e-3)
    rebatcher.choose(Waiting(16, 160), [NOBODY], 0.0)
    marked = rebatcher.plan = RebatchPlan((0,), (2,))
    for _ in range(100):
        rebatcher.observe(Range(0, 1), 16, 160, 16e-3, 2)  # far fewer leave than was thought
    for _ in range(2 * REPLAN_EVERY - 1):  # the second plan comes later than the first
        rebatcher.choose(Waiting(16, 160), [NOBODY], 0.0)
        assert rebatcher.plan is marked
    rebatcher.choose(Waiting(16, 160), [NOBODY], 0.0)
    assert rebatcher.plan is not marked


def test_deterministic_takes_no_choice_by_load() -> None:
    counters = ExitCounters()
    rebatcher = DrexRebatcher(costs_of(10e-3, 0.0), counters=counters, deterministic=True)
    for i in range(3 * EXPLORE_EVERY):
        assert rebatcher.choose(Waiting(10, 100), [NOBODY], float(i)) == Range(0, 1)
        assert rebatcher.judge(group(i % 10, 10 - i % 10, deadline_s=0.0), float(i)) is (
            BatchDecision.SPLIT
        )
        rebatcher.observe(Range(0, 1), 10, 100, 10e-3, i % 10)
    assert counters.explored == counters.stays == 0


def test_deterministic_tests_every_exit_before_there_is_a_plan() -> None:
    """The first rows of a new replica may have come waiting at an exit, from another one."""
    costs = SegmentCosts(4, 16)
    rebatcher = DrexRebatcher(costs, counters=ExitCounters(), deterministic=True)
    waiting = [Waiting(2, 20), NOBODY, NOBODY]
    assert rebatcher.choose(NOBODY, waiting, 0.0) == Range(1, 2)
    resized = rebatcher.resized((2, 4, 6, 8), (2, 4, 6))
    assert resized.choose(NOBODY, [Waiting(2, 20), NOBODY], 0.0) == Range(1, 2)


def test_the_default_gap_is_one_and_a_half_full_passes() -> None:
    rebatcher, _ = policy(4e-3, 1e-3)
    assert rebatcher.target_gap_s(6) == pytest.approx(1.5 * 20e-3)
    assert rebatcher.target_gap_s(0) == rebatcher.target_gap_s(1)


@pytest.mark.parametrize("segments", [3, 5])
def test_plans_are_made_between_passes_and_take_a_small_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, segments: int
) -> None:
    """The batch grows to 64; a pass takes 5 ms, and each steady state 0.4 ms to be played."""
    clock, play_s, real = ManualClock(), 0.4e-3, plan._play
    monkeypatch.setattr(plan, "_play", lambda *args: [clock.advance(play_s), real(*args)][1])
    costs = costs_of(5e-3 / segments, 0.0, segments=segments)
    rebatcher = DrexRebatcher(costs, counters=ExitCounters(), clock=clock)
    busy_s = planning_s = longest_s = 0.0
    nobody = [NOBODY] * (segments - 1)
    for turn in range(1500):
        running = min(64, 1 + turn // 4)
        began_s = clock.now_s()
        ran = rebatcher.choose(Waiting(running, 10 * running), nobody, began_s)
        took_s = clock.now_s() - began_s
        if turn:  # the first plan is made at once
            planning_s, longest_s = planning_s + took_s, max(longest_s, took_s)
        clock.advance(5e-3)
        busy_s += 5e-3
        rebatcher.observe(ran, running, 10 * running, 5e-3, running // 2 if ran.tests else None)
        rebatcher.choose(NOBODY, [Waiting(1, 10), *nobody[1:]], clock.now_s())
        assert planning_s <= PLAN_SHARE * busy_s + play_s
    assert planning_s > 0.0
    assert longest_s <= 2 * play_s
    assert rebatcher.overhead_s <= OVERHEAD_S, "planning is no part of what a pass costs"
    assert 64 in rebatcher._plans, "and in the end there is a plan for all"
