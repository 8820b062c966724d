"""Metrics and log of the HTTP servers of one process: connections, and their own answers.

The servers are Serve's proxy, an ingress's own (behind HAProxy), and the admin port. Most of what
is counted here never reaches the application.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass

from quadriga.observability.metrics import Registry

logger = logging.getLogger("quadriga.http")

LOG_INTERVAL_S = 5.0
CLOSE_REASONS = (
    "silent",
    "slow_head",
    "head_too_large",
    "all_heads_too_large",
    "too_many_silent",
    "too_many_connections",
    "malformed",
)


class ThrottledLog:
    """Warns of the first event of a kind at once, and then in one line per interval of all that
    follow."""

    def __init__(self, target: logging.Logger) -> None:
        self._logger = target
        self._kinds: dict[str, _Kind] = {}

    def add(self, kind: str, message: str) -> None:
        """Count an event of a kind, and log it or leave it to a later line.

        Args:
            kind: One of a bounded number.
        """
        now_s = time.monotonic()
        state = self._kinds.setdefault(kind, _Kind())
        if now_s - state.logged_s >= LOG_INTERVAL_S:
            state.logged_s = now_s
            self._logger.warning("%s", message)
            return
        state.num_since += 1
        state.message = message
        if state.timer is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return  # the next event of the kind is logged
            left_s = state.logged_s + LOG_INTERVAL_S - now_s
            state.timer = loop.call_later(left_s, self._log_rest, state)

    def flush(self) -> None:
        """Log now what waits for the end of its interval."""
        for state in self._kinds.values():
            if state.num_since:
                self._log_rest(state)

    def _log_rest(self, state: _Kind) -> None:
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
        num, state.num_since = state.num_since, 0
        state.logged_s = time.monotonic()
        more = f" ({num} such events since the last line)" if num > 1 else ""
        self._logger.warning("%s%s", state.message, more)


@dataclass(slots=True, eq=False)
class _Kind:
    """Events of one kind since the last line about them."""

    logged_s: float = float("-inf")
    num_since: int = 0
    message: str = ""
    timer: asyncio.TimerHandle | None = None


class HttpServerMetrics:
    """Counters of the HTTP servers in this process, and their log.

    Attributes:
        is_used: There is such a server in this process.
        is_pushed: A task in this process sends the registry to the hub.
    """

    def __init__(self) -> None:
        source = f"http-server:{uuid.uuid4().hex[:12]}"
        r = self.registry = Registry(source)
        self.closed = r.counter(
            "quadriga_http_connections_closed_total",
            "Connections that an HTTP server closed of its own accord, by reason; all but silent "
            "ones were sent an error first.",
            ("reason",),
        )
        for reason in CLOSE_REASONS:  # at 0: `increase` does not see a series begin at 1
            self.closed.labels(reason)
        self.answers = r.counter(
            "quadriga_http_server_errors_total",
            "Errors that an HTTP server or Serve's proxy answered in place of the application, by "
            "status.",
            ("code",),
        )
        self.connections = r.gauge("quadriga_http_connections", "Open HTTP connections.")
        self.silent = r.gauge(
            "quadriga_http_silent_connections",
            "Open HTTP connections whose next request's headers are not complete.",
        )
        self.is_used = False
        self.is_pushed = False
        self._closings, self._errors = ThrottledLog(logger), ThrottledLog(logger)

    def count_closing(self, reason: str, client: object, message: str) -> None:
        """Count and log a connection that is closed."""
        self.closed.labels(reason).inc()
        self._closings.add(reason, f"closed the connection of {_address(client)}: {message}")

    def count_answer(self, status: int, what: str) -> None:
        """Count an error that did not come from the application; log it if it is the server's."""
        self.answers.labels(str(status)).inc()
        if status >= 500:
            self.log_error(status, what)

    def log_error(self, status: int, what: str) -> None:
        """Log an answer with a status from 500 on."""
        self._errors.add(str(status), f"answered {status}: {what}")


def _address(client: object) -> str:
    return f"{client[0]}:{client[1]}" if isinstance(client, tuple) else str(client)


HTTP_SERVER = HttpServerMetrics()
"""Of this process: uvicorn makes its protocols without arguments of ours."""
