"""The scheduler actor: admission and placement over the replicas' reports. Soft state only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.batches import BatchedCalls
from actors.lifecycle import end_this_actor
from actors.tasks import background
from quadriga.clock import SystemClock
from quadriga.config import QuadrigaConfig
from quadriga.errors import Overloaded, Unavailable, UnknownModel
from quadriga.policies.admission import admit
from quadriga.policies.baselines.placement import make_placement
from quadriga.policies.load import candidates, tokens_wanted
from quadriga.types import (
    Admission,
    AdmitRequest,
    ClusterView,
    PlaceRequest,
    ReplicaSnapshot,
    Role,
)

logger = logging.getLogger(__name__)

PLACE_WAIT_S = 0.5
"""How long a placement waits for a report that room became free."""
UNSEEN_MAX_S = 5.0
FORGET_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class _Unseen:
    """A sequence sent to a replica that has not reported its arrival yet."""

    since_s: float
    prompt_tokens: int
    reserved_tokens: int


class Scheduler(BatchedCalls):
    """Ray actor, restarted without limit; everything it knows comes from reports.

    What it sent to a replica since that replica's last word is added to the reported load, so
    that a burst does not go to one replica.
    """

    BATCHED = frozenset({"admit", "place_now"})

    def __init__(self, config: dict[str, Any]) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._clock = SystemClock()
        self._config = QuadrigaConfig.model_validate(config)
        self._placement = make_placement(self._config.scheduler.placement)
        self._models: frozenset[str] | None = None
        self._snapshots: dict[str, ReplicaSnapshot] = {}
        self._unseen: dict[str, dict[str, _Unseen]] = {}
        self._reported = asyncio.Event()
        self._heard_s = self._clock.now_s()
        self._num_placed: dict[str, int] = {}
        background(self._watch())

    # The ingress's and the prefill replicas' side

    async def admit(self, request: AdmitRequest) -> Admission:
        """Let a sequence in and choose its prefill replica.

        Raises:
            UnknownModel: No pool serves the model.
            Unavailable: Its replicas are starting, draining or gone.
            Overloaded: The queues are full; says when to come back.
            ContextTooLong: It fits no decode replica.
        """
        self._heard_s = self._clock.now_s()
        self._require_known(request.model)
        admission = admit(
            request,
            self._adjusted(),
            now_unix_s=self._clock.unix_s(),
            scheduler=self._config.scheduler,
            prefill=self._config.prefill,
        )
        unseen = _Unseen(self._heard_s, request.num_prompt_tokens, request.num_prompt_tokens)
        self._unseen.setdefault(admission.prefill_replica, {})[request.sequence_id] = unseen
        return admission

    async def place(self, request: PlaceRequest) -> str:
        """Choose the decode replica of a sequence; waits a moment for room where there is none.

        Raises:
            Unavailable: No decode replica of the class is alive and taking work.
            Overloaded: None has room.
        """
        give_up_s = self._clock.now_s() + PLACE_WAIT_S
        while True:
            self._reported.clear()
            try:
                return await self.place_now(request)
            except Overloaded:
                left_s = give_up_s - self._clock.now_s()
                if left_s <= 0 or request.exclude:
                    raise
                try:
                    async with asyncio.timeout(left_s):
                        await self._reported.wait()
                except TimeoutError:
                    give_up_s = 0.0  # one last look

    async def place_now(self, request: PlaceRequest) -> str:
        """As `place`, without waiting for room. Raises: Unavailable, Overloaded."""
        for unseen in self._unseen.values():
            unseen.pop(request.sequence_id, None)
        alive = candidates(
            self._adjusted(),
            role=Role.DECODE,
            depth_class=request.depth_class,
            exclude=request.exclude,
            now_unix_s=self._clock.unix_s(),
            max_age_s=self._config.scheduler.snapshot_max_age_s,
        )
        if not alive:
            raise Unavailable(
                f"no decode replica of {request.depth_class} is taking work", retry_after_s=1.0
            )
        name = self._placement.choose(request, alive)
        if name is None:
            raise Overloaded(
                f"no decode replica of {request.depth_class} has room for "
                f"{request.max_total_tokens} tokens",
                retry_after_s=1.0,
            )
        self._note_placed(name, request)
        return name

    async def finished(self, sequence_ids: Sequence[str], tokens: int) -> None:
        """Sequences are over; forget what was noted of them."""
        for unseen in self._unseen.values():
            for sequence_id in sequence_ids:
                unseen.pop(sequence_id, None)

    async def directory(self) -> ClusterView:
        """All that is known of the replicas, for those who must do without a scheduler."""
        return ClusterView(self._clock.unix_s(), self._adjusted())

    # The replicas' and the controller's side

    async def report(self, snapshot: ReplicaSnapshot, accepted: Sequence[str] = ()) -> None:
        """A replica's load.

        Args:
            accepted: Sequences that arrived there since its last report; they are in the load.
        """
        name = snapshot.info.name
        known = self._snapshots.get(name)
        if known is None or known.taken_unix_s <= snapshot.taken_unix_s:
            self._snapshots[name] = snapshot
        unseen = self._unseen.get(name, {})
        for sequence_id in accepted:
            unseen.pop(sequence_id, None)
        self._reported.set()

    async def replica_died(self, name: str) -> None:
        """Forget a replica that is gone."""
        self._snapshots.pop(name, None)
        self._unseen.pop(name, None)

    async def configure(
        self, config: dict[str, Any], models: Sequence[str], ingress_age_s: float
    ) -> None:
        """What the controller wants served; repeated with each of its heartbeats.

        Args:
            ingress_age_s: Seconds since any ingress was heard of.
        """
        new = QuadrigaConfig.model_validate(config)
        if new.scheduler.placement != self._config.scheduler.placement:
            self._placement = make_placement(new.scheduler.placement)
        self._config = new
        self._models = frozenset(models)
        self._heard_s = max(self._heard_s, self._clock.now_s() - ingress_age_s)

    async def ingress_heartbeat(self, ingress_id: str) -> None:
        """A sign of life of an ingress."""
        self._heard_s = self._clock.now_s()

    async def status(self) -> dict[str, Any]:
        """Loads by replica and how many sequences were placed on each."""
        return {
            "replicas": {name: replace(s) for name, s in self._snapshots.items()},
            "placed": dict(self._num_placed),
            "unseen": {name: len(v) for name, v in self._unseen.items()},
        }

    async def stop(self) -> None:
        """End this actor soon after the answer is out."""
        background(self._end("stopped"))

    def _require_known(self, model: str) -> None:
        """Tell a model nobody serves from one whose replicas are not there yet."""
        if any(s.info.depth_class.model == model for s in self._snapshots.values()):
            return
        if self._models is None or model in self._models:
            raise Unavailable(f"model {model!r} is starting; retry shortly", retry_after_s=1.0)
        served = ", ".join(sorted(self._models))
        raise UnknownModel(f"model {model!r} is not served; served: {served}", param="model")

    def _note_placed(self, name: str, request: PlaceRequest) -> None:
        unseen = _Unseen(self._clock.now_s(), 0, tokens_wanted(self._snapshots[name], request))
        self._unseen.setdefault(name, {})[request.sequence_id] = unseen
        self._num_placed[name] = self._num_placed.get(name, 0) + 1

    def _adjusted(self) -> list[ReplicaSnapshot]:
        """The snapshots with what is on its way to each replica added."""
        return [self._adjust(name, s) for name, s in self._snapshots.items()]

    def _adjust(self, name: str, snapshot: ReplicaSnapshot) -> ReplicaSnapshot:
        unseen = self._unseen.get(name)
        if not unseen:
            return snapshot
        oldest_s = self._clock.now_s() - UNSEEN_MAX_S
        for sequence_id in [i for i, u in unseen.items() if u.since_s < oldest_s]:
            del unseen[sequence_id]
        return replace(
            snapshot,
            num_waiting=snapshot.num_waiting + len(unseen),
            waiting_tokens=snapshot.waiting_tokens + sum(u.prompt_tokens for u in unseen.values()),
            reserved_tokens=snapshot.reserved_tokens
            + sum(u.reserved_tokens for u in unseen.values()),
        )

    async def _watch(self) -> None:
        """Forget replicas that fell silent; end when no ingress was heard of for long."""
        orphan_s = self._config.lifecycle.orphan_timeout_s
        while True:
            await asyncio.sleep(min(1.0, orphan_s / 4))
            orphan_s = self._config.lifecycle.orphan_timeout_s
            if self._clock.now_s() - self._heard_s > orphan_s:
                await self._end(f"no ingress was heard of for {orphan_s:.0f} s")
                return
            oldest = self._clock.unix_s() - FORGET_FACTOR * (
                self._config.scheduler.snapshot_max_age_s
            )
            for name in [n for n, s in self._snapshots.items() if s.taken_unix_s < oldest]:
                await self.replica_died(name)

    async def _end(self, reason: str) -> None:
        logger.info("the scheduler ends: %s", reason)
        await asyncio.sleep(0.05)
        await end_this_actor()
