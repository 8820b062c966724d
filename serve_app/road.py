"""The road of one sequence: admitted, submitted, followed from replica to replica, let go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from quadriga.clock import Clock
from quadriga.config import QuadrigaConfig
from quadriga.errors import Overloaded, QuadrigaError, ReplicaDied, ReplicaError, Unavailable
from quadriga.types import Admission, AdmitRequest, Emission
from serve_app.cluster import Cluster
from serve_app.metrics import IngressMetrics
from serve_app.pump import Pumps
from serve_app.reaper import Reaper
from serve_app.session import Choice, Session
from serve_app.tasks import Tasks
from serve_app.view import ClusterWatch

LAUNCH_ATTEMPTS = 3
ORPHAN_GRACE_S = 2.0
ADMISSION_PAUSE_S = 0.1
MAX_ADMISSION_PAUSE_S = 1.0

ChoiceEnded = Callable[[Session, Choice], None]


class Road:
    """All sequences of one ingress that are under way.

    Args:
        on_end: Called when a choice ended by itself, well or in an error; it is off the road then.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        cluster: Cluster,
        watch: ClusterWatch,
        tasks: Tasks,
        metrics: IngressMetrics,
        clock: Clock,
        *,
        ingress_id: str,
        on_end: ChoiceEnded,
    ) -> None:
        self._cluster = cluster
        self._watch = watch
        self._tasks = tasks
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end
        self._orphan_s = config.transport.lease_s + ORPHAN_GRACE_S
        self._patience_s = config.ingress.admission_patience_s
        self._live: dict[str, tuple[Session, Choice]] = {}
        self.reaper = Reaper(cluster)
        self.pumps = Pumps(
            cluster,
            ingress_id,
            self,
            metrics,
            tasks.spawn,
            poll_timeout_s=config.ingress.poll_timeout_s,
        )

    def __len__(self) -> int:
        return len(self._live)

    def sessions(self) -> list[Session]:
        """Every session with a sequence under way."""
        return list({id(session): session for session, _ in self._live.values()}.values())

    def send(self, session: Session, choice: Choice) -> None:
        """Start a sequence; its admission happens in the background."""
        self._live[choice.state.sequence_id] = (session, choice)
        self._tasks.spawn(self._launch(session, choice))

    def retire(self, choice: Choice, *, cancel: bool) -> None:
        """Take a sequence off the road, and have it freed where it lives; harmless twice."""
        sequence_id = choice.state.sequence_id
        if self._live.pop(sequence_id, None) is None:
            return
        for name in choice.holders:
            self.pumps.unwatch(name, sequence_id)
            if cancel:
                self.reaper.cancel(name, sequence_id)
        self.reaper.ended(sequence_id, choice.state.num_tokens)

    def end_orphans(self) -> None:
        """End sequences whose owner died and whose heirs never spoke."""
        lost_before_s = self._clock.now_s() - self._orphan_s
        for session, choice in list(self._live.values()):
            if choice.orphaned_s is not None and choice.orphaned_s < lost_before_s:
                self._lose(session, choice, ReplicaDied("the request's replica was lost"))

    # What the pumps call.

    def deliver(self, replica: str, emissions: list[Emission]) -> None:
        now_s = self._clock.now_s()
        woken: set[Session] = set()
        for emission in emissions:
            held = self._live.get(emission.sequence_id)
            if held is None:
                if emission.moved_to is not None:  # it moved while its cancellation was under way
                    self.reaper.cancel(emission.moved_to, emission.sequence_id)
                continue
            session, choice = held
            self._deliver_one(session, choice, replica, emission, now_s)
            woken.add(session)
        for session in woken:
            session.wake()

    def replica_lost(self, replica: str, error: QuadrigaError) -> None:
        for session, choice in list(self._live.values()):
            if choice.replica != replica:
                choice.heirs.discard(replica)
            elif choice.heirs:
                choice.orphaned_s = self._clock.now_s()  # an heir may own it already
            else:
                self._lose(session, choice, error)

    def _deliver_one(
        self, session: Session, choice: Choice, replica: str, emission: Emission, now_s: float
    ) -> None:
        before = choice.holders
        num_new = choice.accept(replica, emission)
        if num_new:
            self._count(session, choice, num_new, now_s)
        after = choice.holders
        if after != before:
            for name in after - before:
                self.pumps.watch(name, choice.state.sequence_id)
            for name in before - after:
                self.pumps.unwatch(name, choice.state.sequence_id)
        if choice.done:
            # The replica knows of its own finish and error, but not of a stop string.
            self.retire(choice, cancel=emission.finish is None and emission.error is None)
            self._on_end(session, choice)

    def _lose(self, session: Session, choice: Choice, error: QuadrigaError) -> None:
        choice.fail(error)
        self.retire(choice, cancel=True)
        self._on_end(session, choice)
        session.wake()

    async def _launch(self, session: Session, choice: Choice) -> None:
        """Admit and submit; a failure ends the choice in that error."""
        try:
            await self._admit_and_submit(choice)
        except QuadrigaError as exc:
            self._metrics.refused.labels(exc.code).inc()
            self._lose(session, choice, exc)
            return
        choice.accepted_s = self._clock.now_s()
        waited_s = choice.accepted_s - session.arrived_s
        self._metrics.of(session.spec.model).queue_time.observe(waited_s)
        if choice.done and choice.replica is not None:  # it ended while it was being submitted
            self.reaper.cancel(choice.replica, choice.state.sequence_id)

    async def _admit_and_submit(self, choice: Choice) -> None:
        state = choice.state
        give_up_s = self._clock.now_s() + self._patience_s
        for attempt in range(1, LAUNCH_ATTEMPTS + 1):
            admission = await self._admit(choice, give_up_s)
            if admission is None:
                return
            replica = choice.replica = admission.prefill_replica
            self.pumps.watch(replica, state.sequence_id)
            try:
                await self._cluster.submit(replica, state)
                return
            except (ReplicaError, Overloaded):
                self.pumps.unwatch(replica, state.sequence_id)
                if attempt == LAUNCH_ATTEMPTS or choice.done:
                    raise
                self._rename(choice, replica, attempt)

    async def _admit(self, choice: Choice, give_up_s: float) -> Admission | None:
        """Ask for admission until it is given; None when the choice ended meanwhile.

        "Nobody is ready" is often over in a moment: after a stall of the machine every report is
        old at once although the replicas live. So it is asked again, ever more rarely, until
        `give_up_s` or the request's own deadline, which ends the choice.

        Raises: Unavailable at `give_up_s`; Overloaded, UnknownModel and ContextTooLong at once.
        """
        state = choice.state
        request = AdmitRequest(
            sequence_id=state.sequence_id,
            model=state.model,
            num_prompt_tokens=len(state.prompt_ids),
            max_tokens=state.sampling.max_tokens,
            priority=state.priority,
            deadline_unix_s=state.deadline_unix_s,
        )
        pause_s = ADMISSION_PAUSE_S
        while True:
            try:
                admission = await self._watch.admit(request)
                return None if choice.done else admission
            except Unavailable:
                left_s = give_up_s - self._clock.now_s()
                if left_s <= 0:
                    raise
            # Spread, so that those who wait do not all come back at once.
            await asyncio.sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
            if choice.done:
                return None
            pause_s = min(2 * pause_s, MAX_ADMISSION_PAUSE_S)

    def _rename(self, choice: Choice, replica: str, attempt: int) -> None:
        """A submission that timed out may still have arrived: its name must not run twice."""
        old = choice.state.sequence_id
        self.reaper.cancel(replica, old)
        choice.state.sequence_id = f"{old}.{attempt}"
        self._live[choice.state.sequence_id] = self._live.pop(old)

    def _count(self, session: Session, choice: Choice, num_new: int, now_s: float) -> None:
        """Record new tokens as the client experiences them."""
        series = self._metrics.of(session.spec.model)
        series.generation_tokens.inc(num_new)
        if choice.first_token_s is None:
            choice.first_token_s = choice.last_token_s = now_s
            series.ttft.observe(now_s - session.arrived_s)
            if choice.accepted_s is not None:
                series.prefill_time.observe(now_s - choice.accepted_s)
            num_new -= 1
        if num_new:
            mean_gap_s = (now_s - choice.last_token_s) / num_new
            for _ in range(num_new):
                series.inter_token.observe(mean_gap_s)
        choice.last_token_s = now_s
