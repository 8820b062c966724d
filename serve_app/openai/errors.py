"""Errors of `quadriga.errors` as HTTP answers and events of a stream."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from quadriga.errors import InvariantViolation, QuadrigaError


def as_quadriga(exc: Exception) -> QuadrigaError:
    """An unexpected exception as the error a client sees; the caller logs the original."""
    if isinstance(exc, QuadrigaError):
        return exc
    return InvariantViolation(f"an internal error ({type(exc).__name__}); see the server's log")


def error_object(exc: QuadrigaError) -> dict[str, dict[str, str | None]]:
    return {
        "error": {
            "message": exc.message,
            "type": exc.openai_type,
            "param": exc.param,
            "code": exc.code,
        }
    }


def error_json(exc: QuadrigaError) -> bytes:
    """The body of an error answer."""
    return json.dumps(error_object(exc)).encode()


def error_frame(exc: QuadrigaError) -> bytes:
    """The last event of a stream that broke."""
    return b"data: " + error_json(exc) + b"\n\n"


def error_headers(exc: QuadrigaError) -> list[tuple[bytes, bytes]]:
    """Headers beside the body: when to retry, or that a retry cannot help."""
    headers = []
    if exc.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if exc.retryable:
        if exc.retry_after_s is not None:
            wait_s = max(0.0, exc.retry_after_s)
            headers.append((b"retry-after", str(math.ceil(wait_s)).encode()))
            headers.append((b"retry-after-ms", str(math.ceil(wait_s * 1000)).encode()))
    else:
        headers.append((b"x-should-retry", b"false"))
    return headers


def error_response(exc: QuadrigaError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """An error answer's headers, content type and length included, and its body."""
    body = error_json(exc)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *error_headers(exc),
    ]
    return headers, body


async def send_error(
    send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    exc: QuadrigaError,
    more_headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    status: int | None = None,
) -> None:
    """Send a whole error answer over ASGI.

    Args:
        status: Instead of the error's own.
    """
    headers, body = error_response(exc)
    headers.extend(more_headers)
    status = exc.http_status if status is None else status
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
