"""The gRPC methods over the fake cluster, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from quadriga.client import DepthSpan
from quadriga.client.wire import completion
from quadriga.core.request import token_digest
from quadriga.errors import Overloaded
from quadriga.observability.metrics import parse_exposition
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.auth.api_keys import ApiKeys
from serve_app.grpc.messages import generation_fields
from serve_app.grpc.server import GrpcServer
from serve_app.openai.schema import MAX_CHOICES_READ
from tests.unit.serve_app.conftest import ANSWER, MakeStand
from tests.waiting import until

KEYS = ApiKeys.of(["secret"], is_http_open=True)


class Context:
    """Serve's gRPC context, as far as the server uses it."""

    def __init__(self, authorization: str | None = "Bearer secret") -> None:
        self.metadata = [] if authorization is None else [("authorization", authorization)]
        self.code: grpc.StatusCode | None = None
        self.trailing: dict[str, Any] = {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata: list[tuple[str, Any]]) -> None:
        self.trailing = dict(metadata)


def wants(**fields: Any) -> bytes:
    message = pb.GenerateRequest(**({"prompt": "hi", "max_tokens": 100} | fields))
    return bytes(message.SerializeToString())


async def test_a_stream(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    context = Context()
    messages = [m async for m in GrpcServer(stand.engine).generate(wants(logprobs=1), context)]
    deltas = [delta for m in messages for delta in m.choices]
    assert "".join(d.text for d in deltas) == ANSWER
    assert [t for d in deltas for t in d.token_ids] == stand.cluster.script
    assert all(len(d.logprobs) == len(d.token_ids) for d in deltas)
    assert deltas[-1].finish_reason == pb.FINISH_REASON_STOP
    assert messages[-1].usage.completion_tokens == len(stand.cluster.script)
    assert messages[-1].usage.exits == {8: len(stand.cluster.script)}
    assert context.code is None


async def test_the_usage_lists_models_and_depths(make_stand: MakeStand) -> None:
    num_tokens = 5
    stand = await make_stand(keys=KEYS, loaded=[8, 4, 4, 12, 4])
    server = GrpcServer(stand.engine)
    asked = {"max_tokens": num_tokens, "model": "quadriga-s"}
    messages = [m async for m in server.generate(wants(**asked), Context())]
    wanted = [("quadriga-s", 8, 1), ("quadriga-s", 4, 2), ("quadriga-s", 12, 1)]
    wanted.append(("quadriga-s", 4, 1))
    assert spans(messages[-1].usage) == wanted
    assert not any(m.HasField("usage") for m in messages[:-1])
    once = await server.generate_once(wants(n=2, **asked), Context())
    assert spans(once.usage) == 2 * wanted, "choice after choice"
    assert completion(once).usage.spans == tuple(DepthSpan(*span) for span in 2 * wanted)


async def test_no_spans_where_depths_never_change(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    once = await GrpcServer(stand.engine).generate_once(wants(), Context())
    assert spans(once.usage) == []


def spans(usage: Any) -> list[tuple[str, int, int]]:
    return [(s.model, s.depth, s.tokens) for s in usage.spans]


async def test_once(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    reply = await GrpcServer(stand.engine).generate_once(wants(n=2, stop=["wör"]), Context())
    assert [c.text for c in reply.choices] == ["Hello ", "Hello "]


async def test_a_refusal_carries_its_retry(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    stand.cluster.refuse_admission = Overloaded("full", retry_after_s=2.5)
    context = Context()
    (message,) = [m async for m in GrpcServer(stand.engine).generate(wants(), context)]
    assert (message.error.code, message.error.retry_after_s) == ("overloaded", 2.5)
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert context.trailing["retry-after-ms"] == "2500"


async def test_without_keys_grpc_stays_closed(make_stand: MakeStand) -> None:
    stand = await make_stand()
    context = Context()
    await GrpcServer(stand.engine).list_models(b"", context)
    assert context.trailing["quadriga-error-code"] == "api_keys_off"


async def test_short_calls_are_counted_by_their_result(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    server = GrpcServer(stand.engine)
    await server.list_models(b"", Context())
    assert not (await server.cancel(b"\xff", Context())).found
    for call in (server.list_models, server.cancel):
        await call(b"", Context("Bearer wrong"))
    headers = {"authorization": "Bearer secret"}
    series = parse_exposition((await stand.http.get("/metrics", headers=headers)).text)
    name = 'quadriga_requests_total{{code="{}",door="grpc",replica="ingress-0"}}'
    counts = {"OK": 1, "INVALID_ARGUMENT": 1, "UNAUTHENTICATED": 2}
    assert {code: series.get(name.format(code)) for code in counts} == counts


async def test_resumption_and_cancel(make_stand: MakeStand) -> None:
    gate = asyncio.Event()
    stand = await make_stand(keys=KEYS, gate=gate)
    server = GrpcServer(stand.engine)
    stream = server.generate(wants(request_id="r1"), Context())
    first = await anext(stream)
    assert first.choices[0].text == "H"
    await stream.aclose()
    assert stand.cluster.num_held == 1
    gate.set()
    rest = [m async for m in server.generate(wants(request_id="r1", resume_from=[1]), Context())]
    assert "".join(d.text for m in rest for d in m.choices) == ANSWER[1:]
    assert len(stand.cluster.submitted) == 1
    context = Context()
    await server.generate_once(wants(request_id="r1", max_tokens=7), context)
    assert context.trailing["quadriga-error-code"] == "idempotency_key_reused"
    assert context.trailing["quadriga-error-param"] == "request_id"
    gate.clear()
    running = server.generate(wants(request_id="r2"), Context())
    await anext(running)
    reply = await server.cancel(pb.CancelRequest(request_id="r2").SerializeToString(), Context())
    assert reply.found
    await until(lambda: stand.cluster.num_held == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_waits_over_http_hears_of_a_cancellation(
    make_stand: MakeStand, stream: bool
) -> None:
    stand = await make_stand(keys=ApiKeys.of(["secret"]), gate=asyncio.Event())
    headers = {"authorization": "Bearer secret", "idempotency-key": "r1"}
    waiting = asyncio.ensure_future(stand.complete(stream=stream, headers=headers))
    await until(lambda: bool(stand.cluster.decode.num_polls))
    named = pb.CancelRequest(request_id="r1").SerializeToString()
    assert (await GrpcServer(stand.engine).cancel(named, Context())).found
    answer = await waiting
    assert answer.status_code == (200 if stream else 499)
    assert "cancelled by the client" in answer.text


async def test_an_ingress_that_never_held_a_request_goes_on_with_it(make_stand: MakeStand) -> None:
    """Its ingress is gone: it is begun anew, and the client's tokens are not sent again."""
    stand = await make_stand(keys=KEYS)
    server = GrpcServer(stand.engine)
    had = stand.cluster.script[:4]
    fields = {"request_id": "r1", "resume_from": [4]}
    right = wants(**fields, resume_digest=[token_digest(had)])
    rest = [m async for m in server.generate(right, Context())]
    tokens = [t for m in rest for d in m.choices for t in d.token_ids]
    assert tokens == stand.cluster.script[4:]
    assert "".join(d.text for m in rest for d in m.choices) == ANSWER[4:]
    assert rest[0].choices[0].first_token_index == 4
    assert rest[-1].usage.completion_tokens == len(stand.cluster.script)
    context = Context()
    wrong = wants(request_id="r2", resume_from=[4], resume_digest=[1])
    (message,) = [m async for m in server.generate(wrong, context)]
    assert (message.error.code, context.code) == ("answer_changed", grpc.StatusCode.NOT_FOUND)
    context = Context()
    (message,) = [
        m async for m in server.generate(wants(request_id="r3", resume_from=[4]), context)
    ]
    assert context.code is grpc.StatusCode.NOT_FOUND, (
        "a client that cannot compare gets no other answer"
    )
    await until(lambda: stand.cluster.num_held == 0)


async def test_a_closed_stream_frees_everything(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS, gate=asyncio.Event())
    stream = GrpcServer(stand.engine).generate(wants(), Context())
    await anext(stream)
    await stream.aclose()
    await until(lambda: stand.cluster.num_held == 0)


async def test_health(make_stand: MakeStand) -> None:
    stand = await make_stand(keys=KEYS)
    server = GrpcServer(stand.engine)
    await until(lambda: bool(stand.engine._cluster_state.view.snapshots))
    kinds = health_pb2.HealthCheckResponse
    known, unknown = Context(), Context()
    assert server.check("", known).status == kinds.SERVING and known.code is None
    server.check("other", unknown)
    assert unknown.code is grpc.StatusCode.NOT_FOUND
    assert server.health("other").status == kinds.SERVICE_UNKNOWN, "as a watch of it says"
    stand.engine.drain(60.0)
    assert server.health("quadriga.v1.Quadriga").status == kinds.NOT_SERVING


async def test_choices_are_counted_before_they_are_read(make_stand: MakeStand) -> None:
    server = GrpcServer((await make_stand(keys=KEYS)).engine)
    form = pb.StructuredOutputs(choice=pb.Texts(texts=["a"] * (MAX_CHOICES_READ + 1)))
    context = Context()
    await server.generate_once(wants(structured_outputs=form), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert context.details.startswith(f"structured_outputs.choice: {MAX_CHOICES_READ + 1} items")


async def test_errors_name_the_fields_of_the_protocol(make_stand: MakeStand) -> None:
    server = GrpcServer((await make_stand(keys=KEYS)).engine)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a")])
    request = pb.GenerateRequest(chat=chat, logprobs=99)
    context = Context()
    await server.generate_once(request.SerializeToString(), context)
    assert context.trailing["quadriga-error-param"] == "logprobs"
    assert context.details.startswith("logprobs: 99 is above")


def test_every_field_of_the_message_is_read() -> None:
    """A field added to the protocol must be handled, or named here."""
    request = pb.GenerateRequest(prompt="a", model="m", stop=["x"], stop_token_ids=[1])
    request.logit_bias[3] = 1.0
    request.structured_outputs.regex = "a"
    of_chats = {"tools", "tool_choice", "tool_name", "parallel_tool_calls"}
    for field in pb.GenerateRequest.DESCRIPTOR.fields:
        is_optional = field.containing_oneof and field.containing_oneof.name.startswith("_")
        if is_optional and field.name not in of_chats:
            setattr(request, field.name, "u" if field.type == field.TYPE_STRING else 1)
    chat = pb.GenerateRequest(tool_choice="auto", parallel_tool_calls=True)
    chat.chat.messages.add(role="user", content="a")
    chat.tools.add(name="a")
    named = pb.GenerateRequest(tool_name="a")
    named.chat.messages.add(role="user", content="a")
    assert generation_fields(named)["tool_choice"]["function"] == {"name": "a"}
    read_elsewhere = {"request_id", "resume_from", "resume_digest", "prompt_token_ids", "chat"}
    read_elsewhere |= {"tool_name", "include_eta"}
    known = {*generation_fields(request), *generation_fields(chat), *read_elsewhere} - {"messages"}
    assert {f.name for f in pb.GenerateRequest.DESCRIPTOR.fields} == known
