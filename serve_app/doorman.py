"""HTTP connections that never finish a request's head, or make it too large, are closed.

Neither uvicorn nor Serve's proxy, which runs it, has a limit for either: a few thousand clients
that send a byte now and then would hold all connections there are, and one that sends headers
without end all memory. Bodies have limits of their own (`serve_app.http_call`).

Serve calls `guard` in each process before it opens an HTTP port there, where the environment says
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve_app.doorman.guard`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger("quadriga.http")

HEAD_TIMEOUT_S = 10.0
"""From a connection, or the first byte of a further request on it, to the end of the headers."""
MAX_HEAD_BYTES = (1 << 20) + (16 << 10)
"""What `ingress.max_header_bytes` may be at most, and a request line."""
MAX_ALL_BYTES = 64 << 20
"""Of all heads that are not whole yet, in one process. One that comes in one piece is none."""
MAX_WAITING = 1024
"""Connections without a whole head, in one process; of more the oldest is closed."""
REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's, with a time and a size within which a request's head must be here."""

    waiting: ClassVar[dict[GuardedProtocol, None]] = {}
    """Those whose head is awaited, in the order of their coming."""
    all_bytes: ClassVar[int] = 0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._is_in_head = True
        self._num_heads = 0
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if self._is_in_head and is_idle and self._timer is None:
            self._await_head()
        num_heads = self._num_heads
        super().data_received(data)
        # A further head that begins in the same piece as a body ends is counted from the next on.
        if self._is_in_head and self._num_heads == num_heads and not self.transport.is_closing():
            self._count(len(data))
            if self._head_bytes > MAX_HEAD_BYTES or GuardedProtocol.all_bytes > MAX_ALL_BYTES:
                self.transport.write(REFUSAL)
                self._close("a request's head was too large")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_heads += 1
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(
            HEAD_TIMEOUT_S, self._close, "a request's head took too long"
        )
        self.waiting[self] = None
        if len(self.waiting) > MAX_WAITING:
            next(iter(self.waiting))._close("too many requests' heads are awaited")

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        GuardedProtocol.all_bytes += num_bytes

    def _stop_waiting(self) -> None:
        self._count(-self._head_bytes)
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self, reason: str) -> None:
        logger.info("closed a connection of %s: %s", self.client, reason)
        self._stop_waiting()
        self.transport.close()


def guard() -> list[Any]:
    """Have every HTTP server that is started in this process from now on guarded.

    Returns:
        No middlewares: those come too late, when the head is here.
    """
    auto.AutoHTTPProtocol = GuardedProtocol
    return []
