"""The native runner: depths, prompt logprobs, KV in and out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.checkpoint.exits import ExitSpec
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SequenceState
from quadriga.engine import load_runner
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError
from quadriga.interfaces import PrefillChunk
from tests.equivalence.models import build, make_spec, make_state, save, start_row, whole_prompt
from tests.equivalence.paged import load_on_pages

MODES = ["off", "wait"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama"), tmp_path_factory.mktemp("llama"))


def step(runner: NativeRunner, rows: list[int], states: list[SequenceState]) -> None:
    for state, token in zip(states, runner.decode(rows), strict=True):
        state.output_ids.append(token.token_id)


def prompts(n: int, *, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, 130, (int(torch.randint(1, 30, (1,), generator=g)),), generator=g).tolist()
        for _ in range(n)
    ]


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, quadriga.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_partial_depth_reports_its_exit_layer(checkpoint: Path) -> None:
    runner = load_runner(make_spec(checkpoint, depth=2))
    state = make_state([4, 5])
    runner.attach(0, state)
    token = runner.prefill([whole_prompt(0, state)])[0]
    assert runner.num_layers == 2
    assert token is not None
    assert token.exit_layer == 2


@pytest.mark.parametrize("mode", MODES)
def test_kv_moved_to_another_runner_continues_the_same(checkpoint: Path, mode: str) -> None:
    """Prefill here, decode there, in another row, sampled: as if nothing had happened."""
    here, there = (load_runner(make_spec(checkpoint, compile=mode)) for _ in range(2))
    for prompt in prompts(4, seed=3):
        sampling = {"temperature": 0.9, "seed": 5, "top_p": 0.95}
        stays, moves = make_state(prompt, **sampling), make_state(prompt, **sampling)
        start_row(here, 0, stays)
        start_row(here, 1, moves)
        for _ in range(5):
            step(here, [0, 1], [stays, moves])
        num_tokens = moves.num_tokens - 1  # the last token's KV is computed by the next step
        for first, count in ((0, 2), (2, 1)):
            for begin in range(0, num_tokens, 7):
                end = min(num_tokens, begin + 7)
                there.write_kv(6, first, begin, here.read_kv(1, first, count, begin, end))
        here.detach(1)
        there.attach(6, moves)
        for _ in range(12):
            step(here, [0], [stays])
            step(there, [6], [moves])
        assert moves.output_ids == stays.output_ids
        here.detach(0)
        there.detach(6)


def test_prompt_logprobs_over_chunks(checkpoint: Path) -> None:
    runner = load_runner(make_spec(checkpoint))
    prompt = prompts(1, seed=9)[0] + [7, 8, 9, 10, 11, 12]
    whole, parts = (make_state(prompt, num_prompt_logprobs=2) for _ in range(2))
    runner.attach(0, whole)
    runner.attach(1, parts)
    expected = runner.prefill([whole_prompt(0, whole)])[0]
    assert runner.prefill([PrefillChunk(1, prompt[:5], 0, False)]) == [None]
    got = runner.prefill([PrefillChunk(1, prompt[5:], 5, True)])[0]
    assert expected is not None
    assert got is not None
    assert expected.prompt_logprobs is not None
    assert got.prompt_logprobs is not None
    assert [e.token_id for e in got.prompt_logprobs] == prompt
    assert got.prompt_logprobs[0].logprob is None
    for a, b in zip(got.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert len(a.top) == 2
    runner.detach(0)
    runner.attach(0, make_state(prompt))
    plain = runner.prefill([whole_prompt(0, make_state(prompt))])[0]
    assert plain is not None
    assert plain.prompt_logprobs is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_is_not_promised(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.device"):
        load_runner(make_spec(checkpoint, device="cuda"))


def test_learned_positions_limit_the_row(tmp_path: Path) -> None:
    path = save(build("opt-pre-norm"), tmp_path)
    with pytest.raises(ConfigError, match="96 learned positions"):
        load_runner(make_spec(path, row_capacity_tokens=97))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_eagerly(checkpoint: Path, dtype: str) -> None:
    runner = load_runner(make_spec(checkpoint, dtype=dtype, compile="wait"))
    state = make_state([4, 5, 6])
    start_row(runner, 0, state)
    step(runner, [0], [state])
    assert " torch " in runner.numerics
    assert len(state.output_ids) == 2


def load_compiled(spec: EngineSpec) -> NativeRunner:
    return load_runner(replace(spec, compile="wait"))


@pytest.mark.parametrize("load", [load_runner, load_compiled, load_on_pages])
def test_greedy_tokens_that_no_finite_number_chose_are_errors(
    tmp_path: Path, load: Callable[[EngineSpec], NativeRunner]
) -> None:
    """Decoded, at an exit, or as the whole model's answer to drafts."""
    model = build("llama")
    torch.nn.init.constant_(model.model.norm.weight, 3e38)
    path = save(model, tmp_path)
    (path / "exits.json").write_text('{"kind": "shared", "layers": [1, 2]}')
    runner = load(make_spec(path, exits=ExitSpec((1, 2))))
    states = [make_state([4, 5, 6 + row]) for row in range(3)]
    for row, state in enumerate(states):
        start_row(runner, row, state)
    found = runner.decode([0])
    runner.advance([1], 0, 1)
    found += runner.emit([1])
    runner.advance([2], 0, 1)
    runner.draft([2])
    found += runner.verify([2])[0]
    assert [str(token.error)[:45] for token in found] == [
        "the model's numbers are not finite after 1 to"
    ] * 3
    assert all(token.token_id < 130 for token in found)


@torch.inference_mode()
def test_tokens_of_one_row_attend_to_it_together(checkpoint: Path) -> None:
    """Also where others lie between them: no token copies the row for itself."""
    decoder = load_runner(make_spec(checkpoint)).model.decoder
    ids = [3 + 5 * i % 120 for i in range(64)]
    rows, positions = np.array([0, 2, *[0] * 63]), np.array([63, 0, *range(63)])
    batch = decoder.plan_tokens(rows, positions)
    assert [(s.row, s.begin, s.end) for s in batch.spans] == [(0, 0, 1), (2, 1, 2), (0, 2, 65)]
    assert not batch.is_decode
    found = decoder.begin([ids[63], 7, *ids[:63]], batch, 3)
    for i in range(64):
        alone = decoder.plan_tokens(np.array([1]), np.array([i]))
        assert alone.is_decode
        wanted = decoder.begin(ids[i : i + 1], alone, 3)[0]
        torch.testing.assert_close(found[0 if i == 63 else i + 2], wanted, rtol=1e-4, atol=1e-4)
