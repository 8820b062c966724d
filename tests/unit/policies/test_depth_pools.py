"""Replicas for shallow and for deep sequences: who is placed where, and what operators see."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from unittest.mock import Mock

import numpy as np
import pytest

from quadriga.config.scheduling import SchedulerConfig
from quadriga.core.forecast import LengthPrediction
from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import PlaceRequest
from quadriga.errors import ConfigError
from quadriga.policies.ares.cluster import ClusterForecast
from quadriga.policies.ares.depth_pools import (
    MIN_ROWS,
    PLAN_EVERY_S,
    DepthPools,
    StepModel,
    crossings,
    is_due,
    plan_pools,
)
from quadriga.policies.ares.forecast import MOST_TOKENS, check_forecast
from quadriga.policies.ares.governor import Governor
from quadriga.policies.ares.placement import best_replica
from quadriga.policies.ares.recording import RecordedTick, parse_ticks, replay, write_tick
from quadriga.policies.ares.settings import AresSettings, horizon_s
from tests.unit.policies.ares_twin import CLASS, Held, snapshot, unpacked

SETTINGS = AresSettings()
FRONT = 0.25


def rows(name: str, shares: list[float]) -> list[Held]:
    return [Held(f"{name}{i}", 400, 600, 500, 700, share=s) for i, s in enumerate(shares)]


def mixed() -> list[list[Held]]:
    """Two replicas, each with sequences that never go deep and others that always do."""
    return [rows(name, [FRONT + 0.001] * 6 + [1.0] * 6) for name in "ab"]


def cluster_of(*held: list[Held], front_share: float = FRONT) -> ClusterForecast:
    return unpacked(
        [snapshot(n, h, front_share=front_share) for n, h in zip("ab", held, strict=True)]
    )


def planned(cluster: ClusterForecast, last: DepthPools | None, at_s: float) -> DepthPools:
    found = plan_pools(cluster, SETTINGS, last, at_s)
    assert found is not None
    return found


def pools(*shallow: str) -> DepthPools:
    return DepthPools(frozenset(shallow), 0.6, 0.1, 1.0, 0.9, 0.0, frozenset("ab"))


@pytest.mark.parametrize(("leaves_early", "chosen"), [(True, 0), (False, 1)])
def test_a_newcomer_goes_to_its_own_side_even_if_the_other_has_less_to_do(
    leaves_early: bool, chosen: int
) -> None:
    held = [rows("a", [0.5] * 4), rows("b", [0.5] * 4)]
    held[chosen] += rows("c", [0.5])
    cluster, said = cluster_of(*held), LengthPrediction(100, 100, 100)
    asked = PlaceRequest("new", CLASS, 50, 51, prediction=said, leaves_early=leaves_early)
    able = np.array([True, True])
    assert best_replica(cluster, asked, said, able, SETTINGS, pools("a")) == chosen
    assert best_replica(cluster, asked, said, able, SETTINGS, pools()) == 1 - chosen
    full = np.array([i != chosen for i in range(2)])
    assert best_replica(cluster, asked, said, full, SETTINGS, pools("a")) == 1 - chosen


def test_a_side_with_far_more_work_than_the_mean_is_not_preferred() -> None:
    cluster, said = (
        cluster_of(rows("a", [1.0] * 14), rows("b", [1.0])),
        LengthPrediction(90, 90, 90),
    )
    asked = PlaceRequest("new", CLASS, 50, 51, prediction=said)
    assert best_replica(cluster, asked, said, np.array([True, True]), SETTINGS, pools("a")) == 1


def governor(**ares: object) -> tuple[Governor, list[RecordedTick]]:
    ticks: list[RecordedTick] = []
    config = SchedulerConfig()
    config = config.model_copy(update={"ares": config.ares.model_copy(update=ares)})
    return Governor(config, ticks.append), ticks


def look_twice(governed: Governor, snapshots: list[ReplicaSnapshot]) -> list[MigrationOrder]:
    """The tick that finds a split, and the one of a minute later, at which it may be made."""
    governed.tick(snapshots, now_s=10.0, now_unix_s=1.0)
    assert not any(found.is_on for found in governed.pools.values())
    later = [replace(s, taken_unix_s=1.0 + PLAN_EVERY_S) for s in snapshots]
    return governed.tick(later, now_s=10.0 + PLAN_EVERY_S, now_unix_s=1.0 + PLAN_EVERY_S)


def test_mixed_replicas_are_split_sequences_cross_and_the_decision_can_be_replayed() -> None:
    governed, ticks = governor()
    snapshots = [snapshot(n, h, front_share=FRONT) for n, h in zip("ab", mixed(), strict=True)]
    orders = look_twice(governed, snapshots)
    decided = governed.pools[CLASS]
    assert len(decided.shallow) == 1
    assert decided.gain > 0.03
    assert [o.cause for o in orders] == [MigrationCause.DEPTH]
    assert "depths apart: 1 of 2 replicas" in governed.last.why[str(CLASS)]
    explanation = governed.moves.recent[-1].explanation
    assert explanation["pools"]["cut"] == decided.cut
    assert "of the layers" in explanation["text"]
    stream = StringIO()
    write_tick(stream, ticks[-1])
    (read,) = parse_ticks(stream.getvalue().splitlines(), "here")
    assert read.pools == ticks[-1].pools
    assert replay([read]) == []


def test_a_sequence_crosses_only_to_rows_as_long_as_it_may_become() -> None:
    cluster = cluster_of(*mixed())
    every = np.arange(len(cluster.rows))
    assert crossings(cluster, pools("a"), SETTINGS, every)
    cluster.rows = cluster.rows.copy()
    cluster.rows[:, MOST_TOKENS], cluster.longest[:] = 1000, 999
    assert crossings(cluster, pools("a"), SETTINGS, every) == []


def test_replicas_are_not_split_where_that_is_off_or_no_exit_is_in_use() -> None:
    snapshots = [snapshot(n, h, front_share=FRONT) for n, h in zip("ab", mixed(), strict=True)]
    for ares in ({"depth_pools": False}, {"mode": "load"}, {"mode": "off"}):
        governed, _ = governor(**ares)
        governed.tick(snapshots, now_s=10.0, now_unix_s=1.0)
        assert not governed.pools
    governed, _ = governor()
    without = [snapshot(n, h) for n, h in zip("ab", mixed(), strict=True)]
    governed.tick(without, now_s=10.0, now_unix_s=1.0)
    assert not governed.pools


def test_alike_sequences_stay_mixed_and_the_figure_says_why() -> None:
    governed, _ = governor()
    alike = [snapshot(n, rows(n, [1.0] * 8), front_share=FRONT) for n in "ab"]
    governed.tick(alike, now_s=10.0, now_unix_s=1.0)
    assert not governed.pools[CLASS].is_on
    assert "depths mixed" in governed.pools[CLASS].described()


def test_a_plan_lasts_a_minute_or_until_replicas_come_or_go() -> None:
    last = pools("a")
    assert not is_due(last, ["a", "b"], PLAN_EVERY_S - 1)
    assert is_due(last, ["a", "b"], PLAN_EVERY_S)
    assert is_due(last, ["a"], 1.0)
    assert is_due(None, ["a", "b"], 0.0)


def test_a_replica_that_cannot_be_compared_does_not_make_every_tick_plan_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    governed, _ = governor()
    snapshots = [snapshot(n, h, front_share=FRONT) for n, h in zip("ab", mixed(), strict=True)]
    other = snapshot("c", rows("c", [1.0] * 4), front_share=FRONT)
    assert other.forecast is not None
    other = replace(other, forecast=replace(other.forecast, grid_s=horizon_s(0.05)))
    plan, model = Mock(side_effect=plan_pools), Mock(side_effect=StepModel.token_s)
    monkeypatch.setattr("quadriga.policies.ares.governor.plan_pools", plan)
    monkeypatch.setattr(StepModel, "token_s", lambda *args: model(*args))
    for now_s in (10.0, 11.0):
        governed.tick([*snapshots, other], now_s=now_s, now_unix_s=1.0)
    assert governed.pools[CLASS].members == {"a", "b"}
    assert plan.call_count == 1
    assert model.call_count == 2, "without a split, and all splits together"


def test_a_lull_does_not_make_the_plan_before_it_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    governed, _ = governor()
    busy = [snapshot(n, h, front_share=FRONT) for n, h in zip("ab", mixed(), strict=True)]
    idle = [snapshot(n, [], front_share=FRONT) for n in "ab"]
    governed.tick(busy, now_s=10.0, now_unix_s=1.0)
    before = governed.pools[CLASS]
    plan = Mock(side_effect=plan_pools)
    monkeypatch.setattr("quadriga.policies.ares.governor.plan_pools", plan)
    for tick, snapshots in enumerate((idle, busy), 1):
        at_s = tick * PLAN_EVERY_S
        fresh = [replace(s, taken_unix_s=1.0 + at_s) for s in snapshots]
        governed.tick(fresh, now_s=10.0 + at_s, now_unix_s=1.0 + at_s)
        assert bool(governed.pools) is bool(snapshots[0].num_running)
        assert plan.call_args.args[2] is before


def test_a_forecast_with_an_impossible_share_before_the_first_exit_is_refused() -> None:
    wrong = snapshot("a", rows("a", [1.0])).forecast
    assert wrong is not None
    with pytest.raises(ConfigError, match="front_share"):
        check_forecast(replace(wrong, front_share=0.0))


def test_replicas_are_not_split_while_memory_is_short() -> None:
    governed, _ = governor()
    short = [
        snapshot(n, h, front_share=FRONT, capacity=16_000)
        for n, h in zip("ab", mixed(), strict=True)
    ]
    look_twice(governed, short)
    decided = governed.pools[CLASS]
    assert decided.gain > 0.03
    assert not decided.is_on


def test_a_split_is_neither_made_nor_kept_that_the_next_sequences_do_not_need() -> None:
    unlike = cluster_of(*mixed())
    alike = cluster_of(*[rows(name, [FRONT + 0.001] * 6) for name in "ab"])
    found = planned(unlike, None, 0.0)
    assert found.gain > 0.03
    assert not found.is_on, "for any few sequences some cut looks good"
    never_made = planned(alike, found, 60.0)
    assert not never_made.is_on
    assert never_made.gain < 0.0
    made = planned(unlike, found, 60.0)
    assert made.is_on
    assert not planned(alike, made, 120.0).is_on


def test_a_split_keeps_its_share_of_the_replicas_as_one_comes() -> None:
    found = planned(cluster_of(*mixed()), None, 0.0)
    more = unpacked(
        [snapshot(n, h, front_share=FRONT) for n, h in zip("abcd", mixed() * 2, strict=True)]
    )
    assert (found.found[0], len(planned(more, found, 1.0).shallow)) == (1, 2)


def test_few_sequences_are_not_split() -> None:
    few = [rows(name, [FRONT + 0.001, 1.0] * (MIN_ROWS // 2)) for name in "ab"]
    assert plan_pools(cluster_of(*few), SETTINGS, None, 0.0) is not None
    assert plan_pools(cluster_of(few[0], few[1][:-1]), SETTINGS, None, 0.0) is None


@pytest.mark.parametrize("leaves_early", [True, False])
def test_an_idle_side_takes_newcomers_of_the_other_kind_and_keeps_what_it_has(
    leaves_early: bool,
) -> None:
    share = FRONT if leaves_early else 1.0
    held = [rows("a", [share] * 6), rows("b", [share])]
    if not leaves_early:
        held.reverse()
    cluster, said = cluster_of(*held), LengthPrediction(100, 100, 100)
    asked = PlaceRequest("new", CLASS, 50, 51, prediction=said, leaves_early=leaves_early)
    able, apart = np.array([True, True]), pools("a")
    idle = 1 if leaves_early else 0
    assert best_replica(cluster, asked, said, able, SETTINGS, apart) == idle
    stays = np.flatnonzero(cluster.owner == idle)
    assert crossings(cluster, apart, SETTINGS, stays) == []
