"""Translate a GGUF file's metadata into the `config.json` of a Hugging Face checkpoint.

What would change the numbers a model computes, and is not known here, is refused: a field of that
kind, or a RoPE scaling that the native engine does not have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quadriga.checkpoint.families import MAX_LAYERS
from quadriga.gguf.header import DAMAGED, SUPPORTED, GgufHeader

MAX_WIDTH = 1 << 18
"""Of hidden states, of all heads together, and of the MLP."""
MAX_HEAD_DIM = 512
MAX_VOCAB = 1 << 22
MAX_POSITIONS = 1 << 30
DEFAULT_THETA = 10_000.0
LLAMA3_POSITIONS = 8192
FREQUENCIES_TOLERANCE = 1e-5

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""GGUF's architecture to the class and model type of `transformers`. Mistral is `llama` there."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.sliding_window_pattern": (0, 1),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "router_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Fields that other architectures compute with, and the values that change nothing."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The sizes that tensors must have.

    Attributes:
        window: Positions a token sees, itself included; 0 is all.
        theta: Base of the rotary position embedding.
        linear_factor: Every rotation is divided by it.
        unpermute: Rows of Q and K are stored in the order of interleaved rotations.
        qk_norm: Each head of Q and K has a norm.
        qkv_bias, out_bias, mlp_bias: The checkpoint has these biases; those that the file lacks
            are zero.
        is_tied: The head is the token embedding.
    """

    header: GgufHeader
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    window: int
    theta: float
    linear_factor: float
    unpermute: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    is_tied: bool


def read_model(header: GgufHeader) -> GgufModel:
    """Read the sizes of the model.

    Raises:
        ConfigError: The architecture is not served, a field is missing or beyond all bounds, or one
            asks for something that would not be computed.
    """
    architecture = header.text("general.architecture")
    if architecture is None:
        header.refuse("the field general.architecture is missing", DAMAGED)
    if architecture not in _CLASSES:
        header.refuse(
            f"its architecture is {architecture[:40]!r}; GGUF files of {', '.join(_CLASSES)} are "
            "served (Mistral is llama there)",
            "use the model as a folder in Hugging Face format",
        )
    if (kind := header.text("general.type")) not in (None, "model"):
        header.refuse(f"general.type is {kind[:40]!r}, not a model", "give the model's own file")
    _refuse_parts(header)
    _refuse_unknown_features(header, architecture)

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    hidden = header.integer(key("embedding_length"), most=MAX_WIDTH)
    heads = header.integer(key("attention.head_count"), most=hidden)
    kv_heads = header.integer(key("attention.head_count_kv"), heads, most=heads)
    head_dim = header.integer(key("attention.key_length"), hidden // heads, most=MAX_HEAD_DIM)
    if head_dim > MAX_HEAD_DIM or heads * head_dim > MAX_WIDTH:
        header.refuse(f"it has {heads} heads of {head_dim} dimensions", DAMAGED)
    if heads % kv_heads:
        header.refuse(f"{heads} heads cannot share {kv_heads} KV heads evenly", DAMAGED)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := header.integer(key(name), head_dim, most=MAX_WIDTH)) != head_dim:
            header.refuse(
                f"{key(name)} is {other}; only that of K, {head_dim}, is known", SUPPORTED
            )
    if head_dim % 2:
        header.refuse(f"heads of {head_dim} dimensions cannot be rotated", DAMAGED)
    window_key = key("attention.sliding_window")
    window = 0
    if header.metadata.get(window_key, 0) != 0:
        window = header.integer(window_key, most=MAX_POSITIONS)
        if architecture != "llama":
            header.refuse(f"{window_key} is {window}; which layers slide is not known", SUPPORTED)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        header.refuse("the tensor token_embd.weight is missing", DAMAGED)
    vocab_size = embedding.shape[0]
    if vocab_size > MAX_VOCAB:
        header.refuse(f"its vocabulary has {vocab_size} tokens, more than {MAX_VOCAB}", DAMAGED)
    if header.integer(key("vocab_size"), vocab_size, most=MAX_VOCAB) != vocab_size:
        header.refuse(
            f"{key('vocab_size')} is {header.metadata[key('vocab_size')]}, token_embd.weight has "
            f"{vocab_size} rows",
            DAMAGED,
        )
    names = (name.split(".") for name in header.tensors)
    biases = {of[2] for of in names if len(of) == 4 and (of[0], of[3]) == ("blk", "bias")}
    has_attention_bias = bool(biases & {"attn_q", "attn_k", "attn_v", "attn_output"})
    return GgufModel(
        header=header,
        architecture=architecture,
        num_layers=header.integer(key("block_count"), most=MAX_LAYERS),
        hidden_size=hidden,
        ffn_size=header.integer(key("feed_forward_length"), most=MAX_WIDTH),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=header.integer(key("context_length"), most=MAX_POSITIONS),
        norm_eps=header.number(key("attention.layer_norm_rms_epsilon"), most=1.0),
        window=window,
        theta=header.number(key("rope.freq_base"), DEFAULT_THETA, most=1e12),
        linear_factor=_linear_factor(header, architecture),
        unpermute=architecture == "llama",
        qk_norm=architecture == "qwen3",
        qkv_bias=architecture == "qwen2" or has_attention_bias,
        out_bias=architecture != "qwen2" and has_attention_bias,
        mlp_bias=architecture == "llama" and bool(biases & {"ffn_gate", "ffn_up", "ffn_down"}),
        is_tied="output.weight" not in header.tensors,
    )


def _refuse_parts(header: GgufHeader) -> None:
    count = header.metadata.get("split.count", 0)
    if count not in (0, 1):
        header.refuse(
            f"it is one of {str(count)[:40]} parts",
            "merge them with llama.cpp's `llama-gguf-split --merge FIRST_PART MERGED`",
        )


def _refuse_unknown_features(header: GgufHeader, architecture: str) -> None:
    for name, neutral in _NEUTRAL.items():
        value = header.metadata.get(f"{architecture}.{name}")
        if value is None:
            continue
        if value not in neutral:
            shown = str(value)[:40]
            header.refuse(f"{architecture}.{name} is {shown}, which is not computed", SUPPORTED)


def _linear_factor(header: GgufHeader, architecture: str) -> float:
    """What all rotations are divided by. Raises: ConfigError: They are scaled in another way."""
    prefix = f"{architecture}.rope"
    kind = header.text(f"{prefix}.scaling.type")
    if kind not in (None, "none", "linear"):
        header.refuse(f"{prefix}.scaling.type is {kind[:40]!r}; only linear is known", SUPPORTED)
    for name in (f"{prefix}.scaling.factor", f"{prefix}.scale_linear"):
        if kind != "none" and header.metadata.get(name, 0) != 0:
            return header.number(name, most=1e6)
    return 1.0


def hugging_face_config(
    model: GgufModel, frequency_factors: npt.NDArray[np.float32] | None, **tokens: Any
) -> dict[str, Any]:
    """Return the content of `config.json`.

    Args:
        frequency_factors: The tensor `rope_freqs.weight`, by which each rotation is divided.
        tokens: Ids of special tokens.

    Raises:
        ConfigError: The file asks for what the class of `transformers` cannot compute.
    """
    name, model_type = _CLASSES[model.architecture]
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": _rope(model, frequency_factors),
        "tie_word_embeddings": model.is_tied,
        "attention_bias": model.qkv_bias,
        "dtype": "float32",
    }
    if model.architecture == "llama":
        config["mlp_bias"] = model.mlp_bias
    else:
        config["use_sliding_window"] = False
    if model.window:
        if model.qkv_bias or model.mlp_bias:
            model.header.refuse("it has both a sliding window and biases", SUPPORTED)
        config |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": model.window,
        }
    return config | tokens


def _rope(model: GgufModel, frequency_factors: npt.NDArray[np.float32] | None) -> dict[str, Any]:
    plain = {"rope_type": "default", "rope_theta": model.theta}
    if frequency_factors is None or (frequency_factors == 1.0).all():
        if model.linear_factor == 1.0:
            return plain
        return plain | {"rope_type": "linear", "factor": model.linear_factor}
    if model.linear_factor != 1.0:
        model.header.refuse("its rotations are scaled in two ways at once", SUPPORTED)
    key = f"{model.architecture}.rope.scaling.original_context_length"
    scaling = {
        "rope_type": "llama3",
        "rope_theta": model.theta,
        "factor": float(frequency_factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": model.header.integer(
            key, LLAMA3_POSITIONS, most=MAX_POSITIONS
        ),
    }
    expected = _llama3_factors(model, scaling)
    if not np.allclose(frequency_factors, expected, rtol=FREQUENCIES_TOLERANCE, atol=0.0):
        model.header.refuse("rope_freqs.weight is not the RoPE scaling of Llama 3", SUPPORTED)
    return scaling


def _llama3_factors(model: GgufModel, scaling: dict[str, Any]) -> npt.NDArray[np.float64]:
    """What the scaling of Llama 3 divides each rotation by. [head_dim / 2]"""
    exponents = np.arange(0, model.head_dim, 2, dtype=np.float64) / model.head_dim
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * model.theta**exponents)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1.0 / ((1.0 - blend) / scaling["factor"] + blend)
    return factors
