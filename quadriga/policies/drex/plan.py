"""The regime: which exits are worth testing, and how large the batches behind them should be.

Judging one batch alone is not enough: sequences that wait are missing from the next front batch, so
a split that looks profitable can cost throughput where a pass takes the same time for few rows as
for many. So whole steady states are compared, for the sequences there are:

    N sequences; exits a_1 < a_2 < … in use; a share u_i of the tokens has left by exit a_i
    flushes       every k_i passes from the front: the fewest after which m_i rows wait, of the
                  N · u_i^j that are at the front for pass j, so that N · (1 − u_i^k) ≥ m_i
    front batch   b = N − Σ_i (N − N · (1 − u_i^k_i) / (k_i · (1 − u_i)))
    time a pass   T = t_0(b) + Σ_i t_i(k_i · r_i) / k_i + h      r_i = b · (1 − u_i) reach stage i
    throughput    ρ = b / T

with m_i the batch that a stage waits for. No exits at all is the plan with ρ = N / t(N), and wins
unless another is 2 % better. Plans whose slowest tokens would wait beyond the target gap are out.
With one exit this is exact but for chance. (A stage flushes after whole passes: taking m_i / r_i
for k_i, and a buffer half full on average, promises up to 8 % more than there is.)

Source: DREX compares one batch's times; its code stops sampling the deep stage where it does not
split. This form is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from quadriga.policies.drex.costs import SegmentCosts

GAIN = 1.02
_EXHAUSTIVE = 3  # up to this many exits all subsets are tried, beyond it they are added one by one
_SIZES = (0, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class Plan:
    """A steady state.

    Attributes:
        exits: Exits in use, ascending; empty runs every token to the end.
        targets: Batch that each stage behind an exit waits for; parallel to `exits`.
        tokens_per_s: Forecast.
    """

    exits: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a plan is made for.

    Attributes:
        running: N, sequences that take part.
        tokens_each: Mean context of a sequence.
        left_by: Per exit but the last, share of tokens whose confidence passes there or earlier.
        overhead_s: h, cost of a split beside the passes.
        max_gap_s: Longest time between two tokens that the slowest may take.
    """

    running: int
    tokens_each: float
    left_by: Sequence[float]
    overhead_s: float
    max_gap_s: float


def make_plan(
    costs: SegmentCosts, demand: Demand, *, must_test: bool = False, gain: float = GAIN
) -> Plan:
    """Return the best steady state.

    Args:
        must_test: Leave no exit out (deterministic answers); only the batches are chosen.
        gain: Factor by which leaving early must beat the full model.
    """
    exits = range(len(demand.left_by))
    if must_test and exits:
        return _best_targets(costs, demand, tuple(exits))
    n = demand.running
    stay_s = costs.forecast_s(0, costs.num_segments, n, n * demand.tokens_each, tests=False)
    best = Plan((), (), n / stay_s)
    bar = gain * best.tokens_per_s
    if len(demand.left_by) <= _EXHAUSTIVE:
        subsets = [s for k in range(1, len(exits) + 1) for s in combinations(exits, k)]
        plans = [_best_targets(costs, demand, subset) for subset in subsets]
    else:
        plans = _grow(costs, demand)
    for plan in plans:
        if plan.tokens_per_s > max(bar, best.tokens_per_s):
            best = plan
    return best


def _grow(costs: SegmentCosts, demand: Demand) -> list[Plan]:
    """Add the exit that helps most, while one does."""
    plans: list[Plan] = []
    chosen: tuple[int, ...] = ()
    while True:
        options = [
            _best_targets(costs, demand, tuple(sorted((*chosen, e))))
            for e in range(len(demand.left_by))
            if e not in chosen
        ]
        best = max(options, key=lambda plan: plan.tokens_per_s, default=None)
        if best is None or (plans and best.tokens_per_s <= plans[-1].tokens_per_s):
            return plans
        plans.append(best)
        chosen = best.exits


def _best_targets(costs: SegmentCosts, demand: Demand, exits: tuple[int, ...]) -> Plan:
    """Choose each stage's batch in turn, twice over."""
    targets = [0] * len(exits)
    best = evaluate(costs, demand, exits, tuple(targets))
    for _ in range(2):
        for i in range(len(exits)):
            for size in _SIZES:
                if size > demand.running:
                    break
                tried = (*targets[:i], size, *targets[i + 1 :])
                plan = evaluate(costs, demand, exits, tried)
                if plan.tokens_per_s > best.tokens_per_s:
                    best, targets = plan, list(tried)
    return best


def evaluate(
    costs: SegmentCosts, demand: Demand, exits: tuple[int, ...], targets: tuple[int, ...]
) -> Plan:
    """Return the steady state of these exits and batches; throughput 0 where a gap is too long."""
    n, each = demand.running, demand.tokens_each
    stays = [1.0 - demand.left_by[e] for e in exits]  # share that reaches the stage behind
    every = [_passes_per_flush(n, q, m) for m, q in zip(targets, stays, strict=True)]
    front = max(1.0, n - sum(_held(n, q, k) for q, k in zip(stays, every, strict=True)))
    first_stop = exits[0] + 1
    pass_s = costs.forecast_s(0, first_stop, front, front * each, tests=True) + demand.overhead_s
    gap_s = pass_s
    stops = [*(e + 1 for e in exits[1:]), costs.num_segments]
    for e, k, q, stop in zip(exits, every, stays, stops, strict=True):
        arriving = front * q
        batch = max(k * arriving, 1.0)
        is_final = stop == costs.num_segments
        stage_s = costs.forecast_s(e + 1, stop, batch, batch * each, tests=not is_final)
        gap_s += stage_s + (k - 1) * pass_s  # whatever comes before it, until it comes itself
        pass_s += arriving / batch * stage_s
    if gap_s > demand.max_gap_s and any(k > 1 for k in every):
        return Plan(exits, targets, 0.0)
    return Plan(exits, targets, front / pass_s)


def _passes_per_flush(running: int, stays: float, target: int) -> int:
    """Passes from the front until `target` rows wait, or the front is empty."""
    passes, at_front = 1, running * (1.0 - stays)
    while running - at_front < target and at_front >= 1.0 and stays > 0.0:
        passes += 1
        at_front *= 1.0 - stays
    return passes


def _held(running: int, stays: float, passes: int) -> float:
    """Rows that wait at an exit, on average over the passes from the front."""
    if passes == 1:
        return 0.0
    return running - running * (1.0 - (1.0 - stays) ** passes) / (passes * stays)
