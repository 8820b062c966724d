"""The road of one sequence: admitted, submitted, followed from replica to replica, let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from quadriga.clock import Clock
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.output import EngineOutput
from quadriga.core.request import ResumableSequence
from quadriga.errors import NotFound, QuadrigaError, ReplicaDied
from serve_app.openai.errors import as_quadriga
from serve_app.ops.auto_reports import AutoReports
from serve_app.ops.metrics import IngressMetrics
from serve_app.ops.tasks import Tasks
from serve_app.request.cancellation import CancellationBatcher
from serve_app.request.cluster import Cluster
from serve_app.request.cluster_state import ClusterStateCache
from serve_app.request.failure_detector import gone
from serve_app.request.output_poller import OutputPoller
from serve_app.request.recovery import AUDIT_AFTER_S, AUDIT_PAUSE_S, unclaimed
from serve_app.request.request import Request
from serve_app.request.request_submitter import RequestSubmitter
from serve_app.request.sequence_request import SequenceRequest

logger = logging.getLogger("quadriga.ingress")

DOUBT_SLACK_S = 1.0
"""A poll is answered so long after its own time-out at the latest, unless something is wrong."""

ChoiceEnded = Callable[[Request, SequenceRequest], None]


class RequestManager:
    """All sequences of one ingress that are under way.

    Args:
        on_end: Called when a choice ended by itself, well or in an error; it is off the road then.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        cluster: Cluster,
        watch: ClusterStateCache,
        tasks: Tasks,
        metrics: IngressMetrics,
        clock: Clock,
        *,
        ingress_id: str,
        on_end: ChoiceEnded,
        reports: AutoReports | None = None,
    ) -> None:
        self._cluster = cluster
        self._watch = watch
        self._tasks = tasks
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end
        self._ingress_id = ingress_id
        self._max_rebuilds = config.ingress.max_rebuilds
        self._silence_s = config.ingress.replica_silence_s
        self._doubt_s = config.ingress.poll_timeout_s + DOUBT_SLACK_S
        self._max_age_s = config.scheduler.snapshot_max_age_s
        self._live: dict[str, tuple[Request, SequenceRequest]] = {}
        self.cancellations = CancellationBatcher(cluster, tasks, ingress_id)
        self.output_poller = OutputPoller(
            cluster,
            ingress_id,
            self,
            metrics,
            tasks.spawn,
            poll_timeout_s=config.ingress.poll_timeout_s,
        )
        self._launcher = RequestSubmitter(
            config.ingress,
            cluster,
            watch,
            clock,
            self.output_poller,
            self.cancellations,
            rename=self._rename,
            reports=reports,
        )

    def __len__(self) -> int:
        return len(self._live)

    def sessions(self) -> list[Request]:
        """Every session with a sequence under way."""
        return list({id(session): session for session, _ in self._live.values()}.values())

    def send(self, session: Request, choice: SequenceRequest) -> None:
        """Start a sequence; its admission happens in the background."""
        name = choice.state.sequence_id
        self._live[name] = (session, choice)
        self._tasks.spawn(self._launch(session, choice, name))

    def adopt(
        self, session: Request, choice: SequenceRequest, resumable_sequence: ResumableSequence
    ) -> None:
        """Go on with a sequence that was another ingress's."""
        choice.adopt(resumable_sequence)
        choice.heard_s = choice.accepted_s = choice.lost_s = self._clock.now_s()
        self._live[resumable_sequence.sequence_id] = (session, choice)
        self.output_poller.watch(resumable_sequence.replica, resumable_sequence.sequence_id)
        self._tasks.spawn(self._take_over(choice, resumable_sequence))

    def retire(self, choice: SequenceRequest, *, cancel: bool) -> None:
        """Take a sequence off the road, and have it freed where it lives; harmless twice."""
        sequence_id = choice.state.sequence_id
        if self._live.pop(sequence_id, None) is None:
            return
        for name in choice.holders:
            self.output_poller.unwatch(name, sequence_id)
            if cancel:
                self.cancellations.cancel(name, sequence_id, is_ours=choice.is_ours)
        self.cancellations.ended(sequence_id, choice.state.num_tokens)

    def look_after(self) -> None:
        """Give up replicas that are silent for too long, and ask after sequences that are."""
        for name in gone(
            self.output_poller.silences_s(),
            self._watch.view,
            limit_s=self._silence_s,
            doubt_s=self._doubt_s,
            max_age_s=self._max_age_s,
        ):
            self.output_poller.give_up(name)
        now_s = self._clock.now_s()
        silent = []
        for _, choice in self._live.values():
            if choice.heard_s is not None and now_s - choice.heard_s > AUDIT_AFTER_S:
                choice.heard_s = now_s
                silent.append(choice)
        if silent:
            self._tasks.spawn(self._audit(silent))

    # What the pumps call.

    def deliver(self, replica: str, emissions: list[EngineOutput]) -> None:
        now_s = self._clock.now_s()
        woken: set[Request] = set()
        for emission in emissions:
            held = self._live.get(emission.sequence_id)
            if held is None:
                if emission.moved_to is not None:  # it moved while its cancellation was under way
                    self.cancellations.cancel(emission.moved_to, emission.sequence_id)
                continue
            session, choice = held
            try:
                self._deliver_one(session, choice, replica, emission, now_s)
            except Exception as exc:  # a border: the tokens of others are in the same reply
                logger.exception("an emission of %s could not be taken", replica)
                self._fail(session, choice, as_quadriga(exc))
            woken.add(session)
        for session in woken:
            session.wake()

    def replica_lost(self, replica: str, error: QuadrigaError) -> None:
        self._watch.forget(replica)
        in_doubt = []
        for session, choice in list(self._live.values()):
            if choice.done or replica not in choice.holders:
                continue
            if choice.lose(replica):
                self._lose(session, choice, error)
            else:  # on its way from one to another: who is left may have it, or never get it
                in_doubt.append(choice)
                self._close_gap(session, choice)
        if in_doubt:
            self._tasks.spawn(self._inquire(in_doubt))

    def _deliver_one(
        self,
        session: Request,
        choice: SequenceRequest,
        replica: str,
        emission: EngineOutput,
        now_s: float,
    ) -> None:
        before = choice.holders
        num_new = choice.accept(replica, emission)
        if choice.heard_s is not None:
            choice.heard_s = now_s
        if num_new:
            self._count(session, choice, num_new, now_s)
        after = choice.holders
        if after != before:
            for name in after - before:
                self.output_poller.watch(name, choice.state.sequence_id)
            for name in before - after:
                self.output_poller.unwatch(name, choice.state.sequence_id)
        if choice.done:
            # The replica knows of its own finish and error, but not of a stop string.
            self.retire(choice, cancel=emission.finish is None and emission.error is None)
            self._on_end(session, choice)
        elif choice.failure is not None:
            self._lose(session, choice, choice.failure)
        else:
            self._close_gap(session, choice)

    def _close_gap(self, session: Request, choice: SequenceRequest) -> None:
        """Where an owner died with its last tokens, have the one that goes on say them again."""
        heir = choice.take_gap()
        if heir is None:
            return
        if choice.is_reported:
            error = ReplicaDied("its owner died with its last tokens", code="tokens_lost")
            self._lose(session, choice, error)
            return
        choice.lost_s = self._clock.now_s()
        self._tasks.spawn(self._take_over(choice, heir))

    async def _take_over(
        self, choice: SequenceRequest, resumable_sequence: ResumableSequence
    ) -> None:
        """Have an orphan's tokens sent here."""
        error = ReplicaDied(
            f"{resumable_sequence.replica} has let go of the request", code="orphan_lost"
        )
        try:
            is_there = await self._cluster.adopt(
                resumable_sequence.replica, resumable_sequence.sequence_id, self._ingress_id
            )
        except QuadrigaError as exc:
            is_there, error = False, ReplicaDied(exc.message, code="orphan_lost")
        except Exception:  # a border: nobody awaits this task, and the client would hang
            logger.exception("%s could not be asked for an orphan", resumable_sequence.replica)
            is_there = False
        if is_there:
            choice.is_ours = True
        held = self._live.get(resumable_sequence.sequence_id)
        if not is_there and held is not None and choice.is_called(resumable_sequence.sequence_id):
            self._lose(*held, error)

    def _lose(self, session: Request, choice: SequenceRequest, error: QuadrigaError) -> None:
        """Nobody has the sequence any more: begin it anew, or end it where that was no use."""
        if choice.is_unknown:
            self._fail(
                session,
                choice,
                NotFound(
                    "whoever held the request is gone; begin it anew without a resume index",
                    param="idempotency-key",
                ),
            )
            return
        if choice.num_stalled >= self._max_rebuilds:
            self._fail(session, choice, error)
            return
        if choice.lost_s is None:
            choice.lost_s = self._clock.now_s()
        choice.num_rebuilds += 1
        choice.num_stalled += 1
        self._metrics.rebuilds.labels(error.code).inc()
        # Who died may have handed it on, and not lived to say to whom.
        others = self._watch.names if isinstance(error, ReplicaDied) else set()
        name = self._rename(choice, others)
        self._tasks.spawn(self._launch(session, choice, name))

    def _fail(self, session: Request, choice: SequenceRequest, error: QuadrigaError) -> None:
        if choice.num_rebuilds > 0:
            self._metrics.recoveries.labels("failed").inc()
        choice.fail(error)
        self.retire(choice, cancel=True)
        self._on_end(session, choice)
        session.wake()

    async def _audit(self, choices: list[SequenceRequest]) -> None:
        """Ask after silent sequences, twice: an ending may be on its way while nobody has them."""
        before = [(choice, choice.num_heard) for choice in choices]
        missing = await unclaimed(self._cluster, choices)
        if not missing:
            return
        await asyncio.sleep(AUDIT_PAUSE_S)
        still = [
            choice
            for choice, num_heard in before
            if choice.num_heard == num_heard and choice.state.sequence_id in missing
        ]
        await self._inquire([choice for choice in still if not choice.done])

    async def _inquire(self, choices: list[SequenceRequest]) -> None:
        """Begin those of the sequences anew that nobody has any more."""
        for sequence_id in await unclaimed(self._cluster, choices):
            held = self._live.get(sequence_id)
            if held is not None:
                self._lose(*held, ReplicaDied("the replica that held the request was lost"))

    async def _launch(self, session: Request, choice: SequenceRequest, name: str) -> None:
        """Admit and submit; a failure ends the choice in that error."""
        try:
            is_accepted = await self._launcher.launch(choice, name)
        except QuadrigaError as exc:
            if choice.num_rebuilds == 0:
                self._metrics.refused.labels(exc.code).inc()
            self._fail(session, choice, exc)
            return
        except Exception as exc:  # a border: nobody awaits this task, and the client would hang
            logger.exception("a sequence could not be launched")
            self._fail(session, choice, as_quadriga(exc))
            return
        if is_accepted and choice.accepted_s is None:
            choice.accepted_s = self._clock.now_s()
            waited_s = choice.accepted_s - session.arrived_s
            self._metrics.of(session.spec.model).queue_time.observe(waited_s)

    def _rename(self, choice: SequenceRequest, others: Collection[str] = ()) -> str:
        """Have a sequence freed wherever it may be, and let it go on under a new name.

        Args:
            others: Replicas that may have it beside those known to.
        """
        old = choice.state.sequence_id
        for name in choice.holders:
            self.output_poller.unwatch(name, old)
        for name in choice.holders.union(others):
            self.cancellations.cancel(name, old, is_ours=choice.is_ours)
        self.cancellations.ended(old, 0)
        new = choice.rename()
        self._live[new] = self._live.pop(old)
        return new

    def _count(self, session: Request, choice: SequenceRequest, num_new: int, now_s: float) -> None:
        """Record new tokens as the client experiences them."""
        series = self._metrics.of(session.spec.model)
        series.generation_tokens.inc(num_new)
        if choice.lost_s is not None:
            is_adopted = choice.num_rebuilds == 0
            self._metrics.recoveries.labels("adopted" if is_adopted else "recovered").inc()
            self._metrics.recovery_time.observe(now_s - choice.lost_s)
            choice.lost_s, choice.num_stalled = None, 0
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
