"""The early-exit Llama that is trained: stacked weights, flat tokens, several exits at once.

Every linear layer works on all tokens of a step as one matrix [num_tokens, hidden]; only attention
looks at the groups of equally long rows inside it. So padding costs little, shapes are constant,
and one optimiser step mixes short and long examples.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.training.attention import causal_attention
from quadriga.training.recipe.family import ModelShape


class EarlyExitLlama(nn.Module):
    """Llama blocks with an RMS norm of its own before the shared head at every exit.

    Weights of equal role are stacked over layers, which makes the optimiser's matrix products
    batched. `to_llama_state` gives them their Hugging Face names.
    """

    def __init__(self, shape: ModelShape, vocab_size: int, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, generator=generator) * std)

        d, ff, layers = shape.hidden, shape.ff, shape.layers
        q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        residual = 1.0 / math.sqrt(2 * layers)
        self.embed = normal(vocab_size, d, std=1.0)  # read through a norm: scale is free
        self.head = normal(vocab_size, d, std=0.02)
        self.q = normal(layers, q_rows, d, std=d**-0.5)
        self.k = normal(layers, kv_rows, d, std=d**-0.5)
        self.v = normal(layers, kv_rows, d, std=d**-0.5)
        self.o = normal(layers, d, q_rows, std=q_rows**-0.5 * residual)
        self.gate = normal(layers, ff, d, std=d**-0.5)
        self.up = normal(layers, ff, d, std=d**-0.5)
        self.down = normal(layers, d, ff, std=ff**-0.5 * residual)
        self.attention_norm = nn.Parameter(torch.ones(layers, d))
        self.mlp_norm = nn.Parameter(torch.ones(layers, d))
        # One row per exit; the last row is the final norm.
        self.exit_norm = nn.Parameter(torch.ones(len(shape.exits) + 1, d))
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._compiled: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def compile_blocks(self) -> None:
        """Compile what surrounds attention, for training steps of one constant size.

        Passes without gradients stay eager: their sizes vary, and each would be compiled anew.
        """
        self._compiled = (
            torch.compile(project_qkv, dynamic=False),
            torch.compile(mix, dynamic=False),
        )

    @property
    def exits(self) -> tuple[int, ...]:
        """Layers run at each exit, the full depth last."""
        return (*self.shape.exits, self.shape.layers)

    def layer_weights(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
        """Yield per layer: attention norm, QKV, output, MLP norm, gate-up, down, in `dtype`."""
        qkv = torch.cat([self.q, self.k, self.v], dim=1).to(dtype)
        gate_up = torch.cat([self.gate, self.up], dim=1).to(dtype)
        yield from zip(
            self.attention_norm.unbind(),
            qkv.unbind(),
            self.o.to(dtype).unbind(),
            self.mlp_norm.unbind(),
            gate_up.unbind(),
            self.down.to(dtype).unbind(),
            strict=True,
        )

    def forward(
        self,
        tokens: Tensor,  # [num_tokens] int64
        positions: Tensor,  # [num_tokens] int64
        groups: list[tuple[int, int]],  # (rows, row length); the products sum to <= num_tokens
        answers: Tensor,  # [num_answers] int64, flat indices of the states to return
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Return the residual stream at each exit, at `answers`: [num_answers, hidden] each."""
        shape = self.shape
        x = self.embed[tokens]
        cos, sin = self.cos[positions], self.sin[positions]  # type: ignore[index]
        before, behind = project_qkv, mix
        if self._compiled is not None and torch.is_grad_enabled():
            before, behind = self._compiled
        gathered = []
        for layer, (norm_1, qkv_w, o_w, norm_2, gate_up_w, down_w) in enumerate(
            self.layer_weights(dtype), start=1
        ):
            q, k, v = before(x, norm_1, qkv_w, cos, sin, shape)
            attended = causal_attention(q, k, v, groups)
            x = behind(x, attended, o_w, norm_2, gate_up_w, down_w, shape.norm_eps)
            if layer in self.exits:
                gathered.append(x[answers])
        return gathered

    def logits(self, state: Tensor, exit_index: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return fp32 logits [..., vocab] of a residual state at an exit (index into `exits`)."""
        normed = F.rms_norm(
            state, (self.shape.hidden,), self.exit_norm[exit_index], self.shape.norm_eps
        )
        return F.linear(normed.to(dtype), self.head.to(dtype)).float()


def rope_tables(shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [max_positions, 1, head_dim / 2], in Llama's rotate-half layout."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions).double(), shape.rope_theta**-half)
    return angles.cos().float()[:, None], angles.sin().float()[:, None]


def project_qkv(
    x: Tensor, norm: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, shape: ModelShape
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, QKV projection and RoPE. Returns q [n, heads, dim], k and v [n, kv_heads, dim]."""
    normed = F.rms_norm(x, (shape.hidden,), norm, shape.norm_eps)
    qkv = F.linear(normed.to(weight.dtype), weight).view(x.shape[0], -1, shape.head_dim)
    rotated, v = torch.split(qkv, [shape.heads + shape.kv_heads, shape.kv_heads], dim=1)
    first, second = rotated.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    q, k = torch.split(rotated.to(weight.dtype), [shape.heads, shape.kv_heads], dim=1)
    return q, k, v


def mix(
    x: Tensor,
    attended: Tensor,
    o_weight: Tensor,
    norm: Tensor,
    gate_up: Tensor,
    down: Tensor,
    eps: float,
) -> Tensor:
    """Output projection, residual, norm and SwiGLU, residual. All [n, hidden] but `attended`."""
    x = x + F.linear(attended, o_weight).to(x.dtype)
    normed = F.rms_norm(x, (x.shape[-1],), norm, eps).to(gate_up.dtype)
    gate, up = F.linear(normed, gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down).to(x.dtype)
