"""Models with a LoRA adapter merged into their weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel


def merged(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """A copy of the model with an adapter's products in its weights."""
    tensors = load_file(path / "adapter_model.safetensors")
    said = json.loads((path / "adapter_config.json").read_text())
    scale = said["lora_alpha"] / (said["r"] ** 0.5 if said.get("use_rslora") else said["r"])
    whole = copy.deepcopy(model)
    modules = dict(whole.named_modules())
    with torch.no_grad():
        for name, up in tensors.items():
            if ".lora_B." not in name:
                continue
            down = tensors[name.replace(".lora_B.", ".lora_A.")]
            target = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
            modules[target].weight += scale * (up @ down)
    return whole
