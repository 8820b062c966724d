"""Look at safetensors without loading them: headers, sizes by arithmetic, and stray NaNs.

A file is `u64 header size | JSON header | tensors`; the header says where every tensor lies, so a
file that was cut short is known by its size, and a tensor's bytes by its shape and dtype.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.checkpoint.json_files import GARBLED, read_object
from quadriga.checkpoint.stored_forms import BLOCK_FORMS, split_name
from quadriga.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_EXPONENTS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""All ones in these bits is a NaN or an infinity."""
_SCAN_BYTES = 1 << 24
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor: where its bytes lie in which file.

    Attributes:
        name: Without the form of its blocks.
        dtype: As safetensors calls it, or the name of the form of its blocks.
        shape: In numbers.
        offset: From the start of the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)


def read_header(file: Path) -> list[TensorPlace]:
    """Return the tensors of one safetensors file, after checking its arithmetic.

    Raises:
        ConfigError: The file cannot be read, is no safetensors, was cut short or has more bytes
            than its header says, or holds a tensor that is no float or whose bytes do not fit its
            shape.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head_bytes = int.from_bytes(stream.read(8), "little")
            if size < 8 or head_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise _broken(file, f"a header of {head_bytes} bytes does not fit {size} bytes")
            header = json.loads(stream.read(head_bytes))
    except (OSError, ValueError, RecursionError) as exc:
        raise _broken(file, str(exc)) from exc
    if not isinstance(header, dict):
        raise _broken(file, "its header is no JSON object")
    start = 8 + head_bytes
    places = [
        _place(file, name, entry, start) for name, entry in header.items() if name != "__metadata__"
    ]
    end = max((p.offset + p.num_bytes for p in places), default=start)
    if end != size:
        what = "was cut short" if size < end else "has bytes that no tensor owns"
        raise ConfigError(
            f"model: {file} {what}: its header wants {end} bytes, it has {size}; fetch it again",
            param="model",
        )
    return places


def _place(file: Path, name: str, entry: Any, start: int) -> TensorPlace:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        first, stop = (int(n) for n in entry["data_offsets"])
    except GARBLED as exc:
        raise _broken(file, f"the header's entry of {name} lacks {exc}") from exc
    base, form = split_name(name)
    if form is not None and dtype == "U8" and len(shape) == 2:
        columns = form.columns(shape[1])
        is_sized = stop - first == math.prod(shape)
        if columns is None or not is_sized or min((first, *shape)) < 0:
            raise _broken(file, f"{name} of {list(shape)} bytes is no matrix in blocks")
        return TensorPlace(base, file, form.name, (shape[0], columns), start + first, stop - first)
    if dtype not in _DTYPE_BYTES:
        raise ConfigError(
            f"model: {file}: tensor {name} is {dtype}; only float weights "
            f"({', '.join(_DTYPE_BYTES)}) are served",
            param="model",
        )
    is_sized = stop - first == math.prod(shape) * _DTYPE_BYTES[dtype]
    if not is_sized or min((first, *shape)) < 0:
        raise _broken(file, f"{name} of shape {list(shape)} cannot take bytes {first}..{stop}")
    return TensorPlace(name, file, dtype, shape, start + first, stop - first)


def read_checkpoint_headers(path: Path) -> dict[str, TensorPlace]:
    """Return every tensor of a checkpoint by name, of one file or of the index's shards.

    Raises:
        ConfigError: There are no safetensors, a shard is missing, a shard lacks a tensor that the
            index puts there, or a file is damaged.
    """
    index = path / INDEX_FILE
    if (path / SINGLE_FILE).is_file():  # an index beside it is of shards that were there before
        return {p.name: p for p in read_header(path / SINGLE_FILE)}
    if not index.is_file():
        raise ConfigError(
            f"model: {path} holds neither {SINGLE_FILE} nor {INDEX_FILE}; save the model with "
            "safe_serialization=True",
            param="model",
        )
    stored = read_index(index)
    names = {split_name(name)[0]: shard for name, shard in stored.items()}
    places: dict[str, TensorPlace] = {}
    for shard in sorted(set(names.values())):
        if not (path / shard).is_file():
            raise ConfigError(
                f"model: {path} lacks the shard {shard} that its index names", param="model"
            )
        places |= {p.name: p for p in read_header(path / shard) if names.get(p.name) == shard}
    missing = sorted(set(names) - set(places))
    if missing:
        raise _broken(index, f"its shards lack {len(missing)} tensors, the first is {missing[0]}")
    return places


def read_index(file: Path) -> dict[str, str]:
    """Return the shard of each stored tensor, as `INDEX_FILE` lists them.

    Raises:
        ConfigError: It is no index, or names a file outside its folder.
    """
    content = read_object(file)
    try:
        shards = {str(name): str(shard) for name, shard in content["weight_map"].items()}
    except GARBLED as exc:
        raise _broken(file, f"it is no weight index ({exc})") from exc
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:
            raise _broken(file, f"it points outside its folder: {shard!r}")
    return shards


def layer_of(name: str) -> int | None:
    """The layer a tensor belongs to, from 0; None for embedding, norm and head."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def num_layers_in(names: Iterable[str]) -> int:
    """Layers that have tensors, counted without gaps from the first."""
    layers = {layer for name in names if (layer := layer_of(name)) is not None}
    count = 0
    while count in layers:
        count += 1
    return count


def check_finite(places: Iterable[TensorPlace], *, whole_below_bytes: int) -> None:
    """Look for NaNs and infinities: everywhere in small checkpoints, else in vectors alone.

    Norms and biases are a thousandth of a large model; a training that diverged has them there
    too. What only some matrix holds is found when its layer is loaded.

    Args:
        whole_below_bytes: Checkpoints up to this size are read whole.

    Raises:
        ConfigError: Naming the first tensor that is not finite.
    """
    all_places = sorted(places, key=lambda p: (p.file.name, p.offset))
    is_small = sum(p.num_bytes for p in all_places) <= whole_below_bytes
    for place in all_places:
        if (is_small or len(place.shape) <= 1) and not _is_finite(place):
            raise ConfigError(
                f"model: {place.file}: tensor {place.name} holds NaN or infinite values; the "
                "checkpoint cannot be served",
                param="model",
            )


def _is_finite(place: TensorPlace) -> bool:
    form = BLOCK_FORMS.get(place.dtype)
    for raw in _chunks(place, 1 if form is None else form.num_bytes):
        if form is not None:
            blocks = np.frombuffer(raw, dtype=np.uint8).reshape(-1, form.num_bytes)
            scales = np.ascontiguousarray(blocks[:, : 2 * form.num_scales]).view("<f2")
            if not np.isfinite(scales).all():
                return False
            continue
        if place.dtype == "F64":
            if not np.isfinite(np.frombuffer(raw, dtype="<f8")).all():
                return False
            continue
        kind, mask = _EXPONENTS[place.dtype]
        bits = np.frombuffer(raw, dtype=np.dtype(kind).newbyteorder("<"))
        if ((bits & mask) == mask).any():
            return False
    return True


def _chunks(place: TensorPlace, unit: int) -> Iterator[bytes]:
    """The tensor's bytes, in pieces of whole units."""
    most = _SCAN_BYTES // unit * unit
    try:
        with place.file.open("rb") as stream:
            stream.seek(place.offset)
            left = place.num_bytes
            while left:
                raw = stream.read(min(left, most))
                if len(raw) < min(left, most):
                    raise OSError("it ends early")
                left -= len(raw)
                yield raw
    except OSError as exc:
        raise _broken(place.file, str(exc)) from exc


def _broken(file: Path, why: str) -> ConfigError:
    return ConfigError(f"model: {file} cannot be served: {why}", param="model")
