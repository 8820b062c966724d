"""Strict sequences that can go no further where they are move to a replica with more layers."""

from __future__ import annotations

import logging

from actors.controller.replica_handles import class_of, has_room, is_ready, num_held
from actors.controller.replica_manager import ReplicaManager
from actors.rpc.ray_rpc import call
from actors.rpc.tasks import background
from quadriga.clock import Clock
from quadriga.core.migration import MigrationCause, MigrationOrder, MigrationReport
from quadriga.core.replica import Role
from quadriga.errors import QuadrigaError

logger = logging.getLogger(__name__)

ESCALATE_AGAIN_S = 1.0


class Escalation:
    """Looks for them in the heartbeats, and orders their moves.

    Where nobody has more layers, the machine has some loaded: it hears of strict sequences too.

    Args:
        timeout_s: For the answer to an order.

    Attributes:
        num_moved: So far.
    """

    def __init__(self, fleet: ReplicaManager, clock: Clock, timeout_s: float) -> None:
        self.num_moved = 0
        self._fleet = fleet
        self._clock = clock
        self._timeout_s = timeout_s
        self._escalated_s: dict[str, float] = {}

    def tick(self) -> None:
        """Move those that can go no further where they are to a replica with more layers."""
        now_s = self._clock.now_s()
        ready = [m for m in self._fleet.members.values() if is_ready(m)]
        self._escalated_s = {
            i: s for i, s in self._escalated_s.items() if now_s - s < ESCALATE_AGAIN_S
        }
        for source in ready:
            assert source.status is not None
            here = class_of(source)
            for parked in source.status.load.parked:
                if parked.sequence_id in self._escalated_s:
                    continue
                deeper = [
                    m
                    for m in ready
                    if m.key[0] is Role.DECODE
                    and class_of(m).model == here.model
                    and class_of(m).depth > here.depth
                    and has_room(m, parked.max_total_tokens)
                ]
                best = min(deeper, key=lambda m: (-class_of(m).depth, num_held(m)), default=None)
                if best is None:
                    continue
                self._escalated_s[parked.sequence_id] = now_s
                order = MigrationOrder(
                    sequence_id=parked.sequence_id,
                    depth_class=here,
                    source=source.name,
                    destination=best.name,
                    cause=MigrationCause.ESCALATE,
                    gain=0.0,
                    num_tokens=parked.num_tokens,
                    remaining_tokens=0.0,
                )
                background(self._migrate(order))

    async def _migrate(self, order: MigrationOrder) -> None:
        try:
            report: MigrationReport = await call(
                order.source, "migrate", order, timeout_s=self._timeout_s
            )
        except QuadrigaError as exc:
            logger.info("escalation of %s: %s", order.sequence_id, exc)
            return
        self.num_moved += report.outcome == "moved"
        if report.outcome != "moved":
            logger.info("escalation of %s: %s", order.sequence_id, report)
