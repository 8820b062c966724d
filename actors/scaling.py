"""The number of decode replicas of the class that serves follows its load.

Replicas come as new places of the fleet and go as places that are taken away: what they hold is
moved to the one with the most room, and what cannot move ends where it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from actors.calls import call
from actors.fleet import Member, Phase
from actors.lifecycle import scheduler_name
from actors.tasks import background
from quadriga.clock import Clock
from quadriga.config import QuadrigaConfig
from quadriga.errors import QuadrigaError
from quadriga.policies.load import decode_pressure
from quadriga.policies.scaling import AddReplicas, GiveUpReplica, RetireReplica, ScalingPolicy
from quadriga.policies.scaling_need import ClassLoad
from quadriga.types import DepthClass, MigrationReport, ReplicaSnapshot, Role

if TYPE_CHECKING:
    from actors.helios_places import Places

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0


class Scaling:
    """One deployment's scaling; on the controller's event loop."""

    def __init__(self, app: str, config: QuadrigaConfig, places: Places, clock: Clock) -> None:
        self._app = app
        self._config = config
        self._places = places
        self._clock = clock
        self._policy = ScalingPolicy(config.helios.scaling)
        self._is_looking = False

    def tick(self, target: DepthClass | None) -> None:
        """Look at the loads and decide, in the background and once at a time."""
        if target is not None and not self._is_looking:
            self._is_looking = True
            background(self._look(target))

    async def _look(self, target: DepthClass) -> None:
        try:
            snapshots: list[ReplicaSnapshot] = await call(
                scheduler_name(self._app), "loads", timeout_s=CALL_TIMEOUT_S
            )
            self.decide(target, snapshots)
        except QuadrigaError as exc:
            logger.info("no scaling now: %s", exc)
        finally:
            self._is_looking = False

    def decide(self, target: DepthClass, snapshots: list[ReplicaSnapshot]) -> None:
        """Carry out what the policy wants for the class that serves. Raises: ConfigError."""
        members = self._places.serving_members()
        known = {s.info.name: s for s in snapshots}
        mine = [known[name] for name in members if name in known and _is_of(known[name], target)]
        prefills = [
            s
            for s in snapshots
            if s.info.role is Role.PREFILL and s.info.depth_class.model == target.model
        ]
        waiting = self._places.empty_places() | {
            name: m.since_s for name, m in members.items() if m.phase is not Phase.READY
        }
        load = ClassLoad(
            depth_class=target,
            snapshots=mine,
            ready_s={n: m.since_s for n, m in members.items() if m.phase is Phase.READY},
            pending_s=waiting,
            waiting=sum(s.num_waiting for s in prefills),
            waiting_tokens=sum(s.waiting_tokens for s in prefills),
        )
        for order in self._policy.decide([load], now_s=self._clock.now_s()):
            logger.info("scaling: %s", order)
            if isinstance(order, AddReplicas):
                for _ in range(order.count):
                    self._places.add_place(order.depth_class)
            elif isinstance(order, GiveUpReplica):
                self._places.remove_place(order.replica)
            else:
                self._retire(order, members, mine)

    def _retire(
        self, order: RetireReplica, members: Mapping[str, Member], of_class: list[ReplicaSnapshot]
    ) -> None:
        others = [s for s in of_class if s.info.name != order.replica and not s.draining]
        if order.replica not in members or not others:
            return
        heir = min(others, key=lambda s: (decode_pressure(s), s.info.name)).info.name
        if self._places.remove_place(order.replica):
            background(self._hand_over(order.replica, heir))

    async def _hand_over(self, replica: str, heir: str) -> None:
        """Move what a retiring replica holds; it drains meanwhile, so what fails ends there."""
        timeout_s = self._config.lifecycle.drain_timeout_s
        try:
            reports: list[MigrationReport] = await call(
                replica, "hand_over", heir, timeout_s=timeout_s
            )
        except QuadrigaError as exc:
            logger.info("%s hands nothing over: %s", replica, exc)
            return
        moved = sum(r.outcome == "moved" for r in reports)
        logger.info("%s moved %d of %d sequences to %s", replica, moved, len(reports), heir)


def _is_of(snapshot: ReplicaSnapshot, target: DepthClass) -> bool:
    return snapshot.info.role is Role.DECODE and snapshot.info.depth_class == target
