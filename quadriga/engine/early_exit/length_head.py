"""Predict how many tokens a sequence will still generate, from the state its last token left with.

Source: ARES, prediction from the serving model's own hidden states; see `checkpoint.length_heads`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional as F

from quadriga.checkpoint.length_heads import (
    LENGTH_WEIGHTS,
    NUM_COUNTS,
    LengthHeadSpec,
    counts_of,
    read_length_heads,
)
from quadriga.core.forecast import LengthPrediction
from quadriga.core.request import SequenceState
from quadriga.engine.early_exit.exit_logits import ExitedTokens
from quadriga.engine.transfers import to_device
from quadriga.errors import ConfigError
from quadriga.scheduling.forecasts import Answer

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Weight and bias of each linear layer of a head."""


def run_layers(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    """A head's outputs on the scale log(1 + tokens): [n, inputs] → [n, 1 + quantiles]."""
    for i, (weight, bias) in enumerate(layers):
        x = F.linear(x, weight, bias)
        if i < len(layers) - 1:
            x = F.relu(x)
    return x


def to_tokens(outputs: torch.Tensor) -> torch.Tensor:
    """The outputs of `run_layers` → tokens, at least 0; the quantiles do not cross."""
    tokens = torch.expm1(outputs.clamp(0.0, 20.0))
    tokens[:, 1:] = torch.cummax(tokens[:, 1:], dim=1).values
    return tokens


class LengthHeads:
    """The length heads of a model loaded to some depth; one small MLP per exit, in float32."""

    def __init__(self, spec: LengthHeadSpec, heads: dict[int, Layers]) -> None:
        self.spec = spec
        self._heads = heads

    @classmethod
    def load(
        cls, folder: Path, hidden_size: int, depth: int, device: str = "cpu"
    ) -> LengthHeads | None:
        """Read the heads of exits up to `depth`; None where the checkpoint has none of them.

        Raises:
            ConfigError: A tensor is missing or misshapen.
        """
        spec = read_length_heads(folder)
        if spec is None or spec.depths[0] > depth:
            return None
        file = folder / LENGTH_WEIGHTS
        try:
            tensors = load_file(file)
        except (OSError, SafetensorError) as exc:
            raise ConfigError(f"model: {file} cannot be read: {exc}", param="model") from exc
        heads: dict[int, Layers] = {}
        for k in (k for k in spec.depths if k <= depth):
            layers: Layers = []
            width = hidden_size + (NUM_COUNTS if spec.has_counts else 0)
            for i in range(spec.num_layers):
                weight = tensors.get(f"length.{k}.{i}.weight")
                bias = tensors.get(f"length.{k}.{i}.bias")
                is_last = i == spec.num_layers - 1
                if (
                    weight is None
                    or bias is None
                    or weight.ndim != 2
                    or weight.shape[1] != width
                    or bias.shape != weight.shape[:1]
                    or (is_last and weight.shape[0] != spec.num_outputs)
                ):
                    raise ConfigError(
                        f"model: {file}: layer {i} of the head behind {k} layers is missing or "
                        f"misshapen; it takes {width} numbers"
                        + (f" and makes {spec.num_outputs}" if is_last else ""),
                        param="model",
                    )
                layers.append((weight.float().to(device), bias.float().to(device)))
                width = weight.shape[0]
            heads[k] = layers
        return cls(spec, heads)

    @property
    def depths(self) -> tuple[int, ...]:
        """Exits, by layers run, that have a head here."""
        return tuple(self._heads)

    @torch.inference_mode()
    def predict(
        self, hidden: torch.Tensor, depth: int, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Tokens still to come after the one that each state is about to make.

        Args:
            hidden: [n, hidden], as it left the last layer run, before any norm.
            depth: Layers run; one of `depths`.
            counts: [n, NUM_COUNTS], `counts_of` each; where the heads read them.

        Returns:
            float32 [n, 1 + quantiles], at least 0: the mean, then the quantiles, which do not
            cross.
        """
        x = hidden.float()
        if self.spec.has_counts:
            assert counts is not None
            x = torch.cat((x, counts), dim=1)
        return to_tokens(run_layers(self._heads[depth], x))


class ExitingRunner(Protocol):
    """A runner that keeps the tokens that left in its last pass; `NativeRunner`."""

    @property
    def exited(self) -> ExitedTokens | None: ...


class RunnerLengths:
    """`quadriga.scheduling.forecasts.LengthModel` over a runner and its heads."""

    def __init__(self, runner: ExitingRunner, heads: LengthHeads) -> None:
        self._runner = runner
        self._heads = heads

    def ask(self) -> tuple[list[SequenceState], Answer] | None:
        """See `LengthModel.ask`: computed now, copied from the device when the answer is read."""
        exited = self._runner.exited
        if exited is None or exited.depth not in self._heads.depths:
            return None
        states, counts = exited.states, None
        if self._heads.spec.has_counts:
            # The token that the state made is the last of `output_ids` already.
            made = [counts_of(len(s.prompt_ids), max(0, len(s.output_ids) - 1)) for s in states]
            counts = to_device(np.array(made, dtype=np.float32), exited.hidden.device)
        tokens = self._heads.predict(exited.of_states, exited.depth, counts)
        has_range = self._heads.spec.num_outputs > 2
        return states, lambda: [
            LengthPrediction(row[0], row[1], row[-1]) if has_range else LengthPrediction(*3 * row)
            for row in tokens[:, : None if has_range else 1].tolist()
        ]
