"""Which answers a JSON schema lets through, keyword by keyword; `jsonschema` is the judge."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.core.grammar import Grammar
from quadriga.errors import InvalidRequest
from quadriga.text import load_tokenizer
from quadriga.text.grammar import TokenGrammars, grammars_of
from quadriga.text.tool_formats import _json

CHECKPOINT = read_checkpoint("quadriga-s")
TEXT = load_tokenizer(CHECKPOINT.path, CHECKPOINT.id)
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["value"],
    "additionalProperties": False,
}


@cache
def grammars() -> TokenGrammars:
    return grammars_of(CHECKPOINT)


def lets_through(schema: dict[str, Any] | Grammar, text: str) -> bool:
    """Whether an answer may be exactly this text."""
    grammar = schema if isinstance(schema, Grammar) else Grammar.json_schema(schema)
    grammars().prepare(grammar)
    matcher, said = grammars().matcher(grammar), list[int]()
    for token_id in [*TEXT.encode(text, add_special_tokens=False), CHECKPOINT.eos_token_ids[0]]:
        if matcher.banned_after(said)[token_id]:
            return False
        said.append(token_id)
    return not matcher.failure


CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "integer"}, [0, -7, 123456789012345678901], [1.5, "1", None, True, [1]]),
    ({"type": "number"}, [0, -7, 2.5, 1e300], ["2.5", None, False]),
    ({"type": "boolean"}, [True, False], [0, 1, "true", None]),
    ({"type": "null"}, [None], [0, False, "", []]),
    ({"type": "string"}, ["", "a", "ä€😀", 'quote " and \\ and\n'], [1, None, ["a"]]),
    ({"type": ["string", "null"]}, ["a", None], [1, True]),
    ({"type": "array"}, [[], [1, "a", None, {}]], [{}, "[]", 1]),
    ({"type": "object"}, [{}, {"a": [{"b": 1}]}], [[], "{}", 1]),
    ({"enum": ["red", 1, None, [1]]}, ["red", 1, None, [1]], ["re", "reds", 2, True, []]),
    ({"const": {"a": 1}}, [{"a": 1}], [{}, {"a": 2}, {"a": 1, "b": 1}]),
    ({"type": "integer", "minimum": -5, "maximum": 117}, [-5, 0, 99, 117], [-6, 118, 1000]),
    ({"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12}, [10, 11], [9, 12, 1]),
    ({"type": "number", "minimum": 0.5, "maximum": 2}, [0.5, 1, 1.75, 2], [0.49, 2.01, -1]),
    ({"type": "integer", "multipleOf": 5}, [0, 5, -10, 115], [1, 7, 112]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü", "😀😀"], ["", "a", "abcd"]),
    ({"type": "string", "pattern": "^[a-c]+[0-9]?$"}, ["a", "abc7"], ["", "7", "abcd", "a77"]),
    ({"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
    ({"type": "string", "format": "date"}, ["2026-11-23"], ["2026-13-01", "23.11.2026", "x"]),
    ({"type": "string", "format": "uuid"}, ["01234567-89ab-cdef-0123-456789abcdef"], ["0123", ""]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3", "a"]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1], [1, 2]], [["a"], [1, None]]),
    ({"type": "array", "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    (
        {"type": "array", "prefixItems": [{"const": 1}, {"type": "string"}], "items": False},
        [[1, "a"], [1], []],
        [["a"], [1, 2], [1, "a", 3]],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{}, {"b": "x"}, {"a": "1"}, {"a": 1, "c": 1}],
    ),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{}, {"x": 1, "y": 2}],
        [{"x": "1"}, {"x": 1, "y": None}],
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^n_": {"type": "integer"}},
            "additionalProperties": False,
        },
        [{}, {"n_a": 1}],
        [{"n_a": "1"}, {"m": 1}],
    ),
    (
        {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "minProperties": 1,
            "maxProperties": 2,
        },
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    ({"anyOf": [{"type": "integer"}, {"const": "none"}]}, [3, "none"], [3.5, "nil", None]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [3, "a"], [None, 3.5]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 4, 5], [2, 6, "4"]),
    (
        {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
        [{"value": 1}, {"value": 1, "next": {"value": 2, "next": {"value": 3}}}],
        [{}, {"value": 1, "next": {}}, {"value": 1, "next": None}],
    ),
]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), CASES, ids=lambda value: json.dumps(value)[:50]
)
def test_a_schema_lets_valid_answers_through_alone(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for value in valid:
        assert judge.is_valid(value), value
        assert lets_through(schema, json.dumps(value, ensure_ascii=False)), value
    for value in invalid:
        assert not judge.is_valid(value), value
        assert not lets_through(schema, json.dumps(value, ensure_ascii=False)), value


def test_escapes_are_no_way_around_a_schema() -> None:
    """By a name that is not listed a listed one could be said again, or no text at all."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in (Grammar.json_schema(schema), Grammar("lark", f"start: {_json(schema)}")):
        assert lets_through(form, '{"a": 1, "b\\n": "x"}')
        for name in (r"\u0061", r"\ud800"):
            assert not lets_through(form, f'{{"a": 1, "{name}": "x"}}')
    assert lets_through({"enum": ["\x01"]}, r'"\u0001"')
    assert lets_through({"enum": ["a\x7f"]}, r'"a\u007F"')
    assert lets_through({"type": "string", "pattern": r"^\x01$"}, r'"\u0001"')


@pytest.mark.parametrize(
    "text", ["", "{", "[1", "[1,]", "{'a': 1}", "[1] x", '"a', "01", "NaN", "+1"]
)
def test_what_is_no_json_is_let_through_by_no_schema(text: str) -> None:
    assert not lets_through({}, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "integer"}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "string", "format": "no-such-format"},
        {"$ref": "#/$defs/missing"},
        {"uniqueItems": True, "x-guidance": {"lenient": True}},
    ],
    ids=json.dumps,
)
def test_what_cannot_be_kept_is_refused_and_not_half_kept(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammars().prepare(Grammar.json_schema(schema))
    assert caught.value.code == "invalid_grammar"


SUITE: list[tuple[str, Any, list[Any], list[Any]]] = [
    (
        "additionalProperties",
        {"properties": {"foo": {}, "bar": {}}, "additionalProperties": False},
        [{"foo": 1}, {}],
        [{"foo": 1, "quux": True}],
    ),
    (
        "additionalProperties",
        {"additionalProperties": {"type": "boolean"}},
        [{"foo": True}],
        [{"foo": 1}],
    ),
    (
        "allOf",
        {
            "allOf": [
                {"properties": {"bar": {"type": "integer"}}, "required": ["bar"]},
                {"properties": {"foo": {"type": "string"}}, "required": ["foo"]},
            ]
        },
        [{"bar": 2, "foo": "baz"}],
        [{"foo": "baz"}, {"bar": 2}, {"bar": "quux", "foo": "baz"}],
    ),
    ("allOf", {"allOf": [{"maximum": 30}, {"minimum": 20}]}, [25], [35, 15]),
    ("anchor", {"$ref": "#foo", "$defs": {"A": {"$anchor": "foo", "type": "integer"}}}, [1], ["a"]),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, 3], [1.5]),
    (
        "anyOf",
        {"type": "string", "anyOf": [{"maxLength": 2}, {"minLength": 4}]},
        ["ab", "abcd"],
        [3, "abc"],
    ),
    ("const", {"const": 2}, [2], [5, "a"]),
    (
        "const",
        {"const": {"foo": "bar", "baz": "bax"}},
        [{"foo": "bar", "baz": "bax"}],
        [{"foo": "bar"}, [1, 2]],
    ),
    ("const", {"const": False}, [False], [0, []]),
    ("const", {"const": "hello\u0000there"}, ["hello\u0000there"], ["hellothere"]),
    (
        "default",
        {"properties": {"foo": {"type": "integer", "default": []}}},
        [{"foo": 13}, {}],
        [{"foo": "a"}],
    ),
    (
        "enum",
        {"enum": [6, "foo", [], True, {"foo": 12}]},
        [[], {"foo": 12}],
        [None, {"foo": False}, {"foo": 12, "boo": 42}],
    ),
    ("enum", {"enum": ["foo\nbar", "foo\rbar"]}, ["foo\nbar", "foo\rbar"], ["abc"]),
    ("enum", {"enum": [False]}, [False], [0, [0]]),
    ("exclusiveMaximum", {"exclusiveMaximum": 3.0}, [2.2], [3.0, 3.5]),
    ("exclusiveMinimum", {"exclusiveMinimum": 1.1}, [1.2], [1.1, 0.6]),
    ("format", {"format": "date-time"}, ["1963-06-19T08:30:06Z"], []),
    (
        "infinite-loop-detection",
        {
            "$defs": {"int": {"type": "integer"}},
            "allOf": [
                {"properties": {"foo": {"$ref": "#/$defs/int"}}},
                {"additionalProperties": {"$ref": "#/$defs/int"}},
            ],
        },
        [{"foo": 1}],
        [{"foo": "a"}],
    ),
    ("items", {"items": {"type": "integer"}}, [[1, 2, 3], {"foo": "bar"}], [[1, "x"]]),
    ("items", {"items": False}, [[]], [[1, "foo", True]]),
    ("maxItems", {"maxItems": 2}, [[1], [1, 2], "foobar"], [[1, 2, 3]]),
    ("maxLength", {"maxLength": 2}, ["f", "fo", 100, "\U0001f4a9\U0001f4a9"], ["foo"]),
    ("maxProperties", {"maxProperties": 0}, [{}], [{"foo": 1}]),
    ("maximum", {"maximum": 300}, [299.97, 300, "x"], [300.5]),
    ("minItems", {"minItems": 1}, [[1, 2], ""], [[]]),
    ("minLength", {"minLength": 2}, ["foo", 1], ["f", "\U0001f4a9"]),
    ("minimum", {"minimum": -2}, [-1, 0, -2, -2.0, "x"], [-2.0001, -3]),
    ("multipleOf", {"multipleOf": 2}, [10, "foo"], [7]),
    ("multipleOf", {"type": "number", "multipleOf": 1.5}, [0, 4.5], [35]),
    ("pattern", {"pattern": "^a*$"}, ["aaa", True, 123], ["abc"]),
    ("pattern", {"pattern": "a+"}, ["xxaayy"], []),
    (
        "patternProperties",
        {"patternProperties": {"f.*o": {"type": "integer"}}},
        [{"foo": 1}, {"foooooo": 2}, []],
        [{"foo": "bar"}],
    ),
    (
        "prefixItems",
        {"prefixItems": [{"type": "integer"}, {"type": "string"}]},
        [[1, "foo"], [1], [1, "foo", True], []],
        [["foo", 1]],
    ),
    (
        "properties",
        {"properties": {"foo": {"type": "integer"}, "bar": {"type": "string"}}},
        [{"foo": 1, "bar": "baz"}, {"quux": []}, [], 12],
        [{"foo": 1, "bar": {}}, {"foo": []}],
    ),
    (
        "properties",
        {"properties": {'foo"bar': {"type": "number"}, "foo\tbar": {"type": "number"}}},
        [{'foo"bar': 1, "foo\tbar": 1}],
        [{'foo"bar': "1"}],
    ),
    (
        "ref",
        {"properties": {"foo": {"$ref": "#"}}, "additionalProperties": False},
        [{"foo": False}, {"foo": {"foo": False}}],
        [{"bar": False}, {"foo": {"bar": False}}],
    ),
    (
        "ref",
        {"$defs": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/b"},
        [5],
        ["a"],
    ),
    (
        "required",
        {"properties": {"foo": {}}, "required": ["foo"]},
        [{"foo": 1}, [], ""],
        [{"bar": 1}, {}],
    ),
    ("type", {"type": "integer"}, [1], [1.1, "1", {}, [], True, None]),
    ("type", {"type": ["array", "object"]}, [[1, 2], {"foo": 123}], [123, "foo", None]),
    ("bignum", {"type": "integer"}, [12345678910111213141516171819202122232425262728293031], []),
]
"""Facts of the JSON-Schema-Test-Suite (github.com/json-schema-org, MIT), draft 2020-12, by its
files: schemas that the parser takes, with valid and invalid instances."""
NOT_WRITTEN: list[tuple[str, Any, str]] = [
    ("properties come in the schema's order", {"properties": {"a": {}, "b": {}}}, '{"b":1,"a":1}'),
    ("an integer has no fraction", {"type": "integer"}, "1.0"),
]
"""Valid instances that no answer is: what 333 of the suite's 355 leaves out."""


def test_instances_of_the_suite_are_judged_as_it_does() -> None:
    wrongly_allowed, not_allowed, count = [], [], 0
    for keyword, schema, valid, invalid in SUITE:
        judge = jsonschema.Draft202012Validator(schema)
        for value in valid:
            assert judge.is_valid(value), (keyword, value)
            count += 1
            if not lets_through(schema, json.dumps(value, ensure_ascii=False)):
                not_allowed.append((keyword, value))
        for value in invalid:
            assert not judge.is_valid(value), (keyword, value)
            if lets_through(schema, json.dumps(value, ensure_ascii=False)):
                wrongly_allowed.append((keyword, value))
    assert not wrongly_allowed
    assert not not_allowed
    assert count > 70
    for reason, schema, text in NOT_WRITTEN:
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), reason
        assert not lets_through(schema, text), reason
