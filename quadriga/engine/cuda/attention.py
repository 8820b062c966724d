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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from quadriga.config.engine_spec import Attention
from quadriga.engine.cuda.transfers import to_device
from quadriga.engine.models.config import ModelConfig
from quadriga.engine.models.layers import (
    TokenSpan,
    attend_each,
    attend_run,
    by_group,
    first_visible,
)
from quadriga.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runs:
    """Queries in runs, each of consecutive positions of one sequence, up to its newest.

    Attributes:
        spans: On the host; the runs lie one behind the other.
        begins: First query of each run, and one past the last: int32 [runs + 1].
        lengths: Positions to read, the run's own included: int32 [runs].
        length_sums: Of the runs before: int32 [runs + 1].
        longest_run, longest: Of the queries, of the positions.
        block_runs, block_begins: The queries in blocks of the size that the kernel wants; each
            block's run and first query: int32 [blocks].
    """

    spans: Sequence[TokenSpan]
    begins: torch.Tensor
    lengths: torch.Tensor
    length_sums: torch.Tensor
    longest_run: int
    longest: int
    block_runs: torch.Tensor
    block_begins: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[TokenSpan], block_queries: int, device: torch.device) -> Runs:
        """Lay the spans' queries out; one copy to the device."""
        ends = np.array([s.end for s in spans], dtype=np.int32)
        begins = np.concatenate([[0], ends]).astype(np.int32)
        lengths = np.array([s.stop for s in spans], dtype=np.int32)
        sums = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        counts = -(-np.diff(begins) // block_queries)
        block_runs = np.repeat(np.arange(len(spans), dtype=np.int32), counts)
        within = np.arange(block_runs.size) - np.repeat(np.cumsum(counts) - counts, counts)
        block_begins = (begins[block_runs] + within * block_queries).astype(np.int32)
        parts = [begins, lengths, sums, block_runs, block_begins]
        # Each begins at a multiple of 16 bytes: kernels are compiled anew for other alignments.
        padded = [np.pad(p, (0, -p.size % 4)) for p in parts]
        packed = to_device(np.concatenate(padded), device)
        pieces = torch.split(packed, [p.size for p in padded])
        on_device = [piece[: p.size] for piece, p in zip(pieces, parts, strict=True)]
        return cls(
            spans=spans,
            begins=on_device[0],
            lengths=on_device[1],
            length_sums=on_device[2],
            longest_run=int(np.diff(begins).max()),
            longest=int(lengths.max()),
            block_runs=on_device[3],
            block_begins=on_device[4],
        )


class PagedAttention(Protocol):
    """Mixes the values that queries see.

    Everywhere q is [T, num_heads, head_dim], rotated and not scaled; `keys` and `values` are the
    pools [pages, page_tokens, num_kv_heads, head_dim]; `table` is one layer's pages,
    int32 [sequences, num_blocks]; `window` is how many positions a query sees, itself included, 0
    is all. The result is [T, num_heads · head_dim].
    """

    name: str
    block_queries: int
    """Queries in a block of `Runs`."""
    in_graphs: bool
    """Its cost does not grow with the `longest` that a graph must assume."""

    def each(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        window: int,
    ) -> torch.Tensor:
        """One query of each sequence, at the end of the positions it sees.

        Args:
            lengths: How many positions those are, without the window: int32 [T].
            longest: None is greater.

        Nothing on the host depends on what is on the device: it may be recorded into a graph.
        """

    def runs(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        runs: Runs,
        window: int,
    ) -> torch.Tensor:
        """Runs of queries; `table` has a row a run."""


class TorchAttention:
    """The reference."""

    name = "torch"
    block_queries = 1 << 30  # it knows no blocks
    in_graphs = False

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def each(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        window: int,
    ) -> torch.Tensor:
        """See `PagedAttention.each`."""
        pages = table[:, : -(-longest // keys.shape[1])]
        # [T, blocks, page_tokens, kv_heads, head_dim] → [T, kv_heads, longest, head_dim]
        k = keys[pages].flatten(1, 2)[:, :longest].transpose(1, 2)
        v = values[pages].flatten(1, 2)[:, :longest].transpose(1, 2)
        return attend_each(by_group(q, self._config), k, v, lengths - 1, window).flatten(1)

    def runs(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        runs: Runs,
        window: int,
    ) -> torch.Tensor:
        """See `PagedAttention.runs`."""
        grouped = by_group(q, self._config)
        out = torch.empty_like(grouped)
        for pages, s in zip(table, runs.spans, strict=True):
            first = first_visible(s.start, window)
            seen = pages[: -(-s.stop // keys.shape[1])]
            k = keys[seen].flatten(0, 1)[first : s.stop].transpose(0, 1)
            v = values[seen].flatten(0, 1)[first : s.stop].transpose(0, 1)
            out[s.begin : s.end] = attend_run(
                grouped[s.begin : s.end], k, v, s.start, first, window
            )
        return out.flatten(1)


class FlashAttention:
    """flash-attn 2: `flash_attn_with_kvcache` for decode, `flash_attn_varlen_func` for runs.

    Its causal mask is aligned to the last key, which is where a run's last query stands; its window
    counts the positions before the query, ours the query too.

    Args:
        library: The module `flash_attn`.
    """

    name = "flash"
    block_queries = 1 << 30  # it knows no blocks
    in_graphs = True

    def __init__(self, library: Any, config: ModelConfig) -> None:
        self._library = library
        self._scale = config.head_dim**-0.5

    def each(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        window: int,
    ) -> torch.Tensor:
        """See `PagedAttention.each`."""
        mixed: torch.Tensor = self._library.flash_attn_with_kvcache(
            q[:, None],
            keys,
            values,
            cache_seqlens=lengths,
            block_table=table,
            softmax_scale=self._scale,
            causal=True,
            window_size=_before(window),
        )
        return mixed.flatten(1)

    def runs(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        runs: Runs,
        window: int,
    ) -> torch.Tensor:
        """See `PagedAttention.runs`."""
        mixed: torch.Tensor = self._library.flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=runs.begins,
            cu_seqlens_k=runs.length_sums,
            max_seqlen_q=runs.longest_run,
            max_seqlen_k=runs.longest,
            softmax_scale=self._scale,
            causal=True,
            window_size=_before(window),
            block_table=table,
        )
        return mixed.flatten(1)


def _before(window: int) -> tuple[int, int]:
    """A window as flash-attn has it: positions before and after the query."""
    return (window - 1, 0) if window else (-1, -1)


def choose_attention(
    wanted: Attention, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> PagedAttention:
    """The attention to use; the log says which, and why not a faster one.

    Raises:
        ConfigError: The one asked for cannot run here.
    """
    refused: dict[str, str] = {}
    for name in ("flash", "triton", "torch") if wanted == "auto" else (wanted,):
        reason = _unfit(name, config, dtype, device)
        if reason is None:
            chosen = _make(name, config)
            why = "; ".join(f"{n} does not fit: {r}" for n, r in refused.items())
            logger.info("attention: %s%s", name, f" ({why})" if why else "")
            return chosen
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


def _make(name: str, config: ModelConfig) -> PagedAttention:
    if name == "torch":
        return TorchAttention(config)
    if name == "flash":
        return FlashAttention(importlib.import_module("flash_attn"), config)
    from quadriga.engine.cuda.triton_attention import TritonAttention

    return TritonAttention(config)
