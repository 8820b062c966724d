"""The gRPC server: `quadriga.v1` and health over the engine client, for Serve's gRPC proxy."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

from grpc_health.v1 import health_pb2

from quadriga.errors import (
    Cancelled,
    InvalidRequest,
    NotFound,
    QuadrigaError,
    Unauthenticated,
    Unavailable,
)
from quadriga.observability import tracing
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.auth.keys import ApiKey
from serve_app.auth.rate_limiter import MAX_WATCHES, ConcurrencyLimiter
from serve_app.embeddings.body import EmbeddingsBody, embedding_request
from serve_app.embeddings.rendering import vectors
from serve_app.grpc import messages as wire
from serve_app.openai.bodies import check_pieces, parse_body
from serve_app.openai.errors import as_quadriga
from serve_app.openai.schema import (
    MAX_CHOICES_READ,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS_READ,
    MAX_TOOLS,
    ChatBody,
    CompletionBody,
)
from serve_app.openai.validation import chat_request, check_length, completion_request, largest_n
from serve_app.request.engine_client import EngineClient
from serve_app.request.request import OutputStream, Request, beside
from serve_app.request.resumption import check_cursors, check_key

logger = logging.getLogger("quadriga.grpc")

HEALTH_WATCH_INTERVAL_S = 1.0
OK = "OK"
Render = Callable[[Request], Any]


class GrpcServer:
    """The methods of the service; each takes raw request bytes and Serve's gRPC context.

    An error travels as a message whose `error` is set, because Serve drops the trailing metadata
    (and with it when to retry) of a call that raises.

    Args:
        needs_tls: Only calls that came over TLS are answered, on this port; None: all are.
    """

    def __init__(self, engine_client: EngineClient, *, needs_tls: int | None = None) -> None:
        self._engine_client = engine_client
        self._limits = engine_client.config.ingress
        self._needs_tls = needs_tls
        self._watches = ConcurrencyLimiter(MAX_WATCHES, "watch the health")

    async def generate(self, data: bytes, context: Any) -> AsyncGenerator[Any, None]:
        """Generate: yields `GenerateResponse`."""
        stream: OutputStream | None = None
        code = Cancelled.grpc_code  # of a call that is cancelled
        try:
            stream = await self._begin(data, context)
            request = stream.request
            with self._engine_client.answering():
                while deltas := await stream.read():
                    messages = map(partial(wire.delta_message, stream), deltas)
                    yield pb.GenerateResponse(
                        request_id=request.request_id,
                        model=request.shown_model,
                        choices=await beside(request, partial(list, messages)),
                        usage=wire.usage_message(request) if all(stream.finished) else None,
                    )
            code = OK
        except Exception as exc:  # every error is sent in the documented form
            error = self._failed(exc, context)
            code = error.grpc_code
            yield pb.GenerateResponse(
                request_id=stream.request.request_id if stream is not None else "",
                error=wire.error_message(error),
            )
        finally:
            self._end(stream, code)

    async def generate_once(self, data: bytes, context: Any) -> Any:
        """GenerateOnce: returns `GenerateOnceResponse`."""

        async def begin() -> tuple[OutputStream, Render]:
            return await self._begin(data, context), wire.whole_message

        return await self._whole(begin(), pb.GenerateOnceResponse, context)

    async def embed(self, data: bytes, context: Any) -> Any:
        """Embed: returns `EmbedResponse`."""

        async def begin() -> tuple[OutputStream, Render]:
            caller = self._caller(context)
            message = wire.parse_request(pb.EmbedRequest, data, self._limits.max_body_bytes)
            request = await self._embedding(message)
            request.traceparent = _traceparent(context)
            stream = (await self._begun(caller, message, request)).reader()
            return stream, partial(_embeddings, normalize=message.normalize)

        return await self._whole(begin(), pb.EmbedResponse, context)

    async def _whole(
        self, begun: Awaitable[tuple[OutputStream, Render]], message_class: Any, context: Any
    ) -> Any:
        """The whole answer of a request, or a message of this class with the error."""
        stream: OutputStream | None = None
        code = Cancelled.grpc_code  # of a call that is cancelled
        try:
            stream, render = await begun
            with self._engine_client.answering():
                while await stream.read():
                    pass
            answer = await beside(stream.request, partial(render, stream.request))
            code = OK
            return answer
        except Exception as exc:  # as above
            error = self._failed(exc, context)
            code = error.grpc_code
            return message_class(error=wire.error_message(error))
        finally:
            self._end(stream, code)

    async def cancel(self, data: bytes, context: Any) -> Any:
        """Cancel: returns `CancelResponse`."""

        def answer() -> Any:
            caller = self._caller(context)
            message = wire.parse_request(pb.CancelRequest, data, self._limits.max_body_bytes)
            request_id = check_key(message.request_id, "request_id")
            request = self._engine_client.requests.get((caller.name, request_id))
            if request is not None and not request.done:
                self._engine_client.abort(request, Cancelled("cancelled by the client"))
            return pb.CancelResponse(found=request is not None)

        return self._at_once(answer, pb.CancelResponse, context)

    async def list_models(self, data: bytes, context: Any) -> Any:
        """ListModels: returns `ListModelsResponse`."""

        def answer() -> Any:
            self._caller(context)
            rows = self._engine_client.models.listing()["data"]
            return pb.ListModelsResponse(
                models=[
                    pb.Model(
                        id=row["id"],
                        root=row["root"],
                        max_model_len=row["max_model_len"],
                        created_unix_s=row["created"],
                        parent=row["parent"] or "",
                    )
                    for row in rows
                ]
            )

        return self._at_once(answer, pb.ListModelsResponse, context)

    def _at_once(self, answer: Callable[[], Any], message_class: Any, context: Any) -> Any:
        """What `answer` returns, or an empty message of this class where it fails."""
        code = OK
        try:
            return answer()
        except Exception as exc:  # as above
            code = self._failed(exc, context).grpc_code
            return message_class()
        finally:
            self._end(None, code)

    def check(self, service: str, context: Any) -> Any:
        """grpc.health.v1: the state; NOT_FOUND where there is no such service."""
        answer = self.health(service)
        if answer.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            error = NotFound(f"service: {service[:80]!r} is none; ask for {wire.SERVICE!r} or ''")
            wire.set_error(context, error)
        return answer

    def health(self, service: str) -> Any:
        """The state of the whole ("") or of one service, as a watch says it."""
        kinds = health_pb2.HealthCheckResponse
        if service not in ("", wire.SERVICE):
            return kinds(status=kinds.SERVICE_UNKNOWN)
        try:
            self._engine_client.check_ready()
        except Unavailable:
            return kinds(status=kinds.NOT_SERVING)
        return kinds(status=kinds.SERVING)

    async def watch(self, service: str) -> AsyncGenerator[Any, None]:
        """grpc.health.v1: the state, and every other one after it, until the ingress drains.

        Serve waits for a watch like for any other call. Above the limit of watches, a further one
        gets the state once.
        """
        answer = self.health(service)
        yield answer
        if self._watches.is_full:
            return
        with self._watches.slot():
            while not self._engine_client.is_draining:
                await asyncio.sleep(HEALTH_WATCH_INTERVAL_S)
                last, answer = answer, self.health(service)
                if answer != last:
                    yield answer

    async def _begin(self, data: bytes, context: Any) -> OutputStream:
        """Validate a request and begin it, or find it under its id; returns a reader of it."""
        caller = self._caller(context)
        message = wire.parse_request(pb.GenerateRequest, data, self._limits.max_body_bytes)
        request = await self._validated(caller, message)
        request.eta_in_chunks = message.include_eta
        request.traceparent = _traceparent(context)
        request = await self._begun(caller, message, request)
        try:
            digests = list(message.resume_digest)
            return request.reader(_resume_cursors(message, request), digests or None)
        except InvalidRequest:
            self._engine_client.leave(request)
            raise

    async def _begun(self, caller: ApiKey, message: Any, request: Request) -> Request:
        """The caller's request of this id, or this one, begun.

        Args:
            message: A `GenerateRequest` or an `EmbedRequest`.
        """
        may_resume = isinstance(message, pb.GenerateRequest)
        if not message.request_id:
            if may_resume and message.resume_from:
                raise InvalidRequest("resume_from: needs request_id", param="resume_from")
            return self._engine_client.open(request, caller=caller)
        content = type(message)()
        content.CopyFrom(message)
        if may_resume:
            content.ClearField("resume_from")
            content.ClearField("resume_digest")
        content.ClearField("deadline_ms")  # what is left of it shrinks from try to try
        serialised = content.SerializeToString(deterministic=True)
        return await self._engine_client.open_or_resume(
            request,
            caller,
            message.request_id,
            hashlib.sha256(type(message).__name__.encode() + b"\0" + serialised).digest(),
            is_resumption=may_resume and any(message.resume_from),
            may_begin=may_resume and bool(message.resume_digest),
        )

    async def _validated(self, caller: ApiKey, message: Any) -> Request:
        # Fields that are far too long are refused before they become lists.
        _check_counts(message, largest_n(self._limits))
        models = self._engine_client.models
        model = models.find(message.model)
        check_length(len(message.prompt_token_ids.ids), model, "prompt")
        fields = wire.generation_fields(message)
        common = self._name_and_time(message) | {"caller": caller.name}
        if "messages" in fields:
            chat = parse_body(ChatBody, fields)
            return await chat_request(chat, self._limits, models, **common)
        body = parse_body(CompletionBody, fields)
        return await completion_request(body, self._limits, models, **common)

    async def _embedding(self, message: Any) -> Request:
        # As above.
        models, inputs = self._engine_client.models, message.inputs
        if len(inputs) > self._limits.max_prompts:
            raise InvalidRequest(
                f"input: {len(inputs)} inputs, above the limit of {self._limits.max_prompts}; send "
                "them in several requests",
                param="input",
            )
        model = models.find(message.model)
        for i, item in enumerate(inputs):
            check_length(len(item.token_ids.ids), model, f"input.{i}")
        body = parse_body(EmbeddingsBody, wire.embedding_fields(message))
        return await embedding_request(body, self._limits, models, **self._name_and_time(message))

    def _name_and_time(self, message: Any) -> dict[str, Any]:
        """Of a request that begins now. Raises: InvalidRequest: Its id is none."""
        request_id = message.request_id or uuid.uuid4().hex
        check_key(request_id, "request_id")
        return {"request_id": request_id, "now_unix_s": self._engine_client.clock.unix_s()}

    def _caller(self, context: Any) -> ApiKey:
        """Raises: Unauthenticated, KeyLimitReached."""
        if self._needs_tls and not _is_secure(context):
            raise Unauthenticated(
                f"this port has no TLS and answers no call; call port {self._needs_tls} with TLS",
                code="tls_needed",
            )
        metadata = dict(context.invocation_metadata())
        value = metadata.get("authorization")
        return self._engine_client.rate_limiter.grpc_caller(
            value if isinstance(value, str) else None
        )

    def _failed(self, exc: Exception, context: Any) -> QuadrigaError:
        error = as_quadriga(exc)
        if error is not exc:
            logger.exception("unexpected failure in a gRPC call")
        error = wire.in_own_words(error)
        self._engine_client.metrics.count_refusal(error)
        wire.set_error(context, error)
        return error

    def _end(self, stream: OutputStream | None, code: str) -> None:
        if stream is not None:
            stream.close()
            self._engine_client.leave(stream.request)
        self._engine_client.metrics.requests.labels("grpc", code).inc()


def _embeddings(request: Request, *, normalize: bool) -> Any:
    found = vectors(request, normalize=normalize)
    return pb.EmbedResponse(
        request_id=request.request_id,
        model=request.model,
        embeddings=[pb.Embedding(values=vector) for vector in found],
        prompt_tokens=request.num_prompt_tokens,
    )


def _traceparent(context: Any) -> str | None:
    """The client's, where traces are written."""
    if not tracing.is_on():
        return None
    traceparent = dict(context.invocation_metadata()).get("traceparent")
    return traceparent if isinstance(traceparent, str) else None


def _check_counts(message: Any, max_n: int) -> None:
    """Raises: InvalidRequest where a list is longer than it may ever be, or schemas are."""
    asked = enumerate(message.chat.messages[: MAX_MESSAGES + 1])
    for field, items, most in (
        ("messages", message.chat.messages, MAX_MESSAGES),
        *((f"messages.{i}.tool_calls", m.tool_calls, MAX_TOOLS) for i, m in asked),
        ("tools", message.tools, MAX_TOOLS),
        ("stop", message.stop, MAX_STOPS_READ),
        ("stop_token_ids", message.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", message.logit_bias, MAX_LOGIT_BIAS),
        ("structured_outputs.choice", message.structured_outputs.choice.texts, MAX_CHOICES_READ),
        ("resume_from", message.resume_from, max_n),
        ("resume_digest", message.resume_digest, max_n),
    ):
        if len(items) > most:
            why = f"{field}: {len(items)} items, above the limit of {most}"
            raise InvalidRequest(why, param=field)
    check_pieces(*(tool.parameters.encode() for tool in message.tools))


def _is_secure(context: Any) -> bool:
    """Whether gRPC marks the call as come over TLS."""
    return b"ssl" in (context.auth_context() or {}).get("transport_security_type", ())


def _resume_cursors(message: Any, request: Request) -> list[int]:
    """Read `resume_from`: tokens already had, per sequence."""
    count = len(request.sequences)
    num_digests = len(message.resume_digest)
    if num_digests not in (0, count):
        raise InvalidRequest(
            f"resume_digest: {num_digests} numbers for {count} choices", param="resume_digest"
        )
    cursors = list(message.resume_from) or [0] * count
    return check_cursors(request, cursors, "resume_from", has_digests=num_digests > 0)
