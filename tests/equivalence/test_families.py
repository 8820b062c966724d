"""Every native family computes what `transformers` computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quadriga.engine import load_runner
from quadriga.interfaces import PrefillChunk
from tests.equivalence.models import VARIANTS, build, make_spec, make_state, save

LENGTH = 40
TOLERANCE = 1e-4


@pytest.mark.parametrize("mode", ["off", "wait"])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_equal_transformers(variant: str, mode: str, tmp_path: Path) -> None:
    """Prompt logits, in uneven chunks beside a neighbour, then decode steps."""
    model = build(variant)
    runner = load_runner(make_spec(save(model, tmp_path), compile=mode))
    torch.manual_seed(1)
    ids = torch.randint(3, 130, (2, LENGTH))
    with torch.inference_mode():
        wanted = torch.log_softmax(model(ids).logits, dim=-1)
    top = 130
    states = [
        make_state(row[: LENGTH - 5].tolist(), num_logprobs=top, num_prompt_logprobs=top)
        for row in ids
    ]
    got: list[list[dict[int, float]]] = [[], []]
    for row, state in enumerate(states):
        runner.attach(row, state)
    for start, stop in ((0, 1), (1, 14), (14, LENGTH - 5)):
        chunks = [
            PrefillChunk(row, state.prompt_ids[start:stop], start, stop == LENGTH - 5)
            for row, state in enumerate(states)
        ]
        results = runner.prefill(chunks)
    for row, token in enumerate(results):
        assert token is not None and token.prompt_logprobs is not None and token.logprob
        got[row] += [dict(entry.top) for entry in token.prompt_logprobs[1:]]
        got[row].append(dict(token.logprob.top))
    for step in range(LENGTH - 5, LENGTH):
        for state, row_ids in zip(states, ids, strict=True):
            state.output_ids.append(int(row_ids[step]))  # teacher forcing
        for row, token in enumerate(runner.decode([0, 1])):
            assert token.logprob is not None
            got[row].append(dict(token.logprob.top))
    for row in range(2):
        dense = torch.tensor([[entry[t] for t in range(130)] for entry in got[row]])
        assert dense.shape[0] == LENGTH
        assert (dense - wanted[row]).abs().max() < TOLERANCE
