"""How models write calls of functions, and how they are told of the functions.

Which format a model has, its chat template says: Hermes' tags (Qwen 2 and 3 and many others),
Mistral's, Llama 3's. A template that knows no tools gets them in a system message of ours, in the
form that SmolLM2 was trained with.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quadriga.core.grammar import WHITESPACE, Grammar

MAX_CALLS = 16
"""In one answer that must call."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls: JSON objects between marks.

    Attributes:
        opening, closing: What stands around the calls. Where `opening` is empty, an answer that
            begins with a brace is calls.
        is_list: The calls are a JSON array between one pair of marks; else each has its own pair.
        separator: Between two calls that are not in a list.
        arguments: The field of a call that has them.
        in_template: The chat template shows tools and calls; else we do.
    """

    opening: str
    closing: str
    is_list: bool
    separator: str = "\n"
    arguments: str = "arguments"
    in_template: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which have no text elsewhere."""
        return tuple(mark.strip() for mark in (self.opening, self.closing) if mark.strip())

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], *, is_parallel: bool, ids: Mapping[str, int]
    ) -> Grammar:
        """The form of an answer that is nothing but calls of these functions.

        Args:
            tools: `name` and `parameters` (a JSON schema) of each.
            is_parallel: There may be several calls.
            ids: Marks that are special tokens, with their ids.
        """
        more = MAX_CALLS - 1 if is_parallel else 0
        opening = _mark(self.opening, ids)
        start = f"{opening} {self._calls(more, ids)}"
        if more and not self.is_list:
            start += f" ({_quote(self.separator)} {opening} {self._calls(0, ids)}){{0,{more}}}"
        return Grammar("lark", "\n".join([f"start: {start}", *self._rules(tools)]))

    def free_grammar(
        self, tools: Sequence[Mapping[str, Any]], ids: Mapping[str, int]
    ) -> Grammar | None:
        """The form of an answer in which calls fit their schemas, and other text is free.

        Returns:
            None where nothing opens calls, so that they begin like other text.
        """
        name = self.opening.strip()
        if not name:
            return None
        after = self.opening[self.opening.index(name) + len(name) :]
        body = f"{_quote(after) if after else ''} {self._calls(MAX_CALLS - 1, ids)}"
        rules = ["start: called* TEXT", r"TEXT: /(.|\n)*/"]
        if name in ids:
            rules.append(f"called: TEXT <[{ids[name]}]> {body}")
        else:  # lazy: text ends with the first mark
            rules += [f"opened[lazy]: TEXT {_quote(name)}", f"called: opened {body}"]
        return Grammar("lark", "\n".join([*rules, *self._rules(tools)]))

    def _calls(self, more: int, ids: Mapping[str, int]) -> str:
        """What follows an opening mark, up to the closing one, in Lark."""
        closing = _mark(self.closing, ids)
        if not self.is_list:
            return f"call {closing}"
        others = f' (", " call){{0,{more}}}' if more else ""
        return f'"[" call{others} "]" {closing}'

    def _rules(self, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """What a call is, in Lark."""
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
        for i, tool in enumerate(tools):
            head = f'{{"name": {json.dumps(tool["name"])}, "{self.arguments}": '
            rules.append(f'call_{i}: {_quote(head)} arguments_{i} "}}"')
            schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}} | dict(tool["parameters"])
            rules.append(f"arguments_{i}: %json {json.dumps(schema)}")
        return rules

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """A conversation as the chat template takes it."""
        if self.in_template:
            return [_with_ids(m) if self == MISTRAL else dict(m) for m in messages]
        plain = [self._plain(message) for message in messages]
        if tools:
            has_system = bool(plain) and plain[0]["role"] == "system"
            before = f"{plain[0]['content']}\n\n" if has_system else ""
            told = {"role": "system", "content": before + _told(tools)}
            plain = [told, *plain[has_system:]]
        return plain

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message without fields that a template which knows no tools would leave out."""
        content = message["content"]
        if message["role"] == "tool":
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if calls:
            written = json.dumps([{"name": c["name"], "arguments": c["arguments"]} for c in calls])
            content = f"{content}{self.opening}{written}{self.closing}"
        return {"role": message["role"], "content": content} | (
            {"name": message["name"]} if "name" in message else {}
        )


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", is_list=False)
MISTRAL = ToolFormat("[TOOL_CALLS]", "", is_list=True)
LLAMA = ToolFormat("", "", is_list=False, separator="; ", arguments="parameters")
LISTED = ToolFormat("<tool_call>", "</tool_call>", is_list=True, in_template=False)


def tool_format(template: str) -> ToolFormat:
    """The format that a chat template speaks."""
    if "tools" not in template:
        return LISTED
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    return LLAMA


def _told(tools: Sequence[Mapping[str, Any]]) -> str:
    """The system message of models whose template knows no tools."""
    shown = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return (
        "You can call functions. The functions, in JSON:\n"
        f"<tools>{shown}</tools>\n"
        "To call some, answer with nothing but a JSON list of the calls, in this form:\n"
        '<tool_call>[{"name": "FUNCTION", "arguments": {"PARAMETER": VALUE}}]</tool_call>\n'
        "If none of them helps, answer the user in words."
    )


def _with_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """With ids as Mistral's templates want them: nine letters and digits."""
    made = dict(message)
    if made.get("tool_call_id"):
        made["tool_call_id"] = _short_id(made["tool_call_id"])
    if made.get("tool_calls"):
        made["tool_calls"] = [c | {"id": _short_id(c["id"])} for c in made["tool_calls"]]
    return made


def _short_id(name: str) -> str:
    if re.fullmatch("[a-zA-Z0-9]{9}", name):
        return name
    return hashlib.sha256(name.encode()).hexdigest()[:9]


def _quote(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _mark(mark: str, ids: Mapping[str, int]) -> str:
    """A mark in Lark: a special token by its number, and the blanks beside it as text."""
    name = mark.strip()
    if name not in ids:
        return _quote(mark) if mark else ""
    before, after = mark.split(name)
    parts = [_quote(before) if before else "", f"<[{ids[name]}]>", _quote(after) if after else ""]
    return " ".join(part for part in parts if part)
