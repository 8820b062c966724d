"""One HTTP exchange as the routes see it, and the ASGI application around each route."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from quadriga.errors import (
    BodyTooLarge,
    Cancelled,
    Forbidden,
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
)
from serve_app.http.server_metrics import HTTP_SERVER
from serve_app.http.tls import hostname, is_loopback, is_public_name
from serve_app.openai.errors import as_quadriga, send_error

if TYPE_CHECKING:  # Serve's proxy needs no more than `Call`
    from serve_app.request.engine_client import EngineClient

logger = logging.getLogger("quadriga.http")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_QUERY_FIELDS = 32
PLAIN_ITEMS = 16_384
"""Numbers or texts that are written at once: some milliseconds."""
CLIENT_GONE = Cancelled.http_status
UNCOUNTED = frozenset({"/health", "/ping", "/live", "/metrics", "/metrics/endpoint"})
"""Probes and scrapes, by any method: among them the failures of requests would be too few to be
seen."""


class Call:
    """An ASGI request with its answer.

    Attributes:
        route: Method and path, as far as a log or an error needs them.
        status: What was answered; 0 until then.
        failed_status: What an answer that had begun ended in; 0 where it ended well.
        is_events: The answer is a stream of events.
        is_complete: All of the answer was sent.
        is_client_gone: Nobody waits for it any more.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.route = f"{scope['method']} {scope['path']}"[:200]
        self.status = self.failed_status = 0
        self.is_events = self.is_complete = self.is_client_gone = False

    @cached_property
    def headers(self) -> dict[str, str]:
        """Lower-case names; of a repeated header the last value."""
        return {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in self.scope["headers"]
        }

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def query(self) -> dict[str, str]:
        """The parameters of the URL; of one named more than once, the last.

        Raises: InvalidRequest: There are too many.
        """
        text = self.scope["query_string"].decode("latin-1")
        try:
            return dict(parse_qsl(text, max_num_fields=MAX_QUERY_FIELDS))
        except ValueError as exc:
            raise InvalidRequest(f"query: more than {MAX_QUERY_FIELDS} fields") from exc

    def check_headers(self, max_headers: int, max_bytes: int) -> None:
        """Raises: HeadersTooLarge."""
        headers = self.scope["headers"]
        if len(headers) > max_headers:
            raise HeadersTooLarge(
                f"{len(headers)} headers, above the limit of {max_headers} (ingress.max_headers)"
            )
        size = sum(len(name) + len(value) for name, value in headers)
        if size > max_bytes:
            raise HeadersTooLarge(
                f"headers of {size} bytes, above the limit of {max_bytes} "
                "(ingress.max_header_bytes)"
            )

    async def read_body(self, engine_client: EngineClient) -> bytes:
        """Read the body within the deployment's limits. Raises: as `body`, and Overloaded."""
        limits = engine_client.config.ingress
        origin, form = self.headers.get("origin"), self.headers.get("content-type", "")
        is_json = form.partition(";")[0].strip().lower() == "application/json"
        if not is_json and origin is not None and not {origin, "*"} & {*limits.cors_origins}:
            # Browsers send other types for any page, and JSON only where they asked before.
            raise InvalidRequest(
                f"content-type: {form[:80]!r} from a page of {origin[:80]}; send application/json, "
                "or name the page in ingress.cors_origins",
                param="content-type",
            )
        with engine_client.body_limiter.slot():
            return await self.body(max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)

    async def body(self, *, max_bytes: int, timeout_s: float) -> bytes:
        """Read the whole body.

        Raises: BodyTooLarge, as soon as that is known; RequestTimeout; Cancelled.
        """
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("the body must not be compressed", param="content-encoding")
        announced = self.headers.get("content-length", "0")
        if announced.isdigit() and int(announced) > max_bytes:
            raise _too_large(max_bytes)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise Cancelled("the client went away while it sent its request")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > max_bytes:
                        raise _too_large(max_bytes)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as exc:
            raise RequestTimeout(f"the body was not here within {timeout_s:g} s") from exc

    async def watch_disconnect(self, hang_up: Callable[[], None]) -> None:
        """Call `hang_up` when the client goes; for a task beside the answer."""
        with suppress(Exception):  # whoever received for us is gone, and the client with it
            while (await self.receive())["type"] != "http.disconnect":
                pass
        hang_up()

    async def receive(self) -> Message:
        message = await self._receive()
        self.is_client_gone = self.is_client_gone or message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        """Send a piece of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_events = content_type(message).startswith(b"text/event-stream")
        else:
            self.is_complete = not message.get("more_body", False)
        await self._send(message)

    async def start(self, status: int, headers: Headers) -> None:
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(
        self,
        data: bytes,
        *,
        headers: Headers | None = None,
        content_type: bytes = b"application/json",
    ) -> None:
        """Send a whole answer."""
        fixed = [(b"content-type", content_type), (b"content-length", str(len(data)).encode())]
        await self.start(200, fixed + (headers or []))
        await self.write(data, more=False)

    async def answer_json(self, value: object) -> None:
        await self.answer(json.dumps(value).encode())


Handler = Callable[[Call], Awaitable[None]]


class Endpoint:
    """A route's handler as an ASGI application that answers every error in OpenAI's format.

    Args:
        door: The metrics' label of that name.
    """

    def __init__(self, engine_client: EngineClient, handler: Handler, door: str = "http") -> None:
        self._engine_client = engine_client
        self._handler = handler
        self._metrics = engine_client.metrics
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        limits = self._engine_client.config.ingress
        try:
            call.check_headers(limits.max_headers, limits.max_header_bytes)
            self._check_page(call)
            await self._handler(call)
        except Exception as exc:  # whatever it is, the client gets the documented form
            error = as_quadriga(exc)
            if error is not exc:
                logger.exception("unexpected failure in %s", call.route)
            self._metrics.count_refusal(error)
            if call.status:
                call.failed_status = error.http_status
                raise
            if error.http_status >= 500:
                HTTP_SERVER.log_error(error.http_status, f"{call.route}: {error.message}")
            call.status = error.http_status
            await send_error(send, error)  # nobody reads it where the client itself is gone
        finally:  # without a status where the call itself was cancelled
            code = call.failed_status or call.status or CLIENT_GONE
            if call.path not in UNCOUNTED:
                self._metrics.requests.labels(self._door, str(code)).inc()

    def _check_page(self, call: Call) -> None:
        """Refuse web pages of other hosts over loopback, where no key is asked for.

        Browsers name the page in `Origin`; but not in a GET from the page's own host, whose name
        may resolve to this machine (DNS rebinding), and is in `Host`.

        Raises: Forbidden.
        """
        page = call.headers.get("origin")
        if page is None and call.scope["method"] == "POST":
            return
        config, allowed, remedy = self._engine_client.config, tuple[str, ...](), ""
        is_open = is_loopback(config.admin.host)
        if self._door == "http":
            is_open = self._engine_client.rate_limiter.keys.is_http_open
            allowed = config.ingress.cors_origins
            remedy = ", name the page in ingress.cors_origins, or set keys"
        server = call.scope.get("server") or ("",)
        if not is_open or "*" in allowed or not is_loopback(str(server[0])):
            return
        if page is not None:
            field, is_known = "origin", page in allowed or is_loopback(hostname(page))
        else:
            field, page = "host", call.headers.get("host", "")
            is_known = not is_public_name(hostname(page))
            is_known = is_known or any(page == origin.partition("://")[2] for origin in allowed)
        if not is_known:
            raise Forbidden(
                f"{field}: pages of {page[:80]!r} may not call on loopback what asks for no key; "
                f"call it as localhost{remedy}",
                param=field,
                code="cors_refused",
            )


def json_in_parts(answer: dict[str, Any]) -> bytes:
    """A large answer as JSON. Lists are written in parts: `dumps` lets no other thread run."""
    fields = []
    for name, value in answer.items():
        text = json.dumps(value) if not isinstance(value, list) else ""
        if not text:
            step = PLAIN_ITEMS if value and isinstance(value[0], int | str) else 1
            parts = (json.dumps(value[i : i + step])[1:-1] for i in range(0, len(value), step))
            text = f"[{', '.join(parts)}]"
        fields.append(f"{json.dumps(name)}: {text}")
    return f"{{{', '.join(fields)}}}".encode()


def content_type(start: Message) -> bytes:
    """Of an answer, by its first message."""
    return bytes(dict(start.get("headers", ())).get(b"content-type", b""))


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than the limit of {max_bytes} bytes")
