"""Generation over HTTP: completions and chats, whole or as events, resumable by idempotency key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from quadriga.errors import Cancelled, InvalidRequest, QuadrigaError
from quadriga.observability import tracing
from serve_app.auth.keys import ApiKey
from serve_app.http.call import Call
from serve_app.http.json_body import parse_json
from serve_app.openai.bodies import parse_body
from serve_app.openai.errors import error_frame
from serve_app.openai.rendering import ChatRenderer, CompletionRenderer, Renderer
from serve_app.openai.schema import ChatBody, CompletionBody
from serve_app.openai.validation import chat_spec, completion_spec
from serve_app.request.engine_client import EngineClient
from serve_app.request.request import OutputStream, Request
from serve_app.request.requests import check_key
from serve_app.request.spec import GenerateSpec

logger = logging.getLogger("quadriga.http")

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MAX_WARNED_FIELDS = 8

BodyT = TypeVar("BodyT", CompletionBody, ChatBody)


class HttpGeneration:
    """The two generating routes."""

    def __init__(self, desk: EngineClient) -> None:
        self._engine_client = desk
        self._limits = desk.config.ingress
        self._warned: set[str] = set()

    async def completions(self, call: Call) -> None:
        await self._generate(call, CompletionBody, completion_spec, CompletionRenderer)

    async def chat(self, call: Call) -> None:
        await self._generate(call, ChatBody, chat_spec, ChatRenderer)

    async def _generate(
        self,
        call: Call,
        body_class: type[BodyT],
        to_spec: Callable[..., Awaitable[GenerateSpec]],
        renderer_class: type[Renderer],
    ) -> None:
        caller = self._engine_client.gate.http_caller(call.headers.get("authorization"))
        with self._engine_client.bodies.taken():
            raw = await call.body(
                max_bytes=self._limits.max_body_bytes, timeout_s=self._limits.body_timeout_s
            )
        body = parse_body(body_class, parse_json(raw))
        spec = await to_spec(
            body,
            self._engine_client.models.find(body.model),
            self._limits,
            self._engine_client.encode,
            request_id=uuid.uuid4().hex,
            now_unix_s=self._engine_client.clock.unix_s(),
        )
        if tracing.is_on():
            spec = replace(spec, traceparent=call.headers.get("traceparent"))
        session = await self._session(call, caller, raw, spec)
        try:
            reader = session.reader(_resume_cursors(call, session))
        except InvalidRequest:
            self._engine_client.leave(session)
            raise
        # From here on every way out goes through `leave`.
        watcher = asyncio.ensure_future(call.watch_disconnect(reader.hang_up))
        try:
            tokenizer = self._engine_client.models.find(spec.model).tokenizer
            options = body.stream_options
            renderer = renderer_class(
                session,
                tokenizer,
                usage_frame=bool(options and options.include_usage),
                running_usage=bool(options and options.continuous_usage_stats),
                token_ids=bool(body.return_token_ids),
            )
            headers = self._warning_headers(spec)
            with self._engine_client.answering():
                if body.stream:
                    await self._stream(call, reader, renderer, headers)
                else:
                    while await reader.read():
                        pass
                    await call.answer(json.dumps(renderer.whole()).encode(), headers=headers)
        finally:
            watcher.cancel()
            reader.close()
            self._engine_client.leave(session)

    async def _stream(
        self,
        call: Call,
        reader: OutputStream,
        renderer: Renderer,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Answer as events; what fails before the first token is still an ordinary error."""
        deltas = await reader.read()
        await call.start(200, SSE_HEADERS + headers)
        try:
            while deltas:
                await call.write(renderer.events(deltas))
                deltas = await reader.read()
            await call.write(renderer.closing_events(), more=False)
        except Cancelled as exc:
            logger.info("stream ended by its client: %s", exc.message)
            await call.write(b"", more=False)
        except QuadrigaError as exc:
            await call.write(error_frame(exc), more=False)

    async def _session(self, call: Call, caller: ApiKey, raw: bytes, spec: GenerateSpec) -> Request:
        """The session under the caller's idempotency key, or a new one."""
        given = call.headers.get("idempotency-key")
        if given is None:
            return self._engine_client.open(spec, caller=caller)
        key = check_key(given, "idempotency-key")
        fingerprint = hashlib.sha256(call.path.encode() + b"\0" + raw).digest()
        return await self._engine_client.open_or_resume(
            spec, caller, key, fingerprint, is_resumption=_is_resumption(call)
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


def _is_resumption(call: Call) -> bool:
    """Whether the client says that it has tokens already."""
    return any(part.strip(" 0") for part in call.headers.get("x-resume-index", "").split(","))


def _resume_cursors(call: Call, session: Request) -> list[int]:
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
        # What was just taken over from another ingress has its tokens in a moment.
        is_awaited = choice.is_unknown and cursor <= choice.state.sampling.max_tokens
        if cursor > len(choice.state.output_ids) and not is_awaited:
            raise InvalidRequest(
                f"x-resume-index: choice {choice.index} has {len(choice.state.output_ids)} tokens "
                f"so far, not {cursor}",
                param="x-resume-index",
            )
    return cursors
