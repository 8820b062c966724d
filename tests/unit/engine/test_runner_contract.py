"""What every runner promises of its rows, of chunks, and of layers that are complete."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quadriga.engine import load_runner
from quadriga.errors import InvariantViolation
from quadriga.interfaces import PrefillChunk
from tests.equivalence.models import build, make_spec, make_state, save, whole_prompt
from tests.equivalence.relay_models import FAMILIES, build_relay

RUNNERS: dict[str, dict[str, str]] = {
    "native": {},
    "compiled": {"compile": "wait"},
    "relay": {"runner": "baton"},
}


@pytest.fixture(scope="module", params=RUNNERS)
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    is_relay = request.param == "relay"
    model: PreTrainedModel = build_relay(FAMILIES["gpt-neox"]()) if is_relay else build("llama")
    path = save(model, tmp_path_factory.mktemp("model"))
    return make_spec(path, row_capacity_tokens=32, **RUNNERS[request.param])


@pytest.fixture
def runner(spec: Any) -> Any:
    return load_runner(spec)


def test_rows_are_exclusive(runner: Any) -> None:
    runner.attach(0, make_state([1]))
    with pytest.raises(InvariantViolation, match="row 0 is taken"):
        runner.attach(0, make_state([1]))
    runner.detach(0)
    runner.detach(0)
    runner.attach(0, make_state([1]))
    with pytest.raises(InvariantViolation, match="row 1 has no sequence"):
        runner.decode([1])


def test_chunks_must_fit(runner: Any) -> None:
    runner.attach(0, make_state([1]))
    with pytest.raises(InvariantViolation, match=r"positions 30\.\.33"):
        runner.prefill([PrefillChunk(0, [1] * 3, 30, True)])
    with pytest.raises(InvariantViolation, match="non-empty"):
        runner.prefill([PrefillChunk(0, [], 0, True)])


def test_nothing_to_do(runner: Any) -> None:
    assert runner.prefill([]) == []
    assert runner.decode([]) == []


def test_layers_are_announced_when_their_kv_is_complete(runner: Any) -> None:
    """Of prompts of several lengths, which the relay batch computes in two passes."""
    states = {0: make_state([4, 5, 6, 7]), 2: make_state([8, 9, 10]), 5: make_state([3] * 20)}
    for row, state in states.items():
        runner.attach(row, state)
    seen: list[tuple[int, int]] = []

    def kv(first: int, count: int) -> list[torch.Tensor]:
        return [runner.read_kv(r, first, count, 0, len(s.prompt_ids)) for r, s in states.items()]

    copies: list[list[torch.Tensor]] = []

    def on_layers(first: int, count: int) -> None:
        seen.append((first, count))
        copies.append(kv(first, count))

    runner.prefill([whole_prompt(row, state) for row, state in states.items()], on_layers)
    assert seen == [(0, 1), (1, 1), (2, 1)]
    for whole, *parts in zip(kv(0, 3), *copies, strict=True):
        assert whole.is_contiguous()
        assert torch.equal(torch.cat(parts), whole)
        assert all(part.abs().sum() > 0 for part in parts)
