"""Attention over paged KV: one interface, and who computes it.

- `flash`: flash-attn's kernels read the page tables themselves. float16 and bfloat16, heads of a
  multiple of 8 dimensions up to 256 (others it would pad, copying the whole pool), GPUs from
  compute capability 8.0 on.
- `triton`: our kernel, in `triton_attention`; any dtype.
- `torch`: gathers the pages and multiplies; runs anywhere, and is the reference.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

import torch

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.config.engine_spec import Attention
from quadriga.engine.cuda.paged_attention import PagedAttention, PagedKV, Runs
from quadriga.engine.cuda.probe import MakeRecorder, failed_probe
from quadriga.engine.models.layers import attend_each, attend_run, by_group, first_visible
from quadriga.errors import ConfigError

logger = logging.getLogger(__name__)


class TorchAttention:
    """The reference."""

    name = "torch"
    block_queries = 1 << 30  # it knows no blocks
    in_graphs = False

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def each(
        self, q: torch.Tensor, kv: PagedKV, lengths: torch.Tensor, longest: int, window: int
    ) -> torch.Tensor:
        """See `PagedAttention.each`."""
        pages = kv.table[:, : -(-longest // kv.keys.shape[1])]
        # [T, blocks, page_tokens, kv_heads, head_dim] → [T, kv_heads, longest, head_dim]
        k = kv.keys[pages].flatten(1, 2)[:, :longest].transpose(1, 2)
        v = kv.values[pages].flatten(1, 2)[:, :longest].transpose(1, 2)
        mixed = attend_each(by_group(q, self._config), k, v, lengths - 1, window)
        return mixed.flatten(1).to(q.dtype)

    def runs(self, q: torch.Tensor, kv: PagedKV, runs: Runs, window: int) -> torch.Tensor:
        """See `PagedAttention.runs`."""
        grouped = by_group(q, self._config)
        out = torch.empty_like(grouped)
        for pages, s in zip(kv.table, runs.spans, strict=True):
            first = first_visible(s.start, window)
            seen = pages[: -(-s.stop // kv.keys.shape[1])]
            k = kv.keys[seen].flatten(0, 1)[first : s.stop].transpose(0, 1)
            v = kv.values[seen].flatten(0, 1)[first : s.stop].transpose(0, 1)
            out[s.begin : s.end] = attend_run(
                grouped[s.begin : s.end], k, v, s.start, first, window
            )
        return out.flatten(1).to(q.dtype)


class FlashAttention:
    """flash-attn 2: `flash_attn_with_kvcache` for decode, `flash_attn_varlen_func` for runs.

    Its causal mask is aligned to the last key, which is where a run's last query stands; its window
    counts the positions before the query, ours the query too.

    Args:
        library: The module `flash_attn`.
    """

    name: str = "flash"
    block_queries = 1 << 30  # it knows no blocks
    in_graphs = True

    def __init__(self, library: Any, config: ModelConfig) -> None:
        self._library = library
        self._scale = config.head_dim**-0.5

    def each(
        self, q: torch.Tensor, kv: PagedKV, lengths: torch.Tensor, longest: int, window: int
    ) -> torch.Tensor:
        """See `PagedAttention.each`."""
        mixed: torch.Tensor = self._library.flash_attn_with_kvcache(
            q[:, None],
            kv.keys,
            kv.values,
            cache_seqlens=lengths,
            block_table=kv.table,
            softmax_scale=self._scale,
            causal=True,
            window_size=_before(window),
        )
        return mixed.flatten(1)

    def runs(self, q: torch.Tensor, kv: PagedKV, runs: Runs, window: int) -> torch.Tensor:
        """See `PagedAttention.runs`."""
        mixed: torch.Tensor = self._library.flash_attn_varlen_func(
            q,
            kv.keys,
            kv.values,
            cu_seqlens_q=runs.begins,
            cu_seqlens_k=runs.length_sums,
            max_seqlen_q=runs.longest_run,
            max_seqlen_k=runs.longest,
            softmax_scale=self._scale,
            causal=True,
            window_size=_before(window),
            block_table=kv.table,
        )
        return mixed.flatten(1)


def _before(window: int) -> tuple[int, int]:
    """A window as flash-attn has it: positions before and after the query."""
    return (window - 1, 0) if window else (-1, -1)


def choose_attention(
    wanted: Attention,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    make_recorder: MakeRecorder | None = None,
) -> PagedAttention:
    """The attention to use; the log says which, and why not a faster one.

    Args:
        make_recorder: What decode passes will be recorded with; an attention whose step cannot be
            recorded is not chosen.

    Raises:
        ConfigError: The one asked for cannot run here.
    """
    refused: dict[str, str] = {}
    for name in ("flash", "triton", "torch") if wanted == "auto" else (wanted,):
        reason = _unfit(name, config, dtype, device)
        if reason is None:
            chosen = _make(name, config, dtype)
            if chosen.in_graphs:
                reference = TorchAttention(config)
                reason = failed_probe(chosen, reference, config, dtype, device, make_recorder)
            if reason is None:
                why = "; ".join(f"{n} does not fit: {r}" for n, r in refused.items())
                logger.info("attention: %s%s", name, f" ({why})" if why else "")
                return chosen
            logger.warning("attention: %s is installed and cannot be used here: %s", name, reason)
        refused[name] = reason
    raise ConfigError(
        f"engine.attention: {wanted!r} cannot be used here, {refused[wanted]}; use 'auto'",
        param="engine.attention",
    )


def _unfit(name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why an attention cannot run here; None where it can."""
    if name == "torch":
        return None
    if device.type != "cuda":
        return f"it needs a GPU, not {device.type}"
    if name == "triton":
        return None if importlib.util.find_spec("triton") is not None else "not installed"
    if importlib.util.find_spec("flash_attn") is None:
        return "not installed"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not {dtype}"
    if config.head_dim % 8 or config.head_dim > 256:
        return f"it takes heads of 8, 16, … 256 dimensions, not {config.head_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or more"
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as exc:  # built for another torch or CUDA
        return f"it cannot be imported: {exc}"
    return None


def _make(name: str, config: ModelConfig, dtype: torch.dtype) -> PagedAttention:
    if name == "torch":
        return TorchAttention(config)
    if name == "flash":
        return FlashAttention(importlib.import_module("flash_attn"), config)
    from quadriga.engine.cuda.triton_attention import TritonAttention

    return TritonAttention(config, dtype)
