"""Fit what stands in for the K and V of skipped layers: one linear map per exit and layer.

A token that leaves after k layers has no K and V behind. The layers' own projections of its hidden
state are a poor guess, because they were made for states that went on changing. The best linear
guess costs the same: least squares from the state at the exit, scaled to unit mean square, to the
K (before rotation) and V that the layer makes of the state that really reached it, over the tokens
that are sure enough to leave. Only normal equations are kept: memory does not grow with the text.

Source: DREX names "a low-cost linear projection" of the nearest state; fitting it is ours.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from quadriga.checkpoint.exits import SKIPPED_KV_WEIGHTS
from quadriga.tasks import TASKS, Example, make_example
from quadriga.training.checkpoint_io import load_checkpoint
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe.data import encode, group_rows, pack
from quadriga.training.tokenizer import build_tokenizer

FIT_SEED = 555_000
FIT_EXAMPLES = 96  # per task
SURE = 0.9  # probability from which a token counts as one that may leave
_RIDGE = 1e-3
_TOKENS_PER_PASS = 4096


def fit_folder(folder: Path, *, examples: int = FIT_EXAMPLES) -> dict[str, float]:
    """Fit the maps of a checkpoint directory and store them in it.

    Returns:
        Per map the share of the variance of K and V that it leaves unexplained.
    """
    model = load_checkpoint(folder)
    chosen = [make_example(task, seed=FIT_SEED, index=i) for task in TASKS for i in range(examples)]
    maps, unexplained = fit(model, build_tokenizer(), chosen)
    partial = folder / f".{SKIPPED_KV_WEIGHTS}.partial"
    halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in maps.items()}
    save_file(halves, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / SKIPPED_KV_WEIGHTS)
    return unexplained


@torch.no_grad()
def fit(
    model: EarlyExitLlama, tokenizer: Tokenizer, examples: list[Example]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the maps by their names in the file, and what each leaves unexplained."""
    shape = model.shape
    fits = {
        (depth, layer): _LeastSquares(shape.hidden, 2 * shape.kv_heads * shape.head_dim)
        for depth in shape.exits
        for layer in range(depth + 1, shape.layers)
    }
    for states in _states(model, tokenizer, examples):
        for index, depth in enumerate(shape.exits):
            top = model.logits(states[depth], index).softmax(-1).amax(-1)
            sure = top >= SURE
            inputs = _unit(states[depth][sure], shape.norm_eps)
            for layer in range(depth + 1, shape.layers):
                fits[depth, layer].add(inputs, _kv(model, states[layer][sure], layer))
    maps, unexplained = {}, {}
    for (depth, layer), least in fits.items():
        name = f"exits.{depth}.kv.{layer}"
        maps[f"{name}.weight"], maps[f"{name}.bias"], unexplained[name] = least.solve()
    return maps, unexplained


def _states(
    model: EarlyExitLlama, tokenizer: Tokenizer, examples: list[Example]
) -> Iterator[dict[int, Tensor]]:
    """Layers run → the answers' states there, a batch of examples at a time."""
    rows = encode(tokenizer, examples)
    sizes = [len(row.prompt) + len(row.answer) - 1 for row in rows]
    depths = tuple(range(1, model.shape.layers + 1))
    for group in group_rows(sizes):
        per_pass = max(1, _TOKENS_PER_PASS // sizes[group[0]])
        for start in range(0, len(group), per_pass):
            chosen = [rows[index] for index in group[start : start + per_pass]]
            batch = pack(chosen, end_weight=1.0, num_tokens=0, next_index=0)
            states = model(
                batch.tokens, batch.positions, batch.groups, batch.answers, depths=depths
            )
            yield dict(zip(depths, states, strict=True))


def _kv(model: EarlyExitLlama, state: Tensor, layer: int) -> Tensor:
    """K before rotation and V that a layer (from 0) makes of the states that reach it."""
    normed = F.rms_norm(
        state, (model.shape.hidden,), model.attention_norm[layer], model.shape.norm_eps
    )
    return F.linear(normed, torch.cat([model.k[layer], model.v[layer]]))


def _unit(state: Tensor, eps: float) -> Tensor:
    return F.rms_norm(state, (state.shape[-1],), eps=eps)


class _LeastSquares:
    """Ridge regression with a constant, from sums over batches in float64."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self._count = 0
        self._xx = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
        self._xy = torch.zeros(inputs + 1, outputs, dtype=torch.float64)
        self._yy = torch.zeros(outputs, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in pairs: x [n, inputs], y [n, outputs]."""
        ones = torch.ones(len(x), 1, dtype=torch.float64)
        wide, y = torch.cat([x.double(), ones], 1), y.double()
        self._count += len(x)
        self._xx += wide.T @ wide
        self._xy += wide.T @ y
        self._yy += y.square().sum(0)

    def solve(self) -> tuple[Tensor, Tensor, float]:
        """Weight [outputs, inputs], bias [outputs], and the share of variance unexplained."""
        count = max(1, self._count)
        ridge = _RIDGE * count * torch.eye(len(self._xx), dtype=torch.float64)
        ridge[-1, -1] = 1e-9  # the constant is free
        solution = torch.linalg.solve(self._xx + ridge, self._xy)
        error = self._yy - 2 * (solution * self._xy).sum(0)
        error += (solution * (self._xx @ solution)).sum(0)
        variance = self._yy - self._xy[-1].square() / count
        share = float(error.sum() / variance.sum().clamp(min=1e-12))
        return solution[:-1].T.float(), solution[-1].float(), share
