"""Fit what stands in for the K and V of skipped layers: one linear map per exit and layer.

A token that leaves after k layers has no K and V behind. The layers' own projections of its hidden
state are a poor guess, because they were made for states that went on changing. The best linear
guess costs the same: least squares from the state at the exit, scaled as by the model's norm
without weights, to the K (before its norm and rotation) and V that the layer makes of the state
that really reached it, over the tokens that are sure enough to leave. Only normal equations are
kept: memory does not grow with the text.

Source: DREX names "a low-cost linear projection" of the nearest state; fitting it is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quadriga.checkpoint.exits import NEVER, ExitSpec
from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.models.layers import norm
from quadriga.engine.weights.checkpoint_weights import LayerWeights
from quadriga.tune.answers import OwnAnswer
from quadriga.tune.states import run_passes

_RIDGE = 1e-3


@torch.inference_mode()
def fit_maps(
    runner: NativeRunner,
    exits: ExitSpec,
    answers: Sequence[OwnAnswer],
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Fit the maps of a model with exits.

    Args:
        runner: With all its layers and the heads of the exits, and no sequence in its rows.
        exits: Those to fit for, with their thresholds.
        answers: To fit on.
        advance: Called with the number of answers done.

    Returns:
        The maps by their names in the file, and the share of the variance of K and V that each
        leaves unexplained.
    """
    config, num_layers = runner.model.config, runner.num_layers
    layers = runner.weights.layers
    fits = {
        depth: LeastSquares(config.hidden_size, 2 * config.kv_size, range(depth + 1, num_layers))
        for depth in exits.layers
        if depth + 1 < num_layers
    }
    begins = np.array([len(answer.prompt_ids) - 1 for answer in answers])
    sequences = [answer.token_ids for answer in answers]
    done = 0
    for seen in run_passes(runner, sequences, range(1, num_layers + 1)):
        answering = torch.from_numpy(seen.positions >= begins[seen.owners])
        states = {k: x[answering.to(x.device)] for k, x in seen.states.items()}
        if len(states[num_layers]):
            _add(runner, exits, states, layers, fits)
        advance(int(seen.owners[-1]) + 1 - done)
        done = int(seen.owners[-1]) + 1
    maps: dict[str, Tensor] = {}
    unexplained: dict[str, float] = {}
    for depth, least in fits.items():
        for layer, solved in least.solve().items():
            name = f"exits.{depth}.kv.{layer}"
            maps[f"{name}.weight"], maps[f"{name}.bias"], unexplained[name] = solved
    return maps, unexplained


def _add(
    runner: NativeRunner,
    exits: ExitSpec,
    states: Mapping[int, Tensor],
    layers: Sequence[LayerWeights],
    fits: Mapping[int, LeastSquares],
) -> None:
    """Take in the tokens of one pass that would leave."""
    config = runner.model.config
    made = {k: own_kv(states[k], layers[k], config) for k in states if k < len(layers)}
    threshold = exits.threshold if exits.threshold < NEVER else exits.calibrated_at
    for depth, least in fits.items():
        logits = runner.model.decoder.logits(states[depth], depth)
        probs = logits.softmax(-1).topk(2, dim=-1).values
        sure = probs[:, 0] - (probs[:, 1] if exits.criterion == "margin" else 0.0)
        leaves = torch.tensor(exits.calibrated(depth, sure.tolist())) >= threshold
        leaves = leaves.to(states[depth].device)
        if not bool(leaves.any()):
            continue
        wanted = {layer: made[layer][leaves] for layer in range(depth + 1, len(layers))}
        least.add(unit(states[depth][leaves], config), wanted)


def own_kv(state: Tensor, layer: LayerWeights, config: ModelConfig) -> Tensor:
    """K before norm and rotation, and V, that a layer makes of the states that reach it."""
    h = norm(state, layer.attn_norm, config) if config.pre_norm else state
    bias = None if layer.qkv.bias is None else layer.qkv.bias[config.q_size :]
    return F.linear(h, layer.qkv.weight[config.q_size :].values(h.dtype), bias)


def unit(state: Tensor, config: ModelConfig) -> Tensor:
    """What a map reads: the state as the model's norm without weights leaves it."""
    if not config.pre_norm:
        return state
    size = state.shape[-1:]
    if config.norm == "layer":
        return F.layer_norm(state, size, eps=config.norm_eps)
    return F.rms_norm(state, size, eps=config.norm_eps)


class LeastSquares:
    """Ridge regressions with a constant on the same inputs, from sums over batches in float64.

    Args:
        layers: One regression each.

    Attributes:
        count: Inputs so far.
    """

    def __init__(self, inputs: int, outputs: int, layers: Iterable[int]) -> None:
        self.count = 0
        self._xx = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
        self._xy = {k: torch.zeros(inputs + 1, outputs, dtype=torch.float64) for k in layers}
        self._yy = {k: torch.zeros(outputs, dtype=torch.float64) for k in self._xy}

    def add(self, x: Tensor, wanted: Mapping[int, Tensor]) -> None:
        """Take in pairs: x [n, inputs], and [n, outputs] of every layer."""
        x = x.double().cpu()
        wide = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
        self.count += len(x)
        self._xx += wide.T @ wide
        for layer, made in wanted.items():
            y = made.double().cpu()
            self._xy[layer] += wide.T @ y
            self._yy[layer] += y.square().sum(0)

    def solve(self) -> dict[int, tuple[Tensor, Tensor, float]]:
        """Per layer weight [outputs, inputs], bias [outputs] and share of variance unexplained.

        None at all where nothing was taken in.
        """
        if not self.count:
            return {}
        ridge = _RIDGE * self.count * torch.eye(len(self._xx), dtype=torch.float64)
        ridge[-1, -1] = 1e-9  # the constant is free
        factors = torch.linalg.lu_factor(self._xx + ridge)
        found = {}
        for layer, xy in self._xy.items():
            solution = torch.linalg.lu_solve(*factors, xy)
            error = self._yy[layer] - 2 * (solution * xy).sum(0)
            error += (solution * (self._xx @ solution)).sum(0)
            variance = self._yy[layer] - xy[-1].square() / self.count
            share = float(error.sum() / variance.sum().clamp(min=1e-12))
            found[layer] = (solution[:-1].T.float(), solution[-1].float(), share)
        return found
