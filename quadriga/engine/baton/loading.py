"""From a checkpoint folder to a `transformers` model, or to the reason why it is not served.

What the configuration alone rules out is refused before a weight is read. Nothing of a checkpoint
is ever executed: no code of its own, no pickles.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from quadriga.catalogue.headers import INDEX_FILE, SINGLE_FILE
from quadriga.checkpoint.stored_forms import split_name
from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.config.kv_memory import fitting_length, least_length
from quadriga.engine.baton.dense import RELEASE_COLUMNS
from quadriga.errors import ConfigError

ATTENTION = ("sdpa", "eager")
FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)
"""What code of a library raises over a model it cannot handle."""


def refuse(name: str, reason: str) -> ConfigError:
    """The error for a model that the relay batch does not serve."""
    return ConfigError(f"model: {name} cannot run in the relay batch: {reason}", param="model")


def load_model(spec: EngineSpec) -> PreTrainedModel:
    """Read config and weights, into host memory, in the spec's dtype.

    Raises:
        ConfigError: Not a causal model with a plain cache, its files are unusable, or its
            positions do not reach as far as the spec's rows.
    """
    path, name = spec.checkpoint.path, spec.checkpoint.id
    _check_files(path, name)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except FOREIGN_ERRORS as exc:
        raise refuse(name, f"transformers does not know its configuration: {exc}") from exc
    check_config(config, name)
    _check_rope(config.get_text_config(decoder=True), spec)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, spec.dtype),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except FOREIGN_ERRORS as exc:
        raise refuse(name, f"transformers cannot load it: {exc}") from exc
    model, report = loaded
    if any(split_name(str(key))[1] for key in report.get("unexpected_keys", ())):
        raise refuse(name, "its matrices are in blocks of a GGUF file; leave runner out")
    for what in ("missing_keys", "mismatched_keys"):
        if keys := sorted(str(key) for key in report.get(what, ())):
            raise refuse(name, f"{len(keys)} of its tensors are {what[:-5]}, {keys[0]} for one")
    attention = model.config._attn_implementation
    if attention not in ATTENTION:
        raise refuse(name, f"its attention {attention!r} takes no padding mask")
    ready: PreTrainedModel = model.eval().requires_grad_(False)
    return ready


def check_config(config: Any, name: str) -> None:
    """Refuse what the configuration shows to have no plain per-layer K/V cache.

    Raises:
        ConfigError: With the reason.
    """
    if config.is_encoder_decoder:
        raise refuse(name, "it is an encoder-decoder; only decoders are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refuse(name, f"a {config.model_type} is no causal language model in transformers")
    if getattr(config, "quantization_config", None):
        raise refuse(name, "its weights are quantised; give the unquantised checkpoint")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise refuse(name, f"{model_class.__name__} keeps a recurrent state instead of K/V")
    text = config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        raise refuse(name, "its attention is chunked by position")
    try:
        layers = DynamicCache(config=config).layers
    except FOREIGN_ERRORS as exc:
        raise refuse(name, f"its cache cannot be laid out: {exc}") from exc
    for index, layer in enumerate(layers):
        # Windows are fine: all K/V is kept, the model's own mask hides what is outside.
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            kind = type(layer).__name__
            raise refuse(name, f"layer {index} has no K/V cache of its own but a {kind}")


def _check_files(path: Path, name: str) -> None:
    if not (path / SINGLE_FILE).is_file() and not (path / INDEX_FILE).is_file():
        raise refuse(
            name,
            f"{path} holds no {SINGLE_FILE} and no {INDEX_FILE}; pickled weights are not loaded, "
            "save the model with safe_serialization=True",
        )


def _check_rope(config: Any, spec: EngineSpec) -> None:
    """Refuse rotations that change with the longest sequence in the batch.

    LongRoPE switches its frequencies for the whole batch when one row passes the original length,
    so a row's numbers would depend on its neighbours. ("dynamic" scaling does so only beyond
    `max_position_embeddings`, where no row gets.)
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type") != "longrope":
            continue
        original = int(
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if spec.row_capacity_tokens > original:
            raise ConfigError(
                f"engine.max_model_len: {spec.row_capacity_tokens} is beyond the {original} "
                f"positions up to which LongRoPE of {spec.checkpoint.id} treats every sequence "
                f"alike; set engine.max_model_len to {original} or less",
                param="engine.max_model_len",
            )


COPIES = 2
"""The dense batch, and beside it the same rows in tensors of their own: those that join or wait."""


def fit(spec: EngineSpec, *, weight_bytes: int, free_bytes: int, total_bytes: int) -> EngineSpec:
    """The spec with rows that fit beside the weights, all at their full length at once.

    Args:
        weight_bytes: That the model will take on the GPU.
        free_bytes, total_bytes: Of the GPU, before the model is on it.

    Raises:
        ConfigError: Not even one sequence fits.
    """
    width = DTYPE_BYTES[spec.dtype]
    token_bytes = spec.checkpoint.kv_bytes_per_token(spec.depth, width)
    share = 1.0 if spec.gpu_memory_share is None else spec.gpu_memory_share
    left = min(free_bytes, int(share * total_bytes)) - weight_bytes
    fitting = max(0, left) // (token_bytes * COPIES)
    if spec.kv_memory_bytes is not None:
        fitting = min(fitting, spec.kv_memory_bytes // token_bytes)
    length = least = spec.row_capacity_tokens
    if spec.fits_length:
        length = fitting_length(length, fitting, spec.runner)
        least = least_length(spec.row_capacity_tokens)
    if fitting < least:
        raise ConfigError(
            f"engine.gpu_memory_share: {share} of the GPU's {total_bytes} bytes, of which "
            f"{free_bytes} are free, less {weight_bytes} of weights hold {fitting} tokens of "
            f"{spec.checkpoint.id} in the relay batch, less than one sequence of {least} "
            f"({COPIES} times {token_bytes} bytes a token); lower engine.max_model_len",
            param="engine.gpu_memory_share",
        )
    num_rows = spec.num_rows
    if spec.can_exit:  # prefill has no dense batch: its rows are as long as their prompts
        # A lone row is no wider than it is long.
        num_rows = max(1, min(num_rows, fitting // (length + RELEASE_COLUMNS)))
    capacity = min(fitting, num_rows * length)
    return replace(spec, num_rows=num_rows, row_capacity_tokens=length, kv_capacity_tokens=capacity)
