"""The tools of a chat: what the model is told of them, what it must answer, how that is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from quadriga.core.grammar import MAX_GRAMMAR_BYTES, Grammar, check_options
from quadriga.errors import InvalidRequest
from quadriga.text.tool_formats import ToolFormat
from quadriga.text.tool_parser import ToolCalling
from serve_app.openai.bodies import json_size, shown
from serve_app.openai.models import ServedModel
from serve_app.openai.schema import ChatBody, NamedToolChoice, ToolBody

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_PARAMETERS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of one request.

    Attributes:
        told: What the chat template is told, in OpenAI's form.
        calling: How the answer is read; None where no tool may be called.
        grammar: The form of an answer that must call, or that may call strict tools; else None.
        or_json: The form of an answer that calls, or, where it need not, is JSON of a schema.
    """

    told: tuple[dict[str, Any], ...] = ()
    calling: ToolCalling | None = None
    grammar: Grammar | None = None
    or_json: Callable[[Mapping[str, Any]], Grammar] | None = None


NO_TOOLS = ChatTools()


def read_tools(body: ChatBody, model: ServedModel) -> ChatTools:
    """Check the tools and the choice of a chat.

    Raises: InvalidRequest.
    """
    tools, choice = body.tools or [], body.tool_choice
    if not tools or choice == "none":
        _check(tools)
        _forced(tools, choice)
        return NO_TOOLS
    told, form = tell_tools(tools, model)
    forced = _forced(tools, choice)
    ids = model.tokenizer.special_ids(form.marks)
    marks = {token_id: text for text, token_id in ids.items()}
    parameters = {
        t.function.name: (t.function.parameters or NO_PARAMETERS) | ANY_PARAMETERS for t in tools
    }
    wanted = [
        {"name": name, "parameters": parameters[name] if forced or strict else ANY_PARAMETERS}
        for name, strict in ((t.function.name, t.function.strict) for t in forced or tools)
    ]
    most = 1 if body.parallel_tool_calls is False else math.inf
    is_parallel = most > 1 and not isinstance(choice, NamedToolChoice)
    calls = partial(form.grammar, wanted, is_parallel=is_parallel, ids=ids)
    grammar = None
    if forced:
        grammar = calls()
    elif any(tool.function.strict for tool in tools):
        grammar = form.free_grammar(wanted, ids)

    def or_json(schema: Mapping[str, Any]) -> Grammar:
        return calls(instead=None if forced else schema)

    calling = ToolCalling(form, parameters, marks, most)
    return ChatTools(told, calling, grammar, or_json)


def tell_tools(
    tools: list[ToolBody], model: ServedModel
) -> tuple[tuple[dict[str, Any], ...], ToolFormat]:
    """What the chat template is told of some tools, and how its model calls them.

    Raises: InvalidRequest: A tool is none, or the template's form of calls is not known.
    """
    _check(tools)
    form = model.tokenizer.tool_format
    if form is None:
        raise InvalidRequest(
            f"tools: the chat template of {model.tokenizer.model_id!r} writes calls in a form that "
            "is not known here (docs/clients.md lists those that are); ask without tools, or give "
            "the checkpoint a chat template of a known form",
            param="tools",
        )
    return tuple(_told(tool) for tool in tools), form


def _check(tools: list[ToolBody]) -> None:
    """Raises: InvalidRequest: A name stands twice, parameters are no schema, or all too long."""
    seen: dict[str, int] = {}
    for i, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            raise InvalidRequest(
                f"tools.{i}.function.name: {shown(name)} is the name of tools.{seen[name]} as "
                "well; give each tool a name of its own",
                param=f"tools.{i}.function.name",
            )
        seen[name] = i
        schema, field = tool.function.parameters or {}, f"tools.{i}.function.parameters"
        check_options(schema, field)
        types = schema.get("type", "object")
        if types != "object" and not (isinstance(types, list) and "object" in types):
            raise InvalidRequest(
                f"{field}.type: must be object, as arguments are, got {shown(schema['type'])}",
                param=f"{field}.type",
            )
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, dict) or not all(
            isinstance(value, dict | bool) for value in properties.values()
        ):
            raise InvalidRequest(
                f"{field}.properties: must be an object of schemas, got {shown(properties)}",
                param=f"{field}.properties",
            )
        if not isinstance(required, list) or not all(isinstance(n, str) for n in required):
            raise InvalidRequest(
                f"{field}.required: must be a list of names, got {shown(required)}",
                param=f"{field}.required",
            )
    size = sum(json_size(tool.function.parameters, "tools") for tool in tools)
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"tools: the parameters have {size:,} bytes together, above the limit of "
            f"{MAX_GRAMMAR_BYTES:,}; send fewer, or smaller ones",
            param="tools",
        )


def _forced(tools: list[ToolBody], choice: Any) -> list[ToolBody]:
    """The tools of which one must be called; none where none must be.

    Raises: InvalidRequest: The choice names none of the tools.
    """
    if choice in (None, "none", "auto"):
        return []
    if not tools:
        raise InvalidRequest("tool_choice: needs tools", param="tool_choice")
    if choice == "required":
        return tools
    name = choice.function.name
    found = [tool for tool in tools if tool.function.name == name]
    if not found:
        names = ", ".join(tool.function.name for tool in tools[:8])
        raise InvalidRequest(
            f"tool_choice.function.name: {shown(name)} is not among the tools ({names})",
            param="tool_choice.function.name",
        )
    return found


def _told(tool: ToolBody) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    function["description"] = tool.function.description or ""
    function["parameters"] = tool.function.parameters or NO_PARAMETERS
    return {"type": "function", "function": function}
