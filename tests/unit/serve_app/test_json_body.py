"""What a body costs to read is bounded before it is read, and honest bodies are far below."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.errors import InvalidRequest
from quadriga.protos.quadriga.v1 import quadriga_pb2 as pb
from serve_app.grpc.server import GrpcServer
from serve_app.openai.bodies import MAX_PIECES, parse_body, parse_json
from serve_app.openai.schema import ChatBody, CompletionBody, DetokenizeBody, GenerationFields
from serve_app.openai.validation import SLICE_TOKENS, check_token_ids, plain_messages
from tests.unit.serve_app.conftest import MODEL, MakeStand, Stand
from tests.unit.serve_app.test_grpc_server import KEYS, Context

SIZE = 4_000_000
LIMIT_S = 0.4
"""Of processor time. These take some 50 ms; what each of them took before were seconds."""
Asked = pb.GenerateRequest
CHAT = b'{"messages": [{"role": "user", "content": "a"}], '


def full(head: bytes, item: bytes, tail: bytes) -> bytes:
    """A body of the largest size that is made of one item, again and again."""
    count = (SIZE - len(head) - len(tail)) // (len(item) + 1)
    return head + b",".join([item] * count) + tail


def keys(head: bytes, value: bytes, tail: bytes) -> bytes:
    return head + b",".join(b'"%d":%s' % (i, value) for i in range(280_000)) + tail


COSTLY: dict[str, tuple[type[Any], Callable[[], bytes]]] = {
    "lists": (ChatBody, lambda: full(CHAT + b'"x":[', b"[]", b"]}")),
    "lists in lists": (ChatBody, lambda: full(CHAT + b'"x":[', b"[" * 900 + b"]" * 900, b"]}")),
    "objects": (ChatBody, lambda: full(CHAT + b'"x":[', b'{"a":1}', b"]}")),
    "names": (ChatBody, lambda: keys(CHAT, b"0", b"}")),
    "escaped": (ChatBody, lambda: full(CHAT + b'"y":"\\ud83d\\ude00","x":[', b"[]", b"]}")),
    "stops that are none": (ChatBody, lambda: full(CHAT + b'"stop":[', b"1", b"]}")),
    "modalities that are none": (ChatBody, lambda: full(CHAT + b'"modalities":[', b"1", b"]}")),
    "messages that are none": (ChatBody, lambda: full(b'{"messages":[', b"1", b"]}")),
    "biases that are none": (ChatBody, lambda: keys(CHAT + b'"logit_bias":{', b'""', b"}}")),
    "tokens that are none": (DetokenizeBody, lambda: full(b'{"tokens":[', b"[]", b"]}")),
    "numbers": (CompletionBody, lambda: full(b'{"prompt":[', b"1", b"]}")),
    "text that never ends": (CompletionBody, lambda: b'{"prompt":"' + b'\\"' * 2_000_000),
    "brackets in a text": (CompletionBody, lambda: b'{"prompt":"%s"}' % (b"[{" * 1_900_000)),
}


@pytest.mark.parametrize("name", COSTLY)
def test_no_body_is_dear(name: str) -> None:
    model, make = COSTLY[name]
    data = make()
    began_s = time.thread_time()
    with suppress(InvalidRequest):
        parse_body(model, parse_json(data))
    assert time.thread_time() - began_s < LIMIT_S


def message(text: str) -> dict[str, Any]:
    return {"role": "user", "name": "n", "content": [{"type": "text", "text": text}]}


HONEST: dict[str, tuple[type[GenerationFields], dict[str, Any]]] = {
    "a text": (CompletionBody, {"prompt": "word " * 799_000}),
    "a program": (CompletionBody, {"prompt": 'x = {"a": [1, 2], "b": "c"}\n' * 110_000}),
    "a text of two bytes each": (CompletionBody, {"prompt": "é" * 600_000}),
    "token ids": (CompletionBody, {"prompt": [123_456] * 131_072}),
    "sixteen prompts": (CompletionBody, {"prompt": [[1234] * 32_768] * 16}),
    "messages": (ChatBody, {"messages": [message("word " * 150)] * 4096}),
    "biases": (CompletionBody, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1024)}}),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_is_only_large_is_read(name: str) -> None:
    model, body = HONEST[name]
    data = json.dumps(body).encode()
    assert len(data) <= SIZE
    assert parse_body(model, parse_json(data)).model_dump(exclude_unset=True) == body


@pytest.mark.parametrize("piece", ['"\\\\"', "[]", "{}", '"[\\"{"'])
def test_pieces_are_counted_to_the_last(piece: str) -> None:
    most = f"[{','.join([piece] * (MAX_PIECES - 1))}]".encode()
    assert len(parse_json(most)) == MAX_PIECES - 1
    for more in (most[:-1] + b', ""]', most[:-1] + b",[]]", most[:-1] + b",{}]"):
        with pytest.raises(InvalidRequest, match="65,536 strings, lists and objects") as caught:
            parse_json(more)
        assert caught.value.code == "body_too_complex"


async def test_pieces_of_all_arguments_and_schemas_are_counted(make_stand: MakeStand) -> None:
    text = json.dumps([[]] * 40_000)
    call = {"id": "a", "function": {"name": "a", "arguments": text}}
    body = parse_body(ChatBody, {"messages": [{"role": "assistant", "tool_calls": [call] * 2}]})
    with pytest.raises(InvalidRequest, match="65,536 strings, lists and objects"):
        plain_messages(body.messages)
    data = Asked(prompt="a", tools=[pb.Tool(parameters=text)] * 2).SerializeToString()
    reply = await GrpcServer((await make_stand(keys=KEYS)).engine).generate_once(data, Context())
    assert reply.error.code == "body_too_complex"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(value=VALUES, ascii_only=st.booleans())
def test_values_are_read_as_they_were_written(value: Any, ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"a": "x\\ud800"}', "a"),
        (b'{"a": [1, {"b": "\\udc00"}]}', "a.1.b"),
        (b'{"\\ud800": 1}', "a field name"),
    ],
)
def test_half_a_character_is_named(data: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate") as caught:
        parse_json(data)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"NaN",
        b"[Infinity]",
        b'"\xff"',
        b"[1,]",
        b"01",
        b"9" * 5000,
        b"[" * 202 + b"]" * 202,
    ],
)
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON") as caught:
        parse_json(data)
    assert caught.value.code == "invalid_json"


def test_a_body_of_too_many_fields() -> None:
    with pytest.raises(InvalidRequest, match="300 fields, above the limit of 256"):
        parse_body(CompletionBody, {"prompt": "a"} | {f"x{i}": 0 for i in range(299)})


async def test_the_event_loop_runs_while_tokens_are_checked() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    await check_token_ids([1] * (4 * SLICE_TOKENS), "prompt", MODEL)
    counting.cancel()
    assert turns >= 4
    with pytest.raises(InvalidRequest) as caught:
        await check_token_ids([1] * SLICE_TOKENS + [True], "prompt", MODEL)
    assert caught.value.param == f"prompt.{SLICE_TOKENS}"


TOO_MANY = {
    "messages": lambda: Asked(chat=pb.ChatMessages(messages=[pb.ChatMessage()] * 400_000)),
    "stop": lambda: Asked(prompt="a", stop=[""] * 400_000),
    "stop_token_ids": lambda: Asked(prompt="a", stop_token_ids=[1] * 129),
    "logit_bias": lambda: Asked(prompt="a", logit_bias=dict.fromkeys(range(1025), 1.0)),
    "resume_from": lambda: Asked(prompt="a", request_id="r", resume_from=[1] * 17),
    "resume_digest": lambda: Asked(prompt="a", request_id="r", resume_digest=[1] * 17),
    "prompt": lambda: Asked(prompt_token_ids=pb.TokenIds(ids=[1] * (MODEL.max_model_len + 1))),
}


@pytest.mark.parametrize("field", TOO_MANY)
async def test_a_message_of_too_many_items_is_not_made_a_list_of(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    def unreachable(request: Any) -> Any:
        raise AssertionError("it was")

    monkeypatch.setattr("serve_app.grpc.messages.generation_fields", unreachable)
    stand = await make_stand(keys=KEYS)
    data = TOO_MANY[field]().SerializeToString()
    reply = await GrpcServer(stand.engine).generate_once(data, Context())
    assert reply.error.param == field
    assert reply.error.code in ("invalid_value", "context_length_exceeded")


async def test_a_mark_before_the_body_and_whole_numbers_with_a_point(stand: Stand) -> None:
    body = b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 3.0, "temperature": 0.0, "seed": 7.0}'
    reply = await stand.http.post("/v1/completions", content=body)
    assert reply.json()["usage"]["completion_tokens"] == 3, reply.text
    for number, said in ((2.5, "a valid integer"), (1e300, "less than or equal")):
        refused = await stand.complete(max_tokens=number)
        assert refused.status_code == 400 and said in refused.json()["error"]["message"]


def test_values_are_quoted_as_json_has_them() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(ChatBody, {"messages": None, "n": True, "logit_bias": "x"})
    assert caught.value.message == (
        "logit_bias: Input should be an object (got 'x'); "
        "n: Input should be a valid integer (got true); "
        "messages: Input should be a valid list (got null)"
    )
