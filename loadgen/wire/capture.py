"""What one request's connection did, with the times; recorded first, judged afterwards.

The hot path of the generator only appends (time, bytes) to a list; all parsing happens in the
checker, on the complete record. So the generator costs little while it measures, and a stream that
fails its check can be kept byte for byte as a reproduction.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from loadgen.load.workload import RequestSpec

now_s = time.perf_counter
"""The clock of a load and of all that is recorded of it."""


class Transport(StrEnum):
    """How a request travels."""

    HTTP = "http"
    GRPC = "grpc"


@dataclass(slots=True)
class Capture:
    """One attempt of one request. Times are seconds on the run's clock.

    Attributes:
        sent_s: Just before the connection is opened (HTTP) or the call is made (gRPC), so that
            connecting counts towards the time to first token.
        reads: (time, bytes): TCP reads from the status line on (HTTP), or one serialised message
            each (gRPC).
        ended_s: When the response was complete, or broke.
        fault: Why the connection failed; None when it ended in an orderly way.
        status: gRPC status name, `OK` included; None on HTTP.
        trailers: gRPC trailing metadata.
    """

    transport: Transport
    sent_s: float
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    ended_s: float = 0.0
    fault: str | None = None
    status: str | None = None
    status_message: str = ""
    trailers: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for _, data in self.reads)

    @property
    def is_refusal(self) -> bool:
        """Whether its status is that of a refusal; cheap, for it is asked while the load runs."""
        if self.transport is Transport.GRPC:
            return self.status == "RESOURCE_EXHAUSTED"
        start = b"".join(data for _, data in self.reads[:16])
        return start[9:12] == b"429"


Call = Callable[[], Awaitable[Capture]]
"""An encoded request: every call of it makes one attempt. It never raises for what a service
does; cancellation closes the connection."""

OnData = Callable[[bytes], None]
"""Called with every read, for live counters; must be cheap."""


class LoadClient(Protocol):
    """What the runner asks of a transport."""

    def prepare(self, spec: RequestSpec, model: str, request_id: str) -> Call: ...
