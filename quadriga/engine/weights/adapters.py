"""LoRA adapters in memory: a pair of low-rank matrices for each projection that one changes."""

from __future__ import annotations

import torch
from safetensors import SafetensorError, safe_open

from quadriga.catalogue.adapters import WEIGHTS_FILE, read_adapter, target_of
from quadriga.catalogue.headers import read_header
from quadriga.checkpoint.model_config import ModelConfig
from quadriga.core.adapters import Adapter
from quadriga.engine.weights.checkpoint_weights import LayerAdapters, LowRank
from quadriga.errors import ConfigError


def load_adapters(
    adapters: tuple[Adapter, ...], config: ModelConfig, dtype: torch.dtype
) -> list[LayerAdapters]:
    """Read adapters for every layer of a model; nothing where there are none.

    Raises:
        ConfigError: One is not there or is another than the service was started with, does not fit
            the model, or holds what is not finite.
    """
    if not adapters:
        return []
    layers = [LayerAdapters() for _ in range(config.num_layers)]
    for adapter in adapters:
        _load(adapter, config, dtype, layers)
    return layers


def _load(
    adapter: Adapter, config: ModelConfig, dtype: torch.dtype, layers: list[LayerAdapters]
) -> None:
    path = adapter.path
    if read_adapter(path).digest != adapter.digest:
        raise _misfit(adapter, "its files changed since the service was started; start it again")
    found: dict[tuple[int, str, str], torch.Tensor] = {}
    with safe_open(path / WEIGHTS_FILE, framework="pt") as file:
        for place in read_header(path / WEIGHTS_FILE):
            layer, target, kind = target_of(place, path, adapter.rank)
            if layer >= config.num_layers:
                raise _misfit(adapter, f"it has a layer {layer}; the model has {len(layers)}")
            try:
                found[layer, target, kind] = file.get_tensor(place.name).float()
            except SafetensorError as exc:
                raise _misfit(adapter, str(exc)) from exc
    parts = projections(config)
    known = {target for _, stack in parts.values() for target, _ in stack}
    for layer, target, kind in found:
        if target not in known:
            raise _misfit(adapter, f"the model has no {target}; it has {', '.join(sorted(known))}")
        if (layer, target, "B" if kind == "A" else "A") not in found:
            raise _misfit(adapter, f"layers.{layer} {target} has lora_{kind} alone")
    for layer, of_layer in enumerate(layers):
        for name, (inputs, stack) in parts.items():
            getattr(of_layer, name).append(_stacked(adapter, found, layer, stack, inputs, dtype))


def _stacked(
    adapter: Adapter,
    found: dict[tuple[int, str, str], torch.Tensor],
    layer: int,
    stack: list[tuple[str, int]],
    inputs: int,
    dtype: torch.dtype,
) -> LowRank | None:
    """The matrices of projections that are stacked: [n · rank, in] and [out, n · rank]."""
    downs, ups, outputs = [], [], sum(size for _, size in stack)
    at = 0
    for target, size in stack:
        down, up = found.get((layer, target, "A")), found.get((layer, target, "B"))
        if down is not None and up is not None:
            down, up = down.to(dtype), (up * adapter.scale).to(dtype)
            for matrix, shape in ((down, (adapter.rank, inputs)), (up, (size, adapter.rank))):
                if tuple(matrix.shape) != shape:
                    raise _misfit(
                        adapter,
                        f"layers.{layer} {target} has a matrix {list(matrix.shape)}; the model "
                        f"takes {list(shape)}",
                    )
                if not matrix.isfinite().all():
                    raise _misfit(adapter, f"layers.{layer} {target}: NaN or infinity as {dtype}")
            wide = torch.zeros(outputs, adapter.rank, dtype=dtype)
            wide[at : at + size] = up
            downs.append(down)
            ups.append(wide)
        at += size
    if not downs:
        return None
    return LowRank(torch.cat(downs).contiguous(), torch.cat(ups, dim=1).contiguous())


def projections(config: ModelConfig) -> dict[str, tuple[int, list[tuple[str, int]]]]:
    """The projections of a layer as they are stacked: inputs, and PEFT's names with outputs."""
    c = config
    qkv = [("q_proj", c.q_size), ("k_proj", c.kv_size), ("v_proj", c.kv_size)]
    if c.family == "opt":
        out, up, down = "out_proj", [("fc1", c.ffn_size)], "fc2"
    else:
        out, down = "o_proj", "down_proj"
        up = [("gate_proj", c.ffn_size), ("up_proj", c.ffn_size)]
    return {
        "qkv": (c.hidden_size, qkv),
        "out": (c.q_size, [(out, c.hidden_size)]),
        "up": (c.hidden_size, up),
        "down": (c.ffn_size, [(down, c.hidden_size)]),
    }


def _misfit(adapter: Adapter, why: str) -> ConfigError:
    return ConfigError(f"adapters: {adapter.path} does not fit the model: {why}", param="adapters")
