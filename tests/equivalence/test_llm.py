"""`quadriga.LLM` says what `transformers` says, and what prefill and decode replicas would say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga import LLM, ExitParams, Grammar, RequestOutput, SamplingParams
from quadriga.checkpoint.exits import NEVER, ExitCounters
from quadriga.checkpoint.folder import ASSETS
from quadriga.clock import ManualClock
from quadriga.core.request import FinishReason, SequenceState
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError, ContextTooLong, InvalidRequest
from quadriga.policies.drex import SegmentCosts
from quadriga.policies.rebatchers import make_rebatcher
from quadriga.scheduling.decode_loop import DecodeLoop
from quadriga.scheduling.slots import SlotTable
from quadriga.tasks import sample_examples
from tests.equivalence.models import begin, build, save
from tests.equivalence.relay_models import generate
from tests.random_drafter import RandomDrafter

S = "quadriga-s"
SLOTS = 4
ENGINE = {"compile": "wait", "max_model_len": 512}
GREEDY = SamplingParams(24, temperature=0.0, ignore_eos=True)
FULL = ExitParams(NEVER)
DRAWN = replace(GREEDY, temperature=0.9, top_p=0.95)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Tokens leave early where a call asks for nothing else."""
    settings = {"exits": {"mode": "bounded"}, "engine": ENGINE, "decode": {"max_slots": SLOTS}}
    with LLM(S, deterministic=True, **settings) as made:
        yield made
        made.loop.check()
        assert not made.loop.has_work and made.loop.decode.slots.num_held == 0


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [example.text for example in islice(sample_examples(seed=7), 10)]


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_greedy_tokens_are_those_of_transformers(llm: LLM, prompts: list[str]) -> None:
    assert llm.tokenizer is not None
    model = AutoModelForCausalLM.from_pretrained(ASSETS / S, dtype=torch.float32).eval()
    outputs = llm.generate(prompts, GREEDY, exits=FULL)
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = generate(model, llm.tokenizer.encode(prompt), 24)
        assert output.token_ids == wanted
        assert output.finish_reason is FinishReason.LENGTH
        assert output.exit_layers == [8] * 24


def replicas_say(llm: LLM, states: list[SequenceState]) -> None:
    """Prefill in one engine, hand the KV over, and decode in another, as the service does."""
    spec = llm.runner.spec
    prefill, decode = (
        NativeRunner.load(replace(spec, can_exit=can_exit)) for can_exit in (False, True)
    )
    counters = ExitCounters()
    loop = DecodeLoop(
        runner=decode,
        slots=SlotTable(
            num_rows=SLOTS,
            row_capacity_tokens=spec.row_capacity_tokens,
            kv_capacity_tokens=spec.kv_capacity_tokens,
        ),
        eos_token_ids=spec.checkpoint.eos_token_ids,
        clock=ManualClock(),
        rebatcher=make_rebatcher("drex", SegmentCosts(3, SLOTS), counters, deterministic=True),
        counters=counters,
        criterion=spec.exits.criterion,
    )
    waiting = list(states)
    while waiting or loop.has_work:
        while waiting and loop.slots.num_free_rows:
            begin(loop, waiting.pop(0), prefill, decode)
        loop.step()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_and_exits_are_those_of_replicas(
    llm: LLM, prompts: list[str], sampling: SamplingParams
) -> None:
    states = llm._inputs.sequences(prompts, sampling, None, (), "")
    replicas_say(llm, states)
    outputs = llm.generate(prompts, sampling)
    assert tokens_of(outputs) == [state.output_ids for state in states]
    assert [o.exit_layers for o in outputs] == [state.exit_layers for state in states]
    assert len({layers for o in outputs for layers in o.exit_layers}) == 3, "all exits are used"


def test_a_prompt_alone_says_what_it_says_in_the_batch(llm: LLM, prompts: list[str]) -> None:
    each = [replace(DRAWN, seed=index // 2, max_tokens=6 + index) for index in range(10)]
    together = llm.generate(prompts, each)
    for prompt, sampling, output in zip(prompts, each, together, strict=True):
        (alone,) = llm.generate(prompt, sampling)
        assert (alone.text, alone.token_ids) == (output.text, output.token_ids)


def test_seeds_decide_what_is_drawn(llm: LLM, prompts: list[str]) -> None:
    asked = [replace(DRAWN, temperature=5.0, seed=seed) for seed in (1, 1, 2)]
    first, again, other = tokens_of(llm.generate([prompts[0]] * 3, asked))
    assert first == again != other


def test_a_stream_that_is_read_late_ends_at_its_stop_string(llm: LLM) -> None:
    prompt = "Count from 3 to 20.\n"
    (whole,) = llm.generate(prompt, GREEDY, stop=("7",))
    late = llm.stream(prompt, GREEDY, stop=("7",))
    first = next(late)
    llm.generate("Sort: 42 7 19 3 88 5 61 9\n", GREEDY)  # runs passes for both
    news = [first, *late]
    assert "".join(n.text for n in news) == whole.text
    assert [t for n in news for t in n.token_ids] == whole.token_ids
    least = replace(GREEDY, min_tokens=len(whole.token_ids))
    (longer,) = llm.generate(prompt, least, stop=("7",))
    assert longer.text.startswith(f"{whole.text}7"), "as with vLLM's min_tokens"


def test_a_stream_says_what_generate_says(llm: LLM, prompts: list[str]) -> None:
    stop = ("7 ",)
    whole = llm.generate(prompts, stop=stop)
    parts = [RequestOutput(index) for index in range(len(prompts))]
    for news in llm.stream(prompts, stop=stop):
        part = parts[news.index]
        assert part.finish_reason is None, "nothing follows an end"
        part.text += news.text
        part.token_ids += news.token_ids
        part.exit_layers += news.exit_layers
        part.finish_reason = news.finish_reason
    assert [replace(output, ttft_s=0.0) for output in whole] == parts
    assert all("7 " not in output.text for output in whole)
    plain = llm.generate(prompts)
    assert any(len(s.token_ids) < len(p.token_ids) for s, p in zip(whole, plain, strict=True))
    for stopped, output in zip(whole, plain, strict=True):
        assert stopped.text == output.text.split("7 ")[0]
        assert stopped.token_ids == output.token_ids[: len(stopped.token_ids)]
        assert stopped.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_by_default_tokens_are_full_depths(
    llm: LLM, prompts: list[str], sampling: SamplingParams
) -> None:
    asked = replace(sampling, num_logprobs=1)
    wanted = llm.generate(prompts, asked, exits=FULL)
    default = LLM(S, engine=ENGINE, decode={"max_slots": SLOTS})
    batch = default.loop.decode.batch
    for drafter in (batch.drafter, RandomDrafter(batch.drafter.costs, seed=5)):
        batch.drafter = drafter
        outputs = default.generate(prompts, asked)
        assert tokens_of(outputs) == tokens_of(wanted)
        assert {layers for o in outputs for layers in o.exit_layers} == {8}
        for mine, full in zip(outputs, wanted, strict=True):
            assert [n.logprob for n in mine.logprobs] == pytest.approx(
                [n.logprob for n in full.logprobs], abs=1e-4
            )
    assert default.loop.decode.counters.accepted > 0, "some were drafted"
    default.close()


def test_two_streams_are_read_in_turn_and_one_is_left(llm: LLM, prompts: list[str]) -> None:
    wanted = llm.generate(prompts[:3], GREEDY)
    left, read = llm.stream(prompts, DRAWN), llm.stream(prompts[:3], GREEDY)
    next(left)
    parts: list[list[int]] = [[], [], []]
    for turn, news in enumerate(read):
        parts[news.index] += news.token_ids
        if turn == 8:
            left.close()
        elif turn < 8:
            next(left)
    assert parts == tokens_of(wanted)
    assert llm.loop.decode.slots.num_held == 0


def test_log_probabilities_are_those_of_transformers(llm: LLM, prompts: list[str]) -> None:
    assert llm.tokenizer is not None
    model = AutoModelForCausalLM.from_pretrained(ASSETS / S, dtype=torch.float32).eval()
    asked = replace(GREEDY, max_tokens=5, num_logprobs=2, num_prompt_logprobs=1)
    for prompt, output in zip(prompts, llm.generate(prompts, asked, exits=FULL), strict=True):
        ids = llm.tokenizer.encode(prompt) + output.token_ids
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        said = [*(output.prompt_logprobs or ()), *output.logprobs]
        assert [one.token_id for one in said] == ids and said[0].logprob is None
        for at, one in enumerate(said[1:]):
            assert one.logprob == pytest.approx(float(logprobs[at, one.token_id]), abs=1e-3)
        assert all(len(one.top) == 2 for one in output.logprobs)


def test_a_conversation_is_rendered_as_the_service_renders_it(llm: LLM) -> None:
    assert llm.tokenizer is not None
    chat = [{"role": "user", "content": "Count from 3 to 20."}]
    text = llm.tokenizer.render_chat(chat)
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    by_chat, by_ids = llm.generate([chat, ids])
    assert by_chat.text == by_ids.text == llm.generate(chat)[0].text
    assert by_chat.text.endswith("18 19 20") and by_chat.finish_reason is FinishReason.STOP


def test_arrays_are_prompts(llm: LLM) -> None:
    ids = [[5, 6], [7, 8]]
    wanted = tokens_of(llm.generate(ids, GREEDY))
    for prompts in (np.array(ids), [np.array(row) for row in ids], torch.tensor(ids)):
        assert tokens_of(llm.generate(prompts, GREEDY)) == wanted  # type: ignore[arg-type]
    assert tokens_of(llm.generate(np.array(ids[0]), GREEDY)) == wanted[:1]  # type: ignore[arg-type]


def test_unmodified_and_partly_loaded_models_run(prompts: list[str]) -> None:
    """The relay batch says what the native engine says; four layers say something else."""
    settings: dict[str, Any] = {"engine": ENGINE, "decode.max_slots": SLOTS}
    outputs = [
        LLM(S, **settings, **more).generate(prompts[:4], GREEDY)
        for more in ({"decode.rebatching": "off"}, {"runner": "baton"}, {"depth": 4})
    ]
    native, relay, shallow = (tokens_of(o) for o in outputs)
    assert native == relay != shallow
    assert {layers for o in outputs[2] for layers in o.exit_layers} <= {2, 4}


def test_the_bar_is_shown_where_it_is_wanted(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[5, 6]], GREEDY)
    assert capsys.readouterr().err == "", "stderr is no terminal here"
    llm.generate([[5, 6]] * 3, GREEDY, progress=True)
    assert "3/3" in capsys.readouterr().err


def test_nothing_is_loaded_where_the_tokenizer_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quadriga.llm.load_runner", lambda spec: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        LLM(save(build("llama"), tmp_path))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[5], []], {}, r"prompts\.1: has no tokens"),
        ([""], {}, r"prompts\.0: has no tokens"),
        ([[5, 99_999]], {}, r"prompts\.0: 99999 is no token id"),
        ([[5], "a"], {"sampling_params": [GREEDY]}, "sampling_params: 1 for 2 prompts"),
        ([5], {"sampling_params": replace(GREEDY, max_tokens=512)}, "more than the 512"),
        ([[1] * 512], {}, "more than the 512"),
        (
            [5],
            {"sampling_params": replace(GREEDY, temperature=-1.0)},
            r"temperature: -1\.0 must be in",
        ),
        (
            [5],
            {"sampling_params": replace(GREEDY, max_tokens=0)},
            "max_tokens: 0 must be at least 1",
        ),
        (
            [5],
            {"sampling_params": replace(GREEDY, max_tokens=5.0)},
            r"max_tokens: 5\.0 must be a whole",
        ),
        (
            [5],
            {"sampling_params": replace(GREEDY, max_tokens="5")},
            "max_tokens: '5' must be a whole",
        ),
        ([5], {"sampling_params": replace(GREEDY, top_p="1")}, "top_p: '1' must be in"),
        ([1.5], {}, r"prompts\.0: must be text, token ids or messages, got 1\.5"),
        ([5], {"sampling_params": replace(GREEDY, min_tokens=25)}, r"min_tokens \(25\)"),
        ([5], {"stop": "ab"}, "stop: must be a list of texts"),
        ([5], {"stop": [""]}, "stop: must be a list of texts"),
        ([5], {"stop": [7]}, "stop: must be a list of texts"),
        ([5], {"exits": ExitParams(0.9, "bounded", 1)}, r"max_depth: 1 must be in 2\.\.8"),
        ([5], {"exits": ExitParams(0.9, "strict", 4)}, "ends at 4 of 8 layers"),
        ([5], {"exits": ExitParams(90, "bounded")}, r"exit_threshold: 90 must be in 0\.\.1"),
        ([5], {"exits": ExitParams(math.nan)}, "exit_threshold: nan must be in"),
        ([5], {"exits": ExitParams(0.9, "boundd")}, "exit_policy: 'boundd' is none of lossless"),  # type: ignore[arg-type]
        ([[{"role": "user", "content": "a"}, "b"]], {}, r"prompts\.0: 'b' is no message"),
        ([{"prompt": "a"}, {"prompt": "b"}], {}, r"prompts\.0: {'prompt': 'a'} is no message"),
        ([{"role": "user", "content": None}], {}, r"prompts\.0: {'role': 'user', .* is no message"),
        (["a", "\ud800"], {}, r"prompts\.1: the text holds a lone surrogate"),
        ([5], {"sampling_params": replace(GREEDY, logit_bias=((614, 1.0),))}, "ids are below 614"),
        ([5], {"sampling_params": replace(GREEDY, logit_bias=((5, math.nan),))}, "nan for 5"),
        (
            [5],
            {"sampling_params": replace(GREEDY, logit_bias={5: 1.0})},
            "logit_bias: .* must be a list",
        ),
        (
            [5],
            {"sampling_params": replace(GREEDY, stop_token_ids=5)},
            "stop_token_ids: 5 must be a list",
        ),
        (
            [5],
            {"sampling_params": replace(GREEDY, stop_token_ids=((5,),))},
            "must be a list of ids",
        ),
        (
            [5],
            {"sampling_params": SamplingParams(0, pooling="max")},
            "pooling: 'max' is no pooling",
        ),  # type: ignore[arg-type]
        (None, {}, "prompts: must be text, .* or a list of these, got None"),
        ({"role": "user", "content": "a"}, {}, "prompts: must be text"),
        ((p for p in ("a", "b")), {}, "prompts: must be text"),
        (b"a", {}, r"prompts\.0: must be text, token ids or messages, got b'a'"),
        (
            [5],
            {"sampling_params": {"max_tokens": 5}},
            "sampling_params: must be SamplingParams, got {'max",
        ),
        (
            [5],
            {"sampling_params": replace(GREEDY, logit_bias=(5,))},
            "a list of pairs of id and value",
        ),
        (
            [5],
            {"sampling_params": replace(GREEDY, logit_bias=((5.5, 1.0),))},
            "must be a list of pairs",
        ),
        (
            [5],
            {"sampling_params": replace(GREEDY, stop_token_ids=("</s>",))},
            "'</s>',.* must be a list of ids",
        ),
        ([5], {"sampling_params": replace(GREEDY, grammar={"type": "object"})}, "is no Grammar"),
        (
            [5],
            {"sampling_params": SamplingParams(9, grammar=Grammar("jsn", "{}"))},
            "is no Grammar",
        ),  # type: ignore[arg-type]
        ([5], {"sampling_params": SamplingParams(9, grammar=Grammar("regex", None))}, "no Grammar"),  # type: ignore[arg-type]
        (
            ["a", "b"],
            {"sampling_params": [GREEDY, replace(GREEDY, stop_token_ids=(614,))]},
            r"^sampling_params\.1: stop_token_ids: 614 is no token id; ids are below 614",
        ),
        (["a", "b"], {"sampling_params": replace(GREEDY, top_p=2)}, r"^top_p: 2 must be in"),
        ([5], {"sampling_params": replace(GREEDY, stop_token_ids=(-1,))}, "-1 is no token id"),
        ([5], {"stop": None}, "stop: must be a list of texts"),
        ([5], {"exits": "strict"}, "exits: must be ExitParams .* got 'strict'"),
        ([5], {"exits": ExitParams(0.9, "bounded", "4")}, "are numbers, got .*max_depth='4'"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_named_before_anything_runs(
    llm: LLM, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        llm.generate(prompts, **options)
    assert refused.value.param
    assert isinstance(refused.value, ContextTooLong) == ("more than" in message)


def test_lists_and_numbers_of_numpy_are_taken(llm: LLM) -> None:
    (known,) = tokens_of(llm.generate([5, 6, 7], GREEDY))
    ids: Any = list(np.array([5, 6, 7]))
    assert tokens_of(llm.generate(ids, GREEDY)) == [known]
    ends: Any = [known[2]]
    seed: Any = np.int32(7)
    drawn = [llm.generate([ids], replace(DRAWN, seed=s)) for s in (7, seed)]
    assert tokens_of(drawn[0]) == tokens_of(drawn[1])
    asked = replace(GREEDY, ignore_eos=False, stop_token_ids=ends)
    (output,) = llm.generate([ids], asked)
    assert output.token_ids == known[: known.index(known[2]) + 1]
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduler": {}}, "scheduler: an LLM takes depth, runner"),
        ({"prefill_replicas": 2}, "prefill_replicas: an LLM takes"),
        ({"engine": {"thread": 2}}, r"engine\.thread: there is no such setting; did you mean"),
        ({"engine.threads": 0}, r"engine\.threads"),
        ({"engine.threads": 100_000}, "less than or equal to 1024"),
        ({"depth": 99}, "99 is beyond the 8 layers"),
        ({"max_model_len": 9}, r"no such setting; did you mean engine\.max_model_len"),
        ({"tensor_parallel_size": 2}, r"did you mean engine\.tensor_parallel"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(S, **settings)
