"""gRPC through the SDK and through the bare protocol."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from quadriga.client import AsyncClient, Client, Message, Piece
from quadriga.core.request import FinishReason
from quadriga.errors import DeadlineExceeded
from tests.e2e.conftest import ADAPTER, Service

PROMPT = "Sort: 42 7 19 7 88\n"


def test_models(sdk: Client) -> None:
    assert [(m.id, m.root) for m in sdk.models() if m.id != ADAPTER] == [
        ("quadriga-s", "quadriga-s"),
        ("quadriga-auto", "quadriga-s"),
    ]


def test_both_doors_give_the_same_answer(sdk: Client, http: httpx.Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 11, "n": 2}
    answer = sdk.generate(PROMPT, **fields)
    body = {"prompt": PROMPT} | fields
    reply = http.post("/v1/completions", json=body).json()
    assert [c.text for c in answer.choices] == [c["text"] for c in reply["choices"]]
    assert answer.usage.completion_tokens == reply["usage"]["completion_tokens"]
    assert sum(answer.usage.exits.values()) == answer.usage.completion_tokens


def test_stream_equals_the_whole(sdk: Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    whole = sdk.generate(PROMPT, logprobs=1, **fields)
    pieces = list(sdk.stream(PROMPT, logprobs=1, **fields))
    assert "".join(p.text for p in pieces) == whole.text
    token_ids = tuple(t for p in pieces for t in p.token_ids)
    assert token_ids == whole.choices[0].token_ids
    assert [p.first_index for p in pieces[:2]] == [0, len(pieces[0].token_ids)]
    assert pieces[-1].finish_reason is FinishReason.LENGTH
    assert pieces[-1].usage == whole.usage
    logprobs = [row.token_id for p in pieces for row in p.logprobs]
    assert tuple(logprobs) == token_ids


def test_chat_echo_and_token_ids(sdk: Client, http: httpx.Client) -> None:
    chat = sdk.generate([Message("user", PROMPT)], max_tokens=8, temperature=0)
    assert len(chat.choices[0].token_ids) <= 8
    ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    by_ids = sdk.generate(ids, max_tokens=8, temperature=0)
    assert by_ids.choices == sdk.generate(PROMPT, max_tokens=8, temperature=0).choices
    echoed = sdk.generate(PROMPT, max_tokens=8, temperature=0, echo=True, logprobs=0)
    assert echoed.text == PROMPT + by_ids.text
    assert [row.token_id for row in echoed.choices[0].prompt_logprobs] == ids


def test_embeddings(sdk: Client, http: httpx.Client) -> None:
    found = sdk.embed([PROMPT, "a"], pooling="last")
    reply = http.post("/v1/embeddings", json={"input": [PROMPT, "a"], "pooling": "last"}).json()
    assert [list(vector) for vector in found.vectors] == [d["embedding"] for d in reply["data"]]
    assert found.prompt_tokens == reply["usage"]["prompt_tokens"]
    assert found.model == "quadriga-s"


async def test_many_streams(async_sdk: AsyncClient) -> None:
    async def one(i: int) -> int:
        pieces = [
            piece
            async for piece in async_sdk.stream(PROMPT, max_tokens=10 + i, ignore_eos=True, seed=i)
        ]
        return sum(len(p.token_ids) for p in pieces)

    counts = await asyncio.gather(*(one(i) for i in range(16)))
    assert counts == [10 + i for i in range(16)]


def test_a_stream_is_taken_up_at_a_token(sdk: Client, service: Service) -> None:
    """As the SDK does after a break: the same request id, from the first token not had."""
    from quadriga.client.base import QuadrigaStub
    from quadriga.client.wire import StreamProgress, affinity, make_request

    options: Any = {"max_tokens": 60, "ignore_eos": True}  # sampled: a second run would differ
    text = ""

    def read(progress: StreamProgress, *, at_least: int) -> None:
        """Read until there are so many tokens, or all; then break the stream off."""
        nonlocal text
        call = QuadrigaStub(channel).Generate(
            progress.next_request(), metadata=metadata, timeout=30
        )
        for message in call:
            text += "".join(p.text for p in progress.take(message))
            if progress.received[0] >= at_least and not progress.is_complete:
                break
        call.cancel()

    with grpc.insecure_channel(service.grpc_target) as channel:
        for _ in range(5):  # an ingress that stood still sends all tokens at once
            request_id, text = uuid.uuid4().hex, ""
            metadata = [("authorization", f"Bearer {service.key}"), *affinity(request_id)]
            progress = StreamProgress(make_request(PROMPT, None, request_id, options))
            read(progress, at_least=5)
            if not progress.is_complete:
                break
        assert not progress.is_complete
        read(progress, at_least=1000)
    assert progress.is_complete
    assert progress.received == [60]
    assert sdk.generate(PROMPT, request_id=request_id, **options).text == text


def test_deadlines(sdk: Client) -> None:
    with pytest.raises(DeadlineExceeded):
        sdk.generate(PROMPT, n=16, max_tokens=1900, ignore_eos=True, timeout_s=0.8)
    got: list[Piece] = []
    for timeout_s in (1.2, 2.4, 4.8, 9.6):  # until the first token comes in time
        with pytest.raises(DeadlineExceeded):
            got.extend(
                sdk.stream(PROMPT, n=16, max_tokens=1900, ignore_eos=True, timeout_s=timeout_s)
            )
        if got:
            break
    assert got


def cancel(sdk: Client, request_id: str) -> bool:
    """End a request; asks again where the service stood still for as long as the SDK waits."""
    for _ in range(4):
        with contextlib.suppress(DeadlineExceeded):
            return sdk.cancel(request_id)
    return sdk.cancel(request_id)


def test_cancel_by_id(sdk: Client) -> None:
    assert cancel(sdk, "never-heard-of") is False
    request_id = uuid.uuid4().hex
    pieces = sdk.stream(PROMPT, request_id=request_id, max_tokens=1900, ignore_eos=True)
    next(pieces)
    assert cancel(sdk, request_id) is True


def test_health_and_reflection(service: Service) -> None:
    with grpc.insecure_channel(service.grpc_target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "quadriga.v1.Quadriga"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="x"), timeout=10)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        assert next(iter(watch)).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        known = ProtoReflectionDescriptorDatabase(channel)
        assert "quadriga.v1.Quadriga" in known.get_services()
        service_file = known.FindFileContainingSymbol("quadriga.v1.Quadriga")
        assert [m.name for m in service_file.service[0].method] == [
            "Generate",
            "GenerateOnce",
            "Embed",
            "Cancel",
            "ListModels",
        ]
