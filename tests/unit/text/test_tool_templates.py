"""Templates in the layouts of published models: which format each has, and that what a template
writes of a call is what Quadriga reads, forces and refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.core.grammar import Grammar
from quadriga.errors import InvalidRequest
from quadriga.text.grammar import grammars_of
from quadriga.text.tokenizer import TextTokenizer
from quadriga.text.tool_formats import (
    HERMES,
    LISTED,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_TAGS,
    ToolFormat,
)
from quadriga.text.tool_parser import ToolParser
from serve_app.openai.models import ServedModel
from serve_app.openai.schema import ChatBody
from serve_app.openai.tools import read_tools
from serve_app.openai.validation import plain_messages
from tests.unit.text import test_tools
from tests.unit.text import tool_templates as templates

CHECKPOINT = read_checkpoint("quadriga-s")
FORMS: dict[str, ToolFormat] = {
    "QWEN": HERMES,
    "QWEN_CODER": QWEN_TAGS,
    "LLAMA": LLAMA,
    "MISTRAL": MISTRAL,
    "MISTRAL_CALL_ID": MISTRAL_ARGS,
    "MISTRAL_ARGS": MISTRAL_ARGS,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 3},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"day": {"type": "integer"}},
    },
    "wait": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
    for name, schema in PARAMETERS.items()
]
ROME = {"city": "Rome\n<b> {", "days": [1, 22], "unit": "C"}


def tokenizer(template: str | dict[str, str]) -> TextTokenizer:
    """The bundled model's, with another chat template."""
    backend = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT.path)
    backend.chat_template = template
    return TextTokenizer(backend, "named")


def called(*calls: tuple[str, dict[str, Any]], content: str = "") -> dict[str, Any]:
    """An assistant's message with calls."""
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(calls)
        ],
    }


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """What a template writes of calls: its text with them, less what stands around."""
    text = tokenizer(getattr(templates, name))
    ask = {"role": "user", "content": "Ask."}
    before = text.render_chat([ask, {"role": "assistant", "content": "|||"}]).partition("|||")
    whole = text.render_chat([ask, called(*calls)])
    shown = whole[len(before[0].rstrip(" ")) : len(whole) - len(before[2])]
    return shown.strip()


def read(form: ToolFormat, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    return test_tools.read(form, test_tools.cut(text, size), PARAMETERS)


@pytest.mark.parametrize("name", FORMS)
def test_a_template_shows_its_format(name: str) -> None:
    assert tokenizer(getattr(templates, name)).tool_format is FORMS[name]


def test_a_template_for_tools_is_taken_where_a_checkpoint_has_several() -> None:
    both = {"default": "{{ messages[0].content }}", "tool_use": templates.QWEN}
    assert tokenizer(both).tool_format is HERMES
    assert tokenizer("{{ messages[0].content }}").tool_format is LISTED


@pytest.mark.parametrize(
    "calls", [[("get_weather", ROME)], [("get_weather", ROME), ("wait", {}), ("wait", {})]]
)
@pytest.mark.parametrize("name", FORMS)
def test_what_a_template_writes_of_calls_is_read_as_these_calls(
    name: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    if name == "LLAMA":  # a message each; an answer has them one behind the other
        text = "; ".join(written(name, call) for call in calls)
    else:
        text = written(name, *calls)
    assert text
    for size in (1, 2, 3, 7, len(text)):
        shown, found = read(FORMS[name], text, size)
        assert not shown.strip(), size
        assert [(n, json.loads(a)) for n, a in found] == calls, size


@pytest.mark.parametrize("name", FORMS)
def test_a_conversation_with_tools_and_results_is_rendered(name: str) -> None:
    text = tokenizer(getattr(templates, name))
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        called(("get_weather", ROME), ("wait", {})),
        {"role": "tool", "content": '"rain"', "tool_call_id": "call_0"},
        {"role": "tool", "content": '"done"', "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "And now?"},
    ]
    shown = text.render_chat(talk, TOOLS)
    places = [shown.index(part) for part in ("Weather?", "Rome", "rain", "It rains.", "And now?")]
    assert places == sorted(places)
    assert "get_weather" in shown
    assert "days" in shown


@pytest.mark.parametrize("arguments", ["", " ", "{}"])
def test_a_call_in_a_conversation_may_have_empty_arguments(arguments: str) -> None:
    call = {"id": "1", "function": {"name": "wait", "arguments": arguments}}
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    messages = plain_messages(ChatBody.model_validate({"messages": talk}).messages)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert "<function=wait>" in tokenizer(templates.QWEN_CODER).render_chat(messages)


@pytest.mark.parametrize("name", FORMS)
def test_a_conversation_without_tools_is_as_the_template_alone_writes_it(name: str) -> None:
    text, talk = tokenizer(getattr(templates, name)), [{"role": "user", "content": "Hi"}]
    alone = text._fast.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text.render_chat(talk) == text.render_chat(talk, []) == alone


def test_a_client_sets_variables_of_the_template_and_nothing_else() -> None:
    """The template itself among them: who writes it runs a program here."""
    text = tokenizer(
        "{% for m in messages %}<{{ m.reasoning_content }}>{{ m.content }}{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    message = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    talk = plain_messages(ChatBody.model_validate({"messages": [message]}).messages)
    off = {"enable_thinking": False, "unknown": [1]}
    assert text.render_chat(talk, (), off) == "<why>x<think></think>"
    assert text.render_chat(talk) == "<why>x"
    with pytest.raises(InvalidRequest, match="refuses chat_template_kwargs or the messages"):
        tokenizer("{{ 8 // budget }}").render_chat(talk, (), {"budget": 0})
    for name in ("chat_template", "messages", "tokenize", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidRequest) as caught:
            text.render_chat(talk, (), {name: "{{ 1 }}"})
        assert caught.value.param == f"chat_template_kwargs.{name}"


def test_results_stand_in_one_turn_where_a_template_wants_turns_to_alternate() -> None:
    alternates = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{% endfor %}"
    )
    results = [{"role": "tool", "content": text} for text in ("rain", "done")]
    calls = called(("get_weather", ROME), ("wait", {}))
    end = {"role": "assistant", "content": "It rains."}
    talk = [{"role": "user", "content": "Weather?"}, calls, *results, end]
    shown = tokenizer(alternates).render_chat(talk)
    told = "<tool_response>\nrain\n</tool_response>\n<tool_response>\ndone\n</tool_response>"
    assert shown.endswith(f"[user]{told}[assistant]It rains.")


def test_a_streamed_argument_in_tags_comes_when_it_ends() -> None:
    parser = ToolParser(QWEN_TAGS, PARAMETERS)
    text = written("QWEN_CODER", ("get_weather", ROME))
    head, _, rest = text.partition("</parameter>")
    news = parser.push(head).calls
    assert [(c.name, c.arguments) for c in news] == [("get_weather", "")]
    news = parser.push("</parameter>").calls
    assert json.loads(news[0].arguments + "}") == {"city": ROME["city"]}
    parser.push(rest)
    assert parser.num_calls == 1
    assert not parser.flush().text


@pytest.mark.parametrize(
    ("said", "arguments"),
    [("<parameter=city>\nRome\n</parameter>\n", {"city": "Rome"}), ("<parameter=city>\n", {})],
)
def test_a_call_in_tags_without_its_end_has_whole_arguments(
    said: str, arguments: dict[str, str]
) -> None:
    text = f"<tool_call>\n<function=get_weather>\n{said}</tool_call>\n" * 2 + "It rains."
    for size in (1, 2, 7, len(text)):
        shown, found = read(QWEN_TAGS, text, size)
        assert shown.strip() == "It rains."
        assert [(n, json.loads(a)) for n, a in found] == [("get_weather", arguments)] * 2, size


TEXTS = ["5", '"5"', "", "[", "null", "a\n"]


@pytest.mark.parametrize(
    ("name", "written_value", "value"),
    [("city", text, text) for text in TEXTS]
    + [("days", "[1, 2]", [1, 2])]
    + [("days", text, text) for text in ("NaN", "words", "[" * 9000)],
)
def test_texts_in_tags_stand_as_they_are_and_other_values_are_json_where_they_can_be(
    name: str, written_value: str, value: Any
) -> None:
    text = f"<tool_call>\n<function=get_weather>\n<parameter={name}>\n{written_value}\n</parameter>"
    _, calls = read(QWEN_TAGS, text + "\n</function>\n</tool_call>", 1 if name == "city" else 5000)
    assert json.loads(calls[0][1]) == {name: value}


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"type": "boolean"}, {"True": True, "false": False, "maybe": "maybe"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"12345": "12345", "None": None}),
        ({"type": ["string", "null"]}, {"12": "12", "null": None, "True": "True"}),
        ({"enum": ["1", "None"]}, {"1": "1", '"1"': "1", "None": "None"}),
        ({"const": 1}, {"1": 1}),
        ({"type": ["number", "string"]}, {"1": 1, "1.5": 1.5, "[1]": "[1]"}),
        ({"anyOf": [{"$ref": "#"}, {"type": "string"}]}, {"[1]": [1], "None": "None"}),
    ],
)
def test_a_value_in_tags_has_a_type_of_its_schema(schema: Any, values: dict[str, Any]) -> None:
    for said, value in values.items():
        text = f"<tool_call>\n<function=f>\n<parameter=a>\n{said}\n</parameter>\n</function>"
        for size in (1, len(text)):
            parser = ToolParser(QWEN_TAGS, {"f": {"properties": {"a": schema}}})
            news = [parser.push(piece) for piece in test_tools.cut(text, size)]
            found = json.loads("".join(call.arguments for n in news for call in n.calls))
            assert repr(found) == repr({"a": value})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (MISTRAL_ARGS, "[TOOL_CALLS]nobody[ARGS]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]wait[ARGS]5"),
        (MISTRAL_ARGS, "[TOOL_CALLS]some words"),
        (MISTRAL_ARGS, "[TOOL_CALLS][ARGS]{}"),
        (MISTRAL_ARGS, "[TOOL_CALLS]wait"),
        (QWEN_TAGS, "<tool_call>\n<function=nobody>\n</function>\n</tool_call>"),
        (QWEN_TAGS, "<tool_call>\nwords</tool_call>"),
        (QWEN_TAGS, "<tool_call>\n<func"),
        (QWEN_TAGS, "<tool_call>\n<function=wait> hi there"),
        (MISTRAL_ARGS, "[TOOL_CALLS]" + "a" * 300),
        (QWEN_TAGS, '<tool_call>\n{"name": "wait"}\n</tool_call>'),
        (HERMES, '{"name": "wait", "arguments": {}}'),
        (HERMES, '<tool_call>{"name": ' + "[" * 2000 + "]" * 2000 + "}"),
    ],
)
def test_what_only_looks_like_a_call_is_text(form: ToolFormat, text: str) -> None:
    for size in (1, 5, len(text)):
        shown, calls = read(form, text, size)
        assert not calls, size
        assert shown == text, size


def allows(grammar: Grammar, text: str) -> bool:
    """Whether a grammar allows a text, and its end behind it."""
    ids = tokenizer(templates.QWEN).encode(text, add_special_tokens=False)
    return test_tools.allows(grammar, ids)


@pytest.mark.parametrize("form", [QWEN_TAGS, MISTRAL_ARGS], ids=["tags", "args"])
def test_forced_and_strict_answers_hold_the_schema(form: ToolFormat) -> None:
    name = "QWEN_CODER" if form is QWEN_TAGS else "MISTRAL_ARGS"
    tools = [{"name": n, "parameters": p} for n, p in PARAMETERS.items()]
    forced = form.grammar(tools, is_parallel=True, ids={})
    single = form.grammar(tools, is_parallel=False, ids={})
    free = form.free_grammar(tools, {})
    assert free is not None
    for grammar in (forced, single, free):
        grammars_of(CHECKPOINT).prepare(grammar)
    good = ("get_weather", ROME | {"unit": "F"})
    if form is QWEN_TAGS:  # what is no text is JSON where it is held
        text = written(name, good).replace("\nF\n", '\n"F"\n')
    else:
        text = written(name, good)
    assert json.loads(read(form, text, 3)[1][0][1]) == good[1]
    two = f"{text}{form.separator}{written(name, ('wait', {}))}"
    assert len(read(form, two, 3)[1]) == 2
    for grammar in (forced, free):
        assert allows(grammar, text)
        assert allows(grammar, two)
        assert not allows(grammar, text.replace('"F"', '"K"'))
        assert not allows(grammar, text.replace("22", "2.5"))
        assert not allows(grammar, text.replace("get_weather", "nobody"))
        assert not allows(grammar, text.replace("Rome", "Rome and more"))
        assert not allows(grammar, text[:-2])
    assert allows(single, text)
    assert not allows(single, two)
    assert not allows(forced, "words")
    assert allows(free, "words")
    assert allows(free, "words " + text)


def test_a_schema_whose_parameters_are_not_listed_is_not_forced_in_tags() -> None:
    tools = [{"name": "any", "parameters": {"anyOf": [{"type": "object"}]}}]
    with pytest.raises(InvalidRequest, match="anyOf"):
        QWEN_TAGS.grammar(tools, is_parallel=False, ids={})
    free = QWEN_TAGS.grammar(
        [{"name": "any", "parameters": {"type": "object"}}], is_parallel=False, ids={}
    )
    grammars_of(CHECKPOINT).prepare(free)
    assert allows(free, written("QWEN_CODER", ("any", {"a": "1", "b": "x y"})))


def test_schemas_that_are_true_or_false_are_held_in_tags() -> None:
    schema: dict[str, Any] = {"properties": {"a": True, "b": False}, "required": None, "$defs": {}}
    grammar = QWEN_TAGS.grammar([{"name": "any", "parameters": schema}], is_parallel=False, ids={})
    grammars_of(CHECKPOINT).prepare(grammar)
    assert allows(grammar, written("QWEN_CODER", ("any", {"a": 1})))
    assert not allows(grammar, written("QWEN_CODER", ("any", {"b": 1})))


def served(template: str) -> ServedModel:
    made = ServedModel.__new__(ServedModel)
    object.__setattr__(made, "tokenizer", tokenizer(template))
    return made


@pytest.mark.parametrize(
    "template", [templates.DEEPSEEK, "{{ raise_exception('no') if tools else messages }}"]
)
def test_tools_are_refused_where_the_form_of_calls_is_unknown(template: str) -> None:
    text = tokenizer(template)
    assert text.tool_format is None
    body = ChatBody.model_validate(
        {"model": "named", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    )
    with pytest.raises(InvalidRequest, match=r"'named'.*form.*not known") as caught:
        read_tools(body, served(template))
    assert caught.value.param == "tools"
    assert text.render_chat([{"role": "user", "content": "Hello."}])
