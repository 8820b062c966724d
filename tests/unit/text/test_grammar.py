"""Grammars over tokens: what may come next, whatever way one comes to where an answer stands."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from loadgen.bench.random_schemas import random_schema
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.core.grammar import Grammar
from quadriga.errors import ConfigError, InvalidRequest
from quadriga.text import grammar as grammar_module
from quadriga.text import load_tokenizer
from quadriga.text.grammar import (
    MAX_KEPT,
    STUCK,
    TokenGrammars,
    allowed,
    grammar_source,
    grammars_of,
)
from quadriga.text.grammar_worker import fault
from quadriga.text.tokenizer_file import read_definition

CHECKPOINT = read_checkpoint("quadriga-s")
TEXT = load_tokenizer(CHECKPOINT.path, CHECKPOINT.id)
END = CHECKPOINT.eos_token_ids[0]
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@cache
def grammars() -> TokenGrammars:
    return grammars_of(CHECKPOINT)


def is_in(grammar: Grammar, text: str) -> bool:
    """Whether each token of a text may be said, and then the end."""
    matcher, said = grammars().matcher(grammar), list[int]()
    for token_id in [*TEXT.encode(text, add_special_tokens=False), END]:
        if matcher.banned_after(said)[token_id]:
            return False
        said.append(token_id)
    return not matcher.failure


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (PERSON, '{"name": "Ann", "age": 7}', '{"name": "Ann"}'),
        (PERSON, '{"name":"Ä\\n","age":-1}', '{"age": 7, "name": "Ann"}'),
        (Grammar.json_object(), '{"a": [1, {"b": null}]}', "[1]"),
        (Grammar.regex(r"[0-9]{3}-[a-z]+"), "123-abc", "123-abc!"),
        (Grammar.regex(r"\d\\d[\d-]"), "3\\d-", "٣\\d3"),
        (Grammar.regex(r"[\d,]+[^\d]"), "1,2x", "1,٣x"),
        (Grammar.regex(r"[^a\]\d]"), "x", "٣"),
        (Grammar.regex(r"[^]\d]"), "x", "٣"),
        (Grammar.choice(["yes", 'a "b"\n', "ü\x7f"]), 'a "b"\n', "ye"),
        (Grammar.ebnf('start: "a" b*\nb: "b" | "c"'), "abcb", "aba"),
        (Grammar.ebnf('root ::= "x" [0-9]+'), "x12", "x"),
        (Grammar.ebnf('?start: "a" | b\nb: "::" "c"'), "::c", ":"),
    ],
)
def test_a_text_is_inside_or_outside(grammar: Grammar, inside: str, outside: str) -> None:
    grammars().prepare(grammar)
    assert is_in(grammar, inside)
    assert not is_in(grammar, outside)


@pytest.mark.parametrize("named_in", ["tokenizer.json", "tokenizer_config.json"])
def test_tokens_that_the_model_has_no_rows_for_are_left_out(named_in: str, tmp_path: Path) -> None:
    """Who adds a token for padding need not make the embedding larger."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(CHECKPOINT.path / name, tmp_path / name)
    content = json.loads((tmp_path / named_in).read_text())
    if named_in == "tokenizer.json":
        content["added_tokens"].append(
            content["added_tokens"][1] | {"id": CHECKPOINT.vocab_size, "content": "[PAD]"}
        )
    else:
        content["unk_token"] = "[PAD]"
    (tmp_path / named_in).write_text(json.dumps(content))
    assert load_tokenizer(tmp_path, "x").encode("[PAD]") == [CHECKPOINT.vocab_size]
    made = TokenGrammars(read_definition(tmp_path, "x"), CHECKPOINT.vocab_size, [END])
    banned = made.matcher(PERSON).banned_after([])
    assert np.array_equal(banned, grammars().matcher(PERSON).banned_after([]))


def test_blanks_between_parts_are_bounded() -> None:
    assert is_in(PERSON, '{\n    "name": "Ann",\n    "age": 7\n}')
    assert not is_in(PERSON, '{     "name": "Ann", "age": 7}')
    assert not is_in(PERSON, '{"name": "Ann", "age": 7}\n')


def test_where_an_answer_stands_follows_from_its_tokens_alone() -> None:
    """Step by step, at once, and after drafts that were refused: the same tokens may come."""
    ids = TEXT.encode(json.dumps({"name": "Ann", "age": 12}), add_special_tokens=False)
    stepwise, wandering = grammars().matcher(PERSON), grammars().matcher(PERSON)
    rng = np.random.default_rng(3)
    for count in range(len(ids) + 1):
        banned = stepwise.banned_after(ids[:count])
        at_once = grammars().matcher(PERSON).banned_after(ids[:count])
        np.testing.assert_array_equal(banned, at_once)
        draft = [*ids[:count], *rng.choice(np.flatnonzero(~banned), 1).tolist(), *ids[:2], END]
        wandering.banned_after(draft)
        np.testing.assert_array_equal(wandering.banned_after(ids[:count]), banned)
        assert not wandering.failure
    assert np.flatnonzero(~banned).tolist() == [END]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_answers_are_asked_about_at_once(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread and with several, one answer several times, and beside one that fails."""
    monkeypatch.setattr(grammar_module, "LARGE_VOCABULARY", 1)
    ids = TEXT.encode(json.dumps({"name": "Ann", "age": 12}), add_special_tokens=False)
    forms = [PERSON, Grammar.json_object(), Grammar.regex(r"(\w{1,1000}){1,1000}")]
    texts = [
        [ids[:i] for i in (0, 3, 5, 2)],
        [ids[:1], ids],
        [TEXT.encode("abc")[:i] for i in (1, 3)],
    ]
    matchers = [grammars().matcher(form) for form in forms]
    asked = [(m, said) for m, many in zip(matchers, texts, strict=True) for said in many]
    asked = [asked[i] for i in np.random.default_rng(2).permutation(len(asked))]
    for _ in range(2):  # the second time from memory, where nothing came between
        bits, failures = allowed(asked, num_threads)
        for (matcher, said), row, failure in zip(asked, bits, failures, strict=True):
            alone = grammars().matcher(forms[matchers.index(matcher)])
            wanted, reasons = allowed([(alone, said)])
            np.testing.assert_array_equal(row, wanted[0])
            assert failure == reasons[0]


def test_the_next_token_is_known_without_a_mask_as_with_one() -> None:
    """Also where the form leaves one token; where nothing is known, the mask is asked."""
    rng, num_known, num_allowed = np.random.default_rng(5), 0, 0
    forms = [Grammar.json_schema(random_schema(seed)) for seed in range(8)]
    forms += [Grammar.choice(["yes", "no, ü"]), Grammar.regex(r"[a-z]{2,9}-(\d{2}|é)+")]
    for form in forms:
        matcher, masked, said = grammars().matcher(form), grammars().matcher(form), list[int]()
        for step in range(30):
            may = ~masked.banned_after(said)
            some = rng.choice(np.flatnonzero(may), 6).tolist()
            for token_id in [*some, *rng.choice(len(may), 6).tolist(), END, len(may)]:
                found = matcher.next_token(said, token_id)
                num_allowed += token_id < len(may) and may[token_id]
                num_known += found is not None
                assert found is None or may[found]
                assert found in (None, token_id) or np.count_nonzero(may) == 1
            is_refused = some[0] == END or step % 5 == 4
            said = said[: len(said) // 2] if is_refused else [*said, some[0]]
    assert num_known > 0.9 * num_allowed


def test_an_answer_that_can_say_nothing_more_stops_no_other() -> None:
    lost, other = grammars().matcher(Grammar.choice(["ab"])), grammars().matcher(PERSON)
    wrong = TEXT.encode("ba", add_special_tokens=False)
    bits, failures = allowed([(lost, wrong), (other, [])])
    assert "left its grammar" in failures[0]
    assert not failures[1]
    assert (bits[0] == 255).all()
    np.testing.assert_array_equal(bits[1], allowed([(grammars().matcher(PERSON), [])])[0][0])
    assert not allowed([(lost, [])])[1][0], "a token that was not allowed can be taken back"


def test_accept_and_rollback() -> None:
    matcher = grammars().matcher(Grammar.choice(["abc"]))
    first = matcher.banned_after([])
    allowed = TEXT.encode("abc", add_special_tokens=False)
    for token_id in [*allowed, END]:
        assert not matcher.banned_after(matcher._tokens)[token_id]
        matcher.accept(token_id)
    matcher.rollback(len(allowed) + 1)
    np.testing.assert_array_equal(matcher.banned_after([]), first)
    matcher.accept(int(np.flatnonzero(first)[-1]))
    assert "left its grammar" in matcher.failure
    assert not matcher.banned_after(matcher._tokens).any()
    matcher.rollback(1)
    assert not matcher.failure
    np.testing.assert_array_equal(matcher.banned_after([]), first)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar.regex("["), "unclosed"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.json_schema("{"), "cannot be read"),
        (Grammar.json_schema({"type": "nothing"}), "nothing"),
        (
            Grammar.json_schema({"type": "array", "uniqueItems": True}),
            '"uniqueItems".*leave it out',
        ),
        (Grammar.json_schema({"type": "string", "format": "a"}), "format 'a'.*leave it out"),
        (Grammar.json_schema({"oneOf": [{"type": "string"}, {"minLength": 1}]}), "write anyOf"),
        (Grammar.json_schema({"$ref": "https://a.b/c"}), r"'https://a\.b/c'; put .* into \$defs"),
        (Grammar.json_schema("true"), "cannot be read: it must be an object; {} allows any"),
        (Grammar.regex(r"\ba"), r"\\b and \\B are not known; leave"),
        (Grammar.json_schema({"enum": [1], "type": "string"}), "nsatisfiable"),
        (Grammar.json_schema('{"items":' * 3000 + "{}" + "}" * 3000), "recursion"),
        (Grammar.ebnf("start: unknown"), "unknown"),
        (Grammar.ebnf('start: "a"\n  | b\nb: %json {"not": {}}'), "^schemas may .* leave it out$"),
        (Grammar.regex("\ud800"), "surrogates not allowed"),
        (Grammar.choice(["\ud800"]), "surrogates not allowed"),
    ],
)
def test_what_is_no_grammar_is_refused(grammar: Grammar, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        grammars().prepare(grammar)
    assert caught.value.code == "invalid_grammar"
    assert len(caught.value.message) < 600


def test_what_needs_too_much_work_for_a_token_fails_within_the_first() -> None:
    many = {f"p{i}": {"type": "string"} for i in range(2000)}
    for grammar in (
        Grammar.regex(r"(\w{1,1000}){1,1000}"),
        Grammar.json_schema({"type": "object", "properties": many}),
    ):
        assert fault(grammars(), grammar)
    assert fault(grammars(), PERSON) == ""
    assert fault(grammars(), Grammar.ebnf("start: start start")).startswith(f"{STUCK}; give every")


def test_a_few_compiled_grammars_are_kept_and_those_that_somebody_has() -> None:
    mine = TokenGrammars(TEXT.definition(), CHECKPOINT.vocab_size, CHECKPOINT.eos_token_ids)
    held = mine.prepare(Grammar.choice(["held"]))
    for i in range(MAX_KEPT + 5):
        mine.prepare(Grammar.choice([str(i)]))
        mine.prepare(Grammar.choice(["0"]))
    kept = {text for _, text in mine._compiled}
    assert len(kept) == MAX_KEPT + 1
    assert {Grammar.choice([text]).text for text in ("0", "held")} < kept
    assert Grammar.choice(["1"]).text not in kept
    assert mine.prepare(Grammar.choice(["held"])) is held


def test_two_threads_compile_a_grammar_once(monkeypatch: pytest.MonkeyPatch) -> None:
    form = Grammar.choice(["two threads"])
    other = Thread(target=grammars().prepare, args=[form])
    asked = list[Grammar]()

    def source(grammar: Grammar) -> str:
        asked.append(grammar)
        if len(asked) == 1:
            other.start()
            other.join(0.3)  # it comes here by then, unless it waits
        return grammar_source(grammar)

    monkeypatch.setattr(grammar_module, "grammar_source", source)
    grammars().prepare(form)
    other.join()
    assert len(asked) == 1


def test_a_replicas_grammars_are_made_without_transformers() -> None:
    program = (
        "import sys; from quadriga.checkpoint.folder import read_checkpoint;"
        "from quadriga.text.grammar import grammars_of;"
        "grammars_of(read_checkpoint('quadriga-s')); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=100.0).returncode == 0
    assert read_definition(CHECKPOINT.path, CHECKPOINT.id) == TEXT.definition()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        read_definition(Path("nowhere"), "nowhere")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"900": {"content": "<|tool|>"}}}),
        ("tokenizer_config.json", {"bos_token": "<|tool|>", "extra_special_tokens": None}),
        ("special_tokens_map.json", {"additional_special_tokens": ["<|tool|>"]}),
        ("added_tokens.json", {"<|tool|>": 900}),
    ],
)
def test_tokens_that_settings_add_are_in_the_vocabulary_of_grammars(
    tmp_path: Path, name: str, settings: dict[str, object]
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT.path / file, tmp_path)
    known = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
    (tmp_path / name).write_text(json.dumps(known | settings))
    found = read_definition(tmp_path, "added")
    assert found == load_tokenizer(tmp_path, "added").definition()
    assert "<|tool|>" in found


@pytest.mark.parametrize("texts", ["yes", [], ["a", 5], None])
def test_a_choice_is_of_texts_in_a_list(texts: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a list of at least one text"):
        Grammar.choice(texts)
