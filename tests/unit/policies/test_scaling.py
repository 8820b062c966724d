"""How many replicas a class wants, and what is never done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.config.loader import load_config
from quadriga.config.scheduling import ScalingConfig
from quadriga.core.forecast import LoadForecast
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.errors import ConfigError
from quadriga.policies.ares.forecast import RUNS, StepCosts, forecast_rows, pack
from quadriga.policies.ares.settings import horizon_s
from quadriga.policies.scaling import AddReplicas, GiveUpReplica, RetireReplica, ScalingPolicy
from quadriga.policies.scaling_need import ClassLoad, Need, count_need, remaining_work

CLASS = DepthClass("m", 4)
STEP_S = 0.01
GRID = horizon_s(STEP_S)


def forecast(
    tokens: list[int],
    remaining: list[int],
    *,
    predicted: bool = True,
    share: list[float] | float = 1.0,
) -> LoadForecast:
    n = len(tokens)
    rows = forecast_rows(
        tokens=tokens,
        remaining=remaining,
        lower=np.zeros(n),
        upper=remaining,
        moves=np.zeros(n),
        since_move_s=np.full(n, np.inf),
        movable=np.full(n, RUNS),
        share=share,
    )
    ids = [f"s{i}" for i in range(n)]
    return pack(
        rows,
        ids,
        grid_s=GRID,
        step_s=STEP_S,
        base_s=STEP_S,
        costs=StepCosts(1e-3, 0.0),
        has_predictions=predicted,
    )


def replica(
    name: str, tokens: list[int], remaining: list[int] | None = None, **changes: Any
) -> ReplicaSnapshot:
    info = ReplicaInfo(name, Role.DECODE, CLASS, "n", "i", num_slots=10, kv_capacity_tokens=1000)
    said = forecast(tokens, remaining or [0] * len(tokens))
    values: dict[str, Any] = {
        "num_running": len(tokens),
        "used_tokens": sum(tokens),
        "forecast": said,
    }
    return ReplicaSnapshot(info=info, taken_unix_s=0.0, **(values | changes))


def configured(**changes: Any) -> ScalingConfig:
    base: dict[str, Any] = {
        "utilisation": 0.5,
        "down_after_s": 60,
        "max_replicas": 8,
        "down_margin": 0.0,
    }
    return ScalingConfig(**(base | changes))


def policy(**changes: Any) -> ScalingPolicy:
    return ScalingPolicy(configured(**changes))


def needed(load: ClassLoad, now_s: float = 0.0, **changes: Any) -> Need:
    return count_need(load, configured(**changes), now_s=now_s)


def settled(made: ScalingPolicy, load: ClassLoad, until_s: float = 61.0) -> list[Any]:
    made.decide([load], now_s=0.0)
    return made.decide([load], now_s=until_s)


# Need


def test_need_by_memory_and_slots() -> None:
    need = needed(ClassLoad(CLASS, [replica("a", [300, 400])]))
    assert (need.memory, need.slots, need.step) == pytest.approx((1.4, 0.4, 0.0))
    assert need.greatest == need.memory
    need = needed(ClassLoad(CLASS, [replica("a", [1] * 8)]))
    assert need.slots == pytest.approx(1.6)


def test_need_looks_ahead_as_far_as_the_horizon() -> None:
    """100 tokens now; 600 in 5 s; after the horizon it does not matter."""
    growing = ClassLoad(CLASS, [replica("a", [100], [500])])
    assert needed(growing, 0, horizon_s=0.1).memory == pytest.approx(0.2)
    assert needed(growing, 0, horizon_s=30).memory == pytest.approx(1.2, rel=0.05)
    unsure = replica("a", [100], forecast=forecast([100], [500], predicted=False))
    assert needed(ClassLoad(CLASS, [unsure]), 0).memory == pytest.approx(0.2)


def test_those_who_wait_count_and_will_grow() -> None:
    load = ClassLoad(CLASS, [replica("a", [100], [100])], waiting=3, waiting_tokens=300)
    need = needed(load, 0)
    assert need.slots == pytest.approx(4 / 5)
    assert need.memory == pytest.approx((200 + 600) / 500, rel=0.05)


def test_need_by_time_per_token() -> None:
    """Base 10 ms, 1 ms a sequence, 8 of them; 28 ms allowed at 50 %: 4 ms of room, 2 replicas."""
    load = ClassLoad(CLASS, [replica("a", [1] * 8)])
    assert needed(load, 0, tpot_s=0.028).step == pytest.approx(2.0, rel=1e-5)
    assert needed(load, 0, tpot_s=0.015).step == 0.0, "not even an empty step does"


def test_cold_replicas_times_are_not_believed() -> None:
    cold = replica("b", [1] * 2)
    assert cold.forecast is not None
    load_s = np.full(17, 5.0, dtype="<f4").tobytes()
    cold.forecast = replace(cold.forecast, load_s=load_s, base_s=3.0)
    load = ClassLoad(CLASS, [replica("a", [1] * 6), cold], ready_s={"b": 95.0})
    need = needed(load, 100, tpot_s=0.028, cold_start_s=15)
    assert need.step == pytest.approx(8e-3 / 4e-3, rel=1e-5), "its two weigh what the others do"
    need = needed(load, 110, tpot_s=0.028, cold_start_s=15)
    assert need.step == 0.0, "believed now: no replica would be fast enough"


# Decisions


def test_growth_is_at_once_and_says_why() -> None:
    (order,) = policy().decide([ClassLoad(CLASS, [replica("a", [900])])], now_s=0)
    assert isinstance(order, AddReplicas) and order.count == 1
    assert order.reason == ("2 replicas wanted (memory 1.80, slots 0.20), 1 serve, 0 start")


def test_bounds() -> None:
    busy = ClassLoad(CLASS, [replica("a", [900] * 9)])
    (order,) = policy(max_replicas=3).decide([busy], now_s=0)
    assert isinstance(order, AddReplicas) and order.count == 2
    empty = ClassLoad(CLASS, [])
    (order,) = policy(min_replicas=2).decide([empty], now_s=0)
    assert isinstance(order, AddReplicas) and order.count == 2
    idle = ClassLoad(CLASS, [replica("a", []), replica("b", [])])
    assert settled(policy(min_replicas=2), idle) == []
    (order,) = settled(policy(min_replicas=2), ClassLoad(CLASS, idle.snapshots, serves=False))
    assert isinstance(order, RetireReplica), "a class that is given up goes to nothing"


def test_what_starts_counts_until_it_is_overdue() -> None:
    made = policy(pending_timeout_s=100)
    load = ClassLoad(CLASS, [replica("a", [900])], pending_s={"b": 0.0})
    assert made.decide([load], now_s=50) == []
    give_up, add = made.decide([load], now_s=100)
    assert isinstance(give_up, GiveUpReplica) and give_up.replica == "b"
    assert isinstance(add, AddReplicas) and add.count == 1


def test_a_stuck_class_holds_up_no_other() -> None:
    other = DepthClass("m", 8)
    stuck = ClassLoad(CLASS, [replica("a", [900])], pending_s={"b": 0.0})
    busy = ClassLoad(other, [replica("c", [900])])
    (order,) = policy().decide([stuck, busy], now_s=1)
    assert order.depth_class == other


def test_shrinking_waits_and_takes_the_least_work_left() -> None:
    load = ClassLoad(
        CLASS, [replica("a", [10], [40]), replica("b", [60], [5]), replica("c", [20], [30])]
    )
    made = policy(min_replicas=2)
    for now_s in range(60):
        assert made.decide([load], now_s=now_s) == []
    (order,) = made.decide([load], now_s=60)
    assert isinstance(order, RetireReplica) and order.replica == "b"
    assert "5 tokens" in order.reason
    load.snapshots[1].draining = True
    assert made.decide([load], now_s=61) == [], "two are left, as wanted"
    assert settled(policy(), load) == [], "one drains already"


def test_a_peak_of_late_forbids_shrinking() -> None:
    made = policy()
    calm = ClassLoad(CLASS, [replica("a", [10]), replica("b", [10])])
    peak = ClassLoad(CLASS, [replica("a", [450]), replica("b", [450])])
    made.decide([calm], now_s=0)
    made.decide([peak], now_s=50)
    for now_s in (70, 100, 110):
        assert made.decide([calm], now_s=now_s) == []
    (order,) = made.decide([calm], now_s=111)
    assert isinstance(order, RetireReplica)


def test_a_load_at_the_edge_does_not_swing() -> None:
    edge = ClassLoad(CLASS, [replica("a", [210]), replica("b", [210])])  # fills .84 of one
    assert settled(policy(down_margin=0.2), edge) == []
    calm = ClassLoad(CLASS, [replica("a", [195]), replica("b", [195])])  # .78
    assert len(settled(policy(down_margin=0.2), calm)) == 1


def test_shrinking_too_soon_makes_patient() -> None:
    """Calm for as long as the window, then busy again: each time it waits twice as long."""
    made = policy()
    calm, busy = [10], [450]
    now_s, waits = 0.0, []
    for _ in range(5):
        started_s = now_s
        while not made.decide(
            [ClassLoad(CLASS, [replica("a", calm), replica("b", calm)])], now_s=now_s
        ):
            now_s += 10
        waits.append(now_s - started_s)
        now_s += 10
        (order,) = made.decide([ClassLoad(CLASS, [replica("a", busy + busy)])], now_s=now_s)
        assert isinstance(order, AddReplicas)
        now_s += 10
    assert waits == sorted(waits)
    assert [round(w / 60) for w in waits] == [1, 2, 4, 8, 8]


def test_one_mistake_counts_once_however_many_replicas_come_of_it() -> None:
    made, now_s = policy(), 70.0
    calm = ClassLoad(CLASS, [replica("a", [10]), replica("b", [10])])
    assert settled(made, calm)
    for count in (1, 2, 3):  # the load climbs, and a replica comes each time
        load = ClassLoad(CLASS, [replica(f"r{i}", [450, 450]) for i in range(count)])
        (order,) = made.decide([replace(load, waiting_tokens=100)], now_s=now_s)
        assert isinstance(order, AddReplicas)
        now_s += 1.0
    began_s = now_s
    while not made.decide([calm], now_s=now_s):
        now_s += 10.0
    assert round((now_s - began_s) / 60) == 2


def test_a_class_of_more_replicas_than_allowed_shrinks() -> None:
    load = ClassLoad(CLASS, [replica(f"r{i}", [450 + i]) for i in range(4)])
    (order,) = policy(max_replicas=3).decide([load], now_s=0)
    assert isinstance(order, RetireReplica) and order.replica == "r0"


def test_what_has_not_started_is_given_up_first() -> None:
    load = ClassLoad(CLASS, [replica("a", [10])], pending_s={"b": 60.0, "c": 70.0})
    (order,) = settled(policy(pending_timeout_s=1000), load, until_s=80)
    assert isinstance(order, GiveUpReplica) and order.replica == "c"


def test_a_replica_that_is_not_heard_of_holds_up_no_other() -> None:
    """It has a process, and cannot be given up; one that serves goes only where enough do."""
    silent, two = {"s": 0.0}, [replica("a", [10]), replica("b", [10])]
    (order,) = settled(policy(), ClassLoad(CLASS, two[:1], silent, {"s": 61.0, "empty": 0.0}))
    assert isinstance(order, GiveUpReplica) and order.replica == "empty"
    assert settled(policy(), ClassLoad(CLASS, two[:1], silent, {"s": 61.0})) == []
    (order,) = settled(policy(), ClassLoad(CLASS, two, silent, {"s": 61.0}))
    assert isinstance(order, RetireReplica)


def test_nobody_retires_whose_work_fits_nowhere() -> None:
    """Few tokens ahead, but memory is full of what is there now."""
    full = ClassLoad(
        CLASS, [replica("a", [5], used_tokens=900), replica("b", [5], used_tokens=900)]
    )
    assert settled(policy(), full) == []


def test_remaining_work() -> None:
    assert remaining_work(replica("a", [10, 20], [3, 4])) == pytest.approx(7)
    unsure = replica("a", [10, 20], forecast=forecast([10, 20], [3, 4], predicted=False))
    assert remaining_work(unsure) == pytest.approx(30)
    assert remaining_work(replica("a", [10], forecast=None)) == 10
    shallow = replica("a", [10, 20], forecast=forecast([10, 20], [3, 4], share=[0.5, 0.25]))
    assert remaining_work(shallow) == pytest.approx(2.5), "tokens times the layers they run"


@settings(max_examples=200)
@given(
    sizes=st.lists(st.lists(st.integers(1, 900), max_size=10), min_size=1, max_size=6),
    waiting=st.integers(0, 50),
    pending=st.integers(0, 3),
    bounds=st.tuples(st.integers(1, 4), st.integers(0, 6)),
)
def test_orders_stay_in_bounds_and_one_state_never_calls_for_both(
    sizes: list[list[int]], waiting: int, pending: int, bounds: tuple[int, int]
) -> None:
    """Adding what was ordered, nothing more is; and nothing is taken away again."""
    least, most = bounds[0], bounds[0] + bounds[1]
    made = policy(min_replicas=least, max_replicas=most)
    snapshots = [replica(f"r{i}", tokens) for i, tokens in enumerate(sizes)]
    coming = {f"p{i}": 0.0 for i in range(pending)}
    load = ClassLoad(CLASS, snapshots, pending_s=coming, waiting=waiting, waiting_tokens=waiting)
    orders = settled(made, load)
    have = len(snapshots) + pending
    added = sum(o.count for o in orders if isinstance(o, AddReplicas))
    taken = sum(not isinstance(o, AddReplicas) for o in orders)
    assert not (added and taken)
    assert taken <= 1
    if added:
        assert least <= have + added <= most
        more = coming | {f"n{i}": 0.0 for i in range(added)}
        again = ClassLoad(CLASS, snapshots, pending_s=more, waiting=waiting, waiting_tokens=waiting)
        assert made.decide([again], now_s=61.5) == []
    if taken:
        assert have - taken >= least


def test_the_configuration_is_strict() -> None:
    loaded = load_config({"helios": {"slo": "energy", "scaling": {"max_replicas": 9}}}).helios
    assert (loaded.slo, loaded.scaling.max_replicas, loaded.enabled) == ("energy", 9, False)
    for bad in (
        {"slo": "speed"},
        {"breach_share": 1.0},
        {"scaling": {"min_replicas": 5}},
        {"scaling": {"utilisation": 0}},
        {"modles": []},
        {"scaling": {"enabled": True}},
    ):
        with pytest.raises(ConfigError, match="helios"):
            load_config({"helios": bad})
    off = load_config({"helios": {"enabled": False, "scaling": {"enabled": True}}})
    assert load_config(off.model_dump()) == off
