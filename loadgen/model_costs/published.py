"""Sizes of published models, as their `config.json` states them.

Sources: the configuration files of the repositories named below on huggingface.co (gated ones are
also in the papers: Llama 2, arXiv:2307.09288, Table 1 and §2.2; Code Llama, arXiv:2308.12950;
Llama 3, arXiv:2407.21783, Table 3; OPT, arXiv:2205.01068, Table 1). A test holds the parameters
counted from them against the totals that the repositories publish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    """One published model.

    Attributes:
        repository: Whose `config.json` it is.
        config: The fields that sizes depend on.
    """

    repository: str
    config: dict[str, Any]


def _llama(
    repository: str,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv: int,
    vocab: int,
    positions: int,
    architecture: str = "LlamaForCausalLM",
) -> Published:
    return Published(
        repository,
        {
            "architectures": [architecture],
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "vocab_size": vocab,
            "max_position_embeddings": positions,
            "tie_word_embeddings": False,
        },
    )


def _opt(repository: str, hidden: int, layers: int, heads: int) -> Published:
    return Published(
        repository,
        {
            "architectures": ["OPTForCausalLM"],
            "hidden_size": hidden,
            "ffn_dim": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        },
    )


PUBLISHED: dict[str, Published] = {
    "llama-2-7b": _llama("meta-llama/Llama-2-7b-hf", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": _llama("meta-llama/Llama-2-13b-hf", 5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": _llama("meta-llama/Llama-2-70b-hf", 8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3-8b": _llama("meta-llama/Meta-Llama-3-8B", 4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": _llama("meta-llama/Meta-Llama-3-70B", 8192, 28672, 80, 64, 8, 128256, 8192),
    "codellama-34b": _llama("codellama/CodeLlama-34b-hf", 8192, 22016, 48, 64, 8, 32000, 16384),
    "mistral-7b": _llama(
        "mistralai/Mistral-7B-v0.1", 4096, 14336, 32, 32, 8, 32000, 32768, "MistralForCausalLM"
    ),
    "qwen2.5-7b": _llama(
        "Qwen/Qwen2.5-7B", 3584, 18944, 28, 28, 4, 152064, 131072, "Qwen2ForCausalLM"
    ),
    "opt-125m": _opt("facebook/opt-125m", 768, 12, 12),
    "opt-1.3b": _opt("facebook/opt-1.3b", 2048, 24, 32),
    "opt-2.7b": _opt("facebook/opt-2.7b", 2560, 32, 32),
    "opt-6.7b": _opt("facebook/opt-6.7b", 4096, 32, 32),
    "opt-13b": _opt("facebook/opt-13b", 5120, 40, 40),
    "opt-30b": _opt("facebook/opt-30b", 7168, 48, 56),
}


@dataclass(frozen=True, slots=True)
class PaperRow:
    """A single-model row of HELIOS's Table 6, and on how many 40 GB GPUs it ran (§4.2)."""

    model: str
    weights_gb: float
    num_devices: int


TABLE_6 = (
    PaperRow("codellama-34b", 63.0, 2),
    PaperRow("llama-2-70b", 129.0, 4),
    PaperRow("llama-2-7b", 12.9, 1),
    PaperRow("llama-3-8b", 15.5, 1),
    PaperRow("llama-2-13b", 24.8, 1),
)
"""Source: HELIOS Table 6."""
SAVED_GB = (("opt-1.3b", 6, 3.37), ("opt-6.7b", 9, 17.25))
"""(model, layers kept, GB saved), in 32-bit weights. Source: HELIOS §1."""
PAPER_DEVICE_GIB = 40.0
PAPER_BATCH_RATIO = 15.14
PAPER_SAVING = 0.674
