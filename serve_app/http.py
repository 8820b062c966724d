"""The HTTP door: OpenAI's API over the front desk, as one ASGI application."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quadriga.errors import (
    Cancelled,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    QuadrigaError,
    Unavailable,
)
from quadriga.metrics import CONTENT_TYPE
from serve_app.errors import as_quadriga, error_frame, error_headers, error_json
from serve_app.front import FrontDesk
from serve_app.http_call import Call, Receive, Scope, Send, parse_json
from serve_app.openai_schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationFields,
    TokenizeBody,
)
from serve_app.openapi import openapi_document
from serve_app.rendering import ChatRenderer, CompletionRenderer, Renderer
from serve_app.session import Reader, Session
from serve_app.sessions import check_key
from serve_app.spec import GenerateSpec
from serve_app.validation import chat_spec, completion_spec, parse_body, plain_messages

logger = logging.getLogger("quadriga.http")

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MAX_WARNED_FIELDS = 8

Handler = Callable[[Call], Awaitable[None]]


class Endpoint:
    """A route's handler as an ASGI application that answers every error in OpenAI's format."""

    def __init__(self, desk: FrontDesk, handler: Handler) -> None:
        self._desk = desk
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        try:
            await self._handler(call)
        except Exception as exc:  # the border: whatever it is, the client gets the documented form
            error = as_quadriga(exc)
            if error is not exc:
                logger.exception("unexpected failure in %s", call.path)
            if call.status:
                raise
            if isinstance(error, Cancelled):
                call.status = error.http_status  # nobody is there to read an answer
            else:
                await call.answer_error(error)
        finally:
            self._desk.metrics.http_requests.labels("http", str(call.status)).inc()


class HttpDoor:
    """The routes of the API.

    Args:
        desk: Does the work; outlives the application.
    """

    def __init__(self, desk: FrontDesk) -> None:
        self._desk = desk
        self._limits = desk.config.ingress
        self._warned: set[str] = set()

    def application(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            yield
            await self._desk.close()

        app = FastAPI(title="Quadriga", docs_url="/docs", redoc_url=None, lifespan=lifespan)
        for method, path, handler in (
            ("GET", "/health", self.health),
            ("GET", "/live", self.live),
            ("GET", "/metrics", self.metrics),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
        ):
            endpoint = Endpoint(self._desk, handler)
            app.router.routes.append(Route(path, endpoint, methods=[method]))
        app.add_exception_handler(HTTPException, _routing_error)
        app.openapi = lambda: openapi_document(self._limits)  # type: ignore[method-assign]
        return app

    # --- small routes --------------------------------------------------------------------------

    async def health(self, call: Call) -> None:
        self._desk.check_ready()
        await call.answer_json({"status": "ok", "models": self._desk.models.ids()})

    async def live(self, call: Call) -> None:
        await call.answer_json({"status": "alive"})

    async def metrics(self, call: Call) -> None:
        try:
            page = await self._desk.metrics_page()
        except QuadrigaError as exc:
            # A page without the others' counters would look like counters that fell.
            raise Unavailable(f"metrics cannot be gathered now: {exc.message}") from exc
        await call.answer(page, content_type=CONTENT_TYPE.encode())

    async def models(self, call: Call) -> None:
        self._owner(call)
        await call.answer_json(self._desk.models.listing())

    async def model(self, call: Call) -> None:
        self._owner(call)
        await call.answer_json(self._desk.models.describe(call.scope["path_params"]["model"]))

    async def tokenize(self, call: Call) -> None:
        self._owner(call)
        body = parse_body(TokenizeBody, parse_json(await self._body(call)))
        model = self._desk.models.find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
        if body.messages is not None:
            text = model.tokenizer.render_chat(plain_messages(body.messages))
            special = bool(body.add_special_tokens)
        else:
            text = body.prompt or ""
            special = body.add_special_tokens is not False
        tokens = await self._desk.encode(model, text, special)
        answer: dict[str, Any] = {
            "tokens": tokens,
            "count": len(tokens),
            "max_model_len": model.max_model_len,
        }
        if body.return_token_strs:
            answer["token_strs"] = [model.tokenizer.token_text(t) for t in tokens]
        await call.answer_json(answer)

    async def detokenize(self, call: Call) -> None:
        self._owner(call)
        body = parse_body(DetokenizeBody, parse_json(await self._body(call)))
        model = self._desk.models.find(body.model)
        size = model.checkpoint.vocab_size
        for i, token_id in enumerate(body.tokens):
            if token_id >= size:
                raise InvalidRequest(
                    f"tokens.{i}: {token_id} is outside the vocabulary (0 to {size - 1})",
                    param=f"tokens.{i}",
                )
        text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
        await call.answer_json({"prompt": text})

    # --- generation ----------------------------------------------------------------------------

    async def completions(self, call: Call) -> None:
        async def to_spec(data: Any) -> tuple[GenerationFields, GenerateSpec]:
            body = parse_body(CompletionBody, data)
            model = self._desk.models.find(body.model)
            return body, await completion_spec(
                body,
                model,
                self._limits,
                self._desk.encode,
                request_id=uuid.uuid4().hex,
                now_unix_s=self._desk.clock.unix_s(),
            )

        await self._generate(call, to_spec, CompletionRenderer)

    async def chat(self, call: Call) -> None:
        async def to_spec(data: Any) -> tuple[GenerationFields, GenerateSpec]:
            body = parse_body(ChatBody, data)
            model = self._desk.models.find(body.model)
            return body, await chat_spec(
                body,
                model,
                self._limits,
                self._desk.encode,
                request_id=uuid.uuid4().hex,
                now_unix_s=self._desk.clock.unix_s(),
            )

        await self._generate(call, to_spec, ChatRenderer)

    async def _generate(
        self,
        call: Call,
        to_spec: Callable[[Any], Awaitable[tuple[GenerationFields, GenerateSpec]]],
        renderer_class: type[Renderer],
    ) -> None:
        owner = self._owner(call)
        raw = await self._body(call)
        body, spec = await to_spec(parse_json(raw))
        session = self._session(call, owner, raw, spec)
        try:
            reader = session.reader(_resume_cursors(call, session))
        except InvalidRequest:
            self._desk.leave(session)
            raise
        # From here on every way out goes through `leave`.
        watcher = asyncio.ensure_future(call.watch_disconnect(reader.hang_up))
        try:
            tokenizer = self._desk.models.find(spec.model).tokenizer
            options = body.stream_options
            renderer = renderer_class(
                session,
                tokenizer,
                usage_frame=bool(options and options.include_usage),
                running_usage=bool(options and options.continuous_usage_stats),
            )
            headers = self._warning_headers(spec)
            if body.stream:
                await self._stream(call, reader, renderer, headers)
            else:
                while await self._read(reader):
                    pass
                await call.answer(json.dumps(renderer.whole()).encode(), headers=headers)
        finally:
            watcher.cancel()
            reader.close()
            self._desk.leave(session)

    async def _stream(
        self,
        call: Call,
        reader: Reader,
        renderer: Renderer,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Answer as events; what fails before the first token is still an ordinary error."""
        deltas = await self._read(reader)
        await call.start(200, SSE_HEADERS + headers)
        try:
            while deltas:
                await call.write(renderer.events(deltas))
                deltas = await self._read(reader)
            await call.write(renderer.closing_events(), more=False)
        except Cancelled as exc:
            logger.info("stream ended by its client: %s", exc.message)
            await call.write(b"", more=False)
        except QuadrigaError as exc:
            await call.write(error_frame(exc), more=False)

    async def _read(self, reader: Reader) -> list[Any]:
        session = reader.session
        try:
            return await reader.read(self._desk.seconds_left(session))
        except TimeoutError:
            raise self._desk.time_out(session) from None

    def _session(self, call: Call, owner: str, raw: bytes, spec: GenerateSpec) -> Session:
        """The session under the caller's idempotency key, or a new one."""
        given = call.headers.get("idempotency-key")
        if given is None:
            return self._desk.open(spec)
        key = (owner, check_key(given, "idempotency-key"))
        fingerprint = hashlib.sha256(call.path.encode() + b"\0" + raw).digest()
        return self._desk.open_or_resume(spec, key, fingerprint)

    def _owner(self, call: Call) -> str:
        return self._desk.keys.http_owner(call.headers.get("authorization"))

    async def _body(self, call: Call) -> bytes:
        return await call.body(
            max_bytes=self._limits.max_body_bytes, timeout_s=self._limits.body_timeout_s
        )

    def _warning_headers(self, spec: GenerateSpec) -> list[tuple[bytes, bytes]]:
        """Name the fields that were ignored, to the client always, to the log once each."""
        names = [f for f in spec.ignored_fields if f.isascii() and f.replace("_", "").isalnum()]
        names = [name[:64] for name in names[:MAX_WARNED_FIELDS]]
        if not names:
            return []
        fresh = [name for name in names if name not in self._warned]
        if fresh and len(self._warned) < 256:
            self._warned.update(fresh)
            logger.warning("requests carry fields that are ignored: %s", ", ".join(fresh))
        return [(b"x-quadriga-ignored", ",".join(names).encode())]


def _resume_cursors(call: Call, session: Session) -> list[int]:
    """Read `x-resume-index`: tokens already had, per choice, separated by commas."""
    given = call.headers.get("x-resume-index")
    count = len(session.choices)
    if given is None:
        return [0] * count
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InvalidRequest(
            "x-resume-index: must be a whole number, or one per choice with commas between",
            param="x-resume-index",
        )
    cursors = [int(part) for part in parts]
    if len(cursors) != count:
        raise InvalidRequest(
            f"x-resume-index: {len(cursors)} numbers for {count} choices", param="x-resume-index"
        )
    for cursor, choice in zip(cursors, session.choices, strict=True):
        if cursor > len(choice.state.output_ids):
            raise InvalidRequest(
                f"x-resume-index: choice {choice.index} has {len(choice.state.output_ids)} tokens "
                f"so far, not {cursor}",
                param="x-resume-index",
            )
    return cursors


async def _routing_error(request: Request, exc: Exception) -> Response:
    """404 and 405, which the router raises itself, in the documented form."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    error: QuadrigaError
    route = f"{request.method} {request.url.path}"[:200]
    if status == 404:
        error = NotFound(f"there is no route {route}")
    elif status == 405:
        error = MethodNotAllowed(
            f"the route {request.url.path[:200]} does not take {request.method}"
        )
    else:
        error = as_quadriga(exc)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    allowed = (getattr(exc, "headers", None) or {}).get("Allow")
    if allowed:
        headers["allow"] = allowed
    return Response(
        error_json(error), error.http_status, headers=headers, media_type="application/json"
    )
