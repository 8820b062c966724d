"""The gRPC door: `quadriga.v1` and health over the front desk, for Serve's gRPC proxy."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from grpc_health.v1 import health_pb2

from quadriga.core.request import AUTO_MODEL
from quadriga.errors import (
    Cancelled,
    InvalidRequest,
    QuadrigaError,
    Unauthenticated,
    Unavailable,
)
from quadriga.observability import tracing
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.auth.concurrency_limiter import MAX_WATCHES, ConcurrencyLimiter
from serve_app.auth.keys import ApiKey
from serve_app.grpc import messages as wire
from serve_app.openai.bodies import parse_body
from serve_app.openai.errors import as_quadriga
from serve_app.openai.prompts import check_length
from serve_app.openai.schema import (
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS_READ,
    ChatBody,
    CompletionBody,
)
from serve_app.openai.validation import chat_spec, completion_spec, largest_n
from serve_app.request.engine_client import EngineClient
from serve_app.request.request import OutputDelta, OutputStream, Request
from serve_app.request.requests import check_key
from serve_app.request.spec import GenerateSpec

logger = logging.getLogger("quadriga.grpc")

HEALTH_WATCH_INTERVAL_S = 1.0
OK = "OK"


class GrpcServer:
    """The methods of the service; each takes raw request bytes and Serve's gRPC context.

    An error travels as a message whose `error` is set, because Serve drops the trailing metadata
    (and with it when to retry) of a call that raises.

    Args:
        needs_tls: Only calls that came over TLS are answered, on this port; None: all are.
    """

    def __init__(self, desk: EngineClient, *, needs_tls: int | None = None) -> None:
        self._engine_client = desk
        self._limits = desk.config.ingress
        self._needs_tls = needs_tls
        self._watches = ConcurrencyLimiter(MAX_WATCHES, "watch the health")

    async def generate(self, data: bytes, context: Any) -> AsyncGenerator[Any, None]:
        """Generate: yields `GenerateResponse`."""
        session: Request | None = None
        reader: OutputStream | None = None
        code = Cancelled.grpc_code  # unless it is said how it ended
        try:
            session, reader = await self._begin(data, context)
            with self._engine_client.answering():
                while deltas := await reader.read():
                    at_end = session.done and _at_end(deltas)
                    yield pb.GenerateResponse(
                        request_id=session.spec.request_id,
                        model=session.spec.model,
                        choices=[wire.delta_message(session, delta) for delta in deltas],
                        usage=wire.usage_message(session) if at_end else None,
                    )
            code = OK
        except Exception as exc:  # the border, as in `serve_app.http.server.Endpoint`
            error = self._failed(exc, context)
            code = error.grpc_code
            yield pb.GenerateResponse(
                request_id=session.spec.request_id if session is not None else "",
                error=wire.error_message(error),
            )
        finally:
            self._end(session, reader, code)

    async def generate_once(self, data: bytes, context: Any) -> Any:
        """GenerateOnce: returns `GenerateOnceResponse`."""
        session: Request | None = None
        reader: OutputStream | None = None
        code = Cancelled.grpc_code  # unless it is said how it ended
        try:
            session, reader = await self._begin(data, context)
            with self._engine_client.answering():
                while await reader.read():
                    pass
            code = OK
            return pb.GenerateOnceResponse(
                request_id=session.spec.request_id,
                model=session.spec.model,
                choices=[wire.choice_message(session, choice) for choice in session.choices],
                usage=wire.usage_message(session),
            )
        except Exception as exc:  # the border, as above
            error = self._failed(exc, context)
            code = error.grpc_code
            return pb.GenerateOnceResponse(error=wire.error_message(error))
        finally:
            self._end(session, reader, code)

    async def cancel(self, data: bytes, context: Any) -> Any:
        """Cancel: returns `CancelResponse`."""
        try:
            caller = self._caller(context)
            request = wire.parse_request(pb.CancelRequest, data, self._limits.max_body_bytes)
            request_id = check_key(request.request_id, "request_id")
            session = self._engine_client.sessions.get((caller.name, request_id))
            if session is not None and not session.done:
                self._engine_client.abort(session, Cancelled("cancelled by the client"))
            return pb.CancelResponse(found=session is not None)
        except Exception as exc:  # the border, as above
            self._failed(exc, context)
            return pb.CancelResponse()

    async def list_models(self, data: bytes, context: Any) -> Any:
        """ListModels: returns `ListModelsResponse`."""
        try:
            self._caller(context)
            rows = self._engine_client.models.listing()["data"]
            return pb.ListModelsResponse(
                models=[
                    pb.Model(
                        id=row["id"],
                        root=row["root"],
                        max_model_len=row["max_model_len"],
                        created_unix_s=row["created"],
                    )
                    for row in rows
                ]
            )
        except Exception as exc:  # the border, as above
            self._failed(exc, context)
            return pb.ListModelsResponse()

    def health(self, service: str) -> Any:
        """grpc.health.v1: of the whole ("") or of one service."""
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

        Serve waits for a watch like for any other call. Where too many watch, the state is said
        once.
        """
        answer = self.health(service)
        yield answer
        if self._watches.is_full:
            return
        with self._watches.taken():
            while not self._engine_client.is_draining:
                await asyncio.sleep(HEALTH_WATCH_INTERVAL_S)
                last, answer = answer, self.health(service)
                if answer != last:
                    yield answer

    async def _begin(self, data: bytes, context: Any) -> tuple[Request, OutputStream]:
        caller = self._caller(context)
        request = wire.parse_request(pb.GenerateRequest, data, self._limits.max_body_bytes)
        spec = await self._spec(request)
        if tracing.is_on():
            traceparent = dict(context.invocation_metadata()).get("traceparent")
            spec = replace(spec, traceparent=traceparent if isinstance(traceparent, str) else None)
        session = await self._session(caller, request, spec)
        try:
            digests = list(request.resume_digest)
            return session, session.reader(_resume_cursors(request, session), digests or None)
        except InvalidRequest:
            self._engine_client.leave(session)
            raise

    async def _session(self, caller: ApiKey, request: Any, spec: GenerateSpec) -> Request:
        if not request.request_id:
            if request.resume_from:
                raise InvalidRequest("resume_from: needs request_id", param="resume_from")
            return self._engine_client.open(spec, caller=caller)
        request_copy = pb.GenerateRequest()
        request_copy.CopyFrom(request)
        request_copy.ClearField("resume_from")
        request_copy.ClearField("resume_digest")
        request_copy.ClearField("deadline_ms")  # what is left of it shrinks from try to try
        fingerprint = hashlib.sha256(request_copy.SerializeToString(deterministic=True)).digest()
        return await self._engine_client.open_or_resume(
            spec,
            caller,
            request.request_id,
            fingerprint,
            is_resumption=any(request.resume_from),
            may_begin=bool(request.resume_digest),
        )

    async def _spec(self, request: Any) -> GenerateSpec:
        # What is far too long is refused before it is made a list of.
        _check_counts(request, largest_n(self._limits))
        model = self._engine_client.models.find(request.model or AUTO_MODEL)
        check_length(len(request.prompt_token_ids.ids), model, "prompt")
        fields = wire.generation_fields(request)
        request_id = request.request_id or uuid.uuid4().hex
        check_key(request_id, "request_id")
        common: dict[str, Any] = {
            "request_id": request_id,
            "now_unix_s": self._engine_client.clock.unix_s(),
        }
        if "messages" in fields:
            chat = parse_body(ChatBody, fields)
            return await chat_spec(chat, model, self._limits, self._engine_client.encode, **common)
        body = parse_body(CompletionBody, fields)
        return await completion_spec(
            body, model, self._limits, self._engine_client.encode, **common
        )

    def _caller(self, context: Any) -> ApiKey:
        """Raises: Unauthenticated, KeyLimitReached."""
        if self._needs_tls and not _is_secure(context):
            raise Unauthenticated(
                f"this port speaks no TLS and answers nobody; call port {self._needs_tls} with TLS",
                code="tls_needed",
            )
        metadata = dict(context.invocation_metadata())
        value = metadata.get("authorization")
        return self._engine_client.gate.grpc_caller(value if isinstance(value, str) else None)

    def _failed(self, exc: Exception, context: Any) -> QuadrigaError:
        error = as_quadriga(exc)
        if error is not exc:
            logger.exception("unexpected failure in a gRPC call")
        wire.set_error(context, error)
        return error

    def _end(self, session: Request | None, reader: OutputStream | None, code: str) -> None:
        if reader is not None:
            reader.close()
        if session is not None:
            self._engine_client.leave(session)
        self._engine_client.metrics.requests.labels("grpc", code).inc()


def _check_counts(request: Any, max_n: int) -> None:
    """Raises: InvalidRequest where a list is longer than it may ever be."""
    for field, items, most in (
        ("messages", request.chat.messages, MAX_MESSAGES),
        ("stop", request.stop, MAX_STOPS_READ),
        ("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", request.logit_bias, MAX_LOGIT_BIAS),
        ("resume_from", request.resume_from, max_n),
        ("resume_digest", request.resume_digest, max_n),
    ):
        if len(items) > most:
            raise InvalidRequest(
                f"{field}: {len(items)} items, above the limit of {most}", param=field
            )


def _is_secure(context: Any) -> bool:
    """Whether the call came over TLS, as gRPC itself knows."""
    return b"ssl" in (context.auth_context() or {}).get("transport_security_type", ())


def _at_end(deltas: list[OutputDelta]) -> bool:
    return any(delta.finish is not None for delta in deltas)


def _resume_cursors(request: Any, session: Request) -> list[int]:
    """Read `resume_from`: tokens already had, per choice."""
    count = len(session.choices)
    cursors = list(request.resume_from) or [0] * count
    if len(cursors) != count:
        raise InvalidRequest(
            f"resume_from: {len(cursors)} numbers for {count} choices", param="resume_from"
        )
    num_digests = len(request.resume_digest)
    if num_digests not in (0, count):
        raise InvalidRequest(
            f"resume_digest: {num_digests} numbers for {count} choices", param="resume_digest"
        )
    for cursor, choice in zip(cursors, session.choices, strict=True):
        is_awaited = bool(num_digests) or choice.is_unknown
        most = choice.state.sampling.max_tokens if is_awaited else len(choice.state.output_ids)
        if not 0 <= cursor <= most:
            raise InvalidRequest(
                f"resume_from: choice {choice.index} has {len(choice.state.output_ids)} "
                f"tokens so far, not {cursor}",
                param="resume_from",
            )
    return cursors
