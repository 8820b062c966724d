"""What both clients share: the channel, the metadata of a call, its deadline and its retries."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from quadriga.client.retries import RetryPolicy
from quadriga.client.wire import CHANNEL_OPTIONS, affinity, check_sendable, credentials
from quadriga.errors import Cancelled, DeadlineExceeded, QuadrigaError
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb

CANCEL_TIMEOUT_S = 2.0
DEFAULT_TIMEOUT_S = 600.0


class QuadrigaStub:
    """The service's methods over a channel, each as an attribute of its name."""

    def __init__(self, channel: Any) -> None:
        service = pb.DESCRIPTOR.services_by_name["Quadriga"]
        for method in service.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(
                f"/{service.full_name}/{method.name}",
                request_serializer=getattr(pb, method.input_type.name).SerializeToString,
                response_deserializer=getattr(pb, method.output_type.name).FromString,
            )
            setattr(self, method.name, call)


class Deadline:
    """Counts down from `timeout_s` from now on.

    Args:
        timeout_s: None: nobody asked for a limit. Then the service's own holds, and the client
            waits for `DEFAULT_TIMEOUT_S`.

    Raises:
        ValueError: `timeout_s` is infinite or NaN.
    """

    def __init__(self, timeout_s: float | None) -> None:
        if timeout_s is not None and not math.isfinite(timeout_s):
            text = "must be a finite number of seconds, or None for the service's own limit"
            raise ValueError(f"timeout_s: {text}, got {timeout_s}")
        self._is_asked = timeout_s is not None
        self._give_up_s = time.monotonic() + (DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)

    def left_s(self) -> float:
        """Seconds left. Raises: DeadlineExceeded when none are."""
        left_s = self._give_up_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the request was not done within its timeout")
        return left_s

    def tell(self, request: Any) -> None:
        """Write what is left into a message, at least a millisecond, where the caller set a limit.

        Raises: DeadlineExceeded when nothing is left.
        """
        left_s = self.left_s()
        if self._is_asked:
            request.deadline_ms = max(1, int(left_s * 1000))

    def allows(self, pause_s: float) -> bool:
        """Whether anything is left after a pause."""
        return time.monotonic() + pause_s < self._give_up_s


class BaseClient:
    """A connection to a Quadriga service over gRPC.

    Calls are retried on UNAVAILABLE and RESOURCE_EXHAUSTED as `retry` says, and never run twice:
    a retry names the same request. A stream that breaks is taken up where it broke.

    Args:
        target: `host:port`.
        api_key: Sent as `authorization: Bearer …`.
        tls: Use TLS; implied by any certificate.
        root_certificates: Whom to trust instead of the public CAs, in PEM.
        client_certificate: Shown to a server that asks for one, with its chain; in PEM.
        client_key: Of the client's certificate, in PEM.
        timeout_s: For a whole request, retries included; overridden per call. None: the service's
            own limit, and no more than `DEFAULT_TIMEOUT_S`.
        retry: How often is tried, and the longest pause; None: `RetryPolicy()`.
    """

    _library: ClassVar[Any]
    """`grpc` or `grpc.aio`."""

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        root_certificates: bytes | None = None,
        client_certificate: bytes | None = None,
        client_key: bytes | None = None,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        secure = credentials(
            tls=tls,
            root_certificates=root_certificates,
            client_certificate=client_certificate,
            client_key=client_key,
        )
        if target.startswith(("http://", "https://")):
            raise ValueError(f"target: {target!r} must be host:port, without http:// or https://")
        make = self._library.insecure_channel if secure is None else self._library.secure_channel
        at: tuple[Any, ...] = (target,) if secure is None else (target, secure)
        self._make_channel = partial(make, *at, options=CHANNEL_OPTIONS)
        self._channel: Any = None
        self._stub: Any = None
        self._connecting = threading.Lock()
        self._is_closed = False
        check_sendable("api_key", api_key or "")
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._cancelling: set[asyncio.Task[None]] = set()  # of the asyncio client alone
        self._open: set[str] = set()  # ids of requests that the server may still run

    def _connect(self) -> Any:
        """The stub; the first call makes its channel, which belongs to that call's event loop.

        Raises: Cancelled: The client was closed.
        """
        with self._connecting:
            if self._is_closed:
                raise Cancelled("the client was closed")
            if self._stub is None:
                self._channel = self._make_channel()
                self._stub = QuadrigaStub(self._channel)
            return self._stub

    def _disconnect(self) -> Any:
        """Let no call begin any more; returns the channel to close, or None."""
        with self._connecting:
            self._is_closed = True
            return self._channel

    def _attempt(self, method: str, request: Any, deadline: Deadline) -> Any:
        """Begin a call of a method; every one of a request goes to the same ingress."""
        begin = getattr(self._connect(), method)
        metadata = self._metadata
        if not isinstance(request, pb.ListModelsRequest):
            deadline.tell(request)
            metadata = [*metadata, *affinity(request.request_id)]
            self._open.add(request.request_id)
        with self._until_closed():
            return begin(request, metadata=metadata, timeout=deadline.left_s())

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Begin a call. Raises: Cancelled: Another thread closed the client meanwhile."""
        try:
            yield
        except ValueError as exc:  # so gRPC tells of a channel that is closed
            if not self._is_closed:
                raise
            raise Cancelled("the client was closed") from exc

    def _is_left(self, request_id: str) -> bool:
        """Forget a request; returns whether the server may still run it, for nobody.

        Not where it ends in an error: then it may be another's.
        """
        is_open = request_id in self._open
        self._open.discard(request_id)
        return is_open and not isinstance(sys.exception(), QuadrigaError)

    def _pause_s(self, error: QuadrigaError, attempts: int, deadline: Deadline) -> float:
        """Seconds before the next attempt. Raises: the error, where there shall be none."""
        pause_s = self._retry.pause_s(error, attempts)
        if pause_s is None or not deadline.allows(pause_s):
            raise error
        return pause_s

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s)
