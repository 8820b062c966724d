"""What a layer computes around attention, and what an exit's logits say: one call for each.

`Operations` does it in plain torch, on any device, and is the reference; `triton_operations` has a
kernel for each, where a model fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.models.layers import activate, linear, norm, split_qkv
from quadriga.engine.weights.checkpoint_weights import LayerWeights, Linear, Norm

SAYS = 3
"""What is said of a row of logits: the place of the largest, and the two largest probabilities."""


@dataclass(frozen=True, slots=True)
class Store:
    """Where the tokens of a pass are in one layer.

    Attributes:
        keys, values: The pools, [slots, kv_heads, head_dim].
        slots, positions: Of every token: int64 [T].
        cos, sin: Of every position, [positions, head_dim / 2]; None without RoPE.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None


class Operations:
    """The reference."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def add_norm(
        self, x: torch.Tensor, more: torch.Tensor | None, weights: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + more, both [T, hidden], and the norm of that."""
        x = x if more is None else x + more
        return x, norm(x, weights, self._config)

    def project(
        self, x: torch.Tensor, more: torch.Tensor | None, weights: Norm, by: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + more, both [T, hidden], and the norm of that times `by`, [T, out]."""
        x, h = self.add_norm(x, more, weights)
        return x, linear(h, by)

    def open_mlp(
        self, x: torch.Tensor, more: torch.Tensor | None, weights: Norm, up: Linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + more, both [T, hidden], and what the MLP makes of the norm of that, [T, ffn]."""
        x, h = self.project(x, more, weights, up)
        return x, self.activate(h)

    def linear(self, x: torch.Tensor, by: Linear) -> torch.Tensor:
        """See `layers.linear`."""
        return linear(x, by)

    def rotate_and_store(
        self, qkv: torch.Tensor, layer: LayerWeights, store: Store
    ) -> torch.Tensor:
        """Rotate Q and K of [T, q_size + 2 · kv_size], normed where the layer does; store K, V.

        Returns:
            Q, [T, heads, head_dim].
        """
        cos = sin = None
        if store.cos is not None and store.sin is not None:
            cos, sin = store.cos[store.positions, None], store.sin[store.positions, None]
        q, k, v = split_qkv(qkv, layer, cos, sin, self._config)
        store.keys[store.slots] = k
        store.values[store.slots] = v
        return q

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        """See `layers.activate`."""
        return activate(up, self._config)

    def say(self, logits: torch.Tensor, wide: torch.Tensor, said: torch.Tensor) -> None:
        """Widen logits [n, vocab] into `wide`; put what they say into `said` [n, SAYS], float32.

        The first of equals is the largest. A place is exact: vocabularies are below 2 ** 24.
        """
        wide.copy_(logits)
        most = min(2, wide.shape[1])
        said.zero_()
        said[:, 0].copy_(wide.argmax(dim=-1))
        said[:, 1 : 1 + most].copy_(torch.topk(torch.softmax(wide, dim=-1), most, dim=-1).values)
