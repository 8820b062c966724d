from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quadriga.config.loader import load_config
from quadriga.core.replica import DepthClass, ReplicaInfo, ReplicaSnapshot, Role
from quadriga.core.routing import ClusterView
from quadriga.observability.metric_table import MetricTable, counter, gauge
from quadriga.observability.metrics import (
    GAUGE_MAX_AGE_S,
    LATENCY_BUCKETS_S,
    MAX_SOURCES,
    SIZE_BUCKETS_BYTES,
    MetricsHub,
    Registry,
    parse_exposition,
)
from serve_app.ops.metrics import endpoint_gauges, view_gauges


def make(source: str) -> tuple[Registry, MetricsHub]:
    registry = Registry(source)
    registry.counter("t_total", "Things.", ("kind",))
    return registry, MetricsHub()


def page(hub: MetricsHub, now_s: float = 0.0) -> dict[str, float]:
    return parse_exposition(hub.exposition(now_s=now_s).decode())


def test_sources_stand_side_by_side() -> None:
    hub = MetricsHub()
    for source, count in (("a", 2), ("b", 3)):
        registry = Registry(source)
        registry.counter("t_total", "Things.", ("kind",)).labels('x"\\').inc(count)
        hub.push(source, registry.snapshot(), now_s=0.0)
    text = hub.exposition(now_s=0.0).decode()
    assert text.count("# TYPE t_total counter") == 1
    assert 't_total{kind="x\\"\\\\",replica="a"} 2' in text
    assert 't_total{kind="x\\"\\\\",replica="b"} 3' in text


def test_histograms_hold_the_longest_request_and_the_kv_of_a_long_prompt() -> None:
    assert LATENCY_BUCKETS_S[-1] >= load_config({}).ingress.max_deadline_s
    assert SIZE_BUCKETS_BYTES[-1] >= 131_072 * 131_072, "128 k tokens of a model of 8 billion"


def test_a_late_push_never_overwrites_a_newer_one() -> None:
    registry = Registry("a")
    things = registry.counter("t_total", "Things.")
    old = registry.snapshot()
    things.inc()
    new = registry.snapshot()
    hub = MetricsHub()
    assert hub.push("a", new, now_s=0.0)
    assert not hub.push("a", old, now_s=1.0)
    assert page(hub)['t_total{replica="a"}'] == 1


def test_the_dead_keep_their_counters_and_lose_their_gauges() -> None:
    registry = Registry("a")
    registry.counter("t_total", "Things.").inc(5)
    registry.gauge("g", "Now.").set(1)
    registry.histogram("h", "Spread.", buckets=(1.0,)).observe(0.5)
    registry.counter("never_total", "Nothing.")
    hub = MetricsHub()
    hub.push("a", registry.snapshot(), now_s=0.0)
    assert page(hub)['g{replica="a"}'] == 1 and 'never_total{replica="a"}' in page(hub)
    later = page(hub, now_s=GAUGE_MAX_AGE_S + 1)
    assert not {'g{replica="a"}', 'never_total{replica="a"}'} & set(later), "nor what is zero"
    hub.push("b", Registry("b").snapshot(), now_s=GAUGE_MAX_AGE_S + 1)
    assert not hub.family("g") and not hub.family("never_total"), "nothing holds them"
    assert later['t_total{replica="a"}'] == 5
    assert later['h_bucket{le="+Inf",replica="a"}'] == 1


def filled(num_sources: int, now_s: Callable[[int], float]) -> MetricsHub:
    """A hub to which so many sources have pushed twice, one after the other."""
    hub = MetricsHub()
    for i in (*range(num_sources), *range(num_sources)):
        registry = Registry(f"s{i}")
        registry.counter("t_total", "Things.").inc(2)
        hub.push(registry.source, registry.snapshot(), now_s=now_s(i))
    return hub


def test_dead_sources_are_bounded_and_no_other_counts_what_they_did() -> None:
    values = page(filled(MAX_SOURCES + 20, float))
    assert set(values.values()) == {2} and len(values) == MAX_SOURCES
    assert f't_total{{replica="s{MAX_SOURCES + 19}"}}' in values, "the longest silent went"


def test_living_sources_are_all_kept() -> None:
    values = page(filled(MAX_SOURCES + 20, lambda i: 0.0))
    assert set(values.values()) == {2} and len(values) == MAX_SOURCES + 20


def test_a_successor_shows_what_its_predecessor_knew() -> None:
    registry, hub = make("a")
    registry.gauge("g", "Now.").set(7)
    registry.histogram("h", "Spread.", buckets=(1.0,)).observe(0.5)
    hub.push("a", registry.snapshot(), now_s=0.0)
    for i in range(MAX_SOURCES + 3):  # "a" and others are forgotten
        other = Registry(f"s{i}")
        other.counter("t_total", "Things.", ("kind",)).labels('x"').inc(2)
        hub.push(other.source, other.snapshot(), now_s=float(i + 1))
    before = page(hub, now_s=1e6)
    successor = MetricsHub()
    for _ in range(2):  # taking it twice changes nothing
        successor.restore(hub.dump(), now_s=0.0)
        assert page(successor, now_s=0.0) == before, "cumulative values all, gauges none"


def test_a_restored_hub_takes_newer_pushes_only() -> None:
    registry = Registry("a")
    counter = registry.counter("t_total", "Things.")
    counter.inc(3)
    hub, successor = MetricsHub(), MetricsHub()
    old = registry.snapshot()
    hub.push("a", old, now_s=0.0)
    dump = hub.dump()
    counter.inc()
    newer = registry.snapshot()
    successor.push("a", newer, now_s=0.0)
    successor.restore(dump, now_s=0.0)
    assert page(successor)['t_total{replica="a"}'] == 4, "the dump is older than the push"
    successor = MetricsHub()
    successor.restore(dump, now_s=0.0)
    assert not successor.push("a", old, now_s=0.0)
    assert successor.push("a", newer, now_s=0.0)
    assert page(successor)['t_total{replica="a"}'] == 4


def test_a_broken_dump_takes_nothing() -> None:
    _, hub = make("a")
    for data in (b"", b"{}", zlib.compress(b"[]"), zlib.compress(b'{"a": {"seq": 1}}')):
        with pytest.raises(ValueError, match="not a dump"):
            hub.restore(data, now_s=0.0)
    assert page(hub) == {}


def test_garbage_is_refused() -> None:
    for data in (b"", b"[]", b'{"seq": 1}', b'{"seq": 1, "families": [[1]]}'):
        with pytest.raises(ValueError, match="not a metrics snapshot"):
            MetricsHub().push("a", data, now_s=0.0)


def test_what_is_read_is_on_the_page_as_it_is_now() -> None:
    """A total that fell has begun anew; a gauge that is not read is 0, or not there with labels."""
    registry, hub = Registry("a"), MetricsHub()
    table = MetricTable(
        registry,
        (
            counter("t_total", "Things.", lambda n: {("y", "x"): n}, labels=("z", "kind")),
            gauge("now", "Things now.", lambda n: n if n > 2 else None),
            gauge("by", "Of a kind.", lambda n: {"x": n} if n > 2 else None, labels=("kind",)),
        ),
    )
    found = []
    for number in (3, 5, 1):
        table.update(number)
        assert hub.push("a", registry.snapshot(), now_s=0.0)
        found.append(page(hub))
    total, now, by = 't_total{kind="x",z="y",replica="a"}', 'now{replica="a"}', 'by{kind="x"'
    assert [p[total] for p in found] == [3, 5, 6]
    assert [p[now] for p in found] == [3, 5, 0]
    assert [any(name.startswith(by) for name in p) for p in found] == [True, True, False]


def test_creation_times_are_left_out() -> None:
    registry = Registry("a")
    registry.counter("t_total", "Things.").inc()
    assert b"_created" not in registry.snapshot()


def test_an_endpoint_picker_reads_one_series_of_each_name() -> None:
    """By the model server protocol: gauges, each of them once, the usage a share of 1."""

    def snapshot(name: str, role: Role, **load: int) -> ReplicaSnapshot:
        return ReplicaSnapshot(
            ReplicaInfo(name, role, DepthClass("m", 8), "n", "i", 4, 100), 0.0, **load
        )

    view = ClusterView(
        0.0,
        [
            snapshot("p0", Role.PREFILL, num_running=1, num_waiting=5, used_tokens=70),
            snapshot("d0", Role.DECODE, num_running=3, num_waiting=1, used_tokens=50),
            snapshot("d1", Role.DECODE, num_running=2, num_waiting=2, num_paused=2, used_tokens=10),
        ],
    )
    families = list(text_string_to_metric_families(endpoint_gauges(view, "m").decode()))
    assert {f.name: f.type for f in families} == dict.fromkeys(
        ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
        "gauge",
    )
    found = {sample.name: sample.value for f in families for sample in f.samples}
    assert sum(len(f.samples) for f in families) == len(found)
    assert found == {
        "vllm:num_requests_waiting": 7,  # queued at p0, paused at d1
        "vllm:num_requests_running": 6,
        "vllm:kv_cache_usage_perc": 0.3,
    }
    assert endpoint_gauges(ClusterView(0.0, []), "m")


def test_gauges_of_the_view() -> None:
    info = ReplicaInfo("d0", Role.DECODE, DepthClass("m", 8), "n", "i", 4, 100)
    view = ClusterView(0.0, [ReplicaSnapshot(info, 5.0, num_running=3, used_tokens=50)])
    values = parse_exposition(view_gauges(view, now_unix_s=10.0).decode())
    labels = '{depth="8",model_name="m",replica="d0",role="decode"}'
    assert values["vllm:num_requests_running" + labels] == 3
    assert values["vllm:kv_cache_usage_perc" + labels] == 0.5
    assert parse_exposition(view_gauges(view, now_unix_s=20.0).decode()) == {}, "that was long ago"
