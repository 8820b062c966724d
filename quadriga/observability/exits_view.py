"""Exits of every replica, as the live page and `loadgen watch` show them."""

from __future__ import annotations

from typing import Any

from quadriga.observability.metrics import MetricsHub

COUNTERS = {
    "breaches": "quadriga_breaches_total",
    "involuntary_exits": "quadriga_involuntary_exits_total",
    "involuntary_stays": "quadriga_involuntary_stays_total",
    "drafted": "quadriga_drafted_tokens_total",
    "accepted": "quadriga_accepted_drafts_total",
}


def exits_view(hub: MetricsHub) -> dict[str, dict[str, Any]]:
    """Return, by replica: {tokens: {layers run: tokens}, each of `COUNTERS`, and uses}.

    Counts are cumulative since each replica's start; a display takes differences. `uses`
    is {layers run: `ExitUse`}, of all exits of the model.
    """
    tokens = hub.values("quadriga_exit_tokens_total")
    uses = hub.values("quadriga_exit_use")
    found: dict[str, dict[str, Any]] = {}
    for source in tokens | uses:
        ran = {dict(labels)["layer"]: n for labels, n in tokens.get(source, {}).items()}
        now = [dict(labels) for labels, is_true in uses.get(source, {}).items() if is_true]
        found[source] = {
            "tokens": dict(sorted(ran.items(), key=lambda kv: int(kv[0]))),
            "uses": {
                use["layer"]: use["use"] for use in sorted(now, key=lambda u: int(u["layer"]))
            },
        }
    for field, name in COUNTERS.items():
        counted = hub.values(name)
        for source, view in found.items():
            view[field] = sum(counted.get(source, {}).values())
    return found
