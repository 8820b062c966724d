"""The engine over paged KV, as on GPUs but run on the CPU, says what the dense one says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from quadriga.checkpoint.exits import SkippedKV
from quadriga.core.request import SequenceState
from quadriga.engine import load_runner
from quadriga.engine.model_runner import NativeRunner
from quadriga.interfaces import PrefillChunk
from tests.equivalence import test_pause as pausing
from tests.equivalence.early_exit_reference import LAYERS
from tests.equivalence.models import VARIANTS, build, make_spec, make_state, save, whole_prompt
from tests.equivalence.paged import (
    PAGE_TOKENS,
    assert_no_page_is_held,
    cache_of,
    graphs_of,
    load_on_pages,
    loader,
)
from tests.equivalence.recording import TapeRecorder
from tests.equivalence.test_early_exits import (
    KINDS,
    LEVELS,
    MODES,
    POLICIES,
    Bench,
    Family,
    assert_equal,
    every_family,
    family,
    kv_after,
    states,
)
from tests.equivalence.test_generation import NUM_ROWS, ChurningBatch, count_ties

__all__ = ["family"]

TOLERANCE = 1e-4
LENGTH = 70


@pytest.fixture(params=[None, TapeRecorder], ids=["eager", "recorded"])
def make_recorder(request: pytest.FixtureRequest) -> Callable[[], TapeRecorder] | None:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def made(
    monkeypatch: pytest.MonkeyPatch, make_recorder: Callable[[], TapeRecorder] | None
) -> list[NativeRunner]:
    """Runners are loaded on pages; here is which."""
    runners: list[NativeRunner] = []
    monkeypatch.setattr(NativeRunner, "load", staticmethod(loader(runners, make_recorder)))
    return runners


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_same_kv_and_logits_as_on_rows(variant: str, tmp_path: Path) -> None:
    """Prompts in chunks that end on, before and behind the borders of pages; then decode steps."""
    path = save(build(variant), tmp_path)
    spec = make_spec(path, num_rows=3)
    dense, paged = load_runner(spec), load_on_pages(spec)
    rng = random.Random(1)
    prompts = {row: [rng.randrange(3, 130) for _ in range(LENGTH - 9 * row)] for row in (0, 2)}
    tops = []
    for runner in (dense, paged):
        now = {row: make_state(ids, num_logprobs=130) for row, ids in prompts.items()}
        for row, state in now.items():
            runner.attach(row, state)
        for start, stop in ((0, PAGE_TOKENS), (16, 31), (31, 32), (32, 50), (50, LENGTH)):
            results = runner.prefill(
                [
                    PrefillChunk(row, ids[start:stop], start, stop >= len(ids))
                    for row, ids in prompts.items()
                ]
            )
        said = []
        for step in range(5):
            for row, token in zip(now, results, strict=True):
                assert token is not None and token.logprob is not None
                said.append(dict(token.logprob.top))
                now[row].output_ids.append(7 + step)
            results = list(runner.decode(list(now)))
        tops.append(torch.tensor([[top[t] for t in range(130)] for top in said]))
    torch.testing.assert_close(tops[1], tops[0], atol=TOLERANCE, rtol=0)
    for row, ids in prompts.items():
        wanted = dense.read_kv(row, 0, 3, 0, len(ids) + 5)
        torch.testing.assert_close(
            paged.read_kv(row, 0, 3, 0, len(ids) + 5), wanted, atol=TOLERANCE, rtol=0
        )
    cache_of(paged).pages.check()
    for row in prompts:
        paged.detach(row)
    assert_no_page_is_held(paged)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "opt-post-norm-projected"])
def test_greedy_output_in_mixed_batches(
    variant: str, make_recorder: Callable[[], TapeRecorder] | None, tmp_path: Path
) -> None:
    """Against `transformers`, with rows that come, grow over pages, and go."""
    model = build(variant)
    recorder = None if make_recorder is None else make_recorder()
    spec = make_spec(save(model, tmp_path), num_rows=NUM_ROWS, kv_capacity_tokens=NUM_ROWS * 80)
    runner = load_on_pages(spec, recorder)
    rng = random.Random(3)
    sequences = [
        make_state([rng.randrange(3, 130) for _ in range(rng.randint(1, 50))], max_tokens=20)
        for _ in range(24)
    ]
    ChurningBatch(runner, seed=4).run(sequences)
    assert count_ties(model, sequences) <= 1
    assert_no_page_is_held(runner)
    if recorder is not None:
        assert 2 <= graphs_of(runner).num_recorded <= 5, "one graph a batch size, up to 16"
        assert recorder.num_replays >= 20


@every_family
@pytest.mark.parametrize("mode", MODES)
def test_early_exits(family: Family, mode: SkippedKV, made: list[NativeRunner]) -> None:
    """All ways to make up for skipped KV, against the reference, through the decode loop."""
    bench = Bench(family.path, mode=mode)
    got = states(family.exits)
    bench.run(got)
    assert_equal(got, family.expected(mode))
    assert bench.counters.involuntary_exits == bench.counters.involuntary_stays == 0
    for runner in made:
        assert_no_page_is_held(runner)
    if (decoder := bench.runner._decoder) and getattr(decoder, "graphs", None) is not None:
        assert graphs_of(bench.runner).num_recorded >= 4, "several segments, several sizes"


@pytest.mark.parametrize("family", ["llama", "opt-pre-norm"], indirect=True)
@pytest.mark.parametrize("policy", ["drex", "eager", "none"])
def test_whoever_decides(family: Family, policy: str, made: list[NativeRunner]) -> None:
    bench = Bench(family.path, policy=POLICIES[policy])
    got = states(family.exits)
    bench.run(got)
    reference = family.reference("project")
    assert sum(reference.check(s, may_be_below=policy == "eager") for s in got) <= 1
    assert_no_page_is_held(bench.runner)


@pytest.mark.parametrize("family", list(KINDS), indirect=True)
def test_replay_restores_the_full_models_kv(family: Family, made: list[NativeRunner]) -> None:
    bench = Bench(family.path, mode="replay")
    state = states(family.exits, max_tokens=40, threshold=LEVELS[family.exits.criterion][0])[1]
    kv = kv_after(bench, state, 24)
    assert min(state.exit_layers) < LAYERS
    full = load_on_pages(make_spec(family.path))
    full.attach(0, state)
    full.prefill([whole_prompt(0, state)])
    wanted = full.read_kv(0, 0, LAYERS, 0, state.num_tokens)
    torch.testing.assert_close(kv, wanted, atol=TOLERANCE, rtol=0)


def test_deep_pages_are_for_those_that_go_deep(tmp_path: Path) -> None:
    """Tokens that leave at the first exit take no page behind it, nor does pausing them."""
    path = save(build("llama"), tmp_path)
    (path / "exits.json").write_text(
        '{"kind": "shared", "layers": [1], "criterion": "top", "threshold": 0.0}'
    )
    spec = make_spec(path, num_rows=2)
    runner = load_on_pages(make_spec(path, num_rows=2, exits=spec.checkpoint.exits))
    pages = cache_of(runner).pages
    state = make_state([5] * 10, max_tokens=80)
    runner.attach(0, state)
    first = runner.prefill([whole_prompt(0, state)])[0]
    assert first is not None
    state.output_ids.append(first.token_id)
    assert pages.held_pages(0) == 3
    for _ in range(40):
        runner.advance([0], 0, 1)
        state.output_ids.append(runner.emit([0])[0].token_id)
    assert pages.held_pages(0) == 4 + 1 + 1, "50 positions in layer 1, 10 in layers 2 and 3"
    kv = runner.read_kv(0, 0, 3, 0, 10)
    with patch.object(runner, "read_kv", wraps=runner.read_kv) as reads:
        suspended = runner.suspend(0)
    assert {call.args[2] for call in reads.mock_calls} == {1}, "a full device has no more memory"
    assert pages.held_pages(0) == 0
    runner.restore(1, state, suspended)
    assert pages.held_pages(1) == 4 + 1 + 1 and torch.equal(runner.read_kv(1, 0, 3, 0, 10), kv)
    runner.advance([1], 0, 2)
    assert pages.held_pages(1) == 4 + 4 + 4


@pytest.mark.parametrize("mode", ["project", "copy", "replay"])
def test_paused_under_memory_pressure(
    mode: SkippedKV, tmp_path: Path, made: list[NativeRunner]
) -> None:
    """Paused to host memory and back, in pages for exactly the tokens that were promised."""
    path = save(build("llama"), tmp_path)
    (path / "exits.json").write_text(
        '{"kind": "shared", "layers": [1, 2], "criterion": "margin", "threshold": 0.2}'
    )
    plain = make_spec(path, skipped_kv=mode)
    answers: list[list[SequenceState]] = []
    for capacity in (8, 3):
        tokens = capacity * plain.row_capacity_tokens
        spec = make_spec(
            path, skipped_kv=mode, exits=plain.checkpoint.exits, kv_capacity_tokens=tokens
        )
        loop = pausing.make_loop(spec, tokens)
        answers.append(pausing.states())
        pausing.run(loop, answers[-1])
        assert (loop.preemption.num_pauses > 0) == (capacity == 3)
        assert_no_page_is_held(made[-1])
    for undisturbed, paused in zip(*answers, strict=True):
        assert paused.output_ids == undisturbed.output_ids
        assert paused.exit_layers == undisturbed.exit_layers
