"""What a replica counts, and how it reaches the hub at the controller."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.metrics.exit_metrics import ExitMetrics
from actors.metrics.forecast_metrics import ForecastMetrics
from actors.metrics.memory_metrics import PauseMetrics, RelayMetrics
from actors.metrics.migration_metrics import MigrationMetrics
from actors.metrics.resize_metrics import ResizeMetrics
from actors.metrics.transport_metrics import TransportMetrics
from actors.rpc.lifecycle import controller_name
from actors.rpc.ray_rpc import call
from quadriga.core.forecast import LoadForecast
from quadriga.core.migration import MigrationCause, MigrationReport
from quadriga.core.output import EngineOutput
from quadriga.core.replica import ReplicaInfo, ResizeReport
from quadriga.errors import QuadrigaError
from quadriga.observability.metrics import SIZE_BUCKETS_BYTES, Registry
from quadriga.scheduling.meters import StepTotals

if TYPE_CHECKING:
    from actors.kv_transfer.transports.counts import TransportCounts
    from actors.replica.forecasting import Forecasting
    from actors.replica.status import ReplicaLoad

logger = logging.getLogger(__name__)

PUSH_TIMEOUT_S = 1.0


class ReplicaMetrics:
    """Counters and gauges of one replica; the label `replica` is added by the hub."""

    def __init__(self, name: str, model: str) -> None:
        registry = Registry(name)
        self.registry = registry
        self._tokens = registry.counter("quadriga_emitted_tokens_total", "Tokens emitted.")
        self._steps = registry.counter(
            "quadriga_engine_steps_total", "Steps of the engine; tokens per step is the batch."
        )
        self._busy = registry.counter(
            "quadriga_engine_busy_seconds_total",
            "Engine time of its steps, and between two while there is work; idle time is not in.",
        )
        self._batched = registry.counter(
            "quadriga_engine_batched_sequences_total", "Sequences in a step's batch, summed."
        )
        self._attended = registry.counter(
            "quadriga_engine_batched_tokens_total",
            "Tokens of a step, summed. Decode: KV attended to. Prefill: prompt tokens computed.",
        )
        self._counted = StepTotals()
        self._errors = registry.counter(
            "quadriga_sequence_errors_total", "Sequences that ended in an error.", ["code"]
        )
        self._handoffs = registry.counter(
            "quadriga_handoffs_total", "Sequences moved to another replica, by result.", ["result"]
        )
        self._handoff_seconds = registry.histogram(
            "quadriga_handoff_seconds", "From the first token to the acknowledged commit."
        )
        self._handoff_bytes = registry.histogram(
            "quadriga_handoff_bytes", "KV bytes of one hand-off.", buckets=SIZE_BUCKETS_BYTES
        )
        self._fallbacks = registry.gauge(
            "quadriga_kv_transport_fallbacks", "Times a peer was moved to the object store."
        )
        self._running = registry.gauge("quadriga_running_sequences", "Sequences holding a slot.")
        self._waiting = registry.gauge(
            "quadriga_waiting_sequences", "Sequences queued, or reserved and not yet running."
        )
        self._used = registry.gauge("quadriga_kv_used_tokens", "Tokens whose KV is held.")
        self._reserved = registry.gauge(
            "quadriga_kv_reserved_tokens", "Tokens promised to the sequences held."
        )
        self._step = registry.gauge("quadriga_step_seconds", "Mean time of a step, recent first.")
        self._violations = registry.counter(
            "quadriga_integrity_violations_total",
            "Engines given up because their books contradicted themselves; 0 by promise.",
        )
        self._exits = ExitMetrics(registry)
        self._transports = TransportMetrics(registry)
        self._pauses = PauseMetrics(registry, model)
        self._relay: RelayMetrics | None = None
        self._forecast: ForecastMetrics | None = None
        self._migrations: MigrationMetrics | None = None
        self._resizes: ResizeMetrics | None = None

    def count(self, emissions: Sequence[tuple[str, EngineOutput]]) -> None:
        """Count what (ingress id, emission) pairs carry."""
        self._tokens.inc(sum(len(emission.token_ids) for _, emission in emissions))
        for _, emission in emissions:
            if emission.error is not None:
                self._errors.labels(code=emission.error.code).inc()

    def handed_off(self, seconds: float, num_bytes: int) -> None:
        self._handoffs.labels(result="committed").inc()
        self._handoff_seconds.observe(seconds)
        self._handoff_bytes.observe(num_bytes)

    def handoff_failed(self, code: str) -> None:
        self._handoffs.labels(result=code).inc()

    def migrated(self, cause: MigrationCause, report: MigrationReport) -> None:
        """An order to hand a running sequence over has come to its end."""
        if self._migrations is None:
            self._migrations = MigrationMetrics(self.registry)
        self._migrations.count(cause, report)

    def sent(self, counts: TransportCounts) -> None:
        """Export what the replica's transports have sent."""
        self._transports.update(counts)

    def resized(self, report: ResizeReport, info: ReplicaInfo) -> None:
        """An order to load or drop layers has come to its end."""
        if self._resizes is None:
            self._resizes = ResizeMetrics(self.registry)
        self._resizes.count(report, info)

    def violated(self) -> None:
        """The engine's books contradict themselves."""
        self._violations.inc()

    def forecast(self, forecast: LoadForecast, capacity_tokens: int, source: Forecasting) -> None:
        """Set what describes the future."""
        if self._forecast is None:
            self._forecast = ForecastMetrics(self.registry)
        self._forecast.update(forecast, capacity_tokens, source)

    def gauges(self, load: ReplicaLoad, num_fallbacks: int) -> None:
        """Set what describes the present."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._used.set(load.used_tokens)
        self._reserved.set(load.reserved_tokens)
        self._step.set(load.step_time_s)
        steps, counted = load.steps, self._counted
        self._steps.inc(steps.steps - counted.steps)
        self._busy.inc(steps.busy_s - counted.busy_s)
        self._batched.inc(steps.sequences - counted.sequences)
        self._attended.inc(steps.tokens - counted.tokens)
        self._counted = steps
        self._fallbacks.set(num_fallbacks)
        if load.exits is not None:
            self._exits.update(load.exits, load.num_at_exits)
            self._exits.used(load.exit_uses)
        self._pauses.update(load.num_paused, load.paused_bytes, load.num_pauses, load.num_resumes)
        if load.relay is not None:
            if self._relay is None:
                self._relay = RelayMetrics(self.registry)
            self._relay.update(load.relay)

    async def push(self, app: str) -> None:
        """Send all values to the hub; a lost push costs nothing, the next one has them too."""
        try:
            await call(
                controller_name(app),
                "push_metrics",
                self.registry.source,
                self.registry.snapshot(),
                timeout_s=PUSH_TIMEOUT_S,
            )
        except QuadrigaError as exc:
            logger.debug("metrics not pushed: %s", exc)
