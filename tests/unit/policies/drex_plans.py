"""Plans made in one go, and single steady states."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from quadriga.policies.drex import SegmentCosts, plan
from quadriga.policies.drex.plan import Demand, RebatchPlan


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
