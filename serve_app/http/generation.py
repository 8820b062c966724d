"""The models' answers over HTTP: completions, chats and responses, whole or as events, and
embeddings; resumable by key."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from quadriga.errors import InvalidRequest, QuadrigaError
from quadriga.observability import tracing
from quadriga.text import TextTokenizer
from serve_app.auth.keys import ApiKey
from serve_app.embeddings.body import EmbeddingsBody, embedding_request
from serve_app.embeddings.rendering import EmbeddingsFormat
from serve_app.http.call import Call, Headers, json_in_parts
from serve_app.openai.bodies import parse_body, parse_json
from serve_app.openai.models import ModelDirectory
from serve_app.openai.rendering import CHAT, COMPLETION, AnswerFormat, StreamFormat
from serve_app.openai.schema import ChatBody, CompletionBody
from serve_app.openai.validation import chat_request, completion_request
from serve_app.request.engine_client import EngineClient
from serve_app.request.request import OutputStream, Request, beside
from serve_app.request.resumption import check_cursors, check_key
from serve_app.responses.body import ResponsesBody, as_chat, in_its_words
from serve_app.responses.rendering import ResponsesFormat

logger = logging.getLogger("quadriga.http")

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MAX_WARNED_FIELDS = 8
ReadBody = Callable[[Any, ApiKey], Awaitable[tuple[Request, AnswerFormat]]]
"""From a body's JSON to the request, and how its answer is written."""


class HttpGeneration:
    """The generating routes."""

    def __init__(self, engine_client: EngineClient) -> None:
        self._engine_client = engine_client
        self._limits = engine_client.config.ingress
        self._warned: set[str] = set()

    async def completions(self, call: Call) -> None:
        await self._generate(call, self._completion)

    async def chat(self, call: Call) -> None:
        await self._generate(call, self._chat)

    async def responses(self, call: Call) -> None:
        _refuse_resumption(call)
        await self._generate(call, self._response)

    async def embeddings(self, call: Call) -> None:
        _refuse_resumption(call)
        await self._generate(call, self._embedding)

    async def _generate(self, call: Call, read: ReadBody) -> None:
        request, answer_format = await self._open(call, read)
        try:
            stream = request.reader(_resume_cursors(call, request))
        except InvalidRequest:
            self._engine_client.leave(request)
            raise
        # From here on every way out goes through `leave`.
        watcher = asyncio.ensure_future(call.watch_disconnect(stream.hang_up))
        try:
            tokenizer = self._models.find(request.model).tokenizer
            headers = self._warning_headers(request)
            with self._engine_client.answering():
                if request.stream:
                    assert isinstance(answer_format, StreamFormat)  # of every body with `stream`
                    await _stream(call, stream, answer_format, tokenizer, headers)
                else:
                    while await stream.read():
                        pass
                    answer = await beside(
                        request, lambda: json_in_parts(answer_format.whole(request, tokenizer))
                    )
                    await call.answer(answer, headers=headers)
        finally:
            watcher.cancel()
            stream.close()
            self._engine_client.leave(request)

    async def _open(self, call: Call, read: ReadBody) -> tuple[Request, AnswerFormat]:
        """Read and validate a request and begin it, or find it under the idempotency key."""
        caller = self._engine_client.rate_limiter.http_caller(call.headers.get("authorization"))
        raw = await call.read_body(self._engine_client)
        request, answer_format = await read(parse_json(raw), caller)
        if tracing.is_on():
            request.traceparent = call.headers.get("traceparent")
        return await self._begun(call, caller, raw, request), answer_format

    async def _completion(self, data: Any, caller: ApiKey) -> tuple[Request, AnswerFormat]:
        body = parse_body(CompletionBody, data)
        request = await completion_request(
            body, self._limits, self._models, caller=caller.name, **self._name_and_time()
        )
        return request, COMPLETION

    async def _chat(self, data: Any, caller: ApiKey) -> tuple[Request, AnswerFormat]:
        return await self._chat_request(parse_body(ChatBody, data), caller), CHAT

    async def _response(self, data: Any, caller: ApiKey) -> tuple[Request, AnswerFormat]:
        body = parse_body(ResponsesBody, data)
        try:
            request = await self._chat_request(as_chat(body), caller)
        except InvalidRequest as exc:
            raise in_its_words(exc) from exc
        return request, ResponsesFormat(body)

    async def _embedding(self, data: Any, caller: ApiKey) -> tuple[Request, AnswerFormat]:
        body = parse_body(EmbeddingsBody, data)
        request = await embedding_request(body, self._limits, self._models, **self._name_and_time())
        return request, EmbeddingsFormat(body)

    async def _chat_request(self, body: ChatBody, caller: ApiKey) -> Request:
        return await chat_request(
            body, self._limits, self._models, caller=caller.name, **self._name_and_time()
        )

    @property
    def _models(self) -> ModelDirectory:
        return self._engine_client.models

    def _name_and_time(self) -> dict[str, Any]:
        """Of a request that begins now."""
        return {"request_id": uuid.uuid4().hex, "now_unix_s": self._engine_client.clock.unix_s()}

    async def _begun(self, call: Call, caller: ApiKey, raw: bytes, request: Request) -> Request:
        """The request under the caller's idempotency key, or this one, begun."""
        given = call.headers.get("idempotency-key")
        if given is None:
            if _is_resumption(call):
                raise InvalidRequest(
                    "x-resume-index: needs the header idempotency-key of the request that broke",
                    param="x-resume-index",
                )
            return self._engine_client.open(request, caller=caller)
        key = check_key(given, "idempotency-key")
        fingerprint = hashlib.sha256(call.path.encode() + b"\0" + raw).digest()
        return await self._engine_client.open_or_resume(
            request, caller, key, fingerprint, is_resumption=_is_resumption(call)
        )

    def _warning_headers(self, request: Request) -> Headers:
        """Headers that name the ignored fields; the log names each once."""
        names = [f for f in request.ignored_fields if re.fullmatch(r"[\w.]+", f, re.ASCII)]
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
    answer_format: StreamFormat,
    tokenizer: TextTokenizer,
    headers: Headers,
) -> None:
    """Answer as events; what fails before the first token is still an ordinary error."""
    deltas = await stream.read()
    await call.start(200, SSE_HEADERS + headers)
    try:
        while deltas:
            render = partial(answer_format.events, stream, deltas, tokenizer)
            await call.write(await beside(stream.request, render))
            deltas = await stream.read()
        await call.write(answer_format.closing_events(stream.request), more=False)
    except QuadrigaError as exc:
        call.failed_status = exc.http_status
        await call.write(answer_format.error_event(exc), more=False)


def _is_resumption(call: Call) -> bool:
    """Whether the request states that the client has tokens already."""
    return any(part.strip(" 0") for part in call.headers.get("x-resume-index", "").split(","))


def _refuse_resumption(call: Call) -> None:
    """Raises: InvalidRequest: The client has tokens already, on a route without such."""
    if _is_resumption(call):
        raise InvalidRequest(
            "x-resume-index: not on this route; leave it out", param="x-resume-index"
        )


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
