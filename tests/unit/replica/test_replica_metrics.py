"""A replica's metrics: gauges follow, counters only rise; and its exits as operators see them."""

from __future__ import annotations

from quadriga.checkpoint.exits import ExitCounters
from quadriga.control.replica_record import ReplicaLoad
from quadriga.core.replica import RelayMemory
from quadriga.observability.exits_view import exits_view
from quadriga.observability.metrics import MetricsHub, parse_exposition
from quadriga.replica.replica_metrics import ReplicaMetrics


def page(metrics: ReplicaMetrics) -> dict[str, float]:
    """Every metric of the replica's page, its labels added up."""
    hub = MetricsHub()
    hub.push("d0", metrics.registry.snapshot(), now_s=0.0)
    found: dict[str, float] = {}
    for series, value in parse_exposition(hub.exposition(now_s=0.0).decode()).items():
        name = series.split("{")[0]
        found[name] = found.get(name, 0.0) + value
    return found


def test_pauses_are_counted_and_the_paused_are_shown() -> None:
    metrics = ReplicaMetrics("d0", "m")
    metrics.gauges(ReplicaLoad(num_paused=2, paused_bytes=4096, num_pauses=3, num_resumes=1), 0)
    metrics.gauges(ReplicaLoad(num_pauses=5, num_resumes=5), 0)
    found = page(metrics)
    assert found["quadriga_paused_sequences"] == found["quadriga_paused_kv_bytes"] == 0.0
    assert (found["quadriga_pauses_total"], found["quadriga_resumes_total"]) == (5.0, 5.0)
    assert found["vllm:num_preemptions_total"] == 5.0
    assert not any(key.startswith("quadriga_relay") for key in found), "this is no relay batch"


def test_a_relay_batch_shows_its_memory_and_padding() -> None:
    metrics = ReplicaMetrics("d0", "m")
    metrics.gauges(ReplicaLoad(relay=RelayMemory(2, 10, 640, 64, 5, 20, 5)), 0)
    metrics.gauges(ReplicaLoad(relay=RelayMemory(3, 12, 960, 0, 4, 56, 9)), 0)
    found = page(metrics)
    assert found["quadriga_relay_rows"] == 3.0
    assert found["quadriga_relay_width_tokens"] == 12.0
    assert found["quadriga_relay_padding_cells"] == 4.0
    assert found["quadriga_relay_kv_bytes"] == 960.0
    assert found["quadriga_relay_attended_cells_total"] == 56.0
    assert found["quadriga_relay_idle_cells_total"] == 9.0


def test_integrity_violations_start_at_0() -> None:
    metrics = ReplicaMetrics("d0", "m")
    assert page(metrics)["quadriga_integrity_violations_total"] == 0.0
    metrics.violated()
    assert page(metrics)["quadriga_integrity_violations_total"] == 1.0


def test_a_total_that_begins_anew_makes_no_counter_fall() -> None:
    metrics = ReplicaMetrics("d0", "m")
    for num_pauses in (5, 2, 3):
        metrics.gauges(ReplicaLoad(num_pauses=num_pauses), 0)
    assert page(metrics)["quadriga_pauses_total"] == 8.0


def view_of(metrics: ReplicaMetrics) -> dict[str, object]:
    hub = MetricsHub()
    hub.push("d0", metrics.registry.snapshot(), now_s=0.0)
    return exits_view(hub).get("d0", {})


def test_an_exit_has_one_use_at_a_time() -> None:
    metrics = ReplicaMetrics("d0", "m")
    metrics.gauges(ReplicaLoad(exits=ExitCounters(), exit_uses={10: "idle", 2: "idle"}), 0)
    assert view_of(metrics)["uses"] == {"2": "idle", "10": "idle"}
    metrics.gauges(
        ReplicaLoad(exits=ExitCounters(), exit_uses={10: "tested", 2: "not_worth_it"}), 0
    )
    metrics.gauges(ReplicaLoad(exits=ExitCounters(), exit_uses={10: "tested", 2: "idle"}), 0)
    assert view_of(metrics)["uses"] == {"2": "idle", "10": "tested"}
    assert view_of(metrics)["tokens"] == {}, "nothing has run, and it says so all the same"


def test_tokens_and_uses_stand_side_by_side() -> None:
    metrics = ReplicaMetrics("d0", "m")
    counters = ExitCounters(tokens={8: 30})
    metrics.gauges(ReplicaLoad(exits=counters, exit_uses={2: "full_depth_asked"}), 0)
    found = view_of(metrics)
    assert found["tokens"] == {"8": 30.0}
    assert found["uses"] == {"2": "full_depth_asked"}


def test_a_replica_without_exits_shows_none() -> None:
    assert view_of(ReplicaMetrics("p0", "m")) == {}
