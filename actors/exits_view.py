"""What the replicas count at their exits, as plain values for the live page."""

from __future__ import annotations

from typing import Any

from quadriga.metrics import MetricsHub

COUNTERS = {
    "breaches": "quadriga_breaches_total",
    "involuntary_exits": "quadriga_involuntary_exits_total",
    "involuntary_stays": "quadriga_involuntary_stays_total",
}


def exits_view(hub: MetricsHub) -> dict[str, dict[str, Any]]:
    """Return, by replica: {tokens: {layers run: tokens}, and each of `COUNTERS`}.

    Cumulative since each replica's start; whoever shows it takes differences.
    """
    found: dict[str, dict[str, Any]] = {}
    for source, series in hub.values("quadriga_exit_tokens_total").items():
        tokens = {dict(labels)["layer"]: value for labels, value in series.items()}
        found[source] = {"tokens": dict(sorted(tokens.items(), key=lambda kv: int(kv[0])))}
    for field, name in COUNTERS.items():
        counted = hub.values(name)
        for source, view in found.items():
            view[field] = sum(counted.get(source, {}).values())
    return found
