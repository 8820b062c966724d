"""Muon for the stacked block matrices, Adam for embedding, head and norms.

Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024);
differs: matrices of one role are orthogonalised together, batched over layers.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_NS_STEPS = 5
_NS = (3.4445, -4.7750, 2.0315)  # quintic Newton–Schulz coefficients
_EPS = 1e-7
_MOMENTUM = 0.95


def orthogonalize(update: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest semi-orthogonal matrices, roughly; `update` is [layers, rows, cols]."""
    a, b, c = _NS
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + _EPS)).to(dtype)
    for _ in range(_NS_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose step is orthogonalised; parameters are [layers, rows, cols]."""

    def __init__(
        self, params: Iterable[nn.Parameter], *, lr: float, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._dtype = dtype  # of this run; what is in a group is loaded with a state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply one update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum: Tensor = state["momentum"]
                momentum.lerp_(gradient, 1.0 - _MOMENTUM)
                update = orthogonalize(gradient.lerp(momentum, _MOMENTUM), self._dtype)
                rows, cols = parameter.shape[-2:]
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / cols) ** 0.5)
