"""gRPC statuses back to the errors they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from quadriga.errors import (
    Cancelled,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    InvariantViolation,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    QuadrigaError,
    ReplicaError,
    Unauthenticated,
    Unavailable,
)

_BY_STATUS: dict[str, type[QuadrigaError]] = {
    "INVALID_ARGUMENT": InvalidRequest,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": Forbidden,
    "NOT_FOUND": NotFound,
    "RESOURCE_EXHAUSTED": Overloaded,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "UNAVAILABLE": Unavailable,
    "UNIMPLEMENTED": MethodNotAllowed,
}

_BROKEN = ("INTERNAL", "UNKNOWN")


def _subclasses(base: type[QuadrigaError]) -> Iterator[type[QuadrigaError]]:
    yield base
    for child in base.__subclasses__():
        yield from _subclasses(child)


_BY_CODE = {cls.default_code: cls for cls in _subclasses(QuadrigaError)}


def from_rpc(exc: grpc.RpcError) -> QuadrigaError:
    """Return the error a failed call stands for: exact where the server sent more than a status."""
    call: Any = exc
    status = call.code().name
    metadata = dict(call.trailing_metadata() or ())
    code = metadata.get("quadriga-error-code")
    # The service names every error of its own: without a name, whoever held the call is gone.
    nameless = Unavailable if not code and status in _BROKEN else InvariantViolation
    fallback = _BY_STATUS.get(status, nameless)
    if fallback is Cancelled and not code and "RST_STREAM" in (call.details() or ""):
        fallback = Unavailable  # not we cancelled it: a proxy has lost the process that answered
    cls = _BY_CODE.get(code, fallback) if code else fallback
    if cls.grpc_code != status:
        cls = ReplicaError if code and status == "UNAVAILABLE" else fallback
    if cls is Overloaded and not code and "message larger than max" in (call.details() or ""):
        cls = InvalidRequest  # gRPC's own limit: it is as large the next time
    retry_after_s = None
    wait_ms = metadata.get("retry-after-ms", "")
    if wait_ms.isdigit():
        retry_after_s = int(wait_ms) / 1000
    details = call.details() or f"the call ended with {status}"
    if details == "Deadline Exceeded":  # by gRPC here, a moment before the service said so
        details = "the request was not done within its timeout"
    elif status == "UNIMPLEMENTED" and details.startswith("Received http2 header"):
        details += ": this port speaks HTTP, not gRPC; name the port of gRPC, 9000 by default"
    return cls(
        details,
        param=metadata.get("quadriga-error-param"),
        code=code,
        retry_after_s=retry_after_s,
    )
