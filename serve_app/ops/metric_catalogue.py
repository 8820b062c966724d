"""Every metric of the service, with its type, labels and meaning.

docs/metrics.md is made from it, and dashboards and alerts are checked against it; a running
service shows those of them that have been counted.
"""

from __future__ import annotations

from dataclasses import replace

from quadriga.control.control_metrics import ControllerMetrics, SchedulerMetrics
from quadriga.observability.cluster_metrics import ON_FIRST_USE
from quadriga.observability.metric_table import MetricTable
from quadriga.observability.metrics import Declared, Registry
from quadriga.replica.replica_metrics import ReplicaMetrics
from serve_app.http.server_metrics import HttpServerMetrics
from serve_app.ops.metrics import VIEW_GAUGES, VIEW_LABELS, IngressMetrics

HUB_LABEL = "replica"


def catalogue() -> dict[str, list[Declared]]:
    """Return the metrics by the process that counts them, labels as on the page."""
    lazy = Registry("decode")
    for rows in ON_FIRST_USE.values():
        MetricTable(lazy, rows)
    pushed = {
        "Ingress: what clients experience": IngressMetrics("ingress").registry,
        "HTTP servers: connections, and what never reached the application": (
            HttpServerMetrics().registry
        ),
        "Replicas: engine, exits, memory, hand-offs": ReplicaMetrics("replica", "m").registry,
        "Decode replicas: forecasts, migrations, depth, relay batch": lazy,
        "Scheduler: rescheduling": SchedulerMetrics("app").registry,
        "Controller: the fleet, HELIOS": ControllerMetrics("app").registry,
    }
    view = [Declared(n, "gauge", text, VIEW_LABELS) for n, text in VIEW_GAUGES.items()]
    return {
        **{
            title: [replace(m, labels=(*m.labels, HUB_LABEL)) for m in registry.declared]
            for title, registry in pushed.items()
        },
        "Load of each replica, as its scheduler knows it": view,
    }


def markdown() -> str:
    """Return docs/metrics.md."""
    parts = [HEAD]
    for title, metrics in catalogue().items():
        parts += [f"\n## {title}\n", "| metric | type | labels | meaning |", "|---|---|---|---|"]
        for metric in sorted(metrics, key=lambda m: m.name):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(parts) + "\n"


HEAD = """\
# Metrics

<!-- Made by `python deploy/metrics_table.py` from the code; change the texts there. -->

`GET /metrics` on the admin port, or with an admin's key on the API port, answers for the whole
cluster, whichever ingress is asked: scrape one of them. `replica` names the process that counted.
Its counters stay when it dies, its gauges go. The `vllm:` names are those that routers and tools
know. A metric appears once something has happened to it; histograms have `_bucket`, `_sum` and
`_count`. Times are seconds. Latencies of the ingress are the client's, end to end.
"""
