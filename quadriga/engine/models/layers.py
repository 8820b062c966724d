"""The parts of a transformer layer, in plain torch, over a flat list of tokens.

A pass is T tokens of any sequences; each knows its KV row and its position. That one form serves
prefill chunks and decode steps alike, and any range of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import torch
from torch.nn import functional as F

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.kv_cache import KV_BLOCK, Ints
from quadriga.engine.models.rope import rotate
from quadriga.engine.weights.checkpoint_weights import (
    Head,
    KVMap,
    LayerAdapters,
    LayerWeights,
    Linear,
    LowRank,
    ModelWeights,
    Norm,
)

Adapted = Mapping[int, torch.Tensor]
"""See `Pass.adapted`."""
Gather = Callable[[torch.Tensor], torch.Tensor]
"""Columns [T, n] that each rank of a tensor-parallel engine holds, side by side: [T, ranks · n]."""


def _own(columns: torch.Tensor) -> torch.Tensor:
    """What one rank has is all."""
    return columns


@dataclass(slots=True)
class TokenSpan:
    """Tokens [begin, end) of the pass are positions [start, start + end - begin) of `row`."""

    row: int
    begin: int
    end: int
    start: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.end - self.begin


def tokens_of(spans: Sequence[TokenSpan]) -> tuple[Ints, Ints]:
    """Rows and positions of all tokens of a pass: int64 [T] each."""
    counts = [s.end - s.begin for s in spans]
    rows = np.repeat(np.array([s.row for s in spans], dtype=np.int64), counts)
    offsets = np.array([s.start - s.begin for s in spans], dtype=np.int64)
    return rows, np.arange(len(rows)) + np.repeat(offsets, counts)


def runs_of(rows: Ints, positions: Ints) -> list[TokenSpan]:
    """The tokens of a pass as runs of consecutive positions of one row."""
    breaks = np.flatnonzero((np.diff(rows) != 0) | (np.diff(positions) != 1)) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    firsts = zip(rows[edges[:-1]].tolist(), positions[edges[:-1]].tolist(), strict=True)
    return [
        TokenSpan(row, begin, end, start)
        for (row, start), (begin, end) in zip(firsts, pairwise(edges), strict=True)
    ]


@dataclass(slots=True)
class Pass:
    """One forward pass over T tokens.

    Attributes:
        rows, positions: int64 [T].
        spans: The tokens grouped by sequence, in order.
        cos, sin: [T, 1, head_dim / 2]; None without RoPE.
        is_decode: Every token is of a row of its own.
        context: Longest context of any token, itself included.
        adapted: Adapter → which of the tokens it applies to, int64 [n] each.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    spans: list[TokenSpan]
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    is_decode: bool
    context: int
    adapted: dict[int, torch.Tensor] = field(default_factory=dict)


def norm(x: torch.Tensor, weights: Norm, config: ModelConfig) -> torch.Tensor:
    """RMSNorm or LayerNorm of [T, hidden], computed in float32."""
    if config.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weights.weight, weights.bias, config.norm_eps)
    assert weights.weight is not None
    return rms_norm(x, weights.weight, config.norm_eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last dimension to unit root mean square; any leading shape."""
    if x.device.type != "cpu":  # one kernel, where this is eight
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def activate(x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The MLP's non-linearity; with a gate, x is [T, 2 · ffn] and the result [T, ffn]."""
    gate, up = x.chunk(2, dim=-1) if config.gated else (x, None)
    if config.activation == "silu":
        gate = F.silu(gate)
    elif config.activation == "relu":
        gate = F.relu(gate)
    else:
        tanh = config.activation == "gelu_tanh"
        gate = F.gelu(gate, approximate="tanh" if tanh else "none")
    return gate if up is None else gate * up


def run_layer(
    x: torch.Tensor,
    layer: LayerWeights,
    config: ModelConfig,
    attend: Callable[[torch.Tensor], torch.Tensor],
    loras: LayerAdapters | None = None,
    adapted: Adapted = MappingProxyType({}),
    gather: Gather = _own,
) -> torch.Tensor:
    """One layer: [T, hidden] → [T, hidden].

    Args:
        attend: From the normed hidden states to the mixed values of all heads, [T, q_size]; where
            KV lies and who reads it is its business.
        loras: The layer's adapters; None without any.
        adapted: See `Pass`.
        gather: Of the ranks' heads, their parts of the MLP, and what they add to the hidden states.
    """
    mixed = gather(attend(norm(x, layer.attn_norm, config) if config.pre_norm else x))
    added = add_low_rank(linear(mixed, layer.out), mixed, loras.out if loras else None, adapted)
    x = x + gather(added)
    if not config.pre_norm:
        x = norm(x, layer.attn_norm, config)
    h = norm(x, layer.mlp_norm, config) if config.pre_norm else x
    inner = add_low_rank(linear(h, layer.up), h, loras.up if loras else None, adapted)
    inner = gather(activate(inner, config))
    added = add_low_rank(linear(inner, layer.down), inner, loras.down if loras else None, adapted)
    x = x + gather(added)
    return x if config.pre_norm else norm(x, layer.mlp_norm, config)


def layer_forward(
    x: torch.Tensor,
    layer: LayerWeights,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    config: ModelConfig,
    window: int,
    loras: LayerAdapters | None = None,
    gather: Gather | None = None,
) -> torch.Tensor:
    """Run one layer: [T, hidden] → [T, hidden]; stores the tokens' K and V on the way.

    Args:
        keys, values: This layer's buffers, [rows, blocks, num_kv_heads, KV_BLOCK, head_dim].
        window: Positions a token sees, itself included; 0 is all.
        loras: The layer's adapters; None without any.
        gather: See `run_layer`; None for an engine that is whole.
    """

    def attend(h: torch.Tensor) -> torch.Tensor:
        qkv = add_low_rank(linear(h, layer.qkv), h, loras.qkv if loras else None, batch.adapted)
        q, k, v = split_qkv(qkv, layer, batch.cos, batch.sin, config)
        _store(keys, values, batch, k, v)
        form = _attend_decode if batch.is_decode else _attend_spans
        return form(by_group(q, config), keys, values, batch, window).to(h.dtype)

    return run_layer(x, layer, config, attend, loras, batch.adapted, gather or _own)


def embed(weights: ModelWeights, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Token ids and their positions, T of each → hidden states [T, hidden]."""
    x = weights.embed.take(ids, weights.dtype)
    if weights.project_in is not None:
        x = weights.project_in.linear(x)
    return x if weights.positions is None else x + weights.positions[positions]


def apply_head(x: torch.Tensor, head: Head, config: ModelConfig) -> torch.Tensor:
    """The head of an exit: [n, hidden] → float32 [n, vocab]."""
    return head.weight.linear(last_states(x, head, config)).float()


def last_states(x: torch.Tensor, head: Head, config: ModelConfig) -> torch.Tensor:
    """What a head's logits are made of, after its norm: [n, hidden] → [n, embed_size]."""
    if head.mlp is not None:
        inner = activate(linear(norm(x, head.mlp.norm, config), head.mlp.up), config)
        x = x + linear(inner, head.mlp.down)
    if head.norm is not None:
        x = norm(x, head.norm, config)
    return x if head.project is None else head.project.linear(x)


def add_low_rank(
    y: torch.Tensor, x: torch.Tensor, loras: Sequence[LowRank | None] | None, adapted: Adapted
) -> torch.Tensor:
    """Add what the tokens' adapters make of x [T, in] to a projection y [T, out]; returns it."""
    if loras is None:
        return y
    for index, tokens in adapted.items():
        lora = loras[index]
        if lora is not None:
            y.index_add_(0, tokens, F.linear(F.linear(x[tokens], lora.down), lora.up))
    return y


def linear(x: torch.Tensor, by: Linear) -> torch.Tensor:
    """[T, in] → [T, out]"""
    return by.weight.linear(x, by.bias)


def split_qkv(
    qkv: torch.Tensor,
    layer: LayerWeights,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    config: ModelConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K, V of a layer's projection [T, q_size + 2 · kv_size], rotated: [T, heads, head_dim].

    Args:
        cos, sin: [T, 1, head_dim / 2]; None without RoPE.
    """
    c = config
    heads = [c.num_heads, c.num_kv_heads]
    split = qkv.view(qkv.shape[0], c.num_heads + 2 * c.num_kv_heads, c.head_dim)
    qk, v = torch.split(split, [sum(heads), c.num_kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = torch.split(qk, heads, dim=1)
        q = rms_norm(q, layer.q_norm, c.norm_eps)
        k = rms_norm(k, layer.k_norm, c.norm_eps)
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v
    if cos is not None and sin is not None:
        qk = rotate(qk, cos, sin)  # together: half the kernels
    q, k = torch.split(qk, heads, dim=1)
    return q, k, v


def by_group(q: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Q beside the KV head it reads, and scaled: [T, kv_heads, group, head_dim], float32.

    Attention stays in float32 to its end, as in kernels for GPUs: scores are tens, which bfloat16
    rounds by up to 1/16 each way, and weights are their exponentials.
    """
    c = config
    group = c.num_heads // c.num_kv_heads
    return q.reshape(q.shape[0], c.num_kv_heads, group, c.head_dim).float().mul(c.head_dim**-0.5)


def mapped_kv(
    x: torch.Tensor,
    kv_map: KVMap,
    layer: LayerWeights,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    config: ModelConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's K and V of hidden states [T, hidden] that skip it: [T, kv_heads, head_dim]."""
    c = config
    h = norm(x, kv_map.norm, c) if c.pre_norm else x
    k, v = linear(h, kv_map.kv).view(x.shape[0], 2, c.num_kv_heads, c.head_dim).unbind(1)
    if layer.k_norm is not None:
        k = rms_norm(k, layer.k_norm, c.norm_eps)
    if cos is not None and sin is not None:
        k = rotate(k, cos, sin)
    return k, v


def project_kv(
    x: torch.Tensor,
    kv_map: KVMap,
    layer: LayerWeights,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    config: ModelConfig,
) -> None:
    """Store one layer's K and V of hidden states [T, hidden] that skip the layer itself."""
    _store(keys, values, batch, *mapped_kv(x, kv_map, layer, batch.cos, batch.sin, config))


def _store(
    keys: torch.Tensor, values: torch.Tensor, batch: Pass, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write [T, num_kv_heads, head_dim] to where the tokens of a pass belong."""
    blocks, slots = batch.positions // KV_BLOCK, batch.positions % KV_BLOCK
    keys[batch.rows, blocks, :, slots] = k
    values[batch.rows, blocks, :, slots] = v


def attend_each(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, window: int
) -> torch.Tensor:
    """One query per sequence. KV heads are not repeated: a group of queries shares each.

    Args:
        q: Scaled, float32 [T, kv_heads, group, head_dim].
        k, v: Positions 0… of each query's sequence: [T, kv_heads, context, head_dim].
        positions: Of the queries, [T].

    Returns:
        float32 [T, kv_heads, group, head_dim]
    """
    scores = torch.matmul(q, k.float().transpose(-1, -2))  # [T, kv_heads, group, context]
    at = torch.arange(k.shape[-2], device=q.device)
    last = positions[:, None]
    hidden = at > last
    if window:
        hidden = hidden | (at <= last - window)
    scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1), v.float())


def attend_run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, first: int, window: int
) -> torch.Tensor:
    """A run of queries of one sequence.

    Args:
        q: Scaled, float32 [count, kv_heads, group, head_dim], at positions start….
        k, v: Positions [first, start + count): [kv_heads, context, head_dim].

    Returns:
        float32 [count, kv_heads, group, head_dim]
    """
    count = q.shape[0]
    scores = torch.matmul(q.permute(1, 2, 0, 3), k.float()[:, None].transpose(-1, -2))
    at = torch.arange(first, start + count, device=q.device)
    last = torch.arange(start, start + count, device=q.device)[:, None]
    hidden = at > last
    if window:
        hidden = hidden | (at <= last - window)
    scores = scores.masked_fill(hidden, float("-inf"))  # [kv_heads, group, count, context]
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights, v.float()[:, None]).permute(2, 0, 1, 3)


def first_visible(start: int, window: int) -> int:
    """The first position that a query at `start` sees."""
    return max(0, start + 1 - window) if window else 0


def _attend_decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Pass, window: int
) -> torch.Tensor:
    """One query per sequence, over a copy of each one's row: float32 [T, q_size]."""
    rows, context = batch.rows, batch.context
    num_blocks = -(-context // KV_BLOCK)
    # [T, num_blocks, kv_heads, KV_BLOCK, head_dim] → [T, kv_heads, context, head_dim]
    k = _by_head(keys[:, :num_blocks].index_select(0, rows))[:, :, :context]
    v = _by_head(values[:, :num_blocks].index_select(0, rows))[:, :, :context]
    return attend_each(q, k, v, batch.positions, window).reshape(q.shape[0], -1)


def _by_head(blocks: torch.Tensor) -> torch.Tensor:
    """[…, num_blocks, kv_heads, KV_BLOCK, head_dim] → […, kv_heads, positions, head_dim]."""
    return blocks.transpose(-4, -3).flatten(-3, -2)


def _attend_spans(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Pass, window: int
) -> torch.Tensor:
    """Runs of queries, sequence by sequence, each over its own row: float32 [T, q_size]."""
    out = torch.empty_like(q)
    for s in batch.spans:
        first = first_visible(s.start, window)
        num_blocks = -(-s.stop // KV_BLOCK)
        k = _by_head(keys[s.row, :num_blocks])[:, first : s.stop]  # [kv_heads, context, head_dim]
        v = _by_head(values[s.row, :num_blocks])[:, first : s.stop]
        out[s.begin : s.end] = attend_run(q[s.begin : s.end], k, v, s.start, first, window)
    return out.view(q.shape[0], -1)
