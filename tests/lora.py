"""LoRA adapters of small models, in PEFT's format, and the same models with them merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

RANK, ALPHA = 5, 12.0


def projections(model: PreTrainedModel, targets: tuple[str, ...] = ()) -> dict[str, Any]:
    """The layers' linear modules by name; those that end in `targets`, or all."""
    return {
        name: module
        for name, module in model.named_modules()
        if ".layers." in name
        and isinstance(module, torch.nn.Linear)
        and (not targets or name.rpartition(".")[2] in targets)
    }


def write_adapter(
    path: Path,
    model: PreTrainedModel,
    *,
    seed: int = 0,
    targets: tuple[str, ...] = (),
    strength: float = 0.2,
    **config: Any,
) -> Path:
    """Write an adapter of random matrices for some projections, or all; returns its folder."""
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    found = projections(model, targets)
    for name, module in found.items():
        size = {"A": (RANK, module.in_features), "B": (module.out_features, RANK)}
        for kind, shape in size.items():
            drawn = torch.randn(shape, generator=made) * strength
            tensors[f"base_model.model.{name}.lora_{kind}.weight"] = drawn
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in found}),
        "base_model_name_or_path": "a-model",
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(said | config))
    return path


def merged(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """A copy of the model with an adapter's products in its weights."""
    from safetensors.torch import load_file

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
