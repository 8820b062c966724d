"""Every error Quadriga raises on purpose, and what each client sees of it.

    QuadrigaError
    ├── InvalidRequest            400  INVALID_ARGUMENT     a field broke a stated limit
    │   ├── ContextTooLong        400  INVALID_ARGUMENT
    │   ├── UnknownModel          404  NOT_FOUND
    │   ├── NotFound              404  NOT_FOUND            unknown route or request id
    │   ├── MethodNotAllowed      405  UNIMPLEMENTED
    │   ├── BodyTooLarge          413  INVALID_ARGUMENT
    │   ├── HeadersTooLarge       431  INVALID_ARGUMENT
    │   └── RequestTimeout        408  DEADLINE_EXCEEDED    the body did not arrive in time
    ├── Unauthenticated           401  UNAUTHENTICATED
    ├── Forbidden                 403  PERMISSION_DENIED    the key is good, but not for this
    ├── Overloaded                429  RESOURCE_EXHAUSTED   says when to retry
    │   ├── KVCacheExhausted      429  RESOURCE_EXHAUSTED
    │   ├── DeviceMemoryExhausted 429  RESOURCE_EXHAUSTED   a pass needs more than is free
    │   ├── IngressFull           429  RESOURCE_EXHAUSTED   a limit of one ingress
    │   └── KeyLimitReached       429  RESOURCE_EXHAUSTED   the API key's own limit
    ├── Unavailable               503  UNAVAILABLE          no capacity, starting or draining
    ├── DeadlineExceeded          504  DEADLINE_EXCEEDED
    ├── Cancelled                 499  CANCELLED
    ├── TakenOver                 409  ABORTED              it goes on at another ingress
    ├── ReplicaError              500  UNAVAILABLE
    │   ├── ReplicaDied           500  UNAVAILABLE
    │   ├── MigrationFailed       500  UNAVAILABLE
    │   └── KVTransportError      500  UNAVAILABLE
    ├── ConfigError               (start-up only)
    └── InvariantViolation        500  INTERNAL             a bug: state that must never be

The class attributes `http_status`, `grpc_code`, `openai_type`, `default_code` and `retryable` are
the one table that both front doors map by. Errors are plain values: they pickle across Ray and
compare by what they say.
"""

from __future__ import annotations

from typing import Any, ClassVar


class QuadrigaError(Exception):
    """Base of every deliberate error.

    Args:
        message: One sentence a client may read: field, value, limit and remedy.
        param: The request field at fault, in the client's own spelling, or None.
        code: Machine-readable reason; defaults to the class's own.
        retry_after_s: When a retry may succeed, in seconds from now, or None.
    """

    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    openai_type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.param, self.code, self.retry_after_s))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__reduce__()[1] == other.__reduce__()[1]

    def __hash__(self) -> int:
        return hash((type(self), self.message, self.param, self.code))


def _rebuild(
    cls: type[QuadrigaError],
    message: str,
    param: str | None,
    code: str,
    retry_after_s: float | None,
) -> QuadrigaError:
    return cls(message, param=param, code=code, retry_after_s=retry_after_s)


class InvalidRequest(QuadrigaError):
    """A field of the request broke a stated limit; a retry of the same request cannot help."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"
    default_code = "invalid_value"


class ContextTooLong(InvalidRequest):
    """Prompt, or prompt plus `max_tokens`, does not fit the model's context."""

    default_code = "context_length_exceeded"


class UnknownModel(InvalidRequest):
    """No pool serves the model that was asked for."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    default_code = "model_not_found"


class NotFound(InvalidRequest):
    """No such route, or no such live request."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    default_code = "not_found"


class MethodNotAllowed(InvalidRequest):
    """The route exists but not for this HTTP method."""

    http_status = 405
    grpc_code = "UNIMPLEMENTED"
    default_code = "method_not_allowed"


class BodyTooLarge(InvalidRequest):
    """The request body is larger than the configured limit."""

    http_status = 413
    default_code = "body_too_large"


class HeadersTooLarge(InvalidRequest):
    """The request has more headers, or larger ones, than are read."""

    http_status = 431
    default_code = "headers_too_large"


class RequestTimeout(InvalidRequest):
    """The client did not send its whole request in time."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"
    default_code = "request_timeout"


class Unauthenticated(QuadrigaError):
    """The API key is missing or wrong."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    openai_type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(QuadrigaError):
    """The API key is known and may not do this."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"
    openai_type = "permission_error"
    default_code = "permission_denied"


class Overloaded(QuadrigaError):
    """Queues are full; `retry_after_s` says when a retry is predicted to succeed."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"
    default_code = "overloaded"
    retryable = True


class KVCacheExhausted(Overloaded):
    """No KV cache room for the sequence on any replica of its class."""

    default_code = "kv_cache_exhausted"


class DeviceMemoryExhausted(Overloaded):
    """A pass needed more of the device's memory than was free; all is as it was before."""

    default_code = "device_memory_exhausted"


class IngressFull(Overloaded):
    """The ingress has as much of something as it takes; the cluster was not asked."""

    default_code = "ingress_full"


class KeyLimitReached(Overloaded):
    """The API key is at a limit of its own; other keys are served."""

    default_code = "rate_limit_exceeded"


class Unavailable(QuadrigaError):
    """Nobody can serve this now: starting, draining, or no replica of the class is alive."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    default_code = "unavailable"
    retryable = True


class DeadlineExceeded(QuadrigaError):
    """The request's deadline passed before it was done."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"
    default_code = "deadline_exceeded"


class Cancelled(QuadrigaError):
    """The client went away or cancelled."""

    http_status = 499
    grpc_code = "CANCELLED"
    default_code = "cancelled"


class TakenOver(QuadrigaError):
    """The client, or another one with its key, resumed the request elsewhere."""

    http_status = 409
    grpc_code = "ABORTED"
    openai_type = "invalid_request_error"
    default_code = "taken_over"


class ReplicaError(QuadrigaError):
    """A replica failed while it held the request."""

    grpc_code = "UNAVAILABLE"
    default_code = "replica_error"
    retryable = True


class ReplicaDied(ReplicaError):
    """The replica's process is gone or, with the code "unreachable", cannot be reached now."""

    default_code = "replica_died"


def is_known_death(error: BaseException) -> bool:
    """Whether a process is gone, and not merely out of reach."""
    return isinstance(error, ReplicaDied) and error.code != "unreachable"


class MigrationFailed(ReplicaError):
    """A sequence could not be moved; it stays, or is rebuilt, where the caller says."""

    default_code = "migration_failed"


class KVTransportError(ReplicaError):
    """KV bytes did not arrive whole within their deadline."""

    default_code = "kv_transport_error"


class ConfigError(QuadrigaError):
    """The configuration cannot be served; raised at start-up only."""

    default_code = "config_error"


class InvariantViolation(QuadrigaError):
    """State that must never be: a bug in Quadriga, never the client's fault."""
