"""Live migrations out of a replica, as metrics."""

from __future__ import annotations

from quadriga.core.migration import MigrationCause, MigrationReport
from quadriga.observability.metrics import SIZE_BUCKETS_BYTES, Registry

ROUND_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)


class MigrationMetrics:
    """What became of orders to hand a running sequence over."""

    def __init__(self, registry: Registry) -> None:
        self._migrations = registry.counter(
            "quadriga_migrations_total",
            "Orders to move a running sequence, by cause and outcome.",
            ["cause", "outcome"],
        )
        self._bytes = registry.histogram(
            "quadriga_migration_bytes", "KV bytes of one migration.", buckets=SIZE_BUCKETS_BYTES
        )
        self._seconds = registry.histogram(
            "quadriga_migration_seconds", "From the order to the acknowledged commit."
        )
        self._stall = registry.histogram(
            "quadriga_migration_stall_seconds",
            "How long the sequence was at rest at the source, moved or not.",
        )
        self._rounds = registry.histogram(
            "quadriga_migration_rounds", "Rounds of copying.", buckets=ROUND_BUCKETS
        )

    def count(self, cause: MigrationCause, report: MigrationReport) -> None:
        """Count one order's end."""
        self._migrations.labels(cause=cause.value, outcome=report.outcome).inc()
        if report.stall_s:
            self._stall.observe(report.stall_s)
        if report.outcome == "moved":
            self._bytes.observe(report.bytes_sent)
            self._seconds.observe(report.took_s)
            self._rounds.observe(report.rounds)
