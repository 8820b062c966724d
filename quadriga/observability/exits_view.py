"""Exits of every replica, as the live page and `loadgen watch` show them."""

from __future__ import annotations

from typing import Any

from quadriga.observability.metrics import MetricsHub

COUNTERS = {
    "breaches": "quadriga_breaches_total",
    "lowered": "quadriga_lowered_tokens_total",
    "involuntary_exits": "quadriga_involuntary_exits_total",
    "involuntary_stays": "quadriga_involuntary_stays_total",
    "drafted": "quadriga_drafted_tokens_total",
    "accepted": "quadriga_accepted_drafts_total",
}


DEPTHS = {
    "tokens": "quadriga_depth_forecast_tokens_total",
    "expected": "quadriga_depth_expected_layers_total",
    "run": "quadriga_depth_run_layers_total",
}


def exits_view(hub: MetricsHub) -> dict[str, dict[str, Any]]:
    """Return, by replica: {tokens: {layers run: tokens}, each of `COUNTERS`, uses, and depths}.

    Counts are cumulative since each replica's start; a display takes differences. `uses`
    is {layers run: `ExitUse`}, of all exits of the model; `depths` is {tenth of the layers that
    was expected: {each of `DEPTHS`}}.
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
    for view in found.values():
        view["depths"] = {}
    for field, name in DEPTHS.items():
        for source, values in hub.values(name).items():
            for labels, value in values.items() if source in found else ():
                found[source]["depths"].setdefault(dict(labels)["tenth"], {})[field] = value
    return found
