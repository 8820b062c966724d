"""The front desk: takes validated requests, drives them through the cluster, keeps them resumable.

Both doors (HTTP and gRPC) call the same few methods here. The desk owns every request from its
admission to its end, and frees what the cluster holds for it on every path out.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quadriga.clock import Clock, SystemClock
from quadriga.config import QuadrigaConfig
from quadriga.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    QuadrigaError,
    ReplicaError,
    Unavailable,
)
from quadriga.metrics import IngressMetrics, view_gauges
from quadriga.text import StopMatcher
from quadriga.types import (
    Admission,
    AdmitRequest,
    ClusterView,
    Emission,
    FinishReason,
    ReplicaSnapshot,
    Role,
    SequenceState,
)
from serve_app.auth import ApiKeys
from serve_app.cluster import Cluster
from serve_app.models import ModelDirectory, ServedModel
from serve_app.pump import Pumps
from serve_app.session import Choice, Session
from serve_app.sessions import SessionStore
from serve_app.spec import GenerateSpec

logger = logging.getLogger("quadriga.ingress")

ENCODE_INLINE_CHARS = 2048
LAUNCH_ATTEMPTS = 3
REAP_INTERVAL_S = 0.02
HOUSEKEEPING_INTERVAL_S = 0.5
METRICS_INTERVAL_S = 1.0


class FrontDesk:
    """Everything one ingress replica knows and does, short of its two wire formats.

    Args:
        ingress_id: Unique in the cluster; replicas keep a mailbox for it.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        models: ModelDirectory,
        keys: ApiKeys,
        cluster: Cluster,
        *,
        ingress_id: str,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.models = models
        self.keys = keys
        self.ingress_id = ingress_id
        self.clock = clock or SystemClock()
        self.metrics = IngressMetrics(ingress_id)
        self.sessions = SessionStore(keep_s=config.ingress.orphan_request_s)
        self._cluster = cluster
        self._view: ClusterView | None = None
        self._view_taken_s = 0.0
        self._live: dict[str, tuple[Session, Choice]] = {}
        self._to_cancel: dict[str, list[str]] = {}
        self._ended: list[str] = []
        self._ended_tokens = 0
        self._num_open = 0
        self._work = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        # Ray cancels what a request started when the request is cancelled, and tells them apart
        # by context: tasks of the desk run in the context the desk was made in.
        self._context = contextvars.copy_context()
        self._pumps = Pumps(
            cluster,
            ingress_id,
            self,
            self.metrics,
            self.spawn,
            poll_timeout_s=config.ingress.poll_timeout_s,
        )
        self.draining = False

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the background loops; call once, inside the event loop."""
        beat_s = self.config.lifecycle.heartbeat_interval_s
        self.spawn(self._forever(self._reap, REAP_INTERVAL_S))
        self.spawn(self._forever(self._keep_house, HOUSEKEEPING_INTERVAL_S))
        self.spawn(self._forever(self._beat, beat_s))
        self.spawn(self._forever(self._push_metrics, METRICS_INTERVAL_S))

    async def close(self) -> None:
        """Cancel every request and stop all tasks."""
        self.draining = True
        for session in {id(s): s for s, _ in self._live.values()}.values():
            self.abort(session, Unavailable("the service is shutting down", retry_after_s=1.0))
        try:
            await asyncio.wait_for(self._flush(), timeout=5.0)
        except (TimeoutError, QuadrigaError):
            logger.warning("could not tell every replica about the shutdown")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task of the desk; its end is nobody's business."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a background task of the ingress failed", exc_info=task.exception())

    # --- what the doors call -------------------------------------------------------------------

    async def encode(self, model: ServedModel, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenise; long texts in a thread, so that nobody else's stream stands still."""
        if len(text) <= ENCODE_INLINE_CHARS:
            return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.get_running_loop().run_in_executor(
            self._encoder,
            lambda: model.tokenizer.encode(text, add_special_tokens=add_special_tokens),
        )

    def open(
        self,
        spec: GenerateSpec,
        *,
        key: tuple[str, str] | None = None,
        fingerprint: bytes = b"",
    ) -> Session:
        """Begin a request; its sequences are admitted in the background.

        Read the answer from `session.reader()`, and call `leave` when done with that reader.

        Args:
            key: (owner, idempotency key) under which the session can be resumed.
        """
        self._check_room()
        model = self.models.find(spec.model)
        session = Session(
            spec,
            [],
            created_unix_s=int(spec.arrival_unix_s),
            arrived_s=self.clock.now_s(),
            key=key,
            fingerprint=fingerprint,
        )
        for p, prompt in enumerate(spec.prompts):
            for k in range(spec.n):
                state = SequenceState(
                    sequence_id=f"{spec.request_id}-{uuid.uuid4().hex[:12]}",
                    request_id=spec.request_id,
                    model=spec.model,
                    prompt_ids=prompt.token_ids,
                    sampling=spec.sampling,
                    ingress_id=self.ingress_id,
                    arrival_unix_s=spec.arrival_unix_s,
                    deadline_unix_s=spec.deadline_unix_s,
                    choice=k,
                    priority=spec.priority,
                )
                session.choices.append(
                    Choice(
                        p * spec.n + k,
                        state,
                        model.tokenizer.detokenizer(),
                        StopMatcher(spec.stop),
                    )
                )
        self._num_open += 1
        self.metrics.open_requests.inc()
        self.metrics.prompt_tokens.labels(spec.model).inc(session.num_prompt_tokens)
        if key is not None:
            self.sessions.add(session)
        if spec.sampling.max_tokens == 0 and spec.sampling.num_prompt_logprobs is None:
            for choice in session.choices:  # only the prompt's own text was asked for
                choice.finish = FinishReason.LENGTH
            self._session_ended(session)
            return session
        for choice in session.choices:
            self._live[choice.state.sequence_id] = (session, choice)
            self.spawn(self._launch(session, choice))
        return session

    def open_or_resume(
        self, spec: GenerateSpec, key: tuple[str, str], fingerprint: bytes
    ) -> Session:
        """Return the session under `key`, or begin the request under it.

        Raises: InvalidRequest when the key belongs to a request with another fingerprint.
        """
        session = self.sessions.find(key, fingerprint)
        if session is not None:
            self.metrics.resumed.inc()
            return session
        return self.open(spec, key=key, fingerprint=fingerprint)

    def leave(self, session: Session) -> None:
        """A reader is gone: keep a resumable request for a while, cancel any other."""
        if session.readers or session.done:
            return
        if session.key is None:
            self.abort(session, Cancelled("the client went away"))
        else:
            session.abandoned_s = self.clock.now_s()

    def abort(self, session: Session, error: QuadrigaError) -> None:
        """End what still runs of a request in `error`, and free it everywhere."""
        if isinstance(error, Cancelled):
            running = sum(not choice.done for choice in session.choices)
            self.metrics.cancelled.labels(session.spec.model).inc(running)
        session.fail(error)
        for choice in session.choices:
            self._retire(choice, cancel=True)
        self._session_ended(session)

    def seconds_left(self, session: Session) -> float:
        """Until the request's deadline; at least a little, so that waits end in an error."""
        return max(0.001, session.spec.deadline_unix_s - self.clock.unix_s())

    def time_out(self, session: Session) -> DeadlineExceeded:
        """End a request that is beyond its deadline; returns the error it ended in."""
        allowed_s = session.spec.deadline_unix_s - session.spec.arrival_unix_s
        error = DeadlineExceeded(
            f"the request was not done within its deadline of {allowed_s:g} s", param="deadline_ms"
        )
        self.abort(session, error)
        return error

    def check_ready(self, model: str | None = None) -> None:
        """Raises: Unavailable while draining, or while nobody can serve (the model)."""
        if self.draining:
            raise Unavailable("the service is draining", retry_after_s=1.0)
        if self.clock.now_s() - self._view_taken_s > self.config.scheduler.snapshot_max_age_s * 2:
            raise Unavailable("the cluster has not been heard of lately", retry_after_s=1.0)
        for role in Role:
            if not any(True for _ in self._serving(role, model)):
                raise Unavailable(f"no {role} replica is ready", retry_after_s=1.0)

    async def metrics_page(self) -> bytes:
        """The whole cluster's metrics, own ones as of now. Raises: ReplicaError."""
        await self._cluster.push_metrics(self.ingress_id, self.metrics.registry.snapshot())
        page = await self._cluster.metrics()
        return page + view_gauges(self._view) if self._view is not None else page

    def _check_room(self) -> None:
        """Raises: Overloaded at the limit of open requests; Unavailable while draining."""
        if self.draining:
            raise Unavailable("the service is draining", retry_after_s=1.0)
        limit = self.config.ingress.max_ongoing_requests
        if self._num_open >= limit:
            self.metrics.refused.labels("ingress_full").inc()
            raise Overloaded(
                f"this ingress holds its limit of {limit} requests; retry shortly",
                retry_after_s=1.0,
            )

    # --- what the pumps call -------------------------------------------------------------------

    def deliver(self, replica: str, emissions: list[Emission]) -> None:
        now_s = self.clock.now_s()
        woken: set[Session] = set()
        for emission in emissions:
            held = self._live.get(emission.sequence_id)
            if held is None:
                if emission.moved_to is not None:  # it moved while its cancellation was under way
                    self._cancel_at(emission.moved_to, emission.sequence_id)
                continue
            session, choice = held
            home = choice.replica
            num_new = choice.accept(replica, emission)
            if num_new:
                self._count_tokens(session, choice, num_new, now_s)
            if choice.replica != home:
                self._pumps.watch(choice.replica or replica, choice.state.sequence_id)
                if home is not None:
                    self._pumps.unwatch(home, choice.state.sequence_id)
            if choice.done:
                # The replica knows of its own finish and error, but not of a stop string.
                self._retire(choice, cancel=emission.finish is None and emission.error is None)
                self._choice_ended(session, choice, now_s)
            woken.add(session)
        for session in woken:
            session.wake()

    def replica_lost(self, replica: str, error: QuadrigaError) -> None:
        for session, choice in list(self._live.values()):
            if choice.replica == replica:
                choice.fail(error)
                self._retire(choice, cancel=False)
                self._choice_ended(session, choice, self.clock.now_s())
                session.wake()

    # --- the road of one sequence --------------------------------------------------------------

    async def _launch(self, session: Session, choice: Choice) -> None:
        """Admit and submit one sequence; on failure the whole request ends."""
        try:
            await self._admit_and_submit(choice)
        except QuadrigaError as exc:
            self.metrics.refused.labels(exc.code).inc()
            self.abort(session, exc)
        else:
            choice.accepted_s = self.clock.now_s()
            self.metrics.queue_time.labels(session.spec.model).observe(
                choice.accepted_s - session.arrived_s
            )
            if choice.done:  # it ended while the submission was on its way
                self._cancel_at(choice.replica, choice.state.sequence_id)

    async def _admit_and_submit(self, choice: Choice) -> None:
        state = choice.state
        request = AdmitRequest(
            sequence_id=state.sequence_id,
            model=state.model,
            num_prompt_tokens=len(state.prompt_ids),
            max_tokens=state.sampling.max_tokens,
            priority=state.priority,
            deadline_unix_s=state.deadline_unix_s,
        )
        for attempt in range(1, LAUNCH_ATTEMPTS + 1):
            admission = await self._admit(request)
            if choice.done:
                return
            replica = admission.prefill_replica
            choice.replica = replica
            self._pumps.watch(replica, state.sequence_id)
            try:
                await self._cluster.submit(replica, state)
                return
            except (ReplicaError, Overloaded):
                self._pumps.unwatch(replica, state.sequence_id)
                if attempt == LAUNCH_ATTEMPTS or choice.done:
                    raise
                # A submission that timed out may still have arrived: never run twice.
                self._cancel_at(replica, state.sequence_id)
                state.sequence_id, old = f"{state.sequence_id}r", state.sequence_id
                self._live[state.sequence_id] = self._live.pop(old)

    async def _admit(self, request: AdmitRequest) -> Admission:
        try:
            return await self._cluster.admit(request)
        except ReplicaError as exc:
            return self._admit_by_view(request, exc)

    def _admit_by_view(self, request: AdmitRequest, cause: ReplicaError) -> Admission:
        """The scheduler is away: the least loaded prefill replica of the last view takes it."""
        candidates = list(self._serving(Role.PREFILL, request.model))
        if not candidates:
            raise Unavailable(
                "the scheduler is away and no replica is known", retry_after_s=2.0
            ) from cause
        best = min(candidates, key=lambda s: (s.waiting_tokens, s.num_waiting, s.info.name))
        return Admission(best.info.name, best.info.depth_class)

    def _serving(self, role: Role, model: str | None) -> list[ReplicaSnapshot]:
        snapshots = self._view.snapshots if self._view is not None else []
        return [
            s
            for s in snapshots
            if s.info.role is role
            and not s.draining
            and (model is None or s.info.depth_class.model == model)
        ]

    def _count_tokens(self, session: Session, choice: Choice, num_new: int, now_s: float) -> None:
        model = session.spec.model
        self.metrics.generation_tokens.labels(model).inc(num_new)
        if choice.first_token_s is None:
            choice.first_token_s = now_s
            self.metrics.ttft.labels(model).observe(now_s - session.arrived_s)
            if choice.accepted_s is not None:
                self.metrics.prefill_time.labels(model).observe(now_s - choice.accepted_s)
            num_new -= 1
        if num_new:
            gap = self.metrics.inter_token.labels(model)
            mean_gap_s = (now_s - choice.last_token_s) / num_new if choice.last_token_s else 0.0
            for _ in range(num_new):
                gap.observe(mean_gap_s)
        choice.last_token_s = now_s

    def _retire(self, choice: Choice, *, cancel: bool) -> None:
        """Forget a sequence that ended, and have it freed where it lives."""
        sequence_id = choice.state.sequence_id
        if self._live.pop(sequence_id, None) is None:
            return
        if choice.replica is not None:
            self._pumps.unwatch(choice.replica, sequence_id)
            if cancel:
                self._cancel_at(choice.replica, sequence_id)
        self._ended.append(sequence_id)
        self._ended_tokens += choice.state.num_tokens
        self._work.set()

    def _cancel_at(self, replica: str | None, sequence_id: str) -> None:
        if replica is not None:
            self._to_cancel.setdefault(replica, []).append(sequence_id)
            self._work.set()

    def _choice_ended(self, session: Session, choice: Choice, now_s: float) -> None:
        model = session.spec.model
        if choice.finish is not None:
            self.metrics.success.labels(model, choice.finish.value).inc()
            num_after_first = len(choice.state.output_ids) - 1
            if choice.first_token_s is not None and num_after_first > 0:
                decode_s = now_s - choice.first_token_s
                self.metrics.decode_time.labels(model).observe(decode_s)
                mean_s = decode_s / num_after_first
                self.metrics.per_output_token.labels(model).observe(mean_s)
        if choice.error is not None:
            self.abort(session, choice.error)
        elif session.done:
            self._session_ended(session)

    def _session_ended(self, session: Session) -> None:
        if session.ended_s is not None:
            return
        session.ended_s = self.clock.now_s()
        self._num_open -= 1
        self.metrics.open_requests.dec()
        self.metrics.e2e.labels(session.spec.model).observe(session.ended_s - session.arrived_s)

    # --- background loops ----------------------------------------------------------------------

    async def _forever(self, turn: Callable[[], Awaitable[None]], pause_s: float) -> None:
        """Repeat `turn`; whatever one turn fails with, the next one is tried."""
        while True:
            try:
                await turn()
            except QuadrigaError as exc:
                logger.warning("%s: %s", turn.__name__.strip("_"), exc.message)
            except Exception:  # a border: the loop must outlive a bug in one turn
                logger.exception("%s failed", turn.__name__.strip("_"))
            await asyncio.sleep(pause_s)

    async def _reap(self) -> None:
        """Tell replicas what was cancelled and the scheduler what is over, many at a time."""
        await self._work.wait()
        self._work.clear()
        await self._flush()

    async def _flush(self) -> None:
        cancels, self._to_cancel = self._to_cancel, {}
        ended, self._ended = self._ended, []
        tokens, self._ended_tokens = self._ended_tokens, 0
        calls = [self._cluster.cancel(replica, ids) for replica, ids in cancels.items()]
        if ended:
            calls.append(self._cluster.finished(ended, tokens))
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, ReplicaError):
                raise result

    async def _keep_house(self) -> None:
        """End what is beyond its time, and refresh the view of the cluster."""
        for session in {id(s): s for s, _ in self._live.values()}.values():
            if self.clock.unix_s() >= session.spec.deadline_unix_s:
                self.time_out(session)
        for session in self.sessions.expire(self.clock.now_s()):
            self.abort(session, Cancelled("nobody came back for the request"))
        self._view = await self._cluster.directory()
        self._view_taken_s = self.clock.now_s()

    async def _beat(self) -> None:
        """Tell everybody that this ingress lives."""
        snapshots = self._view.snapshots if self._view is not None else []
        known = {s.info.name for s in snapshots} | {*self._pumps.replicas}
        await self._cluster.heartbeat(self.ingress_id, sorted(known))

    async def _push_metrics(self) -> None:
        await self._cluster.push_metrics(self.ingress_id, self.metrics.registry.snapshot())
