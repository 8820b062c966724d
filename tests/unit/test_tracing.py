"""Traces: off by default and free then; on, one tree a request, whatever the road."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quadriga.clock import SystemClock
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason, SamplingParams, SequenceState
from quadriga.errors import KVTransportError, Overloaded, ReplicaDied
from quadriga.observability import tracing
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from quadriga.replica.spans import SequenceSpans
from serve_app.grpc.server import GrpcServer
from tests.unit.actors.test_migration import Replica as MovingReplica
from tests.unit.serve_app.conftest import MakeStand, make_stand
from tests.unit.serve_app.test_grpc_server import KEYS, Context

__all__ = ["make_stand"]
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CLIENT[:-2] + "00"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Tracing on, into memory."""
    memory = InMemorySpanExporter()
    tracing.start_with(SimpleSpanProcessor(memory), "q:test")
    yield memory
    tracing.stop()


def state(traceparent: str | None, name: str = "s") -> SequenceState:
    params = SamplingParams(max_tokens=4)
    return SequenceState(name, "r", "m", [1], params, "i", 0.0, 0.0, traceparent=traceparent)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("name", tracing.ENDPOINTS)
def test_it_is_off_unless_an_endpoint_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for variable in tracing.ENDPOINTS:
        monkeypatch.delenv(variable, raising=False)
    tracing.start("q:test")
    assert not tracing.is_on()
    assert tracing.begin("request", CLIENT, 0.0) is None
    tracing.record("decode", CLIENT, 0.0, 1.0, {})  # nobody there: nothing happens
    tracing.flush()
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracing.start("q:test")
    assert not tracing.is_on()
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    with monkeypatch.context() as patched:
        patched.setattr(importlib.util, "find_spec", lambda _: None)
        tracing.start("q:test")
    assert not tracing.is_on()
    assert "extra `otel`" in caplog.text
    tracing.start("q:test")
    try:
        assert tracing.is_on()
    finally:
        tracing.stop()


async def test_off_nothing_travels(make_stand: MakeStand) -> None:
    stand = await make_stand()
    body = {"model": "quadriga-s", "prompt": "hi"}
    await stand.http.post("/v1/completions", json=body, headers={"traceparent": CLIENT})
    assert [s.traceparent for s in stand.cluster.submitted] == [None]


async def test_a_request_is_a_tree_below_its_clients_span(
    make_stand: MakeStand, exporter: InMemorySpanExporter
) -> None:
    stand = await make_stand()
    body = {"model": "quadriga-s", "prompt": "hi", "n": 2, "max_tokens": 100}
    await stand.http.post("/v1/completions", json=body, headers={"traceparent": CLIENT})
    told = {s.traceparent for s in stand.cluster.submitted}
    assert len(told) == 1
    [parent] = told
    assert parent is not None
    assert parent.split("-")[1] == CLIENT.split("-")[1]
    # The stages, as replicas write them with what came in `SequenceState`.
    now = time.time()
    for stage in ("prefill", "transfer", "decode", "migration"):
        tracing.record(stage, parent, now - 1, now, {"quadriga.replica": "d0"})
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans.pop("request")
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == CLIENT.split("-")[2]
    assert root.kind is SpanKind.SERVER, "what service graphs look for"
    said = attributes(root)
    assert (said["quadriga.result"], said["quadriga.model"]) == ("stop", "quadriga-s")
    assert not any(value == "hi" for value in said.values())
    assert set(spans) == {"prefill", "transfer", "decode", "migration"}
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == root.get_span_context().span_id
        assert span.get_span_context().trace_id == root.get_span_context().trace_id
        assert (span.end_time or 0) - (span.start_time or 0) == pytest.approx(1e9, rel=1e-3)


@pytest.mark.parametrize("given", [None, "", "nonsense", CLIENT + "0" * 500, "00-" + "0" * 52])
async def test_without_a_good_parent_a_trace_begins_here(
    make_stand: MakeStand, exporter: InMemorySpanExporter, given: str | None
) -> None:
    stand = await make_stand()
    headers = {} if given is None else {"traceparent": given}
    body = {"model": "quadriga-s", "prompt": "hi"}
    assert (await stand.http.post("/v1/completions", json=body, headers=headers)).is_success
    [root] = exporter.get_finished_spans()
    assert root.parent is None


async def test_what_is_not_sampled_is_not_carried(
    make_stand: MakeStand, exporter: InMemorySpanExporter
) -> None:
    stand = await make_stand()
    body = {"model": "quadriga-s", "prompt": "hi"}
    await stand.http.post("/v1/completions", json=body, headers={"traceparent": UNSAMPLED})
    assert [s.traceparent for s in stand.cluster.submitted] == [None]
    assert exporter.get_finished_spans() == ()


async def test_failures_are_marked(make_stand: MakeStand, exporter: InMemorySpanExporter) -> None:
    stand = await make_stand()
    stand.cluster.refuse_admission = Overloaded("full")
    assert (await stand.complete()).status_code == 429
    [root] = exporter.get_finished_spans()
    assert root.status.status_code is StatusCode.ERROR


def test_a_replicas_stages(exporter: InMemorySpanExporter) -> None:
    spans = SequenceSpans("q:decode:0:a", SystemClock())
    ends = {
        "finished": EngineOutput("finished", 1, finish=FinishReason.STOP),
        "moved": EngineOutput("moved", 1, moved_to="q:decode:1:b", move="done"),
        "failed": EngineOutput("failed", 1, error=ReplicaDied("gone")),
        "begun": EngineOutput("begun", 1, moved_to="q:decode:1:b", move="begun"),
    }
    for name in ends:
        running = state(CLIENT, name)
        spans.begin("decode", running)
        running.output_ids += [1, 2, 3]
    spans.begin("decode", state(None, "untraced"))
    assert set(spans.open) == set(ends)
    spans.emitted([("i", emission) for emission in ends.values()])
    assert set(spans.open) == {"begun"}, "a move that has only begun ends nothing"
    spans.end("begun", "cancelled")
    spans.end("never heard of")
    found = {attributes(s)["quadriga.sequence_id"]: s for s in exporter.get_finished_spans()}
    assert set(found) == set(ends)
    assert all(attributes(s)["quadriga.tokens"] == 3 for s in found.values())
    assert attributes(found["moved"])["quadriga.moved_to"] == "q:decode:1:b"
    errors = {k for k, s in found.items() if s.status.status_code is StatusCode.ERROR}
    assert errors == {"failed", "begun"}


@pytest.mark.parametrize(
    ("fails", "outcome", "status"),
    [
        ({}, "moved", StatusCode.UNSET),
        ({"send": [KVTransportError("cut")]}, "failed", StatusCode.ERROR),
    ],
)
async def test_a_migration_is_a_span(
    exporter: InMemorySpanExporter, fails: dict[str, Any], outcome: str, status: StatusCode
) -> None:
    replica = MovingReplica(**fails)
    replica.take().traceparent = CLIENT
    assert (await replica.migrate()).outcome == outcome
    [span] = exporter.get_finished_spans()
    said = attributes(span)
    assert (span.name, said["quadriga.outcome"]) == ("migration", outcome)
    assert (said["quadriga.cause"], said["quadriga.peer"]) == ("balance", "destination")
    assert span.status.status_code is status


async def test_the_grpc_server_reads_it_too(
    make_stand: MakeStand, exporter: InMemorySpanExporter
) -> None:
    stand = await make_stand(keys=KEYS)
    context: Any = Context()
    context.metadata.append(("traceparent", CLIENT))
    request = pb.GenerateRequest(prompt="hi", model="quadriga-s")
    await GrpcServer(stand.engine).generate_once(request.SerializeToString(), context)
    roots = [s for s in exporter.get_finished_spans() if s.name == "request"]
    assert [f"{s.parent.span_id:016x}" for s in roots if s.parent] == [CLIENT.split("-")[2]]


def test_importing_it_loads_nothing() -> None:
    code = "import sys, quadriga.observability.tracing;"
    code += " assert not any('opentelemetry' in m for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
