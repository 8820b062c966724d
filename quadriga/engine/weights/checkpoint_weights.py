"""A model's weights in memory, as the layers compute with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from quadriga.engine.weights.matrix import Matrix, MatrixForm


@dataclass(slots=True)
class Linear:
    """A linear projection: weight [out, in] and bias [out]."""

    weight: Matrix
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(slots=True)
class Norm:
    """A norm's scale and shift, [size] each; None for a norm without."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.weight, self.bias) if t is not None)


@dataclass(slots=True)
class LayerWeights:
    """One transformer layer.

    Attributes:
        qkv: Query, key and value projections stacked: [q_size + 2 · kv_size, hidden].
        q_norm, k_norm: [head_dim], Qwen3 only.
        up: Gate and up projections stacked [2 · ffn, hidden]; up alone [ffn, hidden] if not gated.
    """

    attn_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the whole layer."""
        linears = sum(part.nbytes for part in (self.qkv, self.out, self.up, self.down))
        norms = self.attn_norm.nbytes + self.mlp_norm.nbytes
        return linears + norms + sum(t.nbytes for t in (self.q_norm, self.k_norm) if t is not None)


@dataclass(slots=True)
class LowRank:
    """What an adapter adds to a projection of x: B · (A · x), its scale in B.

    Attributes:
        down: A, [rank, in].
        up: B, [out, rank]. Of stacked projections both are stacked, B along its diagonal.
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass(slots=True)
class LayerAdapters:
    """The adapters of one layer, by projection: an entry for each adapter, None where it has none.

    Attributes:
        qkv, out, up, down: As in `LayerWeights`.
    """

    qkv: list[LowRank | None] = field(default_factory=list)
    out: list[LowRank | None] = field(default_factory=list)
    up: list[LowRank | None] = field(default_factory=list)
    down: list[LowRank | None] = field(default_factory=list)


@dataclass(slots=True)
class KVMap:
    """What turns a hidden state that skips a layer into K and V of that layer.

    Attributes:
        norm: Unused where the family norms behind its layers.
        kv: [2 · kv_size, hidden], keys first, before their norm and rotation.
    """

    norm: Norm
    kv: Linear


@dataclass(slots=True)
class ExitMLP:
    """What an exit adds to the hidden state before its norm: of the model's activation and gating.

    Attributes:
        up: Gate and up projections stacked [2 · width, hidden]; up alone [width, hidden] if the
            model's own MLP has no gate.
        down: [hidden, width].
    """

    norm: Norm
    up: Linear
    down: Linear


@dataclass(slots=True)
class Head:
    """What turns a hidden state into logits, at the end of the model or at an exit.

    Attributes:
        norm: None for a model without a final norm.
        project: [embed_size, hidden] where embed_size differs from hidden_size.
        weight: [vocab, embed_size]; the same matrix as the embedding where tied, and one matrix
            for all exits that share it.
        mlp: Its result is added to the hidden state before the norm; None: nothing is.
    """

    norm: Norm | None
    weight: Matrix
    project: Matrix | None = None
    mlp: ExitMLP | None = None


@dataclass(slots=True)
class ModelWeights:
    """Embedding, the first `len(layers)` layers, and the heads.

    Attributes:
        dtype: What is computed in, and what norms and biases are kept in.
        device: Where everything is.
        form: Of the matrices; see `WeightSource.form`.
        embed: [vocab, embed_size]
        positions: Learned positions, OPT only: [max_positions, hidden].
        project_in: [hidden, embed_size] where embed_size differs from hidden_size.
        heads: Layers run → head, for every exit that is loaded, the deepest layer included.
        kv_maps: Layers run at a non-final exit → for every layer, how its K and V are made of the
            hidden state at that exit; what lies before the exit is never asked for.
        adapters: LoRA of every layer of the model, whatever is loaded of it; empty without any.
    """

    dtype: torch.dtype
    device: torch.device
    form: MatrixForm
    embed: Matrix
    heads: dict[int, Head] = field(default_factory=dict)
    positions: torch.Tensor | None = None
    project_in: Matrix | None = None
    layers: list[LayerWeights] = field(default_factory=list)
    kv_maps: dict[int, list[KVMap]] = field(default_factory=dict)
    adapters: list[LayerAdapters] = field(default_factory=list)
