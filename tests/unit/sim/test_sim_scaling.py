"""The scaling policy over simulated bursts: it follows, it does not oscillate, nothing is lost."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from quadriga.config.scheduling import ScalingConfig
from quadriga.errors import ConfigError
from quadriga.policies.ares.settings import AresSettings
from quadriga.policies.scaling import AddReplicas, GiveUpReplica, RetireReplica
from quadriga.sim.cluster import Simulation
from quadriga.sim.config import Failure, SimConfig, SimScaling
from quadriga.sim.policies import make_policy
from quadriga.sim.profiles import RTX_4090D
from quadriga.sim.results import SimulatedRun
from quadriga.sim.scaling import Scaled

MOST = 6


def arrivals(rates: list[tuple[float, float]], seed: int = 1) -> NDArray[np.float64]:
    """Poisson arrivals, piecewise: (seconds, requests a second), one after the other."""
    rng = np.random.default_rng(seed)
    times: list[float] = []
    start_s = 0.0
    for length_s, rate in rates:
        count = rng.poisson(length_s * rate)
        times += sorted((start_s + length_s * rng.random(count)).tolist())
        start_s += length_s
    return np.array(times)


def scaled(
    rates: list[tuple[float, float]],
    *,
    policy: str = "current_load",
    start: int = 1,
    stuck: frozenset[int] = frozenset(),
    failures: tuple[Failure, ...] = (),
    **changes: Any,
) -> tuple[SimulatedRun, list[Scaled]]:
    """One replica holds about 160 of these requests, each of which lasts about 20 s."""
    at_s = arrivals(rates)
    rng = np.random.default_rng(2)
    inputs = rng.integers(20, 200, len(at_s))
    outputs = rng.integers(400, 1600, len(at_s))
    base: dict[str, Any] = {
        "max_replicas": MOST,
        "down_after_s": 120,
        "pending_timeout_s": 30,
        "horizon_s": 20,
    }
    config = SimConfig(
        RTX_4090D,
        num_decode=MOST,
        num_prefill=2,
        failures=failures,
        scaling=SimScaling(ScalingConfig(**(base | changes)), start, 10.0, stuck),
    )
    # Scaling answers a burst by itself; overload would refuse some of it.
    settings = AresSettings(overload=False)
    simulation = Simulation(config, make_policy(policy, settings), at_s, inputs, outputs)
    run = simulation.run()
    assert simulation.scaler is not None
    return run, simulation.scaler.log


def kinds(log: list[Scaled]) -> str:
    """`+` for each order to start, `-` for each to retire."""
    return "".join(
        "+" if isinstance(s.order, AddReplicas) else "-"
        for s in log
        if not isinstance(s.order, GiveUpReplica)
    )


def turns(log: list[Scaled]) -> int:
    """How often growing became shrinking, or shrinking growing."""
    text = kinds(log)
    return sum(a != b for a, b in pairwise(text))


@pytest.mark.parametrize("policy", ["current_load", "ares", "oracle"])
def test_a_burst_is_followed_up_and_down_once(policy: str) -> None:
    run, log = scaled([(60, 2.0), (60, 25.0), (360, 2.0)], policy=policy)
    assert run.failures == {}
    assert (run.produced > 0).all()
    added = [s.order.count for s in log if isinstance(s.order, AddReplicas)]
    assert 3 <= 1 + sum(added) <= MOST
    assert turns(log) == 1, kinds(log)
    retired = [s for s in log if isinstance(s.order, RetireReplica)]
    assert len(retired) == sum(added), "back to one replica"
    assert min(s.at_s for s in retired) > 120, "not during the burst"
    first = next(s for s in log if isinstance(s.order, AddReplicas))
    assert 58 < first.at_s < 90, "within half a minute of the burst"


@pytest.mark.parametrize(("rate", "allowed"), [(12.0, ("",)), (9.5, ("", "-", "-+"))])
def test_steady_load_does_not_swing(rate: float, allowed: tuple[str, ...]) -> None:
    """Also at 9.5 a second, where a need of .6 to 1.02 replicas is at the edge of one: a chance
    peak may bring a replica back, but it is not taken away again."""
    _, log = scaled([(900, rate)], start=2, down_after_s=200)
    late = [s for s in log if 60 < s.at_s < 895]
    assert kinds(late) in allowed, [(s.at_s, s.order) for s in late]


def test_bursts_closer_than_the_window_keep_their_replicas() -> None:
    """Every 40 s a burst: the second and all later ones find the replicas there."""
    _, log = scaled([(20, 25.0), (20, 1.0)] * 6)
    during = [s for s in log if 60 < s.at_s < 235]
    assert not any(isinstance(s.order, RetireReplica) for s in during)
    assert sum(isinstance(s.order, AddReplicas) for s in during) <= 2


def test_bursts_far_apart_turn_twice_each() -> None:
    """The second valley is waited out for longer: growing followed too soon upon shrinking."""
    rates = [(40, 25.0), (150, 1.0), (40, 25.0), (500, 1.0)]
    run, log = scaled(rates, down_after_s=60)
    assert run.failures == {}
    assert turns(log) == 3, kinds(log)
    falls = [s.at_s for s in log if isinstance(s.order, RetireReplica)]
    assert min(falls) < 140
    assert min(t for t in falls if t > 190) > 230 + 120


def test_without_the_window_it_would_oscillate() -> None:
    """The tests above can fail: with neither window nor margin, valleys retire replicas."""
    _, log = scaled([(20, 25.0), (20, 1.0)] * 6, down_after_s=1, down_margin=0.0)
    assert turns(log) > 3


def test_replicas_that_never_start_do_not_freeze_the_loop() -> None:
    run, log = scaled([(20, 2.0), (120, 25.0)], stuck=frozenset({1, 2}))
    assert run.failures == {}
    given_up = {s.order.replica for s in log if isinstance(s.order, GiveUpReplica)}
    assert {"decode-0001", "decode-0002"} <= given_up
    assert max(s.serving for s in log) >= 3


def test_a_death_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    unasked = AssertionError("it comes back unasked")
    monkeypatch.setattr(Simulation, "_recover", Mock(side_effect=unasked))
    run, log = scaled([(120, 16.0)], start=3, failures=(Failure(60.0, 0, 20.0),), min_replicas=3)
    assert run.failures == {}
    assert any(isinstance(s.order, AddReplicas) and 60 <= s.at_s <= 63 for s in log)


def test_retiring_moves_what_runs_and_fails_nothing() -> None:
    run, log = scaled([(60, 20.0), (120, 3.0)], policy="ares", start=4, down_after_s=20)
    assert run.failures == {}
    assert any(isinstance(s.order, RetireReplica) for s in log)
    assert any(m.cause == "drain" for m in run.migrations)
    assert run.rebuilt.sum() == 0, "moved, not computed again"


def test_start_replicas_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"start_replicas: 7 must lie in 1\.\.6"):
        scaled([(1, 1.0)], start=7)
