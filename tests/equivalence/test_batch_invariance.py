"""On the kernels, what a sequence gets does not depend on its company: not by a single bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quadriga.engine import load_runner
from quadriga.engine.model_runner import NativeRunner
from quadriga.interfaces import PrefillChunk
from tests.equivalence.models import build, make_spec, make_state, save

VARIANTS = ["llama", "llama-head-dim", "mistral-window", "qwen3-bias-tied", "opt-pre-norm"]
LENGTHS = [1, 2, 5, 17, 33, 40, 3, 16]


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(request.param), tmp_path_factory.mktemp(request.param))


def prompt(length: int) -> list[int]:
    return torch.randint(
        3, 130, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


def kv_of(runner: NativeRunner, row: int, length: int) -> torch.Tensor:
    return runner.read_kv(row, 0, runner.num_layers, 0, length)


def prefill_alone(runner: NativeRunner, length: int) -> torch.Tensor:
    """The reference: one sequence, its prompt in one piece."""
    runner.attach(7, make_state(prompt(length)))
    runner.prefill([PrefillChunk(7, prompt(length), 0, True)])
    kv = kv_of(runner, 7, length)
    runner.detach(7)
    return kv


def test_prefill_in_company_chunks_and_threads(checkpoint: Path) -> None:
    one = load_runner(make_spec(checkpoint, compile="wait"))
    two = load_runner(make_spec(checkpoint, compile="wait", threads=3))
    for runner in (one, two):
        for row, length in enumerate(LENGTHS[:7]):
            runner.attach(row, make_state(prompt(length)))
        for begin in range(0, max(LENGTHS), 6):
            runner.prefill(
                [
                    PrefillChunk(row, prompt(n)[begin : begin + 6], begin, begin + 6 >= n)
                    for row, n in enumerate(LENGTHS[:7])
                    if begin < n
                ]
            )
    for row, length in enumerate(LENGTHS[:7]):
        alone = prefill_alone(one, length)
        assert torch.equal(kv_of(one, row, length), alone)
        assert torch.equal(kv_of(two, row, length), alone)
    one.detach(0)


def test_decode_equals_prefill(checkpoint: Path) -> None:
    """Token by token, beside others, gives the KV of the whole prompt: so rebuilding is exact."""
    runner = load_runner(make_spec(checkpoint, compile="wait"))
    states = [make_state(prompt(n)[:1]) for n in LENGTHS[:7]]
    for row, state in enumerate(states):
        runner.attach(row, state)
        runner.prefill([PrefillChunk(row, state.prompt_ids, 0, True)])
    for position in range(1, max(LENGTHS)):
        rows = [row for row, n in enumerate(LENGTHS[:7]) if position < n]
        for row in rows:
            states[row].output_ids.append(prompt(LENGTHS[row])[position])
        runner.decode(rows[::-1] if position % 2 else rows)
    for row, length in enumerate(LENGTHS[:7]):
        assert torch.equal(kv_of(runner, row, length), prefill_alone(runner, length))
