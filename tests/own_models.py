"""Checkpoints of the shapes that people bring: of full size on paper, or thin and with weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
COMMON: dict[str, Any] = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
LLAMA_1B: dict[str, Any] = COMMON | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": ROPE,
}
LLAMA_8B: dict[str, Any] = COMMON | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "rope_parameters": ROPE | {"factor": 8.0},
}


def thin(config: dict[str, Any]) -> dict[str, Any]:
    """The same heads, positions and rotation, with few layers and a narrow stream between them."""
    return config | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
    }


def sparse_checkpoint(path: Path, config: dict[str, Any]) -> Path:
    """A folder whose weights are a header with the right shapes, and a hole in the disk."""
    path.mkdir(parents=True)
    model = LlamaConfig(**config, architectures=["LlamaForCausalLM"])
    model.save_pretrained(path)
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in _shapes(config).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    return path


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes
