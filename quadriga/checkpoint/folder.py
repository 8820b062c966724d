"""Find a model's checkpoint and read its facts, without torch and without opening the weights.

A model is named by a bundled id (`quadriga-s`, `quadriga-l`), by the name of a packaged model
(`smollm2-135m-instruct`), by a directory in Hugging Face format, by a GGUF file, or by a hub id,
perhaps with a revision (`org/name@revision`); clients know it by that name, or by that of its
folder, or of its file without `.gguf`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quadriga.checkpoint.exits import EXITS_FILE, ExitSpec, read_exits
from quadriga.checkpoint.families import read_facts
from quadriga.checkpoint.json_files import GARBLED, find_array, read_object
from quadriga.checkpoint.packaged_models import PACKAGED_MODELS, packaged_file
from quadriga.checkpoint.tuned import TUNE_FILE, bundled_for, check_pair, weights_hash
from quadriga.errors import ConfigError
from quadriga.files import cache_folder

ASSETS = Path(__file__).resolve().parents[1] / "assets"
logger = logging.getLogger(__name__)

GGUF_SUFFIX = ".gguf"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt"]
HUB_IGNORED = ["consolidated*", "original/*", "onnx/*"]
"""The same weights once more, in forms that are not read."""
COMMIT = re.compile("@[0-9a-f]{40}$")
TOKENIZER_HEAD_BYTES = 8 << 20
"""Of a `tokenizer.json`, whose vocabulary comes behind the added tokens."""


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
        id: What clients call it.
        path: The directory, on the node that read it.
        architecture: Hugging Face class name, e.g. `LlamaForCausalLM`.
        exits: What `exits.json` says; no exits where there is no such file.
        max_model_len: Most positions the model was made for.
        fingerprint: Hash of the configuration and of samples of the weights; checkpoints with
            equal ones have interchangeable KV.
        heads_path: Where exits, length heads and maps are: `path`, or a folder of `quadriga.tune`.
        sampling: What its `generation_config.json` recommends.
        source: By what any node finds it: an absolute path, or a name; of a hub id with its commit.
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
    heads_path: Path
    sampling: SamplingDefaults = SamplingDefaults()
    source: str = ""

    def kv_bytes_per_token(self, depth: int, bytes_per_value: int) -> int:
        """Bytes of KV cache one token takes in the first `depth` layers."""
        return depth * 2 * self.num_kv_heads * self.head_dim * bytes_per_value


def bundled_models() -> list[str]:
    """Ids of the checkpoints shipped with the package."""
    return sorted(p.parent.name for p in ASSETS.glob("*/config.json"))


def locate(model: str, *, cache_dir: str | Path | None = None) -> Path:
    """Return the directory of `model`: downloaded where it is a hub id, converted if a GGUF file.

    Args:
        cache_dir: `engine.cache_dir`, where converted files are kept.

    Raises:
        ConfigError: It is none of bundled id, installed packaged model, checkpoint directory, GGUF
            file, or reachable hub id.
    """
    if not model.strip():
        raise ConfigError(
            "model: is empty; give a name, a folder ('.' for this one), a GGUF file or a hub id",
            param="model",
        )
    if _is_bundled(model):
        return ASSETS / model
    path = packaged_file(model) or placed(model)
    if path.is_file():
        from quadriga.gguf import converted_folder

        return converted_folder(path.resolve(), cache_folder(cache_dir))
    if not path.is_dir():
        path = _fetched(model, path)
    if not (path / "config.json").is_file():
        files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
        remedy = f"name its file: {files[0]}" if files else "give a Hugging Face checkpoint"
        raise ConfigError(f"model: {model!r} has no config.json; {remedy}", param="model")
    return path.resolve()  # what a link means now, however long the service runs


def _is_bundled(model: str) -> bool:
    """Whether it is the name of a bundled model; `./NAME` is a folder of somebody's own."""
    return model.rstrip("/") in bundled_models()


def placed(model: str) -> Path:
    """The path that is meant, absolute; a link keeps its name, which clients may know."""
    path = Path(os.path.expanduser(model))
    return path.resolve() if ".." in path.parts else path.absolute()


def pinned(model: str) -> str:
    """Return a hub id with the commit it means now, and every other name as it is.

    Where the hub cannot be asked, that is the only commit that is on this node.

    Raises:
        ConfigError: The hub is asked, and knows no such model or revision.
    """
    if COMMIT.search(model) or not _is_hub_id(model) or os.path.exists(placed(model)):
        return model
    try:
        return _with_commit(model, _fetched(model, placed(model), ["config.json"]))
    except ConfigError as exc:
        from huggingface_hub.constants import HF_HUB_CACHE

        here = Path(HF_HUB_CACHE, f"models--{model.replace('/', '--')}").glob("snapshots/*")
        if len(found := [*here]) != 1:
            raise
        name = _with_commit(model, found[0])
        logger.warning("%s; %s is taken, the only commit of it here", exc.message, name)
        return name


def _with_commit(model: str, path: Path) -> str:
    """A hub id with the commit in whose folder it lies."""
    return f"{model.partition('@')[0]}@{path.name}"


def _is_hub_id(model: str) -> bool:
    is_path = model.startswith((".", "/", "~")) or model.endswith(GGUF_SUFFIX)
    return "/" in model.rstrip("/") and not is_path


def _fetched(model: str, path: Path, patterns: Sequence[str] = HUB_PATTERNS) -> Path:
    """Where a hub id is now. Raises: ConfigError: It is none, or cannot be fetched."""
    if not _is_hub_id(model):
        raise ConfigError(
            f"model: {model!r} is neither bundled ({', '.join(bundled_models())}) "
            f"nor packaged ({', '.join(PACKAGED_MODELS)}) nor a hub id (org/name), and there is no "
            f"folder or GGUF file {path}; mend the name or the path",
            param="model",
        )
    from huggingface_hub import snapshot_download

    try:
        repo, _, revision = model.partition("@")
        fetch = partial(snapshot_download, ignore_patterns=HUB_IGNORED)
        return Path(fetch(repo, revision=revision or None, allow_patterns=[*patterns]))
    except Exception as exc:  # its own, and those of the libraries below it
        raise ConfigError(
            f"model: {model!r} is nothing here, and could not be fetched from the hub: {exc}",
            param="model",
        ) from exc


def read_checkpoint(
    model: str,
    *,
    model_id: str | None = None,
    cache_dir: str | Path | None = None,
    heads: str = "auto",
) -> Checkpoint:
    """Locate `model` and read its facts.

    Args:
        cache_dir: See `locate`.
        heads: `exits.folder`: a folder of `quadriga.tune`; `own`: what lies beside the weights;
            `auto`: that, else what the package has for these weights.

    Raises:
        ConfigError: The checkpoint is missing, its files are not usable, or the folder of heads was
            made for other weights.
    """
    try:
        path = locate(model, cache_dir=cache_dir)
    except OSError as exc:  # too long for a name, or in a folder that nobody may look into
        raise ConfigError(f"model: {model!r:.200} cannot be read: {exc}", param="model") from exc
    config = read_object(path / "config.json")
    generation = _generation_config(path)
    try:
        facts = read_facts(config)
        architecture = str((config.get("architectures") or ["unknown"])[0])
        named = _eos_token_ids(generation, config.get("text_config", config))
        ends = dict.fromkeys((*named, *_tokenizers_end(path)))
        eos_token_ids = tuple(token for token in ends if 0 <= token < facts.vocab_size)
    except GARBLED as exc:
        raise ConfigError(
            f"model: {path / 'config.json'} lacks or garbles the field {exc}", param="model"
        ) from exc
    try:
        heads_path = _heads_path(path, heads, facts.num_layers, facts.hidden_size)
        fingerprint = _fingerprint(path, heads_path)
    except OSError as exc:  # nobody may read them, or a link leads nowhere
        raise ConfigError(f"model: weights cannot be read: {exc}", param="model") from exc
    return Checkpoint(
        id=model_id or _public_name(model, path),
        path=path,
        architecture=architecture,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_positions,
        eos_token_ids=eos_token_ids,
        exits=read_exits(heads_path, facts.num_layers),
        fingerprint=fingerprint,
        sampling=_sampling(path, generation),
        source=_source(model, path),
        heads_path=heads_path,
    )


def _heads_path(path: Path, heads: str, num_layers: int, hidden_size: int) -> Path:
    """The folder that `heads` means. Raises: ConfigError: It was made for other weights."""
    if heads == "own" or (heads == "auto" and (path / EXITS_FILE).is_file()):
        return path
    if heads == "auto":
        return bundled_for(path, num_layers, hidden_size, ASSETS) or path
    folder = Path(heads).expanduser().resolve()
    check_pair(folder, path, path.name)
    return folder


def on_this_node(checkpoint: Checkpoint, cache_dir: Path) -> Checkpoint:
    """Return a checkpoint that another node read, as it lies here.

    A folder that the nodes share is at the same place; a GGUF file is converted on each node.

    Raises:
        ConfigError: This node does not have it, or has another one under its name.
    """
    found, path, heads_path = checkpoint, checkpoint.path, checkpoint.heads_path
    is_apart = (heads_path / TUNE_FILE).is_file()
    if not (path / "config.json").is_file():
        # Own heads, and those of the package, are found again; others lie at the same place.
        heads = str(heads_path) if is_apart else "auto"
        found = read_checkpoint(
            checkpoint.source, model_id=checkpoint.id, cache_dir=cache_dir, heads=heads
        )
    elif is_apart or heads_path == path:  # who loads heads that are not here says so
        found = replace(checkpoint, fingerprint=_fingerprint(path, heads_path))
    if found.fingerprint != checkpoint.fingerprint:
        raise ConfigError(
            f"model: {checkpoint.source} on this node is another model than where the service was "
            "started; put the same files on every node, or start the service again",
            param="model",
        )
    return replace(checkpoint, path=found.path, heads_path=found.heads_path)


def _source(model: str, found: Path) -> str:
    path = placed(model)
    if model in PACKAGED_MODELS or _is_bundled(model):
        return model
    return str(path) if path.exists() else _with_commit(model, found)


def _public_name(model: str, path: Path) -> str:
    if model in PACKAGED_MODELS:
        return model
    source = placed(model)
    if source.is_file():
        return source.name.removesuffix(GGUF_SUFFIX)
    if source.is_dir():
        return source.name
    return path.name if path.parent == ASSETS else model.partition("@")[0].rsplit("/", 1)[-1]


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


def _tokenizers_end(path: Path) -> tuple[int, ...]:
    """The tokenizer's own end, which fine-tunes for chats often name there alone."""
    settings, file = path / "tokenizer_config.json", path / "tokenizer.json"
    said = read_object(settings) if settings.is_file() else {}
    end = said.get("eos_token")
    if isinstance(end, dict):
        end = end.get("content")
    try:
        if not file.is_file():
            known = (said.get("added_tokens_decoder") or {}).items()
            return tuple(int(i) for i, token in known if token["content"] == end)
        with file.open("rb") as stream:
            head = stream.read(TOKENIZER_HEAD_BYTES).decode("utf-8", "ignore")
        added, *_ = find_array(head, "added_tokens")
        return tuple(int(token["id"]) for token in added if token["content"] == end)
    except (*GARBLED, OSError, RecursionError):  # whoever loads it says what is wrong with it
        return ()


_SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-9, 100.0),
}
"""Least and greatest value of each field of a generation config."""


def _sampling(path: Path, generation: dict[str, Any]) -> SamplingDefaults:
    """Read the recommended sampling.

    Without `do_sample` that is greedy decoding, as in `generate` of transformers, whose only
    parameter is the repetition penalty; with it, what is not named is neutral (there, `top_k` 50).
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


def _fingerprint(path: Path, heads_path: Path) -> str:
    digest = hashlib.sha256((path / "config.json").read_bytes())
    digest.update(weights_hash(path).encode())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(1 << 16))
    if heads_path != path:
        digest.update((heads_path / TUNE_FILE).read_bytes())
    return digest.hexdigest()[:16]
