"""Decode replicas of different depths in the simulator: moves between them, and strict requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quadriga.config.scheduling import ScalingConfig
from quadriga.core.migration import MigrationOrder
from quadriga.errors import ConfigError
from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.overload import OverloadPlan
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import SimConfig, SimExits, SimScaling
from quadriga.sim.policies import make_policy
from quadriga.sim.prediction import OraclePredictor
from quadriga.sim.records import PAUSE
from quadriga.sim.results import SimulatedRun
from tests.unit.sim.test_simulator import SETTINGS, SMALL, load

DEEP, SHALLOW = 8, 4


def simulate(
    depths: tuple[int, ...], strict_share: float, *, seed: int = 2, rate: float = 6.0
) -> tuple[SimulatedRun, list[tuple[ClusterForecast, list[MigrationOrder]]], Simulation]:
    requests = load(seed, 150, rate)
    seen: list[tuple[ClusterForecast, list[MigrationOrder]]] = []
    simulation = Simulation(
        SimConfig(SMALL, len(depths), 1, depths=depths, strict_share=strict_share),
        make_policy("ares", SETTINGS),
        *requests,
        predictor=OraclePredictor(),
        on_decision=lambda now, cluster, costs, busy, only, orders, *_: seen.append(
            (cluster, orders)
        ),
    )
    return simulation.run(), seen, simulation


def test_memory_is_relieved_across_depths() -> None:
    """One replica of each depth: without moves between them there would be none at all."""
    run, seen, _ = simulate((DEEP, SHALLOW), 0.0)
    assert np.isfinite(run.finished_s).all()
    orders = [order for _, some in seen for order in some]
    assert orders and run.migrations
    assert {order.depth_class.depth for order in orders} <= {DEEP, SHALLOW}


@pytest.mark.parametrize("seed", range(4))
def test_strict_requests_stay_where_all_layers_are(seed: int) -> None:
    run, _, simulation = simulate((DEEP, DEEP, SHALLOW), 0.5, seed=seed, rate=8.0)
    strict = simulation._board.is_strict
    assert 0 < strict.sum() < len(strict)
    moved_down = [m for m in run.migrations if m.destination == 2]
    assert not [m for m in moved_down if strict[m.request]]
    assert all(m.source == 2 or m.destination != m.source for m in run.migrations)


def test_a_shallow_replica_steps_faster() -> None:
    config = SimConfig(SMALL, 2, 1, depths=(DEEP, SHALLOW))
    deep, shallow = (config.profile_of(i).step.step_s(3, 500) for i in range(2))
    assert shallow == pytest.approx(deep / 2)
    assert config.profile_of(0).step.step_s(3, 500) == SMALL.step.step_s(3, 500)


def test_equal_depths_are_one_class() -> None:
    """Whatever their number: every decision is the one without depths."""
    same = simulate((DEEP, DEEP, DEEP), 0.0)[0]
    requests = load(2, 150, 6.0)
    plain = Simulation(
        SimConfig(SMALL, 3, 1),
        make_policy("ares", SETTINGS),
        *requests,
        predictor=OraclePredictor(),
    ).run()
    assert same.finished_s.tolist() == plain.finished_s.tolist()


@pytest.mark.parametrize(
    "options", [{"depths": (DEEP, SHALLOW)}, {"exits": SimExits(0.25, stays=0.02, spread=1e-4)}]
)
def test_what_was_just_placed_weighs_in_the_forecast_what_the_next_one_says(
    options: dict[str, Any],
) -> None:
    """Few go on: what each adds by making steps go deep falls with their number."""
    requests = (np.arange(4.0), np.full(4, 50), np.full(4, 500))
    simulation = Simulation(SimConfig(SMALL, 2, 1, **options), make_policy("oracle"), *requests)
    board, placing = simulation._board, simulation._placing

    def seen() -> ClusterForecast:
        return board.forecast(0.0, placing.grid_s, SMALL.kv_capacity_tokens, placing.predictor)

    for index in range(2):
        assert simulation._place(0.0, index)
    placing.forecast = seen()
    for index in range(2, 4):
        assert simulation._place(0.0, index)
    np.testing.assert_allclose(placing.forecast.load_s, seen().load_s, rtol=0.02)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"depths: .* each of 3"):
        SimConfig(SMALL, 3, 1, depths=(8, 4))
    with pytest.raises(ConfigError, match="strict_share"):
        SimConfig(SMALL, 1, 1, strict_share=1.5)
    with pytest.raises(ConfigError, match="not with scaling"):
        SimConfig(SMALL, 1, 1, depths=(8,), scaling=SimScaling(ScalingConfig()))


def test_an_overload_is_planned_at_several_depths_and_nobody_is_forgotten() -> None:
    requests = load(2, 250, 40.0)
    plans: list[OverloadPlan | None] = []
    depths = (DEEP, DEEP, SHALLOW, SHALLOW)
    run = Simulation(
        SimConfig(SMALL, 4, 1, depths=depths, strict_share=0.3, memory=PAUSE),
        make_policy("ares", SETTINGS),
        *requests,
        predictor=OraclePredictor(),
        on_decision=lambda *seen: plans.append(seen[-1].overload),
    ).run()
    made = [plan for plan in plans if plan is not None]
    assert made
    for plan in made:
        at = sorted(int(name.removeprefix("decode-")) // 2 for name in plan.protected)
        assert at == [0, 1], "one of each depth"
    assert set(run.failures.values()) <= {"overloaded"}
    assert np.isfinite(run.finished_s).sum() + len(run.failures) == 250
