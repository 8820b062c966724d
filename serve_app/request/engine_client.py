"""The front desk: takes validated requests, drives them through the cluster, keeps them resumable.

Both doors (HTTP and gRPC) call the same few methods here. The desk owns every request from its
admission to its end, and frees what the cluster holds for it on every path out.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from quadriga.clock import Clock, SystemClock
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.request import FinishReason, ResumableSequence, SequenceState
from quadriga.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    NotFound,
    Overloaded,
    QuadrigaError,
    ReplicaError,
    Unavailable,
)
from quadriga.observability import tracing
from quadriga.text import StopMatcher
from serve_app.auth.api_keys import ApiKeys
from serve_app.auth.concurrency_limiter import MAX_BODIES, MAX_READERS, ConcurrencyLimiter
from serve_app.auth.keys import ANONYMOUS, ApiKey
from serve_app.auth.rate_limiter import QuotaReservation, RateLimiter
from serve_app.http.server_metrics import HTTP_SERVER
from serve_app.openai.models import ModelDirectory, ServedModel
from serve_app.ops.auto_reports import AutoReports
from serve_app.ops.metrics import IngressMetrics, view_gauges
from serve_app.ops.tasks import Tasks
from serve_app.request.cluster import Cluster
from serve_app.request.cluster_state import ClusterStateCache
from serve_app.request.request import Request
from serve_app.request.request_log import RequestLogRecord, trace_begun
from serve_app.request.request_manager import RequestManager
from serve_app.request.requests import RequestStore
from serve_app.request.resume_token import claims, visitors
from serve_app.request.sequence_request import SequenceRequest
from serve_app.request.spec import GenerateSpec

logger = logging.getLogger("quadriga.ingress")

Result = TypeVar("Result")

INLINE_SIZE = 2048
"""Characters to encode, or tokens to decode, that are not worth a thread."""
CHECKED_CHARS_PER_TOKEN = 4
"""Texts with more characters for each token that the model takes are looked at before."""
REAP_INTERVAL_S = 0.02
HOUSEKEEPING_INTERVAL_S = 0.5
METRICS_INTERVAL_S = 1.0
KEY_FILE_INTERVAL_S = 2.0
FAREWELL_TIMEOUT_S = 5.0
DRAIN_RETRY_S = 1.0
"""Behind a load balancer another service answers at once."""
REPORT_INTERVAL_S = 1.0
ORPHAN_PAUSE_S = 0.5
"""A sequence that moves is at neither replica for a moment: who misses one asks once more."""
VIEW_AGE_S = 0.5
"""However many look at the live page, the actors are asked this rarely."""


class EngineClient:
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
        self.ingress_id = ingress_id
        self.clock = clock or SystemClock()
        self.metrics = IngressMetrics(ingress_id)
        self.gate = RateLimiter(keys, self.clock, self.metrics)
        self.bodies = ConcurrencyLimiter(MAX_BODIES, "send their bodies")
        self.sessions = RequestStore(keep_s=config.ingress.orphan_request_s)
        self.tasks = Tasks()
        self._cluster = cluster
        self._watch = ClusterStateCache(
            cluster, self.clock, max_age_s=2 * config.scheduler.snapshot_max_age_s
        )
        self._reports = AutoReports(cluster) if config.helios.enabled else None
        self._request_manager = RequestManager(
            config,
            cluster,
            self._watch,
            self.tasks,
            self.metrics,
            self.clock,
            ingress_id=ingress_id,
            on_end=self._choice_ended,
            reports=self._reports,
        )
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._tickets: dict[Request, QuotaReservation] = {}
        self._num_open = 0
        self._num_open_choices = 0
        self._num_answering = 0
        self._refuses_new = False
        self._cut_at_s: float | None = None
        self._viewing = asyncio.Lock()
        self._view: dict[str, Any] | None = None
        self._viewed_s = 0.0

    # Life.

    def start(self) -> None:
        """Start the background loops; call once, inside the event loop."""
        beat_s = self.config.lifecycle.heartbeat_interval_s
        self.tasks.repeat(
            self._request_manager.cancellations.report_ended_sequences, REAP_INTERVAL_S
        )
        self.tasks.repeat(self._look, HOUSEKEEPING_INTERVAL_S)
        self.tasks.repeat(self._end_what_is_lost, HOUSEKEEPING_INTERVAL_S)
        self.tasks.repeat(self._send_heartbeats, beat_s)
        self.tasks.repeat(self._push_metrics, METRICS_INTERVAL_S)
        HTTP_SERVER.is_pushed = True
        self.tasks.repeat(self.gate.reload, KEY_FILE_INTERVAL_S)
        if self._reports is not None:
            self.tasks.repeat(self._reports.send, REPORT_INTERVAL_S)

    def drain(self, within_s: float, *, refuses_new: bool = True) -> int:
        """Let the open requests end within `within_s` seconds, then end the rest in an error.

        May be called again: a later call can bring the end forward, but not put it off.

        Args:
            refuses_new: Answer new requests with 503. Without it they are taken for as long as a
                router that does not know of the drain yet sends some.

        Returns:
            The number of requests that are open or still being answered.
        """
        self._refuses_new = self._refuses_new or refuses_new
        cut_at_s = self.clock.now_s() + max(0.0, within_s)
        if self._cut_at_s is None or cut_at_s < self._cut_at_s:
            self._cut_at_s = cut_at_s
        self._cut_if_due()
        return max(self._num_open, self._num_answering)

    @property
    def is_draining(self) -> bool:
        return self._cut_at_s is not None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While an answer is being written to a client: its session may be over before that."""
        self._num_answering += 1
        try:
            yield
        finally:
            self._num_answering -= 1

    async def close(self) -> None:
        """Cancel every request and stop all tasks."""
        self.drain(0.0)
        try:
            await asyncio.wait_for(self._request_manager.cancellations.flush(), FAREWELL_TIMEOUT_S)
        except (TimeoutError, QuadrigaError):
            logger.warning("could not tell every replica about the shutdown")
        await self.tasks.close()
        self._encoder.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(tracing.flush)

    # What the doors call.

    async def encode(
        self,
        model: ServedModel,
        text: str,
        add_special_tokens: bool,
        *,
        field: str = "prompt",
        max_tokens: int | None = None,
    ) -> list[int]:
        """Tokenise; long texts in a thread, so that nobody else's stream stands still.

        Args:
            field: Where the text is from.
            max_tokens: A text with more is of no use; None: with more than the model takes. One
                far too long is refused before it holds up the texts behind it.

        Raises: ContextTooLong, InvalidRequest.
        """
        tokenizer, most = model.tokenizer, max_tokens or model.max_model_len

        def work() -> list[int]:
            if len(text) > CHECKED_CHARS_PER_TOKEN * most and tokenizer.exceeds(text, most):
                raise ContextTooLong(
                    f"{field}: the text has more than {most} tokens, the most there may be for "
                    f"{model.id}; shorten it",
                    param=field,
                )
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self._off_loop(len(text), work)

    async def decode(self, model: ServedModel, token_ids: list[int]) -> str:
        """Token ids to text, special tokens shown; many of them in a thread."""
        return await self._off_loop(
            len(token_ids), lambda: model.tokenizer.decode(token_ids, skip_special_tokens=False)
        )

    async def _off_loop(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= INLINE_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def open(
        self,
        spec: GenerateSpec,
        *,
        caller: ApiKey = ANONYMOUS,
        key: tuple[str, str] | None = None,
        fingerprint: bytes = b"",
        resumable: Mapping[str, ResumableSequence] = MappingProxyType({}),
        may_begin: bool = True,
    ) -> Request:
        """Begin a request; its sequences are admitted in the background.

        Read the answer from `session.reader()`, and call `leave` when done with that reader.

        Args:
            caller: At whose expense.
            key: (owner, idempotency key) under which the session can be resumed.
            orphans: Sequences of it that run already, by claim: they are taken over.
            may_begin: Begin those anew that are not there after all.

        Raises:
            Overloaded: At the limit of open requests, or the caller's own (KeyLimitReached).
            Unavailable: While draining.
        """
        self._check_room(len(spec.prompts) * spec.n)
        session = Request(
            spec,
            [],
            created_unix_s=int(spec.arrival_unix_s),
            arrived_s=self.clock.now_s(),
            key=key,
            fingerprint=fingerprint,
        )
        session.choices.extend(self._choices(spec))
        for choice, claim in zip(session.choices, claims(spec, key, fingerprint), strict=True):
            choice.state.claim = claim
            choice.may_begin = may_begin
        for choice, visitor in zip(session.choices, visitors(spec, caller.name), strict=True):
            choice.visitor = visitor
        self._tickets[session] = self.gate.begin(caller, session.num_prompt_tokens)
        session.span = trace_begun(spec)
        if session.span is not None:
            for choice in session.choices:
                choice.state.traceparent = session.span.traceparent
        left_s = max(0.0, spec.deadline_unix_s - self.clock.unix_s())
        loop = asyncio.get_running_loop()
        session.deadline_timer = loop.call_later(left_s, self._time_out, session)
        self._num_open += 1
        self._num_open_choices += len(session.choices)
        self.metrics.open_requests.inc()
        self.metrics.of(spec.model).prompt_tokens.inc(session.num_prompt_tokens)
        if key is not None:
            self.sessions.add(session)
        if spec.sampling.max_tokens == 0 and spec.sampling.num_prompt_logprobs is None:
            for choice in session.choices:  # only the prompt's own text was asked for
                choice.finish = FinishReason.LENGTH
            self._session_ended(session)
            return session
        for choice in session.choices:
            resumable_sequence = resumable.get(choice.state.claim)
            if resumable_sequence is None:
                self._request_manager.send(session, choice)
            else:
                self._request_manager.adopt(session, choice, resumable_sequence)
        return session

    async def open_or_resume(
        self,
        spec: GenerateSpec,
        caller: ApiKey,
        key: str,
        fingerprint: bytes,
        *,
        is_resumption: bool,
        may_begin: bool = False,
    ) -> Request:
        """Return the caller's session under `key`, or begin the request under it.

        A request that failed is begun anew, unless the client already has a part of it. What was
        held by an ingress that is gone, and still runs, is taken over.

        Args:
            is_resumption: The client says that it has tokens of it.
            may_begin: Begin even then what is not held here: the client can tell whether it is
                the same answer again.

        Raises:
            NotFound: There is nothing to resume: it was never begun, or is over for too long, or
                begun again it might be another answer.
            InvalidRequest: The key belongs to a request with another fingerprint.
            Overloaded, Unavailable: As `open`.
        """
        owned = (caller.name, key)
        session = self.sessions.find(owned, fingerprint)
        resumable: dict[str, ResumableSequence] = {}
        if session is None and is_resumption:
            wanted = claims(spec, owned, fingerprint)
            resumable = await self._find_orphans(wanted)
            if not may_begin and not all(c in resumable for c in wanted):
                await asyncio.sleep(ORPHAN_PAUSE_S)
                resumable = await self._find_orphans(wanted)
            session = self.sessions.find(owned, fingerprint)  # somebody else may have been faster
            if session is None and not may_begin and not all(c in resumable for c in wanted):
                raise NotFound(
                    "no request is held under this key; begin it anew without a resume index",
                    param="idempotency-key",
                )
        is_begun_anew = session is not None and session.failed and (may_begin or not is_resumption)
        if session is None or is_begun_anew:
            return self.open(
                spec,
                caller=caller,
                key=owned,
                fingerprint=fingerprint,
                resumable=resumable,
                may_begin=may_begin or not is_resumption,
            )
        if len(session.readers) >= MAX_READERS:
            raise Overloaded(
                f"{MAX_READERS} connections follow this request, the limit", retry_after_s=1.0
            )
        self.metrics.resumed.inc()
        return session

    async def _find_orphans(self, wanted: Sequence[str]) -> dict[str, ResumableSequence]:
        """Those of the sequences that still run, by claim; none where nobody can tell."""
        asked = [claim for claim in wanted if claim]
        if not asked:
            return {}
        try:
            return {o.claim: o for o in await self._cluster.find_resumable(asked)}
        except ReplicaError as exc:
            logger.info("nobody could be asked for orphans: %s", exc)
            return {}

    def leave(self, session: Request) -> None:
        """A reader is gone: keep a resumable request for a while, cancel any other."""
        if session.readers or session.done:
            return
        if session.key is None:
            self.abort(session, Cancelled("the client went away"))
        else:
            session.abandoned_s = self.clock.now_s()

    def abort(self, session: Request, error: QuadrigaError) -> None:
        """End what still runs of a request in `error`, and free it everywhere."""
        if isinstance(error, Cancelled):
            running = sum(not choice.done for choice in session.choices)
            self.metrics.of(session.spec.model).cancelled.inc(running)
        session.fail(error)
        for choice in session.choices:
            self._request_manager.retire(choice, cancel=True)
        self._session_ended(session)

    async def _look(self) -> None:
        """Ask what the replicas are, and how long a sequence they take. Raises: ReplicaError."""
        await self._watch.refresh()
        self.models.follow(self._watch.view.snapshots)

    def check_ready(self) -> None:
        """Raises: Unavailable while draining, or while nobody can serve."""
        self._check_takes_new()
        self._watch.check_ready()

    def load(self) -> dict[str, int]:
        """Requests open at this ingress; sequences running and waiting in the whole cluster."""
        snapshots = self._watch.view.snapshots
        return {
            "server_load": self._num_open,
            "num_running": sum(s.num_running for s in snapshots),
            "num_waiting": sum(s.num_waiting for s in snapshots),
        }

    async def metrics_page(self) -> bytes:
        """The whole cluster's metrics, own ones as of now. Raises: QuadrigaError."""
        await self._push_metrics()
        return await self._cluster.metrics() + view_gauges(self._watch.view)

    async def operators_view(self) -> dict[str, Any]:
        """Replicas, forecasts, exits and moves; asked for at most every `VIEW_AGE_S`.

        Raises: QuadrigaError.
        """
        async with self._viewing:
            if self._view is None or self.clock.now_s() - self._viewed_s >= VIEW_AGE_S:
                self._view = await self._cluster.operators_view()
                self._viewed_s = self.clock.now_s()
            return self._view

    async def history(self) -> dict[str, Any]:
        """What HELIOS knows and decided. Raises: QuadrigaError; NotFound where it is off."""
        found = await self._cluster.history()
        if found is None:
            raise NotFound("helios is off: nobody chooses models here", param="helios.enabled")
        return found

    # The ends of requests.

    def _check_takes_new(self) -> None:
        if self._refuses_new:
            raise Unavailable(
                "the service is shutting down and takes no new requests; retry shortly",
                retry_after_s=DRAIN_RETRY_S,
            )

    def _check_room(self, num_choices: int) -> None:
        self._check_takes_new()
        limit = self.config.ingress.max_ongoing_requests
        # A request with more choices than the limit is let in where nothing else is open.
        if self._num_open_choices and self._num_open_choices + num_choices > limit:
            self.metrics.refused.labels("ingress_full").inc()
            raise Overloaded(
                f"this ingress answers {self._num_open_choices} choices, {num_choices} more are "
                f"above its limit of {limit}; retry shortly",
                retry_after_s=1.0,
            )

    def _choices(self, spec: GenerateSpec) -> list[SequenceRequest]:
        tokenizer = self.models.find(spec.model).tokenizer
        choices: list[SequenceRequest] = []
        for prompt in spec.prompts:
            for k in range(spec.n):
                state = SequenceState(
                    sequence_id=f"{spec.request_id}-{uuid.uuid4().hex[:12]}",
                    request_id=spec.request_id,
                    model=spec.model,
                    prompt_ids=prompt.token_ids,
                    sampling=spec.sampling,
                    exits=spec.exits,
                    ingress_id=self.ingress_id,
                    arrival_unix_s=spec.arrival_unix_s,
                    deadline_unix_s=spec.deadline_unix_s,
                    choice=k,
                    priority=spec.priority,
                )
                choices.append(
                    SequenceRequest(
                        len(choices), state, tokenizer.detokenizer(), StopMatcher(spec.stop)
                    )
                )
                choices[-1].is_auto = spec.is_auto
        return choices

    def _choice_ended(self, session: Request, choice: SequenceRequest) -> None:
        if choice.error is not None:
            self.abort(session, choice.error)
            return
        model = session.spec.model
        if choice.finish is not None:
            self.metrics.success.labels(model, choice.finish.value).inc()
        num_after_first = len(choice.state.output_ids) - 1
        if choice.first_token_s is not None and num_after_first > 0:
            series = self.metrics.of(model)
            decode_s = self.clock.now_s() - choice.first_token_s
            series.decode_time.observe(decode_s)
            series.per_output_token.observe(decode_s / num_after_first)
        if session.done:
            self._session_ended(session)

    def _session_ended(self, session: Request) -> None:
        if session.ended_s is not None:
            return
        ended_s = self.clock.now_s()
        session.end(ended_s)
        if self._reports is not None:
            for choice in session.choices:
                if choice.is_auto:
                    self._reports.ended(choice, session.arrived_s)
        ticket = self._tickets.pop(session)
        ticket.close(session.num_output_tokens)
        if session.deadline_timer is not None:
            session.deadline_timer.cancel()
        self._num_open -= 1
        self._num_open_choices -= len(session.choices)
        self.metrics.open_requests.dec()
        self.metrics.of(session.spec.model).e2e.observe(ended_s - session.arrived_s)
        self._tell(session, ticket.key_name, ended_s)

    def _tell(self, session: Request, key_name: str, ended_s: float) -> None:
        is_logged = self.config.logging.requests
        if not is_logged and session.span is None:
            return
        told = RequestLogRecord.of(session, api_key=key_name, ended_s=ended_s)
        if is_logged:
            told.log()
        if session.span is not None:
            told.end_span(session.span, self.clock.unix_s())

    def _time_out(self, session: Request) -> None:
        allowed_s = session.spec.deadline_unix_s - session.spec.arrival_unix_s
        error = DeadlineExceeded(
            f"the request was not done within its deadline of {allowed_s:g} s", param="deadline_ms"
        )
        self.abort(session, error)

    def _cut_if_due(self) -> None:
        """End the open requests in an error once the drain's time is up."""
        if self._cut_at_s is None or self.clock.now_s() < self._cut_at_s:
            return
        for session in self._request_manager.sessions():
            error = Unavailable(
                "the service is shutting down and the request was not done in time; retry shortly",
                retry_after_s=DRAIN_RETRY_S,
            )
            self.abort(session, error)

    # Background turns.

    async def _end_what_is_lost(self) -> None:
        """Find what was lost in silence, and end requests whose time is up."""
        self._cut_if_due()
        self._request_manager.look_after()
        for session in self.sessions.expire(self.clock.now_s()):
            self.abort(session, Cancelled("nobody came back for the request"))

    async def _send_heartbeats(self) -> None:
        names = self._watch.names | {*self._request_manager.output_poller.replicas}
        await self._cluster.heartbeat(self.ingress_id, sorted(names))

    async def _push_metrics(self) -> None:
        self.metrics.pushes.inc()
        registries = [self.metrics.registry]
        if HTTP_SERVER.is_used:
            registries.append(HTTP_SERVER.registry)
        for registry in registries:
            await self._cluster.push_metrics(registry.source, registry.snapshot())
