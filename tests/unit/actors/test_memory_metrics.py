"""Pauses and the relay batch on the metrics page: gauges follow, counters only rise."""

from __future__ import annotations

from actors.metrics.replica_metrics import ReplicaMetrics
from quadriga.control.replica_record import ReplicaLoad
from quadriga.core.replica import RelayMemory
from quadriga.observability.metrics import MetricsHub, parse_exposition


def page(metrics: ReplicaMetrics) -> dict[str, float]:
    """Every metric of the replica's page, its labels added up."""
    hub = MetricsHub()
    hub.push("d0", metrics.registry.snapshot(), now_s=0.0)
    found: dict[str, float] = {}
    for series, value in parse_exposition(hub.exposition(now_s=0.0).decode()).items():
        name = series.split("{")[0]
        found[name] = found.get(name, 0.0) + value
    return found


def test_pauses() -> None:
    metrics = ReplicaMetrics("d0", "m")
    metrics.gauges(ReplicaLoad(num_paused=2, paused_bytes=4096, num_pauses=3, num_resumes=1), 0)
    metrics.gauges(ReplicaLoad(num_pauses=5, num_resumes=5), 0)
    found = page(metrics)
    assert found["quadriga_paused_sequences"] == found["quadriga_paused_kv_bytes"] == 0.0
    assert (found["quadriga_pauses_total"], found["quadriga_resumes_total"]) == (5.0, 5.0)
    assert found["vllm:num_preemptions_total"] == 5.0
    assert not any(key.startswith("quadriga_relay") for key in found), "this is no relay batch"


def test_relay_batch() -> None:
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


def test_violations() -> None:
    metrics = ReplicaMetrics("d0", "m")
    assert page(metrics)["quadriga_integrity_violations_total"] == 0.0
    metrics.violated()
    assert page(metrics)["quadriga_integrity_violations_total"] == 1.0
