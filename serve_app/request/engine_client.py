"""The engine as the HTTP and gRPC servers call it: open, resume, read and end requests.

`EngineClient` owns every request from its admission to its end, and frees what the cluster holds
for it on every path out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

from quadriga.clock import Clock, SystemClock
from quadriga.config.loader import QuadrigaConfig
from quadriga.core.request import FinishReason, ResumableSequence
from quadriga.errors import (
    Cancelled,
    IngressFull,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuadrigaError,
    ReplicaError,
    Unavailable,
)
from quadriga.observability import tracing
from serve_app.auth.api_keys import ApiKeys
from serve_app.auth.keys import ANONYMOUS, ApiKey
from serve_app.auth.rate_limiter import MAX_BODIES, MAX_READERS, ConcurrencyLimiter, RateLimiter
from serve_app.http.server_metrics import HTTP_SERVER
from serve_app.openai.models import ModelDirectory
from serve_app.ops.auto_reports import AutoReports
from serve_app.ops.metrics import IngressMetrics, endpoint_gauges, view_gauges
from serve_app.ops.tasks import Tasks
from serve_app.request.cluster_client import ClusterClient, ClusterStateCache
from serve_app.request.request import Request, caller_fingerprint, deadline_exceeded, resume_claims
from serve_app.request.request_manager import RequestManager
from serve_app.request.resumption import RequestStore
from serve_app.request.sequence_request import SequenceRequest

logger = logging.getLogger("quadriga.ingress")
request_logger = logging.getLogger("quadriga.requests")

REPORT_ENDED_INTERVAL_S = 0.02
HOUSEKEEPING_INTERVAL_S = 0.5
METRICS_INTERVAL_S = 1.0
KEY_FILE_INTERVAL_S = 2.0
FAREWELL_TIMEOUT_S = 5.0
DRAIN_RETRY_S = 1.0
"""Behind a load balancer another service answers at once."""
REPORT_INTERVAL_S = 1.0
RESUME_PAUSE_S = 0.5
"""A sequence that is handed over is at neither replica for a moment: it is looked for once more."""


class EngineClient:
    """The requests of one ingress replica, apart from the two wire formats.

    Args:
        ingress_id: Unique in the cluster; replicas keep the output for it under this name.

    Attributes:
        rate_limiter: Knows the callers, and keeps each API key within its limits.
        body_limiter: Bounds the calls whose body is not complete.
        requests: Those that can be resumed.
        cluster: The actors.
    """

    def __init__(
        self,
        config: QuadrigaConfig,
        models: ModelDirectory,
        keys: ApiKeys,
        cluster: ClusterClient,
        *,
        ingress_id: str,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.models = models
        self.ingress_id = ingress_id
        self.clock = clock or SystemClock()
        self.metrics = IngressMetrics(ingress_id)
        self.rate_limiter = RateLimiter(keys, self.clock, self.metrics)
        self.body_limiter = ConcurrencyLimiter(MAX_BODIES, "send their bodies")
        self.requests = RequestStore(keep_s=config.ingress.orphan_request_s)
        self.tasks = Tasks()
        self.cluster = cluster
        self._cluster_state = ClusterStateCache(
            cluster, self.clock, max_age_s=2 * config.scheduler.snapshot_max_age_s
        )
        self._reports = AutoReports(cluster, ingress_id) if config.helios.enabled else None
        self._request_manager = RequestManager(
            config,
            cluster,
            self._cluster_state,
            self.tasks,
            self.metrics,
            self.clock,
            ingress_id=ingress_id,
            on_end=self._sequence_ended,
            reports=self._reports,
        )
        self._num_open = 0
        self._num_open_sequences = 0
        self._num_answering = 0
        self._refuses_new = False
        self._cut_at_s: float | None = None

    def start(self) -> None:
        """Start the background loops; call once, inside the event loop."""
        beat_s = self.config.lifecycle.heartbeat_interval_s
        report_ended = self._request_manager.cancellations.report_ended_sequences
        self.tasks.repeat(report_ended, REPORT_ENDED_INTERVAL_S)
        self.tasks.repeat(self._refresh_view, HOUSEKEEPING_INTERVAL_S)
        self.tasks.repeat(self._find_lost, HOUSEKEEPING_INTERVAL_S)
        self.tasks.repeat(self._send_heartbeats, beat_s)
        self.tasks.repeat(self._push_metrics, METRICS_INTERVAL_S)
        HTTP_SERVER.is_pushed = True
        for model in {*self.models.ids()} - {*self.models.adapters}:
            self.metrics.of(model)  # at 0: rates, and the live page, do not see a series begin at 1
        self.tasks.repeat(self.rate_limiter.reload, KEY_FILE_INTERVAL_S)
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
        """Count an answer that is being written: its request may be over before that."""
        self._num_answering += 1
        try:
            yield
        finally:
            self._num_answering -= 1

    async def close(self) -> None:
        """Cancel every request, stop all tasks, and send the last reports and counts."""
        self.drain(0.0)
        try:
            async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                await self._request_manager.cancellations.flush()
        except (TimeoutError, QuadrigaError):
            logger.warning("not every replica could be reached to cancel requests at the shutdown")
        await self.tasks.close()
        last = [self._push_metrics]
        if self._reports is not None:  # a profile would wait for its last requests
            last.insert(0, self._reports.send)
        for send in last:
            with suppress(TimeoutError, QuadrigaError):
                async with asyncio.timeout(FAREWELL_TIMEOUT_S):
                    await send()
        self.models.close()
        await asyncio.to_thread(tracing.flush)

    def open(
        self,
        request: Request,
        *,
        caller: ApiKey = ANONYMOUS,
        key: tuple[str, str] | None = None,
        fingerprint: bytes = b"",
        resumable: Mapping[str, ResumableSequence] = MappingProxyType({}),
        may_begin: bool = True,
    ) -> Request:
        """Begin a request; its sequences are admitted in the background. Returns `request`.

        Read the answer from `request.reader()`, and call `leave` when done with that reader.

        Args:
            caller: At whose expense.
            key: (owner, idempotency key) under which the request can be resumed.
            resumable: Sequences of it that run already, by claim: they are taken over.
            may_begin: Begin sequences anew that are not there after all.

        Raises:
            Overloaded: At the limit of open requests, or the caller's own (KeyLimitReached).
            Unavailable: While draining.
        """
        self._check_room(request.num_sequences)
        request.cache_salt = caller.salted(request.cache_salt)
        model = self.models.find(request.model)
        request.make_sequences(model.tokenizer, self.ingress_id, model.checkpoint.id, model.adapter)
        self.rate_limiter.begin(caller, request.num_prompt_tokens)
        request.key, request.fingerprint, request.caller = key, fingerprint, caller.name
        request.arrived_s = self.clock.now_s()
        request.span = tracing.begin("request", request.traceparent, request.arrival_unix_s)
        name = caller_fingerprint(request, caller.name)
        claims = resume_claims(request, key, fingerprint)
        for sequence, claim in zip(request.sequences, claims, strict=True):
            sequence.state.claim = claim
            sequence.may_begin = may_begin
            sequence.caller_fingerprint = name
            if request.span is not None:
                sequence.state.traceparent = request.span.traceparent
        left_s = max(0.0, request.deadline_unix_s - self.clock.unix_s())
        loop = asyncio.get_running_loop()
        request.deadline_timer = loop.call_later(left_s, self._time_out, request)
        self._num_open += 1
        self._num_open_sequences += len(request.sequences)
        self.metrics.open_requests.inc()
        if key is not None:
            self.requests.add(request)
        sampling = request.sampling
        asks_for_text = sampling.num_prompt_logprobs is None and sampling.pooling is None
        if sampling.max_tokens == 0 and asks_for_text:
            for sequence in request.sequences:  # only the prompt's own text was asked for
                sequence.finish = FinishReason.LENGTH
            self._request_ended(request)
            return request
        for sequence in request.sequences:
            found = resumable.get(sequence.state.claim)
            if found is not None:
                self._request_manager.adopt(request, sequence, found)
        self._request_manager.send(request)
        return request

    async def open_or_resume(
        self,
        request: Request,
        caller: ApiKey,
        key: str,
        fingerprint: bytes,
        *,
        is_resumption: bool,
        may_begin: bool = False,
    ) -> Request:
        """Return the caller's request under `key`, or begin `request` under it.

        A request that failed is begun anew, unless the client already has a part of it. Sequences
        that belonged to an ingress which is gone, and still run, are taken over.

        Args:
            is_resumption: The client has tokens of it.
            may_begin: Begin even then what is not held here: the client can compare the new answer
                with its tokens.

        Raises:
            NotFound: There is nothing to resume: it was never begun, or is over for too long, or
                begun again it might be another answer.
            InvalidRequest: The key belongs to a request with another fingerprint.
            Overloaded, Unavailable: As `open`.
        """
        owned = (caller.name, key)
        known = self.requests.find(owned, fingerprint)
        resumable: dict[str, ResumableSequence] = {}
        if known is None and is_resumption:
            wanted = resume_claims(request, owned, fingerprint)
            resumable = await self._find_resumable(wanted)
            if not may_begin and not all(c in resumable for c in wanted):
                await asyncio.sleep(RESUME_PAUSE_S)
                resumable = await self._find_resumable(wanted)
            known = self.requests.find(owned, fingerprint)  # another call may have been faster
            if known is None and not may_begin and not all(c in resumable for c in wanted):
                raise NotFound(
                    f"no request with the idempotency key {key!r} runs, or ended in the last "
                    f"{self.config.ingress.orphan_request_s:g} s; send it without a resume index",
                    param="idempotency-key",
                )
        may_begin = may_begin or not is_resumption
        if known is None or (known.first_error is not None and may_begin):
            return self.open(
                request,
                caller=caller,
                key=owned,
                fingerprint=fingerprint,
                resumable=resumable,
                may_begin=may_begin,
            )
        if len(known.readers) >= MAX_READERS:
            raise IngressFull(
                f"{MAX_READERS} connections follow this request, the limit", retry_after_s=1.0
            )
        self.metrics.resumed.inc()
        return known

    async def _find_resumable(self, claims: list[str]) -> dict[str, ResumableSequence]:
        """Those of the sequences that still run, by claim; none while the scheduler is away."""
        asked = [claim for claim in claims if claim]
        if not asked:
            return {}
        try:
            return {found.claim: found for found in await self.cluster.find_resumable(asked)}
        except ReplicaError as exc:
            logger.info("sequences of another ingress could not be looked for: %s", exc)
            return {}

    def leave(self, request: Request) -> None:
        """A reader is gone: keep a resumable request for a while, cancel any other."""
        if request.readers or request.done:
            return
        if request.key is None:
            self.abort(request, Cancelled("the client went away"))
        else:
            request.abandoned_s = self.clock.now_s()

    def abort(self, request: Request, error: QuadrigaError) -> None:
        """End what still runs of a request in `error`, and free it everywhere."""
        if isinstance(error, Cancelled):
            running = sum(not sequence.done for sequence in request.sequences)
            self.metrics.of(request.shown_model).cancelled.inc(running)
        request.fail(error)
        for sequence in request.sequences:
            self._request_manager.retire(sequence, cancel=True)
        self._request_ended(request)

    async def _refresh_view(self) -> None:
        """Fetch the replicas' state, and how long a sequence they take. Raises: ReplicaError."""
        await self._cluster_state.refresh()
        self.models.follow(self._cluster_state.view.snapshots)

    def check_ready(self) -> None:
        """Raises: Unavailable while draining, or while the cluster cannot serve."""
        self._check_takes_new()
        self._cluster_state.check_ready()

    def load(self) -> dict[str, int | None]:
        """Requests open at this ingress; sequences running and waiting in the whole cluster, None
        while the scheduler is away."""
        snapshots, is_old = self._cluster_state.view.snapshots, self._cluster_state.is_old
        return {
            "server_load": self._num_open,
            "num_running": None if is_old else sum(s.num_running for s in snapshots),
            "num_waiting": None if is_old else sum(s.num_waiting for s in snapshots),
        }

    async def metrics_page(self) -> bytes:
        """The whole cluster's metrics, own ones as of now. Raises: QuadrigaError."""
        await self._push_metrics()
        page = await self.cluster.metrics()
        return page + view_gauges(self._cluster_state.view, self.clock.unix_s())

    def endpoint_metrics_page(self) -> bytes:
        """The cluster's load as one model server's. Raises: Unavailable: It takes no requests."""
        self.check_ready()
        models = self.models
        return endpoint_gauges(
            self._cluster_state.view, models.ids()[0], models.adapters, self.clock.unix_s()
        )

    # The ends of requests.

    def _check_takes_new(self) -> None:
        if self._refuses_new:
            raise Unavailable(
                "the service is shutting down and takes no new requests; retry shortly",
                retry_after_s=DRAIN_RETRY_S,
            )

    def _check_room(self, num_sequences: int) -> None:
        self._check_takes_new()
        limit = self.config.ingress.max_ongoing_requests
        # A request with more sequences than the limit is let in where nothing else is open.
        if self._num_open_sequences and self._num_open_sequences + num_sequences > limit:
            raise IngressFull(
                f"this ingress answers {self._num_open_sequences} choices, {num_sequences} more "
                f"are above its limit of {limit}; retry shortly",
                retry_after_s=1.0,
            )

    def _sequence_ended(self, request: Request, sequence: SequenceRequest) -> None:
        if sequence.error is not None:
            self.abort(request, sequence.error)
            return
        self.metrics.count_end(request, sequence, self.clock.now_s())
        if request.done:
            self._request_ended(request)

    def _request_ended(self, request: Request) -> None:
        if request.ended_s is not None:
            return
        request.end(self.clock.now_s())
        if self._reports is not None:
            for sequence in request.sequences:
                if sequence.is_auto:
                    self._reports.ended(sequence, request.arrived_s)
        charge, metrics = request.num_output_tokens, self.metrics.of(request.shown_model)
        refusals = InvalidRequest | Overloaded | Unavailable
        if not charge and isinstance(request.first_error, refusals):  # it was not served
            charge = -request.num_prompt_tokens
        else:
            metrics.prompt_tokens.inc(request.num_prompt_tokens)
            metrics.e2e.observe(self.clock.now_s() - request.arrived_s)
        self.rate_limiter.end(request.caller, charge)
        if request.deadline_timer is not None:
            request.deadline_timer.cancel()
        self._num_open -= 1
        self._num_open_sequences -= len(request.sequences)
        self.metrics.open_requests.dec()
        self._log_end(request)

    def _log_end(self, request: Request) -> None:
        """Write a request's sizes, times and result to the log and its span, as configured."""
        if not self.config.logging.requests and request.span is None:
            return
        summary = request.summary()
        if self.config.logging.requests:
            request_logger.info("request over", extra=summary)
        if request.span is not None:
            given = {f"quadriga.{k}": v for k, v in summary.items() if v is not None}
            error = request.first_error
            request.span.end(self.clock.unix_s(), given, error.code if error else None)

    def _time_out(self, request: Request) -> None:
        allowed_s = request.deadline_unix_s - request.arrival_unix_s
        self.abort(request, deadline_exceeded(allowed_s))

    def _cut_if_due(self) -> None:
        """End the open requests in an error once the drain's time is up."""
        if self._cut_at_s is None or self.clock.now_s() < self._cut_at_s:
            return
        for request in self._request_manager.open_requests():
            error = Unavailable(
                "the service is shutting down and the request was not done in time; retry shortly",
                retry_after_s=DRAIN_RETRY_S,
            )
            self.abort(request, error)

    # Background loops.

    async def _find_lost(self) -> None:
        """Find lost sequences, and end requests whose time is up."""
        self._cut_if_due()
        self._request_manager.find_lost()
        for request in self.requests.expire(self.clock.now_s()):
            self.abort(request, Cancelled("the request had no reader for too long"))

    async def _send_heartbeats(self) -> None:
        names = self._cluster_state.names | {*self._request_manager.output_poller.replicas}
        await self.cluster.heartbeat(self.ingress_id, sorted(names))

    async def _push_metrics(self) -> None:
        self.metrics.pushes.inc()
        own, http = self.metrics.registry, HTTP_SERVER.registry
        running = self._request_manager.longest_running()
        await self.cluster.push_metrics(own.source, own.snapshot(), running)
        if HTTP_SERVER.is_used:
            await self.cluster.push_metrics(http.source, http.snapshot())
