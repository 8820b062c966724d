"""Read a checkpoint's weights a layer at a time, so that depth k costs k layers.

Tensors are looked up by name in `model.safetensors`, or in the shards that
`model.safetensors.index.json` lists; only the tensors asked for are read. Pickled checkpoints are
never opened: loading one runs code from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quadriga.engine.memory import Arena, DeviceArena
from quadriga.engine.models.config import ModelConfig
from quadriga.errors import ConfigError
from quadriga.exits import EXITS_WEIGHTS, SKIPPED_KV_WEIGHTS, ExitSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CPU = torch.device("cpu")


@dataclass(slots=True)
class Affine:
    """Weight and optional bias of a linear projection or a norm.

    Attributes:
        weight: [out, in] for a projection, [size] for a norm; None for a norm without scale.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None = None


@dataclass(slots=True)
class LayerWeights:
    """One transformer layer.

    Attributes:
        qkv: Query, key and value projections stacked: [q_size + 2 · kv_size, hidden].
        q_norm, k_norm: [head_dim], Qwen3 only.
        up: Gate and up projections stacked [2 · ffn, hidden]; up alone [ffn, hidden] if not gated.
    """

    attn_norm: Affine
    qkv: Affine
    out: Affine
    mlp_norm: Affine
    up: Affine
    down: Affine
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(slots=True)
class KVMap:
    """What turns a hidden state that skips a layer into K and V of that layer.

    Attributes:
        norm: Unused where the family norms behind its layers.
        kv: [2 · kv_size, hidden], keys first, before their norm and rotation.
    """

    norm: Affine
    kv: Affine


@dataclass(slots=True)
class Head:
    """What turns a hidden state into logits, at the end of the model or at an exit.

    Attributes:
        norm: None for a model without a final norm.
        project: [embed_size, hidden] where embed_size differs from hidden_size.
        weight: [vocab, embed_size]; the same tensor as the embedding where tied, and one tensor
            for all exits that share it.
    """

    norm: Affine | None
    weight: torch.Tensor
    project: torch.Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """Embedding, the first `len(layers)` layers, and the heads.

    Attributes:
        embed: [vocab, embed_size]
        positions: Learned positions, OPT only: [max_positions, hidden].
        project_in: [hidden, embed_size] where embed_size differs from hidden_size.
        heads: Layers run → head, for every exit that is loaded, the deepest layer included.
        kv_maps: Layers run at a non-final exit → for every layer, how its K and V are made of the
            hidden state at that exit; what lies before the exit is never asked for.
    """

    embed: torch.Tensor
    heads: dict[int, Head]
    positions: torch.Tensor | None = None
    project_in: torch.Tensor | None = None
    layers: list[LayerWeights] = field(default_factory=list)
    kv_maps: dict[int, list[KVMap]] = field(default_factory=dict)


class TensorFiles:
    """The safetensors files of one checkpoint, opened on demand; a context manager.

    Tensors go to `device` one by one: the host holds one of them at a time.

    Raises:
        ConfigError: No safetensors, a shard is missing or damaged.
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        single_file: str = SINGLE_FILE,
        device: torch.device = CPU,
    ) -> None:
        self._path = path
        self._dtype = dtype
        self._arena = Arena() if device.type == "cpu" else DeviceArena(device)
        self._open: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        if single_file == SINGLE_FILE and (path / INDEX_FILE).is_file():
            self._names = _read_index(path / INDEX_FILE)
        elif (path / single_file).is_file():
            self._names = dict.fromkeys(self._file(single_file).keys(), single_file)
        else:
            raise ConfigError(
                f"model: {path} holds no {single_file} and no {INDEX_FILE}; pickled weights are "
                "not loaded, save the model with safe_serialization=True",
                param="model",
            )

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._open.values():
            handle.__exit__(None, None, None)
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def into(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor into `target`, converting its dtype.

        Raises:
            ConfigError: It is absent, has another shape, or is not a float tensor.
        """
        stored = self._stored(name)
        if stored.shape != target.shape:
            raise ConfigError(
                f"model: tensor {name} has shape {list(stored.shape)}, the configuration says "
                f"{list(target.shape)}",
                param="model",
            )
        target.copy_(stored)

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """Return a copy of a tensor in the engine's dtype. Raises: ConfigError as `into`."""
        target = self._arena.take(shape, self._dtype)
        self.into(name, target)
        return target

    def stack(self, names: list[str], sizes: list[int], *rest: int) -> torch.Tensor:
        """Read several tensors into one, along the first dimension, without a second copy."""
        target = self._arena.take((sum(sizes), *rest), self._dtype)
        start = 0
        for name, size in zip(names, sizes, strict=True):
            self.into(name, target[start : start + size])
            start += size
        return target

    def _stored(self, name: str) -> torch.Tensor:
        file = self._names.get(name)
        if file is None:
            raise ConfigError(
                f"model: {self._path} has no tensor {name}; the checkpoint does not fit its "
                "config.json",
                param="model",
            )
        try:
            tensor: torch.Tensor = self._file(file).get_tensor(name)
        except SafetensorError as exc:
            raise ConfigError(
                f"model: {self._path / file} does not hold {name}: {exc}", param="model"
            ) from exc
        if not tensor.is_floating_point():
            raise ConfigError(
                f"model: tensor {name} is {tensor.dtype}; only float weights are loaded",
                param="model",
            )
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(str(self._path / name), framework="pt")
            except (SafetensorError, OSError) as exc:
                raise ConfigError(
                    f"model: {self._path / name} cannot be read: {exc}", param="model"
                ) from exc
        return self._open[name]


def _read_index(file: Path) -> dict[str, str]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        names = {str(k): str(v) for k, v in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"model: {file} is not a weight index: {exc}", param="model") from exc
    for shard in sorted(set(names.values())):
        if Path(shard).name != shard:
            raise ConfigError(f"model: {file} points outside its folder: {shard!r}", param="model")
    return names


def load_weights(
    path: Path,
    config: ModelConfig,
    depth: int,
    dtype: torch.dtype,
    num_positions: int,
    exits: ExitSpec | None = None,
    *,
    fitted_maps: bool = False,
    device: torch.device = CPU,
) -> ModelWeights:
    """Read embedding, layers 1..depth, and the heads of all exits up to there, from `path`.

    The head behind the last loaded layer is that layer's exit head where it is an exit, else the
    model's own.

    Args:
        num_positions: Learned positions to keep, for the families that have them.
        exits: None where the model has none.
        fitted_maps: Make K and V of skipped layers by the fitted maps where the checkpoint has
            some, instead of the layers' own projections.
        device: Where they go, tensor by tensor.

    Raises:
        ConfigError: `depth` is beyond the model, or the files do not fit `config`.
    """
    if not 1 <= depth <= config.num_layers:
        raise ConfigError(
            f"depth: {depth} must be in 1..{config.num_layers}, the layers of {path.name}",
            param="depth",
        )
    load = _load_opt if config.family == "opt" else _load_rope_family
    with TensorFiles(path, dtype, device=device) as files:
        weights, final = load(files, config, depth, num_positions)
    at = [k for k in exits.layers if k <= depth] if exits is not None else []
    weights.heads[depth] = final
    if exits is None or not at:
        return weights
    own = [_own_map(layer, config) for layer in weights.layers]
    weights.kv_maps = {k: list(own) for k in at}
    if fitted_maps and (path / SKIPPED_KV_WEIGHTS).is_file():
        _read_fitted(path, config, weights)
    if exits.kind == "shared":
        weights.heads.update(dict.fromkeys(at, final))
        return weights
    with TensorFiles(path, dtype, EXITS_WEIGHTS, device) as files:
        for layer in at:
            weights.heads[layer] = _exit_head(files, config, exits, layer, final)
    return weights


def _own_map(layer: LayerWeights, config: ModelConfig) -> KVMap:
    """The layer's own norm and projections."""
    assert layer.qkv.weight is not None
    bias = None if layer.qkv.bias is None else layer.qkv.bias[config.q_size :]
    return KVMap(layer.attn_norm, Affine(layer.qkv.weight[config.q_size :], bias))


def _read_fitted(path: Path, config: ModelConfig, weights: ModelWeights) -> None:
    """Put fitted maps in the place of own ones, for the exits and layers that have some."""
    size, width = config.hidden_size, 2 * config.kv_size
    dtype, device = weights.embed.dtype, weights.embed.device
    unit = Affine(torch.ones(size, dtype=dtype, device=device))
    if config.norm == "layer":
        unit.bias = torch.zeros(size, dtype=dtype, device=device)
    with TensorFiles(path, dtype, SKIPPED_KV_WEIGHTS, device) as files:
        for depth, maps in weights.kv_maps.items():
            for layer in range(depth, len(maps)):
                name = f"exits.{depth}.kv.{layer}"
                if f"{name}.weight" in files:
                    maps[layer] = KVMap(unit, _linear(files, name, width, size, True))


def _exit_head(
    files: TensorFiles, config: ModelConfig, exits: ExitSpec, layer: int, final: Head
) -> Head:
    name = f"exits.{layer}.norm"
    norm = Affine(files.read(f"{name}.weight", config.hidden_size))
    if config.norm == "layer":
        norm.bias = files.read(f"{name}.bias", config.hidden_size)
    if exits.kind == "norm":
        return Head(norm, final.weight, final.project)
    return Head(
        norm, files.read(f"exits.{layer}.head.weight", config.vocab_size, config.hidden_size)
    )


def _load_rope_family(
    files: TensorFiles, config: ModelConfig, depth: int, _num_positions: int
) -> tuple[ModelWeights, Head]:
    c = config
    embed = files.read("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    weights = ModelWeights(embed, {})
    final = Head(
        Affine(files.read("model.norm.weight", c.hidden_size)), _head_weight(files, c, embed)
    )
    for index in range(depth):
        at = f"model.layers.{index}"
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        layer = LayerWeights(
            attn_norm=Affine(files.read(f"{at}.input_layernorm.weight", c.hidden_size)),
            qkv=_qkv(files, c, attn),
            out=_linear(files, f"{attn}.o_proj", c.hidden_size, c.q_size, c.out_bias),
            mlp_norm=Affine(files.read(f"{at}.post_attention_layernorm.weight", c.hidden_size)),
            up=_stacked(
                files,
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                [c.ffn_size, c.ffn_size],
                c.hidden_size,
                c.mlp_bias,
            ),
            down=_linear(files, f"{mlp}.down_proj", c.hidden_size, c.ffn_size, c.mlp_bias),
        )
        if c.qk_norm:
            layer.q_norm = files.read(f"{attn}.q_norm.weight", c.head_dim)
            layer.k_norm = files.read(f"{attn}.k_norm.weight", c.head_dim)
        weights.layers.append(layer)
    return weights, final


def _load_opt(
    files: TensorFiles, config: ModelConfig, depth: int, num_positions: int
) -> tuple[ModelWeights, Head]:
    c = config
    root = "model.decoder"
    embed = files.read(f"{root}.embed_tokens.weight", c.vocab_size, c.embed_size)
    # OPT's position table starts with two rows that belong to padding.
    table = files.read(f"{root}.embed_positions.weight", c.max_positions + 2, c.hidden_size)
    weights = ModelWeights(embed, {}, positions=table[2 : 2 + num_positions].clone())
    final = Head(
        _layer_norm(files, f"{root}.final_layer_norm", c) if c.final_norm else None,
        _head_weight(files, c, embed),
    )
    if c.embed_size != c.hidden_size:
        weights.project_in = files.read(f"{root}.project_in.weight", c.hidden_size, c.embed_size)
        final.project = files.read(f"{root}.project_out.weight", c.embed_size, c.hidden_size)
    for index in range(depth):
        at = f"{root}.layers.{index}"
        attn = f"{at}.self_attn"
        weights.layers.append(
            LayerWeights(
                attn_norm=_layer_norm(files, f"{at}.self_attn_layer_norm", c),
                qkv=_qkv(files, c, attn),
                out=_linear(files, f"{attn}.out_proj", c.hidden_size, c.q_size, c.out_bias),
                mlp_norm=_layer_norm(files, f"{at}.final_layer_norm", c),
                up=_linear(files, f"{at}.fc1", c.ffn_size, c.hidden_size, c.mlp_bias),
                down=_linear(files, f"{at}.fc2", c.hidden_size, c.ffn_size, c.mlp_bias),
            )
        )
    return weights, final


def _head_weight(files: TensorFiles, config: ModelConfig, embed: torch.Tensor) -> torch.Tensor:
    if config.tied_head:
        return embed
    return files.read("lm_head.weight", config.vocab_size, config.embed_size)


def _qkv(files: TensorFiles, config: ModelConfig, attn: str) -> Affine:
    return _stacked(
        files,
        [f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"],
        [config.q_size, config.kv_size, config.kv_size],
        config.hidden_size,
        config.qkv_bias,
    )


def _stacked(
    files: TensorFiles, names: list[str], sizes: list[int], inputs: int, bias: bool
) -> Affine:
    return Affine(
        files.stack([f"{n}.weight" for n in names], sizes, inputs),
        files.stack([f"{n}.bias" for n in names], sizes) if bias else None,
    )


def _linear(files: TensorFiles, name: str, outputs: int, inputs: int, bias: bool) -> Affine:
    return Affine(
        files.read(f"{name}.weight", outputs, inputs),
        files.read(f"{name}.bias", outputs) if bias else None,
    )


def _layer_norm(files: TensorFiles, name: str, config: ModelConfig) -> Affine:
    if not config.norm_affine:
        return Affine(None)
    size = config.hidden_size
    return Affine(files.read(f"{name}.weight", size), files.read(f"{name}.bias", size))
