"""Exits that other projects trained, read out of their checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from quadriga.checkpoint.exits import ExitSpec
from quadriga.errors import ConfigError

Imported = tuple[ExitSpec, dict[str, torch.Tensor]]


def import_exits(name: str, path: Path, model: str, layers: tuple[int, ...]) -> Imported:
    """Read exits.

    Args:
        name: `layerskip`, `ee-llm`, `dssd` or `linear`.
        path: Their checkpoint; none for `layerskip`, whose exits are the model's own head.
        model: That they belong to, as `quadriga.LLM` takes it.
        layers: Those to take, where the checkpoint does not say; else a check.

    Raises:
        ConfigError: They cannot be read, or do not fit the model.
    """
    raise ConfigError(f"--import: {name} is not known", param="import")
