"""Small random models of the native families with a tokenizer, to be tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from quadriga.training.tokenizer import END_ID, build_tokenizer, save_tokenizer

HIDDEN, LAYERS = 32, 4
VOCAB = build_tokenizer().get_vocab_size()
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "eos_token_id": END_ID,
    "bos_token_id": None,
    "pad_token_id": None,
}
GATED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**GATED, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**GATED, sliding_window=16),
    "qwen2": lambda: Qwen2Config(**GATED),
    "qwen3": lambda: Qwen3Config(**GATED, head_dim=8),
    "opt": lambda: OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=16),
}


def save_model(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint whose tokens are far apart."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3 if "embed" in name or "head" in name else 0.15)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
