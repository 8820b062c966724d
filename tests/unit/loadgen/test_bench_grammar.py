"""`bench grammar`: its schemas are schemas, and its judge tells right answers from wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema  # type: ignore[import-untyped]
import pytest

from loadgen.__main__ import main
from loadgen.bench import grammar
from loadgen.bench.grammar import is_valid
from loadgen.bench.random_schemas import random_schema
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.core.grammar import Grammar
from quadriga.text.grammar import grammars_of


def test_random_schemas_are_schemas_that_compile() -> None:
    grammars = grammars_of(read_checkpoint("quadriga-s"))
    shown = {json.dumps(random_schema(seed)) for seed in range(60)}
    assert len(shown) == 60
    assert json.dumps(random_schema(7)) == json.dumps(random_schema(7))
    for text in shown:
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
        grammars.prepare(Grammar.json_schema(text))
    words = " ".join(shown)
    for word in ("anyOf", "enum", "const", "pattern", "format", "prefixItems", "$ref", "minimum"):
        assert f'"{word}"' in words


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ('{"a": 39.0000000000000004}', True),
        ('{"a": 39.0}', False),
        ('{"a": 40}', True),
        ('{"a": "40"}', False),
        ('{"a": 40', False),
        ("", False),
    ],
)
def test_the_judge(text: str, is_right: bool) -> None:
    schema = {"properties": {"a": {"type": "number", "exclusiveMinimum": 39}}, "required": ["a"]}
    assert is_valid(text, schema) is is_right


def test_a_step_is_no_part_of_the_prompts_pass_and_its_share_that_of_the_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_s, calls = [0.0], [0]
    steps_s = [(1, 1), (1, 3), (4, 4), (2, 8)]  # plain, and with a form; the first warms up

    def generate(_: Any, asked: list[Any], **__: Any) -> list[Any]:
        plain_s, form_s = steps_s[calls[0] // 12]  # six contestants, each with its prompts' pass
        calls[0] += 1
        at_s[0] += 10
        if asked[0].max_tokens > 1:
            at_s[0] += plain_s if asked[0].grammar is None else form_s
        return [Mock(ttft_s=10.0, token_ids=[0] * asked[0].max_tokens)]

    monkeypatch.setattr(
        grammar, "time", Mock(process_time=lambda: at_s[0], perf_counter=lambda: at_s[0])
    )
    costs = grammar.token_costs(Mock(generate=generate), 1, 2, 3)
    assert {(c.plain_s, c.form_s, c.share, c.cpu_share) for c in costs} == {(2, 4, 2, 2)}


def test_the_command_ends_in_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = tmp_path / "tests" / "draft2020-12"
    suite.mkdir(parents=True)
    cases = [
        {"description": "right", "data": [1], "valid": True},
        {"description": "wrong", "data": ["a"], "valid": False},
    ]
    schema = {"type": "array", "items": {"type": "integer"}}
    groups = [
        {"description": "integers", "schema": schema, "tests": cases},
        {"description": "unknown", "schema": {"uniqueItems": True}, "tests": cases},
    ]
    (suite / "a.json").write_text(json.dumps(groups))
    words = ["bench", "grammar", "--schemas", "3", "--rows", "2", "--tokens", "4", "--repeats", "1"]
    assert main([*words, "--cost-model", "quadriga-s", "--suite", str(tmp_path)]) == 0
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["experiment"] == "grammar"
    assert line["headline"]["invalid"] == 0
    assert line["headline"]["schemas"] == 3
    assert isinstance(line["headline"]["token_cost"], float)
    counts = {name: line["suite"][name] for name in ("schemas", "compiled", "wrongly_allowed")}
    assert counts == {"schemas": 2, "compiled": 1, "wrongly_allowed": 0}
    words[3:4] = ["0", "--cost-model", "quadriga-s", "--suite", str(tmp_path / "nowhere")]
    assert main(words) == 2
    assert "nowhere has no schemas" in capsys.readouterr().err
