"""The regime: which exits are worth testing, and how large the batches behind them should be.

Judging one batch alone is not enough: sequences that wait are missing from the next front batch, so
a split that looks profitable can cost throughput where a pass takes the same time for few rows as
for many. So whole steady states are compared, for the N sequences there are. A steady state is
played through: the policy's own rule chooses the next pass (the deepest stage whose batch is full,
else the front), each pass takes what the costs forecast, and how many leave is drawn, from the same
stratified numbers for every plan. Throughput is tokens over time between passes of the deepest
stage.

With mean numbers in place of drawn ones there is a closed form for one exit: with a share u that
leaves and k passes from the front until N · (1 − u^k) ≥ m rows wait,

    ρ = N · (Σ_{1≤j≤k} u^j + 1 − u^k) / (Σ_{j<k} (t_0(N · u^j) + h) + t_1(N · (1 − u^k)) + h)

But a stage that one pass fills on average is filled by chance after one, two or three, and with
several exits the rhythms do not divide one another: means promise up to a quarter more than there
is, and for the very plans that look best.

No exits at all is the plan with ρ = N / (t(N) + h), and wins unless another is 2 % better. Plans
whose slowest tokens would wait beyond the target gap are out.

Source: DREX compares one batch's times; its code stops sampling the deep stage where it does not
split. This form is ours.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
from math import sqrt
from random import Random
from statistics import NormalDist

from quadriga.policies.drex.costs import SegmentCosts

GAIN = 1.02
_MORE = 1.005  # factor by which one more exit must beat fewer: what plays differ by
_LEAST_SHARE = 0.01  # of the tokens that reach an exit
_EXHAUSTIVE = 2  # up to this many exits all subsets are tried, beyond it they are added one by one
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_WARM_UP = 16  # passes of a play before it is believed
_PLAY = 80  # passes of a play
_NORMAL = NormalDist()
_STRATA = 32


def _stratified() -> list[float]:
    """Numbers in (0, 1) in a fixed random order, each stretch of 32 of them evenly spread."""
    random = Random(7)
    draws: list[float] = []
    while len(draws) < _PLAY:
        draws += random.sample([(i + 0.5) / _STRATA for i in range(_STRATA)], _STRATA)
    return draws


_DRAWS = _stratified()


@dataclass(frozen=True, slots=True)
class RebatchPlan:
    """A steady state.

    Attributes:
        exits: Exits in use, ascending; empty runs every token to the end.
        targets: Batch that each stage behind an exit waits for, at least 1; parallel to `exits`.
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
        overhead_s: h, what a pass costs beside the runner's own time.
        max_gap_s: Longest time between two tokens that the slowest may take.
    """

    running: int
    tokens_each: float
    left_by: Sequence[float]
    overhead_s: float
    max_gap_s: float


Planning = Generator[None, None, RebatchPlan]
"""Returns a plan; yields after each play, as a replica's batch must not wait for them all."""


def make_plan(
    costs: SegmentCosts, demand: Demand, *, must_test: bool = False, gain: float = GAIN
) -> Planning:
    """Find the best steady state.

    Args:
        must_test: Leave no exit out (deterministic answers); only the batches are chosen.
        gain: Factor by which leaving early must beat the full model.
    """
    exits = range(len(demand.left_by))
    table = _Table(costs, demand)
    if must_test and exits:
        return (yield from _best_targets(table, demand, tuple(exits)))
    n = demand.running
    best = RebatchPlan((), (), n / table.seconds(0, costs.num_segments, n))
    bar = gain * best.tokens_per_s
    if len(demand.left_by) <= _EXHAUSTIVE:
        plans: list[RebatchPlan] = []
        for subset in chain.from_iterable(combinations(exits, k + 1) for k in exits):
            if _is_worth(demand, subset):
                plan = yield from _best_targets(table, demand, subset)
                plans.append(plan)
    else:
        plans = yield from _grow(table, demand)
    for plan in plans:  # fewer exits first
        if plan.tokens_per_s > max(bar, _MORE * best.tokens_per_s):
            best = plan
    return best


def _is_worth(demand: Demand, exits: Sequence[int]) -> bool:
    """Whether something leaves at every one of the exits."""
    return min(_shares(demand, exits)) >= _LEAST_SHARE


def _grow(table: _Table, demand: Demand) -> Generator[None, None, list[RebatchPlan]]:
    """Add the exit that helps most, while one does; batches are chosen for the ones taken."""
    plans: list[RebatchPlan] = []
    chosen: tuple[int, ...] = ()
    while True:
        options = []
        for e in range(len(demand.left_by)):
            if e not in chosen:
                subset = tuple(sorted((*chosen, e)))
                if _is_worth(demand, subset):
                    options.append(_play(table, demand, subset, (1,) * len(subset)))
                    yield
        best = max(options, key=lambda plan: plan.tokens_per_s, default=None)
        if best is not None:
            best = yield from _best_targets(table, demand, best.exits)
        if best is None or (plans and best.tokens_per_s <= plans[-1].tokens_per_s):
            return plans
        plans.append(best)
        chosen = best.exits


def _best_targets(table: _Table, demand: Demand, exits: tuple[int, ...]) -> Planning:
    """Choose each stage's batch in turn, from the last to the first, twice over."""
    targets = [1] * len(exits)
    best = _play(table, demand, exits, tuple(targets))  # the shortest gaps there are
    yield
    for _ in range(2 if len(exits) > 1 else 1):
        for i in reversed(range(len(exits))):
            worse = 0
            for size in _SIZES:
                if size > demand.running or worse > 1:
                    break
                plan = _play(table, demand, exits, (*targets[:i], size, *targets[i + 1 :]))
                yield
                worse = 0 if plan.tokens_per_s >= best.tokens_per_s else worse + 1
                if plan.tokens_per_s > best.tokens_per_s:
                    best = plan
            targets = list(best.targets)
    return best


def _play(
    table: _Table, demand: Demand, exits: tuple[int, ...], targets: tuple[int, ...]
) -> RebatchPlan:
    """Play a steady state through; throughput 0 where a gap is too long."""
    last = len(exits) - 1
    stops = [*(e + 1 for e in exits), table.num_segments]
    times = [table.line(0, stops[0])]
    times += [table.line(stop, after) for stop, after in pairwise(stops)]
    # Who leaves owes the KV of the stages behind; whoever runs one of them pays for its sequence.
    depths = [0, *(b - a for a, b in pairwise((*stops, table.num_segments)))]  # in segments
    owed = [0.0] * len(times)  # positions × segments, of all sequences
    shares = _shares(demand, exits)
    draws = iter(_DRAWS)
    front, waiting = demand.running, [0] * len(exits)
    # When whoever is slowest in each place got its last token.
    front_since_s, since_s = 0.0, [0.0] * len(exits)
    gaps: list[tuple[float, int]] = []
    now_s = begun_s = ended_s = 0.0
    tokens = begun_tokens = ended_tokens = 0
    for turn in range(_PLAY):
        stage = last
        while stage >= 0 and waiting[stage] < targets[stage]:
            stage -= 1
        if stage < 0 and not front:
            stage = max(range(len(exits)), key=waiting.__getitem__)
        if stage < 0:
            batch, oldest_s, front = front, front_since_s, 0
        else:
            batch, oldest_s, waiting[stage] = waiting[stage], since_s[stage], 0
        filled = owed[stage + 1] * batch / demand.running
        owed[stage + 1] -= filled
        now_s += times[stage + 1][batch]
        if filled:
            entered = min(filled, batch * depths[stage + 1])
            now_s += table.filled_share * table.filling_s(filled, entered)
        leaves = batch if stage == last else _drawn(next(draws), batch, shares[stage + 1])
        if leaves:
            tokens += leaves
            for behind in range(stage + 2, len(times)):
                owed[behind] += leaves * depths[behind]
            if turn >= _WARM_UP:
                gaps.append((now_s - oldest_s, leaves))
            front_since_s = min(front_since_s, now_s) if front else now_s
            front += leaves
        if leaves < batch:
            at = stage + 1
            since_s[at] = min(since_s[at], oldest_s) if waiting[at] else oldest_s
            waiting[at] += batch - leaves
        if stage == last and turn >= _WARM_UP:
            if begun_s:
                ended_s, ended_tokens = now_s, tokens
            else:
                begun_s, begun_tokens = now_s, tokens
    if ended_tokens - begun_tokens < tokens // 2:  # the deepest stage hardly ever runs
        begun_s, begun_tokens, ended_s, ended_tokens = 0.0, 0, now_s, tokens
    if _p99(gaps) > demand.max_gap_s:
        return RebatchPlan(exits, targets, 0.0)
    return RebatchPlan(exits, targets, (ended_tokens - begun_tokens) / (ended_s - begun_s))


def _drawn(draw: float, count: int, share: float) -> int:
    """Rows of `count` that leave: the quantile of a binomial at `draw`."""
    rare = min(share, 1.0 - share)
    if not rare:
        return count if share else 0
    mean = count * rare
    if mean > 6.0:
        found = round(mean + _NORMAL.inv_cdf(draw) * sqrt(mean * (1.0 - rare)))
        found = min(max(found, 0), count)
    else:
        found, odds = 0, rare / (1.0 - rare)
        chance = (1.0 - rare) ** count
        while draw > chance and found < count:
            draw -= chance
            chance *= (count - found) / (found + 1) * odds
            found += 1
    return found if share <= 0.5 else count - found


def _p99(gaps: list[tuple[float, int]]) -> float:
    """The gap that one token in a hundred goes beyond."""
    beyond = 0.01 * sum(count for _, count in gaps)
    for gap_s, count in sorted(gaps, reverse=True):
        beyond -= count
        if beyond < 0:
            return gap_s
    return 0.0


def _shares(demand: Demand, exits: Sequence[int]) -> list[float]:
    """Of the rows that each pass brings to its end, the share that leaves there."""
    shares, before = [], 0.0
    for e in exits:
        left = min(max(demand.left_by[e], before), 1.0)
        shares.append((left - before) / (1.0 - before) if before < 1.0 else 1.0)
        before = left
    return [*shares, 1.0]


class _Table:
    """Seconds of every range of segments for 0..N rows, its overhead with it."""

    def __init__(self, costs: SegmentCosts, demand: Demand) -> None:
        self.num_segments = costs.num_segments
        self.filling_s, self.filled_share = costs.filling_s, costs.filled_share
        self._costs = costs
        self._demand = demand
        self._lines: dict[tuple[int, int], list[float]] = {}

    def seconds(self, first: int, stop: int, count: int) -> float:
        return self.line(first, stop)[count]

    def line(self, first: int, stop: int) -> list[float]:
        """Seconds at 0..N rows; the exit behind the range is tested unless it is the last."""
        line = self._lines.get((first, stop))
        if line is None:
            costs, demand = self._costs, self._demand
            tests = stop < costs.num_segments
            known = sorted({0, demand.running, *(k for k in costs.knots if k < demand.running)})
            at = [
                costs.forecast_s(first, stop, k, k * demand.tokens_each, tests=tests)
                + demand.overhead_s
                for k in known
            ]
            line = [at[0]]
            for (low, a), (high, b) in pairwise(zip(known, at, strict=True)):
                line += [a + (b - a) * i / (high - low) for i in range(1, high - low + 1)]
            self._lines[first, stop] = line
        return line
