"""How models write calls of functions, and how they are told of the functions.

Which format a model has, its chat template says: it is asked to show a call, and what it writes
is compared with the formats that are known here. A template that knows no tools gets them in a
system message of ours, in the form that SmolLM2 was trained with.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quadriga.core.grammar import OPTIONS, Grammar, check_options, json_options, quoted
from quadriga.errors import InvalidRequest

MAX_CALLS = 16
"""In one answer that must call."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way to write calls, between marks.

    Attributes:
        style: What a call is: `object`, a JSON object with the name and the arguments; `named`,
            the name, `[ARGS]` and the arguments in JSON; `tags`, `<function=NAME>` and each
            argument as `<parameter=KEY>`, texts without quotes.
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
    style: Literal["object", "named", "tags"] = "object"

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, which have no text elsewhere."""
        inner = (CALL_ID, ARGS) if self.style == "named" else ()
        return tuple(m.strip() for m in (self.opening, self.closing, *inner) if m.strip())

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_parallel: bool,
        ids: Mapping[str, int],
        instead: Mapping[str, Any] | None = None,
    ) -> Grammar:
        """The form of an answer that is nothing but calls of these functions.

        Args:
            tools: `name` and `parameters` (a JSON schema) of each.
            is_parallel: There may be several calls.
            ids: Marks that are special tokens, with their ids.
            instead: A schema: an answer without calls is JSON that it allows.

        Raises: InvalidRequest: The format cannot hold parameters of such a schema.
        """
        more = MAX_CALLS - 1 if is_parallel else 0
        opening = _mark(self.opening, ids)
        start = f"{opening} {self._calls(more, ids)}"
        if more and not self.is_list:
            between = _mark(self.separator, ids)
            start += f" ({between} {opening} {self._calls(0, ids)}){{0,{more}}}"
        rules = self._rules(tools, ids, beside_json=instead is not None and not self.opening)
        if instead is not None:
            start += " | instead"
            rules.append(f"instead: {_json(instead)}")
        return Grammar("lark", "\n".join([f"start: {start}", *rules]))

    def free_grammar(
        self, tools: Sequence[Mapping[str, Any]], ids: Mapping[str, int]
    ) -> Grammar | None:
        """The form of an answer in which calls fit their schemas, and other text is free.

        Returns:
            None where nothing opens calls, so that they begin like other text.

        Raises: InvalidRequest: As `grammar`.
        """
        name = self.opening.strip()
        if not name:
            return None
        after = self.opening[self.opening.index(name) + len(name) :]
        body = f"{quoted(after) if after else ''} {self._calls(MAX_CALLS - 1, ids)}"
        rules = ["start: called* TEXT", r"TEXT: /(.|\n)*/"]
        if name in ids:
            rules.append(f"called: TEXT <[{ids[name]}]> {body}")
        else:  # lazy: text ends with the first mark
            rules += [f"opened[lazy]: TEXT {quoted(name)}", f"called: opened {body}"]
        return Grammar("lark", "\n".join([*rules, *self._rules(tools, ids)]))

    def _calls(self, more: int, ids: Mapping[str, int]) -> str:
        """What follows an opening mark, up to the closing one, in Lark."""
        closing = _mark(self.closing, ids)
        if not self.is_list:
            return f"call {closing}"
        others = f' (", " call){{0,{more}}}' if more else ""
        return f'"[" call{others} "]" {closing}'

    def _rules(
        self,
        tools: Sequence[Mapping[str, Any]],
        ids: Mapping[str, int],
        *,
        beside_json: bool = False,
    ) -> list[str]:
        """What a call is, in Lark.

        Args:
            beside_json: Other JSON may stand in its place. Then a call is JSON as well, piece by
                piece: the parser has begun a longer piece before it knows that it is another one.
        """
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
        for i, tool in enumerate(tools):
            name, schema = tool["name"], tool["parameters"]
            if self.style == "tags":
                rules += _tag_rules(i, name, schema)
                continue
            if beside_json:
                # `$id` makes its references relative to itself. Draft 7, which ignores it beside a
                # `$ref`, may not be asked for.
                inner = {"$id": "urn:quadriga:arguments"} | dict(schema)
                inner.pop("$schema", None)
                call: dict[str, Any] = {"name": {"const": name}, self.arguments: inner}
                made = {"properties": call, "required": [*call], "additionalProperties": False}
                rules.append(f"call_{i}: {_json({'type': 'object'} | made)}")
                continue
            if self.style == "named":
                rules.append(f"call_{i}: {quoted(name)} {_mark(ARGS, ids)} arguments_{i}")
            else:
                head = f'{{"name": {json.dumps(name)}, "{self.arguments}": '
                rules.append(f'call_{i}: {quoted(head)} arguments_{i} "}}"')
            rules.append(f"arguments_{i}: {_json(schema)}")
        return rules

    def messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """A conversation as the chat template takes it."""
        if self.in_template:
            if self.opening == MISTRAL.opening:
                return [_with_ids(message) for message in messages]
            return [m for message in messages for m in self._one_call_each(message)]
        plain = list[dict[str, Any]]()
        for i, message in enumerate(messages):
            made = self._plain(message)
            # Results of one turn's calls are one turn: some templates have turns alternate.
            if i and message["role"] == messages[i - 1]["role"] == "tool":
                plain[-1]["content"] += f"\n{made['content']}"
            else:
                plain.append(made)
        if tools:
            has_system = bool(plain) and plain[0]["role"] == "system"
            before = f"{plain[0]['content']}\n\n" if has_system else ""
            told = {"role": "system", "content": before + _told(tools)}
            plain = [told, *plain[has_system:]]
        return plain

    def _one_call_each(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A message; as one for each call where the template takes no more than one."""
        calls = list(message.get("tool_calls") or ())
        if self.opening or len(calls) < 2:
            return [dict(message)]
        first = dict(message) | {"tool_calls": [calls[0]]}
        return [first, *(first | {"content": "", "tool_calls": [call]} for call in calls[1:])]

    def _plain(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message without fields that a template which knows no tools would leave out."""
        content = message.get("content") or ""
        if message["role"] == "tool":
            return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        if calls:
            named = [{"name": c["name"], "arguments": c["arguments"]} for c in calls]
            written = json.dumps(named, ensure_ascii=False)
            content = f"{content}{self.opening}{written}{self.closing}"
        others = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id")}
        return others | {"content": content}


ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"

HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", is_list=False)
MISTRAL = ToolFormat("[TOOL_CALLS]", "", is_list=True)
MISTRAL_ARGS = ToolFormat("[TOOL_CALLS]", "", is_list=False, separator="", style="named")
QWEN_TAGS = ToolFormat("<tool_call>\n", "\n</tool_call>", is_list=False, style="tags")
LLAMA = ToolFormat("", "", is_list=False, separator="; ", arguments="parameters")
LISTED = ToolFormat("<tool_call>", "</tool_call>", is_list=True, in_template=False)

PROBE: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "quadriga0",
                "type": "function",
                "function": {"name": "quadriga_probe", "arguments": {"key": "value"}},
            }
        ],
    },
)
"""A conversation whose last message calls a function: how a template writes it is its format."""
_SHOWN = (
    (
        QWEN_TAGS,
        r"<tool_call>\s*<function=quadriga_probe>\s*<parameter=key>\s*value\s*</parameter>",
    ),
    (MISTRAL_ARGS, r"\[TOOL_CALLS\]\s*quadriga_probe(\[CALL_ID\]\w+)?\[ARGS\]\s*\{"),
    (MISTRAL, r'\[TOOL_CALLS\]\s*\[\s*\{\s*"name":\s*"quadriga_probe",\s*"arguments":\s*\{'),
    (HERMES, r'<tool_call>\s*\{\s*"name":\s*"quadriga_probe",\s*"arguments":\s*\{'),
    (LLAMA, r'\{\s*"name":\s*"quadriga_probe",\s*"parameters":\s*\{'),
)


def tool_format(
    template: str, render: Callable[[Sequence[Mapping[str, Any]]], str]
) -> ToolFormat | None:
    """The format that a chat template speaks.

    Args:
        template: Its source.
        render: Makes a conversation into text with it.

    Returns:
        None where it knows tools but writes calls in a way that is not known here.

    Raises: What `render` raises.
    """
    if "tools" not in template:
        return LISTED
    shown = render(PROBE)
    return next((form for form, pattern in _SHOWN if re.search(pattern, shown)), None)


def is_bare_text(schema: Any) -> bool:
    """Whether tags hold a parameter of this schema as text without quotes, whatever it is."""
    notes = {"title", "description", "default", "examples"}
    return (
        isinstance(schema, Mapping)
        and schema.get("type") == "string"
        and not schema.keys() - notes - {"type", "minLength", "maxLength"}
    )


def _tag_rules(i: int, name: str, schema: Mapping[str, Any]) -> list[str]:
    """What a call in tags is, in Lark.

    Raises: InvalidRequest: The schema does not say which parameters there are.
    """
    properties = schema.get("properties") or {}
    held = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    others = schema.keys() - held - {"title", "description", "$schema"}
    if others or not isinstance(properties, Mapping) or any(">" in key for key in properties):
        raise InvalidRequest(
            f"tools: the parameters of {name[:64]!r} cannot be held: this model writes each by "
            "itself, so at the top of a schema there may be properties, required and $defs, not "
            f"{', '.join(sorted(others))[:64] or 'names with >'}; use tool_choice auto, not strict",
            param="tools",
        )
    required, shared = schema.get("required") or (), {}
    for key in ("$defs", "definitions"):
        if key in schema:
            shared[key] = schema[key]
    rules, parts = list[str](), list[str]()
    for j, (key, value) in enumerate(properties.items()):
        if value is False:  # may not be given
            continue
        value = {} if value is True else value
        part = f"parameter_{i}_{j}"
        parts.append(part if key in required else f"{part}?")
        opening = quoted(f"<parameter={key}>\n")
        if is_bare_text(value):
            least, most = value.get("minLength", 0), value.get("maxLength", "")
            rules.append(f"{part}: {opening} text_{i}_{j}")
            rules.append(f"text_{i}_{j}[lazy]: /(.|\\n){{{least},{most}}}/ {quoted(_END)}")
        else:
            rules.append(f"{part}: {opening} value_{i}_{j} {quoted(_END)}")
            rules.append(f"value_{i}_{j}: {_json(shared | value if shared else value)}")
    if not properties and schema.get("additionalProperties", True):
        parts = [f"parameter_{i}*"]
        rules.append(
            f'parameter_{i}: "<parameter=" /[^>\\n]{{1,64}}/ {quoted(">" + chr(10))} text_{i}'
        )
        rules.append(f"text_{i}[lazy]: /(.|\\n)*/ {quoted(_END)}")
    head = quoted(f"<function={name}>\n")
    return [f"call_{i}: {head} {' '.join(parts)} {quoted('</function>')}", *rules]


_END = "\n</parameter>\n"


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


def _json(schema: Mapping[str, Any]) -> str:
    """JSON that a schema allows, in Lark. Raises: InvalidRequest."""
    check_options(schema, "tools")
    options = json_options(json.dumps(schema)) | dict(schema.get(OPTIONS, {}))
    return "%json " + json.dumps(dict(schema) | {OPTIONS: options})


def _mark(mark: str, ids: Mapping[str, int]) -> str:
    """A mark in Lark: a special token by its number, and the blanks beside it as text."""
    name = mark.strip()
    if name not in ids:
        return quoted(mark) if mark else ""
    before, after = mark.split(name)
    parts = [quoted(before) if before else "", f"<[{ids[name]}]>", quoted(after) if after else ""]
    return " ".join(part for part in parts if part)
