"""An exit's maps for skipped KV as one matrix: K and V of all layers behind it are one product.

A map is a norm and a projection, and what differs between the norms of layers is their weight:
it goes into the projection.
"""

from __future__ import annotations

import torch

from quadriga.checkpoint.model_config import ModelConfig
from quadriga.engine.weights.checkpoint_weights import KVMap, Linear, ModelWeights
from quadriga.engine.weights.matrix import Form, Matrix

_FORMS = {torch.float32: Form.FLOAT32, torch.bfloat16: Form.BFLOAT16, torch.float16: Form.FLOAT16}


def folded_maps(weights: ModelWeights, config: ModelConfig) -> dict[int, Linear]:
    """Exit → [(layers behind it) · 2 · kv_size, hidden], a layer's rows after those before it.

    Empty where layers norm behind themselves, by LayerNorm, or norm their keys, too.
    """
    if config.norm != "rms" or not config.pre_norm or config.qk_norm:
        return {}
    folded: dict[int, Linear] = {}
    known: dict[tuple[int, ...], Linear] = {}
    for depth, maps in sorted(weights.kv_maps.items()):
        behind = maps[depth:]
        if not behind:
            continue
        key = tuple(part.data_ptr() for kv_map in behind for part in _parts(kv_map))
        if key not in known:
            known[key] = made = _fold(behind, weights.dtype)
            # A later exit with the same maps has the end of these rows.
            for index in range(1, len(behind)):
                width = made.weight.shape[0] // len(behind)
                rest = tuple(p.data_ptr() for kv_map in behind[index:] for p in _parts(kv_map))
                bias = None if made.bias is None else made.bias[index * width :]
                known[rest] = Linear(made.weight[index * width :], bias)
        folded[depth] = known[key]
    return folded


def _parts(kv_map: KVMap) -> list[torch.Tensor]:
    parts = (kv_map.norm.weight, kv_map.kv.weight.rows, kv_map.kv.bias)
    return [part for part in parts if part is not None]


def _fold(maps: list[KVMap], dtype: torch.dtype) -> Linear:
    rows = []
    for kv_map in maps:
        values, unit = kv_map.kv.weight.values(dtype), kv_map.norm.weight
        rows.append(values if unit is None else (values.float() * unit.float()).to(dtype))
    biases = [kv_map.kv.bias for kv_map in maps]
    width = rows[0].shape[0]
    bias = None
    if any(one is not None for one in biases):
        none = torch.zeros(width, dtype=dtype, device=rows[0].device)
        bias = torch.cat([none if one is None else one for one in biases])
    return Linear(Matrix(_FORMS[dtype], torch.cat(rows)), bias)
