"""Which tensor of a GGUF file becomes which tensor of the checkpoint, and its values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, dequantize

from quadriga.checkpoint.stored_forms import BLOCK_FORMS
from quadriga.gguf.header import DAMAGED, SUPPORTED, GgufHeader, TensorEntry
from quadriga.gguf.model_config import GgufModel

_KEPT = {"F16": "<u2", "BF16": "<u2", "U8": "u1"}
"""By what elements tensors are copied that stay what they are."""
PIECE_VALUES = 1 << 20
"""About so many values of a tensor are held at a time: 4 MiB as float32."""
FREQUENCIES = "rope_freqs.weight"
_STORED = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
"""Types of numbers that are kept. So are the blocks of `stored_forms`, in matrices; all others
are written as float32, which holds each of their values."""
READABLE = {
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"),
    *("Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL"),
    *("IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
}
"""Types that the library turns into numbers."""
_NUM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """One tensor to write.

    Attributes:
        name: In the checkpoint; of blocks, with their form behind it.
        source: In the GGUF file; None is zeros.
        shape: As it is written: of a matrix in blocks, [rows, bytes of a row].
        dtype: As safetensors calls it; U8 of blocks.
        rotated_head_dim: Not 0: the rows of each head of so many lie in the order of interleaved
            rotations, and go back into that of halves.
    """

    name: str
    source: TensorEntry | None
    shape: tuple[int, ...]
    dtype: str
    rotated_head_dim: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _NUM_BYTES[self.dtype]


def plan_tensors(model: GgufModel, *, keeps_blocks: bool = True) -> list[TensorCopy]:
    """Return every tensor of the checkpoint, in the order of its layers.

    Args:
        keeps_blocks: Matrices in blocks stay so; else they are written as float32.

    Raises:
        ConfigError: A tensor is missing, is of another shape than the model's sizes say, has a
            type that cannot be read, or is not known.
    """
    header = model.header
    hidden, head_dim = model.hidden_size, model.head_dim
    q_size, kv_size = model.num_heads * head_dim, model.num_kv_heads * head_dim
    rotated = head_dim if model.unpermute else 0
    unused = set(header.tensors) - {FREQUENCIES}
    copies: list[TensorCopy] = []

    def add(name: str, source: str, *shape: int, rotated: int = 0, optional: bool = False) -> None:
        unused.discard(source)
        entry = header.tensors.get(source)
        if entry is None and not optional:
            header.refuse(f"the tensor {source} is missing", DAMAGED)
        if entry is not None and entry.shape != shape:
            header.refuse(
                f"the tensor {source} has shape {list(entry.shape)}, its fields say {list(shape)}",
                DAMAGED,
            )
        dtype = "F32" if entry is None else _dtype(header, entry)
        form = BLOCK_FORMS.get(entry.kind.name) if entry is not None and keeps_blocks else None
        width = form.row_bytes(shape[1]) if form is not None and len(shape) == 2 else None
        if form is not None and width is not None:
            name, shape, dtype = f"{name}.{form.name}", (shape[0], width), "U8"
        copies.append(TensorCopy(name, entry, shape, dtype, rotated))

    add("model.embed_tokens.weight", "token_embd.weight", model.vocab_size, hidden)
    for layer in range(model.num_layers):
        to, of = f"model.layers.{layer}", f"blk.{layer}"
        add(f"{to}.input_layernorm.weight", f"{of}.attn_norm.weight", hidden)
        for letter, size, turn in (
            ("q", q_size, rotated),
            ("k", kv_size, rotated),
            ("v", kv_size, 0),
        ):
            part, source = f"{to}.self_attn.{letter}_proj", f"{of}.attn_{letter}"
            add(f"{part}.weight", f"{source}.weight", size, hidden, rotated=turn)
            if model.qkv_bias:
                add(f"{part}.bias", f"{source}.bias", size, rotated=turn, optional=True)
            if model.qk_norm and letter != "v":
                add(f"{to}.self_attn.{letter}_norm.weight", f"{source}_norm.weight", head_dim)
        add(f"{to}.self_attn.o_proj.weight", f"{of}.attn_output.weight", hidden, q_size)
        if model.out_bias:
            add(f"{to}.self_attn.o_proj.bias", f"{of}.attn_output.bias", hidden, optional=True)
        add(f"{to}.post_attention_layernorm.weight", f"{of}.ffn_norm.weight", hidden)
        for part, rows, columns in (
            ("gate", model.ffn_size, hidden),
            ("up", model.ffn_size, hidden),
            ("down", hidden, model.ffn_size),
        ):
            add(f"{to}.mlp.{part}_proj.weight", f"{of}.ffn_{part}.weight", rows, columns)
            if model.mlp_bias:
                add(f"{to}.mlp.{part}_proj.bias", f"{of}.ffn_{part}.bias", rows, optional=True)
    add("model.norm.weight", "output_norm.weight", hidden)
    if not model.is_tied:
        add("lm_head.weight", "output.weight", model.vocab_size, hidden)
    if unused:
        header.refuse(
            f"it has {len(unused)} tensors that {model.architecture} does not know, the first is "
            f"{min(unused)[:80]}",
            SUPPORTED,
        )
    return copies


def _dtype(header: GgufHeader, entry: TensorEntry) -> str:
    """How a tensor is written. Raises: ConfigError: Its type cannot be read."""
    if entry.kind.name not in READABLE:
        header.refuse(
            f"the tensor {entry.name} is of type {entry.kind.name}, which cannot be read",
            "use another quantisation",
        )
    return _STORED.get(entry.kind, "F32")


def frequency_factors(model: GgufModel) -> npt.NDArray[np.float32] | None:
    """Return what each rotation is divided by. [head_dim / 2]; None where the file has no such.

    Raises:
        ConfigError: The tensor is of another shape or type, or its values are not above 0.
    """
    header = model.header
    entry = header.tensors.get(FREQUENCIES)
    if entry is None:
        return None
    if entry.shape != (model.head_dim // 2,) or entry.kind != GGMLQuantizationType.F32:
        header.refuse(
            f"{FREQUENCIES} is {entry.kind.name} of shape {list(entry.shape)}, not F32 of "
            f"[{model.head_dim // 2}]",
            DAMAGED,
        )
    with header.file.open("rb") as stream:
        raw = b"".join(read_pieces(header, TensorCopy("", entry, entry.shape, "F32"), stream))
    values = np.frombuffer(raw, dtype="<f4")
    if not (values > 0).all():
        header.refuse(f"{FREQUENCIES} has values that are not above 0", DAMAGED)
    return values


def read_pieces(header: GgufHeader, copy: TensorCopy, stream: BinaryIO) -> Iterator[bytes]:
    """Yield a tensor's bytes as they are to be written, some rows at a time.

    Args:
        stream: The GGUF file.

    Raises:
        ConfigError: The file became shorter, or the tensor has a value that is no finite number.
        OSError: It cannot be read.
    """
    # A vector is one row: blocks may cross what would be its rows.
    num_rows, columns = copy.shape if len(copy.shape) == 2 else (1, *copy.shape)
    step = max(1, PIECE_VALUES // columns)
    if copy.rotated_head_dim:
        step = max(1, step // copy.rotated_head_dim) * copy.rotated_head_dim
    source = copy.source
    if source is not None:
        stream.seek(source.offset)
    for start in range(0, num_rows, step):
        rows = min(step, num_rows - start)
        if source is None:
            yield bytes(copy.num_bytes // num_rows * rows)
            continue
        raw = stream.read(source.num_bytes // num_rows * rows)
        if len(raw) < source.num_bytes // num_rows * rows:
            header.refuse(f"the tensor {source.name} ends early", "fetch it again")
        values = _numbers(raw, source.kind)
        if not np.isfinite(values).all():
            header.refuse(f"the tensor {source.name} holds NaN or infinity", DAMAGED)
        stored = values if copy.dtype == "F32" else np.frombuffer(raw, dtype=_KEPT[copy.dtype])
        if copy.rotated_head_dim:
            stored = _in_halves(stored, copy)
        yield stored.tobytes()


def _numbers(raw: bytes, kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Flat values of whole blocks. The library's rows are one here: it works in groups of them."""
    with np.errstate(all="ignore"):  # a damaged scale overflows; the caller looks at the result
        data = np.frombuffer(raw, dtype=np.uint8).reshape(1, -1)
        values: npt.NDArray[np.float32] = dequantize(data, kind)
    return values.reshape(-1)


def _in_halves(rows: npt.NDArray[np.generic], copy: TensorCopy) -> npt.NDArray[np.generic]:
    """Reorder the rows of each head from pairs that lie side by side to pairs half a head apart."""
    pairs = rows.reshape(-1, copy.rotated_head_dim // 2, 2, *copy.shape[1:])
    return pairs.swapaxes(1, 2)
