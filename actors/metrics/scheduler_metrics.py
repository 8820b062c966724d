"""What the scheduler counts of its rescheduling, and how it reaches the hub at the controller."""

from __future__ import annotations

import logging
import uuid

from actors.rpc.lifecycle import controller_name, scheduler_name
from actors.rpc.ray_rpc import call
from quadriga.core.forecast import LengthOutcome
from quadriga.core.migration import MigrationOrder, MigrationReport
from quadriga.errors import QuadrigaError
from quadriga.observability.metrics import Registry
from quadriga.policies.ares.governor import Governor

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 1.0
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000)
DECISION_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3)


class SchedulerMetrics:
    """Counters and gauges of one scheduler process.

    Its source is new with every process: a successor starts at nought, and no counter may fall.
    """

    def __init__(self, app: str) -> None:
        self._app = app
        registry = Registry(f"{scheduler_name(app)}:{uuid.uuid4().hex[:8]}")
        self.registry = registry
        self._ordered = registry.counter(
            "quadriga_migrations_ordered_total", "Moves the scheduler ordered.", ["cause"]
        )
        self._ended = registry.counter(
            "quadriga_migration_orders_ended_total",
            "Orders that came to an end, by cause and outcome.",
            ["cause", "outcome"],
        )
        self._under_way = registry.gauge("quadriga_migrations_under_way", "Orders that are out.")
        self._decision = registry.histogram(
            "quadriga_rescheduling_decision_seconds",
            "Time of one rescheduling decision.",
            buckets=DECISION_BUCKETS_S,
        )
        self._error = registry.histogram(
            "quadriga_length_prediction_error_tokens",
            "Of sequences that ended by themselves: their length, against what was predicted of it "
            "when they began.",
            ["model_name"],
            buckets=TOKEN_BUCKETS,
        )
        self._inside = registry.counter(
            "quadriga_length_predictions_inside_total",
            "Of these, lengths inside the predicted range (10 % to 90 %).",
            ["model_name"],
        )
        self._coverage = registry.gauge(
            "quadriga_length_prediction_coverage",
            "Share of lengths inside the predicted range, recent first; 0.8 is calibrated.",
            ["model_name"],
        )
        self._distrusted = registry.gauge(
            "quadriga_length_predictions_distrusted",
            "1 while a model's predictions do not hold and the present load decides.",
            ["model_name"],
        )
        self._bandwidth = registry.gauge(
            "quadriga_migration_bandwidth_bytes_per_second", "As decisions reckon with it."
        )

    def ordered(self, order: MigrationOrder) -> None:
        self._ordered.labels(cause=order.cause.value).inc()

    def ended(self, order: MigrationOrder, report: MigrationReport) -> None:
        self._ended.labels(cause=order.cause.value, outcome=report.outcome).inc()

    def decided(self, seconds: float) -> None:
        self._decision.observe(seconds)

    def lengths(self, model: str, outcomes: list[LengthOutcome]) -> None:
        """Sequences of a model ended by themselves."""
        for outcome in outcomes:
            said, truth = outcome.prediction, outcome.remaining_tokens
            self._error.labels(model_name=model).observe(abs(said.mean - truth))
            if said.lower <= truth <= said.upper:
                self._inside.labels(model_name=model).inc()

    def gauges(self, governor: Governor) -> None:
        """Set what describes the present."""
        self._under_way.set(len(governor.book.under_way))
        self._bandwidth.set(governor.bandwidth_bytes_per_s)
        for model, monitor in governor.drift.items():
            self._coverage.labels(model_name=model).set(monitor.coverage)
            self._distrusted.labels(model_name=model).set(monitor.is_drifting)

    async def push(self) -> None:
        """Send all values to the hub; a lost push costs nothing, the next one has them too."""
        try:
            await call(
                controller_name(self._app),
                "push_metrics",
                self.registry.source,
                self.registry.snapshot(),
                timeout_s=PUSH_TIMEOUT_S,
            )
        except QuadrigaError as exc:
            logger.debug("metrics not pushed: %s", exc)
