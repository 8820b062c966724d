"""The folder that tuning writes: exits, maps and length heads, and for which weights they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from quadriga.checkpoint.exits import (
    EXITS_FILE,
    EXITS_WEIGHTS,
    SKIPPED_KV_WEIGHTS,
    ExitSpec,
    read_exits,
    to_json,
)
from quadriga.checkpoint.folder import Checkpoint
from quadriga.checkpoint.tuned import TUNE_FILE, check_pair, weights_hash
from quadriga.errors import ConfigError
from quadriga.files import write_atomically


class TuneFolder:
    """One such folder, for one checkpoint.

    Args:
        path: Made where it is not there.

    Raises:
        ConfigError: It was made for other weights.
    """

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self.path = path
        self._checkpoint = checkpoint
        path.mkdir(parents=True, exist_ok=True)
        if (path / TUNE_FILE).is_file():
            check_pair(path, checkpoint.path, checkpoint.id, "--out", "name another folder")
        else:
            self.say({})

    def say(self, made: Mapping[str, Any]) -> None:
        """Write for which weights this is, and how it was made."""
        checkpoint = self._checkpoint
        about = {
            "model": checkpoint.id,
            "weights": weights_hash(checkpoint.path),
            "num_layers": checkpoint.num_layers,
            "hidden_size": checkpoint.hidden_size,
            **made,
        }
        write_atomically(self.path / TUNE_FILE, (json.dumps(about, indent=2) + "\n").encode())

    @property
    def exits(self) -> ExitSpec:
        """Those that are stored. Raises: ConfigError: The file cannot be right."""
        return read_exits(self.path, self._checkpoint.num_layers)

    def save_exits(self, spec: ExitSpec, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Store the exits, with their weights if they have any, in place of others."""
        if tensors is None:
            (self.path / EXITS_WEIGHTS).unlink(missing_ok=True)
        else:
            save_halves(self.path / EXITS_WEIGHTS, tensors)
        write_atomically(
            self.path / EXITS_FILE, (json.dumps(to_json(spec), indent=2) + "\n").encode()
        )

    def take_exits(self, spec: ExitSpec, source: Path) -> None:
        """Store some of another folder's exits, with their weights where it has some."""
        names = tuple(f"exits.{depth}." for depth in spec.layers)
        file = source / EXITS_WEIGHTS
        tensors = load_file(file) if file.is_file() else None
        if tensors is not None:
            tensors = {name: t for name, t in tensors.items() if name.startswith(names)}
        self.save_exits(spec, tensors)


def save_maps(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Store the maps for skipped KV in a checkpoint's folder or a folder of tuning.

    They replace those that are there; without tensors the file is removed.
    """
    if tensors:
        save_halves(folder / SKIPPED_KV_WEIGHTS, tensors)
    else:
        (folder / SKIPPED_KV_WEIGHTS).unlink(missing_ok=True)


def save_halves(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Store tensors in fp16; the file is replaced as a whole.

    Raises:
        ConfigError: A value does not fit.
    """
    halves = {name: t.detach().to(torch.float16).cpu().contiguous() for name, t in tensors.items()}
    for name, half in halves.items():
        if not bool(half.isfinite().all()):
            largest = float(tensors[name].detach().abs().max())
            raise ConfigError(f"{file.name}: {name} does not fit fp16: it has {largest:g}")
    write_atomically(file, save(halves, metadata={"format": "pt"}))
