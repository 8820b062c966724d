"""Which part of each tensor a rank of a tensor-parallel engine holds.

Projections into heads, into the MLP and into the vocabulary are cut by rows (column parallel, as
their outputs are columns of the activations); those back into the hidden state are cut by columns
(row parallel), so that a rank's product is a summand, and their bias is rank 0's. Everything else
is whole everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quadriga.checkpoint.model_config import ModelConfig

_BY_ROWS = {
    *("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"),
    *("embed_tokens", "lm_head", "head"),
}
_BY_COLUMNS = {"o_proj", "out_proj", "down_proj", "fc2"}


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts of a model, `rank` from 0."""

    rank: int
    size: int

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The part as a model of its own: fewer heads, a narrower MLP, a smaller vocabulary."""
        return replace(
            whole,
            num_heads=whole.num_heads // self.size,
            num_kv_heads=whole.num_kv_heads // self.size,
            ffn_size=whole.ffn_size // self.size,
            vocab_size=whole.vocab_size // self.size,
        )

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of a checkpoint, uncopied; rows of blocks may be bytes."""
        *path, module, kind = name.split(".")
        if module in _BY_ROWS:
            return tensor.chunk(self.size)[self.rank]
        if path and path[-1] == "kv":  # a fitted map: keys, then values
            return torch.cat([half.chunk(self.size)[self.rank] for half in tensor.chunk(2)])
        if module not in _BY_COLUMNS:
            return tensor
        if kind == "bias":
            return tensor if self.rank == 0 else torch.zeros_like(tensor)
        return tensor.chunk(self.size, dim=1)[self.rank]
