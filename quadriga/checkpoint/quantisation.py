"""What a checkpoint's `quantization_config` says about its matrices.

Read are the layouts of compressed-tensors, GPTQ, AWQ and FP8; which module was left alone is seen
by its tensors. Calibration, activations and KV caches are no business of the weights: what is said
about those is not read.

Sources: the compressors of `compressed-tensors`, `AutoGPTQ` and `GPTQModel` (a checkpoint format
`gptq` stores zero points less one, `gptq_v2` as they are), `AutoAWQ`, and the FP8 integration of
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quadriga.checkpoint.json_files import GARBLED, read_object
from quadriga.errors import ConfigError

Method = Literal["compressed-tensors", "gptq", "awq", "fp8"]
METHODS = ("compressed-tensors", "gptq", "awq", "fp8")
_PACKED_BITS = {"compressed-tensors": (2, 4, 8), "gptq": (2, 4, 8), "awq": (4,)}
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How matrices were quantised.

    Attributes:
        bits: Of a weight that is an integer.
        group_size: Weights along a row that share a scale; None: all of them, or what the scales'
            shape says.
        block: Rows and columns that share a scale, FP8 alone.
        adds_one: Zero points are stored less one, GPTQ alone.
    """

    method: Method
    bits: int = 8
    group_size: int | None = None
    block: tuple[int, int] = _BLOCK
    adds_one: bool = False


def read_quantisation(folder: Path) -> Quantisation | None:
    """Return how the checkpoint in a folder is quantised; None where it is not.

    Raises:
        ConfigError: In a way that is not read; the message says which field.
    """
    if not (folder / "config.json").is_file():
        return None
    return quantisation_of(read_object(folder / "config.json"), folder.name)


def quantisation_of(config: Mapping[str, Any], name: str) -> Quantisation | None:
    """Return what a `config.json` says. Raises: ConfigError as `read_quantisation`.

    Args:
        name: Of the model, for messages.
    """
    raw = config.get("quantization_config")
    if not raw:
        return None
    try:
        method = str(raw["quant_method"])
        if method not in METHODS:
            raise _unread(name, "quant_method", method, ", ".join(METHODS))
        if method == "compressed-tensors":
            return _compressed_tensors(raw, name)
        if method == "fp8":
            rows, columns = raw.get("weight_block_size") or _BLOCK
            return Quantisation("fp8", block=(_whole(rows), _whole(columns)))
        bits, group = int(raw["bits"]), int(raw.get("group_size", -1))
        if bits not in _PACKED_BITS[method]:
            raise _unread(name, "bits", bits, _PACKED_BITS[method])
        if method == "awq":
            version = str(raw.get("version", raw.get("format", "gemm"))).lower()
            if version != "gemm":
                raise _unread(name, "version", version, "gemm")
            return Quantisation("awq", bits, _group(group))
        stored_as = str(raw.get("checkpoint_format") or raw.get("format") or "gptq")
        if stored_as not in ("gptq", "gptq_v2"):
            raise _unread(name, "checkpoint_format", stored_as, "gptq, gptq_v2")
        return Quantisation("gptq", bits, _group(group), adds_one=stored_as == "gptq")
    except GARBLED as exc:
        raise ConfigError(
            f"model: {name} has quantised weights, and quantization_config in its config.json "
            f"lacks or garbles a field: {type(exc).__name__} {exc}",
            param="model",
        ) from exc


def _compressed_tensors(raw: Mapping[str, Any], name: str) -> Quantisation:
    for turned in ((raw.get("transform_config") or {}).get("config_groups") or {}).values():
        for place in (str(apply["location"]) for apply in turned["apply"]):
            if not place.startswith("weight"):
                raise _unread(name, "transform_config", place, "rotations of weights alone")
    # A group without weights is of activations or of KV alone.
    groups = [group for group in raw["config_groups"].values() if group.get("weights")]
    if not groups:
        raise _unread(name, "config_groups", groups, "one group at least")
    schemes = []
    for group in groups:
        stored_as = str(group.get("format") or raw.get("format"))
        if stored_as not in _FORMATS:
            raise _unread(name, "format", stored_as, ", ".join(_FORMATS))
        weights = group["weights"]
        bits = int(weights["num_bits"])
        kinds = {"int": _PACKED_BITS["compressed-tensors"], "float": (8,)}
        if bits not in kinds[str(weights["type"])]:
            raise _unread(name, "num_bits", bits, kinds[str(weights["type"])])
        block = weights.get("block_structure") or _BLOCK
        block = block.split("x") if isinstance(block, str) else block  # as older releases wrote it
        size = int(weights.get("group_size") or -1)
        blocks = (_whole(block[0]), _whole(block[1]))
        schemes.append(Quantisation("compressed-tensors", bits, _group(size), blocks))
    if len(set(schemes)) > 1:
        raise _unread(
            name, "config_groups", f"{len(schemes)} different ones", "one kind of weights"
        )
    return schemes[0]


def _group(size: int) -> int | None:
    return None if size == -1 else _whole(size)


def _whole(value: Any) -> int:
    if int(value) < 1:
        raise ValueError(f"{value!r} is no size")
    return int(value)


def _unread(name: str, field: str, value: object, known: object) -> ConfigError:
    return ConfigError(
        f"model: {name} has quantised weights with {field} {value!r} in quantization_config; "
        f"read are {known}. Give the unquantised checkpoint, or one of these",
        param="model",
    )
