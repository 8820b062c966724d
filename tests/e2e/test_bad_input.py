"""Bad input over HTTP and gRPC: always the documented error, and the service goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from quadriga.client import Client, RetryPolicy
from quadriga.errors import (
    ContextTooLong,
    InvalidRequest,
    QuadrigaError,
    Unauthenticated,
    UnknownModel,
)
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.cli.environment import MAX_GRPC_MESSAGE_BYTES
from tests.e2e.conftest import Service
from tests.e2e.observe import series, total, wait_until_free
from tests.waiting import wait_until

GENERATE = "/quadriga.v1.Quadriga/GenerateOnce"
STREAM = "/quadriga.v1.Quadriga/Generate"
COMPUTED = "quadriga_emitted_tokens_total"
COMPUTED_WITHIN_S = 120.0


@pytest.fixture(autouse=True)
def the_service_goes_on(http: httpx.Client) -> Iterator[None]:
    """After every case the next request is answered."""
    yield
    assert http.get("/v1/models").status_code == 200


@pytest.fixture(autouse=True, scope="module")
def nothing_leaks(service: Service) -> Iterator[None]:
    """After all cases nothing is held, and HTTP and gRPC still generate."""
    yield
    with httpx.Client(base_url=service.base_url, timeout=60) as client:
        wait_until_free(client)
        good = client.post("/v1/completions", json={"prompt": "copy: 4 5", "max_tokens": 2})
        assert good.status_code == 200, good.text
    with Client(service.grpc_target, api_key=service.key) as sdk:
        assert sdk.generate("copy: 4 5", max_tokens=2).usage.completion_tokens <= 2


def expect_error(reply: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """Check the documented form, and return the error."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    if status < 500 and status not in (429,):
        assert reply.headers["x-should-retry"] == "false"
    if param is not None:
        assert body["error"]["param"] == param
    error: dict[str, Any] = body["error"]
    return error


DEEP = '{"items":' * 3000 + "{}" + "}" * 3000
"""A schema of a depth that no parser should follow."""
SLOW = {"allOf": [{"type": "string", "pattern": f".*a{{{i}}}.*"} for i in range(1, 20)]}
"""A schema that compiles for minutes, and is given a few seconds in a process of its own."""
BIG = {"enum": ["a" * 200_000]}

BODIES = {
    "not JSON": b"{",
    "empty": b"",
    "not UTF-8": b'{"prompt": "\xff"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "top_p": -Infinity}',
    "a list": b"[1]",
    "null": b"null",
    "deep nesting": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 10,000 digits": b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "a lone surrogate in a name": b'{"prompt": "a", "\\ud800": 1}',
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_broken_bodies(http: httpx.Client, path: str, name: str) -> None:
    expect_error(http.post(path, content=BODIES[name]), 400)


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt.0"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt.1"),
    ({"prompt": [1, "a"]}, "prompt.1"),
    ({"prompt": [1.5]}, "prompt.0"),
    ({"prompt": [True]}, "prompt.0"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [614]}, "prompt.0"),
    ({"prompt": [2**70]}, "prompt.0"),
    ({"prompt": [[1], [99_999]]}, "prompt.1.0"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": "a\ud800"}, "prompt"),
    ({"prompt": [1] * 2048}, "prompt"),
    ({"prompt": "seven " * 4000}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 2048}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias.5"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**9}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop.1"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": "\udfff"}, "stop"),
    ({"stop_token_ids": [614]}, "stop_token_ids.0"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stop_token_ids": 5}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"deadline_ms": 10**9}, "deadline_ms"),
    ({"priority": 2**40}, "priority"),
    ({"suffix": "z"}, "suffix"),
    ({"guided_regex": "(" * 5000 + ")" * 5000}, "guided_regex"),
    ({"structured_outputs": {"json": SLOW}}, "structured_outputs.json"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a" * 257}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"exit_threshold": 1.5}, "exit_threshold"),
    ({"quality_budget": 0.1, "exit_policy": "strict"}, "quality_budget"),
    ({"model": 5}, "model"),
    ({"user": 5}, "user"),
]


@pytest.mark.parametrize(("fields", "param"), FIELDS, ids=lambda v: str(v)[:40])
def test_bad_fields(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"model": "quadriga-s", "prompt": "a"} | fields
    error = expect_error(
        http.post("/v1/completions", content=json.dumps(body).encode()), 400, param
    )
    assert param.split(".")[0] in error["message"]


CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"content": "a"}]}, "messages.0.role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages.0.content.0",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 100_000}, "max_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), CHATS, ids=lambda v: str(v)[:40])
def test_bad_chats(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"model": "quadriga-s", "messages": [{"role": "user", "content": "a"}]} | fields
    expect_error(http.post("/v1/chat/completions", json=body), 400, param)


def test_bad_embeddings(http: httpx.Client) -> None:
    expect_error(http.post("/v1/embeddings", json={"input": [""]}), 400, "input.0")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
@pytest.mark.parametrize("name", ["quadriga-s-unknown", "../quadriga-s", "quadriga-s/adapter"])
def test_unknown_adapters(http: httpx.Client, path: str, body: dict[str, Any], name: str) -> None:
    error = expect_error(http.post(path, json=body | {"model": name}), 404, "model")
    assert error["code"] == "model_not_found"


def test_a_schema_of_ten_megabytes(http: httpx.Client) -> None:
    schema = {"enum": ["a" * 10_000_000]}
    tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "a", "guided_json": schema}),
        ("/v1/chat/completions", chat | {"tools": [tool]}),
    ):
        assert expect_error(http.post(path, json=body), 413)["code"] == "body_too_large"


def test_unknown_model(http: httpx.Client) -> None:
    body = {"model": "gpt-9", "prompt": "a"}
    assert expect_error(http.post("/v1/completions", json=body), 404, "model")["code"] == (
        "model_not_found"
    )
    expect_error(http.get("/v1/models/gpt-9"), 404, "model")


def test_unknown_route_and_method(http: httpx.Client) -> None:
    expect_error(http.get("/v2/everything"), 404)
    expect_error(http.get("/v1/completions"), 405)
    assert http.put("/v1/models").headers["allow"]


def test_a_body_of_ten_megabytes(http: httpx.Client) -> None:
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    assert expect_error(http.post("/v1/completions", content=body), 413)["code"] == "body_too_large"


def test_ten_megabytes_of_unannounced_length(http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"a" * 100_000
        yield b'"}'

    expect_error(http.post("/v1/completions", content=pieces()), 413)


def test_headers_that_never_end(service: Service) -> None:
    """Serve's proxy has no limit of its own; HAProxy's is smaller, and its answer 400."""
    host, port = service.base_url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: ")
        is_closed = False
        try:
            for _ in range(100):
                raw.sendall(b"a" * 100_000)
            answer = raw.recv(65536)
            is_closed = not raw.recv(65536)
        except ConnectionError:
            is_closed = True  # it hung up while we were still sending
    assert not answer or answer.split()[1] in (b"431", b"400")
    assert is_closed


def test_a_body_that_never_ends(service: Service) -> None:
    host, port = service.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(
            b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"prompt"'
        )
        head = raw.recv(65536).split(b"\r\n", 1)[0]
    assert head == b"HTTP/1.1 408 Request Timeout"


def test_a_bad_resume_index(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    headers = {"idempotency-key": "resumed-badly"}
    unknown = http.post("/v1/completions", json=body, headers=headers | {"x-resume-index": "1"})
    expect_error(unknown, 404, "idempotency-key")
    assert http.post("/v1/completions", json=body, headers=headers).status_code == 200
    for value in ("x", "-1", "1,2", "999", "9" * 40):
        reply = http.post("/v1/completions", json=body, headers=headers | {"x-resume-index": value})
        expect_error(reply, 400, "x-resume-index")
    too_long = http.post("/v1/completions", json=body, headers={"idempotency-key": "k" * 300})
    expect_error(too_long, 400, "idempotency-key")


def test_a_reader_of_one_byte_at_a_time_delays_no_other(
    service: Service, http: httpx.Client
) -> None:
    """While it does not read, others are answered, also once nearly all of its answer is there."""
    host, port = service.base_url.removeprefix("http://").split(":")
    body = json.dumps(
        {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    ).encode()
    before = total(series(http), COMPUTED)
    with socket.create_connection((host, int(port)), timeout=60) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        for wanted in (before, before + 700, before + 1400):
            assert len(raw.recv(1)) == 1
            wait_until(lambda n=wanted: total(series(http), COMPUTED) >= n, COMPUTED_WITHIN_S)
            quick = http.post("/v1/completions", json={"prompt": "copy: 1 2", "max_tokens": 4})
            assert quick.status_code == 200


# --- gRPC -----------------------------------------------------------------------------------------


@pytest.fixture
def channel(service: Service) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.grpc_target) as made:
        yield made


def status_of(
    service: Service, channel: grpc.Channel, data: bytes, *, method: str = GENERATE
) -> tuple[str, dict[str, Any]]:
    """Send raw bytes; return the status and the trailing metadata."""
    metadata = [("authorization", f"Bearer {service.key}")]
    try:
        if method == STREAM:
            list(channel.unary_stream(method)(data, metadata=metadata, timeout=30))
        else:
            channel.unary_unary(method)(data, metadata=metadata, timeout=30)
    except grpc.RpcError as exc:
        call: Any = exc
        return call.code().name, dict(call.trailing_metadata())
    return "OK", {}


def wants(**fields: Any) -> bytes:
    return bytes(pb.GenerateRequest(**({"prompt": "a"} | fields)).SerializeToString())


def wants_form(**form: Any) -> bytes:
    return wants(structured_outputs=pb.StructuredOutputs(**form))


def wants_tools(*tools: pb.Tool, **fields: Any) -> bytes:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a")])
    return bytes(pb.GenerateRequest(chat=chat, tools=tools, **fields).SerializeToString())


MESSAGES: list[tuple[bytes, str]] = [
    (wants_form(json=DEEP), "structured_outputs.json"),
    (wants_form(json=json.dumps(BIG)), "structured_outputs.json"),
    (wants_form(regex="(a{1000}){1000}"), "structured_outputs.regex"),
    (wants_form(grammar="start: nobody"), "structured_outputs.grammar"),
    (wants_form(choice=pb.Texts(texts=[])), "structured_outputs.choice"),
    (wants_form(choice=pb.Texts(texts=["a"] * 5000)), "structured_outputs.choice"),
    (wants_tools(pb.Tool(name="a"), pb.Tool(name="a")), "tools.1.function.name"),
    (wants_tools(pb.Tool(name="a", parameters=DEEP)), "tools.0.parameters"),
    (wants_tools(pb.Tool(name="a"), tool_name="b"), "tool_choice.function.name"),
    (wants_tools(tool_choice="required"), "tool_choice"),
    (wants(cache_salt="a" * 257), "cache_salt"),
    (wants(prompt=""), "prompt"),
    (b"", "prompt"),
    (wants(max_tokens=-1), "max_tokens"),
    (wants(max_tokens=2**62), "max_tokens"),
    (wants(max_tokens=2048), "max_tokens"),
    (wants(temperature=float("nan")), "temperature"),
    (wants(temperature=float("inf")), "temperature"),
    (wants(top_p=0.0), "top_p"),
    (wants(n=17), "n"),
    (wants(stop=[""]), "stop.0"),
    (wants(stop=["a"] * 17), "stop"),
    (wants(stop_token_ids=[-1]), "stop_token_ids.0"),
    (wants(logit_bias={99_999: 1.0}), "logit_bias"),
    (wants(logprobs=21), "logprobs"),
    (wants(priority=2**40), "priority"),
    (wants(deadline_ms=10**9), "deadline_ms"),
    (wants(request_id="x" * 300), "request_id"),
    (wants(resume_from=[4]), "resume_from"),
    (wants(resume_from=[0, 0], request_id="two"), "resume_from"),
    (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[])).SerializeToString(), "prompt"),
    (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[-4])).SerializeToString(), "prompt.0"),
    (pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[614])).SerializeToString(), "prompt.0"),
    (
        pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1] * 2048)).SerializeToString(),
        "prompt",
    ),
    (
        pb.GenerateRequest(
            chat=pb.ChatMessages(messages=[pb.ChatMessage(role="king", content="a")])
        ).SerializeToString(),
        "messages.0.role",
    ),
    (pb.GenerateRequest(chat=pb.ChatMessages()).SerializeToString(), "messages"),
]


@pytest.mark.parametrize(("data", "param"), MESSAGES, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("method", [GENERATE, STREAM], ids=["once", "stream"])
def test_grpc_bad_fields(
    service: Service, channel: grpc.Channel, data: bytes, param: str, method: str
) -> None:
    status, metadata = status_of(service, channel, data, method=method)
    assert status == "INVALID_ARGUMENT"
    assert metadata["quadriga-error-param"] == param
    assert b"quadriga" in metadata["grpc-status-details-bin"]


@pytest.mark.parametrize("method", [GENERATE, STREAM], ids=["once", "stream"])
@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff", b"\x1a\x02\xff\xfe", b"\x1a\x03\xed\xa0\x80"],
    ids=["no message", "text that is not UTF-8", "a lone surrogate"],
)
def test_grpc_broken_messages(
    service: Service, channel: grpc.Channel, data: bytes, method: str
) -> None:
    status, metadata = status_of(service, channel, data, method=method)
    assert (status, metadata["quadriga-error-code"]) == ("INVALID_ARGUMENT", "invalid_message")


def test_grpc_resumption_of_nothing(service: Service, channel: grpc.Channel) -> None:
    status, metadata = status_of(
        service, channel, wants(resume_from=[3], request_id="never-begun"), method=STREAM
    )
    assert (status, metadata["quadriga-error-code"]) == ("NOT_FOUND", "not_found")


def test_grpc_ten_megabytes(service: Service, channel: grpc.Channel) -> None:
    schema = json.dumps({"enum": ["a" * 10_000_000]})
    for data in (
        wants(prompt="a" * 10_000_000),
        wants_form(json=schema),
        wants_tools(pb.Tool(name="a", parameters=schema)),
    ):
        status, metadata = status_of(service, channel, data)
        assert (status, metadata["quadriga-error-code"]) == ("INVALID_ARGUMENT", "body_too_large")


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip], ids=["plain", "bomb"])
@pytest.mark.parametrize("key", [True, False], ids=["with a key", "without"])
def test_grpc_messages_are_bounded_before_they_are_unpacked(
    service: Service, channel: grpc.Channel, key: bool, compression: Any
) -> None:
    metadata = [("authorization", f"Bearer {service.key}")] if key else []
    data = wants(prompt="a" * (MAX_GRPC_MESSAGE_BYTES + 1))
    call = channel.unary_unary(GENERATE)
    with pytest.raises(grpc.RpcError) as caught:
        call(data, metadata=metadata, timeout=60, compression=compression)
    failed: Any = caught.value
    assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_grpc_unknown_model_and_method(service: Service, channel: grpc.Channel) -> None:
    for name in ("gpt-9", "quadriga-s-unknown"):
        assert status_of(service, channel, wants(model=name))[0] == "NOT_FOUND"
    embed = pb.EmbedRequest(model="gpt-9", inputs=[pb.EmbedInput(text="a")]).SerializeToString()
    method = "/quadriga.v1.Quadriga/Embed"
    assert status_of(service, channel, embed, method=method)[0] == "NOT_FOUND"
    unknown = status_of(service, channel, b"", method="/quadriga.v1.Quadriga/Divine")
    assert unknown[0] == "UNIMPLEMENTED"


@pytest.mark.parametrize("value", [None, "", "Bearer", "Bearer wrong", "Basic abc", "wrong"])
def test_grpc_keys(service: Service, channel: grpc.Channel, value: str | None) -> None:
    metadata = [] if value is None else [("authorization", value)]
    for method, data in ((GENERATE, wants()), ("/quadriga.v1.Quadriga/ListModels", b"")):
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(method)(data, metadata=metadata, timeout=30)
        call: Any = caught.value
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"max_tokens": -1}, InvalidRequest),
        ({"max_tokens": 5000}, ContextTooLong),
        ({"model": "gpt-9"}, UnknownModel),
    ],
)
def test_the_sdk_raises_our_own_errors(
    sdk: Client, fields: dict[str, Any], kind: type[QuadrigaError]
) -> None:
    with pytest.raises(kind):
        sdk.generate("a", **fields)
    with pytest.raises(kind):
        list(sdk.stream("a", **fields))


def test_the_sdk_with_a_wrong_key(service: Service) -> None:
    retry = RetryPolicy(max_attempts=1)
    with (
        Client(service.grpc_target, api_key="wrong", retry=retry) as client,
        pytest.raises(Unauthenticated),
    ):
        client.models()
