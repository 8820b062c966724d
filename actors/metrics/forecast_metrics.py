"""A decode replica's forecast, and what it costs, as metrics."""

from __future__ import annotations

import numpy as np

from actors.replica.forecasting import Forecasting
from quadriga.core.forecast import LoadForecast
from quadriga.observability.metrics import Registry
from quadriga.policies.ares.forecast import seconds_to_full

AHEAD_POINTS = (0, 1, 5, 10)
"""Points of the horizon that are exported; all of them would be many series."""
_WIRE = np.dtype("<f4")


class ForecastMetrics:
    """Gauges of the last forecast; counters of the predictions behind it."""

    def __init__(self, registry: Registry) -> None:
        self._step = registry.gauge(
            "quadriga_forecast_step_seconds",
            "Predicted time of a decode step, so many seconds ahead.",
            ["ahead_seconds"],
        )
        self._tokens = registry.gauge(
            "quadriga_forecast_kv_tokens",
            "Predicted KV tokens held, so many seconds ahead.",
            ["ahead_seconds"],
        )
        self._full = registry.gauge(
            "quadriga_seconds_to_out_of_memory",
            "Until the forecast exceeds the KV memory; +Inf where it does not.",
        )
        self._predictions = registry.counter(
            "quadriga_length_predictions_total", "Predictions of running sequences' lengths."
        )
        self._seconds = registry.counter(
            "quadriga_forecast_seconds_total",
            "Engine time spent on predicting lengths, and on writing down who is held.",
            ["part"],
        )
        self._seen = (0, 0.0, 0.0)

    def update(self, forecast: LoadForecast, capacity_tokens: int, source: Forecasting) -> None:
        """Export the last forecast, and what it took."""
        load = np.frombuffer(forecast.load_s, dtype=_WIRE)
        tokens = np.frombuffer(forecast.tokens, dtype=_WIRE)
        for point in AHEAD_POINTS:
            ahead = f"{forecast.grid_s[point]:.3g}"
            self._step.labels(ahead_seconds=ahead).set(forecast.base_s + float(load[point]))
            self._tokens.labels(ahead_seconds=ahead).set(float(tokens[point]))
        self._full.set(seconds_to_full(forecast, capacity_tokens))
        asking = source.asking
        now = (
            0 if asking is None else asking.num_predictions,
            0.0 if asking is None else asking.seconds,
            source.seconds,
        )
        self._predictions.inc(now[0] - self._seen[0])
        self._seconds.labels(part="predict").inc(now[1] - self._seen[1])
        self._seconds.labels(part="hold").inc(now[2] - self._seen[2])
        self._seen = now
