"""Streams are spread evenly over the decode replicas of a live service, however fast these are."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.rpc.lookup import scheduler_name
from quadriga.config.pacing import STEADY_15MS
from quadriga.core.migration import MigrationCause
from quadriga.policies.ares.cluster import relative_work, unpack, weights
from quadriga.policies.ares.recording import RecordedTick, read_ticks, replay
from tests.ray.apps import App
from tests.ray.ingress import Ingress, Stream, call
from tests.ray.moves import set_device

NUM_STREAMS = 24
NUM_AT_ONCE = 48
DEADLINE_S = 280.0
PATIENCE_S = 120.0
NUM_OUTPUT = 1_500
SLOWER = (6.0, 20.0)
"""Steps of 90 and 300 ms: one replica's sequences are soon further than the other's, and none of
them ends before the last one is placed."""


@pytest.fixture(scope="module")
def uneven(ray_cluster: None, recording: Path) -> Iterator[App]:
    """Two equal decode replicas; on this machine, one steps much faster than the other."""
    app = App.start(
        "uneven",
        **{
            "decode_replicas": 2,
            "decode.pace": STEADY_15MS.name,
            "decode.rebatching": "off",
            "scheduler.ares.interval_s": 0.5,
            "scheduler.ares.record_file": str(recording),
            "lifecycle.orphan_timeout_s": 300.0,
        },
    )
    for name, slower in zip(sorted(app.replicas("decode")), SLOWER, strict=True):
        slow_down(name, slower)
    yield app
    app.stop()


def slow_down(replica: str, factor: float) -> None:
    """Make a paced replica's steps so many times as long as its profile says."""
    profile = replace(
        STEADY_15MS,
        base_s=factor * STEADY_15MS.base_s,
        per_sequence_s=factor * STEADY_15MS.per_sequence_s,
        per_token_s=factor * STEADY_15MS.per_token_s,
    )
    set_device(replica, profile)


def spread(streams: list[Stream], app: App) -> list[int]:
    """Streams by decode replica, as far as they are placed."""
    counts = Counter(s.replica for s in streams)
    return [counts[name] for name in app.replicas("decode")]


def submit_until_placed(ingress: Ingress, max_tokens: int, index: int) -> Stream:
    """Submit a stream and wait until it decodes: its second token is of the replica it is at."""
    stream = ingress.submit([5 + index % 40] * 12, max_tokens, deadline_s=DEADLINE_S)
    ingress.until(lambda: len(stream.tokens) > 1, PATIENCE_S)
    return stream


def submit_at_once(ingress: Ingress, count: int) -> list[Stream]:
    """Submit streams, and wait until all of them decode."""
    streams = [ingress.submit([60] * 12, NUM_OUTPUT, deadline_s=DEADLINE_S) for _ in range(count)]
    ingress.until(lambda: all(len(s.tokens) > 1 for s in streams), PATIENCE_S)
    assert not any(s.is_over for s in streams)
    return streams


@pytest.mark.timeout(300)
@pytest.mark.parametrize("placement", ["least_work", "least_requests"])
def test_equal_streams_are_spread_evenly(uneven: App, placement: str) -> None:
    """One after the other, each when the one before decodes; and then as many at once."""
    uneven.ensure(**{"scheduler.placement": placement, "scheduler.ares.mode": "off"})
    ingress = uneven.ingress()
    streams: list[Stream] = []
    for index in range(NUM_STREAMS // 2):
        streams.append(submit_until_placed(ingress, NUM_OUTPUT, index))
        counts = spread(streams, uneven)
        assert abs(counts[0] - counts[1]) <= 1, counts
    streams += submit_at_once(ingress, NUM_STREAMS // 2)
    assert not any(s.is_over for s in streams)
    assert spread(streams, uneven) == [NUM_STREAMS // 2] * 2
    ingress.cancel(*streams)
    uneven.until_idle(20.0)


@pytest.mark.timeout(300)
def test_many_at_once_are_spread_evenly(uneven: App) -> None:
    uneven.ensure(**{"scheduler.placement": "least_work", "scheduler.ares.mode": "off"})
    ingress = uneven.ingress()
    streams = submit_at_once(ingress, NUM_AT_ONCE)
    assert spread(streams, uneven) == [NUM_AT_ONCE // 2] * 2
    ingress.cancel(*streams)
    uneven.until_idle(20.0)


@pytest.mark.timeout(300)
def test_unequal_work_is_evened_out_and_nothing_moves_to_the_fuller(
    uneven: App, recording: Path
) -> None:
    """Every second stream is long, so that placement by number puts all of these on one replica."""
    uneven.ensure(**{"scheduler.placement": "least_work", "scheduler.ares.mode": "ares"})
    ingress = uneven.ingress()
    lengths = itertools.islice(itertools.cycle((NUM_OUTPUT, 300)), NUM_STREAMS)
    streams = [submit_until_placed(ingress, tokens, i) for i, tokens in enumerate(lengths)]

    def work() -> list[float]:
        view = call(scheduler_name(uneven.name), "operators_view", timeout_s=10.0)
        return list(view["last_tick"]["work"].values())

    ingress.until(lambda: len(work()) == 2 and float(np.ptp(work())) <= 0.1, 120.0)
    assert [s.error for s in streams] == [None] * NUM_STREAMS
    ingress.cancel(*streams)
    ticks = list(read_ticks(recording))
    assert replay(ticks) == []
    orders = [(tick, order) for tick in ticks for order in tick.orders]
    assert orders
    for tick, order in orders:
        if order.cause is MigrationCause.BALANCE:
            found = works(tick)
            assert found[order.source] > found[order.destination]


@pytest.mark.timeout(300)
def test_a_service_as_it_comes_spreads_equal_streams_evenly(uneven: App) -> None:
    """Placement and moves by forecast, over replicas that are equally fast."""
    for name in uneven.replicas("decode"):
        slow_down(name, 1.0)
    uneven.ensure(**{"scheduler.placement": "ares", "scheduler.ares.mode": "ares"})
    ingress = uneven.ingress()
    for _ in range(2):
        streams = submit_at_once(ingress, NUM_STREAMS)
        counts = spread(streams, uneven)
        assert abs(counts[0] - counts[1]) <= 2, counts
        ingress.cancel(*streams)
        uneven.until_idle(20.0)


def works(tick: RecordedTick) -> dict[str, float]:
    """Forecast work by replica, as the scheduler saw it."""
    cluster = unpack(tick.snapshots)
    assert cluster is not None
    return relative_work(cluster, weights(tick.settings, load_only=tick.load_only))
