"""Exits on the metrics page and in the operators' view: what left there, and why nothing did."""

from __future__ import annotations

from actors.metrics.metrics_page import exits_view
from actors.metrics.replica_metrics import ReplicaMetrics
from quadriga.checkpoint.exits import ExitCounters
from quadriga.control.replica_record import ReplicaLoad
from quadriga.observability.metrics import MetricsHub


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


def test_a_replica_without_exits_has_none_to_tell_of() -> None:
    assert view_of(ReplicaMetrics("p0", "m")) == {}
