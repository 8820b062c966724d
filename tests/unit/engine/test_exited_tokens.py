"""The states that tokens leave with: what the length heads read in service is what they learnt."""

from __future__ import annotations

import pytest
import torch

from loadgen.model_costs.engine import engine_spec
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.checkpoint.length_heads import counts_of
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.engine.early_exit.exit_logits import ExitedTokens
from quadriga.engine.early_exit.length_head import LengthHeads, RunnerLengths
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.sampler import RowSampler
from quadriga.interfaces import PrefillChunk
from quadriga.training.checkpoint_io import load_checkpoint
from quadriga.training.recipe.data import EncodedExample, pack
from tests.sequences import make_sequence

PROMPTS = ([20, 30, 40, 50], [21, 31, 41], [22, 32, 42, 52, 62, 72])
CHECKPOINT = read_checkpoint("quadriga-s")


def state(name: str, prompt: list[int]) -> SequenceState:
    return make_sequence(name, prompt, SamplingParams(max_tokens=50, temperature=0.0))


@pytest.fixture
def runner() -> NativeRunner:
    return NativeRunner.load(engine_spec(CHECKPOINT, threads=1, num_rows=4, row_capacity_tokens=64))


@pytest.fixture
def heads() -> LengthHeads:
    found = LengthHeads.load(CHECKPOINT.path, CHECKPOINT.hidden_size, CHECKPOINT.num_layers)
    assert found is not None, "the bundled models come with length heads"
    return found


def trained_states(rows: list[EncodedExample]) -> torch.Tensor:
    """Of the deepest exit, before every answer token: as training gathers them."""
    model = load_checkpoint(CHECKPOINT.path)
    found = []
    for row in rows:
        batch = pack([row], end_weight=1.0, num_tokens=0, next_index=0)
        with torch.no_grad():
            states = model(batch.tokens, batch.positions, batch.groups, batch.answers)
        found.append(states[-1])
    return torch.cat(found)


def test_prefill_and_decode_leave_the_states_that_training_gathers(
    runner: NativeRunner, heads: LengthHeads
) -> None:
    assert runner.exited is None
    states = [state(f"s{i}", list(prompt)) for i, prompt in enumerate(PROMPTS)]
    for row, each in enumerate(states):
        runner.attach(row, each)
    chunks = [PrefillChunk(r, s.prompt_ids, 0, True) for r, s in enumerate(states)]
    for each, token in zip(states, runner.prefill(chunks), strict=True):
        assert token is not None
        each.output_ids.append(token.token_id)
    assert runner.exited is not None
    assert runner.exited.states == states
    first = runner.exited.of_states.clone()
    for each, sampled in zip(states, runner.decode([0, 1, 2]), strict=True):
        each.output_ids.append(sampled.token_id)
    second = runner.exited.of_states.clone()
    rows = [EncodedExample(s.prompt_ids, s.output_ids) for s in states]
    wanted = trained_states(rows).reshape(len(states), 2, -1)
    torch.testing.assert_close(first, wanted[:, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(second, wanted[:, 1], rtol=1e-3, atol=1e-3)
    asked = RunnerLengths(runner, heads).ask()
    assert asked is not None
    assert asked[0] == states
    said = torch.tensor([[p.mean, p.lower, p.upper] for p in asked[1]()])
    # Each prompt's length, and the one token before that the state did not make.
    counts = torch.tensor([counts_of(len(prompt), 1) for prompt in PROMPTS])
    expected = heads.predict(wanted[:, 1], CHECKPOINT.num_layers, counts)[:, [0, 1, 3]]
    torch.testing.assert_close(said, expected, rtol=0.02, atol=0.5)
    for row in range(len(states)):
        assert runner.exited is not None
        runner.detach(row)
    assert runner.exited is None, "an idle runner holds no sequence"


def test_a_chunk_in_the_middle_of_a_prompt_leaves_nothing(
    runner: NativeRunner, heads: LengthHeads
) -> None:
    runner.attach(0, state("s", [20, 30, 40, 50]))
    runner.prefill([PrefillChunk(0, [20, 30], 0, False)])
    assert runner.exited is None
    assert RunnerLengths(runner, heads).ask() is None


def test_where_some_left_states_and_sequences_stay_parallel() -> None:
    states = [state(f"s{i}", [5, 6]) for i in range(4)]
    samplers = [RowSampler(s, CHECKPOINT.vocab_size, ()) for s in states]
    hidden = torch.arange(8.0).reshape(4, 2)
    left = ExitedTokens(4, samplers, hidden, [3, 0, 2, 1])
    assert [s.sequence_id for s in left.states] == ["s3", "s0", "s2", "s1"]
    assert left.of_states[:, 0].tolist() == [6.0, 0.0, 4.0, 2.0]
