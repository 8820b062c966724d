"""Where a model's length heads are, and what they say: pure records, no torch.

A length head reads the hidden state with which a token leaves, and predicts how many tokens its
sequence will still generate. There is one head per exit, because a token that leaves early has no
state of the last layer. Where it stands, which attention hardly tells it, may be told beside: how
long the prompt was, and how far the answer is.

Source: ARES, section on prediction with the model's own hidden states; there one head on the last
layer with a point estimate. One head per exit, a mean beside quantiles, counts beside the state,
and the scale log(1 + tokens) are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.checkpoint.json_files import GARBLED, read_object
from quadriga.errors import ConfigError

LENGTH_FILE = "length_heads.json"
LENGTH_WEIGHTS = "length_heads.safetensors"
"""`length.{depth}.{layer}.weight` and `.bias`: an MLP with ReLU between its layers."""
MAX_LAYERS = 8
NUM_COUNTS = 4


@dataclass(frozen=True, slots=True)
class LengthHeadSpec:
    """The length heads of one checkpoint.

    Attributes:
        depths: Layers run at each exit that has a head, ascending.
        num_layers: Linear layers of each head.
        quantiles: Levels of the outputs behind the first, ascending; the first output is the mean.
        has_counts: The heads read `counts_of` behind the state.
    """

    depths: tuple[int, ...]
    num_layers: int
    quantiles: tuple[float, ...]
    has_counts: bool = False

    @property
    def num_outputs(self) -> int:
        return 1 + len(self.quantiles)


def counts_of(num_prompt: int, num_generated: int) -> tuple[float, float, float, float]:
    """What a head reads behind a token's state: where the token stands.

    Args:
        num_prompt: Tokens of the prompt.
        num_generated: Of the answer, before the token that the state makes.
    """
    return (
        math.log1p(num_prompt),
        math.log1p(num_generated),
        num_prompt / 100.0,
        num_generated / 100.0,
    )


def read_length_heads(folder: Path) -> LengthHeadSpec | None:
    """Read `folder/length_heads.json`; None where the checkpoint has none.

    Raises:
        ConfigError: It is there and cannot be right.
    """
    file = folder / LENGTH_FILE
    if not file.is_file():
        return None
    raw = read_object(file)
    try:
        spec = LengthHeadSpec(
            tuple(int(depth) for depth in raw["depths"]),
            int(raw["num_layers"]),
            tuple(float(level) for level in raw["quantiles"]),
            raw.get("has_counts", False),
        )
    except GARBLED as exc:
        raise ConfigError(
            f"model: {file} cannot be read: {type(exc).__name__} {exc}", param="model"
        ) from exc
    ascending = all(list(v) == sorted(set(v)) for v in (spec.depths, spec.quantiles))
    in_range = all(0 < level < 1 for level in spec.quantiles) and 1 <= spec.num_layers <= MAX_LAYERS
    is_told = isinstance(spec.has_counts, bool)
    if not (spec.depths and spec.depths[0] > 0 and ascending and in_range and is_told):
        raise ConfigError(
            f"model: {file} wants ascending depths ≥ 1, ascending quantiles between 0 and 1, 1 to "
            f"{MAX_LAYERS} layers, and has_counts true or false; it has {spec}",
            param="model",
        )
    return spec


def to_json(spec: LengthHeadSpec) -> dict[str, Any]:
    """What `read_length_heads` reads."""
    return {
        "depths": list(spec.depths),
        "num_layers": spec.num_layers,
        "quantiles": list(spec.quantiles),
        "has_counts": spec.has_counts,
    }
