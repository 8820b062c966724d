"""The scheduler's tick: orders go out, reports come back, both are written down for operators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.metrics import push
from actors.rpc.lifecycle import scheduler_name
from actors.rpc.ray_rpc import call
from quadriga.background import background
from quadriga.clock import Clock
from quadriga.config.loader import QuadrigaConfig
from quadriga.control.control_metrics import SchedulerMetrics
from quadriga.core.forecast import LengthOutcome
from quadriga.core.migration import MigrationOrder, MigrationOutcome, MigrationReport
from quadriga.core.replica import ReplicaSnapshot
from quadriga.core.routing import ReportOptions
from quadriga.errors import QuadrigaError, is_known_death
from quadriga.policies.ares.governor import Governor
from quadriga.policies.ares.orders import MoveDecision
from quadriga.policies.ares.replica_view import replica_view

if TYPE_CHECKING:
    from quadriga.policies.ares.recording import RecentTicks, RecordedTick, Recording

logger = logging.getLogger(__name__)

CALL_SLACK_S = 10.0
"""Over the transport's deadline, which ends with the cutover: for the last KV, the commit, and the
question what became of it."""
SHOWN_DECISIONS = 50
METRICS_EVERY_S = 1.0

Send = Callable[[MigrationOrder], Awaitable[MigrationReport]]


class Rescheduling:
    """One scheduler's moves of running sequences.

    Args:
        snapshots: All the scheduler knows, what is on its way added.
        send: Gives an order to its source; the default is an actor call.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        clock: Clock,
        snapshots: Callable[[], list[ReplicaSnapshot]],
        send: Send | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._snapshots = snapshots
        self._send = send or self._call_source
        self._recording: Recording | None = None
        self._recent: RecentTicks | None = None
        self.governor = Governor(config.scheduler, self._record)
        self.metrics = SchedulerMetrics(scheduler_name(config.name))
        self._open_recording()

    def configure(self, config: QuadrigaConfig) -> None:
        """Take a new configuration; orders under way go on."""
        last, self._config = self._config, config
        if config.scheduler == last.scheduler and config.transport == last.transport:
            return
        self.governor.configure(config.scheduler)
        self._open_recording()

    def reported(
        self, snapshot: ReplicaSnapshot, outcomes: Sequence[LengthOutcome]
    ) -> ReportOptions:
        """A replica's load has come in. Returns what is asked of it."""
        info = snapshot.info
        self.governor.moves.reported(info.name, self._clock.now_s())
        if outcomes:
            model = info.depth_class.model
            self.governor.ended_lengths(model, outcomes)
            self.metrics.lengths(model, list(outcomes))
        # Scaling counts what sequences will still want.
        helios = self._config.helios
        scales = helios.enabled and helios.scaling.enabled
        pools = self.governor.pools.get(info.depth_class)
        return ReportOptions(
            forecast=scales or self.governor.wants_forecasts,
            is_overloaded=info.depth_class.model in self.governor.num_held,
            depth_pool="" if pools is None else pools.side_of(info.name),
        )

    def replica_died(self, name: str) -> None:
        self.governor.moves.replica_died(name)

    async def run(self) -> None:
        """Tick for ever, and push the metrics."""
        tick_s = push_s = self._clock.now_s()
        while True:
            interval_s = self._config.scheduler.ares.interval_s  # may change at any time
            now_s = self._clock.now_s()
            await asyncio.sleep(
                max(0.0, min(tick_s + interval_s, push_s + METRICS_EVERY_S) - now_s)
            )
            now_s = self._clock.now_s()
            is_due = now_s >= tick_s + interval_s
            if is_due:
                tick_s = now_s
            try:
                if is_due and self.governor.is_on:
                    self.tick()
                if now_s >= push_s + METRICS_EVERY_S:
                    push_s = now_s
                    self.metrics.gauges(self.governor)
                    background(push.push_metrics(self._config.name, self.metrics.registry))
            except Exception:  # a border: this loop is not awaited, and the next tick may succeed
                logger.exception("a tick of rescheduling failed")

    def tick(self) -> list[MigrationOrder]:
        """Decide now, and send the orders on their way."""
        serving = [s for s in self._snapshots() if not s.is_scout]
        orders = self.governor.tick(
            serving, now_s=self._clock.now_s(), now_unix_s=self._clock.unix_s()
        )
        self.metrics.decided(self.governor.last.took_s)
        for order in orders:
            logger.info(
                "move %s from %s to %s (%s): gain %.2f, %d tokens, about %.0f to come",
                order.sequence_id,
                order.source,
                order.destination,
                order.cause.value,
                order.gain,
                order.num_tokens,
                order.remaining_tokens,
            )
            self.metrics.ordered(order)
            background(self._carry_out(order))
        return orders

    async def _carry_out(self, order: MigrationOrder) -> None:
        report = MigrationReport(order.sequence_id, "unknown", "cancelled: the scheduler ends")
        try:
            report = await self._send(order)
        except QuadrigaError as exc:
            is_dead = is_known_death(exc)
            reason = f"{'source_died' if is_dead else exc.code}: {exc.message}"
            outcome: MigrationOutcome = "failed" if is_dead else "unknown"
            report = MigrationReport(order.sequence_id, outcome, reason, at_fault=order.source)
        finally:
            self.governor.ended(order, report, now_s=self._clock.now_s())
            self.metrics.ended(order, report)
        if report.outcome not in ("moved", "finished"):
            logger.info("%s did not move: %s, %s", order.sequence_id, report.outcome, report.reason)

    async def _call_source(self, order: MigrationOrder) -> MigrationReport:
        timeout_s = self._config.transport.deadline_s + CALL_SLACK_S
        report: MigrationReport = await call(order.source, "migrate", order, timeout_s=timeout_s)
        return report

    def status(self) -> dict[str, Any]:
        """Forecasts, orders and recent decisions, as plain values."""
        governor = self.governor
        now_unix_s = self._clock.unix_s()
        return {
            "at_unix_s": now_unix_s,
            "replicas": [
                replica_view(s, now_unix_s=now_unix_s)
                for s in sorted(self._snapshots(), key=lambda s: s.info.name)
            ],
            "mode": governor.config.ares.mode,
            "placement": governor.config.placement,
            "bandwidth_bytes_per_s": governor.bandwidth_bytes_per_s,
            "last_tick": asdict(governor.last),
            "lengths": {
                model: {
                    "coverage": monitor.coverage,
                    "mean_error_tokens": monitor.mean_error,
                    "num_ended": monitor.num_ended,
                    "is_distrusted": monitor.is_drifting,
                }
                for model, monitor in governor.drift.items()
            },
            "overload": {
                model: {
                    "protected": sorted(plan.protected),
                    "short_tokens": plan.short_tokens,
                    "num_held": governor.num_held.get(model, 0),
                }
                for model, plan in governor.overload.items()
            },
            "depth_pools": {
                str(depth_class): {
                    **asdict(pools),
                    "is_on": pools.is_on,
                    "shallow": sorted(pools.shallow),
                    "members": sorted(pools.members),
                }
                for depth_class, pools in governor.pools.items()
            },
            "outcomes": dict(governor.moves.outcomes),
            "under_way": [_order(o) for o in governor.moves.under_way],
            "recent": [_decision(d) for d in list(governor.moves.recent)[-SHOWN_DECISIONS:]],
        }

    def moves(self, request_id: str) -> list[dict[str, Any]]:
        """What was decided about the sequences of one request, oldest first, as plain values."""
        return [_decision(d) for d in self.governor.moves.of_request(request_id)]

    def ticks(self) -> str:
        """The newest decisions with all they saw, one JSON line each; from any thread."""
        from quadriga.policies.ares.recording import lines_of

        return lines_of([] if self._recent is None else self._recent.all())

    def _record(self, tick: RecordedTick) -> None:
        if self._recent is None:
            from quadriga.policies.ares.recording import RecentTicks

            self._recent = RecentTicks()
        self._recent.add(tick)
        if self._recording is not None:
            self._recording.add(tick)

    def _open_recording(self) -> None:
        ares = self._config.scheduler.ares
        self._recording = None
        if ares.record_file is not None:
            from quadriga.policies.ares.recording import Recording

            self._recording = Recording(Path(ares.record_file).expanduser(), ares.record_max_bytes)


def _decision(decision: MoveDecision) -> dict[str, Any]:
    return {
        "at_unix_s": decision.at_unix_s,
        **_order(decision.order),
        "explanation": decision.explanation,
        "report": None if decision.report is None else asdict(decision.report),
    }


def _order(order: MigrationOrder) -> dict[str, Any]:
    return {**asdict(order), "depth_class": str(order.depth_class), "cause": order.cause.value}
