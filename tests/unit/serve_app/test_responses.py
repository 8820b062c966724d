"""POST /v1/responses: events in their order, and how its fields become a chat's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.serve_app.conftest import MODEL, MakeStand, Stand

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SAID = 'Well: <tool_call>[{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]'


def events(text: str) -> list[dict[str, Any]]:
    frames = [frame.split("\n") for frame in text.strip().split("\n\n")]
    for name, data in frames:
        assert name == f"event: {json.loads(data[6:])['type']}"
    return [json.loads(data[6:]) for _, data in frames]


async def test_a_stream_of_text_and_calls(make_stand: MakeStand) -> None:
    stand = await make_stand(says=f"{SAID}</tool_call>")
    body = {"input": "1 + 1?", "tools": [TOOL], "seed": 3}
    whole = (await stand.http.post(PATH, json=body)).json()
    seen = events((await stand.http.post(PATH, json=body | {"stream": True})).text)
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    last = seen[-1]
    assert last["type"] == "response.completed"

    assert shown(last["response"]["output"]) == shown(whole["output"])
    texts = ["Well: ", '{"a": 1}', "{}"]
    assert shown(whole["output"]) == [(text, "completed") for text in texts]
    added = [e["item"] for e in seen if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in seen if e["type"] == "response.output_item.done"]
    assert [a["id"] for a in added] == [d["id"] for d in done]
    assert [a["status"] for a in added] == ["in_progress"] * 3
    assert done == last["response"]["output"]
    assert len({a["id"] for a in added}) == 3


def shown(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (i["content"][0]["text"] if i["type"] == "message" else i["arguments"], i["status"])
        for i in items
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
async def test_items_stand_in_the_answers_order_however_tokens_come(
    make_stand: MakeStand, size: int
) -> None:
    call = '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>'
    stand = await make_stand(says=f"{call} and {call} done", tokens_per_step=size)
    body = {"input": "1 + 1?", "tools": [TOOL], "seed": 3}
    whole = (await stand.http.post(PATH, json=body)).json()
    last = events((await stand.http.post(PATH, json=body | {"stream": True})).text)[-1]
    texts = ['{"a": 1}', " and ", '{"a": 1}', " done"]
    assert shown(last["response"]["output"]) == shown(whole["output"])
    assert shown(whole["output"]) == [(text, "completed") for text in texts]


async def test_the_last_item_of_an_answer_that_was_cut_is_incomplete(make_stand: MakeStand) -> None:
    stand = await make_stand(says=SAID)
    end = len(MODEL.tokenizer.encode(SAID[: SAID.index("1}")]))
    body = {"input": "1 + 1?", "tools": [TOOL], "seed": 3, "max_output_tokens": end}
    whole = (await stand.http.post(PATH, json=body)).json()
    last = events((await stand.http.post(PATH, json=body | {"stream": True})).text)[-1]
    assert whole["status"] == "incomplete"
    assert [status for _, status in shown(whole["output"])] == ["completed", "incomplete"]
    assert shown(last["response"]["output"]) == shown(whole["output"])


CALL = {"type": "function_call", "call_id": "1", "name": "a", "arguments": "{}"}
CHOICE = {"type": "function", "name": "b"}
LONG = "a" * 513


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [TOOL, TOOL]}, "tools.1.name", "tools.0 as"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools.0.name", "tools.0.name: String"),
        ({"tools": [TOOL], "tool_choice": CHOICE}, "tool_choice.name", "tool_choice.name: 'b'"),
        ({"tools": [TOOL | {"parameters": {"required": 5}}]}, "tools.0.parameters.required", ""),
        ({"input": [CALL] * 129}, "input.128", "128 calls"),
        ({"bad_words": ["a"]}, "bad_words", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "needs it"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema", "leave it"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "not together with guided_regex"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 items"),
        ({"metadata": {str(i): i for i in range(1025)}}, "metadata", "at most 1024 items"),
        ({"input": [CALL | {"call_id": LONG}]}, "input.0.call_id", "512"),
        ({"input": [CALL | {"name": LONG}]}, "input.0.name", "512"),
        (
            {"input": [{"role": "user", "content": "a"}] * 4096, "instructions": "b"},
            "input",
            "4,096 items besides instructions, above the limit of 4,095",
        ),
    ],
    ids=lambda v: str(v)[:40],
)
async def test_errors_name_fields_that_there_are(
    stand: Stand, fields: dict[str, Any], param: str, message: str
) -> None:
    reply = await stand.http.post(PATH, json={"input": "a"} | fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert ".function" not in error["message"]


@pytest.mark.parametrize(
    ("param", "text"),
    [
        ("text", '{"format": {"type": "text", "x": 1e999}}'),
        ("tools", '[{"type": "function", "name": "a", "x": [-1e999]}]'),
        ("tool_choice", '{"type": "function", "name": "add", "x": 1e999}'),
    ],
)
async def test_an_answer_repeats_nothing_that_is_no_json(
    stand: Stand, param: str, text: str
) -> None:
    fields = {"input": '"a"', "tools": json.dumps([TOOL])} | {param: text}
    body = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    reply = await stand.http.post(PATH, content=f"{{{body}}}")
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert not stand.cluster.submitted


async def test_a_stream_is_not_taken_up_again(stand: Stand) -> None:
    headers = {"idempotency-key": "a" * 20, "x-resume-index": "3"}
    reply = await stand.http.post(PATH, json={"input": "a", "stream": True}, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "x-resume-index"


async def test_fields_that_change_nothing_are_named(stand: Stand) -> None:
    body = {"input": "a", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}
    reply = await stand.http.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-quadriga-ignored"] == "service_tier"
    assert reply.json()["metadata"] == {"a": "b"}
    assert reply.json()["store"] is False


async def test_what_clients_say_by_themselves(stand: Stand) -> None:
    said = {"include": ["reasoning.encrypted_content"], "truncation": "auto", "reasoning": None}
    said |= {"stream_options": {"include_obfuscation": False}}
    items = [{"type": None, "role": "user", "content": "a", "id": None}]
    reply = await stand.http.post(PATH, json={"input": items} | said)
    assert reply.status_code == 200, reply.text
    reference = {"type": "item_reference", "id": "msg_1"}
    reply = await stand.http.post(PATH, json={"input": [*items, reference]})
    assert reply.status_code == 400
    assert "store: false" in reply.json()["error"]["message"]


async def test_the_conversation_is_the_chats(stand: Stand) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {"role": "user", "content": "d"},
    ]
    same = {"priority": 3, "temperature": 0, "seed": 1, "top_k": 5, "stop_token_ids": [7]}
    same |= {"repetition_penalty": 1.5, "logit_bias": {"5": 1}, "guided_choice": ["a", "b"]}
    reply = await stand.http.post(PATH, json={"input": items, "instructions": "Be short."} | same)
    assert reply.status_code == 200, reply.text
    assert "x-quadriga-ignored" not in reply.headers
    state = stand.cluster.submitted[-1]
    assert state.sampling.greedy
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    chat = {"messages": messages} | same
    assert (await stand.http.post("/v1/chat/completions", json=chat)).status_code == 200
    assert stand.cluster.submitted[-1].prompt_ids == state.prompt_ids
    assert stand.cluster.submitted[-1].sampling == state.sampling
    assert stand.cluster.submitted[-1].priority == state.priority == 3
