"""Attention over paged KV in Triton: grouped queries, sliding windows, online softmax.

One program computes one block of queries of one sequence against one KV head, for all query heads
that share it: its matrix has a row for every (query, member of the group). It walks the positions
its queries see, a tile at a time, and keeps a running maximum and sum. Decode has few queries and
long contexts, so there the positions are split among several programs, and a second kernel joins
their partial results. How many is a function of batch size and heads alone: a graph must not
depend on lengths.

Source: FlashAttention-2 §3.1 (online softmax), Flash-Decoding (split over positions).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.cuda.paged_attention import PagedKV, Runs

_MIN_ROWS = 16  # of a program's matrix: the least that a product takes
_MAX_ROWS = {torch.float32: 16}
"""Of a prompt's program, 64 else. Products of float32 in full precision are spelled out, number by
number: with 64 rows the kernel takes 11 to 37 s to compile, with 16 two."""
_TILE_BYTES = 16_384
"""Of K or of V in a tile, which lies in one page. A tile has 64 positions where they take no more,
else 32; of float32 always 32: with 64 the prompts' kernel spills on compute capability 8.0."""
_MAX_SPLITS = 16
_DECODE_STAGES, _PROMPT_STAGES = 5, 3
"""Of the loop over tiles. A tile's page is looked up before its keys: for decode, 5 stages keep two
tiles in shared memory, the next on its way while this one is multiplied; 3 and 4 keep one."""
_CPU_PROCESSORS = 4  # the interpreter's stand-in for a GPU's multiprocessors


@triton.jit
def _attend(
    q,
    keys,
    values,
    table,
    begins,
    lengths,
    block_runs,
    block_begins,
    out,
    part_out,
    part_max,
    part_sum,
    table_stride,
    scale,
    window,
    EACH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One (query block, KV head, split). EACH: every query is a run, and a block, of its own.

    q, out [T, KV_HEADS · GROUP, HEAD]; part_out [T, heads, SPLITS, HEAD] and part_max, part_sum
    [T, heads, SPLITS], float32, where SPLITS > 1.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if EACH:
        run = block
        first = block
        run_end = block + 1
    else:
        run = tl.load(block_runs + block)
        first = tl.load(block_begins + block)
        run_end = tl.load(begins + run + 1)
    length = tl.load(lengths + run)

    row = tl.arange(0, ROWS)
    query = first + row // GROUP
    is_query = (row < QUERIES * GROUP) & (query < run_end)
    position = length - run_end + query  # of each row's query; the last stands at length - 1
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, HEAD_PADDED)
    is_dim = dim < HEAD
    at_row = query.to(tl.int64) * (KV_HEADS * GROUP) + head
    mine = is_query[:, None] & is_dim[None, :]
    q_tile = tl.load(q + at_row[:, None] * HEAD + dim[None, :], mask=mine, other=0.0)

    last = tl.minimum(first + QUERIES, run_end) - 1
    stop = length - run_end + last + 1
    oldest = tl.maximum(0, length - run_end + first + 1 - window)  # that the first query sees
    start = tl.where(window > 0, oldest, 0) // TILE * TILE
    share = tl.cdiv(tl.cdiv(stop - start, SPLITS), TILE) * TILE
    begin = start + split * share
    end = tl.minimum(begin + share, stop)

    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, HEAD_PADDED], dtype=tl.float32)
    for at in range(begin, end, TILE):
        page = tl.load(table + run.to(tl.int64) * table_stride + at // PAGE).to(tl.int64)
        key = at + tl.arange(0, TILE)
        is_key = key < end
        slot = page * PAGE + at % PAGE + tl.arange(0, TILE)
        at_slot = (slot * KV_HEADS + kv_head) * HEAD
        there = is_key[:, None] & is_dim[None, :]
        k_tile = tl.load(keys + at_slot[:, None] + dim[None, :], mask=there, other=0.0)
        v_tile = tl.load(values + at_slot[:, None] + dim[None, :], mask=there, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        seen = is_key[None, :] & (key[None, :] <= position[:, None])
        seen = seen & ((window == 0) | (key[None, :] > position[:, None] - window))
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet keeps -inf; its weights are then exp(-inf - 0) = 0.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        top = new_top

    if SPLITS == 1:
        result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        to = out + at_row[:, None] * HEAD + dim[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=mine)
    else:
        at_part = at_row * SPLITS + split
        tl.store(part_out + at_part[:, None] * HEAD + dim[None, :], mixed, mask=mine)
        tl.store(part_max + at_part, top, mask=is_query)
        tl.store(part_sum + at_part, total, mask=is_query)


@triton.jit
def _join(
    part_out,
    part_max,
    part_sum,
    out,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The splits' partial results of one (query, head) → its result."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, HEAD_PADDED)
    is_dim = dim < HEAD
    tops = tl.load(part_max + row * SPLITS + split)
    sums = tl.load(part_sum + row * SPLITS + split)
    at = (row * SPLITS + split)[:, None] * HEAD + dim[None, :]
    parts = tl.load(part_out + at, mask=is_dim[None, :], other=0.0)
    weights = tl.exp(tops - tl.max(tops, 0))
    total = tl.sum(weights * sums, 0)
    result = tl.sum(weights[:, None] * parts, 0) / total
    tl.store(out + row * HEAD + dim, result.to(out.dtype.element_ty), mask=is_dim)


class TritonAttention:
    """See `PagedAttention`."""

    name = "triton"
    in_graphs = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._kv_heads = config.num_kv_heads
        self._group = config.num_heads // config.num_kv_heads
        self._head = config.head_dim
        self._scale = config.head_dim**-0.5
        rows = _MAX_ROWS.get(dtype, 64)
        self.block_queries = max(1, rows // triton.next_power_of_2(self._group))

    def each(
        self, q: torch.Tensor, kv: PagedKV, lengths: torch.Tensor, longest: int, window: int
    ) -> torch.Tensor:
        """See `PagedAttention.each`."""
        splits = self._splits(q.shape[0], q.device)
        return self._run(q, kv, lengths, None, splits, window)

    def runs(self, q: torch.Tensor, kv: PagedKV, runs: Runs, window: int) -> torch.Tensor:
        """See `PagedAttention.runs`."""
        return self._run(q, kv, runs.lengths, runs, 1, window)

    def _splits(self, count: int, device: torch.device) -> int:
        """Programs per query and KV head: enough for two on each processor of the GPU."""
        processors = _CPU_PROCESSORS
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        # Rounded up, so that a batch that a graph has padded is split like one that was not.
        programs = triton.next_power_of_2(count) * self._kv_heads
        wanted = triton.next_power_of_2(max(1, 2 * processors // programs))
        return int(min(_MAX_SPLITS, wanted))

    def _run(
        self,
        q: torch.Tensor,
        kv: PagedKV,
        lengths: torch.Tensor,
        runs: Runs | None,
        splits: int,
        window: int,
    ) -> torch.Tensor:
        """Both forms; without runs, every query is one."""
        q = q.contiguous()
        num_tokens, num_heads, head = q.shape
        out = torch.empty_like(q)
        parts = (num_tokens, num_heads, splits) if splits > 1 else (0,)
        part_out = torch.empty((*parts, head), dtype=torch.float32, device=q.device)
        part_max = torch.empty(parts, dtype=torch.float32, device=q.device)
        part_sum = torch.empty(parts, dtype=torch.float32, device=q.device)
        begins, block_runs, block_begins, num_blocks = lengths, lengths, lengths, num_tokens
        if runs is not None:
            begins, block_runs, block_begins = runs.begins, runs.block_runs, runs.block_begins
            num_blocks = block_runs.numel()
        constants = self.constants(
            q.dtype, kv.keys.shape[1], is_run=runs is not None, splits=splits
        )
        _attend[(num_blocks, self._kv_heads, splits)](
            q,
            *kv,
            begins,
            lengths,
            block_runs,
            block_begins,
            out,
            part_out,
            part_max,
            part_sum,
            kv.table.stride(0),
            self._scale,
            window,
            **constants,
        )
        if splits > 1:
            _join[(num_tokens * num_heads,)](
                part_out,
                part_max,
                part_sum,
                out,
                HEAD=head,
                HEAD_PADDED=constants["HEAD_PADDED"],
                SPLITS=splits,
            )
        return out.flatten(1)

    def constants(
        self, dtype: torch.dtype, page_tokens: int, *, is_run: bool, splits: int
    ) -> dict[str, Any]:
        """What `_attend` is compiled for: its constants and options."""
        queries = self.block_queries if is_run else 1
        padded = max(16, triton.next_power_of_2(self._head))
        is_small = dtype.itemsize == 2 and padded * dtype.itemsize * 64 <= _TILE_BYTES
        tile = 64 if is_small else 32
        return {
            "EACH": not is_run,
            "KV_HEADS": self._kv_heads,
            "GROUP": self._group,
            "HEAD": self._head,
            "HEAD_PADDED": padded,
            "QUERIES": queries,
            "ROWS": max(_MIN_ROWS, triton.next_power_of_2(queries * self._group)),
            "TILE": min(tile, page_tokens),
            "PAGE": page_tokens,
            "SPLITS": splits,
            # Full float32 products: TF32 would answer differently from the CPU engine.
            "PRECISION": "ieee",
            "num_stages": _PROMPT_STAGES if is_run else _DECODE_STAGES,
        }
