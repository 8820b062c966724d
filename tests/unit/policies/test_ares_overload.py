"""Overload: who is protected, what is short, who waits and who leaves; against plain loops."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest

from quadriga.config.loader import load_config
from quadriga.core.forecast import LengthPrediction
from quadriga.core.replica import ReplicaSnapshot, Role
from quadriga.core.routing import PlaceRequest
from quadriga.policies.ares.cluster import ClusterForecast, unpack
from quadriga.policies.ares.forecast import FIXED
from quadriga.policies.ares.governor import Governor
from quadriga.policies.ares.overload import (
    ENTER_SHARE,
    HOLD_SHARE,
    LEAVE_SHARE,
    MIN_REMAINING_TOKENS,
    SHORT_SHARE,
    OverloadPlan,
    evictions,
    is_overdue,
    plan_overload,
)
from quadriga.policies.ares.placement import AresPlacement
from quadriga.policies.ares.recording import RecordedTick, parse_ticks, replay, write_tick
from quadriga.policies.ares.rescheduler import Rescheduler
from quadriga.policies.ares.settings import AresSettings, TransferCosts
from tests.unit.policies.ares_twin import CLASS, Held, random_cluster, snapshot

COSTS = TransferCosts(bytes_per_token=57_344, bandwidth_bytes_per_s=25e9 / 8)


def promised(snapshots: list[ReplicaSnapshot], share: float) -> ClusterForecast:
    """The replicas, each with so much of its memory promised."""
    cluster = unpack(
        [replace(s, reserved_tokens=int(share * s.info.kv_capacity_tokens)) for s in snapshots]
    )
    assert cluster is not None
    return cluster


def three(lengths: tuple[int, ...] = (500, 2_000, 30_000)) -> list[ReplicaSnapshot]:
    """Three replicas of 100,000 tokens with one sequence of each remaining length."""
    return [
        snapshot(name, [Held(f"{name}-{n}", 100.0, n, n / 2, 1.5 * n) for n in lengths])
        for name in ("d0", "d1", "d2")
    ]


def short_by_trying(cluster: ClusterForecast, room: float) -> float:
    """A token less than the least total whose sequence does not fit behind all before it."""
    rows = sorted(cluster.rows.astype(float).tolist(), key=lambda row: row[0] + row[1])
    filled = 0.0
    for row in rows:
        filled += row[0] + row[3]
        if filled > room:
            return float(row[0] + row[1] - 1.0)
    return float(rows[-1][0] + rows[-1][1]) if rows else 0.0


def evictions_by_trying(
    cluster: ClusterForecast, plan: OverloadPlan, settings: AresSettings, busy: frozenset[str]
) -> list[tuple[int, int, int]]:
    """(row, source, destination), each condition written out, replica by replica."""
    moves, taken = [], set(busy)
    for source, name in enumerate(cluster.names):
        if name not in plan.protected or name in busy:
            continue
        leaving = []
        for row, owner in enumerate(cluster.owner.tolist()):
            tokens, remaining, _, _, num_moves, since_s, movable, *_ = cluster.rows[row].tolist()
            total = tokens + remaining
            if owner != source or movable == FIXED or total <= plan.short_tokens:
                continue
            if num_moves >= settings.max_moves or since_s < settings.cooldown_s:
                continue
            if remaining > MIN_REMAINING_TOKENS:
                leaving.append((-total, row))
        if not leaving:
            continue
        row = min(leaving)[1]
        takers = [
            (float(cluster.tokens[i, 0]), i)
            for i, other in enumerate(cluster.names)
            if other not in plan.protected
            and other not in taken
            and not cluster.num_paused[i]
            and cluster.free_slots[i] > 0
            and cluster.tokens[i, 0] + cluster.rows[row, 0]
            <= settings.memory_limit * cluster.capacity_tokens[i]
        ]
        if takers:
            destination = min(takers)[1]
            taken.add(cluster.names[destination])
            moves.append((row, source, destination))
    return moves


def test_plans_and_moves_are_those_that_trying_everything_finds() -> None:
    rng, settings = np.random.default_rng(7), AresSettings()
    num_moves = num_plans = 0
    last: OverloadPlan | None = None
    for _ in range(300):
        cluster = promised(random_cluster(rng), float(rng.uniform(0.5, 1.0)))
        share = cluster.promised_tokens.sum() / cluster.capacity_tokens.sum()
        num_held = int(rng.integers(0, 3))
        plan = plan_overload(cluster, last, num_held=num_held)
        before, last = last, plan
        if before is None:
            assert (plan is not None) == (share > ENTER_SHARE and num_held > 0)
        else:
            assert (plan is not None) == (share > LEAVE_SHARE or num_held > 0)
        if plan is None:
            continue
        num_plans += 1
        assert 1 <= len(plan.protected) < len(cluster)
        assert plan.protected <= set(cluster.names)
        capacity = dict(zip(cluster.names, cluster.capacity_tokens, strict=True))
        room = SHORT_SHARE * sum(capacity[name] for name in plan.protected)
        assert plan.short_tokens == short_by_trying(cluster, room)
        busy = frozenset({"d1"}) if rng.random() < 0.2 else frozenset[str]()
        found = evictions(cluster, plan, settings, busy=busy)
        moves = [(m.row, m.source, m.destination) for m in found]
        assert moves == evictions_by_trying(cluster, plan, settings, busy)
        num_moves += len(moves)
    assert num_plans > 100
    assert num_moves > 30


def test_protected_replicas_stay_protected_while_the_overload_lasts() -> None:
    assert plan_overload(promised(three(), 0.85), None, num_held=0) is None, "nobody waits"
    plan = plan_overload(promised(three(), 0.85), None, num_held=1)
    assert plan is not None
    [name] = plan.protected
    fuller = three()
    at = [s.info.name for s in fuller].index(name)
    fuller[at] = snapshot(name, [Held("big", 50_000.0, 10_000.0, 1.0, 20_000.0)])
    again = plan_overload(promised(fuller, 0.7), plan, num_held=0)
    assert again is not None
    assert again.protected == plan.protected


def test_one_replica_or_unpredicted_lengths_are_never_overloaded() -> None:
    assert unpack(three()[:1]) is None
    unknown = [
        snapshot(name, [Held(name, 100.0, 1e4, 0.0, 1e4)], has_predictions=False)
        for name in ("d0", "d1")
    ]
    assert plan_overload(promised(unknown, 0.99), None, num_held=9) is None


def test_short_sequences_have_the_protected_replicas_and_long_ones_the_others() -> None:
    plan = OverloadPlan(frozenset({"d1"}), short_tokens=2_100.0)
    names, able = ["d0", "d1", "d2"], np.array([True, True, False])

    def where(total: float, *, overdue: bool = False) -> list[str]:
        may = plan.open_to(names, able, total, is_overdue=overdue)
        return [n for n, m in zip(names, may, strict=True) if m]

    assert where(2_100.0) == ["d1"]
    assert where(2_101.0) == ["d0"]
    assert where(2_101.0, overdue=True) == ["d0", "d1"]
    able[1] = False
    assert where(100.0) == ["d0"], "a short one goes anywhere when the protected have no room"
    able[:] = False
    assert where(100.0, overdue=True) == []


@pytest.mark.parametrize(("waited_s", "overdue"), [(0.0, False), (99.0, False), (101.0, True)])
def test_a_wait_is_bounded_by_the_time_of_the_answer(waited_s: float, overdue: bool) -> None:
    prediction = LengthPrediction(100.0 / 0.02 / HOLD_SHARE, 0.0, 1e5)
    assert is_overdue(waited_s, prediction, 0.02) is overdue


def crowded(share: float = 0.9) -> list[ReplicaSnapshot]:
    """Decode replicas that have promised a share of their memory, and one for prefill."""
    decode = [replace(s, reserved_tokens=int(share * 100_000)) for s in three()]
    info = replace(decode[0].info, name="p0", role=Role.PREFILL)
    return [*decode, ReplicaSnapshot(info, 0.0, num_unplaced=5)]


def governor(**ares: object) -> Governor:
    config = load_config({"scheduler": {"ares": ares}}).scheduler
    return Governor(config, lambda tick: ticks.append(tick))


ticks: list[RecordedTick] = []


def test_the_governor_protects_from_eighty_percent_on_and_says_so() -> None:
    made, below, held_none = governor(), crowded(0.79), crowded(0.6)
    made.tick(below, now_s=0.0, now_unix_s=0.0)
    assert (made.overload, made.num_held) == ({}, {})
    made.tick(crowded(0.85), now_s=1.0, now_unix_s=0.0)
    [plan] = made.overload.values()
    assert made.num_held == {"m": 5}
    text = "overload: protecting 1 of 3 replicas for sequences of up to 30,099 tokens, 5 held"
    assert made.last.why == {str(CLASS): text}
    assert ticks[-1].overload == plan
    stream = StringIO()
    write_tick(stream, ticks[-1])
    [again] = parse_ticks(stream.getvalue().splitlines(), "here")
    assert again.overload == plan
    assert not replay([again])
    made.tick(held_none, now_s=2.0, now_unix_s=0.0)
    assert made.overload, "some are held still"
    held_none[-1].num_unplaced = 0
    made.tick(held_none, now_s=3.0, now_unix_s=0.0)
    assert (made.overload, made.num_held) == ({}, {})


@pytest.mark.parametrize("ares", [{"overload": False}, {"mode": "load"}, {"mode": "off"}])
def test_who_wants_no_overload_objective_has_none(ares: dict[str, object]) -> None:
    made = governor(**ares)
    made.tick(crowded(), now_s=0.0, now_unix_s=0.0)
    assert not made.overload


def test_a_sequence_is_placed_under_overload_once_its_length_is_known() -> None:
    placement, snapshots = AresPlacement(), three((500, 2_000))
    placement.overload = OverloadPlan(frozenset({"d1"}), short_tokens=1_000.0)

    def where(mean: float, **fields: object) -> str | None:
        prediction = LengthPrediction(mean, 0.0, mean)
        asked = PlaceRequest("s", CLASS, 100, 40_000, prediction=prediction)
        return placement.choose(replace(asked, **fields), snapshots)  # type: ignore[arg-type]

    assert where(900.0) == "d1"
    assert where(901.0) in ("d0", "d2")
    assert where(900.0, is_prompt_done=False) is None
    for name in ("d0", "d2"):
        full = next(s for s in snapshots if s.info.name == name)
        full.reserved_tokens = 100_000
    assert where(30_000.0) is None, "held"
    assert where(30_000.0, waited_s=HOLD_SHARE * 30_000 * 0.02 + 1.0) == "d1", "overdue"
    placement.overload = None
    assert where(30_000.0, is_prompt_done=False) == "d1"


def test_under_overload_the_rescheduler_sends_long_sequences_away_and_balances_nothing() -> None:
    snapshots = three((500, 30_000))
    many = [Held(f"x{i}", 3_000.0, 9_000.0, 8_000.0, 1e4) for i in range(8)]
    snapshots[2] = snapshot("d2", many)
    plan = OverloadPlan(frozenset({"d0"}), short_tokens=1_000.0)
    usual = Rescheduler().tick(snapshots, COSTS)
    orders = Rescheduler().tick(snapshots, COSTS, overload=plan)
    assert usual and all(o.source == "d2" for o in usual)
    assert [(o.sequence_id, o.source, o.destination) for o in orders] == [("d0-30000", "d0", "d1")]
