"""Where a model's length heads are, and what they say: pure records, no torch.

A length head reads the hidden state with which a token leaves, and tells how many tokens its
sequence will still generate. There is one head per exit, because a token that leaves early has no
state of the last layer.

Source: ARES, section on prediction with the model's own hidden states; there one head on the last
layer with a point estimate. One head per exit, a mean beside quantiles, and the scale
log(1 + tokens) are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError
from quadriga.json_files import GARBLED, read_object

LENGTH_FILE = "length_heads.json"
LENGTH_WEIGHTS = "length_heads.safetensors"
"""`length.{depth}.{layer}.weight` and `.bias`: an MLP with ReLU between its layers."""
MAX_LAYERS = 8


@dataclass(frozen=True, slots=True)
class LengthHeadSpec:
    """The length heads of one checkpoint.

    Attributes:
        depths: Layers run at each exit that has a head, ascending.
        num_layers: Linear layers of each head.
        quantiles: Levels of the outputs behind the first, ascending; the first output is the mean.
    """

    depths: tuple[int, ...]
    num_layers: int
    quantiles: tuple[float, ...]

    @property
    def num_outputs(self) -> int:
        return 1 + len(self.quantiles)


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
        )
    except GARBLED as exc:
        raise ConfigError(
            f"model: {file} cannot be read: {type(exc).__name__} {exc}", param="model"
        ) from exc
    ascending = all(list(v) == sorted(set(v)) for v in (spec.depths, spec.quantiles))
    in_range = all(0 < level < 1 for level in spec.quantiles) and 1 <= spec.num_layers <= MAX_LAYERS
    if not (spec.depths and spec.depths[0] > 0 and ascending and in_range):
        raise ConfigError(
            f"model: {file} wants ascending depths ≥ 1, ascending quantiles between 0 and 1, and "
            f"1 to {MAX_LAYERS} layers; it has {spec}",
            param="model",
        )
    return spec


def to_json(spec: LengthHeadSpec) -> dict[str, Any]:
    """What `read_length_heads` reads."""
    return {
        "depths": list(spec.depths),
        "num_layers": spec.num_layers,
        "quantiles": list(spec.quantiles),
    }
