"""Tools over HTTP: what the model is told, what it must say, and how its calls are read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.text.tool_formats import HERMES
from quadriga.text.tool_parser import ToolParser
from serve_app.grpc.messages import generation_fields
from serve_app.openai.bodies import parse_body
from serve_app.openai.schema import ChatBody
from serve_app.openai.tool_output import read_news
from serve_app.request.request import OutputDelta
from tests.unit.serve_app.conftest import MODEL, MakeStand, Stand
from tests.unit.serve_app.test_structured_fields import LENIENT

PATH = "/v1/chat/completions"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
TOOLS = [ADD, {"type": "function", "function": {"name": "stop_it"}}]
USER = {"role": "user", "content": "1 + 1?"}
CALLS = '<tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]'
SAID = f"Well: {CALLS}</tool_call>"


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line[6:7] == "{"]


async def test_calls_of_a_whole_answer(make_stand: MakeStand) -> None:
    stand = await make_stand(says=SAID)
    body = {"messages": [USER], "tools": TOOLS}
    reply = (await stand.http.post(PATH, json=body)).json()
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"].strip() == "Well:"
    calls = choice["message"]["tool_calls"]
    assert [c["function"] for c in calls] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "arguments": "{}"},
    ]
    assert len({c["id"] for c in calls}) == 2
    assert all(c["type"] == "function" for c in calls)
    alone = (await stand.http.post(PATH, json=body | {"parallel_tool_calls": False})).json()
    assert len(alone["choices"][0]["message"]["tool_calls"]) == 1
    unread = (await stand.http.post(PATH, json=body | {"tool_choice": "none"})).json()
    assert unread["choices"][0]["message"]["content"] == SAID
    assert unread["choices"][0]["finish_reason"] == "stop"


async def test_calls_of_a_stream_come_in_pieces(make_stand: MakeStand) -> None:
    stand = await make_stand(says=SAID)
    body = {"messages": [USER], "tools": TOOLS, "stream": True, "n": 2}
    chunks = events((await stand.http.post(PATH, json=body)).text)
    for index in (0, 1):
        news = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert news[0]["delta"]["role"] == "assistant"
        assert news[-1]["finish_reason"] == "tool_calls"
        text = "".join(c["delta"]["content"] or "" for c in news)
        assert text.strip() == "Well:"
        deltas = [d for c in news for d in c["delta"].get("tool_calls", ())]
        assert [d["function"]["name"] for d in deltas if "id" in d] == ["add", "add"]
        first = "".join(d["function"]["arguments"] for d in deltas if d["index"] == 0)
        assert first == '{"a": 1}'
        assert len([d for d in deltas if d["index"] == 0]) > 1, "as they come"
    chunks = events((await stand.http.post(PATH, json=body | {"parallel_tool_calls": False})).text)
    assert {d["index"] for chunk in chunks for d in _deltas(chunk)} == {0}


async def test_a_stream_that_is_taken_up_again_goes_on_within_a_call(make_stand: MakeStand) -> None:
    stand = await make_stand(says=SAID)
    body = {"messages": [USER], "tools": TOOLS, "stream": True, "seed": 1}
    headers = {"idempotency-key": "a" * 20}
    whole = events((await stand.http.post(PATH, json=body, headers=headers)).text)
    for cursor in range(1, len(stand.cluster.script) - 1):
        again = await stand.http.post(
            PATH, json=body, headers=headers | {"x-resume-index": str(cursor)}
        )
        rest = [d for c in events(again.text) for d in _deltas(c)]
        wanted = [d for c in whole for d in _deltas(c)]
        text = "".join(d["function"]["arguments"] for d in rest)
        assert "".join(d["function"]["arguments"] for d in wanted).endswith(text)
        assert {d["id"] for d in rest if "id" in d} <= {d["id"] for d in wanted if "id" in d}


def _deltas(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chunk["choices"][0]["delta"].get("tool_calls", [])
    return found


@pytest.mark.parametrize(
    ("choice", "parallel", "has_grammar"),
    [
        (None, None, False),
        ("auto", True, False),
        ("none", None, False),
        ("required", None, True),
        ("required", False, True),
        ({"type": "function", "function": {"name": "add"}}, None, True),
    ],
)
async def test_what_must_be_called(
    stand: Stand, choice: Any, parallel: bool | None, has_grammar: bool
) -> None:
    body = {"messages": [USER], "tools": TOOLS, "tool_choice": choice}
    reply = await stand.http.post(PATH, json=body | {"parallel_tool_calls": parallel})
    assert reply.status_code == 200, reply.text
    grammar = stand.cluster.submitted[-1].sampling.grammar
    assert (grammar is not None) is has_grammar
    if grammar is not None:
        is_named = not isinstance(choice, str)
        assert ('"stop_it' in grammar.text.replace("\\", "")) is not is_named
        start = grammar.text.splitlines()[0]
        assert ("{0,15}" in start) is (parallel is None and not is_named)


async def test_strict_tools_are_kept_to_where_the_model_is_free(stand: Stand) -> None:
    strict = {"type": "function", "function": ADD["function"] | {"strict": True}}
    body = {"messages": [USER], "tools": [strict, TOOLS[1]]}
    assert (await stand.http.post(PATH, json=body)).status_code == 200
    grammar = stand.cluster.submitted[-1].sampling.grammar
    assert grammar is not None
    assert "start: called* TEXT" in grammar.text
    assert '"integer"' in grammar.text
    assert (await stand.http.post(PATH, json=body | {"tool_choice": "none"})).status_code == 200
    assert stand.cluster.submitted[-1].sampling.grammar is None


@pytest.mark.parametrize("types", [{}, {"type": ["object", "null"]}])
async def test_arguments_are_an_object_also_where_their_schema_does_not_say_so(
    stand: Stand, types: dict[str, Any]
) -> None:
    tools = [tool(parameters=types | {"properties": {"a": {"type": "integer"}}})]
    body = {"messages": [USER], "tools": tools, "tool_choice": "required"}
    assert (await stand.http.post(PATH, json=body)).status_code == 200
    grammar = stand.cluster.submitted[-1].sampling.grammar
    assert grammar is not None and '"type": "object"' in grammar.text


FORM = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"required": ["b"]}}}


@pytest.mark.parametrize("path", [PATH, "/v1/responses"])
async def test_a_form_beside_tools_is_that_of_an_answer_which_calls_none(
    make_stand: MakeStand, path: str
) -> None:
    """OpenAI's Agents SDK sends both with every call of an agent that has an `output_type`."""
    stand = await make_stand(says='{"b": 1}')
    body: dict[str, Any] = {"messages": [USER], "tools": [ADD], "response_format": FORM}
    if path != PATH:
        form = {"type": "json_schema"} | FORM["json_schema"]
        flat = ADD["function"] | {"type": "function"}
        body = {"input": "1 + 1?", "tools": [flat], "text": {"format": form}}
    reply = await stand.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    grammar = stand.cluster.submitted[-1].sampling.grammar
    assert grammar is not None
    assert grammar.text.splitlines()[0].endswith(" | instead")
    assert '"required": ["b"]' in grammar.text
    assert '"integer"' not in grammar.text, "arguments are free, but of strict functions"
    if path == PATH:
        choice = reply.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ('{"b": 1}', "stop")
    assert (await stand.http.post(path, json=body | {"tool_choice": "required"})).status_code == 200
    grammar = stand.cluster.submitted[-1].sampling.grammar
    assert grammar is not None
    assert "instead" not in grammar.text


@pytest.mark.parametrize(
    "form", [{"guided_json": {}}, {"structured_outputs": {"json": "{}"}}, {"guided_json": "{}"}]
)
async def test_other_words_for_json_are_as_good_beside_tools(
    stand: Stand, form: dict[str, Any]
) -> None:
    reply = await stand.http.post(PATH, json=form | {"messages": [USER], "tools": [ADD]})
    assert reply.status_code == 200, reply.text
    grammar = stand.cluster.submitted[-1].sampling.grammar
    assert grammar is not None and " | instead" in grammar.text


async def test_the_model_is_told_of_tools_and_of_the_conversation(stand: Stand) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "two", "tool_call_id": "c1"},
    ]
    reply = await stand.http.post(PATH, json={"messages": messages, "tools": TOOLS})
    assert reply.status_code == 200, reply.text
    prompt = MODEL.tokenizer.decode(stand.cluster.submitted[-1].prompt_ids)
    assert "two" in prompt, "its template shows the last message of a user"


async def test_the_template_is_told_of_tools_where_a_chat_is_only_counted(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MODEL.tokenizer.tool_format is not None  # read once, of its own template
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    monkeypatch.setattr(MODEL.tokenizer._fast, "chat_template", template)
    body = {"messages": [{"role": "user", "content": "one"}], "tools": TOOLS}
    await stand.http.post(PATH, json=body | {"max_tokens": 1})
    reply = await stand.http.post("/tokenize", json=body)
    assert reply.json()["tokens"] == stand.cluster.submitted[-1].prompt_ids
    fewer = await stand.http.post("/tokenize", json={"messages": body["messages"]})
    assert fewer.json()["count"] < reply.json()["count"]
    wrong = await stand.http.post("/tokenize", json=body | {"tools": [TOOLS[0]] * 2})
    assert wrong.json()["error"]["param"] == "tools.1.function.name"


def tool(name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "retrieval", "function": {"name": "a"}}]}, "tools.0.type"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool(), tool("b"), tool()]}, "tools.2.function.name"),
        ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool(parameters={"enum": ["a" * 200_000]})]}, "tools"),
        ({"tools": [tool(parameters=5)]}, "tools.0.function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools.0.function.parameters.type"),
        ({"tools": [tool(parameters={"type": ["null"]})]}, "tools.0.function.parameters.type"),
        ({"tools": [tool(parameters=LENIENT)]}, "tools.0.function.parameters"),
        ({"tools": [tool()], "guided_json": LENIENT}, "guided_json"),
        *(
            ({"tools": [tool(parameters={key: value})]}, f"tools.0.function.parameters.{key}")
            for key, values in (("properties", ([1], "x", {"a": 5})), ("required", (5, [1], "a")))
            for value in values
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [tool(parameters={"type": 7})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool()], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [tool()], "guided_regex": "a", "response_format": FORM}, "guided_regex"),
        ({"tools": [tool()], "guided_json": "[" * 5000}, "guided_json"),
        ({"tools": [tool()], "guided_json": f'{{"enum": ["{"a" * 200_000}"]}}'}, "guided_json"),
        ({"tools": [tool()], "tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        ({"functions": [{"name": "a"}]}, "functions"),
    ],
    ids=lambda v: str(v)[:50],
)
async def test_what_is_refused(stand: Stand, fields: dict[str, Any], param: str) -> None:
    reply = await stand.http.post(PATH, json={"messages": [USER]} | fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].startswith(param)
    assert "a object" not in error["message"] and "NamedToolChoice" not in error["message"]
    assert not stand.cluster.submitted


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0"),
        (
            {
                "role": "user",
                "content": "a",
                "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "{}"}}],
            },
            "messages.0.tool_calls",
        ),
        ({"role": "tool", "content": "a", "tool_call_id": 5}, "messages.0.tool_call_id"),
    ],
)
async def test_messages_that_are_refused(stand: Stand, message: dict[str, Any], param: str) -> None:
    reply = await stand.http.post(PATH, json={"messages": [message]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(param)


async def test_numbers_of_a_tool_that_no_answer_can_repeat_are_refused(stand: Stand) -> None:
    told = tool(parameters={"maximum": 5})
    flat = told["function"] | {"type": "function"}
    for path, body in (
        (PATH, {"messages": [USER], "tools": [told]}),
        ("/v1/responses", {"input": "a", "tools": [flat]}),
    ):
        reply = await stand.http.post(path, content=json.dumps(body).replace("5", "1e400"))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools"), reply.text


@pytest.mark.parametrize("arguments", ["no JSON", "[" * 5000, '{"a": ' * 500, "5"])
async def test_arguments_in_a_conversation_may_be_anything(stand: Stand, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    reply = await stand.http.post(PATH, json={"messages": messages})
    assert reply.status_code == 200, reply.text


def test_grpc_has_the_same_fields() -> None:
    from quadriga.client.wire import make_request

    call = {"id": "c1", "function": {"name": "add", "arguments": "{}"}}
    messages: Any = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    named = {"type": "function", "function": {"name": "add"}}
    request = make_request(messages, None, None, {"tools": TOOLS, "tool_choice": named})
    fields = generation_fields(request)
    body = parse_body(ChatBody, fields)
    over_http = parse_body(
        ChatBody,
        {"messages": messages, "tools": TOOLS, "tool_choice": named, "seed": fields["seed"]},
    )
    assert body.tool_choice == over_http.tool_choice
    assert [t.function.name for t in body.tools or ()] == ["add", "stop_it"]
    assert body.messages[1].tool_calls == over_http.messages[1].tool_calls
    assert body.messages[2].tool_call_id == "c1"


def test_a_stream_that_begins_before_its_text_is_sent_again_keeps_its_calls() -> None:
    """As where another choice of a resumed answer has news first, or begins anew elsewhere."""
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    pieces = list(text)
    choice = SimpleNamespace(pieces=pieces[:3])
    tools = SimpleNamespace(parser=lambda: ToolParser(HERMES, {"add": {}}))
    stream: Any = SimpleNamespace(
        request=SimpleNamespace(tools=tools, sequences=[choice]), tool_parsers={}
    )
    at = text.index("arguments")
    begun = read_news(stream, OutputDelta(0, at, [], "", None, None, True))
    assert not begun.pieces
    choice.pieces = pieces
    news = read_news(stream, OutputDelta(0, at, [1], text[at:], None, None, False))
    assert "".join(call.arguments for call in news.calls) == '{"a": 1}'
