"""What `compressed-tensors` writes is read as the library itself reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from quadriga.checkpoint.quantisation import quantisation_of
from quadriga.engine.weights.quantised import QuantisedTensors

ROWS, COLUMNS, GROUP = 24, 64, 16
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
    (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False},
    ),
    ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("pack-quantized", {"num_bits": 2, "strategy": "group", "group_size": GROUP}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 16]},
    ),
]


def ranges(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest weight of all that share a scale."""
    strategy = str(args.strategy)
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "block":
        high, wide = args.block_structure or (1, 1)
        blocks = weight.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size if strategy == "group" else COLUMNS))
    return groups.amin(2), groups.amax(2)


@pytest.mark.parametrize(("stored_as", "weights"), LAYOUTS, ids=str)
def test_a_matrix_is_read_as_by_the_library(stored_as: str, weights: dict[str, Any]) -> None:
    torch.manual_seed(3)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=stored_as)
    weight = torch.randn(ROWS, COLUMNS) / 10
    scale, zero = calculate_qparams(*ranges(weight, args), args)
    library = BaseCompressor.get_value_from_registry(stored_as)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    stored = library.compress(state, scheme)
    wanted = library.decompress(dict(stored), scheme)["weight"]
    assert (wanted - weight).abs().max() < 0.2, "it stands for the weights"

    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": stored_as,
            "config_groups": {"group_0": scheme.model_dump(mode="json")},
        }
    }
    how = quantisation_of(config, "m")
    assert how is not None
    tensors = {f"m.{name}": tensor for name, tensor in stored.items()}
    ours = QuantisedTensors(how, Path("m"), tensors, tensors.__getitem__).values("m.weight")
    torch.testing.assert_close(ours, wanted.float(), rtol=1e-6, atol=1e-7)
