"""Gives the errors that Serve's proxy answers by itself OpenAI's error form.

Serve answers in plain text, or not at all, where it has no route, where it cannot decode a header,
where a replica is lost, and where it times a request out. This middleware stands around its
application: in the proxy, and behind HAProxy in each ingress replica.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from quadriga.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    Forbidden,
    HeadersTooLarge,
    InvalidRequest,
    InvariantViolation,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    QuadrigaError,
    RequestTimeout,
    Unauthenticated,
    Unavailable,
)
from serve_app.http.call import Call, Headers, Message, Receive, Scope, Send, content_type
from serve_app.http.server_metrics import HTTP_SERVER
from serve_app.openai.errors import error_frame, send_error

logger = logging.getLogger("quadriga.http")

App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUEST_ID = b"x-request-id"
TEXT_HEADERS = frozenset({REQUEST_ID, b"idempotency-key", b"traceparent", b"tracestate"})
"""Headers that Serve decodes as UTF-8, and fails where they are not."""
SERVES_HEADERS = frozenset(
    {
        b"serve_multiplexed_model_id",
        b"serve-multiplexed-model-id",
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
    }
)
"""Headers by which Serve lets others steer it; no client's business here, so they are dropped."""
ROUTES_PATH = "/-/routes"
MAX_KEPT_BYTES = 2048
"""Of an answer that is exchanged, for the log."""
PUSH_INTERVAL_S = 2.0
RETRY_S = 1.0

_BY_STATUS: dict[int, type[QuadrigaError]] = {
    error.http_status: error
    for error in (
        InvalidRequest,
        Unauthenticated,
        Forbidden,
        NotFound,
        MethodNotAllowed,
        RequestTimeout,
        BodyTooLarge,
        Overloaded,
        HeadersTooLarge,
        InvariantViolation,
        Unavailable,
        DeadlineExceeded,
    )
}


class OpenAIErrors:
    """ASGI middleware: refuses headers that Serve cannot read, and rewrites Serve's own errors.

    Args:
        app: Serve's.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._pushing: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._start_pushing()
        call = Call(scope, receive, send)
        refusal = unreadable_header(scope["headers"])
        if refusal is not None:
            await _answer(call, refusal)
            return
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in SERVES_HEADERS]
        try:
            await self._pass_on(call)
        except asyncio.CancelledError:
            await _end(call, Unavailable("the server is shutting down", retry_after_s=RETRY_S))
            raise
        except Exception as exc:  # whatever it is, the client gets the documented form
            logger.exception("unexpected failure in Serve at %s", call.route)
            await _end(call, InvariantViolation(f"an internal error ({type(exc).__name__})"))
            return
        lost = "the process that answered the request was lost; send it again"
        await _end(call, Unavailable(lost, retry_after_s=RETRY_S))

    async def _pass_on(self, call: Call) -> None:
        """Have the application answer; an error in a form of Serve's is exchanged for ours."""
        held: Message | None = None
        text = b""

        async def send(message: Message) -> None:
            nonlocal held, text
            if message["type"] == "http.response.start" and _is_serves_error(message):
                held = message
            elif held is None:
                await call.send(message)
            else:
                text = (text + message.get("body", b""))[:MAX_KEPT_BYTES]
                if not message.get("more_body", False):
                    await self._exchange(call, held, text.decode("utf-8", "replace"))

        await self._app(call.scope, call.receive, send)

    async def _exchange(self, call: Call, held: Message, text: str) -> None:
        """Answer with Serve's status, or a better one, in our words; its own go to the log."""
        status = held["status"]
        if status == 404 and not await serve_routes(self._app):
            error: QuadrigaError = Unavailable(
                "the service is starting or stopping; retry shortly", retry_after_s=RETRY_S
            )
            status = error.http_status
        else:
            error = _as_ours(status, call.route)
        logger.log(
            logging.WARNING if status >= 500 else logging.DEBUG,
            "Serve's own answer to %s: %d %s",
            call.route,
            held["status"],
            text,
        )
        await _answer(call, error, status, held["headers"])

    # An ingress knows its controller; Serve's proxy has to ask which applications there are.

    def _start_pushing(self) -> None:
        if self._pushing is None and not HTTP_SERVER.is_pushed:
            HTTP_SERVER.is_pushed = True
            self._pushing = asyncio.get_running_loop().create_task(self._push_for_ever())

    async def _push_for_ever(self) -> None:
        push = await asyncio.to_thread(import_module, "actors.metrics.push")  # takes a moment
        while True:
            try:
                for name in set((await serve_routes(self._app)).values()):
                    await push.push_metrics(name, HTTP_SERVER.registry)
            except Exception as exc:  # Serve's routes, and actors of strangers
                logger.debug("metrics not pushed: %s", exc)
            await asyncio.sleep(PUSH_INTERVAL_S)


async def _end(call: Call, error: QuadrigaError) -> None:
    """The application is done: make up for an answer that has no end, or no beginning."""
    if call.is_complete or call.is_client_gone:
        return
    if not call.status:
        await _answer(call, error)
    elif call.is_events:
        HTTP_SERVER.log_error(error.http_status, f"{call.route}, in its stream: {error.message}")
        await call.write(error_frame(error), more=False)
    # Anything else is cut short: uvicorn closes the connection, which the client notices.


async def _answer(
    call: Call, error: QuadrigaError, status: int | None = None, serves: Headers | None = None
) -> None:
    """Answer in place of the application.

    Args:
        status: Instead of the error's own.
        serves: Headers of Serve's answer.
    """
    status = error.http_status if status is None else status
    HTTP_SERVER.count_answer(status, f"{call.route}: {error.message}")
    request_id = _request_id([*call.scope["headers"], *(serves or [])])
    await send_error(call.send, error, [(REQUEST_ID, request_id)], status=status)


def _request_id(headers: Headers) -> bytes:
    """The client's, or the one that Serve made, or a new one."""
    for name, value in headers:
        if name.lower() == REQUEST_ID and value and _is_text(value):
            return bytes(value)
    return str(uuid.uuid4()).encode()


def _is_serves_error(start: Message) -> bool:
    """Whether an answer that begins so is an error in a form of Serve's."""
    return start["status"] >= 400 and not content_type(start).startswith(b"application/json")


def _as_ours(status: int, route: str) -> QuadrigaError:
    """Serve's status as an error of ours."""
    fallback = InvalidRequest if status < 500 else InvariantViolation
    error_class = _BY_STATUS.get(status, fallback)
    messages = {
        404: f"there is no route {route}",
        405: f"there is no route {route}",
        408: "the request was not done within the time that this server allows",
        429: "the service has as many requests as it takes; retry shortly",
        503: "no process can take the request now; retry shortly",
    }
    message = messages.get(status, f"the request failed with status {status}")
    return error_class(message, retry_after_s=RETRY_S if error_class.retryable else None)


def unreadable_header(headers: list[tuple[bytes, bytes]]) -> InvalidRequest | None:
    """The refusal of a request with a header that Serve, or a log, could not take; else None."""
    for name, value in headers:
        if name in TEXT_HEADERS and not _is_text(value):
            field = name.decode()
            return InvalidRequest(f"{field}: must be printable ASCII", param=field)
    return None


def _is_text(value: bytes) -> bool:
    return value.isascii() and value.decode("ascii").isprintable()


async def serve_routes(app: App) -> dict[str, str]:
    """Route prefix → application, as Serve's own page shows them; none while it has none."""
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": ROUTES_PATH,
        "raw_path": ROUTES_PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [],
        "client": None,
        "server": None,
    }
    await app(scope, receive, send)
    if not messages or messages[0].get("status") != 200:
        return {}
    body = b"".join(m.get("body", b"") for m in messages[1:])
    routes = json.loads(body)
    return {str(k): str(v) for k, v in routes.items()} if isinstance(routes, dict) else {}
