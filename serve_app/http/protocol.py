"""uvicorn's HTTP/1.1 protocol with limits on what comes before a request, and OpenAI's error form.

Neither uvicorn nor Serve's proxy, which runs it, limits how long a request's head may take, how
large it may be, or how many connections may send none at all: a few thousand clients that send a
byte now and then would hold all connections there are. Bodies have limits of their own
(`serve_app.http.call`).

A burst of honest clients looks much the same for a moment: the event loop accepts thousands of
connections before it reads from the first of them. So a connection is never closed for being one
too many before it was silent for `GRACE_S`; and a refused client gets an error.
"""

from __future__ import annotations

import asyncio
import http
import resource
from socket import IPPROTO_TCP, TCP_USER_TIMEOUT
from typing import Any, ClassVar

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quadriga.errors import (
    HeadersTooLarge,
    InvalidRequest,
    Overloaded,
    QuadrigaError,
    RequestTimeout,
    Unavailable,
)
from serve_app.http.server_metrics import HTTP_SERVER
from serve_app.openai.errors import error_response, send_error

HEAD_TIMEOUT_S = 10.0
"""From a connection, or the first byte after an answer on it, to the end of the next headers."""
MAX_HEAD_BYTES = (1 << 20) + (16 << 10)
"""What `ingress.max_header_bytes` may be at most, and a request line."""
MAX_ALL_BYTES = 64 << 20
"""Of all heads that are not complete, in one process. One that comes in one piece is none."""
MAX_SILENT = 4096
"""Connections without a complete head, in one process; of more the oldest are refused."""
GRACE_S = 1.0
"""A connection that is younger is never refused for being silent."""
LINGER_S = 2.0
"""A refused client may read its error for this long: what it still sends is dropped."""
STUCK_MS = 300_000
"""A client that takes nothing of what it is sent for so long is cut off, by the kernel."""
RETRY_S = 1.0
CLOSE = (b"connection", b"close")
WANTED_FILES = 65_536
FILES_FOR_OTHERS = 4
"""One in so many file descriptors is not used for clients' connections."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One client's connection; beyond a limit it gets an error in OpenAI's form and is closed."""

    silent: ClassVar[dict[LimitedHttpProtocol, float]] = {}
    """Connections without a complete head → since when, the oldest first."""
    all_bytes: ClassVar[int] = 0
    """Of all heads that are not complete."""
    num_open: ClassVar[int] = 0
    max_open: ClassVar[int] = 0
    """Connections at once; more are refused. 0 until the first one."""
    _review: ClassVar[asyncio.TimerHandle | None] = None

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.ws_protocol_class = None  # there are no WebSockets here: they are answered as GET
        self._is_in_head = True
        self._has_news = False  # the end of a head, a body or its end, in what was received last
        self._running: RequestResponseCycle | None = None
        self._head_bytes = 0
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(IPPROTO_TCP, TCP_USER_TIMEOUT, STUCK_MS)
        cls = LimitedHttpProtocol
        cls.max_open = cls.max_open or _max_connections()
        cls.num_open += 1
        HTTP_SERVER.is_used = True
        HTTP_SERVER.connections.set(cls.num_open)
        if cls.num_open <= cls.max_open:
            self._await_head()
            return
        message = f"this process holds {cls.max_open} connections, the limit; retry shortly"
        error = Unavailable(message, retry_after_s=RETRY_S)
        if cls.num_open <= cls.max_open + cls.max_open // FILES_FOR_OTHERS // 2:
            self._refuse("too_many_connections", error)
        else:  # too many wait already until their clients have read the error
            self._close("too_many_connections", error.message)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        self._has_news = False
        self._feed(data)
        # A further head that begins in the same piece as a body ends is counted from the next on.
        if not self._has_news and not self._is_refused:
            self._count(len(data))
            self._check_bytes()

    def connection_lost(self, exc: Exception | None) -> None:
        LimitedHttpProtocol.num_open -= 1
        HTTP_SERVER.connections.set(LimitedHttpProtocol.num_open)
        self._end_head()
        self.cycle = self._running or self.cycle  # uvicorn tells the newest, which may be waiting
        super().connection_lost(exc)

    def _feed(self, data: bytes) -> None:
        """Have the parser read `data`. Behind a head that offers an upgrade it would read no more,
        not even a body: another one, told the head without the offer, goes on from there."""
        while True:
            try:
                return self.parser.feed_data(data)
            except HttpParserUpgrade as exc:
                lines = [n + b": " + value for n, value in self.headers if n != b"upgrade"]
                begun = b"\r\n".join([b"POST / HTTP/1.1", *lines, b"", b""])
                data, self.parser = begun + data[exc.args[0] :], HttpRequestParser(self)
            except HttpParserError:
                return self.send_400_response("")

    # What the parser and uvicorn call.

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # no trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_news = True
        if self._is_in_head:  # not what `_feed` began
            self._is_in_head = False
            self._end_head()
            super().on_headers_complete()
            if len(self.pipeline) == 1:  # uvicorn would read no more, nor see the client go
                self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._has_news = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_news = True
        if not self.parser.should_upgrade():
            self._is_in_head = True
            self._count(-self._head_bytes)
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP/1.1; uvicorn's own answer is plain text."""
        error = InvalidRequest("the request is not valid HTTP/1.1", code="invalid_http")
        self._refuse("malformed", error)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        app = _busy if app is service_unavailable else app
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _unchunked(cycle, app) if is_old else app)

    # Limits.

    def _await_head(self) -> None:
        HTTP_SERVER.silent.inc()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._time_out)
        cls = LimitedHttpProtocol
        cls.silent[self] = self.loop.time()
        if len(cls.silent) > MAX_SILENT and cls._review is None:
            cls._review = self.loop.call_later(GRACE_S, cls._refuse_silent, self.loop)

    def _end_head(self) -> None:
        self._count(-self._head_bytes)
        if self.silent.pop(self, None) is not None:
            HTTP_SERVER.silent.dec()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        LimitedHttpProtocol.all_bytes += num_bytes

    def _check_bytes(self) -> None:
        if self._head_bytes > MAX_HEAD_BYTES:
            message = f"request line and headers are larger than {MAX_HEAD_BYTES} bytes, the limit"
            self._refuse("head_too_large", HeadersTooLarge(message))
        elif LimitedHttpProtocol.all_bytes > MAX_ALL_BYTES:
            message = f"unfinished requests have {MAX_ALL_BYTES} bytes of headers, the limit; retry"
            self._refuse("all_heads_too_large", Overloaded(message, retry_after_s=RETRY_S))

    def _time_out(self) -> None:
        if self._head_bytes:
            error = RequestTimeout(f"the headers were not here within {HEAD_TIMEOUT_S:g} s")
            self._refuse("slow_head", error)
        else:  # a connection that was opened in advance: no client waits for an answer
            self._close("silent", f"no request within {HEAD_TIMEOUT_S:g} s")

    @classmethod
    def _refuse_silent(cls, loop: asyncio.AbstractEventLoop) -> None:
        """Refuse the oldest silent connections until there are few enough, sparing young ones."""
        cls._review = None
        while len(cls.silent) > MAX_SILENT:
            oldest, since_s = next(iter(cls.silent.items()))
            left_s = since_s + GRACE_S - loop.time()
            if left_s > 0:
                cls._review = loop.call_later(left_s, cls._refuse_silent, loop)
                return
            why = f"{MAX_SILENT} connections wait for a request, the limit; this one waited longest"
            oldest._refuse("too_many_silent", Unavailable(why, retry_after_s=RETRY_S))

    # Ends.

    def _refuse(self, reason: str, error: QuadrigaError) -> None:
        """Answer with an error and close, once the client had time to read it.

        What answers an earlier request on this connection is let finish instead.
        """
        self._end_head()
        self._is_refused = True
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if self.pipeline and cycle.more_body:  # the last of several requests at once is at fault
            self._close(reason, error.message)
            return
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body or cycle.response_started:
                cycle.keep_alive = False
                HTTP_SERVER.count_closing(reason, self.client, error.message)
                return
            cycle.disconnected = True  # nothing of the application's goes behind the error
            cycle.message_event.set()
        HTTP_SERVER.count_answer(error.http_status, error.message)
        self.transport.write(_response(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._close(reason, error.message, linger_s=LINGER_S)

    def _close(self, reason: str, message: str, *, linger_s: float = 0.0) -> None:
        HTTP_SERVER.count_closing(reason, self.client, message)
        self._end_head()
        self._is_refused = True
        if linger_s:  # closed with bytes of the client's unread, TCP would take the answer back
            self.flow.resume_reading()
            self._timer = self.loop.call_later(linger_s, self.transport.close)
        else:
            self.transport.close()


def _response(error: QuadrigaError) -> bytes:
    """An error as a whole HTTP/1.1 response that ends the connection."""
    headers, body = error_response(error)
    status = error.http_status
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}".encode()]
    lines += [name + b": " + value for name, value in [*headers, CLOSE]]
    return b"\r\n".join([*lines, b"", body])


def _unchunked(cycle: RequestResponseCycle, app: Any) -> Any:
    """Have an answer end with the connection: HTTP/1.0 knows no chunks."""
    cycle.chunked_encoding = False  # then uvicorn holds it to a length: that of what comes next

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def sized(message: Any) -> None:
            cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        try:
            await app(scope, receive, sized)
        finally:
            if not cycle.response_started:  # uvicorn's own answer has a length
                cycle.chunked_encoding = None

    return answer


async def _busy(scope: Any, receive: Any, send: Any) -> None:
    """Answer in place of the application where uvicorn's `limit_concurrency` is reached."""
    message = "this port has as many requests as it takes; retry shortly"
    error = Unavailable(message, retry_after_s=RETRY_S)
    HTTP_SERVER.count_answer(error.http_status, error.message)
    await send_error(send, error, [CLOSE])


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may, up to `WANTED_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _max_connections() -> int:
    """How many connections this process may hold by its limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = WANTED_FILES if soft == resource.RLIM_INFINITY else min(soft, WANTED_FILES)
    return files - files // FILES_FOR_OTHERS
