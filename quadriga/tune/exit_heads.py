"""Exit heads that can be trained, over the parts of a model that stay as they are.

The same computation as the engine's (`engine.models.layers.apply_head`), with gradients.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.models.layers import activate, rms_norm
from quadriga.engine.weights.checkpoint_weights import Head

TunedKind = Literal["norm", "mlp", "head", "linear"]


class TrainedNorm(nn.Module):
    """A norm of the model's kind, of its own weights."""

    def __init__(self, config: ModelConfig, like: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self._eps, size = config.norm_eps, config.hidden_size
        self.weight = nn.Parameter(torch.ones(size) if like is None else like.float().clone())
        self.bias = None
        if config.norm == "layer":
            self.bias = nn.Parameter(torch.zeros(size) if bias is None else bias.float().clone())

    def forward(self, x: Tensor) -> Tensor:
        """[n, hidden] → [n, hidden]."""
        if self.bias is not None:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self._eps)
        return rms_norm(x, self.weight, self._eps)


class ExitHead(nn.Module):
    """What stands between the hidden state at one exit and its logits.

    Args:
        final: The model's own head, from which this one starts.
        width: Of the MLP's bottleneck, for the kind `mlp`.
    """

    def __init__(self, kind: TunedKind, config: ModelConfig, final: Head, width: int) -> None:
        super().__init__()
        self._config = config
        own = final.norm
        self.norm = (
            None
            if kind == "linear"
            else TrainedNorm(
                config, None if own is None else own.weight, None if own is None else own.bias
            )
        )
        self.mlp_norm = self.mlp_up = self.mlp_down = None
        if kind == "mlp":
            size, rows = config.hidden_size, width * (2 if config.gated else 1)
            self.mlp_norm = TrainedNorm(config, None, None)
            self.mlp_up = nn.Parameter(torch.randn(rows, size) * size**-0.5)
            self.mlp_down = nn.Parameter(torch.zeros(size, width))
        self.head: nn.Parameter | None = None
        if kind in ("head", "linear"):
            weight = final.weight.values(torch.float32)
            if final.project is not None:
                weight = weight @ final.project.values(torch.float32)
            self.head = nn.Parameter(weight.clone())
        self._project = (
            final.project.values(torch.float32)
            if final.project is not None and self.head is None
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """What the vocabulary's matrix reads: [n, hidden] → [n, its columns]."""
        if self.mlp_norm is not None and self.mlp_up is not None and self.mlp_down is not None:
            inner = activate(F.linear(self.mlp_norm(x), self.mlp_up), self._config)
            x = x + F.linear(inner, self.mlp_down)
        if self.norm is not None:
            x = self.norm(x)
        return x if self._project is None else F.linear(x, self._project)

    def tensors(self, depth: int) -> dict[str, Tensor]:
        """By their names in `exits.safetensors`."""
        named = {
            f"exits.{depth}.{name.replace('mlp_', 'mlp.')}": value.detach()
            for name, value in self.named_parameters()
        }
        return {
            name if name.endswith((".weight", ".bias")) else f"{name}.weight": value
            for name, value in named.items()
        }
