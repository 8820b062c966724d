"""The relay batch as a runner: rows, chunks, logprobs, KV in and out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quadriga.checkpoint.exits import Criterion, ExitSpec
from quadriga.engine import load_runner
from quadriga.engine.baton.model import CausalModel
from quadriga.engine.baton.runner import BatonRunner
from quadriga.errors import ConfigError, InvariantViolation
from quadriga.interfaces import ModelRunner, PrefillChunk
from quadriga.scheduling.transfer.rebuild import chunk_of
from tests.equivalence.models import make_spec, make_state, save, start_row, whole_prompt
from tests.equivalence.relay_models import FAMILIES, VOCAB, build_relay, generate
from tests.equivalence.test_lossless import make_loop
from tests.equivalence.test_pause import lacking


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build_relay(FAMILIES["gpt-neox"]())


@pytest.fixture(scope="module")
def checkpoint(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("gpt-neox"))


@pytest.fixture
def runner(checkpoint: Path) -> BatonRunner:
    return BatonRunner.load(make_spec(checkpoint, runner="baton", row_capacity_tokens=32))


def test_the_factory_takes_the_runner_the_spec_names(checkpoint: Path) -> None:
    runner: ModelRunner = load_runner(make_spec(checkpoint, runner="baton", num_rows=3))
    assert isinstance(runner, BatonRunner)
    assert (runner.num_layers, runner.num_rows, runner.row_capacity_tokens) == (3, 3, 96)


def test_the_native_runner_names_its_families(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="GPTNeoXForCausalLM; the native engine runs"):
        load_runner(make_spec(checkpoint))


def test_rows_and_positions_that_are_not_there(runner: BatonRunner) -> None:
    with pytest.raises(InvariantViolation, match="row 8 is outside"):
        runner.read_kv(8, 0, 1, 0, 0)
    with pytest.raises(InvariantViolation, match="row -1 is outside"):
        runner.attach(-1, make_state([1]))
    runner.attach(0, make_state([1]))
    with pytest.raises(InvariantViolation, match="only 0 positions are computed"):
        runner.prefill([PrefillChunk(0, [1], 5, True)])


def test_a_lost_sequence_is_rebuilt_and_goes_on(runner: BatonRunner) -> None:
    state = make_state([1, 5, 9], num_prompt_logprobs=0)
    start_row(runner, 0, state)
    state.exit_layers.append(3)
    for _ in range(6):
        token = runner.decode([0])[0]
        state.output_ids.append(token.token_id)
        state.exit_layers.append(token.exit_layer)
    lost = replace(state, output_ids=state.output_ids[:4], exit_layers=state.exit_layers[:4])
    runner.attach(1, lost)
    for begin, stop in ((0, 2), (2, 6)):
        chunk = chunk_of(lost, row=1, start=begin, stop=stop, num_layers=runner.num_layers)
        assert runner.prefill([chunk]) == [None]
    kv = runner.read_kv(0, 0, 3, 0, 6)
    torch.testing.assert_close(runner.read_kv(1, 0, 3, 0, 6), kv, rtol=1e-4, atol=1e-4)
    while len(lost.output_ids) < len(state.output_ids):
        lost.output_ids.append(runner.decode([1])[0].token_id)
    assert lost.output_ids == state.output_ids
    runner.attach(2, make_state([1]))
    with pytest.raises(InvariantViolation, match="left after 2 layers"):
        runner.prefill([PrefillChunk(2, [1], 0, False, depths=[2])])


def test_a_row_is_named_once(runner: BatonRunner) -> None:
    start_row(runner, 0, make_state([4, 5]))
    with pytest.raises(InvariantViolation, match="name one twice"):
        runner.decode([0, 0])


def test_decoding_needs_the_past(runner: BatonRunner) -> None:
    state = make_state([4, 5, 6])
    runner.attach(0, state)
    runner.prefill([PrefillChunk(0, [4], 0, False)])
    with pytest.raises(InvariantViolation, match="1 positions are computed"):
        runner.decode([0])


def test_a_full_row_says_so(runner: BatonRunner) -> None:
    state = make_state([4] * 32)
    start_row(runner, 0, state)
    with pytest.raises(InvariantViolation, match="32 fit"):
        runner.decode([0])


def test_a_prompt_of_one_token_needs_no_prefill(
    runner: BatonRunner, model: PreTrainedModel
) -> None:
    state = make_state([77])
    runner.attach(3, state)
    for _ in range(6):
        state.output_ids.append(runner.decode([3])[0].token_id)
    assert state.output_ids == generate(model, [77], 6)


def test_a_step_may_be_repeated(runner: BatonRunner) -> None:
    """What was not appended is computed again: the row forgets what lies beyond its state."""
    state, other = make_state([4, 5, 6]), make_state([9] * 10)
    start_row(runner, 0, state)
    start_row(runner, 1, other)
    once = [t.token_id for t in runner.decode([0, 1])]
    assert [t.token_id for t in runner.decode([0, 1])] == once
    assert [t.token_id for t in runner.decode([1, 0])] == once[::-1]


def test_kv_of_a_running_row_is_the_one_that_prefill_computes(runner: BatonRunner) -> None:
    state = make_state([4, 5, 6, 7, 8])
    start_row(runner, 0, state)
    start_row(runner, 1, make_state([9] * 12))
    state.output_ids.append(runner.decode([1, 0])[1].token_id)
    again = make_state(state.prompt_ids + state.output_ids[:1])
    start_row(runner, 2, again)
    got, wanted = (runner.read_kv(row, 0, 3, 0, 6) for row in (0, 2))
    assert (got - wanted).abs().max() < 1e-5


def test_prompts_of_one_pass_end_where_they_end(
    runner: BatonRunner, model: PreTrainedModel
) -> None:
    states = [make_state(list(range(20 + i, 30 + 2 * i))) for i in (2, 0, 1)]
    for row, state in enumerate(states):
        runner.attach(row, state)
    tokens = runner.prefill([whole_prompt(row, state) for row, state in enumerate(states)])
    for state, token in zip(states, tokens, strict=True):
        assert token is not None
        assert [token.token_id] == generate(model, state.prompt_ids, 1)


def test_writing_into_a_running_row(runner: BatonRunner, model: PreTrainedModel) -> None:
    """It leaves the batch, takes the write, and goes on."""
    state, other = make_state([4, 5, 6, 7, 8]), make_state([9] * 12)
    start_row(runner, 0, state)
    start_row(runner, 1, other)
    state.output_ids.append(runner.decode([0, 1])[0].token_id)
    kv = runner.read_kv(0, 0, 3, 0, 5)
    runner.write_kv(0, 0, 0, torch.zeros_like(kv))
    runner.write_kv(0, 0, 0, kv)
    while len(state.output_ids) < 6:
        state.output_ids.append(runner.decode([0])[0].token_id)
    assert state.output_ids == generate(model, state.prompt_ids, 6)


def test_prompt_logprobs_equal_the_models(runner: BatonRunner, model: PreTrainedModel) -> None:
    """Over chunks, beside a prompt in the same pass that wants none."""
    prompt = [7, 40, 12, 99, 3, 56, 21]
    state, plain = make_state(prompt, num_prompt_logprobs=2), make_state([5, 6, 7, 8])
    runner.attach(0, state)
    runner.attach(1, plain)
    chunks = [PrefillChunk(0, prompt[:4], 0, False), whole_prompt(1, plain)]
    first, other = runner.prefill(chunks)
    assert first is None
    assert other is not None and other.prompt_logprobs is None
    token = runner.prefill([PrefillChunk(0, prompt[4:], 4, True)])[0]
    assert token is not None and token.prompt_logprobs is not None
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1)
    assert [entry.token_id for entry in token.prompt_logprobs] == prompt
    assert token.prompt_logprobs[0].logprob is None
    for position, entry in enumerate(token.prompt_logprobs[1:]):
        assert entry.logprob == pytest.approx(float(wanted[position, entry.token_id]), abs=1e-4)
        assert len(entry.top) == 2


def test_penalties_and_logprobs_reach_the_sampler(runner: BatonRunner) -> None:
    state = make_state([4, 5, 6], logit_bias=((VOCAB - 1, 100.0),), num_logprobs=3)
    start_row(runner, 0, state)
    token = runner.decode([0])[0]
    assert state.output_ids == [VOCAB - 1]
    assert token.token_id == VOCAB - 1
    assert token.logprob is not None and len(token.logprob.top) == 3


@pytest.mark.parametrize("criterion", ["top", "margin"])
def test_the_whole_model_is_one_segment(checkpoint: Path, criterion: Criterion) -> None:
    """`advance` and `emit` are `decode` in two calls, with a confidence between."""
    spec = make_spec(checkpoint, runner="baton", exits=ExitSpec(criterion=criterion))
    runner = BatonRunner.load(spec)
    assert runner.segment_ends == (3,)
    states = [make_state([4, 5, 6]), make_state([9] * 10, temperature=0.7, num_logprobs=2)]
    for row, state in enumerate(states):
        start_row(runner, row, state)
    wanted = runner.decode([0, 1])
    with pytest.raises(InvariantViolation, match="not all advanced"):
        runner.emit([0])
    confidences = runner.advance([1, 0], 0, 1)
    assert runner.emit([1, 0]) == wanted[::-1]
    assert runner.emit([0]) == wanted[:1]
    assert all(0 < confidence <= 1 for confidence in confidences)
    assert wanted[1].logprob is not None
    best, second = (math.exp(logprob) for _, logprob in wanted[1].logprob.top)
    expected = best - second if criterion == "margin" else best
    assert confidences[0] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(InvariantViolation, match="has one"):
        runner.advance([0], 0, 2)


def test_suspended_here_restored_there(runner: BatonRunner, model: PreTrainedModel) -> None:
    """Its row goes to another sequence meanwhile."""
    state, other = make_state([4, 5, 6, 7, 8]), make_state([9] * 12)
    start_row(runner, 0, state)
    start_row(runner, 1, other)
    state.output_ids.append(runner.decode([0, 1])[0].token_id)
    suspended = runner.suspend(0)
    start_row(runner, 0, make_state([3] * 20))
    runner.decode([0])
    runner.restore(5, state, suspended)
    while len(state.output_ids) < 6:
        state.output_ids.append(runner.decode([0, 5])[1].token_id)
    assert state.output_ids == generate(model, state.prompt_ids, 6)
    with pytest.raises(InvariantViolation, match="row 1 is taken"):
        runner.restore(1, state, suspended)
    with pytest.raises(InvariantViolation, match="row 4 has no sequence"):
        runner.suspend(4)


def test_passes_that_lack_memory_are_run_in_smaller_parts(
    checkpoint: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is enough for eight tokens a prompt's pass, and for two rows a step."""

    def lacks(_: CausalModel, ids: torch.Tensor, *__: Any) -> bool:
        return ids.numel() > 8 if ids.shape[1] > 1 else len(ids) > 2

    loop = make_loop(BatonRunner.load(make_spec(checkpoint, runner="baton")), None)
    monkeypatch.setattr(CausalModel, "__call__", lacking(CausalModel.__call__, lacks))
    made = [
        replace(make_state(list(range(3 + i, 15 + 3 * i)), max_tokens=8), sequence_id=f"s{i}")
        for i in range(4)
    ]
    list(loop.run(made))
    for state in made:
        assert state.output_ids == generate(model, state.prompt_ids, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(checkpoint: Path, dtype: str) -> None:
    runner = BatonRunner.load(make_spec(checkpoint, runner="baton", dtype=dtype))
    state = make_state([4, 5, 6])
    start_row(runner, 0, state)
    state.output_ids.append(runner.decode([0])[0].token_id)
    assert runner.read_kv(0, 0, 3, 0, 4).dtype is getattr(torch, dtype)


def test_partial_depth_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="load all 3 layers, not 2"):
        load_runner(make_spec(checkpoint, runner="baton", depth=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_is_named(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.device"):
        load_runner(make_spec(checkpoint, runner="baton", device="cuda"))
