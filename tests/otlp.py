"""A collector of traces, as far as an exporter needs one: OTLP over HTTP, on loopback."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Keeps every span it is sent; a context manager.

    Attributes:
        url: What `OTEL_EXPORTER_OTLP_ENDPOINT` should be.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._arrived = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._arrived:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self._spans.extend(scope.spans)
            self._arrived.notify_all()

    def of(self, trace_id: str, names: set[str], *, within_s: float) -> dict[str, Span]:
        """Wait until a trace has these spans; returns it, by name. Raises: TimeoutError."""

        def found() -> dict[str, Span]:
            return {s.name: s for s in self._spans if s.trace_id.hex() == trace_id}

        with self._arrived:
            if not self._arrived.wait_for(lambda: names <= found().keys(), within_s):
                raise TimeoutError(f"only {sorted(found())} of {sorted(names)} came")
            return found()

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
