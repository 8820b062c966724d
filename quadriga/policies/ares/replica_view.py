"""What operators see of a replica: its load, and its forecast at a few points."""

from __future__ import annotations

import math
from typing import Any

from quadriga.core.replica import ReplicaSnapshot
from quadriga.policies.ares.forecast import numbers, seconds_to_full

SHOWN_POINTS = (0, 1, 3, 5, 8, 10)
"""Of the horizon: with a step of 20 ms, now and 0.4, 1.1, 2.9, 13 and 34 s ahead."""


def replica_view(snapshot: ReplicaSnapshot, *, now_unix_s: float) -> dict[str, Any]:
    """What operators see of a replica.

    Returns:
        `forecast` is a list of {ahead_s, step_s, tokens}, empty without one; `seconds_to_full` is
        None where the memory does not fill within the horizon.
    """
    info, forecast = snapshot.info, snapshot.forecast
    points: list[dict[str, float]] = []
    full_s = math.inf
    if forecast is not None:
        load, tokens = numbers(forecast.load_s), numbers(forecast.tokens)
        points = [
            {
                "ahead_s": forecast.grid_s[i],
                "step_s": forecast.base_s + float(load[i]),
                "tokens": float(tokens[i]),
            }
            for i in SHOWN_POINTS
        ]
        full_s = seconds_to_full(forecast, info.kv_capacity_tokens)
    return {
        "name": info.name,
        "role": info.role.value,
        "depth_class": str(info.depth_class),
        "age_s": max(0.0, now_unix_s - snapshot.taken_unix_s),
        "num_running": snapshot.num_running,
        "num_waiting": snapshot.num_waiting,
        "num_paused": snapshot.num_paused,
        "num_slots": info.num_slots,
        "used_tokens": snapshot.used_tokens,
        "reserved_tokens": snapshot.reserved_tokens,
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "tokens_per_s": snapshot.tokens_per_s,
        "step_s": snapshot.step_time_s,
        "cached_share": snapshot.cached_share,
        "is_draining": snapshot.draining,
        "is_scout": snapshot.is_scout,
        "has_predictions": forecast is not None and forecast.has_predictions,
        "forecast": points,
        "seconds_to_full": full_s if math.isfinite(full_s) else None,
    }
