"""GGUF files that cannot be served are refused, with the field and what to do."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, dequantize
from gguf import GGMLQuantizationType as Kind

from quadriga.errors import ConfigError
from quadriga.gguf.checkpoint_folder import Conversion
from quadriga.gguf.header import MAX_FIELDS, MAX_STRINGS, MAX_TENSORS, MAX_TEXT_BYTES, read_gguf
from quadriga.gguf.tensors import READABLE
from tests.gguf_files import small_fields, small_tensors, write_file

STRING, ARRAY, UINT32 = 8, 9, 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path / "small.gguf", "llama", small_fields(), small_tensors())


def refused(file: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(file)
    assert str(file) in caught.value.message
    for word in words:
        assert word in caught.value.message


def convert(file: Path) -> None:
    folder = file.parent / "out"
    folder.mkdir(exist_ok=True)
    Conversion(file).write(folder, "0" * 64, lambda count: None)


def test_a_small_file_is_converted(file: Path) -> None:
    convert(file)
    assert {p.name for p in (file.parent / "out").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


FIELDS: dict[str, tuple[str, Any, str]] = {
    "a mixture of experts": ("llama.expert_count", 8, "expert_count is 8"),
    "YaRN": ("llama.rope.scaling.type", "yarn", "only linear"),
    "an attention scale": ("llama.attention.scale", 0.5, "attention.scale is 0.5"),
    "capped logits": ("llama.final_logit_softcapping", 30.0, "softcapping"),
    "part of a split file": ("split.count", 3, "llama-gguf-split --merge"),
    "an adapter": ("general.type", "adapter", "general.type is 'adapter'"),
    "no layers": ("llama.block_count", 0, "llama.block_count is 0"),
    "too many layers": ("llama.block_count", 20_000, "llama.block_count is 20000"),
    "more layers than tensors": ("llama.block_count", 3, "blk.2.attn_norm.weight is missing"),
    "fewer layers than tensors": ("llama.block_count", 1, "does not know"),
    "another width": ("llama.feed_forward_length", 13, "its fields say [13, 8]"),
    "a width that is no number": ("llama.embedding_length", "8", "not one whole number"),
    "layers of different widths": ("llama.feed_forward_length", [12, 13], "not one whole number"),
    "heads that do not divide": ("llama.attention.head_count_kv", 2, "attn_k.weight has shape"),
    "odd heads": ("llama.attention.key_length", 3, "heads of 3 dimensions"),
    "rotations of half a head": ("llama.rope.dimension_count", 2, "rope.dimension_count is 2"),
    "huge heads": ("llama.attention.key_length", 1 << 20, "outside of 1 to"),
    "no context": ("llama.context_length", None, "llama.context_length is missing"),
    "no norm's epsilon": ("llama.attention.layer_norm_rms_epsilon", None, "epsilon is missing"),
    "a negative epsilon": ("llama.attention.layer_norm_rms_epsilon", -1.0, "not above 0"),
    "NaN for a base": ("llama.rope.freq_base", float("nan"), "freq_base is nan"),
    "a vocabulary of another size": ("llama.vocab_size", 99, "token_embd.weight has 260 rows"),
    "a window and unknown layers": ("llama.attention.sliding_window_pattern", 6, "pattern is 6"),
    "no tokenizer": ("tokenizer.ggml.model", None, "'None'"),
    "another tokenizer": ("tokenizer.ggml.model", "rwkv", "'rwkv'"),
    "no way to cut text": ("tokenizer.ggml.pre", None, "does not say how its text is cut"),
    "an unknown way to cut text": ("tokenizer.ggml.pre", "future", "known are"),
    "no tokens": ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens is missing"),
    "a token twice": ("tokenizer.ggml.tokens", ["a", "a"], "'a' twice"),
    "more tokens than rows": ("tokenizer.ggml.tokens", [str(i) for i in range(261)], "261 tokens"),
    "an endless token": ("tokenizer.ggml.tokens", ["x" * 5000], "5000 characters"),
    "merges without tokens": ("tokenizer.ggml.merges", ["no way"], "'no way'"),
    "half a merge": ("tokenizer.ggml.merges", ["Ġt"], "'Ġt'"),
    "types of other tokens": ("tokenizer.ggml.token_type", [1, 1, 3], "3 numbers for 260 tokens"),
    "an end beyond the tokens": ("tokenizer.ggml.eos_token_id", 260, "eos_token_id is 260"),
    "a list for a window": ("llama.attention.sliding_window", [4, 8], "not one whole number"),
    "a list for a scale": ("llama.rope.scaling.factor", [4, 8], "not a number"),
    "a list for a feature": ("llama.expert_count", [0, 8], "which is not computed"),
    "a list of parts": ("split.count", [1, 2], "llama-gguf-split"),
    "a list for a token": ("tokenizer.ggml.eos_token_id", [1, 2], "not a whole number"),
    "a list for a temperature": ("general.sampling.temp", [1, 2], "not a number"),
    "a flag that is none": ("tokenizer.ggml.add_bos_token", 1, "not true or false"),
    "a template that is none": ("tokenizer.chat_template", 5, "not a string"),
    "an odd alignment": ("general.alignment", 48, "no power of two"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields(tmp_path: Path, name: str) -> None:
    field, value, message = FIELDS[name]
    fields = small_fields() | {field: value}
    refused(write_file(tmp_path / "m.gguf", "llama", fields, small_tensors()), message)


@pytest.mark.parametrize("architecture", ["gemma3", "mistral3", "bert"])
def test_other_architectures(tmp_path: Path, architecture: str) -> None:
    file = write_file(tmp_path / "m.gguf", architecture, {}, small_tensors())
    refused(file, architecture, "llama, qwen2, qwen3")


TENSORS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "one missing": (lambda t: t.pop("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight is missing"),
    "no embedding": (lambda t: t.pop("token_embd.weight"), "token_embd.weight is missing"),
    "a bias of the head": (lambda t: t.update({"output.bias": np.ones(260, "f4")}), "output.bias"),
    "one unknown": (lambda t: t.update({"blk.0.ssm_a": np.ones(3, "f4")}), "blk.0.ssm_a"),
    "one transposed": (
        lambda t: t.update({"blk.0.ffn_up.weight": t["blk.0.ffn_up.weight"].T.copy()}),
        "has shape [8, 12]",
    ),
    "NaN": (lambda t: t["blk.1.attn_k.weight"].fill(np.nan), "blk.1.attn_k.weight holds NaN"),
    "infinity": (lambda t: t["output_norm.weight"].fill(np.inf), "output_norm.weight holds NaN"),
    "rotations of nobody": (
        lambda t: t.update({"rope_freqs.weight": np.array([1.0, 7.0], "f4")}),
        "not the RoPE scaling of Llama 3",
    ),
    "negative rotations": (
        lambda t: t.update({"rope_freqs.weight": np.array([1.0, -1.0], "f4")}),
        "not above 0",
    ),
    "too few rotations": (
        lambda t: t.update({"rope_freqs.weight": np.array([1.0], "f4")}),
        "shape [1]",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(tmp_path: Path, name: str) -> None:
    change, message = TENSORS[name]
    tensors = small_tensors()
    change(tensors)
    refused(write_file(tmp_path / "m.gguf", "llama", small_fields(), tensors), message)


def test_a_type_that_is_only_written(tmp_path: Path) -> None:
    """Some types exist in files, and the library has no numbers for them."""
    tensors = small_tensors() | {"blk.0.attn_norm.weight": np.ones(8, dtype=np.int32)}
    refused(write_file(tmp_path / "m.gguf", "llama", small_fields(), tensors), "type I32")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.6, 0.9, 0.999])
def test_a_file_that_was_cut_short(file: Path, share: float) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    refused(file, "cut short", "fetch it again")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"PK\x03\x04 some archive")
    refused(file, "does not begin with GGUF")


def head(tensors: int, fields: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, offset)
    )


KEY = text(b"some.key")
ALIGNED = head(0, 1) + text(b"general.alignment") + struct.pack("<I", UINT32)
HEADERS: dict[str, tuple[bytes, str]] = {
    "version 1": (head(0, 0, version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "billions of fields": (head(0, 1 << 62), str(MAX_FIELDS)),
    "billions of tensors": (head(1 << 62, 0), str(MAX_TENSORS)),
    "a key without end": (head(0, 1) + struct.pack("<Q", 1 << 63), "the limit is"),
    "a string without end": (
        head(0, 1) + KEY + struct.pack("<IQ", STRING, 1 << 63),
        str(MAX_TEXT_BYTES),
    ),
    "a string beyond the file": (head(0, 1) + KEY + struct.pack("<IQ", STRING, 999), "cut short"),
    "no UTF-8": (head(0, 1) + KEY + struct.pack("<I", STRING) + text(b"\xff"), "UTF-8"),
    "billions of strings": (
        head(0, 1) + KEY + struct.pack("<IIQ", ARRAY, STRING, 1 << 62),
        str(MAX_STRINGS),
    ),
    "strings beyond the file": (
        head(0, 1) + KEY + struct.pack("<IIQ", ARRAY, STRING, 1 << 22),
        "cut short",
    ),
    "billions of numbers": (
        head(0, 1) + KEY + struct.pack("<IIQ", ARRAY, UINT32, 1 << 62),
        "numbers, more than",
    ),
    "numbers beyond the file": (
        head(0, 1) + KEY + struct.pack("<IIQ", ARRAY, UINT32, 1 << 22),
        "cut short",
    ),
    "lists of lists": (
        head(0, 1) + KEY + struct.pack("<IIQ", ARRAY, ARRAY, 1) * 50,
        "array of the type 9",
    ),
    "a type that there is not": (head(0, 1) + KEY + struct.pack("<I", 99), "unknown type 99"),
    "neither true nor false": (head(0, 1) + KEY + struct.pack("<IB", 7, 3), "not true or false"),
    "a field twice": (head(0, 2) + (KEY + struct.pack("<II", UINT32, 1)) * 2, "twice"),
    "no alignment": (ALIGNED + struct.pack("<I", 0), "general.alignment is 0"),
    "a huge alignment": (ALIGNED + struct.pack("<I", 1 << 31), "general.alignment"),
    "no dimensions": (head(1, 0) + entry(b"t", (), 0, 0), "0 dimensions"),
    "many dimensions": (head(1, 0) + text(b"t") + struct.pack("<I", 1 << 31), "dimensions"),
    "an empty dimension": (head(1, 0) + entry(b"t", (4, 0), 0, 0), "shape [0, 4]"),
    "dimensions that overflow": (head(1, 0) + entry(b"t", (1 << 63,) * 4, 0, 0), "cut short"),
    "a tensor beyond the file": (head(1, 0) + entry(b"t", (4,), 0, 1 << 62), "cut short"),
    "half a block": (head(1, 0) + entry(b"t", (33,), int(Kind.Q4_0), 0), "multiple of 32"),
    "a type of tensor that there is not": (head(1, 0) + entry(b"t", (4,), 4, 0), "unknown type 4"),
    "a tensor twice": (head(2, 0) + entry(b"t", (4,), 0, 0) * 2 + bytes(64), "twice"),
    "tensors over each other": (
        head(2, 0) + entry(b"t", (4,), 0, 0) + entry(b"u", (4,), 0, 8) + bytes(64),
        "overlaps",
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers(tmp_path: Path, name: str) -> None:
    content, message = HEADERS[name]
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    refused(file, message)


def test_a_message_quotes_nothing_that_a_terminal_obeys(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(head(0, 1) + text(b"\x1b[2J" + b"k" * 900) + struct.pack("<I", 99))
    with pytest.raises(ConfigError) as caught:
        read_gguf(file)
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 400 + len(str(file))


@pytest.mark.parametrize("kind", Kind)
def test_the_types_that_are_read_are_those_that_the_library_turns_into_numbers(kind: Kind) -> None:
    block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    if kind.name in READABLE:
        assert dequantize(block, kind).size == GGML_QUANT_SIZES[kind][0]
    else:
        with pytest.raises(NotImplementedError):
            dequantize(block, kind)
