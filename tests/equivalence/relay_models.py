"""Small randomly initialised checkpoints of families that are not native, for the relay batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    BloomConfig,
    CodeGenConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    StableLmConfig,
    Starcoder2Config,
)

VOCAB = 130
POSITIONS = 96
MHA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 88,
    "max_position_embeddings": POSITIONS,
}
GQA = MHA | {"num_key_value_heads": 2}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": POSITIONS,
}
FALCON = {k: v for k, v in MHA.items() if k != "intermediate_size"}

FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(**GPT),
    "gpt-neox": lambda: GPTNeoXConfig(**MHA),
    "gpt-j": lambda: GPTJConfig(**GPT, rotary_dim=4),
    "codegen": lambda: CodeGenConfig(**(GPT | {"n_head": 4, "n_ctx": POSITIONS}), rotary_dim=4),
    "gpt-bigcode": lambda: GPTBigCodeConfig(**GPT),
    "falcon": lambda: FalconConfig(**FALCON, alibi=False),
    "falcon-new": lambda: FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-alibi": lambda: FalconConfig(**FALCON, alibi=True, multi_query=False),
    "phi": lambda: PhiConfig(**MHA),
    "phi3": lambda: Phi3Config(**GQA, pad_token_id=0),
    "gemma": lambda: GemmaConfig(**GQA, head_dim=16),
    "bloom": lambda: BloomConfig(
        vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=6, seq_length=POSITIONS
    ),
    "mpt": lambda: MptConfig(
        vocab_size=VOCAB, d_model=48, n_layers=3, n_heads=6, max_seq_len=POSITIONS
    ),
    "stablelm": lambda: StableLmConfig(**GQA),
    "cohere": lambda: CohereConfig(**GQA),
    "starcoder2": lambda: Starcoder2Config(**GQA),
    "olmo2": lambda: Olmo2Config(**GQA),
    "mixtral": lambda: MixtralConfig(**GQA, num_local_experts=4),
    "biogpt": lambda: BioGptConfig(**MHA),
    # Windows much shorter than the sequences.
    "gemma2-window": lambda: Gemma2Config(**GQA, head_dim=16, sliding_window=8),
    "gemma3-window": lambda: Gemma3TextConfig(**GQA, head_dim=16, sliding_window=8),
    "gpt-oss-window": lambda: GptOssConfig(
        **GQA,
        head_dim=16,
        sliding_window=8,
        num_local_experts=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "gpt-neo-local": lambda: GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        num_layers=4,
        num_heads=6,
        attention_types=[[["global", "local"], 2]],
        window_size=8,
        max_position_embeddings=POSITIONS,
    ),
}


def build_relay(config: Any, *, seed: int = 0) -> PreTrainedModel:
    """A model with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
            elif name.endswith("weight"):  # of a norm
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.1)
    return model


def generate(model: PreTrainedModel, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens of `transformers`, the sequence alone."""
    ids = torch.tensor([prompt_ids])
    output: list[int] = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt_ids) :].tolist()
    return output
