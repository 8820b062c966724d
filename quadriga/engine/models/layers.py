"""The parts of a transformer layer, in plain torch, over a flat list of tokens.

A pass is T tokens of any sequences; each knows its KV row and its position. That one form serves
prefill chunks and decode steps alike, and any range of layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from quadriga.engine.kv_cache import KV_BLOCK
from quadriga.engine.models.config import ModelConfig
from quadriga.engine.models.rope import rotate
from quadriga.engine.weights import Affine, LayerWeights


@dataclass(slots=True)
class Span:
    """Tokens [begin, end) of the pass are positions [start, start + end - begin) of `row`."""

    row: int
    begin: int
    end: int
    start: int

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.end - self.begin


@dataclass(slots=True)
class Pass:
    """One forward pass over T tokens.

    Attributes:
        rows, positions: int64 [T].
        spans: The tokens grouped by sequence, in order.
        cos, sin: [T, 1, head_dim / 2]; None without RoPE.
        is_decode: Every span is a single token.
        context: Longest context of any token, itself included.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    spans: list[Span]
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    is_decode: bool
    context: int


def norm(x: torch.Tensor, affine: Affine, config: ModelConfig) -> torch.Tensor:
    """RMSNorm or LayerNorm of [T, hidden], computed in float32."""
    if config.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], affine.weight, affine.bias, config.norm_eps)
    assert affine.weight is not None
    return rms_norm(x, affine.weight, config.norm_eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale the last dimension to unit root mean square; any leading shape."""
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


def layer_forward(
    x: torch.Tensor,
    layer: LayerWeights,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    config: ModelConfig,
    window: int,
) -> torch.Tensor:
    """Run one layer: [T, hidden] → [T, hidden]; stores the tokens' K and V on the way.

    Args:
        keys, values: This layer's buffers, [rows, blocks, num_kv_heads, KV_BLOCK, head_dim].
        window: Positions a token sees, itself included; 0 is all.
    """
    h = norm(x, layer.attn_norm, config) if config.pre_norm else x
    q = _project_qkv(h, layer, keys, values, batch, config)
    attend = _attend_decode if batch.is_decode else _attend_spans
    h = attend(q, keys, values, batch, window)
    x = x + _linear(h, layer.out)
    if not config.pre_norm:
        x = norm(x, layer.attn_norm, config)
    h = norm(x, layer.mlp_norm, config) if config.pre_norm else x
    x = x + _linear(activate(_linear(h, layer.up), config), layer.down)
    return x if config.pre_norm else norm(x, layer.mlp_norm, config)


def _linear(x: torch.Tensor, affine: Affine) -> torch.Tensor:
    assert affine.weight is not None
    return F.linear(x, affine.weight, affine.bias)


def _project_qkv(
    h: torch.Tensor,
    layer: LayerWeights,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    config: ModelConfig,
) -> torch.Tensor:
    """Project, rotate, store K and V; return Q, scaled: [T, kv_heads, group, head_dim]."""
    c = config
    num_tokens = h.shape[0]
    q, k, v = torch.split(_linear(h, layer.qkv), [c.q_size, c.kv_size, c.kv_size], dim=-1)
    q = q.view(num_tokens, c.num_heads, c.head_dim)
    k = k.view(num_tokens, c.num_kv_heads, c.head_dim)
    v = v.view(num_tokens, c.num_kv_heads, c.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, c.norm_eps)
        k = rms_norm(k, layer.k_norm, c.norm_eps)
    if batch.cos is not None and batch.sin is not None:
        q = rotate(q, batch.cos, batch.sin)
        k = rotate(k, batch.cos, batch.sin)
    _store(keys, values, batch, k, v)
    group = c.num_heads // c.num_kv_heads
    return q.view(num_tokens, c.num_kv_heads, group, c.head_dim).mul(c.head_dim**-0.5)


def project_kv(
    x: torch.Tensor,
    layer: LayerWeights,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: Pass,
    config: ModelConfig,
) -> None:
    """Store one layer's K and V of hidden states [T, hidden] that skip the layer itself."""
    c = config
    h = norm(x, layer.attn_norm, c) if c.pre_norm else x
    assert layer.qkv.weight is not None
    bias = None if layer.qkv.bias is None else layer.qkv.bias[c.q_size :]
    kv = F.linear(h, layer.qkv.weight[c.q_size :], bias)
    k, v = kv.view(x.shape[0], 2, c.num_kv_heads, c.head_dim).unbind(1)
    if layer.k_norm is not None:
        k = rms_norm(k, layer.k_norm, c.norm_eps)
    if batch.cos is not None and batch.sin is not None:
        k = rotate(k, batch.cos, batch.sin)
    _store(keys, values, batch, k, v)


def _store(
    keys: torch.Tensor, values: torch.Tensor, batch: Pass, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write [T, num_kv_heads, head_dim] to where the tokens of a pass belong."""
    blocks, slots = batch.positions // KV_BLOCK, batch.positions % KV_BLOCK
    keys[batch.rows, blocks, :, slots] = k
    values[batch.rows, blocks, :, slots] = v


def _attend_decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Pass, window: int
) -> torch.Tensor:
    """One query per sequence. KV heads are not repeated: a group of queries shares each."""
    rows, context = batch.rows, batch.context
    num_blocks = -(-context // KV_BLOCK)
    # [T, num_blocks, kv_heads, KV_BLOCK, head_dim] → [T, kv_heads, context, head_dim]
    k = _by_head(keys[:, :num_blocks].index_select(0, rows))[:, :, :context]
    v = _by_head(values[:, :num_blocks].index_select(0, rows))[:, :, :context]
    scores = torch.matmul(q, k.transpose(-1, -2))  # [T, kv_heads, group, context]
    at = torch.arange(context, device=q.device)
    last = batch.positions[:, None]
    hidden = at > last
    if window:
        hidden = hidden | (at <= last - window)
    scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).reshape(q.shape[0], -1)


def _by_head(blocks: torch.Tensor) -> torch.Tensor:
    """[…, num_blocks, kv_heads, KV_BLOCK, head_dim] → […, kv_heads, positions, head_dim]."""
    return blocks.transpose(-4, -3).flatten(-3, -2)


def _attend_spans(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Pass, window: int
) -> torch.Tensor:
    """Runs of queries, sequence by sequence, each over its own row."""
    num_tokens, kv_heads, group, head_dim = q.shape
    out = torch.empty_like(q)
    for s in batch.spans:
        first = max(0, s.start + 1 - window) if window else 0
        num_blocks = -(-s.stop // KV_BLOCK)
        k = _by_head(keys[s.row, :num_blocks])[:, first : s.stop]  # [kv_heads, context, head_dim]
        v = _by_head(values[s.row, :num_blocks])[:, first : s.stop]
        count = s.end - s.begin
        queries = q[s.begin : s.end].permute(1, 2, 0, 3)  # [kv_heads, group, count, head_dim]
        scores = torch.matmul(queries, k[:, None].transpose(-1, -2))
        at = torch.arange(first, s.stop, device=q.device)
        last = torch.arange(s.start, s.stop, device=q.device)[:, None]
        hidden = at > last
        if window:
            hidden = hidden | (at <= last - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        mixed = torch.matmul(weights, v[:, None])  # [kv_heads, group, count, head_dim]
        out[s.begin : s.end] = mixed.permute(2, 0, 1, 3)
        assert mixed.shape == (kv_heads, group, count, head_dim)
    return out.view(num_tokens, -1)
