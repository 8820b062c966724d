"""Answers with a grammar are in it, and are the same moved, rebuilt, paused and beside others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quadriga import LLM, ExitParams, Grammar, SamplingParams
from quadriga.checkpoint.exits import NEVER
from quadriga.checkpoint.folder import ASSETS, read_checkpoint
from quadriga.core.request import FinishReason, SequenceState
from quadriga.errors import InvalidRequest
from quadriga.text import load_tokenizer
from tests.equivalence.models import make_spec, make_state
from tests.equivalence.moving import Member, move
from tests.equivalence.test_rebuild import copy_of, go_on, rebuild, run_alone, runner
from tests.random_drafter import RandomDrafter

S = "quadriga-s"
TEXT = load_tokenizer(ASSETS / S, S)
ENGINE = {"compile": "wait", "max_model_len": 512}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON = Grammar.json_schema(SCHEMA)
PROMPT = "Sort: 42 7 19 3\n"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(S, engine=ENGINE, decode={"max_slots": 6}, deterministic=True)
    yield made
    made.loop.check()
    assert not made.loop.has_work
    made.close()


@pytest.mark.parametrize("threshold", [0.5, 0.9, NEVER])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 5.0])
def test_every_answer_is_valid(llm: LLM, temperature: float, threshold: float) -> None:
    sampling = [
        SamplingParams(250, temperature=temperature, top_p=0.9, seed=i, grammar=PERSON)
        for i in range(6)
    ]
    exits = ExitParams(threshold)
    outputs = llm.generate([PROMPT] * 6, sampling, exits=exits, progress=False)
    for output in outputs:
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(output.text), SCHEMA)
    assert temperature == 0 or len({o.text for o in outputs}) > 3


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_is_full_depth(llm: LLM, temperature: float) -> None:
    """Drafts are masked as the tokens that verify them."""
    sampling = [
        SamplingParams(200, temperature=temperature, seed=i, grammar=PERSON) for i in (1, 2)
    ]
    full = llm.generate([PROMPT] * 2, sampling, exits=ExitParams(NEVER), progress=False)
    lossless = ExitParams(NEVER, policy="lossless")
    batch = llm.loop.decode.batch
    batch.drafter, drafter = RandomDrafter(batch.rebatcher.costs, 5), batch.drafter
    drafted = llm.generate([PROMPT] * 2, sampling, exits=lossless, progress=False)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in full]
    batch.drafter = drafter
    assert llm.loop.decode.counters.drafted > 0


def test_what_the_grammar_leaves_no_choice_leaves_early(llm: LLM) -> None:
    """The mask comes before the test of an exit: one possible token is certain everywhere."""
    assert llm.tokenizer is not None
    sampling = SamplingParams(64, temperature=0.8, grammar=Grammar.choice(["the only answer"]))
    early = llm.generate(PROMPT, sampling, exits=ExitParams(0.99), progress=False)[0]
    full = llm.generate(PROMPT, sampling, exits=ExitParams(NEVER), progress=False)[0]
    assert early.text == full.text == "the only answer"
    assert set(full.exit_layers) == {8}
    assert set(early.exit_layers[1:]) == {2}, "all but the prompt's own token"


def test_a_first_token_is_masked(llm: LLM) -> None:
    one = SamplingParams(1, temperature=0.0, num_logprobs=5, grammar=Grammar.regex("[xyz]"))
    output = llm.generate(PROMPT, one, progress=False)[0]
    assert output.text in ("x", "y", "z")
    assert output.finish_reason is FinishReason.LENGTH
    report = output.logprobs[0]
    assert report.logprob == max(value for _, value in report.top)
    assert all(value > float("-inf") for _, value in report.top), "JSON has no infinity"


def test_others_in_the_batch_say_what_they_say_alone(llm: LLM) -> None:
    plain = [SamplingParams(24, temperature=0.0), SamplingParams(24, temperature=0.9, seed=5)]
    alone = llm.generate([PROMPT] * 2, plain, progress=False)
    form = SamplingParams(100, temperature=1.0, seed=1, grammar=PERSON)
    beside = llm.generate([PROMPT] * 4, [form, *plain, form], progress=False)
    assert [o.token_ids for o in beside[1:3]] == [o.token_ids for o in alone]
    assert beside[0].token_ids == beside[3].token_ids


def test_a_grammar_that_is_none_is_refused_before_anything_runs(llm: LLM) -> None:
    wrong = SamplingParams(8, grammar=Grammar.regex("("))
    with pytest.raises(InvalidRequest, match="unclosed"):
        llm.generate(["a", "b"], [SamplingParams(8), wrong], progress=False)
    for fields in ({"ignore_eos": True}, {"min_tokens": 2}):
        with pytest.raises(InvalidRequest, match="where the answer may end"):
            llm.generate("a", SamplingParams(8, grammar=PERSON, **fields), progress=False)
    assert not llm.loop.has_work


@pytest.mark.parametrize("before", ["", "b"], ids=["first token", "later token"])
def test_a_grammar_that_fails_on_its_way_ends_its_sequence_alone(llm: LLM, before: str) -> None:
    pattern = before + r"(\w{1,1000}){1,1000}"
    failing = SamplingParams(60, temperature=0.0, grammar=Grammar.regex(pattern))
    plain = SamplingParams(24, temperature=0.0)
    prompts = [PROMPT, "Count from 3 to 6.\n"]
    failed, other = llm.generate(prompts, [failing, plain], progress=False)
    assert isinstance(failed.error, InvalidRequest) and failed.error.code == "grammar_failed"
    assert re.search(r"fails after \d+ tokens", failed.error.message)
    assert (failed.finish_reason, other.checked()) == (None, other)
    with pytest.raises(InvalidRequest, match="fails after"):
        failed.checked()
    assert other.text == "Counting: 3 4 5 6"
    said = list(llm.stream(PROMPT, failing))
    assert [news.error is None for news in said] == [True] * (len(said) - 1) + [False]
    llm.loop.check()
    assert not llm.loop.has_work


def states(count: int, name: str = "s") -> list[SequenceState]:
    return [
        replace(
            make_state(
                TEXT.encode(PROMPT),
                max_tokens=90,
                temperature=0.9 if i % 2 else 0.0,
                seed=i,
                grammar=PERSON,
            ),
            sequence_id=f"{name}{i}",
            exits=ExitParams(0.9),
        )
        for i in range(count)
    ]


def finish(member: Member) -> None:
    while member.loop.has_work:
        member.loop.step()


@pytest.mark.parametrize("rebatches", [True, False], ids=["drex", "off"])
def test_moved_is_unmoved(rebatches: bool) -> None:
    checkpoint = read_checkpoint(S)
    spec = make_spec(checkpoint.path, compile="wait", row_capacity_tokens=160, num_rows=4)
    spec = replace(spec, exits=checkpoint.exits)
    one, other = Member(spec, rebatches=rebatches), Member(spec, rebatches=rebatches)
    wanted = states(3)
    for state in wanted:
        one.begin(state)
    finish(one)
    for step in (0, 1, 5, 17, 30):
        made = {s.sequence_id: s for s in states(3, f"{step}.")}
        for state in made.values():
            one.begin(state)
        for _ in range(step):
            one.loop.step()
        for state in list(one.loop.running):
            made[state.sequence_id], _ = move(one, other, state.sequence_id)
        finish(other)
        assert [s.output_ids for s in made.values()] == [s.output_ids for s in wanted]
        assert [s.exit_layers for s in made.values()] == [s.exit_layers for s in wanted]


def test_rebuilt_is_undisturbed() -> None:
    of = runner(S, "linear")
    for whole in (run_alone(of, s) for s in states(3)):
        for count in (1, 7, len(whole.output_ids) // 2):
            lost = copy_of(whole, count)
            again = go_on(of, lost, rebuild(of, 4, lost, chunk_tokens=7))
            assert again.output_ids == whole.output_ids
            assert again.exit_layers == whole.exit_layers


def test_paused_is_undisturbed(llm: LLM) -> None:
    sampling = SamplingParams(120, temperature=0.9, seed=3, grammar=PERSON)
    wanted = llm.generate(PROMPT, sampling, progress=False)[0].token_ids
    said: list[int] = []
    for news in llm.stream(PROMPT, sampling):
        said += news.token_ids
        for state in list(llm.loop.decode.running):
            if len(said) % 5 == 2:
                assert llm.loop.decode.preemption.pause(state.sequence_id)
    assert said == wanted


def test_in_the_relay_batch(tmp_path: Path) -> None:
    """Of an unmodified model of the vocabulary's size, whose tokenizer lies beside it."""
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(ASSETS / S)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((ASSETS / S / name).read_bytes())
    relay = LLM(str(tmp_path), runner="baton", engine={"max_model_len": 512})
    sampling = [SamplingParams(450, temperature=t, seed=1, grammar=PERSON) for t in (0.0, 0.8, 2.0)]
    for output in relay.generate([PROMPT] * 3, sampling, progress=False):
        assert output.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(output.text), SCHEMA)
    relay.close()
