"""How many rows of a relay batch a GPU holds, and how long they may be."""

from __future__ import annotations

from dataclasses import replace

from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.config.kv_memory import fitting_length, least_length
from quadriga.engine.baton.dense import RELEASE_COLUMNS
from quadriga.errors import ConfigError

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
