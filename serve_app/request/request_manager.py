"""All sequences of one ingress: submitted, followed from replica to replica, rebuilt, ended."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from quadriga.clock import Clock
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.output import EngineOutput
from quadriga.core.request import ResumableSequence
from quadriga.core.routing import Admission
from quadriga.errors import (
    Cancelled,
    NotFound,
    Overloaded,
    QuadrigaError,
    ReplicaDied,
    ReplicaError,
    TakenOver,
    Unavailable,
)
from quadriga.observability.running_requests import MOST_SHOWN
from serve_app.openai.errors import as_quadriga
from serve_app.ops.auto_reports import AutoReports
from serve_app.ops.metrics import IngressMetrics
from serve_app.ops.tasks import Tasks
from serve_app.request.cluster_client import (
    CancellationBatcher,
    ClusterClient,
    ClusterStateCache,
    unowned,
)
from serve_app.request.output_poller import OutputPoller, silent_replicas
from serve_app.request.request import Request
from serve_app.request.sequence_request import SequenceRequest

logger = logging.getLogger("quadriga.ingress")

DOUBT_SLACK_S = 1.0
"""A poll is answered so long after its own time-out at the latest, unless something is wrong."""
AUDIT_AFTER_S = 5.0
"""After so long without output of a sequence, its owners are asked whether they still have it."""
AUDIT_PAUSE_S = 1.0
"""They are asked again after this before the sequence counts as lost."""
SUBMIT_ATTEMPTS = 3
FIRST_PAUSE_S = 0.1
MAX_ADMISSION_PAUSE_S = 1.0
MAX_REBUILD_PAUSE_S = 2.0

SequenceEnded = Callable[[Request, SequenceRequest], None]


class RequestManager:
    """All sequences of one ingress that are under way.

    A new sequence is refused where the cluster is full, and after a few failed submissions. One
    that is rebuilt was admitted before: it waits for room, and for replicas that are being started,
    until `ingress.rebuild_patience_s`. The request's own deadline ends either.

    Args:
        on_end: Called when a sequence ended by itself, well or in an error; it is no longer under
            way then.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        cluster: ClusterClient,
        cluster_state: ClusterStateCache,
        tasks: Tasks,
        metrics: IngressMetrics,
        clock: Clock,
        *,
        ingress_id: str,
        on_end: SequenceEnded,
        reports: AutoReports | None = None,
    ) -> None:
        self._cluster = cluster
        self._cluster_state = cluster_state
        self._tasks = tasks
        self._metrics = metrics
        self._clock = clock
        self._on_end = on_end
        self._reports = reports
        self._ingress_id = ingress_id
        self._config = config.ingress
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

    def open_requests(self) -> list[Request]:
        """Every request with a sequence under way."""
        return list({id(request): request for request, _ in self._live.values()}.values())

    def longest_running(self) -> list[dict[str, Any]]:
        """The sequences that came first, as operators see them; only so many."""
        first = heapq.nsmallest(MOST_SHOWN, self._live.values(), key=lambda held: held[0].arrived_s)
        return [request.running(sequence, self._clock.now_s()) for request, sequence in first]

    def send(self, request: Request) -> None:
        """Start the sequences of a request that are new; admission happens in the background."""
        new = [sequence for sequence in request.sequences if not sequence.was_adopted]
        self._live |= {s.state.sequence_id: (request, s) for s in new}
        if new:
            name = new[0].state.sequence_id
            self._tasks.spawn(self._launch(request, new[0], name, others=new[1:]))

    def adopt(
        self, request: Request, sequence: SequenceRequest, resumable: ResumableSequence
    ) -> None:
        """Go on with a sequence that was another ingress's."""
        sequence.adopt(resumable)
        now_s = self._clock.now_s()
        sequence.last_contact_s = sequence.accepted_s = sequence.lost_s = now_s
        self._live[resumable.sequence_id] = (request, sequence)
        self.output_poller.watch(resumable.replica, resumable.sequence_id)
        self._tasks.spawn(self._take_over(sequence, resumable))

    def retire(self, sequence: SequenceRequest, *, cancel: bool) -> None:
        """Follow a sequence no longer, and have it freed by its owners; harmless twice."""
        sequence_id = sequence.state.sequence_id
        if self._live.pop(sequence_id, None) is None:
            return
        error = sequence.error
        if sequence.lost_s is not None and not isinstance(error, Cancelled | TakenOver | None):
            self._metrics.recoveries.labels("failed").inc()
        for name in sequence.owners:
            self.output_poller.unwatch(name, sequence_id)
            if cancel:
                self.cancellations.cancel(name, sequence_id, is_ours=sequence.is_ours)
        self.cancellations.ended(sequence_id)

    def find_lost(self) -> None:
        """Give up replicas that are silent for too long; audit sequences without output."""
        for name in silent_replicas(
            self.output_poller.silences_s(),
            self._cluster_state.view,
            limit_s=self._config.replica_silence_s,
            doubt_s=self._config.poll_timeout_s + DOUBT_SLACK_S,
            max_age_s=self._max_age_s,
        ):
            self.output_poller.give_up(name)
        now_s = self._clock.now_s()
        silent = []
        for _, sequence in self._live.values():
            if (
                sequence.last_contact_s is not None
                and now_s - sequence.last_contact_s > AUDIT_AFTER_S
            ):
                sequence.last_contact_s = now_s
                silent.append(sequence)
        if silent:
            self._tasks.spawn(self._audit(silent))

    # Output; what the poller calls.

    def deliver(self, replica: str, outputs: list[EngineOutput]) -> None:
        now_s = self._clock.now_s()
        woken: dict[Request, None] = {}  # in their order, and that of every run
        for output in outputs:
            held = self._live.get(output.sequence_id)
            if held is None:
                if output.moved_to is not None:  # it moved while its cancellation was under way
                    self.cancellations.cancel(output.moved_to, output.sequence_id)
                continue
            request, sequence = held
            try:
                self._deliver_one(request, sequence, replica, output, now_s)
            except Exception as exc:  # the tokens of other sequences are in the same reply
                logger.exception("an output of %s could not be taken", replica)
                self._fail(request, sequence, as_quadriga(exc))
            woken[request] = None
        for request in woken:
            request.wake()

    def replica_lost(self, replica: str, error: QuadrigaError) -> None:
        self._cluster_state.forget(replica)
        in_doubt = []
        for request, sequence in list(self._live.values()):
            if sequence.done or replica not in sequence.owners:
                continue
            if sequence.lose(replica):
                self._rebuild(request, sequence, error)
            else:  # it was being handed over: the other owner may have it, or never get it
                in_doubt.append(sequence)
                self._close_gap(request, sequence)
        if in_doubt:
            self._tasks.spawn(self._rebuild_unowned(in_doubt))

    def _deliver_one(
        self,
        request: Request,
        sequence: SequenceRequest,
        replica: str,
        output: EngineOutput,
        now_s: float,
    ) -> None:
        before = sequence.owners
        num_new = sequence.accept(replica, output)
        if sequence.last_contact_s is not None:
            sequence.last_contact_s = now_s
        if num_new:
            self._metrics.count_tokens(request, sequence, num_new, now_s)
        after = sequence.owners
        if after != before:
            for name in after - before:
                self.output_poller.watch(name, sequence.state.sequence_id)
            for name in before - after:
                self.output_poller.unwatch(name, sequence.state.sequence_id)
        if sequence.done:
            # The replica knows of its own finish and error, but not of a stop string.
            self.retire(sequence, cancel=output.finish is None and output.error is None)
            self._on_end(request, sequence)
        elif sequence.failure is not None:
            self._rebuild(request, sequence, sequence.failure)
        elif before and not after:  # its move is done, and the destination died before
            self._rebuild(request, sequence, ReplicaDied(f"{replica} gave it to a dead replica"))
        else:
            self._close_gap(request, sequence)

    # Admission and submission.

    async def _launch(
        self,
        request: Request,
        sequence: SequenceRequest,
        name: str,
        others: Sequence[SequenceRequest] = (),
        admission: Admission | None = None,
    ) -> None:
        """Admit where it is not yet, and submit; a failure ends the sequence in that error.

        Args:
            others: New ones of the request: all are let in together, or none.
        """
        try:
            is_accepted = await self._submit(request, sequence, name, others, admission)
        except QuadrigaError as exc:
            if sequence.num_rebuilds == 0 and request.error is None:  # once, whatever n is
                self._metrics.refused.labels(exc.code).inc()
            self._fail(request, sequence, exc)
            return
        except Exception as exc:  # this task is not awaited, and the client would hang
            logger.exception("a sequence could not be submitted")
            self._fail(request, sequence, as_quadriga(exc))
            return
        if is_accepted and sequence.accepted_s is None:
            sequence.accepted_s = self._clock.now_s()
            waited_s = sequence.accepted_s - request.arrived_s
            model = sequence.state.model if sequence.is_auto else request.model
            self._metrics.of(model).queue_time.observe(waited_s)

    async def _submit(
        self,
        request: Request,
        sequence: SequenceRequest,
        name: str,
        others: Sequence[SequenceRequest],
        admission: Admission | None,
    ) -> bool:
        """Have a sequence accepted under the name `name`.

        Returns:
            Whether it was; not where it ended, or was lost and got another name, before.

        That no replica is ready is often over in a moment: after a stall of the machine every
        report is old at once although the replicas run. So it is tried again, ever more rarely,
        but not where the cluster says that it takes longer than anybody waits here.

        Raises:
            QuadrigaError: No replica takes it, or none did for too long.
        """
        is_rebuild = sequence.num_rebuilds > 0
        config = self._config
        patience_s = config.rebuild_patience_s if is_rebuild else config.admission_patience_s
        give_up_s = self._clock.now_s() + patience_s
        wait_s = FIRST_PAUSE_S
        num_failures = 0
        if is_rebuild:
            await asyncio.sleep(rebuild_pause_s(sequence.num_stalled - 1))
        while sequence.is_named(name):
            try:
                if admission is None:
                    asked = [one.admit_request() for one in (sequence, *others)]
                    admission, *more = await self._cluster_state.admit(asked)
                    for other, its in zip(others, more, strict=True):
                        its_name = other.state.sequence_id
                        self._tasks.spawn(self._launch(request, other, its_name, admission=its))
                    others = ()
            except (Unavailable, Overloaded) as exc:
                is_long = isinstance(exc, Overloaded) or (exc.retry_after_s or 0.0) >= patience_s
                if is_long and not is_rebuild:
                    raise
                wait_s = await self._wait(give_up_s, wait_s, exc)
                continue
            if not sequence.is_named(name):
                return False
            try:
                if sequence.is_auto:
                    self._take_model(sequence, admission)
                await self._submit_to(sequence, name, admission.prefill_replica)
                return True
            except QuadrigaError as exc:
                if not sequence.is_named(name):  # it was submitted elsewhere, or is over
                    return False
                if not isinstance(exc, ReplicaError | Overloaded | Unavailable):
                    raise
                if isinstance(exc, ReplicaDied):
                    self._cluster_state.forget(admission.prefill_replica)
                # One that drains or starts may be named again until its next report is there.
                is_patient = is_rebuild or isinstance(exc, Unavailable)
                num_failures += not is_patient
                if num_failures == SUBMIT_ATTEMPTS:
                    raise
                # The submission may still have arrived, and must not run twice under one name.
                name, admission = self._rename(sequence), None
                if is_patient:
                    wait_s = await self._wait(give_up_s, wait_s, exc)
        return False

    def _take_model(self, sequence: SequenceRequest, admission: Admission) -> None:
        """Note the model that was chosen, and whether the cluster wants the answer scored."""
        state, chosen = sequence.state, admission.depth_class
        if state.model != chosen.model:
            # Tokens of another model count as run through all layers of this one.
            state.exit_layers = [chosen.depth] * len(state.output_ids)
            state.model = chosen.model
        if admission.is_scored and state.sampling.num_logprobs is None:
            state.sampling = replace(state.sampling, num_logprobs=0)
        if self._reports is not None:
            self._reports.admitted(sequence, admission.profile)

    async def _submit_to(self, sequence: SequenceRequest, name: str, replica: str) -> None:
        sequence.replica = replica
        self.output_poller.watch(replica, name)
        # A copy: it is sent in a moment, with others, and the sequence may be renamed until then.
        await self._cluster.submit(replica, sequence.state.copy())
        if sequence.is_named(name):
            sequence.last_contact_s = self._clock.now_s()
        else:  # it ended, or was lost, while it was being submitted
            self.cancellations.cancel(replica, name)

    async def _wait(self, give_up_s: float, wait_s: float, error: QuadrigaError) -> float:
        """Wait a moment; returns how long the next one is. Raises: `error`, at `give_up_s`."""
        left_s = give_up_s - self._clock.now_s()
        if left_s <= 0:
            raise error
        # Spread, so that those who wait do not all come back at once.
        await asyncio.sleep(min(left_s, wait_s * random.uniform(0.5, 1.0)))
        return min(2 * wait_s, MAX_ADMISSION_PAUSE_S)

    # Losses.

    def _close_gap(self, request: Request, sequence: SequenceRequest) -> None:
        """Where an owner died with its last tokens, have the next one send them again."""
        resumable = sequence.take_gap()
        if resumable is None:
            return
        sequence.lost_s = self._clock.now_s()
        self._tasks.spawn(self._take_over(sequence, resumable))

    async def _take_over(self, sequence: SequenceRequest, resumable: ResumableSequence) -> None:
        """Have the tokens of a sequence that runs at a replica sent here."""
        name, replica = resumable.sequence_id, resumable.replica
        error = ReplicaDied(f"{replica} has let go of the request", code="orphan_lost")
        try:
            is_there = await self._cluster.adopt(replica, name, self._ingress_id)
        except QuadrigaError as exc:
            is_there, error = False, ReplicaDied(exc.message, code="orphan_lost")
        except Exception:  # this task is not awaited, and the client would hang
            logger.exception("%s could not be asked for a sequence", replica)
            is_there = False
        if is_there:
            sequence.is_ours = True
        held = self._live.get(name)
        if not is_there and held is not None and sequence.is_named(name):
            self._rebuild(*held, error)

    def _rebuild(self, request: Request, sequence: SequenceRequest, error: QuadrigaError) -> None:
        """Begin a lost sequence anew, or end it where that did not help."""
        if sequence.lost_s is None:
            sequence.lost_s = self._clock.now_s()
        if sequence.is_unknown:
            self._fail(
                request,
                sequence,
                NotFound(
                    "whoever held the request is gone; begin it anew without a resume index",
                    param="idempotency-key",
                ),
            )
            return
        if sequence.num_stalled >= self._config.max_rebuilds:
            self._fail(request, sequence, error)
            return
        sequence.num_rebuilds += 1
        sequence.num_stalled += 1
        self._metrics.rebuilds.labels(error.code).inc()
        # A dead replica may have handed it on, and died before it reported to which.
        others = self._cluster_state.names if isinstance(error, ReplicaDied) else set()
        name = self._rename(sequence, others)
        self._tasks.spawn(self._launch(request, sequence, name))

    def _fail(self, request: Request, sequence: SequenceRequest, error: QuadrigaError) -> None:
        sequence.fail(error)
        self.retire(sequence, cancel=True)
        self._on_end(request, sequence)
        request.wake()

    async def _audit(self, sequences: list[SequenceRequest]) -> None:
        """Ask twice for silent sequences: an ending may be on its way while no replica has them."""
        before = [(sequence, sequence.num_contacts) for sequence in sequences]
        missing = await unowned(self._cluster, sequences)
        if not missing:
            return
        await asyncio.sleep(AUDIT_PAUSE_S)
        still = [
            sequence
            for sequence, num_contacts in before
            if sequence.num_contacts == num_contacts and sequence.state.sequence_id in missing
        ]
        await self._rebuild_unowned([sequence for sequence in still if not sequence.done])

    async def _rebuild_unowned(self, sequences: list[SequenceRequest]) -> None:
        """Begin those of the sequences anew that no replica has any more."""
        for sequence_id in await unowned(self._cluster, sequences):
            held = self._live.get(sequence_id)
            if held is not None:
                self._rebuild(*held, ReplicaDied("the replica that held the request was lost"))

    def _rename(self, sequence: SequenceRequest, others: Collection[str] = ()) -> str:
        """Have a sequence freed at all owners, and let it go on under a new name.

        Args:
            others: Replicas that may have it beside the known owners.
        """
        old = sequence.state.sequence_id
        for name in sequence.owners:
            self.output_poller.unwatch(name, old)
        for name in sequence.owners.union(others):
            self.cancellations.cancel(name, old, is_ours=sequence.is_ours)
        self.cancellations.ended(old, is_lost=True)
        new = sequence.rename()
        self._live[new] = self._live.pop(old)
        return new


def rebuild_pause_s(num_stalled: int) -> float:
    """How long to wait before the next rebuild, after so many in a row that brought no token.

    The first goes at once. The others are spread, so that sequences which were lost together do
    not all come back together.
    """
    if num_stalled == 0:
        return 0.0
    longest_s = min(MAX_REBUILD_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (num_stalled - 1))
    return longest_s * random.uniform(0.5, 1.0)
