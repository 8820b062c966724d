"""Exits that other projects trained, read out of their checkpoints.

Pickled files are read with `weights_only` alone: tensors and plain values, no code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from quadriga.checkpoint.exits import ExitSpec
from quadriga.checkpoint.folder import Checkpoint, read_checkpoint
from quadriga.errors import ConfigError
from quadriga.tune.importers.ee_llm import read_ee_llm
from quadriga.tune.importers.head_files import read_dssd, read_linear
from quadriga.tune.importers.split_layers import write_split

LAYERSKIP_EXITS = 3
BACKBONE = "backbone"


@dataclass(frozen=True, slots=True)
class ImportedExits:
    """Exits of another project.

    Attributes:
        tensors: By their names in `exits.safetensors`; none where the model's own head speaks.
        model: Whose exits they are: the backbone, or what was written instead of it because the
            exits are in the middle of layers.
    """

    spec: ExitSpec
    tensors: dict[str, torch.Tensor]
    model: str


def import_exits(
    name: str,
    path: Path,
    checkpoint: Checkpoint,
    layers: tuple[int, ...] = (),
    out: Path | None = None,
) -> ImportedExits:
    """Read exits, ready for `quadriga.tune.folder`.

    Args:
        name: `layerskip`, `ee-llm`, `dssd` or `linear`.
        path: Their checkpoint; of no meaning for `layerskip`.
        checkpoint: That they belong to.
        layers: For `layerskip` and `linear`, layers run before each exit; else they are known.
        out: Where to write another backbone, if it takes one.

    Raises:
        ConfigError: They cannot be read, do not fit the model, or compute what is not supported.
    """
    model = checkpoint.source or str(checkpoint.path)
    if name == "layerskip":
        return ImportedExits(layerskip(checkpoint, layers), {}, model)
    if layers and name != "linear":
        raise ConfigError(f"--layers: {name} says its layers itself; leave it out", param="layers")
    if name == "dssd":
        spec, tensors = read_dssd(path, checkpoint)
    elif name == "linear":
        spec, tensors = read_linear(path, checkpoint, layers)
    else:
        found = read_ee_llm(path, checkpoint)
        spec, tensors = found.spec, found.tensors
        if found.divided:
            folder = write_split(checkpoint, found.divided, (out or path) / BACKBONE)
            checkpoint = read_checkpoint(str(folder), heads="own")
            model = str(folder)
    _check(spec, tensors, checkpoint, path)
    return ImportedExits(spec, tensors, model)


def layerskip(checkpoint: Checkpoint, layers: tuple[int, ...]) -> ExitSpec:
    """The model's own norm and head after a few layers, as LayerSkip trains for.

    Source: LayerSkip (arXiv 2404.16710), one norm and head for all layers. It can be left after
    every layer; each exit is tested for each token, so a quarter, a half and three quarters are
    what we take, and which of them pay is for the thresholds to say.
    """
    count = checkpoint.num_layers
    shares = [i / (LAYERSKIP_EXITS + 1) for i in range(1, LAYERSKIP_EXITS + 1)]
    usual = {round(count * share) for share in shares}
    return ExitSpec(tuple(sorted(layers or (k for k in usual if 0 < k < count))), "shared")


def _check(
    spec: ExitSpec, tensors: dict[str, torch.Tensor], checkpoint: Checkpoint, path: Path
) -> None:
    """Raises: ConfigError: The exits do not fit the model."""
    outside = [k for k in spec.layers if not 0 < k < checkpoint.num_layers]
    if outside or not spec.layers:
        raise ConfigError(
            f"--import: {path} has exits after layers {list(spec.layers)}; {checkpoint.id} can be "
            f"left after 1..{checkpoint.num_layers - 1}",
            param="import",
        )
    for name, tensor in tensors.items():
        width = tensor.shape[:1] if name.endswith("mlp.down.weight") else tensor.shape[-1:]
        if width != (checkpoint.hidden_size,) or not bool(tensor.isfinite().all()):
            raise ConfigError(
                f"--import: {name} of {path} has shape {list(tensor.shape)}, or values that are "
                f"not finite; {checkpoint.id} has a hidden size of {checkpoint.hidden_size}",
                param="import",
            )
