"""The shape of a model's K/V cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What one token leaves in the cache: `num_layers` times K and V of [num_kv_heads, head_dim].

    Attributes:
        vocab_size: Width of the logits; padded vocabularies are wider than the tokenizer's.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def values_per_token(self) -> int:
        """Numbers stored for one token, over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim
