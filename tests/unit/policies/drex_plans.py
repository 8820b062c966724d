"""Plans made in one go, and single steady states."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from quadriga.policies.drex import SegmentCosts, plan
from quadriga.policies.drex.plan import Demand, RebatchPlan


def costs_by(
    segments: Sequence[Callable[[int], float]], *, head_s: float = 1e-6, max_rows: int = 64
) -> SegmentCosts:
    """What a batch of so many rows takes in each segment is said by a function."""
    costs = SegmentCosts(len(segments), max_rows)
    for s, seconds in enumerate(segments):
        for b in costs.knots:
            costs.set(s, b, seconds(b))
            costs.set(s, b, head_s, head=True)
    return costs


def ended(planning: Generator[None, None, Any]) -> Any:
    """What a generator returns in the end."""
    while True:
        try:
            next(planning)
        except StopIteration as end:
            return end.value


def make_plan(costs: SegmentCosts, demand: Demand, **options: Any) -> Any:
    return ended(plan.make_plan(costs, demand, **options))


def evaluate(
    costs: SegmentCosts, demand: Demand, exits: tuple[int, ...], targets: tuple[int, ...]
) -> RebatchPlan:
    return plan._play(plan._Table(costs, demand), demand, exits, targets)
