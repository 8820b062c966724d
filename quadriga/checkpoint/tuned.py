"""Exits, length heads and maps that lie apart from the weights they were made for.

`python -m quadriga.tune` writes such a folder. Its `tune.json` names the weights by a hash, and
nothing in it is used with others.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from quadriga.checkpoint.exits import EXITS_WEIGHTS, SKIPPED_KV_WEIGHTS
from quadriga.checkpoint.json_files import read_object
from quadriga.checkpoint.length_heads import LENGTH_WEIGHTS
from quadriga.errors import ConfigError

TUNE_FILE = "tune.json"
_SAMPLES = 512
_SAMPLE_BYTES = 4096
_NOT_WEIGHTS = frozenset({EXITS_WEIGHTS, SKIPPED_KV_WEIGHTS, LENGTH_WEIGHTS})


def weights_hash(folder: Path) -> str:
    """Hash of a checkpoint's own weights: sizes, and 512 samples of 4 KiB of every file.

    Any other training of the same model, and any other precision, has another one.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        if file.name in _NOT_WEIGHTS:
            continue
        size = file.stat().st_size
        digest.update(f"{size}:".encode())
        with file.open("rb") as handle:
            for sample in range(_SAMPLES):
                handle.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def check_pair(
    tuned: Path, weights: Path, model: str, option: str = "exits.folder", remedy: str = ""
) -> None:
    """Raises: ConfigError: The folder was not made for these weights, or says not for which."""
    said = _about(tuned)
    found = weights_hash(weights)
    if said.get("weights") != found:
        remedy = remedy or f"run `python -m quadriga.tune` on {model}"
        raise ConfigError(
            f"{option}: {tuned} was made for the weights {said.get('weights')} of "
            f"{said.get('model')}, {model} has {found}; {remedy}",
            param=option,
        )


def bundled_for(weights: Path, num_layers: int, hidden_size: int, assets: Path) -> Path | None:
    """The folder among the package's assets that was made for a checkpoint's weights, if any."""
    candidates = []
    for file in sorted(assets.glob(f"*/{TUNE_FILE}")):
        said = _about(file.parent)
        if (said.get("num_layers"), said.get("hidden_size")) == (num_layers, hidden_size):
            candidates.append((said.get("weights"), file.parent))
    if not candidates:
        return None
    found = weights_hash(weights)
    return next((folder for wanted, folder in candidates if wanted == found), None)


def _about(folder: Path) -> dict[str, Any]:
    """A folder's `tune.json`. Raises: ConfigError: There is none, or it is no JSON object."""
    if not (folder / TUNE_FILE).is_file():
        raise ConfigError(
            f"exits.folder: {folder} has no {TUNE_FILE}; `python -m quadriga.tune` writes it",
            param="exits.folder",
        )
    return read_object(folder / TUNE_FILE)
