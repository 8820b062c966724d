"""The regime: exits are used where they pay, and batches behind them no longer than time allows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from random import Random

import pytest

from quadriga.policies.drex import SegmentCosts
from quadriga.policies.drex.plan import GAIN, Demand, RebatchPlan, _best_targets, _grow, _Table
from tests.unit.policies.drex_plans import costs_by, ended, evaluate, make_plan


def linear(b: int) -> float:
    """Compute-bound: every row costs its operations."""
    return 1e-3 * b


def flat(b: int) -> float:
    """Weight-bound: one row costs what all cost."""
    return 20e-3


def demand(*left_by: float, running: int = 32, max_gap_s: float = 1e9) -> Demand:
    return Demand(running, 100.0, left_by, 20e-6, max_gap_s)


def test_compute_bound_machines_use_their_exit() -> None:
    costs = costs_by([linear, linear])
    plan = make_plan(costs, demand(0.5))
    assert plan.exits == (0,)
    # Half the tokens do half the work: 32 / (32 + 16) a millisecond, against 32 / 64.
    assert plan.tokens_per_s == pytest.approx(1000 / 1.5, rel=0.01)


def test_exits_are_left_alone_where_the_kv_they_skip_costs_more_than_they_save() -> None:
    costs = costs_by([linear, linear])
    costs.fill_s = 0.5e-3  # half of what the second stage takes for a row
    # 32 / (32 + 16 + 16 · .5): what leaves early is made good for half the price.
    plan = make_plan(costs, demand(0.5))
    assert plan.exits == (0,)
    assert plan.tokens_per_s == pytest.approx(1000 / 1.75, rel=0.01)
    costs.fill_s = 0.98e-3
    assert make_plan(costs, demand(0.5)).exits == ()
    costs.filled_share = 0.1  # but hardly any sequence lives to go deep again
    assert make_plan(costs, demand(0.5)).exits == (0,)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4])
def test_weight_bound_machines_do_not_at_moderate_rates(rate: float) -> None:
    plan = make_plan(costs_by([flat, flat]), demand(rate))
    assert plan.exits == ()
    assert plan.tokens_per_s == pytest.approx(32 / (40e-3 + 20e-6))


def test_weight_bound_machines_do_where_almost_all_leave() -> None:
    assert make_plan(costs_by([flat, flat]), demand(0.98)).exits == (0,)


def test_the_forecast_is_the_closed_form_but_for_chance() -> None:
    """Two halves of 20 ms, 60 % leave, 20 of 32 wanted: 32 · 0.6 + 32 · 0.36 tokens leave early."""
    costs = costs_by([flat, flat], head_s=0.0)
    wanted = demand(0.6)
    # Front passes of 32 and 19.2 rows leave 12.8 + 7.68 waiting, who then go down together.
    tokens = 32 * 0.6 + 19.2 * 0.6 + 12.8 + 7.68
    found = evaluate(costs, wanted, (0,), (20,))
    assert found.tokens_per_s == pytest.approx(tokens / (60e-3 + 3 * 20e-6), rel=0.05)
    at_once = evaluate(costs, wanted, (0,), (1,))
    assert at_once.tokens_per_s == pytest.approx(32 / (40e-3 + 2 * 20e-6), rel=1e-3)


def test_an_exit_must_gain_two_per_cent_and_its_head_counts() -> None:
    nearly = costs_by([linear, linear])
    assert make_plan(nearly, demand(0.03)).exits == ()  # gains 1.5 %
    assert make_plan(nearly, demand(0.03), gain=1.0).exits == (0,)
    dear = costs_by([linear, linear], head_s=32e-3)
    assert make_plan(dear, demand(0.9)).exits == ()
    assert GAIN == 1.02


def test_an_exit_that_nothing_passes_is_not_used() -> None:
    plan = make_plan(costs_by([linear] * 3), demand(0.0, 0.6))
    assert plan.exits == (1,)


@pytest.mark.parametrize("shape", [linear, flat, lambda b: 5e-3 + 0.5e-3 * b])
def test_a_higher_exit_rate_never_forecasts_less(shape: Callable[[int], float]) -> None:
    costs = costs_by([shape, shape])
    rates = [i / 20 for i in range(20)]
    found = [make_plan(costs, demand(rate)).tokens_per_s for rate in rates]
    assert all(later >= 0.999 * before for before, later in pairwise(found))
    assert found[-1] > found[0]
    used = [bool(make_plan(costs, demand(rate)).exits) for rate in rates]
    assert used == sorted(used), "once it pays, it pays at every higher rate"


def slowest_gap_s(costs: SegmentCosts, plan: RebatchPlan, wanted: Demand) -> float:
    """The largest limit under which `evaluate` still refuses the plan, by bisection."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        tried = evaluate(
            costs,
            Demand(wanted.running, wanted.tokens_each, wanted.left_by, wanted.overhead_s, middle),
            plan.exits,
            plan.targets,
        )
        low, high = (middle, high) if tried.tokens_per_s == 0 else (low, middle)
    return high


@pytest.mark.parametrize("limit_s", [0.061, 0.1, 0.3])
def test_the_gap_limit_is_respected(limit_s: float) -> None:
    costs = costs_by([flat, flat])
    free = make_plan(costs, demand(0.9))
    assert free.targets[0] > 4
    tight = make_plan(costs, demand(0.9, max_gap_s=limit_s), must_test=True)
    assert slowest_gap_s(costs, tight, demand(0.9)) <= limit_s
    assert tight.tokens_per_s <= free.tokens_per_s


def test_waiting_batches_grow_where_passes_are_flat() -> None:
    assert max(make_plan(costs_by([flat, flat]), demand(0.9)).targets) >= 8
    assert max(make_plan(costs_by([linear, linear]), demand(0.5)).targets) <= 16


def test_greedy_growth_finds_what_trying_all_finds() -> None:
    """Up to two exits all subsets are tried; grown one by one they come to nearly the same."""
    random = Random(5)
    worst = 1.0
    for _ in range(40):
        num_exits = random.choice([1, 2, 3])
        fixed, each = random.choice([1e-3, 10e-3]), random.choice([0.1e-3, 1e-3])
        costs = costs_by([lambda b, f=fixed, e=each: f + e * b] * (num_exits + 1), head_s=1e-3)
        left_by = sorted(random.random() for _ in range(num_exits))
        wanted = demand(*left_by, running=random.choice([4, 16, 48]))
        subsets = [s for k in range(1, num_exits + 1) for s in combinations(range(num_exits), k)]
        table = _Table(costs, wanted)
        best = max(ended(_best_targets(table, wanted, s)).tokens_per_s for s in subsets)
        grown = max(plan.tokens_per_s for plan in ended(_grow(table, wanted)))
        assert grown <= best * (1 + 1e-12)
        worst = min(worst, grown / best)
    assert worst >= 0.96


def test_many_exits_are_planned_without_trying_all() -> None:
    left_by = [0.05 * (i + 1) for i in range(12)]
    plan = make_plan(costs_by([linear] * 13), demand(*left_by))
    assert 1 <= len(plan.exits) == len(plan.targets)
    assert list(plan.exits) == sorted(set(plan.exits))
    assert plan.tokens_per_s > GAIN * 32 / (13 * 32e-3)


def test_must_test_leaves_no_exit_out() -> None:
    for shape in (linear, flat):
        plan = make_plan(costs_by([shape] * 4), demand(0.0, 0.1, 0.1), must_test=True)
        assert plan.exits == (0, 1, 2)
    no_time = make_plan(costs_by([flat] * 3), demand(0.5, 0.5, max_gap_s=1e-9), must_test=True)
    assert no_time.exits == (0, 1) and no_time.targets == (1, 1)


@pytest.mark.parametrize("must_test", [False, True])
def test_a_model_without_exits_has_the_plan_without_exits(must_test: bool) -> None:
    plan = make_plan(costs_by([linear]), demand(), must_test=must_test)
    assert plan == RebatchPlan((), (), pytest.approx(1000.0, rel=1e-3))


@pytest.mark.parametrize(("limit_s", "is_allowed"), [(0.0800, False), (0.1002, True)])
def test_the_slowest_token_of_a_plan_by_hand(limit_s: float, is_allowed: bool) -> None:
    """Up to four passes from the front and a flush, of 20.02 ms each."""
    costs = costs_by([flat, flat], head_s=0.0)
    wanted = demand(0.6, max_gap_s=limit_s)
    assert (evaluate(costs, wanted, (0,), (20,)).tokens_per_s > 0) is is_allowed
    assert evaluate(costs, demand(0.6, max_gap_s=1e-9), (0,), (1,)).tokens_per_s == 0
