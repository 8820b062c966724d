"""The body of POST /v1/responses, and its meaning as a chat."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from quadriga.checkpoint.exits import ExitPolicy
from quadriga.errors import InvalidRequest
from serve_app.openai.bodies import parse_body, refuse_unsupported, shown
from serve_app.openai.schema import (
    COUNTED,
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    MAX_MESSAGES,
    MAX_TOKENS_LIMIT,
    MAX_TOOLS,
    ChatBody,
    RequestBody,
    RequestFields,
)
from serve_app.openai.unsupported import NO_REASONING, RESPONSES

TEXT_PARTS = ("input_text", "output_text", "text")
CHAT_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    r"response_format\.json_schema(\.schema)?": "text.format.schema",
    "response_format": "text.format",
    "messages": "input",
    r"(tools\.\d+|tool_choice)\.function": r"\1",
}
"""Patterns of fields of the chat that a response is, and where their values are from."""
MAX_NAME_CHARS = 512
"""Of a call in the input: its id and its function."""


class ResponseFunction(RequestBody):
    """A function that the model may ask to have called."""

    type: Literal["function"] = Field(description="Only functions.")
    name: str = Field(description="Letters, digits, `_`, `-` and `.`.")
    description: str | None = Field(None, description="For the model.")
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object.")
    strict: bool | None = Field(None, description="Arguments fit `parameters`.")


class ResponseToolChoice(RequestBody):
    """The one function to call."""

    type: Literal["function"] = Field(description="Only functions.")
    name: str = Field(description="One of `tools`.")


class TextFormat(RequestBody):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="Which form.")
    name: str | None = Field(None, description="Accepted; changes nothing.")
    description: str | None = Field(None, description="Accepted; changes nothing.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="With type json_schema."
    )
    strict: bool | None = Field(None, description="Accepted: every schema is kept to.")


class ResponseText(RequestBody):
    """What the text is like."""

    format: TextFormat | None = Field(None, description="Its form; any by default.")


class ResponsesBody(RequestFields):
    """POST /v1/responses: stateless, so `input` is the whole conversation."""

    unsupported = RESPONSES

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] = Field(
        description="Text, or messages, calls and their outputs in order."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS_LIMIT, description="Most tokens of the answer."
    )
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Share to sample from.")
    text: ResponseText | None = Field(None, description="The form of the answer.")
    tools: Annotated[list[ResponseFunction], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions that the model may ask to have called."
    )
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = Field(
        None, description="Whether it calls, must call, or must call this one; default auto."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False: an answer has one call at most; later ones are left out."
    )
    stream: bool | None = Field(None, description="Answer as events, as it is generated.")
    store: bool | None = Field(None, description="Accepted; nothing is stored.")
    metadata: Annotated[dict[str, str] | None, COUNTED] = Field(
        None, max_length=16, description="Repeated in the answer."
    )
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX, description="As for chats.")
    exit_threshold: float | None = Field(None, ge=0, le=1, description="As for chats.")
    exit_policy: ExitPolicy | None = Field(None, description="As for chats.")
    max_depth: int | None = Field(None, ge=1, le=INT32_MAX, description="As for chats.")
    sla_tbt_ms: float | None = Field(None, gt=0, le=3_600_000, description="As for chats.")
    quality_budget: float | None = Field(None, ge=0, le=1, description="As for chats.")


SAME = ResponsesBody.model_fields.keys() & ChatBody.model_fields.keys() - {"tools", "tool_choice"}
"""Fields that a chat has as well, and means the same by."""


def as_chat(body: ResponsesBody) -> ChatBody:
    """The chat that a response is the answer of.

    Raises: InvalidRequest.
    """
    extra = body.model_extra or {}  # what a chat does not know either, it names as ignored
    fields: dict[str, Any] = {k: v for k, v in extra.items() if k not in RESPONSES}
    fields |= {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if extra.get("reasoning"):
        fields["reasoning_effort"] = NO_REASONING
    fields["messages"] = _messages(body)
    if len(fields["messages"]) > MAX_MESSAGES:
        raise InvalidRequest(
            f"input: {len(body.input):,} items besides instructions, above the limit of "
            f"{MAX_MESSAGES - 1:,}",
            param="input",
        )
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    form = body.text.format if body.text is not None else None
    if form is not None:
        fields["response_format"] = {"type": form.type}
        if form.schema_ is not None:
            fields["response_format"]["json_schema"] = {"schema": form.schema_}
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})}
            for tool in body.tools
        ]
    choice = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        fields["tool_choice"] = choice
    if body.text is not None:
        refuse_unsupported(body.text.model_extra or {}, RESPONSES, "text.")
    return parse_body(ChatBody, fields)


def in_its_words(error: InvalidRequest) -> InvalidRequest:
    """An error about the chat, in the names of the response's fields."""
    for pattern, name in CHAT_NAMES.items():
        param, count = re.subn(rf"^{pattern}\b", name, error.param or "")
        if count:
            message = re.sub(rf"\b{pattern}\b", name, error.message)
            return type(error)(message, param=param, code=error.code)
    return error


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        kind = item.get("type") or "message"
        if kind == "message":
            content = _content(item.get("content"), f"input.{i}.content")
            messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            for name, value in (function | {"call_id": item.get("call_id")}).items():
                most = None if name == "arguments" else MAX_NAME_CHARS
                _require_text(value, f"input.{i}.{name}", most)
            call = {"id": item["call_id"], "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
                if len(messages[-1]["tool_calls"]) > MAX_TOOLS:
                    raise InvalidRequest(
                        f"input.{i}: more than {MAX_TOOLS} calls in one turn", param=f"input.{i}"
                    )
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            _require_text(item.get("call_id"), f"input.{i}.call_id", MAX_NAME_CHARS)
            output = _content(item.get("output"), f"input.{i}.output")
            message = {"role": "tool", "tool_call_id": item["call_id"], "content": output}
            messages.append(message)
        else:
            raise InvalidRequest(
                f"input.{i}.type: {shown(kind)} is not supported (message, function_call and "
                "function_call_output are: nothing is stored here; clients that refer to items "
                "send them whole with store: false)",
                param=f"input.{i}.type",
            )
        if messages[-1]["role"] not in ("system", "developer", "user", "assistant", "tool"):
            raise InvalidRequest(
                f"input.{i}.role: must be system, developer, user or assistant, got "
                f"{shown(messages[-1]['role'])}",
                param=f"input.{i}.role",
            )
    return messages


def _content(value: Any, field: str) -> str:
    """Text, or text parts put together. Raises: InvalidRequest."""
    if isinstance(value, list):
        texts = []
        for j, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get("refusal" if kind == "refusal" else "text") if kind else None
            if kind not in (*TEXT_PARTS, "refusal") or not isinstance(text, str):
                raise InvalidRequest(
                    f"{field}.{j}: only text parts are supported, got {shown(part)}",
                    param=f"{field}.{j}",
                )
            texts.append(text)
        return "".join(texts)
    _require_text(value, field)
    return str(value)


def _require_text(value: Any, field: str, most: int | None = None) -> None:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field}: must be text, got {shown(value)}", param=field)
    if most is not None and len(value) > most:
        raise InvalidRequest(f"{field}: has more than {most} characters", param=field)
