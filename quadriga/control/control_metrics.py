"""What the scheduler counts of its rescheduling, and the controller of its replicas and HELIOS.

A process's source is new with every start: a successor begins at 0, and no counter may fall.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quadriga.control.replica_record import ReplicaPhase
from quadriga.core.forecast import LengthOutcome
from quadriga.core.migration import MigrationOrder, MigrationReport
from quadriga.core.replica import Role
from quadriga.observability.cluster_metrics import CONTROLLER, SCHEDULER
from quadriga.observability.metric_table import MetricTable
from quadriga.observability.metrics import Registry
from quadriga.policies.ares.governor import Governor


class SchedulerMetrics:
    """Counters and gauges of one scheduler process.

    Args:
        scheduler: Its actor's name.
    """

    def __init__(self, scheduler: str) -> None:
        self.registry = Registry(f"{scheduler}:{uuid.uuid4().hex[:8]}")
        self._table = MetricTable(self.registry, SCHEDULER)

    def ordered(self, order: MigrationOrder) -> None:
        """Count an order that goes out."""
        self._table.metric("quadriga_migrations_ordered_total", order.cause.value).inc()

    def ended(self, order: MigrationOrder, report: MigrationReport) -> None:
        """Count the end of an order."""
        name = "quadriga_migration_orders_ended_total"
        self._table.metric(name, order.cause.value, report.outcome).inc()

    def decided(self, seconds: float) -> None:
        """Note the time of one decision."""
        self._table.metric("quadriga_rescheduling_decision_seconds").observe(seconds)

    def lengths(self, model: str, outcomes: list[LengthOutcome]) -> None:
        """Note sequences of a model that ended by themselves."""
        for outcome in outcomes:
            predicted, truth = outcome.prediction, outcome.remaining_tokens
            error = self._table.metric("quadriga_length_prediction_error_tokens", model)
            error.observe(abs(predicted.mean - truth))
            if predicted.lower <= truth <= predicted.upper:
                self._table.metric("quadriga_length_predictions_inside_total", model).inc()

    def gauges(self, governor: Governor) -> None:
        """Export the present."""
        self._table.update(governor)


@dataclass(frozen=True, slots=True)
class ControllerFigures:
    """What the controller exports; see `quadriga.observability.cluster_metrics.CONTROLLER`."""

    desired: dict[str, int]
    there: dict[tuple[str, str], int]
    num_respawns: int
    is_failing: bool
    helios_events: dict[str, int] | None
    breach_window: dict[str, float] | None


class ControllerMetrics:
    """Counters and gauges of one controller process, which pushes into its own hub."""

    def __init__(self, app: str) -> None:
        self.registry = Registry(f"{app}:controller:{uuid.uuid4().hex[:8]}")
        self._table = MetricTable(self.registry, CONTROLLER)

    def snapshot(
        self,
        desired: Iterable[Role],
        there: Iterable[tuple[Role, ReplicaPhase]],
        *,
        num_respawns: int,
        is_failing: bool,
        helios: dict[str, Any] | None = None,
    ) -> bytes:
        """Set everything as it is now; returns what `MetricsHub.push` takes.

        Args:
            helios: `HeliosController.view`; None where it is off.
        """
        wanted, found = Counter(desired), Counter(there)
        figures = ControllerFigures(
            desired={role.value: wanted[role] for role in Role},
            there={(r.value, p.value): found[r, p] for r in Role for p in ReplicaPhase},
            num_respawns=num_respawns,
            is_failing=is_failing,
            helios_events=helios and helios["counters"],
            breach_window=helios and helios["window"],
        )
        self._table.update(figures)
        return self.registry.snapshot()
