"""Embeddings are `transformers`' last hidden states, pooled, however they are computed."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from quadriga import LLM, SamplingParams
from quadriga.core.request import Pooling
from quadriga.engine import load_runner
from quadriga.engine.baton.runner import BatonRunner
from quadriga.errors import InvalidRequest
from quadriga.interfaces import PrefillChunk
from tests.equivalence.models import VARIANTS, build, make_spec, make_state, save
from tests.equivalence.relay_models import FAMILIES, VOCAB, build_relay

LENGTHS = (40, 23)
TOLERANCE = 1e-4
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


def wanted(model: PreTrainedModel, prompt_ids: list[int], pooling: Pooling) -> Any:
    with torch.inference_mode():
        states = model.base_model(torch.tensor([prompt_ids])).last_hidden_state[0]
    return (states.mean(0) if pooling == "mean" else states[-1]).numpy()


def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, VOCAB, (length,)).tolist() for length in LENGTHS]


def computed(runner: Any, pooling: Pooling, borders: tuple[int, ...]) -> list[array[float]]:
    """Both prompts beside each other, in chunks that end at these positions, and at their ends."""
    found: dict[int, array[float]] = {}
    states = [make_state(ids, max_tokens=0, pooling=pooling) for ids in prompts()]
    for row, state in enumerate(states):
        runner.attach(row, state)
    start = 0
    for stop in (*borders, max(LENGTHS)):
        rows = [row for row, length in enumerate(LENGTHS) if length > start]
        chunks = []
        for row in rows:
            ids, end = states[row].prompt_ids, min(stop, LENGTHS[row])
            chunks.append(PrefillChunk(row, ids[start:end], start, end == LENGTHS[row]))
        for row, token in zip(rows, runner.prefill(chunks), strict=True):
            if token is not None:
                assert token.embedding is not None
                found[row] = token.embedding
        start = stop
    for row in range(len(states)):
        runner.detach(row)
    return [found[row] for row in range(len(states))]


@pytest.mark.parametrize("mode", ["off", "wait"])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_native_families_equal_transformers(variant: str, mode: str, tmp_path: Path) -> None:
    model = build(variant)
    runner = load_runner(make_spec(save(model, tmp_path), compile=mode))
    for pooling in POOLINGS:
        for row, vector in enumerate(computed(runner, pooling, (1, 14))):
            exact = wanted(model, prompts()[row], pooling)
            assert np.abs(np.array(vector) - exact).max() < TOLERANCE


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_relay_batch_equals_transformers(family: str, tmp_path: Path) -> None:
    model = build_relay(FAMILIES[family]())
    runner = BatonRunner.load(make_spec(save(model, tmp_path)))
    for pooling in POOLINGS:
        for row, vector in enumerate(computed(runner, pooling, (14,))):
            exact = wanted(model, prompts()[row], pooling)
            assert np.abs(np.array(vector) - exact).max() < TOLERANCE


def test_a_mean_does_not_depend_on_where_chunks_end(tmp_path: Path) -> None:
    """Of equal states: the compiled kernels give them, whatever shares the pass."""
    runner = load_runner(make_spec(save(build("llama"), tmp_path), compile="wait"))
    whole = computed(runner, "mean", ())
    for borders in ((16,), (1, 2, 3), (14, 22)):
        assert computed(runner, "mean", borders) == whole


def test_cached_prefixes_and_neighbours_change_nothing() -> None:
    llm = LLM("quadriga-s", **{"engine.compile": "off", "prefill.chunk_tokens": 64})
    text = "Count from 3 to 20.\n" * 20
    asked = {p: SamplingParams(0, temperature=0.0, pooling=p) for p in POOLINGS}

    def vectors(texts: list[str], pooling: Pooling) -> list[Any]:
        return llm.generate(texts, asked[pooling], progress=False)

    try:
        alone = {p: vectors([text], p)[0] for p in POOLINGS}
        llm.generate([text], SamplingParams(4, temperature=0.0), progress=False)
        for pooling in POOLINGS:
            beside = vectors(["Sort: 42 7 19 3 88\n", text, "a"], pooling)[1]
            assert (beside.cached_tokens > 0) is (pooling == "last")
            exact = np.array(alone[pooling].embedding)
            assert np.abs(np.array(beside.embedding) - exact).max() < TOLERANCE
            assert not beside.token_ids
    finally:
        llm.close()


def test_a_part_of_the_layers_has_no_embeddings() -> None:
    llm = LLM("quadriga-s", depth=4, **{"engine.compile": "off"})
    try:
        with pytest.raises(InvalidRequest, match="pooling: embeddings need all"):
            llm.generate("a", SamplingParams(0, pooling="mean"), progress=False)
    finally:
        llm.close()


def test_an_embedding_generates_nothing() -> None:
    with pytest.raises(InvalidRequest, match="pooling: 'mean' makes an embedding"):
        SamplingParams(4, pooling="mean").check(9)
