"""Finds decode replicas for the sequences of a prefill replica, and the order in which they ask."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from actors.rpc.lifecycle import scheduler_name
from actors.rpc.rpc_batcher import RpcBatcher
from quadriga.background import background
from quadriga.config.loader import QuadrigaConfig
from quadriga.control.model_routing import AutoRouter
from quadriga.core.replica import Role
from quadriga.core.request import remaining_of
from quadriga.core.routing import ClusterView, PlaceRequest
from quadriga.errors import Overloaded, QuadrigaError, ReplicaError, Unavailable
from quadriga.policies.least_work import LeastWorkWithoutReports
from quadriga.policies.load import candidates
from quadriga.scheduling.prefill_queue import STARVING_S, is_starving
from quadriga.scheduling.sequence import RunningSequence

logger = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 2.0


class DecodePlacement:
    """Asks the scheduler for decode replicas; without one it chooses by the last known loads.

    Args:
        sequences: Those of the replica, by id; those with a `turn` wait for a place.
        now_s: A steady clock that goes as the event loop's does.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        calls: RpcBatcher,
        sequences: Mapping[str, RunningSequence],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._calls = calls
        self._sequences = sequences
        self._now_s = now_s
        self._orders = itertools.count()
        self._scheduler = scheduler_name(config.name)
        self._is_scheduler_away = False
        self._view: ClusterView | None = None
        self._fallback = LeastWorkWithoutReports()

    # Turns: where no decode replica has room, the sequences ask one after the other.

    def is_free_for(self, priority: int) -> bool:
        """Whether no sequence waits that would be served before a new one of this priority."""
        return all(
            head.state.priority > priority and not is_starving(head, self._now_s())
            for head in self._heads()
        )

    @asynccontextmanager
    async def turn(self, sequence: RunningSequence) -> AsyncIterator[None]:
        """Wait for a sequence's turn; it lasts as long as the context.

        The most important first, of these the shortest by its predicted total, and the oldest
        beside it where it is starving. A sequence that comes to the head while another one has its
        turn gets its own beside it.
        """
        sequence.since_s, sequence.order = self._now_s(), next(self._orders)
        sequence.turn = asyncio.Event()
        self.call_heads()
        # A starving sequence becomes a head though none comes or goes.
        starving = asyncio.get_running_loop().call_later(STARVING_S, self.call_heads)
        try:
            await sequence.turn.wait()
            yield
        finally:
            starving.cancel()
            sequence.turn = None
            self.call_heads()

    def call_heads(self) -> None:
        """Give their turns to those who are first now; call it when a length becomes known."""
        for head in self._heads():
            if head.turn is not None:
                head.turn.set()

    def _heads(self) -> list[RunningSequence]:
        """Those whose turn it is: the first by rank, and the oldest where it is starving."""
        waiting = [s for s in self._sequences.values() if s.turn is not None]
        if not waiting:
            return []
        oldest, first = min(waiting, key=lambda s: s.order), min(waiting, key=_rank)
        is_apart = oldest is not first and is_starving(oldest, self._now_s())
        return [oldest, first] if is_apart else [first]

    # Places

    async def find(self, request: PlaceRequest) -> str | None:
        """The name of a decode replica for a sequence; None when none has room."""
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
        except ReplicaError as exc:
            logger.info("no scheduler (%s); placing by the last known loads", exc)
            return self._choose(request)

    def _choose(self, request: PlaceRequest) -> str | None:
        """Choose by the loads that the scheduler last reported; None when no replica has room."""
        if self._view is None:
            return None
        any_depth = self._config.helios.enabled
        able = candidates(
            self._view.snapshots,
            role=Role.DECODE,
            depth_class=None if any_depth else request.depth_class,
            model=request.depth_class.model,
            numerics=request.numerics,
            exclude=request.exclude,
            now_unix_s=self._view.taken_unix_s,
            max_age_s=self._config.scheduler.snapshot_max_age_s,
        )
        groups = AutoRouter().groups(request, able) if any_depth else [able]
        num_placing = sum(
            s.info.role is Role.PREFILL and s.info.depth_class.model == request.depth_class.model
            for s in self._view.snapshots
        )
        chosen = (
            self._fallback.choose(request, group, num_placing=max(1, num_placing))
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
        background(self._calls.tell(self._scheduler, "finished", [sequence_id], 0))

    def report_death(self, peer: str) -> None:
        """Tell the scheduler of a decode replica that is gone."""
        background(self._calls.tell(self._scheduler, "replica_died", peer))

    def cancel_at(self, peer: str, sequence_id: str, ingress_id: str | None) -> None:
        """Cancel a sequence that a decode replica owns by now; see `Replica.cancel`."""
        background(self._calls.tell(peer, "cancel", [sequence_id], ingress_id))


def _rank(sequence: RunningSequence) -> tuple[int, float, int]:
    """Importance, predicted total (unknown ones last), order of coming."""
    state = sequence.state
    remaining = remaining_of(state)
    total = math.inf if remaining is None else state.num_tokens + remaining.mean
    return state.priority, total, sequence.order
