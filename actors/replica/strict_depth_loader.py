"""Strict requests at replicas whose place another one has taken over, for another model's sake.

The machine's orders go to places, so none reaches such a replica any more. A strict request that
came before the last of its model's replicas went would wait there, until its deadline, for layers
that nobody loads. So they are loaded here, while the replica is on its way out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from actors.controller.helios_setup import HeliosSetup
from actors.controller.replica_handles import class_of
from actors.controller.replica_manager import Key, ReplicaHandle, ReplicaManager, ReplicaPhase
from actors.replica.resizing import ANSWER_SLACK_S, failure
from actors.rpc.ray_rpc import call
from actors.rpc.tasks import background
from quadriga.clock import Clock
from quadriga.core.replica import ResizeReport, Role
from quadriga.errors import QuadrigaError

logger = logging.getLogger(__name__)


class StrictDepthLoader:
    """Looks for them in the heartbeats; on the controller's event loop."""

    def __init__(self, setup: HeliosSetup, fleet: ReplicaManager, clock: Clock) -> None:
        self._setup = setup
        self._fleet = fleet
        self._clock = clock
        self._not_before_s: dict[str, float] = {}  # replica → when it may be asked again

    def tick(self, filling: Mapping[Key, ReplicaHandle]) -> None:
        """Have layers loaded where somebody waits for them and no order comes.

        Args:
            filling: Who fills each place now.
        """
        members = self._fleet.members
        self._not_before_s = {n: s for n, s in self._not_before_s.items() if n in members}
        for member in members.values():
            is_here = (
                member.phase in (ReplicaPhase.READY, ReplicaPhase.RETIRING)
                and member.status is not None
            )
            if is_here and filling.get(member.key, member) is not member:
                self._look_at(member)

    def _look_at(self, member: ReplicaHandle) -> None:
        assert member.status is not None
        role, load, here = member.key[0], member.status.load, class_of(member)
        if role is Role.DECODE and not load.parked:
            return  # those that run may do without
        known = (c.depth for r, c in self._setup.specs if r is role and c.model == here.model)
        enough = min((d for d in known if d >= load.strict_depth), default=here.depth)
        now_s = self._clock.now_s()
        if load.strict_depth <= here.depth or enough <= here.depth:
            return
        if now_s >= self._not_before_s.get(member.name, now_s):
            self._not_before_s[member.name] = float("inf")  # until it has answered
            background(self._load(member, enough))

    async def _load(self, member: ReplicaHandle, depth: int) -> None:
        config = self._setup.config.helios
        left_s = max(1.0, config.order_timeout_s - ANSWER_SLACK_S)
        try:
            report: ResizeReport = await call(
                member.name, "resize", depth, left_s, timeout_s=left_s + ANSWER_SLACK_S
            )
        except QuadrigaError as exc:
            report = failure(exc)
        logger.info("%s, which leaves, shall have %d layers: %s", member.name, depth, report)
        self._not_before_s[member.name] = self._clock.now_s() + config.retry_s
