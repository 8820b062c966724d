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


def lets_through(schema: dict[str, Any], text: str) -> bool:
    """Whether an answer may be exactly this text."""
    grammar = Grammar.json_schema(schema)
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
    (
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        [3, 4, 5],
        [2, 6, "4"],
    ),
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
    ],
    ids=json.dumps,
)
def test_what_cannot_be_kept_is_refused_and_not_half_kept(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammars().prepare(Grammar.json_schema(schema))
    assert caught.value.code == "invalid_grammar"
