"""Exits of EE-LLM and EE-Tuning, from checkpoints in Megatron's layout.

    ROOT/latest_checkpointed_iteration.txt, ROOT/iter_0000001/mp_rank_TT[_PPP]/model_optim_rng.pt

Each file holds one tensor-parallel rank of one pipeline stage: `args` (a namespace) and
`model.language_model`, with `encoder` (`layers.I.exit_norm.weight`, I from 0 in the stage) and
`exit_output_layer` (`J.weight`, the J-th exit of the stage, rows divided among the ranks).
`args.exit_layer_nums` counts layers from 1; with `pre_exit` the exit is before that layer.

With `use_exit_mlp` an exit leaves in the middle of its layer: it adds its own MLP, instead of the
layer's, to the state behind the layer's attention. No state between layers has that, so such exits
are refused; `quadriga.tune --kind mlp` trains exits that read the state between layers.

Source: pan-x-c/EE-LLM: `megatron/checkpointing.py`, `megatron/model/transformer.py`
(EarlyExitTransformerLayer), `megatron/model/language_model.py`, `tools/checkpoint/`.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quadriga.checkpoint.exits import ExitSpec
from quadriga.checkpoint.folder import Checkpoint
from quadriga.errors import ConfigError

LATEST = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")


def read_ee_llm(root: Path, checkpoint: Checkpoint) -> tuple[ExitSpec, dict[str, torch.Tensor]]:
    """Read the exits of the newest iteration below `root`.

    Args:
        checkpoint: The same backbone in Hugging Face format.

    Raises:
        ConfigError: A file is missing, damaged or holds code, the exits are of a kind that is not
            supported, or of another model.
    """
    ranks = {place: _load(file) for place, file in sorted(_files(root).items())}
    said = ranks[min(ranks)]["args"]
    numbers = sorted(int(number) for number in getattr(said, "exit_layer_nums", []) or [])
    for flag, what in (
        ("use_exit_mlp", "leave in the middle of their layers, before its MLP"),
        ("use_exit_block", "are transformer layers with KV of their own"),
    ):
        if getattr(said, flag, False):
            raise ConfigError(
                f"--import: the exits of {root} {what} ({flag}), which is not supported; train "
                "exits that read the state between layers with --kind mlp",
                param="import",
            )
    stages = 1 + max(stage for _, stage in ranks)
    per_stage = int(said.num_layers) // stages
    if int(said.num_layers) != checkpoint.num_layers:
        raise ConfigError(
            f"--import: {root} has {said.num_layers} layers, {checkpoint.id} "
            f"{checkpoint.num_layers}",
            param="import",
        )
    has_norm = bool(getattr(said, "use_exit_norm", False))
    tensors: dict[str, torch.Tensor] = {}
    depths = []
    for number in numbers:
        stage, layer = divmod(number - 1, per_stage)
        depth = number - 1 if getattr(said, "pre_exit", False) else number
        if not 0 < depth < checkpoint.num_layers:
            continue  # behind the last layer is the model's own end
        depths.append(depth)
        parts = [ranks[place] for place in sorted(ranks) if place[1] == stage]
        of_stage = [n for n in numbers if (n - 1) // per_stage == stage]
        try:
            head = _head(parts, of_stage.index(number), said, ranks)
            tensors[f"exits.{depth}.head.weight"] = _fitted(head, checkpoint, root)
            if has_norm:
                encoder = parts[0]["model"]["language_model"]["encoder"]
                for name in ("weight", "bias"):
                    key = f"layers.{layer}.exit_norm.{name}"
                    if name == "weight" or key in encoder:
                        tensors[f"exits.{depth}.norm.{name}"] = encoder[key]
        except (KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(
                f"--import: {root} lacks {exc} of the exit at layer {number}", param="import"
            ) from exc
    return ExitSpec(tuple(depths), "head", has_norm=has_norm), tensors


def _head(
    parts: list[Mapping[str, Any]],
    index: int,
    said: argparse.Namespace,
    ranks: Mapping[tuple[int, int], Mapping[str, Any]],
) -> torch.Tensor:
    """The exit's vocabulary rows, of all tensor-parallel ranks; tied: the word embedding's."""
    if getattr(said, "untie_exit_output_weights", False):
        rows = [p["model"]["language_model"]["exit_output_layer"][f"{index}.weight"] for p in parts]
    else:
        first = [ranks[place] for place in sorted(ranks) if place[1] == 0]
        rows = [
            p["model"]["language_model"]["embedding"]["word_embeddings"]["weight"] for p in first
        ]
    return torch.cat(rows)


def _fitted(head: torch.Tensor, checkpoint: Checkpoint, root: Path) -> torch.Tensor:
    """Without the rows that pad the vocabulary. Raises: ConfigError: There are too few."""
    if head.shape[0] < checkpoint.vocab_size:
        raise ConfigError(
            f"--import: the exits of {root} have {head.shape[0]} rows, {checkpoint.id} a "
            f"vocabulary of {checkpoint.vocab_size}",
            param="import",
        )
    return head[: checkpoint.vocab_size].clone()


def _files(root: Path) -> dict[tuple[int, int], Path]:
    """(tensor rank, pipeline stage) → file. Raises: ConfigError: There are none."""
    folder = root
    if (root / LATEST).is_file():
        word = (root / LATEST).read_text().strip()
        folder = root / ("release" if word == "release" else f"iter_{word:0>7}")
    found = {}
    for file in sorted(folder.glob(f"mp_rank_*/{RANK_FILE}")):
        if rank := _RANK.fullmatch(file.parent.name):
            found[int(rank[1]), int(rank[2] or 0)] = file
    if not found:
        raise ConfigError(
            f"--import: {root} holds no {LATEST} with iter_NNNNNNN/mp_rank_NN/{RANK_FILE}",
            param="import",
        )
    return found


def _load(file: Path) -> Mapping[str, Any]:
    """One rank's file, as tensors, plain values and a namespace. Raises: ConfigError."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as exc:
        raise ConfigError(
            f"--import: {file} cannot be read without running code from it: "
            f"{str(exc).splitlines()[0]:.300}; save it again with args as an argparse.Namespace of "
            "plain values",
            param="import",
        ) from exc
    if not (
        isinstance(found, Mapping)
        and isinstance(found.get("args"), argparse.Namespace)
        and isinstance(found.get("model"), Mapping)
    ):
        raise ConfigError(f"--import: {file} holds no args and model of Megatron", param="import")
    return found
