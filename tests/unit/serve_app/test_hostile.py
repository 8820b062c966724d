"""Hostile bytes over HTTP and gRPC: never an internal error, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.grpc.server import GrpcServer
from tests.hostile import VALUES, broken, tried
from tests.unit.serve_app.conftest import MakeStand, Stand
from tests.unit.serve_app.test_grpc_server import KEYS, Context

COMPLETION = {
    "model": "quadriga-s",
    "prompt": ["a", "bc"],
    "max_tokens": 3,
    "n": 2,
    "stop": ["x"],
    "logit_bias": {"5": 1.5},
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": 7,
    "logprobs": 2,
}
CHAT = {
    "model": "quadriga-s",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    "max_completion_tokens": 3,
    "logprobs": True,
    "top_logprobs": 2,
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/day"}},
    "required": ["city"],
    "$defs": {"day": {"type": "integer"}},
}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": PARAMETERS, "strict": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"city": "R"}'}}
TOOLS = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "b", "tool_call_id": "c1"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "parallel_tool_calls": False,
    "max_tokens": 2,
}
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "b"},
    ],
    "instructions": "Be short.",
    "tools": [{"type": "function", **FUNCTION}],
    "max_output_tokens": 2,
    "text": {"format": {"type": "text"}},
}
BODIES = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", TOOLS),
    ("/v1/chat/completions", TOOLS | {"tool_choice": "required"}),
    ("/v1/responses", RESPONSE),
    ("/v1/embeddings", {"input": ["a", "bc"], "encoding_format": "base64", "dimensions": None}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
MESSAGE = pb.GenerateRequest(
    model="quadriga-s",
    prompt="a",
    max_tokens=3,
    stop=["x"],
    logit_bias={5: 1.5},
    request_id="r1",
    deadline_ms=60_000,
    n=2,
).SerializeToString()


async def expect_rest(stand: Stand) -> None:
    """Whatever was asked has ended, and the cluster holds nothing of it."""
    for _ in range(200):
        if stand.engine._num_open_sequences == 0 and stand.cluster.num_held == 0:
            return
        await asyncio.sleep(0)
    raise AssertionError("a request was left behind")


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_bodies_that_are_broken_later_are_good(
    stand: Stand, path: str, body: dict[str, Any]
) -> None:
    reply = await stand.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    await expect_rest(stand)


@tried(100)
@given(data=st.data())
async def test_broken_bodies(stand: Stand, data: st.DataObject) -> None:
    path, good = data.draw(st.sampled_from(BODIES))
    body = data.draw(broken(json.dumps(good).encode()))
    reply = await stand.http.post(path, content=body)
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    await expect_rest(stand)


HEADER_NAMES = st.sampled_from(
    [
        "idempotency-key",
        "x-resume-index",
        "content-encoding",
        "content-type",
        "authorization",
        "traceparent",
        "accept",
        "x-request-id",
    ]
)
HEADER_VALUES = st.text(
    st.characters(min_codepoint=1, max_codepoint=255, exclude_characters="\r\n"), max_size=40
)


@tried(60)
@given(headers=st.dictionaries(HEADER_NAMES, HEADER_VALUES, max_size=4))
async def test_hostile_headers(stand: Stand, headers: dict[str, str]) -> None:
    """No text of a client's header comes back in a header."""
    reply = await stand.http.post(
        "/v1/completions",
        json={"prompt": "a", "max_tokens": 2},
        headers={name: value.encode("latin-1") for name, value in headers.items()},  # type: ignore[misc]
    )
    assert reply.status_code < 500, reply.text
    said = {value.strip() for value in headers.values() if len(value.strip()) > 8}
    assert not said & set(reply.headers.values())


@tried(40)
@given(name=st.text(max_size=60), value=VALUES)
async def test_names_that_a_client_makes_up(stand: Stand, name: str, value: Any) -> None:
    """Unknown fields are named in a header: no line break and no other byte comes with them."""
    body = json.dumps({"prompt": "a", "max_tokens": 1, name: value}).encode()
    reply = await stand.http.post("/v1/completions", content=body)
    assert reply.status_code < 500, reply.text
    ignored = reply.headers.get("x-quadriga-ignored", "")
    assert re.fullmatch(r"[\w,.]*", ignored, re.ASCII)
    await expect_rest(stand)


TRAVERSALS = [
    "../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "/etc/passwd",
    "quadriga-s/../quadriga-l",
    "quadriga-s/config.json",
    "quadriga-s%00",
    "C:\\windows\\win.ini",
    "file:///etc/passwd",
    "org/model",
    "\u202e",
    "a\r\nset-cookie: x=1",
]


@pytest.mark.parametrize("name", TRAVERSALS)
async def test_a_model_is_a_name_and_no_path(
    stand: Stand, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only names of what is served are known; no file is looked at, and none is fetched."""

    def touched(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a file was touched: {args}")

    for target in ("builtins.open", "io.open", "os.stat", "os.open", "os.scandir", "os.listdir"):
        monkeypatch.setattr(target, touched)
    replies = [await stand.http.post(path, json=body | {"model": name}) for path, body in BODIES]
    replies.append(await stand.http.get("/v1/models/" + name.replace("\r\n", "%0d%0a")))
    server = GrpcServer(stand.engine)
    context = Context()
    request = pb.GenerateRequest(model=name, prompt="a").SerializeToString()
    reply = await server.generate_once(request, context)
    monkeypatch.undo()
    for answer in replies:
        assert answer.status_code == 404, answer.text
        assert "set-cookie" not in answer.headers
    assert reply.HasField("error")


@pytest.mark.parametrize("make", [gzip.compress, zlib.compress])
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "identity, gzip"])
async def test_nothing_is_unpacked(stand: Stand, make: Any, encoding: str) -> None:
    """A bomb stays as small as it came."""
    bomb = make(b"[" * 10_000_000)
    assert len(bomb) < 100_000
    reply = await stand.http.post(
        "/v1/completions", content=bomb, headers={"content-encoding": encoding}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "content-encoding"
    disguised = await stand.http.post("/v1/completions", content=bomb)
    assert disguised.status_code == 400
    assert disguised.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_pieces_of_content_are_counted_before_each_is_looked_at(
    stand: Stand, path: str
) -> None:
    """A hundred thousand of them fit into a body, and blocked the event loop for 0.4 s."""
    for num_messages, num_parts, status in ((4, 1025, 400), (3, 1000, 200)):
        content = [{"type": "text", "text": ""}] * num_parts
        messages = [{"role": "user", "content": content}] * num_messages
        body = {"model": "quadriga-s", "messages": messages}
        reply = await stand.http.post(path, json=body)
        assert reply.status_code == status, reply.text
        if status == 400:
            assert "at most 4096 parts, not 4100" in reply.json()["error"]["message"]
            assert reply.json()["error"]["param"] == "messages"


async def test_a_bug_on_the_way_ends_the_request(stand: Stand) -> None:
    """The task that submits a sequence is not awaited; its failure is still an answer."""
    stand.cluster.refuse_admission = RuntimeError("a bug")  # type: ignore[assignment]
    async with asyncio.timeout(60):
        reply = await stand.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert reply.status_code == 500
    assert "a bug" not in reply.text
    await expect_rest(stand)


@pytest.mark.parametrize("kind", ["text", "json"])
async def test_a_line_of_the_log_is_a_line(
    make_stand: MakeStand, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Line breaks in logged text do not make lines of their own."""
    from quadriga.observability.logs import configure_logging

    forged = "ERROR everything is lost"
    configure_logging(kind, "debug", process="p")  # type: ignore[arg-type]
    try:
        stand = await make_stand()
        stand.cluster.refuse_admission = RuntimeError("a bug")  # type: ignore[assignment]
        for path in (f"/v1/models/a%0a{forged}", f"/v1/models/a%0d%0a{forged}"):
            await stand.http.get(path)
        body = {"prompt": "a", f"x\n{forged}": 1, "user": f"u\n{forged}"}
        await stand.http.post("/v1/completions", json=body)
        logging.getLogger("quadriga").warning("told: %s", f"a\r\n{forged}\x1b[31m\u2028b")
        error = ValueError(f"a\n{forged}")
        logging.getLogger("quadriga").error("failed", exc_info=error)
        logging.getLogger("quadriga").info("said", extra={"request_id": f"a\n{forged}"})
    finally:
        for handler in list(logging.getLogger().handlers):
            if type(handler).__name__ == "_OurHandler":
                logging.getLogger().removeHandler(handler)
    lines = capfd.readouterr().err.splitlines()
    assert lines
    assert not [line for line in lines if line.lstrip().startswith(forged)]
    assert not [line for line in lines if "\x1b" in line]


# gRPC


@tried(80)
@given(data=broken(MESSAGE))
async def test_broken_messages(stand: Stand, data: bytes) -> None:
    stand.engine.rate_limiter.keys = KEYS
    server = GrpcServer(stand.engine)
    once, stream = Context(), Context()
    await server.generate_once(data, once)
    async for _ in server.generate(data, stream):
        pass
    for context in (once, stream):
        assert context.code is None or context.code.name not in ("INTERNAL", "UNKNOWN")
    await server.cancel(data, Context())
    await expect_rest(stand)


@tried(40)
@given(value=st.text(max_size=60) | st.binary(max_size=60))
async def test_hostile_metadata(stand: Stand, value: str | bytes) -> None:
    stand.engine.rate_limiter.keys = KEYS
    context = Context()
    context.metadata = [("authorization", value)]  # type: ignore[list-item]
    await GrpcServer(stand.engine).list_models(b"", context)
    assert context.code is not None
    assert context.code.name == "UNAUTHENTICATED"
