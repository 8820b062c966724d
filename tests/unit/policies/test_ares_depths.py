"""Moves between depth classes of one model: whom they help, and where strict sequences never go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.checkpoint.exits import ExitParams
from quadriga.core.migration import MigrationCause, MigrationOrder
from quadriga.core.replica import DepthClass, ReplicaSnapshot
from quadriga.policies.ares.explanation import explain
from quadriga.policies.ares.forecast import PAUSED
from quadriga.policies.ares.recording import RecordedTick
from quadriga.policies.ares.rescheduler import Rescheduler
from quadriga.policies.ares.settings import AresSettings, TransferCosts
from tests.unit.policies.ares_twin import CLASS, Held, snapshot

COSTS = TransferCosts(57_344, 25e9 / 8)
POLICY = Rescheduler(AresSettings())
ANY = (0, 0)


def some(
    name: str, count: int, tokens: float = 900.0, bounds: tuple[int, int] = ANY, **other: float
) -> list[Held]:
    least, most = bounds
    one = Held(name, tokens, 4000.0, 4000.0, 4000.0, least_layers=least, most_layers=most)
    return [
        replace(one, sequence_id=f"{name}{i}", tokens=tokens + 10 * i, **other)  # type: ignore[arg-type]
        for i in range(count)
    ]


def full(name: str, depth: int, bounds: tuple[int, int] = ANY) -> ReplicaSnapshot:
    """A replica whose memory is forecast to run out."""
    return snapshot(name, some(name, 4, bounds=bounds), depth=depth, capacity=6000)


def orders_of(*snapshots: ReplicaSnapshot) -> list[MigrationOrder]:
    return POLICY.tick(list(snapshots), COSTS)


def bounds_of(exits: ExitParams, held: int, *, deterministic: bool = False) -> tuple[int, int]:
    return exits.depth_bounds(held, deterministic=deterministic)


BOUNDED, STRICT = ExitParams(0.9, "bounded"), ExitParams(0.9, "strict")


@pytest.mark.parametrize(("here", "there"), [(8, 4), (4, 8)])
def test_who_runs_out_of_memory_is_relieved_at_another_depth(here: int, there: int) -> None:
    (order,) = orders_of(
        full("a", here, bounds_of(BOUNDED, here)), snapshot("b", some("b", 1), depth=there)
    )
    assert order.cause is MigrationCause.MEMORY
    assert (order.source, order.destination) == ("a", "b")
    assert order.depth_class == DepthClass(CLASS.model, here), "the source's own"


def test_its_own_class_comes_first() -> None:
    """There its tokens stay what they are."""
    (order,) = orders_of(
        full("a", 8), snapshot("b", [], depth=4), snapshot("c", some("c", 1), depth=8)
    )
    assert order.destination == "c"


@pytest.mark.parametrize(
    "exits", [STRICT, *(ExitParams(1.0, policy) for policy in ("lossless", "strict", "off"))]
)
def test_a_strict_sequence_is_never_sent_to_fewer_layers(exits: ExitParams) -> None:
    assert not orders_of(full("a", 8, bounds_of(exits, 8)), snapshot("b", [], depth=4))
    (order,) = orders_of(full("a", 4, bounds_of(exits, 4)), snapshot("b", [], depth=8))
    assert order.destination == "b", "to more it may go"


def test_a_strict_sequence_that_wants_few_layers_may_go_where_these_are() -> None:
    limited = bounds_of(replace(STRICT, max_depth=4), 8)
    (order,) = orders_of(full("a", 8, limited), snapshot("b", [], depth=4))
    assert order.destination == "b"


@pytest.mark.parametrize("there", [4, 12])
def test_where_answers_do_not_depend_on_the_load_depths_are_kept(there: int) -> None:
    """A deterministic answer changes with its layers, be they fewer or more."""
    held = bounds_of(BOUNDED, 8, deterministic=True)
    assert not orders_of(full("a", 8, held), snapshot("b", [], depth=there))


def test_paused_sequences_go_to_another_depth() -> None:
    held = [*some("a", 2), *some("p", 1, movable=PAUSED)]
    (order,) = orders_of(snapshot("a", held, depth=8), snapshot("b", [], depth=4))
    assert (order.sequence_id, order.destination) == ("p0", "b")
    strict = [*some("a", 2), *some("p", 1, bounds=bounds_of(STRICT, 8), movable=PAUSED)]
    found = orders_of(snapshot("a", strict, depth=8), snapshot("b", [], depth=4))
    assert "p0" not in {order.sequence_id for order in found}


def test_for_balance_alone_no_sequence_loses_layers() -> None:
    """A model that is being resized: one replica has its layers already, the other has not."""
    busy, idle = some("a", 8), some("b", 1)
    assert not orders_of(snapshot("a", busy, depth=8), snapshot("b", idle, depth=4))
    (order,) = orders_of(snapshot("a", busy, depth=4), snapshot("b", idle, depth=8))
    assert (order.cause, order.source) == (MigrationCause.BALANCE, "a")


def test_a_class_with_others_in_it_is_balanced_by_itself() -> None:
    even = [snapshot(name, some(name, 4), depth=4) for name in "ab"]
    assert not orders_of(*even, snapshot("c", [], depth=8)), "c is placed to, not moved to"


def test_another_model_is_no_help() -> None:
    other = snapshot("b", [], depth=8)
    other = replace(other, info=replace(other.info, depth_class=DepthClass("another", 8)))
    assert not orders_of(full("a", 8), other)


def test_a_move_between_depths_is_explained() -> None:
    snapshots = [full("a", 8), snapshot("b", [], depth=4)]
    (order,) = orders_of(*snapshots)
    tick = RecordedTick(0.0, snapshots, POLICY.settings, COSTS, True, False, frozenset(), [order])
    found = explain(tick, order)
    assert found["destinations"][0]["name"] == "b" and "memory" in found["text"]


@given(st.data())
def test_no_order_ever_breaks_what_a_sequence_needs(data: st.DataObject) -> None:
    """Replicas of random depths and loads: what the source would refuse is not ordered."""
    snapshots, needs, depths = [], dict[str, tuple[int, int]](), dict[str, int]()
    deterministic = data.draw(st.booleans())
    for index in range(data.draw(st.integers(2, 5))):
        depth = data.draw(st.sampled_from([2, 4, 8]))
        held = []
        for number in range(data.draw(st.integers(0, 6))):
            exits = data.draw(
                st.sampled_from(
                    [
                        BOUNDED,
                        STRICT,
                        replace(BOUNDED, max_depth=4),
                        replace(STRICT, max_depth=2),
                        ExitParams(1.0, "lossless"),
                    ]
                )
            )
            bounds = exits.depth_bounds(depth, deterministic=deterministic)
            name = f"s{index}-{number}"
            needs[name] = bounds
            (one,) = some(name, 1, float(data.draw(st.integers(10, 3000))), bounds)
            movable = data.draw(st.sampled_from([1.0, 1.0, PAUSED]))
            held.append(replace(one, sequence_id=name, movable=movable))
        depths[f"d{index}"] = depth
        capacity = data.draw(st.sampled_from([3000, 9000, 50_000]))
        snapshots.append(snapshot(f"d{index}", held, depth=depth, capacity=capacity))
    used = list[str]()
    for order in POLICY.tick(snapshots, COSTS):
        least, most = needs[order.sequence_id]
        there = depths[order.destination]
        assert least <= there <= (most or there)
        assert order.depth_class.depth == depths[order.source]
        if order.cause is MigrationCause.BALANCE:
            assert there >= depths[order.source]
        used += [order.source, order.destination]
    assert len(used) == len(set(used)), "each takes part in one move"
