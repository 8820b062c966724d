"""Exits that are a linear head each, in one file: DSSD's `aux_heads.pt`, and heads by layer.

Source: the layout of fvalade's DSSD demo (`src/inference.py`, `src/model_config.py`): a module list
of heads, each a norm of the model's kind or none and a linear layer without bias; `config.json`
beside it has `head_layer_indices`, from 0, whose output each head reads.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from quadriga.checkpoint.exits import ExitSpec
from quadriga.checkpoint.folder import Checkpoint
from quadriga.checkpoint.json_files import GARBLED, read_object
from quadriga.errors import ConfigError

DSSD_FILE = "aux_heads.pt"
_HEAD = re.compile(r"(?:.*\.)?(\d+)\.(?:linear\.|head\.)?weight")
_NORM = re.compile(r"(?:.*\.)?(\d+)\.norm\.weight")
DAMAGED = (
    *GARBLED,
    OSError,
    RuntimeError,
    SafetensorError,
    UnpicklingError,
    EOFError,
    AssertionError,
    struct.error,
)
"""What reading tensors out of a file raises that is damaged, or something else."""


def reason(exc: BaseException) -> str:
    """What it says, in a line."""
    return f"{(str(exc) or repr(exc)).splitlines()[0]:.300}"


def read_dssd(path: Path, checkpoint: Checkpoint) -> tuple[ExitSpec, dict[str, torch.Tensor]]:
    """Read `aux_heads.pt` (or its folder) and the `config.json` beside it.

    Raises:
        ConfigError: A file is missing, damaged, or of another model.
    """
    file = path / DSSD_FILE if path.is_dir() else path
    config = read_object(file.parent / "config.json")
    indices = config.get("head_layer_indices")
    if not isinstance(indices, list) or not all(type(i) is int for i in indices):
        raise ConfigError(
            f"--import: {file.parent / 'config.json'} has no head_layer_indices, a list of layers",
            param="import",
        )
    heads, norms = _sorted(load_tensors(file), file)
    if set(heads) != set(range(len(indices))):
        raise ConfigError(
            f"--import: {file} holds heads {sorted(heads)}, its config.json names {len(indices)}",
            param="import",
        )
    depths = {number: index + 1 for number, index in enumerate(indices)}
    return _exits(heads, norms, depths, checkpoint, file)


def read_linear(
    path: Path, checkpoint: Checkpoint, layers: tuple[int, ...]
) -> tuple[ExitSpec, dict[str, torch.Tensor]]:
    """Read a head per layer: `I.weight` (or `I.linear.weight`), perhaps with `I.norm.weight`.

    Args:
        path: `.safetensors`, or a file of torch that holds a dict of tensors.
        layers: Layers run before each head, in the order of I; empty: I counts layers from 0, and
            its head reads the output of layer I.

    Raises:
        ConfigError: It cannot be read, or has another number of heads than layers were named.
    """
    heads, norms = _sorted(load_tensors(path), path)
    if layers and len(layers) != len(heads):
        raise ConfigError(
            f"--layers: {len(layers)} were named, {path} holds {len(heads)} heads", param="layers"
        )
    named = layers or tuple(index + 1 for index in sorted(heads))
    depths = dict(zip(sorted(heads), named, strict=True))
    if not layers:  # a head behind the last layer is the model's own place
        depths = {i: k for i, k in depths.items() if k < checkpoint.num_layers}
    return _exits(heads, norms, depths, checkpoint, path)


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Tensors by name, of safetensors or of torch. Raises: ConfigError: It is neither."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except DAMAGED as exc:
        raise ConfigError(
            f"--import: {file} cannot be read as tensors alone: {reason(exc)}", param="import"
        ) from exc
    if isinstance(found, list | tuple):
        found = {f"{i}.weight": tensor for i, tensor in enumerate(found)}
    if not isinstance(found, Mapping) or not all(
        isinstance(value, torch.Tensor) for value in found.values()
    ):
        raise ConfigError(f"--import: {file} holds no dict of tensors", param="import")
    return {str(name): value for name, value in found.items()}


def _sorted(
    tensors: Mapping[str, torch.Tensor], file: Path
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Heads and norms by their numbers. Raises: ConfigError: There is anything else."""
    heads: dict[int, torch.Tensor] = {}
    norms: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if found := _NORM.fullmatch(name):
            norms[int(found[1])] = tensor
        elif (found := _HEAD.fullmatch(name)) and tensor.ndim == 2:
            heads[int(found[1])] = tensor
        else:
            raise ConfigError(
                f"--import: {file} holds {name} of shape {list(tensor.shape)}, which is neither a "
                "linear head without bias nor an RMS norm",
                param="import",
            )
    if not heads or (norms and norms.keys() != heads.keys()):
        raise ConfigError(
            f"--import: {file} has heads {sorted(heads)} and norms {sorted(norms)}; it must have "
            "heads, and norms for all or none",
            param="import",
        )
    return heads, norms


def _exits(
    heads: Mapping[int, torch.Tensor],
    norms: Mapping[int, torch.Tensor],
    depths: Mapping[int, int],
    checkpoint: Checkpoint,
    file: Path,
) -> tuple[ExitSpec, dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    for number, depth in depths.items():
        head = heads[number]
        if head.shape[0] != checkpoint.vocab_size:
            raise ConfigError(
                f"--import: head {number} of {file} has {head.shape[0]} rows, {checkpoint.id} a "
                f"vocabulary of {checkpoint.vocab_size}",
                param="import",
            )
        tensors[f"exits.{depth}.head.weight"] = head
        if norms:
            tensors[f"exits.{depth}.norm.weight"] = norms[number]
    return ExitSpec(tuple(sorted(depths.values())), "head", has_norm=bool(norms)), tensors
