"""What a real cluster's scheduler saw, decided again by the simulator's policy.

`recorded_ticks.jsonl` holds some reports of one run of `loadgen bench simulator --record`: three
paced decode replicas under a heavy-tailed load, as they came; their rows were rewritten when the
form of a forecast changed, and the orders are what the policy made of them then. Where a policy is
changed on purpose, record anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quadriga.core.migration import MigrationCause
from quadriga.policies.ares.cluster import classify, unpack, weights
from quadriga.policies.ares.recording import RecordedTick, read_ticks, replay
from quadriga.sim.policies import make_policy
from quadriga.sim.recorder import snapshots_of

RECORDED = Path(__file__).with_name("recorded_ticks.jsonl")


@pytest.fixture(scope="module")
def ticks() -> list[RecordedTick]:
    return list(read_ticks(RECORDED))


def test_the_simulators_policy_decides_as_recorded(ticks: list[RecordedTick]) -> None:
    for tick in ticks:
        policy = make_policy("ares", tick.settings)
        assert policy.rescheduler is not None
        assert policy.rescheduler.settings == tick.settings
        orders = policy.rescheduler.tick(
            tick.snapshots, tick.costs, busy=tick.busy, load_only=tick.load_only
        )
        assert orders == tick.orders
    causes = {order.cause for tick in ticks for order in tick.orders}
    assert causes == {MigrationCause.BALANCE, MigrationCause.MEMORY}
    assert any(not tick.orders for tick in ticks)


def test_packed_as_the_simulator_packs_them_the_snapshots_say_the_same(
    ticks: list[RecordedTick],
) -> None:
    for tick in ticks:
        whole = unpack(tick.snapshots, None)
        assert whole is not None
        repacked = snapshots_of(whole, tick.snapshots[0].info.num_slots, tick.at_s, base_s=0.0)
        for before, after in zip(tick.snapshots, repacked, strict=True):
            # A simulated cluster is of one class; which one does not matter to the decision.
            after.info = replace(after.info, depth_class=before.info.depth_class)
        assert not replay([replace(tick, snapshots=repacked)])


def test_the_recording_would_show_another_policy(ticks: list[RecordedTick]) -> None:
    other = [replace(t, settings=replace(t.settings, max_moves=0)) for t in ticks]
    assert len(replay(other)) == sum(bool(t.orders) for t in ticks)
    first = next(t for t in ticks if t.orders)
    cluster = unpack(first.snapshots, None)
    assert cluster is not None
    roles = classify(cluster, first.settings, weights(first.settings, load_only=False), first.busy)
    sources = {cluster.names[i] for i in roles.sources}
    assert {o.source for o in first.orders} <= sources
