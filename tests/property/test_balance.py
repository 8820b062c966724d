"""Equal sequences are spread evenly, whenever they come and however fast the replicas are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.policies.ares.cluster import ClusterForecast, relative_work, weights
from quadriga.policies.ares.settings import AresSettings
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import SimConfig
from quadriga.sim.decode.replica import SimulatedDecodeReplica
from quadriga.sim.policies import make_policy
from quadriga.sim.profiles import CPU, CostProfile

ENDLESS = 1_000_000
"""Output tokens of a sequence that does not end before the last one is placed."""
ROOMY = replace(CPU, kv_capacity_tokens=10**9, num_slots=256, max_tokens=ENDLESS)


def simulation(
    policy: str,
    gaps_s: list[float],
    slower: list[float],
    *,
    report_every_s: float = 0.0,
    outputs: list[int] | None = None,
    profile: CostProfile = ROOMY,
    **more: Any,
) -> Simulation:
    """Equal prompts, the given seconds apart, on replicas that take so many times a step's time."""
    count = len(gaps_s)
    arrivals_s = np.cumsum(gaps_s)
    factors = iter(slower)

    def make(*arguments: Any) -> SimulatedDecodeReplica:
        replica = SimulatedDecodeReplica(*arguments)
        replica.factor = next(factors)
        return replica

    config = SimConfig(
        profile,
        num_decode=len(slower),
        num_prefill=2,
        report_every_s=report_every_s,
    )
    made = replace(make_policy(policy), places_ahead=False)
    lengths = np.array(outputs or [ENDLESS] * count)
    prompts = np.full(count, 20)
    until_s = float(arrivals_s[-1]) + 60.0
    more |= {"make_replica": make, "stop": lambda now_s, run: now_s > until_s}
    return Simulation(config, made, arrivals_s, prompts, lengths, **more)


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(["least_work", "least_requests"]),
    gaps_s=st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.3, 2.0]), min_size=2, max_size=48),
    slower=st.lists(st.floats(0.05, 20.0), min_size=2, max_size=4),
    report_every_s=st.sampled_from([0.0, 0.05, 1.0, 30.0]),
)
def test_no_replica_ever_has_two_equal_sequences_more_than_another(
    policy: str, gaps_s: list[float], slower: list[float], report_every_s: float
) -> None:
    made = simulation(policy, gaps_s, slower, report_every_s=report_every_s)
    held = np.zeros(len(slower), dtype=int)
    choose = made._placing.choose

    def count(*arguments: Any) -> tuple[int, int] | None:
        chosen = choose(*arguments)
        assert chosen is not None
        held[chosen[0]] += 1
        assert held.max() - held.min() <= 1
        return chosen

    made._placing.choose = count  # type: ignore[method-assign]
    made.run()
    assert held.sum() == len(gaps_s)


@dataclass
class Decision:
    """How far apart the replicas' forecast work was, as a share of the mean, and the orders."""

    at_s: float
    apart: float
    num_sequences: int
    num_orders: int


def decisions(outputs: list[int], slower: list[float]) -> list[Decision]:
    """Of a run under ARES that places by number; no order goes from less work to more."""
    points = weights(AresSettings(), load_only=False)
    found: list[Decision] = []

    def decided(now_s: float, cluster: ClusterForecast, *more: Any) -> None:
        *_, orders, placing = more
        if placing.overload is not None:  # balance is not what it is about then
            return
        work = relative_work(cluster, points)
        for order in orders:
            assert work[order.source] > work[order.destination]
        apart = max(work.values()) - min(work.values())
        found.append(Decision(now_s, apart, len(cluster.rows), len(orders)))

    gaps_s = [0.1] * len(outputs)
    simulation("oracle", gaps_s, slower, outputs=outputs, on_decision=decided).run()
    return found


@pytest.mark.parametrize("slower", [[1.0, 1.0], [1.0, 6.0]])
def test_unequal_work_is_evened_out_and_none_moves_to_the_fuller(slower: list[float]) -> None:
    """Every second one is long, so that placement puts all of these on one replica; and at random.

    From 10 s on all have come; while there are many, one more or less is little.
    """
    apart: list[float] = []
    for seed in range(4):
        outputs = np.random.default_rng(seed).integers(200, 3000, 48).tolist()
        made = decisions(outputs, slower)
        apart += [d.apart for d in made if d.at_s > 10.0 and d.num_sequences >= 20]
    assert np.median(apart) <= 0.1
    made = decisions([3000, 600] * 12, slower)
    assert max(d.apart for d in made if d.at_s < 3.0) > 1.0, "placement cannot know"
    assert min(d.apart for d in made if d.at_s < 12.0) <= 0.1
    assert sum(d.num_orders for d in made) >= 4
