"""The error table of `quadriga.errors`, as HTTP and gRPC speak it."""

from __future__ import annotations

import json
import math

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
