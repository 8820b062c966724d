"""Put an engine into host memory: weights, KV rows, and room for what early tokens leave behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quadriga.config.engine_spec import EngineSpec
from quadriga.engine.compiled import Kernels, find_kernels
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.engine.kv_cache import RowKVCache
from quadriga.engine.models.config import ModelConfig
from quadriga.engine.models.decoder import Decoder
from quadriga.engine.row_states import MappedStates
from quadriga.engine.weights.loading import load_spec


@dataclass(frozen=True, slots=True)
class RowEngine:
    """What a runner is made of; the counterpart of `cuda.loading.PagedEngine`."""

    decoder: Decoder
    cache: RowKVCache
    skipped: SkippedKVStore | None
    kernels: Kernels


def load_rows(spec: EngineSpec, config: ModelConfig) -> RowEngine:
    """Read the weights and reserve the KV rows.

    Raises:
        ConfigError: The checkpoint or the spec cannot be served.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    kernels = find_kernels(spec)
    weights = load_spec(spec, config, keeps_forms=kernels.library is not None)
    cache = RowKVCache(
        num_layers=spec.depth,
        num_rows=spec.num_rows,
        num_kv_heads=config.num_kv_heads,
        capacity=spec.row_capacity_tokens,
        head_dim=config.head_dim,
        dtype=dtype,
        budget_tokens=spec.kv_capacity_tokens,
    )
    skipped = None
    if spec.can_exit and (spec.exits.layers or spec.exit_plan.layers):
        ends = (*spec.exits.layers, spec.depth)
        states = MappedStates(spec.num_rows, cache.capacity, config.hidden_size, dtype)
        skipped = SkippedKVStore(
            spec.skipped_kv, ends, cache, states, kept_at_end(spec), spec.replay_newest
        )
    depths = skipped.depths if skipped is not None and skipped.mode == "alias" else None
    return RowEngine(Decoder(config, weights, cache, depths), cache, skipped, kernels)


def kept_at_end(spec: EngineSpec) -> int:
    """Hidden states per row to keep behind the deepest layer loaded, for those that may follow."""
    is_partial = spec.depth < spec.checkpoint.num_layers
    return spec.keep_tokens if is_partial and spec.exit_plan.layers else 0
