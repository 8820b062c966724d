"""Tools on a running service: openai's package and its helpers, streams, and the SDK."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from quadriga.client import Client
from quadriga.core.request import FinishReason
from tests.e2e.test_structured_outputs import MESSAGES, SCHEMA

TOOLS: Any = [
    {"type": "function", "function": {"name": "sort", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
]
NAMED: Any = {"type": "function", "function": {"name": "sort"}}


class Sort(BaseModel):
    """Sorts two numbers."""

    first: int
    second: int
    order: Literal["up", "down"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_named_tool_is_called_and_the_conversation_goes_on(
    client: openai.OpenAI, temperature: float
) -> None:
    ask: Any = {"model": "quadriga-s", "tools": TOOLS, "temperature": temperature, "seed": 5}
    answer = client.chat.completions.create(messages=MESSAGES, tool_choice=NAMED, **ask)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert len(calls) == 1
    assert calls[0].type == "function"
    assert calls[0].function.name == "sort"
    jsonschema.validate(json.loads(calls[0].function.arguments), SCHEMA)
    result: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "[3, 7]"}
    more = client.chat.completions.create(
        messages=[*MESSAGES, choice.message, result], max_tokens=20, **ask
    )
    assert more.choices[0].finish_reason in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("parallel", [True, False])
def test_required_in_a_stream_is_the_whole_answer(client: openai.OpenAI, parallel: bool) -> None:
    ask: Any = {
        "model": "quadriga-s",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
        "temperature": 0.9,
        "seed": 3,
        "max_tokens": 800,
    }
    whole = client.chat.completions.create(**ask).choices[0].message.tool_calls or []
    assert 1 <= len(whole) <= (16 if parallel else 1)
    with client.chat.completions.stream(**ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    streamed = final.message.tool_calls or []
    assert [c.function.arguments for c in streamed] == [c.function.arguments for c in whole]


def test_openais_parse_helper_reads_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="quadriga-s",
        messages=MESSAGES,
        tools=[pydantic_function_tool(Sort)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0.7,
        seed=1,
    )
    calls = answer.choices[0].message.tool_calls or []
    assert isinstance(calls[0].function.parsed_arguments, Sort)


def test_the_sdk_calls_tools(sdk: Client) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": NAMED, "temperature": 0.8, "seed": 2}
    choice = sdk.generate(MESSAGES, **options).choices[0]
    assert choice.finish_reason is FinishReason.TOOL_CALLS
    assert choice.text == ""
    call = choice.tool_calls[0]
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    pieces = list(sdk.stream(MESSAGES, **options))
    deltas = [delta for piece in pieces for delta in piece.tool_calls]
    assert "".join(d.arguments for d in deltas) == call.arguments
    assert deltas[0].name == call.name == "sort"
    assert pieces[-1].finish_reason is FinishReason.TOOL_CALLS


def test_strict_tools_leave_words_free(client: openai.OpenAI) -> None:
    strict: Any = [pydantic_function_tool(Sort)]
    ask: Any = {"model": "quadriga-s", "messages": MESSAGES, "temperature": 0}
    answer = client.chat.completions.create(tools=strict, **ask)
    plain = client.chat.completions.create(**ask)
    assert answer.choices[0].message.content == plain.choices[0].message.content
