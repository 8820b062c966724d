"""Orders for strict sequences that lack layers; see `quadriga.control.strict_requests`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from actors.rpc.ray_rpc import call
from quadriga.background import background
from quadriga.clock import Clock
from quadriga.config.resolve import ReplicaSpec
from quadriga.config.scheduling import HeliosConfig
from quadriga.control.replica_record import PlaceKey, ReplicaRecord
from quadriga.control.strict_requests import depths_wanted, escalations
from quadriga.core.migration import MigrationOrder, MigrationReport
from quadriga.core.replica import DepthClass, ResizeReport, Role
from quadriga.errors import QuadrigaError
from quadriga.replica.resizing import ANSWER_SLACK_S, failure

logger = logging.getLogger(__name__)

ESCALATE_AGAIN_S = 1.0


class StrictRequests:
    """Looks for such sequences in the heartbeats; on the controller's event loop.

    Attributes:
        num_moved: Sequences that were moved so far.
    """

    def __init__(self, replicas: Mapping[str, ReplicaRecord], clock: Clock) -> None:
        self.num_moved = 0
        self._replicas = replicas
        self._clock = clock
        self._escalated_s: dict[str, float] = {}  # sequence → when its move was ordered
        self._not_before_s: dict[str, float] = {}  # replica → when it may be asked again

    def escalate(self, transfer_deadline_s: float) -> None:
        """Order moves in the background."""
        now_s = self._clock.now_s()
        self._escalated_s = {
            i: s for i, s in self._escalated_s.items() if now_s - s < ESCALATE_AGAIN_S
        }
        for order in escalations(self._replicas.values(), self._escalated_s):
            self._escalated_s[order.sequence_id] = now_s
            background(self._migrate(order, transfer_deadline_s + ANSWER_SLACK_S))

    def load(
        self,
        filling: Mapping[PlaceKey, ReplicaRecord],
        specs: Mapping[tuple[Role, DepthClass], ReplicaSpec],
        helios: HeliosConfig,
    ) -> None:
        """Order layers in the background; see `depths_wanted` for `filling` and `specs`."""
        now_s = self._clock.now_s()
        waiting_s = self._not_before_s
        self._not_before_s = {n: s for n, s in waiting_s.items() if n in self._replicas}
        depths = depths_wanted(self._replicas.values(), filling, specs)
        for name, depth in depths.items():
            if now_s >= self._not_before_s.get(name, now_s):
                self._not_before_s[name] = float("inf")  # until it has answered
                background(self._load(name, depth, helios))

    async def _migrate(self, order: MigrationOrder, timeout_s: float) -> None:
        try:
            report: MigrationReport = await call(
                order.source, "migrate", order, timeout_s=timeout_s
            )
        except QuadrigaError as exc:
            logger.info("escalation of %s: %s", order.sequence_id, exc)
            return
        self.num_moved += report.outcome == "moved"
        if report.outcome != "moved":
            logger.info("escalation of %s: %s", order.sequence_id, report)

    async def _load(self, name: str, depth: int, helios: HeliosConfig) -> None:
        left_s = max(1.0, helios.order_timeout_s - ANSWER_SLACK_S)
        try:
            report: ResizeReport = await call(
                name, "resize", depth, left_s, timeout_s=left_s + ANSWER_SLACK_S
            )
        except QuadrigaError as exc:
            report = failure(exc)
        logger.info("%s, which leaves, shall have %d layers: %s", name, depth, report)
        self._not_before_s[name] = self._clock.now_s() + helios.retry_s
