"""Counters and gauges of one replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quadriga.core.forecast import LoadForecast
from quadriga.core.migration import MigrationCause, MigrationReport
from quadriga.core.output import EngineOutput
from quadriga.core.replica import ReplicaInfo, ResizeReport
from quadriga.observability.cluster_metrics import (
    EVENTS,
    LOAD,
    ON_FIRST_USE,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    TRANSPORTS,
)
from quadriga.observability.metric_table import MetricTable
from quadriga.observability.metrics import Registry
from quadriga.policies.ares.forecast import numbers, seconds_to_full

if TYPE_CHECKING:
    from quadriga.control.replica_record import ReplicaLoad
    from quadriga.kv_transport.counts import TransportCounts
    from quadriga.replica.forecasting import Forecasting

AHEAD_POINTS = (0, 1, 5, 10)
"""Points of the horizon that are exported; all of them would be many series."""


@dataclass(frozen=True, slots=True)
class ForecastFigures:
    """What is exported of a forecast; series by the seconds ahead, at `AHEAD_POINTS`."""

    step_s: dict[str, float]
    kv_tokens: dict[str, float]
    seconds_to_full: float
    num_predictions: int
    engine_s: dict[str, float]
    depth_tokens: dict[str, float]
    depth_expected: dict[str, float]
    depth_run: dict[str, float]


class ReplicaMetrics:
    """Counters and gauges of one replica; the label `replica` is added by the hub."""

    def __init__(self, name: str, model: str) -> None:
        self.registry = Registry(name)
        self._events = MetricTable(self.registry, EVENTS)
        self._emitted = self._events.metric("quadriga_emitted_tokens_total")
        by_model = (
            replace(PREEMPTIONS, read=lambda load: {model: load.num_pauses}),
            replace(
                PREFIX_QUERIES, read=lambda load: load.prefixes and {model: load.prefixes.queries}
            ),
            replace(PREFIX_HITS, read=lambda load: load.prefixes and {model: load.prefixes.hits}),
        )
        self._load = MetricTable(self.registry, (*LOAD, *by_model))
        self._transports = MetricTable(self.registry, TRANSPORTS)
        self._others: dict[str, MetricTable] = {}

    def _table(self, name: str) -> MetricTable:
        """One of `ON_FIRST_USE`."""
        if name not in self._others:
            self._others[name] = MetricTable(self.registry, ON_FIRST_USE[name])
        return self._others[name]

    def count(self, outputs: Sequence[tuple[str, EngineOutput]]) -> None:
        """Count what (ingress id, output) pairs carry."""
        self._emitted.inc(sum(len(output.token_ids) for _, output in outputs))
        for _, output in outputs:
            if output.error is not None:
                self._events.metric("quadriga_sequence_errors_total", output.error.code).inc()

    def handed_off(self, seconds: float, num_bytes: int) -> None:
        """Count a hand-off that was committed."""
        self._events.metric("quadriga_handoffs_total", "committed").inc()
        self._events.metric("quadriga_handoff_seconds").observe(seconds)
        self._events.metric("quadriga_handoff_bytes").observe(num_bytes)

    def handoff_failed(self, code: str) -> None:
        """Count a hand-off that failed, by its error's code."""
        self._events.metric("quadriga_handoffs_total", code).inc()

    def violated(self) -> None:
        """Count a contradiction in the engine's own accounts."""
        self._events.metric("quadriga_integrity_violations_total").inc()

    def migrated(self, cause: MigrationCause, report: MigrationReport) -> None:
        """Count the end of an order to migrate a running sequence."""
        table = self._table("migrations")
        table.metric("quadriga_migrations_total", cause.value, report.outcome).inc()
        if report.stall_s:
            table.metric("quadriga_migration_stall_seconds").observe(report.stall_s)
        if report.outcome == "moved":
            table.metric("quadriga_migration_bytes").observe(report.bytes_sent)
            table.metric("quadriga_migration_seconds").observe(report.took_s)
            table.metric("quadriga_migration_rounds").observe(report.rounds)

    def resized(self, report: ResizeReport, info: ReplicaInfo) -> None:
        """Count the end of an order to load or drop layers."""
        table = self._table("resizes")
        table.metric("quadriga_resizes_total", report.outcome).inc()
        if report.outcome == "resized":
            table.metric("quadriga_resize_seconds").observe(report.took_s)
            if report.depth > report.before:
                table.metric("quadriga_resize_load_seconds").observe(report.load_s)
        table.metric("quadriga_loaded_layers").set(info.depth_class.depth)
        if report.weight_bytes:
            table.metric("quadriga_weight_bytes").set(report.weight_bytes)

    def forecast(
        self, forecast: LoadForecast | None, capacity_tokens: int, source: Forecasting
    ) -> None:
        """Export the last forecast, and what it took; None: there is none any more."""
        if forecast is None:
            if "forecast" in self._others:
                self._table("forecast").update(None)
            return
        load = forecast.base_s + numbers(forecast.load_s).astype(np.float64)
        tokens = numbers(forecast.tokens)
        ahead = {f"{forecast.grid_s[point]:.3g}": point for point in AHEAD_POINTS}
        asking, depths = source.asking, source.depths_by_tenth
        figures = ForecastFigures(
            step_s={label: float(load[point]) for label, point in ahead.items()},
            kv_tokens={label: float(tokens[point]) for label, point in ahead.items()},
            seconds_to_full=seconds_to_full(forecast, capacity_tokens),
            num_predictions=asking.num_predictions if asking else 0,
            engine_s={"predict": asking.seconds if asking else 0.0, "hold": source.seconds},
            depth_tokens={tenth: one.tokens for tenth, one in depths.items()},
            depth_expected={tenth: one.expected for tenth, one in depths.items()},
            depth_run={tenth: one.run for tenth, one in depths.items()},
        )
        self._table("forecast").update(figures)

    def sent(self, counts: TransportCounts) -> None:
        """Export what the replica's transports have sent."""
        self._transports.update(counts)

    def gauges(self, load: ReplicaLoad, num_fallbacks: int) -> None:
        """Export the load, and the counts since the start."""
        self._load.update(load)
        self._events.metric("quadriga_kv_transport_fallbacks").set(num_fallbacks)
        if load.relay is not None:
            self._table("relay").update(load.relay)
