"""Small randomly initialised checkpoints of every native family, and specs to load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM as AutoModel
from transformers import (
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.config.engine_spec import EngineSpec
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.files import cache_folder
from quadriga.interfaces import PrefillChunk
from quadriga.scheduling.decode_loop import DecodeLoop
from tests.sequences import make_sequence

VOCAB = 130
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 96,
}
GATED = SIZES | {"intermediate_size": 88, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}

VARIANTS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**GATED),
    "llama-tied-biases": lambda: LlamaConfig(
        **GATED, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama-head-dim": lambda: LlamaConfig(**(GATED | {"head_dim": 20})),
    "llama-mha": lambda: LlamaConfig(**(GATED | {"num_key_value_heads": 6})),
    "llama-mqa-gelu": lambda: LlamaConfig(
        **(GATED | {"num_key_value_heads": 1}), hidden_act="gelu"
    ),
    "llama-rope-llama3": lambda: LlamaConfig(**GATED, rope_parameters=LLAMA3_ROPE),
    "llama-rope-linear": lambda: LlamaConfig(**GATED, rope_parameters=LINEAR_ROPE),
    "mistral-window": lambda: MistralConfig(**GATED, sliding_window=7),
    "mistral-no-window": lambda: MistralConfig(**GATED, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**GATED),
    "qwen2-some-windows": lambda: Qwen2Config(
        **GATED, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen2-tied": lambda: Qwen2Config(**GATED, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**GATED, head_dim=16),
    "qwen3-bias-tied": lambda: Qwen3Config(
        **GATED, head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
    "opt-pre-norm": lambda: OPTConfig(**SIZES, ffn_dim=72),
    "opt-post-norm-projected": lambda: OPTConfig(
        **SIZES, ffn_dim=72, do_layer_norm_before=False, word_embed_proj_dim=24
    ),
    "opt-untied-gelu-no-bias": lambda: OPTConfig(
        **SIZES,
        ffn_dim=72,
        enable_bias=False,
        tie_word_embeddings=False,
        activation_function="gelu_new",
        layer_norm_elementwise_affine=False,
    ),
}


def build(variant: str, *, seed: int = 0) -> PreTrainedModel:
    """A model with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(seed)
    return randomise(AutoModel.from_config(VARIANTS[variant](), attn_implementation="eager").eval())


def randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Draw every weight anew, from torch's own generator."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.25 if parameter.dim() > 1 else 0.1)
    return model


def save(model: PreTrainedModel, path: Path, **options: Any) -> Path:
    """Write a checkpoint folder as `transformers` does."""
    model.save_pretrained(path, **options)
    return path


def make_spec(path: Path, **overrides: Any) -> EngineSpec:
    """An eager fp32 spec for a small checkpoint; any field can be overridden."""
    checkpoint = read_checkpoint(str(path))
    fields: dict[str, Any] = {
        "checkpoint": checkpoint,
        "depth": checkpoint.num_layers,
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "compile": "off",
        "cache_dir": cache_folder(),
        "num_rows": 8,
        "row_capacity_tokens": checkpoint.max_model_len,
    } | overrides
    fields.setdefault("kv_capacity_tokens", fields["num_rows"] * fields["row_capacity_tokens"])
    return EngineSpec(**fields)


def make_state(prompt_ids: list[int], **sampling: Any) -> SequenceState:
    """A sequence with greedy defaults."""
    params = SamplingParams(**({"max_tokens": 32, "temperature": 0.0} | sampling))
    return make_sequence("s", list(prompt_ids), params)


def whole_prompt(row: int, state: SequenceState) -> PrefillChunk:
    """The sequence's prompt and output so far, as one chunk."""
    return PrefillChunk(row, state.prompt_ids + state.output_ids, 0, True)


def start_row(runner: Any, row: int, state: SequenceState) -> None:
    """Attach a sequence, compute its prompt, and give it its first token."""
    runner.attach(row, state)
    [token] = runner.prefill([whole_prompt(row, state)])
    assert token is not None
    state.output_ids.append(token.token_id)


def begin(loop: DecodeLoop, state: SequenceState, source: Any, target: Any = None) -> int:
    """Prefill a sequence and let a loop go on with its KV; returns the row.

    Args:
        source: The runner that computes the prompt, in row 0 or in the loop's where it has both.
        target: The loop's runner; None: the same.
    """
    slot = loop.reserve(state.sequence_id, state.max_total_tokens, state.num_tokens)
    row = slot.row if target is None else 0
    source.attach(row, state)
    token = source.prefill([whole_prompt(row, state)])[0]
    kv = source.read_kv(row, 0, source.num_layers, 0, len(state.prompt_ids))
    source.detach(row)
    (target or source).write_kv(slot.row, 0, 0, kv)
    state.output_ids.append(token.token_id)
    state.exit_layers.append(token.exit_layer)
    loop.join(state)
    return slot.row


def assert_company_changes_nothing(runner: Any, alone: Any, prompts: list[list[int]]) -> None:
    """A prompt in pieces beside others has the KV that it has alone and in one piece."""
    for row, ids in enumerate(prompts):
        runner.attach(row, make_state(ids))
    for start in range(0, 9, 3):
        runner.prefill(
            [
                PrefillChunk(row, ids[start : start + 3], start, start + 3 >= len(ids))
                for row, ids in enumerate(prompts)
                if start < len(ids)
            ]
        )
    for row, ids in enumerate(prompts):
        alone.attach(7, make_state(ids))
        alone.prefill([PrefillChunk(7, ids, 0, True)])
        wanted = alone.read_kv(7, 0, alone.num_layers, 0, len(ids))
        assert torch.equal(runner.read_kv(row, 0, runner.num_layers, 0, len(ids)), wanted)
        alone.detach(7)
