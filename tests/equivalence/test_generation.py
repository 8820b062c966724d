"""Greedy output equals `transformers`, token for token, whatever joins and leaves around it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quadriga.checkpoint.folder import ASSETS
from quadriga.core.request import SequenceState
from quadriga.engine import load_runner
from quadriga.tasks import sample_examples
from tests.equivalence.churning import ChurningBatch
from tests.equivalence.models import VARIANTS, build, make_spec, make_state, save
from tests.equivalence.relay_models import generate

NUM_PROMPTS = 200
NUM_ROWS = 16
TIE_LOGITS = 1e-4
MAX_TIES = 4


def count_ties(model: Any, states: list[SequenceState]) -> int:
    """Check every output token against the reference's best; return how many were ties.

    A token that is the best after its prefix, at every position, is what greedy generation gives.
    """
    ties = 0
    for state in states:
        ids = torch.tensor([state.prompt_ids + state.output_ids])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(state.prompt_ids) - 1 : -1]
        best, chosen = logits.max(dim=-1).values, torch.tensor(state.output_ids)
        gaps = best - logits.gather(1, chosen[:, None])[:, 0]
        wrong = logits.argmax(dim=-1) != chosen
        assert (gaps[wrong] <= TIE_LOGITS).all(), f"{state.prompt_ids}: off by {gaps.max():.2g}"
        ties += int(wrong.sum())
    return ties


@pytest.fixture(params=["off", "wait"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bundled_prompts(model: str) -> Iterator[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / model)
    for example in sample_examples(seed=77):
        yield tokenizer(example.text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["quadriga-s", "quadriga-l"])
def test_bundled_models_200_prompts(name: str, mode: str) -> None:
    num_prompts = NUM_PROMPTS if mode == "wait" else NUM_PROMPTS // 4
    rng = random.Random(5)
    states = [
        make_state(prompt, max_tokens=rng.choice([1, 2, 5, 12, 20, 45]))
        for prompt in islice(bundled_prompts(name), num_prompts)
    ]
    runner = load_runner(
        make_spec(ASSETS / name, compile=mode, num_rows=NUM_ROWS, row_capacity_tokens=1024)
    )
    ChurningBatch(runner, seed=1).run(states)
    model = AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32).eval()
    ties = count_ties(model, states)
    print(f"{name} {mode}: {sum(len(s.output_ids) for s in states)} tokens, {ties} ties")
    assert ties <= MAX_TIES


def test_equals_generate_itself(mode: str) -> None:
    """The same, against `generate` with its own cache, alone and one by one."""
    path = ASSETS / "quadriga-s"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    states = [make_state(p, max_tokens=24) for p in islice(bundled_prompts("quadriga-s"), 6)]
    runner = load_runner(make_spec(path, compile=mode, num_rows=NUM_ROWS, row_capacity_tokens=512))
    ChurningBatch(runner, seed=2).run(states)
    for state in states:
        wanted = generate(model, state.prompt_ids, 24)
        assert state.output_ids == wanted


@pytest.mark.parametrize("variant", ["mistral-window", "qwen2-tied", "qwen3", "opt-pre-norm"])
def test_other_families_in_mixed_batches(variant: str, mode: str, tmp_path: Path) -> None:
    model = build(variant)
    runner = load_runner(make_spec(save(model, tmp_path), compile=mode, num_rows=NUM_ROWS))
    rng = random.Random(3)
    states = [
        make_state([rng.randrange(3, 130) for _ in range(rng.randint(1, 50))], max_tokens=20)
        for _ in range(24)
    ]
    ChurningBatch(runner, seed=4).run(states)
    assert count_ties(model, states) <= 1


@pytest.mark.parametrize("variant", ["llama", "qwen3", "opt-pre-norm", "opt-post-norm-projected"])
@pytest.mark.parametrize("depth", [1, 2])
def test_partial_depth_equals_a_model_cut_there(
    variant: str, depth: int, mode: str, tmp_path: Path
) -> None:
    model = build(variant)
    assert variant in VARIANTS
    runner = load_runner(
        make_spec(save(model, tmp_path), depth=depth, compile=mode, num_rows=NUM_ROWS)
    )
    decoder = model.model.decoder if hasattr(model.model, "decoder") else model.model
    decoder.layers = decoder.layers[:depth]
    states = [make_state([7, 8, 9, 10 + i], max_tokens=12) for i in range(4)]
    ChurningBatch(runner, seed=6).run(states)
    assert count_ties(model, states) == 0


def test_seeded_sampling_does_not_depend_on_the_batch(mode: str, tmp_path: Path) -> None:
    """The same requests alone, and among others: the same tokens (float32, eager and compiled)."""
    path = save(build("llama"), tmp_path)

    def states() -> list[SequenceState]:
        return [
            make_state([3 + i, 9, 4], max_tokens=25, temperature=0.8, top_p=0.9, seed=i // 2)
            for i in range(12)
        ]

    together, alone = states(), states()
    for i, state in enumerate(together):
        state.choice = alone[i].choice = i % 2
    ChurningBatch(load_runner(make_spec(path, compile=mode, num_rows=NUM_ROWS)), seed=8).run(
        together
    )
    runner = load_runner(make_spec(path, compile=mode, num_rows=NUM_ROWS))
    for state in alone:
        ChurningBatch(runner, seed=9).run([state])
    assert [s.output_ids for s in together] == [s.output_ids for s in alone]
    assert len({tuple(s.output_ids) for s in together}) > 8
