"""Find a model's checkpoint and read its facts, without torch and without opening the weights.

A model is named by a bundled id (`quadriga-s`, `quadriga-l`), by a directory in Hugging Face
format, or by a hub id; clients know it by the name of its folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError
from quadriga.exits import ExitSpec, read_exits
from quadriga.families import read_facts
from quadriga.json_files import GARBLED, read_object

ASSETS = Path(__file__).parent / "assets"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that does not say otherwise is sampled with; the defaults are neutral."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Facts of one checkpoint directory, as its JSON files state them.

    Attributes:
        id: What clients call it: the folder's name.
        architecture: Hugging Face class name, e.g. `LlamaForCausalLM`.
        exits: What `exits.json` says; no exits where there is no such file.
        max_model_len: Most positions the model was made for.
        fingerprint: Hash of config and weight index; equal fingerprints have interchangeable KV.
        sampling: What its `generation_config.json` recommends.
    """

    id: str
    path: Path
    architecture: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    exits: ExitSpec
    fingerprint: str
    sampling: SamplingDefaults = SamplingDefaults()

    def kv_bytes_per_token(self, depth: int, bytes_per_value: int) -> int:
        """Bytes of KV cache one token takes in the first `depth` layers."""
        return depth * 2 * self.num_kv_heads * self.head_dim * bytes_per_value


def bundled_models() -> list[str]:
    """Ids of the checkpoints shipped with the package."""
    return sorted(p.parent.name for p in ASSETS.glob("*/config.json"))


def locate(model: str) -> Path:
    """Return the directory of `model`, downloading it when it is a hub id.

    Raises:
        ConfigError: It is none of bundled id, checkpoint directory, or reachable hub id.
    """
    if (ASSETS / model / "config.json").is_file():
        return ASSETS / model
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model: {model!r} has no config.json; give a Hugging Face checkpoint directory",
                param="model",
            )
        return path.resolve()
    if "/" not in model or model.startswith((".", "/", "~")):
        raise ConfigError(
            f"model: {model!r} is neither bundled ({', '.join(bundled_models())}) "
            "nor a directory here, nor a hub id (org/name)",
            param="model",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as exc:
        raise ConfigError(
            f"model: {model!r} could not be fetched from the hub: {exc}", param="model"
        ) from exc


def read_checkpoint(model: str, *, model_id: str | None = None) -> Checkpoint:
    """Locate `model` and read its facts.

    Raises:
        ConfigError: The checkpoint is missing or its JSON files are not usable.
    """
    path = locate(model)
    config = read_object(path / "config.json")
    generation = _generation_config(path)
    try:
        facts = read_facts(config)
        architecture = str((config.get("architectures") or ["unknown"])[0])
        eos_token_ids = _eos_token_ids(generation, config.get("text_config", config))
    except GARBLED as exc:
        raise ConfigError(
            f"model: {path / 'config.json'} lacks or garbles the field {exc}", param="model"
        ) from exc
    return Checkpoint(
        id=model_id or _folder_name(model, path),
        path=path,
        architecture=architecture,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_positions,
        eos_token_ids=eos_token_ids,
        exits=read_exits(path, facts.num_layers),
        fingerprint=_fingerprint(path),
        sampling=_sampling(path, generation),
    )


def _folder_name(model: str, path: Path) -> str:
    is_hub_snapshot = path.parent.name == "snapshots"
    return model.rsplit("/", 1)[-1] if is_hub_snapshot else path.name


def _generation_config(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    return read_object(file) if file.is_file() else {}


def _eos_token_ids(generation: dict[str, Any], config: dict[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


_SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 100.0),
}
"""Least and greatest value of each field of a generation config."""


def _sampling(path: Path, generation: dict[str, Any]) -> SamplingDefaults:
    """Read the recommended sampling as `generate` of transformers would take it.

    Without `do_sample` that is greedy decoding, whose only parameter is the repetition penalty;
    with it, what is not named is neutral.
    """
    is_sampled = generation.get("do_sample") is True
    given: dict[str, Any] = {} if is_sampled else {"temperature": 0.0}
    for name, (least, most) in _SAMPLING_BOUNDS.items():
        value = generation.get(name)
        if value is None or (name != "repetition_penalty" and not is_sampled):
            continue
        kind = int if name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
            raise ConfigError(
                f"model: {path / 'generation_config.json'} has {name} {value!r}; it must be a "
                f"number from {least:g} to {most:g}",
                param="model",
            )
        given[name] = max(0, value) if name == "top_k" else float(value)
    return SamplingDefaults(**given)


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(1 << 16))
    return digest.hexdigest()[:16]
