"""What goes to the device, and how much fits beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quadriga.checkpoint.exits import ExitSpec
from quadriga.checkpoint.model_config import read_model_config
from quadriga.config.engine_spec import EngineSpec
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.engine.cuda import loading
from quadriga.engine.cuda.attention import TorchAttention
from quadriga.engine.cuda.loading import bytes_per_token, tokens_that_fit
from quadriga.engine.cuda.operations import Operations
from quadriga.engine.cuda.pages import PAGE_TOKENS, pages_per_layer
from quadriga.engine.weights.checkpoint_weights import Linear
from quadriga.engine.weights.loading import load_weights
from quadriga.engine.weights.tensor_files import WeightSource
from quadriga.errors import ConfigError
from quadriga.interfaces import MAX_DRAFTED
from tests.equivalence.early_exit_reference import build_deep, save_with_exits
from tests.equivalence.models import build, make_spec, save
from tests.unit.engine.cuda.test_attention import make_config

GPU = torch.device("cuda", 0)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


@pytest.mark.parametrize("variant", ["llama", "qwen3", "opt-pre-norm", "opt-post-norm-projected"])
def test_every_tensor_goes_to_the_device(variant: str, tmp_path: Path) -> None:
    """Also exit heads and the maps for skipped KV; torch's `meta` stands for the GPU."""
    exits = ExitSpec((2, 4), "head")
    path = save_with_exits(build_deep(variant), tmp_path, exits)
    config = read_model_config(path)
    here = load_weights(WeightSource(path, torch.bfloat16), config, 6, 96, exits, fitted_maps=True)
    meta = WeightSource(path, torch.bfloat16, torch.device("meta"))
    there = load_weights(meta, config, 6, 96, exits, fitted_maps=True)
    mine, its = list(tensors(here)), list(tensors(there))
    assert {t.device.type for t in its} == {"meta"}
    assert [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in its]


@given(
    available=st.integers(0, 1 << 30),
    token_bytes=st.integers(1, 4096),
    num_rows=st.integers(1, 64),
    capacity=st.integers(1, 5000),
)
def test_what_fits_fits(available: int, token_bytes: int, num_rows: int, capacity: int) -> None:
    tokens = tokens_that_fit(available, token_bytes, num_rows, capacity)
    assert 0 <= tokens <= num_rows * (capacity + PAGE_TOKENS)
    if tokens:
        pages = 1 + pages_per_layer(tokens, num_rows, capacity)
        assert pages * PAGE_TOKENS * token_bytes <= available


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    path = save(build("llama"), tmp_path)
    return replace(make_spec(path, num_rows=4, device="cuda"), gpu_memory_share=0.5)


def with_memory(monkeypatch: pytest.MonkeyPatch, *, free: int, total: int, reserved: int) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)


def test_capacity_is_lowered_to_the_share(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_model_config(spec.checkpoint.path)
    page = PAGE_TOKENS * bytes_per_token(spec, config)
    assert page == 256 * 3 * 2 * 16 * 4
    with_memory(monkeypatch, free=100 * page, total=100 * page, reserved=40 * page)
    fitted = loading._fit(spec, config, GPU)
    assert fitted.kv_capacity_tokens == 4 * 96, "all there is to hold"
    assert fitted.usable_bytes == 50 * page, "the share of it"
    long = replace(spec, row_capacity_tokens=600, kv_capacity_tokens=2400)
    assert loading._fit(long, config, GPU).kv_capacity_tokens == (9 - 4) * 256
    with_memory(monkeypatch, free=8 * page, total=100 * page, reserved=0)
    assert loading._fit(long, config, GPU).kv_capacity_tokens == (7 - 4) * 256, "others are here"
    with_memory(monkeypatch, free=100 * page, total=100 * page, reserved=44 * page)
    with pytest.raises(ConfigError, match=r"hold 256 tokens .* less than one sequence of 600"):
        loading._fit(long, config, GPU)


def test_the_length_of_a_sequence_follows_the_gpu_where_nobody_names_it(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_model_config(spec.checkpoint.path)
    page = PAGE_TOKENS * bytes_per_token(spec, config)
    long = replace(
        spec, fits_length=True, row_capacity_tokens=131_072, kv_capacity_tokens=4 * 131_072
    )
    with_memory(monkeypatch, free=200 * page, total=200 * page, reserved=0)
    fitted = loading._fit(long, config, GPU)
    assert fitted.kv_capacity_tokens == (99 - 4) * PAGE_TOKENS
    assert fitted.row_capacity_tokens == fitted.kv_capacity_tokens // 2 // 256 * 256
    with_memory(monkeypatch, free=8 * page, total=200 * page, reserved=0)
    assert loading._fit(long, config, GPU).row_capacity_tokens == (7 - 4) * PAGE_TOKENS
    with_memory(monkeypatch, free=5 * page, total=200 * page, reserved=0)
    with pytest.raises(ConfigError, match=r"hold 0 tokens .* less than one sequence of 256"):
        loading._fit(long, config, GPU)


def test_kept_states_take_memory_too(spec: EngineSpec) -> None:
    config = read_model_config(spec.checkpoint.path)
    exits = replace(spec, exits=ExitSpec((1,)), skipped_kv="project")
    assert bytes_per_token(exits, config) == bytes_per_token(spec, config) + 48 * 4
    copied = replace(exits, skipped_kv="copy")
    assert bytes_per_token(copied, config) == bytes_per_token(spec, config)


def test_a_named_capacity_is_held_or_refused(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_model_config(spec.checkpoint.path)
    named = replace(spec, gpu_memory_share=None)
    needed = 5 * PAGE_TOKENS * bytes_per_token(spec, config)
    with_memory(monkeypatch, free=needed, total=needed, reserved=7)
    assert loading._fit(named, config, GPU) == replace(named, usable_bytes=needed + 7)
    with_memory(monkeypatch, free=needed - 1, total=needed, reserved=0)
    with pytest.raises(ConfigError, match=rf"take {needed} bytes .* {needed - 1} of the GPU's"):
        loading._fit(named, config, GPU)


def test_configuration() -> None:
    """Auto leaves the capacity to the replica; a number does not."""
    gpus = Hardware(num_cpus=8, num_gpus=4)
    auto = resolve(load_config({}), gpus).replicas[-1].engine
    assert (auto.device, auto.dtype, auto.attention) == ("cuda", "bfloat16", "auto")
    assert auto.gpu_memory_share == 0.85
    assert auto.kv_capacity_tokens == auto.num_rows * auto.row_capacity_tokens
    engine = {"kv_memory_bytes": 1 << 26, "attention": "triton"}
    named = resolve(load_config({"engine": engine}), gpus).replicas[-1].engine
    assert named.gpu_memory_share is None and named.attention == "triton"
    assert named.kv_capacity_tokens < auto.kv_capacity_tokens
    for key, value in (("gpu_memory_share", 0.0), ("gpu_memory_share", 1.1), ("attention", "sdpa")):
        with pytest.raises(ValueError, match=key):
            QuadrigaConfig.model_validate({"engine": {key: value}})


def test_operations_that_cannot_run_or_are_wrong_are_found() -> None:
    config = make_config(1, 1, 16)
    assert loading._failed(Operations(config), torch.device("cpu")) is None

    class Raising(Operations):
        def say(self, *_: torch.Tensor) -> None:
            raise RuntimeError("no C compiler\nat all")

    class Silent(Operations):
        def say(self, *_: torch.Tensor) -> None:
            """Nothing."""

    class Wrong(Operations):
        def linear(self, x: torch.Tensor, by: Linear) -> torch.Tensor:
            return -super().linear(x, by)

    cpu = torch.device("cpu")
    assert loading._failed(Wrong(config), cpu) == "a kernel answers 0 instead of 7"
    assert loading._failed(Raising(config), cpu) == "RuntimeError: no C compiler"
    assert loading._failed(Silent(config), cpu) == "a kernel answers 0 instead of 7"


def test_what_passes_need_stays_free(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_model_config(spec.checkpoint.path)
    page = PAGE_TOKENS * bytes_per_token(spec, config)
    long = replace(spec, row_capacity_tokens=600, kv_capacity_tokens=2400)
    with_memory(monkeypatch, free=12 * page, total=100 * page, reserved=0)
    assert loading._fit(long, config, GPU, 4 * page).kv_capacity_tokens == (7 - 4) * 256
    named = replace(spec, gpu_memory_share=None)
    with pytest.raises(ConfigError, match=rf"{5 * page - 1} of .* free beside {7 * page + 1} for"):
        loading._fit(named, config, GPU, 7 * page + 1)


def test_the_dummy_step_computes_the_largest_passes(spec: EngineSpec) -> None:
    config = read_model_config(spec.checkpoint.path)
    exits = replace(spec, exits=ExitSpec((1,)), pass_tokens=20, device="cpu", num_rows=2)
    weights = load_weights(WeightSource(spec.checkpoint.path, torch.float32), config, 3, 96)
    seen: list[int] = []

    class Counting(Operations):
        def activate(self, up: torch.Tensor) -> torch.Tensor:
            seen.append(len(up))
            return super().activate(up)

    attention, operations = TorchAttention(config), Counting(config)
    loading.dummy_step(exits, config, weights, attention, operations)
    assert seen == [20] * 3, "as many as a chunk"
    seen.clear()
    loading.dummy_step(replace(exits, num_rows=4), config, weights, attention, operations)
    assert seen == [4 * (1 + MAX_DRAFTED)] * 3, "as many as are verified"


def test_the_dummy_step_needs_no_positions_behind_the_longest_row(tmp_path: Path) -> None:
    """OPT's table of positions ends there, and a chunk may be of several rows."""
    path = save(build("opt-pre-norm"), tmp_path)
    spec = make_spec(path, row_capacity_tokens=8, pass_tokens=20)
    config = read_model_config(path)
    weights = load_weights(WeightSource(path, torch.float32), config, 3, 8)
    loading.dummy_step(spec, config, weights, TorchAttention(config), Operations(config))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device: 'cuda' .* no GPU"):
        loading.find_gpu()
