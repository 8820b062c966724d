"""Look a checkpoint over before anyone relies on it: all that can be seen without loading it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from quadriga.catalogue.headers import (
    TensorPlace,
    check_finite,
    layer_of,
    num_layers_in,
    read_checkpoint_headers,
    read_header,
)
from quadriga.catalogue.records import CatalogueModel
from quadriga.catalogue.sizes import ModelSizes, sizes_of
from quadriga.checkpoint.exits import EXITS_WEIGHTS, ExitSpec
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.checkpoint.json_files import read_limited, read_object
from quadriga.checkpoint.quantisation import read_quantisation
from quadriga.errors import ConfigError

WHOLE_SCAN_BYTES = 256 << 20
"""Checkpoints up to this size are searched for NaNs whole, larger ones in norms and biases."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_UNREAD_TOKENIZER_KEYS = ("truncation", "padding")


def inspect(model: str, *, cache_dir: str | None = None) -> CatalogueModel:
    """Read one checkpoint's facts and check its files.

    Args:
        model: Bundled id, folder, GGUF file, or hub id.
        cache_dir: See `quadriga.checkpoint.folder.locate`.

    Raises:
        ConfigError: A file is missing, damaged or cut short, tensors do not fit the
            configuration, a weight is not a number, an exit lacks its weights.
    """
    checkpoint = read_checkpoint(model, cache_dir=cache_dir)
    path = checkpoint.path
    config = read_object(path / "config.json")
    sizes = sizes_of(config, checkpoint.exits)
    tensors: dict[str, TensorPlace] = {}
    if read_quantisation(path) is None:  # those that are have other tensors
        tensors = read_checkpoint_headers(path)
        _check_layers(path, tensors, sizes)
    extra = exit_tensors(checkpoint.heads_path, checkpoint.exits)
    check_finite([*tensors.values(), *extra], whole_below_bytes=WHOLE_SCAN_BYTES)
    return CatalogueModel(
        id=checkpoint.id,
        source=checkpoint.source,
        architecture=checkpoint.architecture,
        vocab_size=checkpoint.vocab_size,
        tokenizer=tokenizer_fingerprint(path),
        sizes=replace(sizes, exit_params=_exit_params(extra, checkpoint.exits)),
        exits=checkpoint.exits,
    )


def _check_layers(path: Path, tensors: dict[str, TensorPlace], sizes: ModelSizes) -> None:
    held = num_layers_in(tensors)
    if held < sizes.num_layers:
        raise ConfigError(
            f"model: {path}: config.json says {sizes.num_layers} layers, the weights hold {held}",
            param="model",
        )
    values = [0] * sizes.num_layers
    for place in tensors.values():
        layer = layer_of(place.name)
        if layer is not None and layer < sizes.num_layers:
            values[layer] += place.num_values
    for layer, (found, wanted) in enumerate(zip(values, sizes.layer_params, strict=True)):
        if found < wanted:
            raise ConfigError(
                f"model: {path}: layer {layer} holds {found} values, its config.json wants "
                f"{wanted}; weights and configuration are of different models",
                param="model",
            )
    outside = sum(p.num_values for p in tensors.values() if layer_of(p.name) is None)
    wanted = sizes.embed_params + sizes.head_params
    if outside < wanted:
        raise ConfigError(
            f"model: {path}: embedding and head hold {outside} values, config.json wants {wanted}",
            param="model",
        )


def exit_tensors(path: Path, exits: ExitSpec) -> list[TensorPlace]:
    """The weights of exits, where they have any. Raises: ConfigError: Some are not there."""
    if exits.kind == "shared" or not exits.layers:
        return []
    if not (path / EXITS_WEIGHTS).is_file():
        raise ConfigError(
            f"model: {path} has exits of kind {exits.kind!r} but no {EXITS_WEIGHTS}", param="model"
        )
    tensors = read_header(path / EXITS_WEIGHTS)
    names = {t.name for t in tensors}
    for layer in exits.layers:
        for part in exits.parts:
            if f"exits.{layer}.{part}" not in names:
                raise ConfigError(
                    f"model: {path / EXITS_WEIGHTS} lacks exits.{layer}.{part}", param="model"
                )
    return tensors


def _exit_params(tensors: list[TensorPlace], exits: ExitSpec) -> tuple[tuple[int, int], ...]:
    """What each exit's tensors hold, by its layer; see `ModelSizes.exit_params`."""
    held = {layer: f"exits.{layer}." for layer in exits.layers}
    counts = (
        (layer, sum(t.num_values for t in tensors if t.name.startswith(prefix)))
        for layer, prefix in held.items()
    )
    return tuple((layer, count) for layer, count in counts if count)


def tokenizer_fingerprint(path: Path) -> str:
    """Hash of what turns text into ids; equal for models that may share requests.

    Raises:
        ConfigError: The folder has no tokenizer, or one that is no JSON or too large.
    """
    for name in _TOKENIZER_FILES:
        file = path / name
        if file.is_file():
            return hashlib.sha256(_essence(file)).hexdigest()[:16]
    raise ConfigError(
        f"model: {path} has no tokenizer ({', '.join(_TOKENIZER_FILES)})", param="model"
    )


def _essence(file: Path) -> bytes:
    raw = read_limited(file)
    if file.suffix != ".json":
        return raw
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"model: {file} is no JSON: {exc}", param="model") from exc
    if isinstance(data, dict):
        data = {k: v for k, v in data.items() if k not in _UNREAD_TOKENIZER_KEYS}
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
