"""Rescheduling chooses what trying every move would choose, and keeps its own rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.errors import ConfigError
from quadriga.policies.ares.cluster import classify, relative_work, weights
from quadriga.policies.ares.forecast import FIXED, MOVABLE, PAUSED, RUNS, checked
from quadriga.policies.ares.rescheduler import Rescheduler
from quadriga.policies.ares.settings import AresSettings, TransferCosts
from tests.unit.policies.ares_twin import (
    CLASS,
    Held,
    brute_force,
    random_cluster,
    snapshot,
    tied_cluster,
    unpacked,
)

FAST = TransferCosts(bytes_per_token=57_344, bandwidth_bytes_per_s=25e9 / 8)
SLOW = TransferCosts(bytes_per_token=57_344, bandwidth_bytes_per_s=1e8)
EAGER = AresSettings(theta=0.02, min_gain=0.0, moves_share=1.0, cost_factor=0.0)
USUAL = AresSettings()
MANY = AresSettings(moves_share=1.0)
SHORT = [Held(f"a{i}", 3000.0, 40.0, 40.0, 40.0) for i in range(8)]
LONG = [Held(f"b{i}", 700.0 + i, 20_000.0, 20_000.0, 20_000.0) for i in range(8)]
NEAR = AresSettings(memory_horizon_s=20.0, rescue_within_s=40.0, moves_share=1.0)


def moves(orders: list[MigrationOrder]) -> list[tuple[str, str, str]]:
    return [(o.sequence_id, o.source, o.destination) for o in orders]


def even(name: str, count: int, *, tokens: float = 1000.0) -> ReplicaSnapshot:
    held = [Held(f"{name}-{i}", tokens + i, 5000.0, 4000.0, 6000.0) for i in range(count)]
    return snapshot(name, held)


@pytest.mark.parametrize("load_only", [False, True])
@pytest.mark.parametrize("costs", [FAST, SLOW])
@pytest.mark.parametrize("settings", [USUAL, EAGER, MANY, NEAR])
@pytest.mark.parametrize("make", [random_cluster, tied_cluster])
def test_it_chooses_what_trying_everything_chooses(
    make: object, settings: AresSettings, costs: TransferCosts, load_only: bool
) -> None:
    rng = np.random.default_rng([len(repr(settings)), int(load_only), int(costs is SLOW)])
    num_moves = num_paused = 0
    for _ in range(60):
        snapshots = make(rng)  # type: ignore[operator]
        busy = frozenset({"d1"}) if rng.random() < 0.1 else frozenset[str]()
        orders = Rescheduler(settings).tick(snapshots, costs, busy=busy, load_only=load_only)
        wanted = brute_force(snapshots, settings, costs, load_only=load_only, busy=busy)
        assert moves(orders) == [m[:3] for m in wanted]
        assert [o.gain for o in orders] == pytest.approx([m[3] for m in wanted], abs=2e-12)
        num_moves += len(orders)
        cluster = unpacked(snapshots)
        movable = dict(zip(cluster.sequence_ids, cluster.rows[:, MOVABLE], strict=True))
        num_paused += sum(movable[o.sequence_id] == PAUSED for o in orders)
    assert num_moves > 10
    assert num_paused > 3 or make is tied_cluster


def test_a_large_cluster_passes_through_every_stage_of_the_search() -> None:
    """More rows than one chunk, so that bounds decide; the twin tries all 9,000 pairs."""
    rng = np.random.default_rng(5)
    snapshots = []
    for index in range(40):
        count = int(rng.choice([5, 20, 60]))
        held = [
            Held(f"s{index}-{j}", float(rng.integers(10, 3000)), r, 0.8 * r, 1.2 * r)
            for j, r in enumerate(rng.integers(100, 20_000, count).astype(float))
        ]
        snapshots.append(snapshot(f"d{index:02}", held, capacity=400_000, slots=80))
    settings = AresSettings(moves_share=0.05)
    orders = Rescheduler(settings).tick(snapshots, FAST)
    assert len(orders) == 2
    assert moves(orders) == [m[:3] for m in brute_force(snapshots, settings, FAST)]


def test_each_move_lowers_the_variance_by_what_it_says() -> None:
    rng = np.random.default_rng(11)
    for _ in range(200):
        snapshots = random_cluster(rng)
        cluster = unpacked(snapshots)
        load = cluster.load_s.copy()
        start = float(load.var(axis=0) @ MANY.weights)
        for order in Rescheduler(MANY).tick(snapshots, FAST):
            row = cluster.sequence_ids.index(order.sequence_id)
            before = float(load.var(axis=0) @ MANY.weights)
            load[cluster.names.index(order.source)] -= cluster.row_load_s[row]
            load[cluster.names.index(order.destination)] += cluster.row_load_s[row]
            after = float(load.var(axis=0) @ MANY.weights)
            assert (before - after) / start == pytest.approx(order.gain, abs=1e-9)
            if order.cause is MigrationCause.BALANCE:
                assert after < before


@pytest.mark.parametrize(("a", "b"), [(14, 10), (10, 14), (13, 11), (12, 12)])
def test_of_equal_sequences_none_moves_to_the_replica_that_has_more(a: int, b: int) -> None:
    """However fast the replicas step, how far theirs are, and how their steps were measured.

    Observed once: 14 and 10 became 17 and 7. The replica with 10 had measured its steps while
    another one started, and so each of its sequences looked as heavy as two.
    """
    rng = np.random.default_rng(10 * a + b)
    for _ in range(100):
        snapshots = [
            snapshot(
                name,
                [
                    Held(f"{name}{i}", 20.0 + at, 1500.0 - at, 1500.0 - at, 1500.0 - at)
                    for i, at in enumerate(rng.uniform(0.0, most, count))
                ],
                step_s=float(rng.uniform(0.002, 0.2)),
                slower=float(rng.uniform(0.1, 10.0)),
                slots=32,
            )
            for name, count, most in (("a", a, 100.0), ("b", b, 100.0))
        ]
        for order in Rescheduler(USUAL).tick(snapshots, FAST):
            assert a != b
            assert order.source == ("a" if a > b else "b")


def test_how_fast_replicas_are_moves_nothing() -> None:
    """The same sequences at replicas of any speed, measured in any way: the same orders."""
    rng = np.random.default_rng(6)
    num_orders = 0
    for _ in range(100):
        counts = [int(rng.integers(0, 12)) for _ in range(3)]
        held = [
            [
                Held(f"s{i}-{j}", float(rng.integers(10, 3000)), r, 0.8 * r, 1.2 * r)
                for j, r in enumerate(rng.integers(10, 9000, count).astype(float))
            ]
            for i, count in enumerate(counts)
        ]
        same = [1.0, 1.0, 1.0], [0.02, 0.02, 0.02]
        mixed = rng.permutation([1.0, 0.2, 5.0]), rng.uniform(0.005, 0.1, 3)
        found = [
            Rescheduler(USUAL).tick(
                [
                    snapshot(f"d{i}", h, slower=f, step_s=s, slots=16, capacity=10**7)
                    for i, (h, f, s) in enumerate(zip(held, *pace, strict=True))
                ],
                TransferCosts(0.0, 1.0, round_trip_s=0.0),
            )
            for pace in (same, mixed)
        ]
        assert found[0] == found[1]
        num_orders += len(found[0])
    assert num_orders > 30


def test_no_move_makes_the_fuller_of_a_pair_fuller() -> None:
    rng = np.random.default_rng(12)
    num_orders = 0
    for _ in range(200):
        snapshots = random_cluster(rng)
        cluster = unpacked(snapshots)
        work = relative_work(cluster, weights(USUAL, load_only=False))
        for order in Rescheduler(MANY).tick(snapshots, FAST):
            if order.cause is MigrationCause.BALANCE:
                assert work[order.source] > work[order.destination]
                num_orders += 1
    assert num_orders > 20


def test_replicas_take_part_in_one_move_at_most() -> None:
    snapshots = [even(f"a{i}", 8) for i in range(4)] + [even(f"b{i}", 1) for i in range(4)]
    orders = Rescheduler(MANY).tick(snapshots, FAST)
    assert len(orders) == 4
    names = [o.source for o in orders] + [o.destination for o in orders]
    assert len(set(names)) == 8


def test_a_balanced_cluster_is_left_alone() -> None:
    assert not Rescheduler(USUAL).tick([even("a", 5), even("b", 5), even("c", 5)], FAST)


def test_nothing_moves_back_and_forth() -> None:
    """One sequence too many: moving it would only turn the two replicas round."""
    snapshots = [even("a", 1, tokens=9000.0), even("b", 0)]
    assert not Rescheduler(USUAL).tick(snapshots, FAST)


def test_what_was_moved_rests_and_is_not_moved_for_ever() -> None:
    def held(**fields: float) -> list[Held]:
        return [
            replace(Held(f"a{i}", 1000.0, 9000.0, 9000.0, 9000.0), **fields)  # type: ignore[arg-type]
            for i in range(6)
        ]

    def orders(**fields: float) -> list[MigrationOrder]:
        return Rescheduler(USUAL).tick([snapshot("a", held(**fields)), even("b", 1)], FAST)

    assert orders()
    assert not orders(since_move_s=4.9)
    assert orders(since_move_s=5.0)
    assert orders(moves=1)
    assert not orders(moves=2)
    assert not orders(movable=FIXED)


def test_what_ends_soon_is_not_moved() -> None:
    def orders(remaining: float, costs: TransferCosts) -> list[MigrationOrder]:
        held = [Held(f"a{i}", 4000.0, remaining, remaining, remaining) for i in range(6)]
        settings = AresSettings(cost_factor=0.0)
        return Rescheduler(settings).tick([snapshot("a", held), snapshot("b", [])], costs)

    # 4,000 tokens over 100 MB/s take 2.3 s: twice that is 230 steps of 20 ms.
    assert orders(500.0, SLOW)
    assert not orders(200.0, SLOW)
    assert orders(200.0, FAST)


def test_an_uncertain_gain_must_pay_for_the_transfer() -> None:
    def orders(lower: float) -> list[MigrationOrder]:
        held = [Held(f"a{i}", 8000.0, 20_000.0, lower, 20_000.0) for i in range(6)]
        snapshots = [snapshot(name, h, capacity=10**6) for name, h in (("a", held), ("b", []))]
        return Rescheduler(USUAL).tick(snapshots, SLOW)

    assert orders(20_000.0)
    assert not orders(100.0)


def test_the_destination_must_hold_the_sequence_at_its_peak() -> None:
    def orders(upper: float) -> list[MigrationOrder]:
        held = [Held(f"a{i}", 3000.0, 2000.0, 2000.0, upper) for i in range(6)]
        small = snapshot("b", [Held("b0", 500.0, 9000.0, 9000.0, 9000.0)], capacity=13_000)
        return Rescheduler(USUAL).tick([snapshot("a", held), small], FAST)

    assert orders(2000.0)
    assert not orders(15_000.0)


@pytest.mark.parametrize(("count", "more"), [(2, -300), (3, 0), (3, 300)])
def test_memory_that_will_run_out_is_a_reason_of_its_own(count: int, more: int) -> None:
    """The balance is fine, or for more; one replica is small, and its sequences will outgrow it."""
    held = [Held(f"a{i}", 3000.0 + i, 8000.0, 8000.0, 8000.0) for i in range(3)]
    like = [replace(h, sequence_id=f"b{h.sequence_id}", tokens=h.tokens + more) for h in held]
    small = snapshot("a", held, capacity=24_000)
    orders = Rescheduler(USUAL).tick([small, snapshot("b", like[:count], capacity=200_000)], FAST)
    assert [(o.source, o.cause) for o in orders] == [("a", MigrationCause.MEMORY)]


def test_the_replica_that_is_full_first_is_relieved_first() -> None:
    """Time decides, not how much the move does for the balance; later than the limit is no matter
    yet."""
    grow = [Held(f"x{i}", 3000.0, 8000.0, 8000.0, 8000.0) for i in range(3)]
    soon = snapshot("a", [replace(h, sequence_id=f"a{i}") for i, h in enumerate(grow)])
    late = even("b", 9, tokens=1500.0)
    rest = [even("c", 1), even("d", 1)]

    def first(a_capacity: int, b_capacity: int, settings: AresSettings = USUAL) -> MigrationOrder:
        small = replace(soon, info=replace(soon.info, kv_capacity_tokens=a_capacity))
        large = replace(late, info=replace(late.info, kv_capacity_tokens=b_capacity))
        return Rescheduler(settings).tick([small, large, *rest], FAST)[0]

    assert first(1_000_000, 1_000_000).source == "b", "by the balance"
    assert first(10_600, 45_000).source == "a", "at once against in a minute"
    assert first(24_000, 15_200).source == "b"
    far_off = replace(USUAL, rescue_within_s=5.0)
    order = first(24_000, 45_000, far_off)
    assert (order.source, order.cause) == ("b", MigrationCause.BALANCE), "neither is full in 5 s"


def crowded(
    name: str, num_paused: int, *, tokens: float = 1000.0, **fields: object
) -> ReplicaSnapshot:
    """Eight sequences of which the last ones are paused."""
    held = [
        Held(f"{name}{i}", tokens + i, 9000.0, 9000.0, 9000.0, movable=m)
        for i, m in enumerate([RUNS] * (8 - num_paused) + [PAUSED] * num_paused)
    ]
    return snapshot(name, held, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("load_only", [False, True])
def test_paused_sequences_are_moved_first(load_only: bool) -> None:
    """Of two that are overloaded alike, and of its sequences, the one that stands still."""
    snapshots = [even("a", 8), crowded("b", 1), even("c", 1), even("d", 1)]
    [order] = Rescheduler(USUAL).tick(snapshots, FAST, load_only=load_only)
    assert (order.sequence_id, order.source, order.cause) == ("b7", "b", MigrationCause.MEMORY)


def test_a_paused_sequence_goes_where_there_is_room_whatever_the_balance() -> None:
    """Its replica is full and yet the least busy one; the others are small sequences, and many."""
    others = [
        snapshot(name, [Held(f"{name}{i}", 1500.0, 9e3, 9e3, 9e3) for i in range(count)])
        for name, count in (("b", 10), ("c", 9))
    ]
    [order] = Rescheduler(USUAL).tick([crowded("a", 2), *others], FAST)
    assert (order.sequence_id, order.destination) == ("a6", "c")
    assert order.gain < 0.0
    full = snapshot("c", [Held("c0", 3000.0, 9e3, 9e3, 9e3)], capacity=8_000)
    [order] = Rescheduler(USUAL).tick([crowded("a", 2), others[0], full], FAST)
    assert order.destination == "b"


def test_moving_a_paused_sequence_needs_no_gain_to_pay_for_it() -> None:
    """Its copy stalls nobody: neither a slow link nor a near end keeps it where it stands."""

    def orders(movable: float, remaining: float) -> list[MigrationOrder]:
        held = [
            Held(f"a{i}", 4000.0, remaining, 0.0, remaining, movable=movable if i == 0 else FIXED)
            for i in range(6)
        ]
        return Rescheduler(USUAL).tick([snapshot("a", held), snapshot("b", [])], SLOW)

    assert not orders(RUNS, 200.0)
    assert orders(PAUSED, 200.0)


def test_who_has_paused_sequences_takes_nothing() -> None:
    """It would refuse: its own come first."""
    assert Rescheduler(USUAL).tick([even("a", 12), even("b", 1)], FAST)
    tired = Held("b0", 1000.0, 9000.0, 9000.0, 9000.0, moves=2, movable=PAUSED)
    assert not Rescheduler(USUAL).tick([even("a", 12), snapshot("b", [tired])], FAST)


def test_without_predictions_the_present_decides() -> None:
    """Replica a is fuller now, b will be: the two modes move in opposite directions."""
    snapshots = [snapshot("a", SHORT), snapshot("b", LONG, capacity=500_000)]
    foreseen = Rescheduler(USUAL).tick(snapshots, FAST)
    blind = Rescheduler(USUAL).tick(snapshots, FAST, load_only=True)
    assert {o.source for o in foreseen} <= {"b"}
    assert {o.source for o in blind} == {"a"}
    assert moves(blind) == moves(Rescheduler(USUAL, predicts=False).tick(snapshots, FAST))
    unknown = [
        snapshot("a", SHORT, has_predictions=False),
        snapshot("b", LONG, capacity=500_000, has_predictions=False),
    ]
    assert moves(Rescheduler(USUAL).tick(unknown, FAST)) == moves(blind)


def test_sequences_of_a_replica_that_knows_no_length_last_as_long_as_the_others() -> None:
    """One that has just begun must not send its whole class back to the present load."""
    newcomer = Held("c0", 100.0, 30_000.0, 0.0, 30_000.0)
    knowing = [snapshot("a", SHORT), snapshot("b", LONG, capacity=500_000)]
    blind = snapshot("c", [newcomer], has_predictions=False)
    usual = float(np.mean([h.remaining for h in SHORT + LONG]))
    told = snapshot("c", [replace(newcomer, remaining=usual)])
    cluster, wanted = unpacked([*knowing, blind]), unpacked([*knowing, told])
    assert cluster.has_predictions
    np.testing.assert_allclose(cluster.load_s, wanted.load_s)
    np.testing.assert_allclose(cluster.tokens, wanted.tokens)
    np.testing.assert_array_equal(cluster.rows, wanted.rows)
    orders = Rescheduler(USUAL).tick([*knowing, blind], FAST)
    assert {o.source for o in orders} == {"b"}, "the forecast decides"
    idle = unpacked([snapshot("a", []), blind])
    assert not idle.has_predictions, "nobody knows anything"


def test_draining_busy_and_full_replicas_take_nothing() -> None:
    def orders(**fields: object) -> list[MigrationOrder]:
        busy = fields.pop("busy", frozenset[str]())
        other = snapshot("b", [], **fields)  # type: ignore[arg-type]
        return Rescheduler(USUAL).tick([even("a", 6), other], FAST, busy=busy)  # type: ignore[arg-type]

    assert orders()
    assert not orders(draining=True)
    assert not orders(slots=0)
    assert not orders(busy=frozenset({"b"}))
    assert not orders(busy=frozenset({"a"}))


def test_a_sequence_goes_only_where_rows_are_as_long_as_it_may_become() -> None:
    """Rows follow a node's memory; the replica would refuse it."""
    held = [Held(f"a-{i}", 1000.0, 5000.0, 4000.0, 6000.0, most_tokens=8000) for i in range(6)]
    for longest, destination in ((8000, "b"), (7999, "c")):
        other = even("b", 0)
        other.info = replace(other.info, max_model_len=longest)
        (order,) = Rescheduler(USUAL).tick([snapshot("a", held), other, even("c", 1)], FAST)
        assert order.destination == destination


def test_classes_are_balanced_apart() -> None:
    other = even("c", 0)
    other.info = replace(other.info, depth_class=DepthClass("m", 4))
    assert not Rescheduler(USUAL).tick([even("a", 6), other], FAST)
    orders = Rescheduler(USUAL).tick([even("a", 6), other, even("b", 0)], FAST)
    assert [(o.destination, o.depth_class) for o in orders] == [("b", CLASS)]


def test_the_least_loaded_takes_where_none_is_underloaded() -> None:
    snapshots = [even("a", 12), even("b", 9), even("c", 10), even("d", 9)]
    cluster = unpacked(snapshots)
    coarse = AresSettings(theta=0.15)
    roles = classify(cluster, coarse, weights(coarse, load_only=True), frozenset())
    assert [cluster.names[i] for i in roles.sources] == ["a"]
    assert [cluster.names[i] for i in roles.destinations] == ["b"]


def test_malformed_forecasts_are_left_out_and_lone_replicas_left_alone() -> None:
    good = even("a", 3)
    assert good.forecast is not None
    assert not Rescheduler().tick([good], FAST)
    assert not Rescheduler().tick([good, replace(even("b", 0), forecast=None)], FAST)
    other_grid = replace(good.forecast, grid_s=tuple(2 * s for s in good.forecast.grid_s))
    assert not Rescheduler().tick([good, replace(even("b", 0), forecast=other_grid)], FAST)
    cut = replace(good.forecast, rows=good.forecast.rows[:-4])
    assert checked(replace(good, forecast=cut), set()) == replace(good, forecast=None)
    assert checked(good, set()) is good


@pytest.mark.parametrize(
    "fields", [{"theta": -0.1}, {"decay": 1.5}, {"memory_limit": 2.0}, {"moves_share": -1.0}]
)
def test_settings_have_bounds(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        AresSettings(**fields)  # type: ignore[arg-type]
