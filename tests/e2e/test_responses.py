"""POST /v1/responses of a running service: openai's package, whole, streamed and parsed."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

INPUT = "Count from 3 to 9."
TOOL: Any = {
    "type": "function",
    "name": "sort",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"order": {"enum": ["up", "down"]}},
        "required": ["order"],
        "additionalProperties": False,
    },
}


class Order(BaseModel):
    """What an answer is read as."""

    order: Literal["up", "down"]
    count: int


def test_text_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: Any = {"model": "quadriga-s", "input": INPUT, "temperature": 0}
    whole = client.responses.create(**ask)
    assert whole.status == "completed"
    assert whole.output_text.startswith("Counting: 3 4 5")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    chat = client.chat.completions.create(
        model="quadriga-s", temperature=0, messages=[{"role": "user", "content": INPUT}]
    )
    assert chat.choices[0].message.content == whole.output_text
    events = list(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text


def test_the_stream_helper_and_a_cut_answer(client: openai.OpenAI) -> None:
    ask: Any = {"model": "quadriga-s", "input": INPUT, "temperature": 0, "max_output_tokens": 4}
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    assert events[-1].type == "response.incomplete"
    whole = client.responses.create(**ask)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"


def test_parse(client: openai.OpenAI) -> None:
    answer = client.responses.parse(
        model="quadriga-s", input=INPUT, text_format=Order, temperature=0.8
    )
    assert isinstance(answer.output_parsed, Order)


def test_a_call_and_what_follows(client: openai.OpenAI) -> None:
    ask: Any = {"model": "quadriga-s", "tools": [TOOL], "temperature": 0.7}
    forced: Any = {"tool_choice": {"type": "function", "name": "sort"}}
    answer = client.responses.create(input=INPUT, **ask, **forced)
    call: Any = answer.output[0]
    assert call.type == "function_call"
    assert json.loads(call.arguments)["order"] in ("up", "down")
    events = list(client.responses.create(input=INPUT, **ask, **forced, stream=True))
    done: Any = next(e for e in events if e.type == "response.function_call_arguments.done")
    parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(parts) == done.arguments
    history: Any = [
        {"role": "user", "content": INPUT},
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "3 4 5"},
    ]
    more = client.responses.create(
        input=history, instructions="Be short.", max_output_tokens=10, **ask
    )
    assert more.status in ("completed", "incomplete")
    assert more.instructions == "Be short."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input.0.type"),
        ({"input": [{"role": "king", "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "a"}]}, "input.0.arguments"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": 1}}}},
            "text.format.schema",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"temperature": 3}, "temperature"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    reply = http.post("/v1/responses", json={"input": INPUT} | fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param)
