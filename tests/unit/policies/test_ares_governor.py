"""The tick with its memory: who is left alone, what is believed, and the same decisions again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.simulation.loads import make_simulation, synthetic_load
from quadriga.config.loader import load_config
from quadriga.config.scheduling import SchedulerConfig
from quadriga.core.forecast import LengthOutcome, LengthPrediction
from quadriga.core.migration import MigrationOrder, MigrationReport
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import PlaceRequest
from quadriga.policies.ares.forecast import (
    MOVABLE,
    Promised,
    check_forecast,
    seconds_to_full,
    with_fixed,
    with_promised,
)
from quadriga.policies.ares.governor import ROUND_TRIP_S, Governor
from quadriga.policies.ares.orders import SETTLE_S
from quadriga.policies.ares.placement import AresPlacement
from quadriga.policies.ares.recording import RecordedTick, read_ticks, replay
from quadriga.policies.ares.replica_view import replica_view
from quadriga.policies.ares.settings import AresSettings, settings_under
from quadriga.sim.config import SimConfig
from quadriga.sim.profiles import find_profile
from quadriga.sim.recorder import Recorder
from tests.unit.policies.ares_twin import CLASS, GRID, Held, snapshot


def config(**ares: Any) -> SchedulerConfig:
    settings = {"mode": "ares", "bandwidth_bytes_per_s": 1e9} | ares
    return load_config({"scheduler": {"ares": settings}}).scheduler


def uneven(num_idle: int = 2) -> list[ReplicaSnapshot]:
    """A replica with much to do, and idle ones."""
    busy = [Held(f"s{i}", 4000.0 + i, 5000.0, 4000.0, 6000.0) for i in range(6)]
    idle = [snapshot(f"idle{i}", []) for i in range(num_idle)]
    return [replace(s, taken_unix_s=0.0) for s in [snapshot("busy", busy), *idle]]


def governor(**ares: Any) -> tuple[Governor, list[RecordedTick]]:
    ticks: list[RecordedTick] = []
    return Governor(config(**ares), ticks.append), ticks


def tick(made: Governor, snapshots: list[ReplicaSnapshot], now_s: float) -> list[MigrationOrder]:
    return made.tick(snapshots, now_s=now_s, now_unix_s=0.0)


def report(order: MigrationOrder, outcome: Any, **fields: Any) -> MigrationReport:
    return MigrationReport(order.sequence_id, outcome, **fields)


def test_replicas_of_an_order_take_part_in_no_other_until_they_reported_anew() -> None:
    made, _ = governor()
    snapshots = uneven(num_idle=1)
    (order,) = tick(made, snapshots, 0.0)
    assert (order.source, order.destination) == ("busy", "idle0")
    assert made.moves.under_way == [order]
    assert tick(made, snapshots, 1.0) == []
    made.ended(order, report(order, "moved"), now_s=2.0)
    assert tick(made, snapshots, 2.1) == [], "the snapshots may be older than the move"
    for name in ("busy", "idle0"):
        made.moves.reported(name, 2.2)
    assert tick(made, snapshots, 2.3) != []
    assert made.moves.outcomes == {"moved": 1}


def test_sequences_move_only_between_replicas_that_compute_alike() -> None:
    """A deterministic deployment whose nodes differ: the destination would refuse the KV."""
    snapshots = uneven(3)
    for one, numerics in zip(snapshots, "xyxx", strict=True):
        one.info = replace(one.info, numerics=numerics)
    made, _ = governor()
    assert [o.destination for o in tick(made, snapshots, 0.0)] == ["idle1"]
    shown = made.moves.recent[-1].explanation["destinations"]
    assert [d["name"] for d in shown] == ["idle1", "idle2"]
    assert not tick(governor()[0], snapshots[:2], 0.0)


def test_a_silent_replica_holds_nobody_up_for_ever() -> None:
    made, _ = governor()
    snapshots = uneven(num_idle=1)
    (order,) = tick(made, snapshots, 0.0)
    made.ended(order, report(order, "moved"), now_s=1.0)
    assert tick(made, snapshots, 1.0 + SETTLE_S / 2) == []
    assert tick(made, snapshots, 1.0 + SETTLE_S) != []


@pytest.mark.parametrize("outcome", ["refused", "failed", "unknown"])
def test_what_failed_is_left_alone_for_longer_each_time(outcome: str) -> None:
    made, _ = governor(backoff_s=4.0, max_concurrent_moves=1)
    snapshots = uneven(num_idle=1)
    now_s, rests = 0.0, []
    (order,) = tick(made, snapshots, now_s)
    for _ in range(3):
        made.ended(order, report(order, outcome), now_s=now_s)
        first_s = now_s
        while order.sequence_id in made.moves.fixed(now_s):
            now_s += 0.5
        rests.append(now_s - first_s)
        made.moves.ordered(order, 0.0)
    assert rests == [4.0, 8.0, 16.0]


@pytest.mark.parametrize("to_blame", ["destination", "source", ""])
def test_another_sequence_goes_when_one_was_refused(to_blame: str) -> None:
    """The replica to blame rests, and no other."""
    made, ticks = governor(backoff_s=4.0)
    snapshots = uneven(num_idle=2)
    (first,) = tick(made, snapshots, 0.0)
    at_fault = getattr(first, to_blame) if to_blame else ""
    made.ended(first, report(first, "refused", at_fault=at_fault), now_s=0.0)
    assert made.moves.busy(0.1) == ({at_fault} if at_fault else set())
    for second in tick(made, snapshots, 0.1):
        assert second.sequence_id != first.sequence_id
        assert (second.destination == first.destination) == (not to_blame)
    assert bool(made.moves.under_way) == (to_blame != "source")
    assert replay(ticks) == []


def test_no_more_orders_than_allowed() -> None:
    many = []
    for i in range(32):
        held = [Held(f"s{i}-{j}", 4000.0 + i + j, 5000.0, 4000.0, 6000.0) for j in range(6)]
        many += [
            replace(snapshot(f"{name}{i}", h), taken_unix_s=0.0)
            for name, h in (("busy", held), ("idle", []), ("rest", []))
        ]
    assert len(tick(governor()[0], many, 0.0)) == 3
    made, _ = governor(max_concurrent_moves=2)
    assert len(tick(made, many, 0.0)) == 2
    assert tick(made, many, 1.0) == []


def test_wrong_predictions_are_not_followed_until_they_hold_again() -> None:
    made, ticks = governor()
    wrong = LengthOutcome(LengthPrediction(100, 90, 110), 5000)
    right = LengthOutcome(LengthPrediction(100, 90, 110), 100)
    made.ended_lengths(CLASS.model, [wrong] * 200)
    assert made.is_distrusted(CLASS.model)
    orders = tick(made, uneven(), 0.0)
    assert ticks[-1].load_only
    assert {order.remaining_tokens for order in orders} == {0.0}
    assert "present load" in made.last.why[str(CLASS)]
    made.ended_lengths(CLASS.model, [right] * 200)
    assert not made.is_distrusted(CLASS.model)


def test_without_length_heads_the_present_load_decides() -> None:
    made, ticks = governor()
    blind = [
        replace(s, forecast=s.forecast and replace(s.forecast, has_predictions=False))
        for s in uneven()
    ]
    orders = tick(made, blind, 0.0)
    assert orders and {order.remaining_tokens for order in orders} == {0.0}
    assert replay(ticks) == []


def test_where_memory_is_promised_as_used_takers_keep_the_low_mark() -> None:
    """A taker of 10,000 tokens refuses what would fill it to more than 0.75."""
    crowded = [Held(f"s{i}", 4000.0 + i, 3900.0, 3900.0, 3900.0) for i in range(6)]
    near = [Held("n", 3000.0, 10.0, 10.0, 10.0)]
    snapshots = [snapshot("busy", crowded, capacity=10_000), snapshot("near", near, capacity=8_200)]
    snapshots = [replace(s, taken_unix_s=0.0) for s in snapshots]
    used = [replace(s, info=replace(s.info, reservation="used")) for s in snapshots]
    made, ticks = governor(memory_horizon_s=0.0, overload=False)
    assert tick(made, snapshots, 0.0) != []
    assert tick(governor(memory_horizon_s=0.0, overload=False)[0], used, 0.0) == []
    assert replay(ticks) == []
    length = LengthPrediction(10.0, 10.0, 10.0)
    new = PlaceRequest("s", used[1].info.depth_class, 3300, 3310, prediction=length)
    choose = AresPlacement(AresSettings(hold_share=1.0)).choose
    assert [choose(new, some) for some in (snapshots, used)] == ["near", None]


def test_forecasts_are_wanted_wherever_something_is_decided_by_them() -> None:
    def wanted(**scheduler: object) -> bool:
        config = load_config({"scheduler": scheduler}).scheduler
        return Governor(config, lambda tick: None).wants_forecasts

    assert wanted()
    assert wanted(ares={"mode": "off"}, placement="ares")
    assert wanted(ares={"mode": "load"}, placement="least_work")
    assert not wanted(ares={"mode": "off"}, placement="least_work")


def test_old_snapshots_take_no_part() -> None:
    made, _ = governor()
    assert made.tick(uneven(), now_s=0.0, now_unix_s=60.0) == []


def test_a_tick_of_idle_replicas_unpacks_no_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = governor()
    monkeypatch.setattr("quadriga.policies.ares.governor.unpack", None)
    monkeypatch.setattr("quadriga.policies.ares.rescheduler.unpack", None)
    assert tick(made, uneven(num_idle=3)[1:], 0.0) == []
    assert made.last.work == dict.fromkeys(("idle0", "idle1", "idle2"), 1.0)


def test_the_bandwidth_is_what_moves_have_shown() -> None:
    made, _ = governor(bandwidth_bytes_per_s="auto")
    before = made.bandwidth_bytes_per_s
    order = tick(made, uneven(), 0.0)[0]
    for now_s in range(50):
        moved = report(order, "moved", bytes_sent=1_000_000, took_s=1.01, sending_s=1.0)
        made.ended(order, moved, now_s=float(now_s))
    assert before != pytest.approx(1e6)
    assert made.bandwidth_bytes_per_s == pytest.approx(1e6, rel=0.01)


def test_what_a_move_takes_whatever_its_size_does_not_make_the_link_look_slow() -> None:
    made, _ = governor(bandwidth_bytes_per_s="auto")
    order = tick(made, uneven(), 0.0)[0]
    for i in range(100):
        moved = report(order, "moved", bytes_sent=200_000, took_s=0.0502, sending_s=2e-4)
        made.ended(order, moved, now_s=float(i))
    made.ended(order, replace(moved, took_s=9.0), now_s=100.0)
    costs = made.costs([])
    assert costs.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert costs.round_trip_s == pytest.approx(1.2 * 0.05), "one that waited is no measure"


def test_the_live_tick_decides_as_the_simulator_did(tmp_path: Path) -> None:
    """The scheduler's own code, given the snapshots of a simulated run, orders the same moves."""
    profile = replace(find_profile("rtx4090d-7b"), round_trip_s=ROUND_TRIP_S)
    sim = SimConfig(profile, num_decode=3, num_prefill=1, seed=3)
    file = tmp_path / "ticks.jsonl"
    recorder = Recorder(file, sim, "ares")
    load = synthetic_load("sharegpt", rate=0.17, duration_s=500.0, seed=3)
    make_simulation("ares", load, sim, on_decision=recorder.decided).run()
    recorder.close()
    compared = moved = 0
    for recorded in read_ticks(file):
        if recorded.busy or recorded.load_only:
            continue
        scheduler = config(bandwidth_bytes_per_s=recorded.costs.bandwidth_bytes_per_s)
        made = Governor(scheduler, lambda tick: None)
        as_used = settings_under(made.settings, sim.memory.reservation)
        assert as_used == recorded.settings, "the configuration's defaults are the policy's"
        costs = recorded.costs.bytes_per_token
        snapshots = [
            replace(s, forecast=s.forecast and replace(s.forecast, bytes_per_token=costs))
            for s in recorded.snapshots
        ]
        orders = made.tick(snapshots, now_s=recorded.at_s, now_unix_s=recorded.at_s)
        assert orders == recorded.orders[: made.moves.max_concurrent]
        compared, moved = compared + 1, moved + len(orders)
    assert compared > 100 and moved > 5


def test_sequences_on_their_way_are_added_once_and_cannot_move() -> None:
    before = snapshot("a", [Held("x", 100, 50, 50, 50)]).forecast
    assert before is not None
    before = replace(before, per_sequence_s=1e-5, per_token_s=1e-7)
    prediction = LengthPrediction(200, 100, 300)
    promised = [Promised("x", 100, prediction), Promised("new", 40, prediction)]
    after = with_promised(before, promised, 0.02)
    check_forecast(after)
    assert after.sequence_ids == ("x", "new")
    tokens = [np.frombuffer(f.tokens, dtype="<f4") for f in (before, after)]
    assert tokens[1][0] - tokens[0][0] == pytest.approx(40)
    assert with_promised(before, promised[:1], 0.02) is before
    rows = np.frombuffer(with_fixed(after, {"x"}).rows, dtype="<f4").reshape(2, -1)
    assert rows[:, MOVABLE].tolist() == [0.0, 0.0]
    assert with_fixed(after, {"unknown"}) is after


def test_the_time_until_memory_is_full_lies_between_two_points() -> None:
    forecast = snapshot("a", [Held("x", 1000, 1e6, 1e6, 1e6)]).forecast
    assert forecast is not None
    assert seconds_to_full(forecast, 900) == 0.0
    at_s = seconds_to_full(forecast, 1500)
    assert at_s == pytest.approx(500 * 0.02, rel=0.01)  # one token a step
    assert seconds_to_full(forecast, 10_000_000) == np.inf
    assert GRID[1] < at_s < GRID[-1]


def test_the_operators_view_is_plain() -> None:
    view = [replica_view(s, now_unix_s=1.0) for s in uneven()]
    assert json.loads(json.dumps(view)) == view
    assert view[0]["forecast"][0]["tokens"] > 24_000
    assert view[1]["seconds_to_full"] is None
