"""Generation over HTTP: completions and chats, whole or as events, resumable by idempotency key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid

from quadriga.errors import Cancelled, InvalidRequest, QuadrigaError
from quadriga.observability import tracing
from quadriga.text import TextTokenizer
from serve_app.auth.keys import ApiKey
from serve_app.http.call import Call, Headers
from serve_app.openai.bodies import parse_body, parse_json
from serve_app.openai.errors import error_frame
from serve_app.openai.rendering import CHAT, COMPLETION, AnswerFormat
from serve_app.openai.schema import ChatBody, CompletionBody
from serve_app.openai.validation import chat_request, completion_request
from serve_app.request.engine_client import EngineClient
from serve_app.request.request import OutputStream, Request
from serve_app.request.resumption import check_cursors, check_key

logger = logging.getLogger("quadriga.http")

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MAX_WARNED_FIELDS = 8


class HttpGeneration:
    """The two generating routes."""

    def __init__(self, engine_client: EngineClient) -> None:
        self._engine_client = engine_client
        self._limits = engine_client.config.ingress
        self._warned: set[str] = set()

    async def completions(self, call: Call) -> None:
        await self._generate(call, COMPLETION)

    async def chat(self, call: Call) -> None:
        await self._generate(call, CHAT)

    async def _generate(self, call: Call, answer_format: AnswerFormat) -> None:
        request = await self._open(call, is_chat=answer_format is CHAT)
        try:
            stream = request.reader(_resume_cursors(call, request))
        except InvalidRequest:
            self._engine_client.leave(request)
            raise
        # From here on every way out goes through `leave`.
        watcher = asyncio.ensure_future(call.watch_disconnect(stream.hang_up))
        try:
            tokenizer = self._engine_client.models.find(request.model).tokenizer
            headers = self._warning_headers(request)
            with self._engine_client.answering():
                if request.stream:
                    await _stream(call, stream, answer_format, tokenizer, headers)
                else:
                    while await stream.read():
                        pass
                    answer = json.dumps(answer_format.whole(request, tokenizer))
                    await call.answer(answer.encode(), headers=headers)
        finally:
            watcher.cancel()
            stream.close()
            self._engine_client.leave(request)

    async def _open(self, call: Call, *, is_chat: bool) -> Request:
        """Read and validate a request and begin it, or find it under the idempotency key."""
        caller = self._engine_client.rate_limiter.http_caller(call.headers.get("authorization"))
        raw = await call.read_body(self._engine_client)
        request = await self._validated(raw, is_chat=is_chat)
        if tracing.is_on():
            request.traceparent = call.headers.get("traceparent")
        return await self._begun(call, caller, raw, request)

    async def _validated(self, raw: bytes, *, is_chat: bool) -> Request:
        models = self._engine_client.models
        data = parse_json(raw)
        name, now_unix_s = uuid.uuid4().hex, self._engine_client.clock.unix_s()
        if is_chat:
            chat = parse_body(ChatBody, data)
            return await chat_request(
                chat,
                models.find(chat.model),
                self._limits,
                models,
                request_id=name,
                now_unix_s=now_unix_s,
            )
        body = parse_body(CompletionBody, data)
        return await completion_request(
            body,
            models.find(body.model),
            self._limits,
            models,
            request_id=name,
            now_unix_s=now_unix_s,
        )

    async def _begun(self, call: Call, caller: ApiKey, raw: bytes, request: Request) -> Request:
        """The request under the caller's idempotency key, or this one, begun."""
        given = call.headers.get("idempotency-key")
        if given is None:
            return self._engine_client.open(request, caller=caller)
        key = check_key(given, "idempotency-key")
        fingerprint = hashlib.sha256(call.path.encode() + b"\0" + raw).digest()
        return await self._engine_client.open_or_resume(
            request, caller, key, fingerprint, is_resumption=_is_resumption(call)
        )

    def _warning_headers(self, request: Request) -> Headers:
        """Headers that name the ignored fields; the log names each once."""
        names = [f for f in request.ignored_fields if f.isascii() and f.replace("_", "").isalnum()]
        names = [name[:64] for name in names[:MAX_WARNED_FIELDS]]
        if not names:
            return []
        fresh = [name for name in names if name not in self._warned]
        if fresh and len(self._warned) < 256:
            self._warned.update(fresh)
            logger.warning("requests carry fields that are ignored: %s", ", ".join(fresh))
        return [(b"x-quadriga-ignored", ",".join(names).encode())]


async def _stream(
    call: Call,
    stream: OutputStream,
    answer_format: AnswerFormat,
    tokenizer: TextTokenizer,
    headers: Headers,
) -> None:
    """Answer as events; what fails before the first token is still an ordinary error."""
    deltas = await stream.read()
    await call.start(200, SSE_HEADERS + headers)
    try:
        while deltas:
            await call.write(answer_format.events(stream, deltas, tokenizer))
            deltas = await stream.read()
        await call.write(answer_format.closing_events(stream.request), more=False)
    except Cancelled as exc:
        logger.info("stream ended by its client: %s", exc.message)
        await call.write(b"", more=False)
    except QuadrigaError as exc:
        await call.write(error_frame(exc), more=False)


def _is_resumption(call: Call) -> bool:
    """Whether the request states that the client has tokens already."""
    return any(part.strip(" 0") for part in call.headers.get("x-resume-index", "").split(","))


def _resume_cursors(call: Call, request: Request) -> list[int]:
    """Read `x-resume-index`: tokens already had, per choice, separated by commas."""
    given = call.headers.get("x-resume-index")
    if given is None:
        return [0] * len(request.sequences)
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise InvalidRequest(
            "x-resume-index: must be a whole number, or one per choice with commas between",
            param="x-resume-index",
        )
    return check_cursors(request, [int(part) for part in parts], "x-resume-index")
