"""What the `config.json` of any decoder says, whatever its family calls it; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GATED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
"""RMS norms, rotary positions and a gated MLP, all under the same names."""
NATIVE_ARCHITECTURES = frozenset({*GATED_ARCHITECTURES, "OPTForCausalLM"})
"""Families with layers of our own; any other runs unmodified in the relay batch."""

_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "n_embed", "d_model")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_MAX_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
DEFAULT_MAX_POSITIONS = 2048
QWEN3_HEAD_DIM = 128
"""Where a config names none."""
MAX_LAYERS = 10_000
"""No model has as many; what is made for each layer fits into memory."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The sizes that everyone outside the engine wants to know.

    Attributes:
        max_positions: Most positions the model was made for.
    """

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int


def read_facts(config: dict[str, Any]) -> ModelFacts:
    """Read the sizes out of a parsed `config.json`.

    Raises:
        GARBLED (see `json_files`): A field is missing, no number, or beyond all reason.
    """
    text = config.get("text_config", config)
    num_layers = int(_first(text, _NUM_LAYERS))
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ValueError(f"{_NUM_LAYERS[0]}: {num_layers} is not within 1 and {MAX_LAYERS}")
    hidden_size = _size("hidden_size", _first(text, _HIDDEN_SIZE))
    try:
        num_heads = _size("num_attention_heads", _first(text, _NUM_HEADS))
    except KeyError:
        raise KeyError(f"{_NUM_HEADS[0]} (without attention there is no K/V to serve)") from None
    is_qwen3 = "Qwen3ForCausalLM" in (config.get("architectures") or ())
    usual_head_dim = QWEN3_HEAD_DIM if is_qwen3 else hidden_size // num_heads
    return ModelFacts(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_kv_heads=_size("num_key_value_heads", _num_kv_heads(text, num_heads)),
        head_dim=_size("head_dim", text.get("head_dim") or usual_head_dim),
        vocab_size=_size("vocab_size", text["vocab_size"]),
        max_positions=_size(
            "max_position_embeddings", _first(text, _MAX_POSITIONS, DEFAULT_MAX_POSITIONS)
        ),
    )


def _size(name: str, value: Any) -> int:
    size = int(value)
    if size < 1:
        raise ValueError(f"{name}: {size} is below 1")
    return size


def _num_kv_heads(text: dict[str, Any], num_heads: int) -> int:
    """Heads as they are cached."""
    if text.get("num_key_value_heads"):
        return int(text["num_key_value_heads"])
    # GPTBigCode and Falcon: one for all. Falcon's newer layout repeats its few before caching.
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    attention = text.get("attn_config")  # DBRX
    if isinstance(attention, dict) and attention.get("kv_n_heads"):
        return int(attention["kv_n_heads"])
    return num_heads


def _first(text: dict[str, Any], names: tuple[str, ...], default: int | None = None) -> Any:
    """The first of the names that has a value. Raises: KeyError with the usual name."""
    for name in names:
        if text.get(name) is not None:
            return text[name]
    if default is None:
        raise KeyError(names[0])
    return default
