"""Rotary position embedding as a table of cosines and sines."""

from __future__ import annotations

import math

import torch

from quadriga.checkpoint.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions. [head_dim / 2], float32.

    Source: RoFormer §3.2.2; `llama3` as in the Llama 3.1 release: wavelengths beyond
    original_positions / low_freq_factor are stretched by `factor`, those below
    original_positions / high_freq_factor are kept, and those between are blended.
    """
    inv = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return inv / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_positions / (2 * math.pi / inv)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * inv / rope.factor + blend * inv
    return inv


def rope_table(
    rope: RopeConfig, head_dim: int, num_positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for every position: two tensors [num_positions, head_dim / 2]."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the two halves of each head against each other.

    Args:
        x: [num_tokens, num_heads, head_dim]
        cos, sin: [num_tokens, 1, head_dim / 2]
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
