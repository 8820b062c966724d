"""Every attention against the reference; flash-attn through a stand-in that follows its manual."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.cuda.attention import FlashAttention, TorchAttention, choose_attention
from quadriga.engine.cuda.graphs import GraphRecorder
from quadriga.engine.cuda.paged_attention import PagedAttention, PagedKV, Runs
from quadriga.engine.cuda.probe import failed_probe
from quadriga.engine.models.layers import TokenSpan
from quadriga.errors import ConfigError
from tests.equivalence.recording import TapeRecorder

CPU = torch.device("cpu")
PAGE = 256
POSITIONS = (700, 255, 0, 300)
LENGTHS = torch.tensor(POSITIONS, dtype=torch.int32) + 1
SPANS = [
    TokenSpan(0, 0, 40, 661),
    TokenSpan(1, 40, 41, 255),
    TokenSpan(2, 41, 58, 0),
    TokenSpan(3, 58, 95, 264),
]
TABLE = torch.tensor([[3, 1, 7], [2, 5, 0], [8, 0, 0], [4, 6, 0]], dtype=torch.int32)
SHAPES = [(2, 3, 24), (1, 8, 16), (2, 1, 64)]
WINDOWS = [0, 7, 290]


def make_config(kv_heads: int, group: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        num_layers=1,
        hidden_size=8,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=8,
        vocab_size=8,
        max_positions=1024,
        embed_size=8,
        norm="rms",
        norm_eps=1e-5,
        activation="silu",
        windows=(0,),
        rope=None,
    )


def pools(config: ModelConfig, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, 9, PAGE, config.num_kv_heads, config.head_dim)
    keys, values = torch.randn(shape, generator=generator).to(dtype)
    return keys, values


def plain(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row: int, position: int, window: int
) -> torch.Tensor:
    """One query [heads, head_dim], spelled out, in float64."""
    group = q.shape[0] // keys.shape[2]
    k = keys[TABLE[row].long()].flatten(0, 1).double().repeat_interleave(group, 1)
    v = values[TABLE[row].long()].flatten(0, 1).double().repeat_interleave(group, 1)
    first = max(0, position + 1 - window) if window else 0
    k, v = k[first : position + 1], v[first : position + 1]
    scores = torch.einsum("hd,nhd->hn", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), v).flatten()


def check(
    attention: PagedAttention, config: ModelConfig, dtype: torch.dtype, window: int, tol: float
) -> None:
    keys, values = pools(config, dtype)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(95, config.num_heads, config.head_dim, generator=generator).to(dtype)
    each = attention.each(q[:4], PagedKV(keys, values, TABLE), LENGTHS, 701, window)
    for i, position in enumerate(POSITIONS):
        wanted = plain(q[i], keys, values, i, position, window)
        torch.testing.assert_close(each[i].double(), wanted, atol=tol, rtol=0)
    runs = Runs.of(SPANS, attention.block_queries, CPU)
    mixed = attention.runs(q, PagedKV(keys, values, TABLE), runs, window)
    for span in SPANS:
        for at in (span.begin, (span.begin + span.end) // 2, span.end - 1):
            position = span.start + at - span.begin
            wanted = plain(q[at], keys, values, span.row, position, window)
            torch.testing.assert_close(mixed[at].double(), wanted, atol=tol, rtol=0)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch(shape: tuple[int, int, int], window: int) -> None:
    config = make_config(*shape)
    check(TorchAttention(config), config, torch.float32, window, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torch_rounds_halves_once(dtype: torch.dtype) -> None:
    """Scores of ±100, where bfloat16's steps are 1/2, stay float32; so do weights."""
    config = make_config(2, 3, 24)
    attention = TorchAttention(config)
    keys, values = pools(config, dtype)
    q = torch.randn(95, 6, 24, generator=torch.Generator().manual_seed(2)).mul(25).to(dtype)
    runs = Runs.of(SPANS, attention.block_queries, CPU)

    def mixed(to: torch.dtype) -> list[torch.Tensor]:
        args = q.to(to), PagedKV(keys.to(to), values.to(to), TABLE)
        each = attention.each(args[0][:4], args[1], LENGTHS, 701, 0)
        return [each, attention.runs(*args, runs, 0)]

    for got, wide in zip(mixed(dtype), mixed(torch.float32), strict=True):
        assert got.dtype == dtype and torch.equal(got, wide.to(dtype))


class FlashStandIn:
    """`flash_attn` 2.8 by its docstrings and the checks of its C++ entry points."""

    @staticmethod
    def _mix(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: tuple[int, int]
    ) -> torch.Tensor:
        """q [n, heads, dim] and k, v [m, kv heads, dim]; causal, aligned to the bottom right."""
        n, m = q.shape[0], k.shape[0]
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        i = torch.arange(n)[:, None] + m - n
        j = torch.arange(m)[None]
        seen = j <= i
        if window != (-1, -1):
            seen &= (j >= i - window[0]) & (j <= i + window[1])
        scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hnm,mhd->nhd", weights, v.float()).to(q.dtype)

    @staticmethod
    def _check(q: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, rows: int) -> None:
        assert q.dtype == keys.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert q.shape[-1] % 8 == 0 and q.stride(-1) == keys.stride(-1) == table.stride(-1) == 1
        assert keys.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert table.dtype == torch.int32 and table.shape[0] == rows

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        assert q.dim() == 4 and causal and cache_seqlens.dtype == torch.int32
        assert cache_seqlens.is_contiguous() and cache_seqlens.shape == (q.shape[0],)
        self._check(q, k_cache, block_table, q.shape[0])
        mixed = []
        for one, pages, length in zip(q, block_table.long(), cache_seqlens.tolist(), strict=True):
            k, v = (pool[pages].flatten(0, 1)[:length] for pool in (k_cache, v_cache))
            mixed.append(self._mix(one, k, v, softmax_scale, window_size))
        return torch.stack(mixed)

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous()
        self._check(q, k, block_table, len(cu_seqlens_q) - 1)
        counts, lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
        assert int(counts.max()) == max_seqlen_q and int(lengths.max()) == max_seqlen_k
        mixed = []
        for i, pages in enumerate(block_table.long()):
            own = q[int(cu_seqlens_q[i]) : int(cu_seqlens_q[i + 1])]
            keys, values = (pool[pages].flatten(0, 1)[: int(lengths[i])] for pool in (k, v))
            mixed.append(self._mix(own, keys, values, softmax_scale, window_size))
        return torch.cat(mixed)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_flash_is_asked_the_right_thing(shape: tuple[int, int, int], window: int) -> None:
    config = make_config(*shape)
    check(FlashAttention(FlashStandIn(), config), config, torch.float16, window, 3e-3)


class WaitingFlash(FlashStandIn):
    """As from 2.8.4 on: the lengths are checked on the host before the kernel starts."""

    def flash_attn_with_kvcache(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        most = options["block_table"].shape[1] * tensors[1].shape[1]
        assert options["cache_seqlens"].max().item() <= most
        return super().flash_attn_with_kvcache(*tensors, **options)


class ShortFlash(FlashStandIn):
    """A wrong kernel: the newest position is not read."""

    def flash_attn_with_kvcache(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        options["cache_seqlens"] = options["cache_seqlens"] - 1
        return super().flash_attn_with_kvcache(*tensors, **options)


def probe(library: Any, make_recorder: Callable[[], GraphRecorder] | None) -> str | None:
    config = make_config(2, 3, 24)
    attention = FlashAttention(library, config)
    return failed_probe(
        attention, TorchAttention(config), config, torch.float16, CPU, make_recorder
    )


@pytest.mark.parametrize("make_recorder", [None, TapeRecorder], ids=["eager", "recorded"])
def test_the_probe_passes_an_attention_that_is_right(
    make_recorder: Callable[[], GraphRecorder] | None,
) -> None:
    assert probe(FlashStandIn(), make_recorder) is None


def test_the_probe_finds_a_kernel_that_waits_for_the_device_only_where_graphs_are_made() -> None:
    assert probe(WaitingFlash(), None) is None
    reason = probe(WaitingFlash(), TapeRecorder)
    assert reason is not None and "recorded into a CUDA graph" in reason


def test_the_probe_finds_a_kernel_that_is_wrong() -> None:
    for make_recorder in (None, TapeRecorder):
        reason = probe(ShortFlash(), make_recorder)
        assert reason is not None and reason.startswith("its decode step is wrong by")


def test_an_attention_that_fails_its_probe_makes_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from quadriga.engine.cuda import attention

    libraries = {"flash": WaitingFlash(), "triton": FlashStandIn()}

    def make(name: str, config: ModelConfig, dtype: torch.dtype) -> FlashAttention:
        made = FlashAttention(libraries[name], config)
        made.name = name
        return made

    monkeypatch.setattr(attention, "_unfit", lambda *_: None)
    monkeypatch.setattr(attention, "_make", make)
    config = make_config(2, 3, 24)
    chosen = choose_attention("auto", config, torch.float16, CPU, TapeRecorder)
    assert chosen.name == "triton"
    [warning] = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith("attention: flash is installed and cannot be used here")
    assert choose_attention("auto", config, torch.float16, CPU).name == "flash", "without graphs"
    with pytest.raises(ConfigError, match=r"engine\.attention: 'flash' .* CUDA graph.*use 'auto'"):
        choose_attention("flash", config, torch.float16, CPU, TapeRecorder)


def test_runs_in_blocks() -> None:
    runs = Runs.of(SPANS, 16, CPU)
    assert runs.begins.tolist() == [0, 40, 41, 58, 95]
    assert runs.lengths.tolist() == [701, 256, 17, 301]
    assert runs.length_sums.tolist() == [0, 701, 957, 974, 1275]
    assert runs.block_runs.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3]
    assert runs.block_begins.tolist() == [0, 16, 32, 40, 41, 57, 58, 74, 90]
    assert (runs.longest_run, runs.longest) == (40, 701)


def test_without_a_gpu_it_is_torch_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(2, 3, 24)
    with caplog.at_level(logging.INFO):
        assert choose_attention("auto", config, torch.bfloat16, CPU).name == "torch"
    [line] = [r.message for r in caplog.records if r.message.startswith("attention:")]
    assert "torch" in line and "flash does not fit" in line and "triton does not fit" in line
    with pytest.raises(ConfigError, match=r"engine\.attention: 'flash' .* needs a GPU"):
        choose_attention("flash", config, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "installed", "chosen"),
    [
        (torch.bfloat16, 64, (9, 0), {"flash_attn", "triton"}, "flash"),
        (torch.float32, 64, (9, 0), {"flash_attn", "triton"}, "triton"),
        (torch.bfloat16, 20, (9, 0), {"flash_attn", "triton"}, "triton"),
        (torch.bfloat16, 512, (9, 0), {"flash_attn", "triton"}, "triton"),
        (torch.float16, 64, (7, 5), {"flash_attn", "triton"}, "triton"),
        (torch.bfloat16, 64, (9, 0), {"triton"}, "triton"),
        (torch.bfloat16, 64, (9, 0), set(), "torch"),
    ],
)
def test_the_choice_on_a_gpu(
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    installed: set[str],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quadriga.engine.cuda import attention

    def find_spec(name: str) -> Any:
        return object() if name in installed else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib, "import_module", lambda name: FlashStandIn())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        attention, "_make", lambda name, *_: SimpleNamespace(name=name, in_graphs=True)
    )
    monkeypatch.setattr(attention, "failed_probe", lambda *_: None)
    config = make_config(2, 2, head_dim)
    gpu = torch.device("cuda", 0)
    assert choose_attention("auto", config, dtype, gpu).name == chosen
