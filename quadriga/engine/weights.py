"""A model's weights in memory, as the layers compute with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Affine:
    """Weight and optional bias of a linear projection or a norm.

    Attributes:
        weight: [out, in] for a projection, [size] for a norm; None for a norm without scale.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None = None


@dataclass(slots=True)
class LayerWeights:
    """One transformer layer.

    Attributes:
        qkv: Query, key and value projections stacked: [q_size + 2 · kv_size, hidden].
        q_norm, k_norm: [head_dim], Qwen3 only.
        up: Gate and up projections stacked [2 · ffn, hidden]; up alone [ffn, hidden] if not gated.
    """

    attn_norm: Affine
    qkv: Affine
    out: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(slots=True)
class KVMap:
    """What turns a hidden state that skips a layer into K and V of that layer.

    Attributes:
        norm: Unused where the family norms behind its layers.
        kv: [2 · kv_size, hidden], keys first, before their norm and rotation.
    """

    norm: Affine
    kv: Affine


@dataclass(slots=True)
class Head:
    """What turns a hidden state into logits, at the end of the model or at an exit.

    Attributes:
        norm: None for a model without a final norm.
        project: [embed_size, hidden] where embed_size differs from hidden_size.
        weight: [vocab, embed_size]; the same tensor as the embedding where tied, and one tensor
            for all exits that share it.
    """

    norm: Affine | None
    weight: torch.Tensor
    project: torch.Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """Embedding, the first `len(layers)` layers, and the heads.

    Attributes:
        embed: [vocab, embed_size]
        positions: Learned positions, OPT only: [max_positions, hidden].
        project_in: [hidden, embed_size] where embed_size differs from hidden_size.
        heads: Layers run → head, for every exit that is loaded, the deepest layer included.
        kv_maps: Layers run at a non-final exit → for every layer, how its K and V are made of the
            hidden state at that exit; what lies before the exit is never asked for.
    """

    embed: torch.Tensor
    heads: dict[int, Head]
    positions: torch.Tensor | None = None
    project_in: torch.Tensor | None = None
    layers: list[LayerWeights] = field(default_factory=list)
    kv_maps: dict[int, list[KVMap]] = field(default_factory=dict)
