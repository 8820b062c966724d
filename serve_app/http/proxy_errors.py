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
from collections.abc import Awaitable, Callable, MutableMapping
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
from serve_app.http.server_metrics import HTTP_SERVER
from serve_app.openai.errors import error_frame, send_error

logger = logging.getLogger("quadriga.http")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
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
        exchange = _Exchange(self._app, scope, receive, send)
        refusal = unreadable_header(scope["headers"])
        if refusal is not None:
            await exchange.answer(refusal)
            return
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in SERVES_HEADERS]
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            await exchange.end(Unavailable("the server is shutting down", retry_after_s=RETRY_S))
            raise
        except Exception as exc:  # whatever it is, the client gets the documented form
            logger.exception("unexpected failure in Serve at %s", exchange.route)
            await exchange.end(InvariantViolation(f"an internal error ({type(exc).__name__})"))
            return
        await exchange.end(
            Unavailable(
                "the process that answered the request was lost; send it again",
                retry_after_s=RETRY_S,
            )
        )

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


class _Exchange:
    """One request, and what of its answer went to the client."""

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._receive = receive
        self._send = send
        self._headers = scope["headers"]
        self.route = f"{scope['method']} {scope['path']}"[:200]
        self._held: Message | None = None
        self._held_body = b""
        self._is_started = False
        self._is_events = False
        self._is_complete = False
        self._is_client_gone = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_client_gone = self._is_client_gone or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Pass a piece of the answer on, unless it is an error in a form of Serve's."""
        if message["type"] == "http.response.start":
            content_type = dict(message.get("headers", ())).get(b"content-type", b"")
            if message["status"] >= 400 and not content_type.startswith(b"application/json"):
                self._held = message
                return
            self._is_started = True
            self._is_events = content_type.startswith(b"text/event-stream")
        elif self._held is not None:
            self._held_body = (self._held_body + message.get("body", b""))[:MAX_KEPT_BYTES]
            if not message.get("more_body", False):
                await self._exchange_error(self._held)
            return
        elif not message.get("more_body", False):
            self._is_complete = True
        await self._send(message)

    async def end(self, error: QuadrigaError) -> None:
        """The application is done: make up for an answer that has no end, or no beginning."""
        if self._is_complete or self._is_client_gone:
            return
        if not self._is_started:
            await self.answer(error)
        elif self._is_events:
            self._is_complete = True
            HTTP_SERVER.log_error(
                error.http_status, f"{self.route}, in its stream: {error.message}"
            )
            await self._send({"type": "http.response.body", "body": error_frame(error)})
        # Anything else is cut short: uvicorn closes the connection, which the client notices.

    async def answer(self, error: QuadrigaError, status: int | None = None) -> None:
        """Answer in place of the application."""
        self._is_started = self._is_complete = True
        status = error.http_status if status is None else status
        HTTP_SERVER.count_answer(status, f"{self.route}: {error.message}")
        await send_error(self._send, error, [(REQUEST_ID, self._request_id())], status=status)

    def _request_id(self) -> bytes:
        """The client's, or the one that Serve made, or a new one."""
        held = self._held["headers"] if self._held is not None else []
        for name, value in [*self._headers, *held]:
            if name.lower() == REQUEST_ID and value and _is_text(value):
                return bytes(value)
        return str(uuid.uuid4()).encode()

    async def _exchange_error(self, held: Message) -> None:
        """Answer with Serve's status, or a better one, in our words; its own go to the log."""
        status = held["status"]
        text = self._held_body.decode("utf-8", "replace")
        if status == 404 and not await serve_routes(self._app):
            error: QuadrigaError = Unavailable(
                "the service is starting or stopping; retry shortly", retry_after_s=RETRY_S
            )
            status = error.http_status
        else:
            error = self._error(status)
        logger.log(
            logging.WARNING if status >= 500 else logging.DEBUG,
            "Serve's own answer to %s: %d %s",
            self.route,
            held["status"],
            text,
        )
        await self.answer(error, status)

    def _error(self, status: int) -> QuadrigaError:
        """Serve's status as an error of ours."""
        fallback = InvalidRequest if status < 500 else InvariantViolation
        error_class = _BY_STATUS.get(status, fallback)
        messages = {
            404: f"there is no route {self.route}",
            405: f"there is no route {self.route}",
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
