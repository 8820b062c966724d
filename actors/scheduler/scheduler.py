"""The scheduler actor: admission and placement over the replicas' reports. Soft state only."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actors.rpc.lifecycle import end_this_actor, scheduler_name
from actors.rpc.ray_rpc import call
from actors.rpc.rpc_batcher import BatchedCalls, RpcBatcher
from actors.rpc.signals import die_on_sigterm
from actors.scheduler.rescheduling import Rescheduling
from quadriga.background import background, overslept_s
from quadriga.clock import SystemClock
from quadriga.config.loader import QuadrigaConfig
from quadriga.config.resolve import num_queues
from quadriga.control.model_routing import AutoRouter, Route
from quadriga.core.forecast import LengthOutcome, LengthPrediction
from quadriga.core.migration import MigrationOrder, MigrationReport
from quadriga.core.replica import ReplicaSnapshot, Role
from quadriga.core.request import AUTO_MODEL, ResumableSequence
from quadriga.core.routing import Admission, AdmitRequest, ClusterView, PlaceRequest, ReportOptions
from quadriga.errors import Overloaded, QuadrigaError, Unavailable, UnknownModel
from quadriga.observability.logs import configure_logging
from quadriga.policies.admission import admit, check_room, check_size, find_room
from quadriga.policies.ares.forecast import checked, promised_to
from quadriga.policies.ares.placement import AresPlacement
from quadriga.policies.baselines.placement import Placement
from quadriga.policies.inflight_tracker import InflightTracker, SentRequest
from quadriga.policies.least_work import expected_length
from quadriga.policies.load import decoders, line_of, nobody_decodes, taking_work, tokens_wanted
from quadriga.policies.placements import find_placement
from quadriga.policies.wait_estimator import Supply, WaitEstimator
from quadriga.scheduling.prefixes.affinity import PrefixAffinity

logger = logging.getLogger(__name__)

PLACE_WAIT_S = 0.5
"""How long a placement waits for a report that room became free."""
FORGET_FACTOR = 10.0
ORPHAN_TIMEOUT_S = 1.0
FoundRoom = defaultdict[str, list[Supply]]


class Scheduler(BatchedCalls):
    """Ray actor, restarted without limit; everything it knows comes from reports.

    What it sent to a replica since that replica's last report is added to the reported load, so
    that a burst does not go to one replica.
    """

    BATCHED = frozenset({"admit", "place_now"})

    def __init__(self, config: dict[str, Any]) -> None:
        self._clock = SystemClock()
        self._plain = config
        self._config = QuadrigaConfig.model_validate(config)
        configure_logging(
            self._config.logging.format,
            self._config.logging.level,
            process=scheduler_name(self._config.name),
        )
        self._num_queues = num_queues(self._config)
        self._models: frozenset[str] | None = None
        self._snapshots: dict[str, ReplicaSnapshot] = {}
        self._misread: set[str] = set()
        self._inflight = InflightTracker()
        self._prefixes = PrefixAffinity()
        self._calls = RpcBatcher(call)
        self._waiting = WaitEstimator()
        self._auto = AutoRouter()
        self._reported = asyncio.Event()
        self._waiting_for_room: set[str] = set()
        self._began_s = self._heard_s = self._clock.now_s()
        self._rescheduling = Rescheduling(self._config, self._clock, self._adjusted)
        self._placement = self._make_placement()
        die_on_sigterm()
        background(self._watch())
        background(self._rescheduling.run())

    # The ingress's and the prefill replicas' side

    async def admit(self, requests: Sequence[AdmitRequest]) -> list[Admission]:
        """Let the sequences of one request in, or none, and choose their prefill replicas.

        Raises:
            UnknownModel: No pool serves the model.
            Unavailable: Its replicas are starting, draining or gone.
            Overloaded: The queues are full; says when to come back.
            ContextTooLong: One fits no decode replica.
            InvalidRequest: Their prompts are more than all queues hold.
        """
        self._heard_s = self._clock.now_s()
        names = [request.sequence_id for request in requests]
        await self.finished([], names)  # where they are asked for again
        check_size(requests, self._num_queues, self._config.prefill)
        found = FoundRoom(list)
        prefixes = PrefixAffinity()  # of those before; what is refused says nothing of a replica
        choose = self._admit if self._auto.route is None else self._admit_auto
        try:
            admissions = [choose(request, found, prefixes) for request in requests]
            self._check_room(requests, found, admissions[0].depth_class.model)
        except QuadrigaError:
            await self.finished([], names)
            self._auto.refused(names)
            raise
        for request, admission in zip(requests, admissions, strict=True):
            self._prefixes.sent(request.prefix_marks, admission.prefill_replica)
        return admissions

    def _check_room(self, requests: Sequence[AdmitRequest], found: FoundRoom, model: str) -> None:
        now_s, scheduler = self._clock.now_s(), self._config.scheduler
        check_room(requests, found, self._waiting, model=model, now_s=now_s, scheduler=scheduler)

    def _admit_auto(
        self, request: AdmitRequest, found: FoundRoom, prefixes: PrefixAffinity
    ) -> Admission:
        """As `_admit`, where model and depth are chosen by the controller."""
        now_s = self._heard_s
        alive = self._taking_work()
        chosen, snapshots, way = self._auto.choose(request, alive, now_s)
        if way.profile is not None:
            try:  # no place is reserved for a returning caller there
                alone = FoundRoom(list)
                admission = self._admit(chosen, alone, prefixes, snapshots)
                self._check_room([replace(chosen, visitor="")], alone, chosen.model)
                return self._auto.admitted(request, way, admission, now_s)
            except QuadrigaError as exc:
                logger.debug("%s cannot be profiled: %s", way.profile, exc)
            chosen, snapshots, way = self._auto.choose(request, alive, now_s, profiles=False)
        admission = self._admit(chosen, found, prefixes, snapshots)
        return self._auto.admitted(request, way, admission, now_s)

    def _admit(
        self,
        request: AdmitRequest,
        found: FoundRoom,
        prefixes: PrefixAffinity,
        snapshots: list[ReplicaSnapshot] | None = None,
    ) -> Admission:
        """Note a sequence as let in, and in `found` the room for it. Raises: as `admit`.

        Args:
            snapshots: Of the replicas that may take it; None: all but scouts.
        """
        if snapshots is None:
            snapshots = [s for s in self._adjusted() if not s.is_scout]
        self._require_known(request.model)
        self._auto.require_loaded(request.model, snapshots)
        marks = request.prefix_marks
        cached = self._prefixes.cached_tokens(marks) | prefixes.cached_tokens(marks)
        now_s, now_unix_s = self._clock.now_s(), self._clock.unix_s()
        scheduler, prefill = self._config.scheduler, self._config.prefill
        admission = admit(
            request,
            snapshots,
            now_unix_s=now_unix_s,
            scheduler=scheduler,
            prefill=prefill,
            any_depth=self._any_depth,
            checks_queue=request.is_rebuild,
            cached_tokens=cached,
        )
        info = self._snapshots[admission.prefill_replica].info
        line = line_of(info, any_depth=self._any_depth)
        if not request.is_rebuild:
            room = find_room(
                request,
                admission,
                [s for s in snapshots if line_of(s.info, any_depth=self._any_depth) == line],
                self._waiting,
                line,
                now_s=now_s,
                now_unix_s=now_unix_s,
                scheduler=scheduler,
                prefill=prefill,
                is_overloaded=info.depth_class.model in self._rescheduling.governor.num_held,
            )
            found[line].append(room)
        if request.decodes_at(info.role):
            self._waiting.admitted(request, line, now_s=now_s)
        if info.role is Role.MIXED:
            self._waiting.placed(request.sequence_id, now_s=now_s)  # it decodes where it queues
        num_tokens = request.num_prompt_tokens - cached.get(admission.prefill_replica, 0)
        sent = SentRequest(
            self._heard_s, num_tokens, request.num_prompt_tokens, priority=request.priority
        )
        self._inflight.sent(admission.prefill_replica, request.sequence_id, sent)
        prefixes.sent(marks, admission.prefill_replica)
        return admission

    @property
    def _any_depth(self) -> bool:
        """Whether the replicas of a model may differ in depth."""
        return self._auto.route is not None or self._config.helios.enabled

    async def place(self, request: PlaceRequest) -> str:
        """Choose the decode replica of a sequence; waits a moment for room where there is none.

        Raises:
            Unavailable: No decode replica of the class is alive and taking work.
            Overloaded: None has room.
        """
        give_up_s = self._clock.now_s() + PLACE_WAIT_S
        self._waiting_for_room.add(request.sequence_id)
        try:
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
                    if request.sequence_id not in self._waiting_for_room:
                        raise  # nobody would take the room that has come free
        finally:
            self._waiting_for_room.discard(request.sequence_id)

    async def place_now(self, request: PlaceRequest) -> str:
        """As `place`, without waiting for room.

        Raises: Unavailable, Overloaded; MigrationFailed: See `nobody_decodes`.
        """
        self._inflight.begun(request, self._snapshots.get(request.source))
        overload = self._rescheduling.governor.overload
        if request.prediction is not None and request.depth_class.model in overload:
            request = replace(request, by_forecast=True)
        any_depth, known_s = self._any_depth, self._clock.now_s() - self._began_s
        alive = decoders(request, self._taking_work(), any_depth=any_depth)
        if not alive:
            raise nobody_decodes(request, self._adjusted(), any_depth=any_depth, known_s=known_s)
        groups = self._auto.groups(request, alive) if any_depth else [alive]
        chosen = (self._choose(request, group) for group in groups)
        name = next((name for name in chosen if name is not None), None)
        if name is None:
            raise Overloaded(
                f"no decode replica of {request.depth_class} has room for "
                f"{request.max_total_tokens} tokens",
                retry_after_s=1.0,
            )
        self._note_placed(name, request, expected_length(request, alive))
        return name

    def _choose(self, request: PlaceRequest, group: Sequence[ReplicaSnapshot]) -> str | None:
        """Place a sequence on one of the replicas of one class; None where none has room."""
        if isinstance(self._placement, AresPlacement):
            governor, model = self._rescheduling.governor, request.depth_class.model
            self._placement.load_only = governor.is_distrusted(model)
            self._placement.overload = governor.overload.get(model)
            self._placement.pools = governor.pools_of(group)
        return self._placement.choose(request, group)

    async def find_resumable(self, claims: Sequence[str]) -> list[ResumableSequence]:
        """Where the sequences run whose clients came back through another ingress.

        The replicas are asked: nothing noted here could be as true, or outlive this process.
        """
        names = [n for n, s in self._snapshots.items() if s.info.role.does(Role.DECODE)]
        answers = await asyncio.gather(*(self._claimed(name, claims) for name in names))
        return [resumable_sequence for found in answers for resumable_sequence in found]

    async def _claimed(self, replica: str, claims: Sequence[str]) -> list[ResumableSequence]:
        try:
            found: list[ResumableSequence] = await self._calls.call(
                replica, "claimed", list(claims), timeout_s=ORPHAN_TIMEOUT_S
            )
        except QuadrigaError as exc:  # a replica that does not answer holds nothing
            logger.info("%s was not asked for orphans: %s", replica, exc)
            return []
        return found

    async def finished(self, sequence_ids: Sequence[str], lost: Sequence[str] = ()) -> None:
        """Sequences are over; forget what was noted of them.

        Args:
            lost: So are these, but have not ended: they go on under other names, or nowhere.
        """
        now_s, over = self._clock.now_s(), [*sequence_ids, *lost]
        self._inflight.finished(over)
        self._waiting_for_room.difference_update(over)
        self._waiting.ended(sequence_ids, now_s=now_s)
        self._waiting.lost(lost, now_s=now_s)
        self._auto.finished(over)

    async def loads(self) -> list[ReplicaSnapshot]:
        """All that is known of the replicas, forecasts included."""
        return self._adjusted()

    async def directory(self) -> ClusterView:
        """All that is known of the replicas, for processes that lose their scheduler."""
        views = [s if s.forecast is None else s.changed(forecast=None) for s in self._adjusted()]
        return ClusterView(self._clock.unix_s(), views)

    # The replicas' and the controller's side

    async def report(
        self,
        snapshot: ReplicaSnapshot,
        accepted: Sequence[str] = (),
        outcomes: Sequence[LengthOutcome] = (),
    ) -> ReportOptions:
        """A replica's load.

        Args:
            accepted: Sequences that arrived there since its last report; they are in the load.
            outcomes: What came of length predictions since then.

        Returns:
            What is asked of it.
        """
        snapshot, name = checked(snapshot, self._misread), snapshot.info.name
        known = self._snapshots.get(name)
        if known is None or known.sent_s <= snapshot.sent_s:
            self._snapshots[name] = snapshot
        self._inflight.reported(snapshot, list(accepted))
        self._reported.set()
        return self._rescheduling.reported(snapshot, outcomes)

    async def moved(self, order: MigrationOrder, report: MigrationReport) -> None:
        """An order of the controller's to move a sequence is over."""
        self._rescheduling.governor.moves.told(order, report, self._clock.unix_s())

    async def replica_died(self, name: str) -> None:
        """Forget a replica that is gone."""
        self._snapshots.pop(name, None)
        self._misread.discard(name)
        self._inflight.forget(name)
        self._rescheduling.replica_died(name)

    async def configure(
        self, config: dict[str, Any], models: Sequence[str], ingress_age_s: float
    ) -> None:
        """What the controller wants served; repeated with each of its heartbeats.

        Args:
            ingress_age_s: Seconds since any ingress was heard of.
        """
        if config != self._plain:
            self._plain, self._config = config, QuadrigaConfig.model_validate(config)
            self._rescheduling.configure(self._config)
            self._placement = self._make_placement()
            self._num_queues = num_queues(self._config)
        self._models = frozenset(models)
        self._rescheduling.governor.served(self._models)
        self._heard_s = max(self._heard_s, self._clock.now_s() - ingress_age_s)

    async def set_route(self, route: Route | None) -> None:
        """Set where requests go whose model is chosen for them; None: models are not chosen."""
        self._auto.route = route

    async def ingress_heartbeat(self, ingress_id: str) -> None:
        """A sign of life of an ingress."""
        self._heard_s = self._clock.now_s()

    async def operators_view(self) -> dict[str, Any]:
        """Replicas with their forecasts, orders and recent decisions, all as plain values."""
        return self._rescheduling.status()

    async def moves(self, request_id: str) -> list[dict[str, Any]]:
        """What was decided lately about moving the sequences of one request."""
        return self._rescheduling.moves(request_id)

    async def ticks(self) -> str:
        """The newest rescheduling decisions with all they saw, one JSON line each."""
        return await asyncio.to_thread(self._rescheduling.ticks)

    async def stop(self) -> None:
        """End this actor soon after the answer is out."""
        background(self._end("stopped"))

    def _require_known(self, model: str) -> None:
        """Distinguish an unknown model from one whose replicas are not there yet."""
        if any(s.info.depth_class.model == model for s in self._snapshots.values()):
            return
        if self._models is None or model in self._models:
            self._auto.require_loaded(model, [])
            raise Unavailable(f"model {model!r} is starting; retry shortly", retry_after_s=1.0)
        if model == AUTO_MODEL and self._config.helios.enabled:  # the route comes soon
            raise Unavailable("no model is chosen yet; retry shortly", retry_after_s=1.0)
        served = ", ".join(sorted(self._models))
        raise UnknownModel(f"model {model!r} is not served; served: {served}", param="model")

    def _make_placement(self) -> Placement:
        settings = self._rescheduling.governor.settings
        return find_placement(self._config.scheduler.placement, settings)

    def _note_placed(self, name: str, request: PlaceRequest, length: LengthPrediction) -> None:
        promised = promised_to(self._snapshots[name], request, length)
        reserved = tokens_wanted(self._snapshots[name], request)
        self._waiting.placed(request.sequence_id, now_s=self._clock.now_s())
        sent = SentRequest(self._clock.now_s(), 0, reserved, promised, request.num_tokens)
        self._inflight.sent(name, request.sequence_id, sent)

    def _adjusted(self) -> list[ReplicaSnapshot]:
        """The snapshots with what is on its way to each replica added, and scouts marked.

        The route marks them before they are told themselves; until the first one they say it.
        """
        now_s, route = self._clock.now_s(), self._auto.route
        scouts = route.scouts if route is not None else ()
        found = [self._inflight.adjust(s, now_s=now_s) for s in self._snapshots.values()]
        return [s.changed(is_scout=True) if s.info.name in scouts else s for s in found]

    def _taking_work(self) -> list[ReplicaSnapshot]:
        return taking_work(
            self._adjusted(),
            now_unix_s=self._clock.unix_s(),
            max_age_s=self._config.scheduler.snapshot_max_age_s,
        )

    async def _watch(self) -> None:
        """Forget replicas that fell silent; end when no ingress was heard of for long."""
        orphan_s = self._config.lifecycle.orphan_timeout_s
        while True:
            late_s = await overslept_s(self._clock, min(1.0, orphan_s / 4))
            now_s = self._clock.now_s()
            self._heard_s = min(now_s, self._heard_s + late_s)
            orphan_s = self._config.lifecycle.orphan_timeout_s
            if now_s - self._heard_s > orphan_s:
                await self._end(f"no ingress was heard of for {orphan_s:.0f} s")
                return
            oldest = self._clock.unix_s() - FORGET_FACTOR * (
                self._config.scheduler.snapshot_max_age_s
            )
            for name in [n for n, s in self._snapshots.items() if s.taken_unix_s < oldest]:
                await self.replica_died(name)
            self._waiting.forget_late(now_s=self._clock.now_s(), now_unix_s=self._clock.unix_s())

    async def _end(self, reason: str) -> None:
        logger.info("the scheduler ends: %s", reason)
        await asyncio.sleep(0.05)
        await end_this_actor()
