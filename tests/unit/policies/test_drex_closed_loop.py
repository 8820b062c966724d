"""What the plan promises against what the loop does, on machines of several shapes, in their time.

Real decode loop, real policy; a runner whose passes take what a cost function says, and whose
tokens are sure or not by a fixed hash. Every sequence that ends is replaced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product

import pytest

from quadriga.checkpoint.exits import ExitCounters, ExitParams
from quadriga.clock import ManualClock
from quadriga.core.request import SamplingParams
from quadriga.policies.baselines.exits import NoExits
from quadriga.policies.drex import DrexRebatcher, RebatchPlan, SegmentCosts
from quadriga.policies.drex.plan import Demand
from quadriga.policies.rebatching import Range, Rebatcher, Waiting
from tests.fake_runner import FakeSegmentRunner, confidence_at
from tests.sequences import make_decode_loop, make_sequence, make_slots
from tests.unit.policies.drex_plans import evaluate, make_plan

Shape = Callable[[int], float]
MAX_TOKENS = 48

SHAPES: dict[str, Shape] = {
    "compute-bound": lambda b: 0.05e-3 + 0.1e-3 * b,
    "knee": lambda b: 1e-3 + 0.1e-3 * max(0, b - 16),
    "mixed": lambda b: 1e-3 + 0.05e-3 * b,
    "weight-bound": lambda b: 5e-3 + 0.01e-3 * b,
}
ENDS = {2: (4, 8), 3: (2, 4, 8)}


class Device(FakeSegmentRunner):
    """Passes take the shape's time for every eighth of the model, and a head at their end."""

    def __init__(self, num_rows: int, segments: int, shape: Shape) -> None:
        super().__init__(num_rows, 128, ends=ENDS[segments], clock=ManualClock())
        self.shape = shape

    def advance(self, rows: Sequence[int], first: int, stop: int) -> list[float]:
        """Whoever is sure at an exit is sure at the later ones, as models are."""
        super().advance(rows, first, stop)
        depths = self.segment_ends[:stop]
        return [max(confidence_at(self._known(row), d) for d in depths) for row in rows]

    def pass_s(self, first: int, stop: int, count: int) -> float:
        ends = (0, *self.segment_ends)
        head_s = 0.02 * self.shape(count)
        return (ends[stop] - ends[first]) / 8 * self.shape(count) + head_s

    def costs(self) -> SegmentCosts:
        """What calibration would find."""
        num_segments = len(self.segment_ends)
        costs = SegmentCosts(num_segments, self.num_rows)
        for count in costs.knots:
            head_s = 0.02 * self.shape(count)
            for segment in range(num_segments):
                is_last = segment == num_segments - 1
                seconds = self.pass_s(segment, segment + 1, count)
                costs.set(segment, count, seconds - (0.0 if is_last else head_s))
                costs.set(segment, count, 0.0 if is_last else head_s, head=True)
        return costs


@dataclass(frozen=True)
class Ran:
    tokens_per_s: float
    gap_p99_s: float
    early_share: float
    counters: ExitCounters


class Fixed(DrexRebatcher):
    """DREX that keeps the plan it is given, explores nothing, and knows no deadlines."""

    def __init__(self, costs: SegmentCosts, counters: ExitCounters, plan: RebatchPlan) -> None:
        super().__init__(costs, counters=counters, deterministic=True)
        self.plan = plan

    def target_gap_s(self, running: int) -> float:
        return float("inf")

    def _front_range(self, front: Waiting, waiting: object) -> Range:
        return Range(0, min(self.plan.exits) + 1)


def run(
    device: Device,
    make: Callable[[SegmentCosts, ExitCounters], Rebatcher],
    *,
    running: int,
    threshold: float,
    tokens: int = 3000,
) -> Ran:
    """Decode until so many tokens are out; the first quarter is not counted."""
    counters = ExitCounters()
    loop = make_decode_loop(
        device,
        make_slots(running, 128, 10**6),
        device.clock,
        rebatcher=make(device.costs(), counters),
        counters=counters,
    )
    number, out, begun_s, begun = 0, 0, 0.0, 0
    last_s: dict[str, float] = {}
    gaps: list[float] = []
    while out < tokens:
        while loop.num_running < running:
            state = make_sequence(
                str(number),
                [number + 1],
                SamplingParams(max_tokens=MAX_TOKENS),
                exits=ExitParams(threshold),
                output_ids=[1],
                exit_layers=[8],
            )
            slot = loop.reserve(state.sequence_id, state.max_total_tokens)
            device.write_kv(slot.row, 0, 0, state.prompt_ids)
            loop.join(state)
            last_s[state.sequence_id] = device.clock.now_s()
            number += 1
        for _, emission in loop.step():
            out += 1
            now_s = device.clock.now_s()
            gaps.append(now_s - last_s[emission.sequence_id])
            last_s[emission.sequence_id] = now_s
        if not begun and out > tokens // 4:
            begun, begun_s, gaps = out, device.clock.now_s(), []
    assert counters.involuntary_exits == 0
    full = counters.tokens.get(8, 0) / sum(counters.tokens.values())
    gaps.sort()
    return Ran(
        (out - begun) / (device.clock.now_s() - begun_s),
        gaps[int(0.99 * len(gaps))],
        1.0 - full,
        counters,
    )


@cache
def without_exits(running: int, segments: int, shape: str) -> Ran:
    device = Device(running, segments, SHAPES[shape])
    return run(device, lambda costs, _: NoExits(costs), running=running, threshold=1.0)


def drex(costs: SegmentCosts, counters: ExitCounters) -> Rebatcher:
    return DrexRebatcher(costs, counters=counters, overhead_s=0.0)


@pytest.mark.parametrize("segments", [2, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("passes", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("running", [4, 24])
def test_never_worse_than_no_exits(segments: int, shape: str, passes: float, running: int) -> None:
    """With the whole machinery on: plan, probes, exploration, deadlines."""
    off = without_exits(running, segments, shape)
    on = run(
        Device(running, segments, SHAPES[shape]), drex, running=running, threshold=1.0 - passes
    )
    assert on.tokens_per_s >= 0.985 * off.tokens_per_s
    assert on.gap_p99_s <= 1.6 * off.gap_p99_s


@pytest.mark.parametrize(
    ("segments", "shape", "passes", "running", "exits", "targets"),
    [
        (2, "compute-bound", 0.5, 24, (0,), (1,)),
        (2, "compute-bound", 0.8, 24, (0,), (8,)),
        (2, "knee", 0.6, 24, (0,), (12,)),
        (2, "weight-bound", 0.9, 24, (0,), (16,)),
        (2, "weight-bound", 0.6, 16, (0,), (8,)),
        (3, "compute-bound", 0.6, 24, (0, 1), (4, 8)),
        (3, "knee", 0.6, 24, (0, 1), (12, 8)),
        (3, "mixed", 0.6, 24, (0, 1), (8, 4)),
        (3, "mixed", 0.9, 24, (0, 1), (4, 2)),
        (3, "weight-bound", 0.6, 24, (0, 1), (8, 8)),
        (3, "weight-bound", 0.9, 24, (1,), (8,)),
    ],
)
def test_the_forecast_is_what_happens(
    segments: int,
    shape: str,
    passes: float,
    running: int,
    exits: tuple[int, ...],
    targets: tuple[int, ...],
) -> None:
    device = Device(running, segments, SHAPES[shape])
    plan = evaluate(device.costs(), demand_of(segments, passes, running), exits, targets)
    ran = run(
        device,
        lambda costs, counters: Fixed(costs, counters, plan),
        running=running,
        threshold=1.0 - passes,
    )
    assert plan.tokens_per_s == pytest.approx(ran.tokens_per_s, rel=0.06)


@pytest.mark.parametrize(
    ("segments", "shape", "passes", "running"),
    [
        (2, "knee", 0.6, 24),
        (2, "weight-bound", 0.9, 16),
        (3, "compute-bound", 0.6, 16),
        (3, "knee", 0.9, 24),
        (3, "mixed", 0.6, 24),
    ],
)
def test_no_other_plan_is_much_better(
    segments: int, shape: str, passes: float, running: int
) -> None:
    """All exits, and batches of every kind behind them, run for real; and no exits."""
    costs = Device(running, segments, SHAPES[shape]).costs()
    found = make_plan(costs, demand_of(segments, passes, running))
    sizes = [1, 4, 8, 12]
    subsets = [s for k in range(1, segments) for s in combinations(range(segments - 1), k)]
    best = without_exits(running, segments, shape).tokens_per_s
    for exits in subsets:
        for targets in product(sizes, repeat=len(exits)):
            best = max(best, really(RebatchPlan(exits, targets), segments, shape, passes, running))
    ours = really(found, segments, shape, passes, running)
    assert ours >= 0.95 * best


def really(plan: RebatchPlan, segments: int, shape: str, passes: float, running: int) -> float:
    """Tokens a second that the loop makes under a fixed plan."""
    if not plan.exits:
        return without_exits(running, segments, shape).tokens_per_s
    return run(
        Device(running, segments, SHAPES[shape]),
        lambda costs, counters: Fixed(costs, counters, plan),
        running=running,
        threshold=1.0 - passes,
        tokens=1500,
    ).tokens_per_s


def demand_of(segments: int, passes: float, running: int) -> Demand:
    left_by = [1.0 - (1.0 - passes) ** (i + 1) for i in range(segments - 1)]
    return Demand(running, MAX_TOKENS / 2, left_by, 0.0, float("inf"))
