"""A replica's depth, and its changes, as metrics."""

from __future__ import annotations

from quadriga.core.replica import ReplicaInfo, ResizeReport
from quadriga.observability.metrics import Registry


class ResizeMetrics:
    """Made with the first change: who never changes has none of it."""

    def __init__(self, registry: Registry) -> None:
        self._orders = registry.counter(
            "quadriga_resizes_total", "Orders to load or drop layers, by outcome.", ["outcome"]
        )
        self._load = registry.histogram(
            "quadriga_resize_load_seconds", "Reading layers in the background."
        )
        self._took = registry.histogram(
            "quadriga_resize_seconds", "From the order to the new depth."
        )
        self._layers = registry.gauge("quadriga_loaded_layers", "Layers that are loaded.")
        self._bytes = registry.gauge("quadriga_weight_bytes", "Memory of the weights loaded.")

    def count(self, report: ResizeReport, info: ReplicaInfo) -> None:
        """An order has come to its end."""
        self._orders.labels(outcome=report.outcome).inc()
        if report.outcome == "resized":
            self._took.observe(report.took_s)
            if report.depth > report.before:
                self._load.observe(report.load_s)
        self._layers.set(info.depth_class.depth)
        if report.weight_bytes:
            self._bytes.set(report.weight_bytes)
