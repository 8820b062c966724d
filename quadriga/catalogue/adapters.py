"""LoRA adapters in PEFT's format: what their JSON and headers say, before anything is loaded.

An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`; its name is the
model id by which requests choose it. It adds `scale · B · A · x` to some projections of a model.

Source: LoRA, Hu et al. 2021, §4.1; the files are those of Hugging Face's PEFT.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

from quadriga.catalogue.headers import TensorPlace, read_header
from quadriga.checkpoint.json_files import read_object
from quadriga.core.adapters import Adapter
from quadriga.core.request import AUTO_MODEL
from quadriga.errors import ConfigError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_ADAPTERS = 256
MAX_RANK, MAX_ALPHA = 512, 1e6
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj")
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj", "fc1", "fc2")
"""Projections of the native families that an adapter may change."""
_STACKED = {"q_proj": 3, "k_proj": 3, "v_proj": 3, "gate_proj": 2, "up_proj": 2}
"""Projections of one matrix in memory, over all of whose rows each B of them reaches there."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.)?(?:decoder\.)?layers\.(\d{1,4})\."
    r"(?:(?:self_attn|mlp)\.)?(\w+)\.lora_([AB])\.weight"
)
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the base as well
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("use_dora", (None, False), "DoRA scales the weights themselves"),
    ("bias", (None, "none"), "biases stay the model's"),
    ("modules_to_save", (None, []), "whole modules are not exchanged"),
    ("fan_in_fan_out", (None, False), "weights are [out, in]"),
    ("rank_pattern", (None, {}), "all projections have one rank"),
    ("alpha_pattern", (None, {}), "all projections have one scale"),
    ("lora_bias", (None, False), "the products have no bias"),
    ("trainable_token_indices", (None, []), "the embedding stays the model's"),
    ("layer_replication", (None, []), "layers are not repeated"),
    ("use_qalora", (None, False), "only plain LoRA is served"),
    ("alora_invocation_tokens", (None, []), "an adapter acts on every token"),
    ("init_lora_weights", _INITS, "it is for a base of other weights; save it converted to LoRA"),
)
"""Fields of `adapter_config.json`, the values that are served, and why no other is."""


def read_adapters(folder: str | Path) -> tuple[Adapter, ...]:
    """Read the adapters in a folder, by name; a folder without adapters in it has none.

    Raises:
        ConfigError: The folder is not there, or one of them cannot be served: says which, and why.
    """
    root = Path(folder).expanduser().resolve()
    if not root.is_dir():
        raise ConfigError(
            f"adapters: {root} is no folder; name one that holds a folder for each adapter",
            param="adapters",
        )
    if (root / CONFIG_FILE).is_file():
        raise ConfigError(
            f"adapters: {root} is an adapter itself; name the folder that it is in",
            param="adapters",
        )
    paths = sorted(path for path in root.iterdir() if (path / CONFIG_FILE).is_file())
    if len(paths) > MAX_ADAPTERS:
        raise ConfigError(
            f"adapters: {root} holds {len(paths)} adapters, above the limit of {MAX_ADAPTERS}",
            param="adapters",
        )
    return tuple(read_adapter(path) for path in paths)


def read_adapter(path: Path) -> Adapter:
    """Read one. Raises: ConfigError: It cannot be served."""
    name, config = path.name, read_object(path / CONFIG_FILE)
    if not _NAME.fullmatch(name) or name == AUTO_MODEL:
        raise _refusal(path, "its name must be of letters, digits, `_`, `.` and `-`, 128 at most")
    if config.get("peft_type") != "LORA":
        raise _refusal(path, f"peft_type is {config.get('peft_type')!r:.40}; only LORA is served")
    for field, served, why in _REFUSED:
        if config.get(field) not in served:
            raise _refusal(path, f"{field} is {config[field]!r:.60}, which is not served: {why}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise _refusal(path, f"r is {rank!r:.40}; it must be a whole number in 1..{MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise _refusal(path, f"lora_alpha is {alpha!r:.40}; it must be a number in ±{MAX_ALPHA:g}")
    if not (path / WEIGHTS_FILE).is_file():
        raise _refusal(path, f"it lacks {WEIGHTS_FILE}; pickled weights are not loaded")
    places = read_header(path / WEIGHTS_FILE)
    num_values = 0
    for place in places:
        _, target, kind = target_of(place, path, rank)
        num_values += place.num_values * (_STACKED.get(target, 1) if kind == "B" else 1)
    if not places:
        raise _refusal(path, f"{WEIGHTS_FILE} holds no tensors")
    return Adapter(
        name,
        path,
        rank,
        float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank),
        _digest(path),
        4 * num_values,
    )


def target_of(place: TensorPlace, path: Path, rank: int) -> tuple[int, str, str]:
    """Layer, projection and "A" or "B" of a tensor.

    Raises:
        ConfigError: It changes what is not served, or has another rank.
    """
    match = _TENSOR.fullmatch(place.name)
    if match is None or match[2] not in TARGETS:
        raise _refusal(
            path,
            f"tensor {place.name:.120} is none of a layer's projections ({', '.join(TARGETS)})",
        )
    matrix_rank = place.shape[0 if match[3] == "A" else -1] if len(place.shape) == 2 else None
    if matrix_rank != rank:
        raise _refusal(
            path, f"tensor {place.name:.120} has shape {list(place.shape)}, not rank {rank}"
        )
    return int(match[1]), match[2], match[3]


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (path / name).open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()[:32]


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"adapters: {path} cannot be served: {why}", param="adapters")
