"""Finds decode replicas for the sequences of a prefill replica."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from actors.rpc.lifecycle import scheduler_name
from actors.rpc.rpc_batcher import RpcBatcher
from quadriga.background import background
from quadriga.config.loader import QuadrigaConfig
from quadriga.control.model_routing import AutoRouter
from quadriga.core.replica import Role
from quadriga.core.routing import ClusterView, PlaceRequest
from quadriga.errors import MigrationFailed, Overloaded, QuadrigaError, ReplicaError, Unavailable
from quadriga.policies.least_work import LeastWorkWithoutReports
from quadriga.policies.load import decoders, taking_work
from quadriga.scheduling.transfer.placement_turns import PlacementTurns

logger = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 2.0


class DecodePlacement:
    """Asks the scheduler for decode replicas; without one it chooses by the last known loads.

    Attributes:
        turns: The order in which sequences ask while there is no room.
    """

    def __init__(self, config: QuadrigaConfig, calls: RpcBatcher, turns: PlacementTurns) -> None:
        self.turns = turns
        self._config = config
        self._calls = calls
        self._scheduler = scheduler_name(config.name)
        self._is_scheduler_away = False
        self._view: ClusterView | None = None
        self._fallback = LeastWorkWithoutReports()

    async def find(self, request: PlaceRequest) -> str | None:
        """The name of a decode replica for a sequence; None when none has room.

        Raises: MigrationFailed: None will have, and others can begin it anew.
        """
        if self._is_scheduler_away:  # as of the last look; asking would take its time
            return self._choose(request)
        try:
            try:
                name: str = await self._calls.call(
                    self._scheduler, "place_now", request, timeout_s=PLACE_TIMEOUT_S
                )
            except Overloaded:
                if request.exclude:
                    return None
                # Now waiting pays, and must not hold up the other calls of a batch.
                name = await self._calls.call_alone(
                    self._scheduler, "place", request, timeout_s=PLACE_TIMEOUT_S
                )
            return name
        except (Overloaded, Unavailable):
            return None
        except MigrationFailed:
            raise
        except ReplicaError as exc:
            logger.info("no scheduler (%s); placing by the last known loads", exc)
            return self._choose(request)

    def _choose(self, request: PlaceRequest) -> str | None:
        """Choose by the loads that the scheduler last reported; None: all that it knows refused."""
        if self._view is None:
            return None
        any_depth, model = self._config.helios.enabled, request.depth_class.model
        alive = taking_work(
            self._view.snapshots,
            now_unix_s=self._view.taken_unix_s,
            max_age_s=self._config.scheduler.snapshot_max_age_s,
        )
        able = decoders(request, alive, any_depth=any_depth)
        groups = AutoRouter().groups(request, able) if any_depth else [able]
        prefills = (s for s in self._view.snapshots if s.info.role is Role.PREFILL)
        num_placing = max(1, sum(s.info.depth_class.model == model for s in prefills))
        chosen = (
            self._fallback.choose(request, group, num_placing=num_placing, needs_room=needs_room)
            for needs_room in (True, False)  # there may be room by now
            for group in groups
        )
        return next((name for name in chosen if name is not None), None)

    async def keep_view(self) -> None:
        """Keep the last known loads for the time when there is no scheduler; never returns."""
        interval_s = self._config.scheduler.snapshot_interval_s
        while True:
            await asyncio.sleep(interval_s)
            try:
                self._view = await self._calls.call_alone(
                    self._scheduler, "directory", timeout_s=max(interval_s, 1.0)
                )
                self._fallback.renewed()
                self._is_scheduler_away = False
            except QuadrigaError as exc:
                self._is_scheduler_away = True
                logger.info("no loads from %s: %s", self._scheduler, exc)

    def give_up(self, sequence_id: str) -> None:
        """Tell the scheduler that a sequence comes to no decode replica: no room is kept for it."""
        background(self._calls.tell(self._scheduler, "finished", [], [sequence_id]))

    def report_death(self, peer: str) -> None:
        """Tell the scheduler of a decode replica that is gone, and place no more there."""
        if self._view is not None:
            alive = [s for s in self._view.snapshots if s.info.name != peer]
            self._view = replace(self._view, snapshots=alive)
        background(self._calls.tell(self._scheduler, "replica_died", peer))
