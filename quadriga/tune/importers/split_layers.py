"""A checkpoint in which some layers are two: the attention, and then the MLP.

An exit in the middle of a layer, before its MLP, is one between two layers of such a checkpoint.
Each half is a layer whose other half adds nothing: its last projection is zero. The model computes
what it computed, to the bit up to the order of adding zeros, for one more layer's work per exit.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quadriga.checkpoint.exits import EXITS_FILE, EXITS_WEIGHTS, SKIPPED_KV_WEIGHTS
from quadriga.checkpoint.families import GATED_ARCHITECTURES
from quadriga.checkpoint.folder import Checkpoint
from quadriga.checkpoint.json_files import read_object
from quadriga.checkpoint.length_heads import LENGTH_FILE, LENGTH_WEIGHTS
from quadriga.errors import ConfigError

INDEX_FILE = "model.safetensors.index.json"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_MLP = ("mlp.", "post_attention_layernorm.")
_LAST = {"attention": "self_attn.o_proj.", "mlp": "mlp.down_proj."}
_LEFT_OUT = {EXITS_FILE, EXITS_WEIGHTS, SKIPPED_KV_WEIGHTS, LENGTH_FILE, LENGTH_WEIGHTS, INDEX_FILE}


def split_depths(numbers: Sequence[int]) -> dict[int, int]:
    """Layer that is split (from 1) → layers run in the new checkpoint up to its middle."""
    return {number: number + i for i, number in enumerate(sorted(numbers))}


def write_split(checkpoint: Checkpoint, numbers: Sequence[int], folder: Path) -> Path:
    """Write a checkpoint folder whose layers `numbers` (from 1) are divided.

    One shard is in memory at a time.

    Raises:
        ConfigError: The family names its layers otherwise, or has layers that differ.
    """
    source = checkpoint.path
    config = read_object(source / "config.json")
    types = config.get("layer_types") or []
    differing = any(kind != types[0] for kind in types) or config.get("use_sliding_window")
    if checkpoint.architecture not in GATED_ARCHITECTURES or differing:
        raise ConfigError(
            "--import: exits in the middle of a layer need one of "
            f"{', '.join(GATED_ARCHITECTURES)} with layers that are all alike (layer_types, "
            f"use_sliding_window); {checkpoint.id} is a {checkpoint.architecture}",
            param="import",
        )
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for shard in sorted(
        file for file in source.glob("*.safetensors") if file.name not in _LEFT_OUT
    ):
        tensors: dict[str, torch.Tensor] = {}
        with safe_open(shard, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118, it is no dict
                tensors |= _divided(name, stored.get_tensor(name), numbers)
        save_file(tensors, folder / shard.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, shard.name)
    if len(set(places.values())) > 1:
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config["num_hidden_layers"] = checkpoint.num_layers + len(numbers)
    if types:
        config["layer_types"] = types[:1] * config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in source.iterdir():
        is_other = file.is_file() and file.name not in _LEFT_OUT | {"config.json"}
        if is_other and file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    return folder


def _divided(name: str, tensor: torch.Tensor, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """A tensor under its new name, and for divided layers what stands in the other half."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return {name: tensor}
    number, rest = int(found[1]) + 1, found[2]
    at = number - 1 + sum(n < number for n in numbers)
    if number not in numbers:
        return {f"model.layers.{at}.{rest}": tensor}
    is_mlp = rest.startswith(_MLP)
    mine, other = (at + 1, at) if is_mlp else (at, at + 1)
    # The other half runs as well, on anything; what it would add is zero.
    last = _LAST["mlp" if is_mlp else "attention"]
    stand_in = torch.zeros_like(tensor) if rest.startswith(last) else tensor.clone()
    return {f"model.layers.{mine}.{rest}": tensor, f"model.layers.{other}.{rest}": stand_in}
