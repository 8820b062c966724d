"""Causal attention over flat tokens that lie in groups of equally long rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows up to this length are faster as plain batched products than in the fused CPU kernel.
SHORT_ROW = 64


def causal_attention(q: Tensor, k: Tensor, v: Tensor, groups: list[tuple[int, int]]) -> Tensor:
    """Return [num_tokens, heads · dim]; tokens behind the last group are filler and get zeros.

    Args:
        q: [num_tokens, heads, dim].
        k: [num_tokens, kv_heads, dim]; so `v`.
        groups: (rows, row length) of each group, in order.
    """
    total = q.shape[0]
    sizes = [rows * length for rows, length in groups]
    sizes.append(total - sum(sizes))
    outputs = []
    for (rows, length), q_part, k_part, v_part in zip(
        groups, *(torch.split(part, sizes) for part in (q, k, v)), strict=False
    ):
        shaped = [part.view(rows, length, -1, part.shape[-1]) for part in (q_part, k_part, v_part)]
        attend = _short if q.device.type == "cpu" and length <= SHORT_ROW else _fused
        outputs.append(attend(*shaped).reshape(rows * length, -1))
    if sizes[-1]:
        outputs.append(q.new_zeros(sizes[-1], q.shape[1] * q.shape[2]))
    return torch.cat(outputs)


def _fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dtype = q.dtype
    if q.device.type == "cpu":  # the fused CPU kernel is slower in bf16 than in fp32
        q, k, v = q.float(), k.float(), v.float()
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    merged: Tensor = attended.transpose(1, 2).to(dtype)
    return merged


def _short(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    per_kv = heads // kv_heads
    # Heads of one KV head share a product: [rows, kv_heads, per_kv · length, dim]
    queries = q.transpose(1, 2).reshape(rows, kv_heads, per_kv * length, dim)
    scores = (queries @ k.permute(0, 2, 3, 1)).view(rows, kv_heads, per_kv, length, length)
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = (scores.float() * dim**-0.5).masked_fill(mask, float("-inf")).softmax(-1)
    attended = weights.to(q.dtype).view(rows, kv_heads, per_kv * length, length) @ v.transpose(1, 2)
    merged: Tensor = attended.view(rows, heads, length, dim).transpose(1, 2)
    return merged
