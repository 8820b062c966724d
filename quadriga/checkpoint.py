"""Find a model's checkpoint and read its facts, without torch and without opening the weights.

A model is named by a bundled id (`quadriga-s`, `quadriga-l`), by a directory in Hugging Face
format, or by a hub id; clients know it by the name of its folder.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError

ASSETS = Path(__file__).parent / "assets"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Facts of one checkpoint directory, as its JSON files state them.

    Attributes:
        id: What clients call it: the folder's name.
        architecture: Hugging Face class name, e.g. `LlamaForCausalLM`.
        exit_layers: Non-final exits: number of layers run before each; ascending, may be empty.
        max_model_len: Most positions the model was made for.
        fingerprint: Hash of config and weight index; equal fingerprints have interchangeable KV.
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
    exit_layers: tuple[int, ...]
    fingerprint: str

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
    config = _read_json(path / "config.json")
    text = config.get("text_config", config)
    try:
        num_layers = int(text["num_hidden_layers"])
        hidden = int(text["hidden_size"])
        heads = int(text["num_attention_heads"])
        max_len = int(text.get("max_position_embeddings") or 2048)
        vocab = int(text["vocab_size"])
        architecture = str((config.get("architectures") or ["unknown"])[0])
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(
            f"model: {path / 'config.json'} lacks or garbles the field {exc}", param="model"
        ) from exc
    return Checkpoint(
        id=model_id or _folder_name(model, path),
        path=path,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        vocab_size=vocab,
        max_model_len=max_len,
        eos_token_ids=_eos_token_ids(path, text),
        exit_layers=_exit_layers(path, num_layers),
        fingerprint=_fingerprint(path),
    )


def _folder_name(model: str, path: Path) -> str:
    is_hub_snapshot = path.parent.name == "snapshots"
    return model.rsplit("/", 1)[-1] if is_hub_snapshot else path.name


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model: {path} cannot be read: {exc}", param="model") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"model: {path} must hold a JSON object", param="model")
    return value


def _eos_token_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    value = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _exit_layers(path: Path, num_layers: int) -> tuple[int, ...]:
    file = path / "exits.json"
    if not file.is_file():
        return ()
    layers = _read_json(file).get("layers", [])
    if not all(isinstance(k, int) and 0 < k < num_layers for k in layers):
        raise ConfigError(
            f"model: {file} names exits {layers}; each must be a whole number in "
            f"1..{num_layers - 1}",
            param="model",
        )
    return tuple(sorted(layers))


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(1 << 16))
    return digest.hexdigest()[:16]
