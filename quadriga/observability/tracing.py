"""OpenTelemetry traces: one span of a request at its ingress, and below it one for each stage.

Off unless the environment names an OTLP endpoint, as OpenTelemetry's own variables do; then the
extra `otel` must be installed. A request that is not sampled has no `traceparent`, and whoever sees
none does nothing: while tracing is off it costs a comparison with None at a stage's end.

A stage's span is written when it is over, with the times it began and ended, so that nothing has to
be carried through the code that does the work; what travels, in `SequenceState.traceparent`, is the
request's context in the W3C's form.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
FLUSH_TIMEOUT_S = 1.0
MAX_TRACEPARENT = 55
"""Characters of version 00, the one there is."""

Attributes = Mapping[str, str | int | float]


class _State:
    """The process's provider and tracer; None while tracing is off."""

    provider: TracerProvider | None = None
    tracer: Any = None


def is_on() -> bool:
    """Whether this process writes spans."""
    return _State.tracer is not None


def start(process: str) -> None:
    """Export spans from here on, if the environment asks for it; harmless twice.

    Args:
        process: Name of the actor or ingress.
    """
    if is_on() or not any(os.environ.get(name) for name in ENDPOINTS):
        return
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    if any(not _is_there(name) for name in NEEDED):
        logger.warning("no traces: an OTLP endpoint is set, but the extra `otel` is not installed")
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    start_with(BatchSpanProcessor(OTLPSpanExporter()), process)


def start_with(processor: SpanProcessor, process: str) -> None:
    """Write spans to a processor; the sampler is the environment's, all requests by default."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    name = os.environ.get("OTEL_SERVICE_NAME", "quadriga")
    resource = Resource.create({"service.name": name, "service.instance.id": process})
    _State.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    _State.provider.add_span_processor(processor)
    _State.tracer = _State.provider.get_tracer("quadriga")


def flush() -> None:
    """Send what is not sent yet, within a second; before a process ends. Blocks."""
    if _State.provider is not None:
        _State.provider.force_flush(int(1000 * FLUSH_TIMEOUT_S))


def stop() -> None:
    """Write no more spans."""
    provider, _State.provider, _State.tracer = _State.provider, None, None
    if provider is not None:
        provider.shutdown()


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A span that is open.

    Attributes:
        traceparent: Context of its children.
    """

    traceparent: str
    _span: Any

    def end(self, unix_s: float, attributes: Attributes, error: str | None = None) -> None:
        """Close it. Args: error: A code, where it ended in one."""
        _close(self._span, unix_s, attributes, error)


def begin(
    name: str, parent: str | None, unix_s: float, attributes: Attributes | None = None
) -> StageSpan | None:
    """Open a span; None while tracing is off, or where the request is not sampled.

    Args:
        parent: A `traceparent`; without one, or with one that is malformed, a trace begins here.
    """
    if _State.tracer is None:
        return None
    span = _open(name, parent, unix_s, attributes or {}, kind="SERVER")
    if not span.is_recording():
        return None
    context = span.get_span_context()
    flags = int(context.trace_flags)
    return StageSpan(f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}", span)


def record(
    name: str,
    parent: str | None,
    began_unix_s: float,
    ended_unix_s: float,
    attributes: Attributes,
    error: str | None = None,
) -> None:
    """Write a span of a stage that is over; nothing where the request is not traced."""
    if parent is None or _State.tracer is None:
        return
    span = _open(name, parent, began_unix_s, {})
    _close(span, ended_unix_s, attributes, error)


def _open(
    name: str, parent: str | None, unix_s: float, attributes: Attributes, kind: str = "INTERNAL"
) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = Context()
    if parent is not None and len(parent) <= MAX_TRACEPARENT:
        carrier = {"traceparent": parent}
        context = TraceContextTextMapPropagator().extract(carrier, context)
    return _State.tracer.start_span(
        name, context, SpanKind[kind], start_time=_ns(unix_s), attributes=dict(attributes)
    )


def _close(span: Any, unix_s: float, attributes: Attributes, error: str | None) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attributes(dict(attributes))
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(_ns(unix_s))


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
