"""Calls of functions: how each format writes them, and how they are read out of text in pieces."""

from __future__ import annotations

import json
import random
import time
from contextlib import nullcontext
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.core.grammar import Grammar
from quadriga.text import load_tokenizer
from quadriga.text.grammar import grammars_of
from quadriga.text.tool_formats import (
    HERMES,
    LISTED,
    LLAMA,
    MAX_CALLS,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_TAGS,
    ToolFormat,
)
from quadriga.text.tool_parser import ToolParser

CHECKPOINT = read_checkpoint("quadriga-s")
TEXT = load_tokenizer(CHECKPOINT.path, CHECKPOINT.id)
NAMES: dict[str, dict[str, Any]] = {"get_weather": {}, "add": {}}
ROME = ("get_weather", '{"city": "Rome \\"x\\" {", "days": [1, 2]}')
TWO = ("add", "{}")
FORMS = [HERMES, MISTRAL, LLAMA, LISTED]


def written(form: ToolFormat, calls: list[tuple[str, str]]) -> str:
    """Calls as a model writes them."""
    key = form.arguments
    parts = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if form.is_list:
        return f"{form.opening}[{', '.join(parts)}]{form.closing}"
    return form.separator.join(f"{form.opening}{part}{form.closing}" for part in parts)


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


def read(
    form: ToolFormat, pieces: list[str], tools: dict[str, dict[str, Any]] = NAMES
) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls, put together from what each piece brought."""
    parser = ToolParser(form, tools)
    text, calls = "", list[list[str]]()
    for news in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        text += news.text
        for call in news.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    assert parser.num_calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("calls", [[ROME], [TWO], [ROME, TWO], [TWO, TWO, ROME]])
def test_calls_are_read_however_the_text_is_cut(
    form: ToolFormat, calls: list[tuple[str, str]]
) -> None:
    text = written(form, calls)
    for size in (1, 2, 3, 7, len(text)):
        for said in (text, text.replace("\n", "\r\n")):
            assert read(form, cut(said, size)) == ("", calls), size


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LISTED])
def test_text_before_calls_is_text(form: ToolFormat) -> None:
    text = "Let me look. <b>[a]\n" + written(form, [ROME])
    for size in (1, 4, len(text)):
        pieces = cut(text, size)
        shown, calls = read(form, pieces)
        assert shown.strip() == "Let me look. <b>[a]"
        assert calls == [ROME]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "text",
    [
        "Just words.",
        "",
        "a <tool",
        "[TOOL_CAL",
        '{"name": "nobody", "arguments": {}, "parameters": {}}',
        '{"a": 1} and more',
        '{"name": 5, "arguments": {}}',
        "1 < 2 [x] {y}",
        '{"a": "' + "b" * 5000,
    ],
)
def test_what_only_looks_like_a_call_is_text(form: ToolFormat, text: str) -> None:
    for size in (1, 5, max(1, len(text))):
        pieces = cut(text, size)
        assert read(form, pieces) == (text, [])


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[",
    "]",
    ", ",
    "; ",
    " ",
    "\n",
    "{",
    "}",
    "words",
    "<tool",
    '{"name": "nobody", "arguments": {"a": [1]}}',
    '{"a": [1]}',
    '{"name": "add", "arguments": {"a": "x "} }',
    '{"name": "add", "parameters": }',
    "add[ARGS]{}",
    "nobody[ARGS]{}",
    '{"name": "add", "arguments": {}, "name": "nobody"}',
    '{"arguments": {}, "name": "add"}',
    '{"name": "add", "arguments": {"a": 1}, 5: 6',
    "<function=add>",
    "</function>",
    "<function=no>",
    "<parameter=a>\n1\n</parameter>",
    "add[CALL_ID]abc[ARGS]{",
    "b" * 5000,
]


@pytest.mark.parametrize("form", [*FORMS, MISTRAL_ARGS, QWEN_TAGS])
def test_how_an_answer_is_cut_changes_nothing_and_loses_no_text(form: ToolFormat) -> None:
    rng, num_called = random.Random(9), 0
    other = {
        MISTRAL_ARGS: "[TOOL_CALLS]add[ARGS]{}",
        QWEN_TAGS: "<tool_call>\n<function=add>\n</function>\n</tool_call>",
    }
    good = other.get(form) or written(form, [TWO])
    for _ in range(300):
        parts = rng.choices([*FRAGMENTS[:-1], *[good, form.opening] * 4], k=rng.randint(1, 9))
        if rng.random() < 0.02:
            parts.insert(rng.randint(0, len(parts)), FRAGMENTS[-1])
        text = "".join(parts)[: rng.randint(1, 8000)]
        shown, calls = whole = read(form, [text])
        assert calls or shown == text
        num_called += bool(calls)
        for size in (1, 2, rng.randint(3, 20)):
            assert read(form, cut(text, size)) == whole, (text, size)
    assert num_called > 50


@pytest.mark.parametrize(
    ("form", "behind"),
    [
        (LISTED, 'See <tool_call>[{"name": "nope", "arguments": {}}] and'),
        (LISTED, ' or\n <tool_call>[ {"name": "nope", "arguments": {}}]</tool_call> more'),
        (HERMES, '\n<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'),
        (MISTRAL, " words"),
        (LLAMA, ' {"a": [1]}'),
    ],
)
def test_what_stands_behind_a_call_and_is_none_is_text(form: ToolFormat, behind: str) -> None:
    for before, calls in (("", []), (written(form, [ROME]), [ROME])):
        for size in (1, 5, 500):
            shown, found = read(form, cut(before + behind, size))
            assert found == calls
            assert shown == behind, size


def test_a_mark_without_a_call_is_text() -> None:
    assert read(LISTED, ["<tool_call>", "hello</tool_call>"]) == (
        "<tool_call>hello</tool_call>",
        [],
    )


@pytest.mark.parametrize("form", [*FORMS, MISTRAL_ARGS, QWEN_TAGS])
def test_an_answer_is_cut_where_its_last_calls_arguments_are_no_json(form: ToolFormat) -> None:
    add = '{"a": [1, "}"], "b": {}}'
    text = {
        "object": written(form, [("add", add), TWO]),
        "named": f"{form.opening}add[ARGS]{add}{form.opening}add[ARGS]{{}}",
        "tags": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n",
    }[form.style]
    for end in range(len(text) + 1):
        parser = ToolParser(form, NAMES)
        news = parser.push(text[:end]).calls
        parser.flush()
        last = [c.arguments for c in news if c.index == parser.num_calls - 1] or ["{}"]
        with pytest.raises(json.JSONDecodeError) if parser.is_cut else nullcontext():
            json.loads("".join(last))


def test_arguments_come_as_they_are_written_and_a_cut_call_stays_cut() -> None:
    parser = ToolParser(HERMES, NAMES)
    seen = [parser.push(char).calls for char in '<tool_call>\n{"name": "add", "arguments": {"a": 1']
    assert "".join(c.arguments for calls in seen for c in calls) == '{"a": 1'
    assert not parser.flush().text


@pytest.mark.parametrize("form", FORMS)
def test_a_call_without_its_last_brace_ends_behind_its_arguments(form: ToolFormat) -> None:
    calls = [("add", '{"a": 1}'), ("add", '{"a": 2}')]
    whole = written(form, calls) + "\nIt is 3."
    for text in (whole.replace("1}}", "1}"), whole.replace("}}", "}"), whole.replace("}}", "},")):
        for size in (1, 2, 3, 7, len(text)):
            shown, found = read(form, cut(text, size))
            assert (shown.strip(), found) == ("It is 3.", calls), (text, size)


def test_long_arguments_take_time_by_their_length() -> None:
    began_s = time.thread_time()
    read(HERMES, [written(HERMES, [("add", f'{{"a": "{"b" * 500_000}"}}')])])
    assert time.thread_time() - began_s < 3.0


@pytest.mark.parametrize(("form", "key"), [(HERMES, "parameters"), (LLAMA, "arguments")])
def test_arguments_may_have_the_other_forms_key(form: ToolFormat, key: str) -> None:
    text = f'{form.opening}{{"name": "add", "{key}": {{"a": 1}}}}{form.closing}'
    assert read(form, list(text)) == ("", [("add", '{"a": 1}')])


def test_arguments_may_come_before_the_name() -> None:
    text = '<tool_call>\n{"arguments": {"name": "x"}, "name": "add"}\n</tool_call>'
    assert read(HERMES, list(text)) == ("", [("add", '{"name": "x"}')])


WEATHER: dict[str, Any] = {
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "get_weather", "parameters": WEATHER},
    {"name": "add", "parameters": {"type": "object", "additionalProperties": False}},
]


OBJECT = {"type": "object", "properties": {"a": True, "name": {}}, "additionalProperties": False}


def allows(grammar: Grammar, token_ids: list[int]) -> bool:
    """Whether a grammar allows tokens, and an end behind them."""
    matcher = grammars_of(CHECKPOINT).matcher(grammar)
    for i, token_id in enumerate([*token_ids, CHECKPOINT.eos_token_ids[0]]):
        if matcher.banned_after(token_ids[:i])[token_id]:
            return False
    return True


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_an_answer_that_must_call_can_only_be_calls(form: ToolFormat, is_parallel: bool) -> None:
    grammar = form.grammar(TOOLS, is_parallel=is_parallel, ids={})
    grammars_of(CHECKPOINT).prepare(grammar)
    good = ("get_weather", '{"city": "Rome", "unit": "C"}')

    def is_allowed(*calls: tuple[str, str]) -> bool:
        text = written(form, list(calls))
        assert read(form, [text])[1] == list(calls)
        return allows(grammar, TEXT.encode(text, add_special_tokens=False))

    assert is_allowed(good)
    assert is_allowed(TWO)
    assert is_allowed(good, TWO) is is_parallel
    assert is_allowed(*[TWO] * MAX_CALLS) is is_parallel
    assert not is_allowed(*[TWO] * (MAX_CALLS + 1))
    assert not is_allowed(("get_weather", '{"city": "Rome", "unit": "K"}'))
    assert not allows(grammar, TEXT.encode("words", add_special_tokens=False))
    jsonschema.validate(json.loads(good[1]), WEATHER)


@pytest.mark.parametrize("named", ["#/$defs/m", "#/properties/n", "#/shared/n", "#", "zod"])
def test_references_of_a_tools_parameters_hold_beside_a_form(named: str) -> None:
    number = {"type": "integer"}
    schema = OBJECT | {
        "properties": {"n": number, "m": {"$ref": named}},
        "$defs": {"m": {"anyOf": [{"$ref": "#/shared/n"}]}},
        "shared": {"n": number},
    }
    if named == "zod":  # as its converter writes a schema that has a name
        schema = {"definitions": {"one": OBJECT | {"properties": {"m": number}}}}
        schema |= {
            "$ref": "#/definitions/one",
            "$schema": "http://json-schema.org/draft-07/schema#",
        }
    tools = [{"name": "add", "parameters": schema}]
    both = LLAMA.grammar(tools, is_parallel=True, ids={}, instead=OBJECT)
    grammars_of(CHECKPOINT).prepare(both)
    for value, is_wanted in (('{"m": {"n": 1}}' if named == "#" else "1", True), ('"x"', False)):
        call = f'{{"name": "add", "parameters": {{"m": {value}}}}}'
        assert allows(both, TEXT.encode(call, add_special_tokens=False)) is is_wanted


@pytest.mark.parametrize("form", [*FORMS, MISTRAL_ARGS, QWEN_TAGS])
def test_an_answer_that_may_be_json_instead_is_either(form: ToolFormat) -> None:
    calls = form.grammar(TOOLS, is_parallel=True, ids={})
    both = form.grammar(TOOLS, is_parallel=True, ids={}, instead={"required": ["a"]} | OBJECT)
    grammars_of(CHECKPOINT).prepare(both)

    def is_allowed(grammar: Grammar, text: str) -> bool:
        return allows(grammar, TEXT.encode(text, add_special_tokens=False))

    call = {
        "named": f"{form.opening}add[ARGS]{{}}",
        "tags": f"{form.opening}<function=add>\n</function>{form.closing}",
        "object": written(form, [TWO]),
    }[form.style]
    assert is_allowed(calls, call)
    assert is_allowed(both, call)
    answer = '{"a": [1], "name": "get_w"}'
    assert is_allowed(both, answer)
    assert not is_allowed(calls, answer)
    assert read(form, [answer]) == (answer, [])
    if form.style == "object":
        assert is_allowed(both, written(form, [("get_weather", '{"city": "Rome", "unit": "C"}')]))
        assert not is_allowed(both, written(form, [("get_weather", '{"city": "Rome"}')]))
    for text in ("{}", "words", f'{{"a": 1}}{call}', f'{call}{{"a": 1}}'):
        assert not is_allowed(both, text)


@pytest.mark.parametrize("form", [HERMES, LISTED, MISTRAL])
def test_a_free_answer_is_text_with_calls_that_fit(form: ToolFormat) -> None:
    grammar = form.free_grammar(TOOLS, {})
    assert grammar is not None
    grammars_of(CHECKPOINT).prepare(grammar)
    good = written(form, [("get_weather", '{"city": "Rome", "unit": "C"}')])

    def is_allowed(text: str) -> bool:
        return allows(grammar, TEXT.encode(text, add_special_tokens=False))

    assert is_allowed("Just words. 1 < 2 [x]\n{y}")
    assert is_allowed(good)
    assert is_allowed(f"Let me look.\n{good}")
    assert is_allowed(written(form, [TWO, TWO]))
    assert not is_allowed(good.replace('"C"', '"K"'))
    assert not is_allowed(good.replace("get_weather", "nobody"))
    assert not is_allowed(f"Let me look.\n{good[:-8]}")
    assert LLAMA.free_grammar(TOOLS, {}) is None


def test_marks_that_are_special_tokens_are_said_and_shown_as_such() -> None:
    mark = 5
    grammar = MISTRAL.grammar(TOOLS, is_parallel=True, ids={"[TOOL_CALLS]": mark})
    grammars_of(CHECKPOINT).prepare(grammar)
    rest = TEXT.encode('[{"name": "add", "arguments": {}}]', add_special_tokens=False)
    assert allows(grammar, [mark, *rest])
    assert not allows(grammar, TEXT.encode("[TOOL_CALLS]", add_special_tokens=False) + rest)
    free = MISTRAL.free_grammar(TOOLS, {"[TOOL_CALLS]": mark})
    assert free is not None
    assert allows(free, [*TEXT.encode("a b", add_special_tokens=False), mark, *rest])
    assert not allows(free, [mark, *rest[:-1]])
    shown = TEXT.detokenizer({mark: "[TOOL_CALLS]"})
    text = "".join(shown.push(t) for t in [mark, *rest]) + shown.flush()
    assert read(MISTRAL, [text]) == ("", [("add", "{}")])


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
            }
        ],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
]
TOLD = [{"type": "function", "function": TOOLS[0]}]


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    messages = LISTED.messages(CHAT, TOLD)
    assert LISTED.messages([*CHAT[:2], CHAT[2] | {"content": None}, *CHAT[3:]], TOLD) == messages
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"].startswith("Be short.\n\n")
    assert '"get_weather"' in messages[0]["content"]
    assert read(LISTED, [messages[2]["content"]]) == ("", [("get_weather", '{"city": "Zürich"}')])
    assert "rain" in messages[3]["content"]
    assert LISTED.messages(CHAT[1:2], TOLD)[0]["role"] == "system"
    assert LISTED.messages(CHAT[1:2], ()) == CHAT[1:2]


def test_ids_in_mistrals_templates_have_nine_characters() -> None:
    messages = MISTRAL.messages(CHAT, TOLD)
    name = messages[2]["tool_calls"][0]["id"]
    assert len(name) == 9
    assert messages[3]["tool_call_id"] == name
    assert HERMES.messages(CHAT, TOLD) == CHAT
