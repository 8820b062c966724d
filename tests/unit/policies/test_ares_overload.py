"""Overload: who is protected, what is short, who waits and who leaves; against plain loops."""

from __future__ import annotations

from collections import Counter
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
    LONG_SHARE,
    MAX_HOLD_SHARE,
    MIN_REMAINING_TOKENS,
    ROOM_SHARE,
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
from quadriga.policies.load import has_room
from tests.unit.policies.ares_twin import CLASS, Held, random_cluster, snapshot, unpacked

COSTS = TransferCosts(bytes_per_token=57_344, bandwidth_bytes_per_s=25e9 / 8)


def promised(snapshots: list[ReplicaSnapshot], share: float) -> ClusterForecast:
    """The replicas, each with so much of its memory promised."""
    return unpacked(
        [replace(s, reserved_tokens=int(share * s.info.kv_capacity_tokens)) for s in snapshots]
    )


def three(lengths: tuple[int, ...] = (500, 2_000, 30_000)) -> list[ReplicaSnapshot]:
    """Three replicas of 100,000 tokens with one sequence of each remaining length."""
    return [
        snapshot(
            name,
            [Held(f"{name}-{n}", 100.0, n, n / 2, 1.5 * n, most_tokens=2 * n) for n in lengths],
        )
        for name in ("d0", "d1", "d2")
    ]


def short_by_trying(cluster: ClusterForecast, room: float) -> float:
    """The greatest total whose sequence fits behind all before it, or less than the least."""
    rows = sorted(cluster.rows.astype(float).tolist(), key=lambda row: row[0] + row[1])
    if not rows or rows[0][0] + rows[0][3] > room:
        return min([room, *(float(row[0] + row[1]) - 1.0 for row in rows[:1])])
    filled = short = 0.0
    for row in rows:
        filled += row[0] + row[3]
        if filled > room:
            break
        short = float(row[0] + row[1])
    return short


def peaks_by_walking(
    cluster: ClusterForecast, tokens: float = 0.0, mean: float = 0.0, upper: float = 0.0
) -> list[float]:
    """The greatest share of each replica's memory, point by point, sequence by sequence."""
    found = []
    for i in range(len(cluster)):
        owned = [r for r, o in zip(cluster.rows.tolist(), cluster.owner, strict=True) if o == i]
        every = [(r[0], r[1], max(r[1], r[3])) for r in owned]
        if tokens:
            every.append((tokens, mean, max(mean, upper)))
        most, before = 0.0, -1.0
        for at_s in cluster.grid_s.tolist():
            ahead = at_s / cluster.step_s[i]

            def held(size: float, left: float) -> float:
                return size + min(ahead, left) if before < 0.0 or before < left else 0.0  # noqa: B023

            if not tokens or held(tokens, max(mean, upper)):
                there = sum(held(size, left) for size, left, _ in every)
                above = sum((held(s, u) - held(s, m)) ** 2 for s, m, u in every)
                most = max(most, there + above**0.5)
            before = ahead
        found.append(most / cluster.capacity_tokens[i])
    return found


def evictions_by_trying(
    cluster: ClusterForecast, plan: OverloadPlan, settings: AresSettings, busy: frozenset[str]
) -> list[tuple[int, int, int]]:
    """(row, source, destination), each condition written out, replica by replica."""
    moves, taken = [], set(busy)
    for source, name in enumerate(cluster.names):
        if name not in plan.protected or name in busy:
            continue
        if peaks_by_walking(cluster)[source] <= LONG_SHARE:
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
            <= ROOM_SHARE * cluster.capacity_tokens[i]
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


def at_depths(*depths: int, share: float) -> ClusterForecast:
    """Replicas of one model with so many layers each; the deep ones have promised a share."""
    made = [
        snapshot(
            f"d{i}",
            [Held(f"d{i}-{n}", 100.0, n, n / 2, 1.5 * n) for n in (500, 30_000)],
            depth=depth,
        )
        for i, depth in enumerate(depths)
    ]
    for one in made:
        deep = one.info.depth_class.depth == 8
        one.reserved_tokens = int((share if deep else 0.1) * one.info.kv_capacity_tokens)
    return unpacked(made)


def test_a_model_at_several_depths_is_overloaded_where_one_class_is_and_protects_in_each() -> None:
    cluster = at_depths(4, 8, 4, 8, 8, share=0.9)
    plan = plan_overload(cluster, None, num_held=1)
    assert plan is not None
    depth_of = dict(zip(cluster.names, cluster.depth.tolist(), strict=True))
    assert sorted(depth_of[name] for name in plan.protected) == [4, 8]
    shallow = [name for name, depth in depth_of.items() if depth == 4]
    assert plan.described(shallow, 0).startswith("overload: protecting 1 of 2 replicas for")
    assert plan_overload(at_depths(4, 8, 4, 8, 8, share=0.7), None, num_held=1) is None
    # One alone has nobody to leave long sequences to, and is not protected.
    mixed = plan_overload(at_depths(4, 8, 8, share=0.9), None, num_held=1)
    assert mixed is not None
    assert mixed.protected < {"d1", "d2"} and mixed.protected
    assert plan_overload(at_depths(4, 8, share=0.9), None, num_held=1) is None


def open_by_trying(
    plan: OverloadPlan,
    cluster: ClusterForecast,
    able: list[bool],
    tokens: int,
    prediction: LengthPrediction,
    waited_s: float,
) -> list[bool]:
    """The rules, one after the other."""
    run_s = prediction.mean * sum(cluster.step_s) / len(cluster)
    if waited_s > MAX_HOLD_SHARE * run_s:
        return able
    peaks = peaks_by_walking(cluster, tokens, prediction.mean, prediction.upper)
    fits = [a and p <= ROOM_SHARE for a, p in zip(able, peaks, strict=True)]
    is_kept = [name in plan.protected for name in cluster.names]
    inside = [f and k for f, k in zip(fits, is_kept, strict=True)]
    outside = [f and not k for f, k in zip(fits, is_kept, strict=True)]
    if tokens + prediction.mean <= plan.short_tokens:
        return inside if any(inside) else fits
    if any(outside):
        return outside
    if waited_s > HOLD_SHARE * run_s:
        return fits
    return [f and p <= LONG_SHARE for f, p in zip(fits, peaks, strict=True)]


def test_who_may_take_a_sequence_is_what_trying_every_rule_finds() -> None:
    rng, found = np.random.default_rng(11), Counter[tuple[bool, bool, bool]]()
    for _ in range(400):
        cluster = unpacked(random_cluster(rng))
        made = plan_overload(cluster, None, num_held=1) or plan_overload(
            replace(cluster, promised_tokens=cluster.capacity_tokens), None, num_held=1
        )
        if made is None:
            continue
        plan = replace(made, short_tokens=8_000.0)
        able = rng.random(len(cluster)) < 0.6
        mean = float(rng.choice([500.0, 2_000.0, 9_000.0, 60_000.0]))
        prediction, tokens = LengthPrediction(mean, 0.0, 2 * mean), int(rng.integers(10, 9_000))
        waited_s = float(rng.choice([0.0, 2.5, 4.5])) * mean * float(cluster.step_s.mean())
        may = plan.open_to(cluster, able, tokens, prediction, waited_s).tolist()
        assert may == open_by_trying(plan, cluster, able.tolist(), tokens, prediction, waited_s)
        found[tokens + mean <= plan.short_tokens, waited_s > 0.0, any(may)] += 1
    assert len(found) == 8 and min(found.values()) >= 4, "each case came"


def test_short_sequences_have_the_protected_replicas_and_long_ones_the_others() -> None:
    plan = OverloadPlan(frozenset({"d1"}), short_tokens=2_100.0)
    empty, long_full, full = (
        promised(three(lengths), 0.5)
        for lengths in ((500, 2_000), (30_000, 25_000), (30_000, 30_000, 30_000))
    )
    able = np.array([True, True, False])

    def where(total: float, *, waited_s: float = 0.0, held: ClusterForecast = empty) -> list[str]:
        prediction = LengthPrediction(total - 100.0, 0.0, total - 100.0)
        may = plan.open_to(held, able, 100, prediction, waited_s)
        return [n for n, m in zip(held.names, may, strict=True) if m]

    assert where(2_100.0) == ["d1"]
    assert where(2_101.0) == ["d0"]
    able[1] = False
    assert where(100.0) == ["d0"], "a short one goes anywhere when the protected have no room"
    able[:] = False, True, False
    assert where(30_000.0) == ["d1"], "a long one too, where a quarter of the memory stays free"
    assert where(30_000.0, held=long_full) == [], "held"
    overdue_s, most_s = (1.1 * share * 30_000 * 0.02 for share in (HOLD_SHARE, MAX_HOLD_SHARE))
    assert where(30_000.0, waited_s=overdue_s, held=long_full) == ["d1"], "overdue"
    assert where(30_000.0, waited_s=overdue_s, held=full) == [], "it has no room"
    assert where(30_000.0, waited_s=most_s, held=full) == ["d1"], "a wait ends"
    able[:] = False
    assert where(100.0, waited_s=1e9) == []


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


def test_draining_replicas_are_no_part_of_an_overload() -> None:
    made, (leaving, *others) = governor(), crowded()
    leaving = replace(leaving, draining=True, reserved_tokens=0)  # it would be protected first
    made.tick([leaving, *others], now_s=0.0, now_unix_s=0.0)
    assert [plan.protected for plan in made.overload.values()] == [{"d1"}]


def test_the_governor_protects_from_eighty_percent_on_and_says_so() -> None:
    made, below, held_none = governor(), crowded(0.79), crowded(0.6)
    made.tick(below, now_s=0.0, now_unix_s=0.0)
    assert (made.overload, made.num_held) == ({}, {})
    made.tick(crowded(0.85), now_s=1.0, now_unix_s=0.0)
    [plan] = made.overload.values()
    assert made.num_held == {"m": 5}
    text = "overload: protecting 1 of 3 replicas for sequences of up to 2,100 tokens, 5 held"
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


def test_what_a_silent_prefill_replica_holds_does_not_count() -> None:
    made, below = governor(), crowded(0.6)
    made.tick(crowded(0.85), now_s=0.0, now_unix_s=0.0)
    assert made.overload
    below[-1].taken_unix_s = -1e6
    made.tick(below, now_s=1.0, now_unix_s=0.0)
    assert (made.overload, made.num_held) == ({}, {})


def test_overload_ends_with_rescheduling() -> None:
    """Nobody would find that it is over: newcomers would be refused for good."""
    made = governor()
    made.tick(crowded(0.85), now_s=0.0, now_unix_s=0.0)
    assert made.overload and made.num_held
    made.configure(load_config({"scheduler": {"ares": {"mode": "off"}}}).scheduler)
    assert (made.overload, made.num_held, made.pools) == ({}, {}, {})


@pytest.mark.parametrize("ares", [{"overload": False}, {"mode": "load"}, {"mode": "off"}])
def test_who_wants_no_overload_objective_has_none(ares: dict[str, object]) -> None:
    made = governor(**ares)
    made.tick(crowded(), now_s=0.0, now_unix_s=0.0)
    assert not made.overload


def test_a_sequence_is_placed_under_overload_once_its_length_is_known() -> None:
    placement, snapshots = AresPlacement(), three((500, 25_000, 30_000))
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


def test_under_overload_room_is_what_the_forecast_says_and_nothing_else_is_promised() -> None:
    """What answers usually need, promised to each, would leave no room where there is some."""
    placement, snapshots = AresPlacement(), three((500, 2_000))
    for held in snapshots:
        held.reserved_tokens, held.upper_tokens = 85_000, 30_000
        held.info = replace(held.info, reservation="used")
    asked = PlaceRequest(
        "s", CLASS, 100, 60_000, prediction=LengthPrediction(40_000.0, 10.0, 70_000.0)
    )
    assert not has_room(snapshots[0], asked)
    assert has_room(snapshots[0], replace(asked, by_forecast=True))
    assert placement.choose(asked, snapshots) is None
    placement.overload = OverloadPlan(frozenset({"d1"}), short_tokens=1_000.0)
    assert placement.choose(asked, snapshots) in ("d0", "d2")


def test_under_overload_the_important_take_the_place_of_others_as_at_any_time() -> None:
    placement, snapshots = AresPlacement(), three((500, 30_000))
    for full in snapshots:
        full.info = replace(full.info, reservation="used", kv_capacity_tokens=20_000)
        full.least_priority = 5
    placement.overload = OverloadPlan(frozenset({"d1"}), short_tokens=1_000.0)
    prediction = LengthPrediction(9_000.0, 9_000.0, 9_000.0)
    asked = PlaceRequest("s", CLASS, 100, 40_000, prediction=prediction, priority=5)
    assert placement.choose(asked, snapshots) is None, "held: those that run are as important"
    asked = replace(asked, priority=4, max_total_tokens=9_100)
    assert placement.choose(asked, snapshots) is not None
    for full in snapshots:  # promised whole, memory is nobody's to give
        full.info = replace(full.info, reservation="longest")
    assert placement.choose(asked, snapshots) is None


def test_under_overload_the_rescheduler_sends_long_sequences_away_and_balances_nothing() -> None:
    snapshots = three((500, 30_000))
    many = [Held(f"x{i}", 3_000.0, 9_000.0, 8_000.0, 1e4) for i in range(8)]
    snapshots[2] = snapshot("d2", many)
    plan = OverloadPlan(frozenset({"d0"}), 1_000.0, spread_tokens={"d0": [50_000.0] * 17})
    usual = Rescheduler().tick(snapshots, COSTS)
    orders = Rescheduler().tick(snapshots, COSTS, overload=plan)
    assert usual and all(o.source == "d2" for o in usual)
    assert [(o.sequence_id, o.source, o.destination) for o in orders] == [("d0-30000", "d0", "d1")]
    d1 = replace(snapshots[1], info=replace(snapshots[1].info, max_model_len=59_999))
    (order,) = Rescheduler().tick([snapshots[0], d1, snapshots[2]], COSTS, overload=plan)
    assert order.destination == "d2", "the other's rows are too short"
    roomy = replace(plan, spread_tokens={})
    assert not Rescheduler().tick(snapshots, COSTS, overload=roomy), "a quarter of it stays free"
