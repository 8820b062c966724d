"""Which part of each tensor a rank of a tensor-parallel engine holds.

All projections of a layer, the embedding and the heads are cut by rows (column parallel, as their
outputs are columns of the activations). So every number is computed whole by one rank, as an engine
of one rank computes it: ranks put columns side by side and add nothing up. What is cut by columns
(row parallel) would give summands instead, whose rounding shows in the tokens of forms that round
their inputs as well, and would divide blocks of quantised weights. Everything else is whole
everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quadriga.checkpoint.model_config import ModelConfig

_BY_ROWS = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj"),
    *("gate_proj", "up_proj", "down_proj", "fc1", "fc2"),
    *("embed_tokens", "lm_head", "head"),
}


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
            ranks=self.size,
        )

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of a checkpoint, uncopied; rows of blocks may be bytes."""
        *path, module, _ = name.split(".")
        if module in _BY_ROWS:
            return tensor.chunk(self.size)[self.rank]
        if path and path[-1] == "kv":  # a fitted map: keys, then values
            return torch.cat([half.chunk(self.size)[self.rank] for half in tensor.chunk(2)])
        return tensor
