"""The engine on a GPU: `transformers`' tokens, the CPU engine's KV and exits, graphs or not."""

from __future__ import annotations

import gc
import random
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.checkpoint.exits import SkippedKV
from quadriga.checkpoint.folder import ASSETS
from quadriga.config.engine_spec import Attention, EngineSpec
from quadriga.core.request import SequenceState
from quadriga.engine import load_runner
from quadriga.engine.model_runner import NativeRunner
from quadriga.errors import ConfigError
from quadriga.interfaces import PrefillChunk
from tests.equivalence.models import VARIANTS, build, make_spec, make_state, save, start_row
from tests.equivalence.paged import assert_no_page_is_held, cache_of, graphs_of
from tests.equivalence.test_early_exits import (
    MODES,
    Bench,
    Family,
    assert_equal,
    every_family,
    family,
    states,
)
from tests.equivalence.test_generation import NUM_ROWS, ChurningBatch, bundled_prompts, count_ties
from tests.gpu.devices import ATTENTIONS, DEVICE, IS_REHEARSAL, gpu, gpu_itself, load_on_gpu

__all__ = ["family"]

pytestmark = gpu

MODELS = ("quadriga-s", "quadriga-l")
families = every_family
if IS_REHEARSAL:
    MODES = ("project", "replay")
    families = pytest.mark.parametrize("family", ["llama"], indirect=True)
HALF_TOLERANCE_LOGITS = 0.5
MAX_HALF_DIVERGENCE = 0.03


def bundled(model: str, attention: Attention, **overrides: object) -> EngineSpec:
    fields = {"num_rows": NUM_ROWS, "row_capacity_tokens": 1024, "attention": attention}
    return make_spec(ASSETS / model, **(fields | overrides))


def bundled_states(model: str, count: int) -> list[SequenceState]:
    rng = random.Random(5)
    return [
        make_state(prompt, max_tokens=rng.choice([1, 2, 5, 12, 20, 45]))
        for prompt in islice(bundled_prompts(model), 6 if IS_REHEARSAL else count)
    ]


def reference_model(model: str, dtype: torch.dtype = torch.float32) -> Any:
    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(ASSETS / model, dtype=dtype).eval()


def gaps_below_best(reference: Any, state: SequenceState) -> torch.Tensor:
    """By how many logits each output token misses the reference's best, which it is where 0."""
    ids = torch.tensor([state.prompt_ids + state.output_ids])
    with torch.inference_mode():
        logits = reference(ids).logits[0, len(state.prompt_ids) - 1 : -1].float()
    chosen = torch.tensor(state.output_ids)
    return logits.max(dim=-1).values - logits.gather(1, chosen[:, None])[:, 0]


@pytest.mark.parametrize("compile", ["off", "auto"])
@pytest.mark.parametrize("attention", ATTENTIONS[1:])
@pytest.mark.parametrize("model", MODELS)
def test_float32_says_what_transformers_says(
    model: str, attention: Attention, compile: str
) -> None:
    sequences = bundled_states(model, 60)
    runner = load_on_gpu(bundled(model, attention, compile=compile))
    ChurningBatch(runner, seed=1).run(sequences)
    assert count_ties(reference_model(model), sequences) <= 4
    assert_no_page_is_held(runner)
    runner.close()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_says_nearly_what_transformers_says(model: str, attention: Attention) -> None:
    """Every token is nearly the best of `transformers`, in float32 or in bfloat16; few differ.

    In bfloat16, too, because its rounding alone makes `transformers` say tokens that are .63 logits
    below float32's best: behind an answer's end, where sequences here go on.
    """
    sequences = bundled_states(model, 60)
    runner = load_on_gpu(bundled(model, attention, dtype="bfloat16", compile="auto"))
    ChurningBatch(runner, seed=1).run(sequences)
    runner.close()
    whole, half = reference_model(model), reference_model(model, torch.bfloat16)
    total = different = 0
    for state in sequences:
        gaps = gaps_below_best(whole, state)
        nearer = torch.minimum(gaps, gaps_below_best(half, state))
        assert nearer.max() < HALF_TOLERANCE_LOGITS
        total, different = total + len(gaps), different + int((gaps > 0).sum())
    print(f"{model} {attention} bfloat16: {different} of {total} tokens are not float32's best")
    assert different <= MAX_HALF_DIVERGENCE * total


@pytest.mark.parametrize("attention", ATTENTIONS[1:])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_same_kv_as_the_cpu_engine(variant: str, attention: Attention, tmp_path: Path) -> None:
    """Every family, window and head size; rows of several pages; over to the host and back."""
    model_path = save(build(variant), tmp_path)
    spec = make_spec(model_path, num_rows=3, attention=attention)
    runners = load_runner(replace(spec, attention="auto")), load_on_gpu(spec)
    prompt = [3 + 5 * i % 127 for i in range(90)]
    kv = []
    for runner in runners:
        state = make_state(prompt)
        runner.attach(1, state)
        for start, stop in ((0, 1), (1, 40), (40, 90)):
            chunk = PrefillChunk(1, prompt[start:stop], start, stop == 90)
            [token] = runner.prefill([chunk])
        assert token is not None
        for _ in range(5):
            state.output_ids.append(token.token_id)
            [token] = runner.decode([1])
        kv.append(runner.read_kv(1, 0, 3, 0, 95))
    assert kv[1].device.type == "cpu" and kv[1].is_contiguous()
    torch.testing.assert_close(kv[1], kv[0], atol=1e-3, rtol=1e-3)
    runners[1].write_kv(2, 0, 0, kv[1])
    assert torch.equal(runners[1].read_kv(2, 0, 3, 0, 95), kv[1])


@families
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ATTENTIONS[1:])
def test_early_exits_are_the_references(
    family: Family, mode: SkippedKV, attention: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode loop, rebatching and all, with graphs of every segment."""

    def load(spec: EngineSpec) -> NativeRunner:
        return load_on_gpu(replace(spec, compile="auto", attention=attention))

    monkeypatch.setattr(NativeRunner, "load", staticmethod(load))
    bench = Bench(family.path, mode=mode)
    got = states(family.exits)
    bench.run(got)
    assert_equal(got, family.expected(mode))
    assert bench.counters.involuntary_exits == 0
    for runner in (bench.runner, bench.prefiller):
        assert_no_page_is_held(runner)
        runner.close()


@pytest.mark.parametrize("attention", ATTENTIONS[:2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_token(attention: Attention, dtype: str) -> None:
    if attention == "flash" and dtype == "float32":
        pytest.skip("flash-attn computes in float16 and bfloat16")
    said = []
    for compile in ("off", "auto", "wait"):
        runner = load_on_gpu(bundled("quadriga-s", attention, dtype=dtype, compile=compile))
        sequences = bundled_states("quadriga-s", 40)
        ChurningBatch(runner, seed=2).run(sequences)
        said.append([s.output_ids for s in sequences])
        if compile != "off":
            assert graphs_of(runner).num_recorded >= (2 if IS_REHEARSAL else 4)
        runner.close()
    assert said[1] == said[2], "recorded early or late"
    differing = sum(a != b for a, b in zip(said[0], said[1], strict=True))
    # A batch that is padded may be multiplied by another kernel; half precision shows it.
    assert differing <= (0 if dtype == "float32" else 4)


@gpu_itself
def test_a_step_waits_for_the_gpu_once() -> None:
    """And only for what it has to know: confidences and tokens."""
    spec = bundled("quadriga-s", "triton", compile="auto")
    spec = replace(spec, exits=spec.checkpoint.exits, skipped_kv="project")
    runner = load_on_gpu(spec)
    for row in range(4):
        start_row(runner, row, make_state([5, 6, 7 + row], max_tokens=40))
    rows = list(range(4))
    for _ in range(3):  # records
        for segment in range(len(runner.segment_ends)):
            runner.advance(rows, segment, segment + 1)
    for segment in range(len(runner.segment_ends)):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                runner.advance(rows, segment, segment + 1)
                runner.emit(rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in seen if "synchroniz" in str(w.message)]
        assert len(waits) == 1, [str(w.message) for w in waits]
    runner.close()


def test_threads_copy_rows_while_passes_run() -> None:
    """Hand-offs beside decode: what is read is what was written, and no token changes."""
    from concurrent.futures import ThreadPoolExecutor

    spec = bundled("quadriga-s", "triton", compile="auto")
    alone, beside = bundled_states("quadriga-s", 24), bundled_states("quadriga-s", 24)
    runner = load_on_gpu(spec)
    ChurningBatch(runner, seed=3).run(alone)
    runner.close()
    runner = load_on_gpu(replace(spec, num_rows=NUM_ROWS + 2, kv_capacity_tokens=20_000))
    cache, stop = cache_of(runner), False

    def copy(row: int) -> int:
        rounds, generator = 0, torch.Generator().manual_seed(row)
        shape = (runner.num_layers, 2, *cache.keys.shape[2:3], 700, cache.keys.shape[3])
        while not stop:
            kv = torch.randn(shape, generator=generator)
            runner.write_kv(row, 0, 0, kv)
            assert torch.equal(runner.read_kv(row, 0, runner.num_layers, 0, 700), kv)
            cache.release(row)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(2) as pool:
        copying = [pool.submit(copy, NUM_ROWS + i) for i in range(2)]
        try:
            ChurningBatch(runner, seed=3, num_rows=NUM_ROWS).run(beside)
        finally:
            stop = True
        assert all(future.result(timeout=60) > 0 for future in copying)
    assert [s.output_ids for s in alone] == [s.output_ids for s in beside]
    assert_no_page_is_held(runner)
    runner.close()


def test_sampling_on_the_device_draws_as_the_host_does() -> None:
    from quadriga.engine.cuda.sampling import invert_cdf_on_device
    from quadriga.engine.sampler import invert_cdf

    generator = torch.Generator().manual_seed(1)
    probs = torch.softmax(4 * torch.randn(64, 5000, generator=generator), -1).double()
    u = torch.rand(64, generator=generator, dtype=torch.float64)
    wanted = invert_cdf(probs.numpy(), u.numpy())
    assert invert_cdf_on_device(probs.to(DEVICE), u.to(DEVICE)).tolist() == wanted


@gpu_itself
def test_kv_takes_the_memory_that_weights_leave() -> None:
    spec = bundled("quadriga-l", "auto", dtype="bfloat16", num_rows=64)
    spec = replace(spec, device="cuda", gpu_memory_share=0.5)
    whole = load_runner(spec)
    assert whole.spec.kv_capacity_tokens == 64 * 1024, "all rows fit"
    del whole
    gc.collect()
    torch.cuda.empty_cache()
    # 27 MB of weights and 3 KB a token: all rows would take 201 MB.
    _, total = torch.cuda.mem_get_info()
    share = (torch.cuda.memory_reserved() + 150_000_000) / total
    squeezed = load_runner(replace(spec, gpu_memory_share=share))
    assert 1024 <= squeezed.spec.kv_capacity_tokens < 64 * 1024
    del squeezed
    gc.collect()
    torch.cuda.empty_cache()
    with pytest.raises(ConfigError, match=r"engine\.gpu_memory_share: .* less than one sequence"):
        load_runner(replace(spec, gpu_memory_share=1e-4))
    endless = replace(spec, row_capacity_tokens=1 << 24, kv_capacity_tokens=1 << 30)
    with pytest.raises(ConfigError, match=r"engine\.kv_memory_bytes: .* are free"):
        load_runner(replace(endless, gpu_memory_share=None))
