"""Exits of EE-LLM and EE-Tuning, from checkpoints in Megatron's layout.

    ROOT/latest_checkpointed_iteration.txt, ROOT/iter_0000001/mp_rank_TT[_PPP]/model_optim_rng.pt

Each file holds one tensor-parallel rank of one pipeline stage: `args` (a namespace) and
`model.language_model`, with `encoder` (`layers.I.exit_norm.weight`, I from 0 in the stage) and
`exit_output_layer` (`J.weight`, the J-th exit of the stage, rows divided among the ranks).
`args.exit_layer_nums` counts layers from 1; with `pre_exit` the exit is before that layer.

With `use_exit_mlp` an exit leaves in the middle of its layer: to the state behind the layer's
attention it adds an MLP of its own (`layers.I.mlp.branch.*`, behind the layer's own norm) instead
of the layer's (`layers.I.mlp.trunk.*`). No state between layers is that one, so the backbone is
written anew with those layers divided (`split_layers`).

A file holds more than that: the optimizer, states of random generators (numpy's among them), and
enums of Megatron's in `args`. What is neither a tensor nor a plain value is not made: in its place
is an `Unread`, and no code of numpy, of Megatron or of the file runs.

Source: pan-x-c/EE-LLM: `megatron/checkpointing.py`, `megatron/model/transformer.py`
(EarlyExitTransformerLayer), `megatron/model/language_model.py`, `tools/checkpoint/`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quadriga.checkpoint.exits import ExitSpec
from quadriga.checkpoint.folder import Checkpoint
from quadriga.errors import ConfigError
from quadriga.tune.importers.head_files import DAMAGED, reason
from quadriga.tune.importers.split_layers import split_depths

LATEST = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_UNREAD = re.compile(r"(megatron|numpy)\..+")


class Unread:
    """In the place of a value that the file would have to run code for; it holds nothing of it."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class MegatronExits:
    """Exits as a Megatron checkpoint has them.

    Attributes:
        divided: Layers (from 1) whose middle the exits read; the depths of `spec` and `tensors`
            are those of a backbone in which they are divided.
    """

    spec: ExitSpec
    tensors: dict[str, torch.Tensor]
    divided: tuple[int, ...] = ()


def read_ee_llm(root: Path, checkpoint: Checkpoint) -> MegatronExits:
    """Read the exits of the newest iteration below `root`.

    Args:
        checkpoint: The same backbone in Hugging Face format.

    Raises:
        ConfigError: A file is missing, damaged or holds code, the exits are of a kind that is not
            supported, or of another model.
    """
    ranks = {place: _load(file) for place, file in sorted(_files(root).items())}
    said = ranks[min(ranks)]["args"]
    try:
        numbers = sorted(int(number) for number in getattr(said, "exit_layer_nums", None) or [])
        num_layers = int(said.num_layers)
    except (AttributeError, TypeError, ValueError) as exc:
        raise ConfigError(
            f"--import: the args of {root} do not say num_layers and exit_layer_nums: {exc}",
            param="import",
        ) from exc
    if getattr(said, "use_exit_block", False):
        raise ConfigError(
            f"--import: the exits of {root} are transformer layers with KV of their own "
            "(use_exit_block), which is not supported; train others with --kind mlp",
            param="import",
        )
    has_mlp = bool(getattr(said, "use_exit_mlp", False))
    stages = 1 + max(stage for _, stage in ranks)
    per_stage = max(1, num_layers // stages)
    if num_layers != checkpoint.num_layers:
        raise ConfigError(
            f"--import: {root} has {num_layers} layers, {checkpoint.id} {checkpoint.num_layers}",
            param="import",
        )
    has_norm = bool(getattr(said, "use_exit_norm", False))
    tensors: dict[str, torch.Tensor] = {}
    depths = []
    middles = split_depths(numbers) if has_mlp else {}
    for number in numbers:
        stage, layer = divmod(number - 1, per_stage)
        depth = number - 1 if getattr(said, "pre_exit", False) else number
        if not 0 < depth < checkpoint.num_layers and not has_mlp:
            continue  # behind the last layer is the model's own end
        depth = middles.get(number, depth)
        depths.append(depth)
        parts = [ranks[place] for place in sorted(ranks) if place[1] == stage]
        of_stage = [n for n in numbers if (n - 1) // per_stage == stage]
        try:
            if not parts:
                raise ConfigError(
                    f"--import: {root} lacks the file of pipeline stage {stage}, which has the "
                    f"exit at layer {number}",
                    param="import",
                )
            head = _head(parts, of_stage.index(number), said, ranks)
            tensors[f"exits.{depth}.head.weight"] = _fitted(head, checkpoint, root)
            if has_norm:
                encoder = parts[0]["model"]["language_model"]["encoder"]
                for name in ("weight", "bias"):
                    key = f"layers.{layer}.exit_norm.{name}"
                    if name == "weight" or key in encoder:
                        tensors[f"exits.{depth}.norm.{name}"] = encoder[key]
            if has_mlp:
                encoders = [p["model"]["language_model"]["encoder"] for p in parts]
                for name, tensor in _branch(encoders, layer).items():
                    tensors[f"exits.{depth}.mlp.{name}"] = tensor
        except DAMAGED as exc:
            raise ConfigError(
                f"--import: {root} lacks {reason(exc)} of the exit at layer {number}",
                param="import",
            ) from exc
    if odd := [name for name, t in tensors.items() if not isinstance(t, torch.Tensor)]:
        raise ConfigError(f"--import: {odd[0]} of {root} is no tensor", param="import")
    if has_mlp:
        spec = ExitSpec(tuple(depths), "mlp", has_norm=has_norm, own_head=True)
        return MegatronExits(spec, tensors, tuple(numbers))
    return MegatronExits(ExitSpec(tuple(depths), "head", has_norm=has_norm), tensors)


def _branch(encoders: list[Mapping[str, Any]], layer: int) -> dict[str, torch.Tensor]:
    """An exit's MLP and the layer's own norm before it, of all tensor-parallel ranks.

    A gated MLP's first matrix is gate above up in every rank by itself.
    """
    at = f"layers.{layer}"
    down = torch.cat([e[f"{at}.mlp.branch.dense_4h_to_h.weight"] for e in encoders], dim=1)
    ups = [e[f"{at}.mlp.branch.dense_h_to_4h.weight"] for e in encoders]
    is_gated = sum(len(up) for up in ups) == 2 * down.shape[1]
    halves = [up.chunk(2) for up in ups] if is_gated else [(up,) for up in ups]
    found = {
        "norm.weight": encoders[0][f"{at}.post_attention_norm.weight"],
        "up.weight": torch.cat([torch.cat(part) for part in zip(*halves, strict=True)]),
        "down.weight": down,
    }
    if f"{at}.mlp.branch.dense_4h_to_h.bias" in encoders[0]:
        raise KeyError("a way to add the biases of an exit's MLP, which are not supported")
    return found


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
    """The args and the model in one rank's file; the rest is not brought into memory.

    Raises:
        ConfigError: It is damaged, or names anything that is neither a tensor, a plain value, a
            namespace, nor of Megatron or numpy.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            stubs: list[Any] = [(Unread, name) for name in foreign if _UNREAD.fullmatch(name)]
            with torch.serialization.safe_globals(stubs):
                found: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except DAMAGED as exc:
        raise ConfigError(
            f"--import: {file} cannot be read without running code from it: {reason(exc)}; save it "
            "again with args as an argparse.Namespace of plain values",
            param="import",
        ) from exc
    if not (
        isinstance(found, Mapping)
        and isinstance(found.get("args"), argparse.Namespace)
        and isinstance(found.get("model"), Mapping)
    ):
        raise ConfigError(f"--import: {file} holds no args and model of Megatron", param="import")
    return {"args": found["args"], "model": found["model"]}
