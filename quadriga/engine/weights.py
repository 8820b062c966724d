"""Read a checkpoint's weights a layer at a time, so that depth k costs k layers.

Tensors are looked up by name in `model.safetensors`, or in the shards that
`model.safetensors.index.json` lists; only the tensors asked for are read. Pickled checkpoints are
never opened: loading one runs code from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from quadriga.json_files import GARBLED, read_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_OPT = "model.decoder"
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
        self._arena: Arena | DeviceArena = Arena() if device.type == "cpu" else DeviceArena(device)
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

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @contextmanager
    def apart(self, num_bytes: int) -> Iterator[None]:
        """Put what is read inside into memory of its own, which goes when those tensors go.

        Args:
            num_bytes: About as much as that will be.
        """
        shared = self._arena
        if isinstance(shared, Arena):
            self._arena = Arena(num_bytes)
        try:
            yield
        finally:
            self._arena = shared

    def into(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor into `target`, converting its dtype.

        Raises:
            ConfigError: It is absent, has another shape, is not a float tensor, or holds something
                that is not a finite number of the engine's dtype.
        """
        stored = self._stored(name)
        if stored.shape != target.shape:
            raise ConfigError(
                f"model: tensor {name} has shape {list(stored.shape)}, the configuration says "
                f"{list(target.shape)}",
                param="model",
            )
        target.copy_(stored)
        # On the host, and without a copy of the tensor: NaN is both its least and its greatest.
        seen = target if target.device.type == "cpu" else stored
        if not torch.isfinite(torch.stack(seen.aminmax())).all():
            raise ConfigError(
                f"model: tensor {name} of {self._path} holds NaN or infinity as {seen.dtype}; the "
                "checkpoint is damaged, or needs a wider engine.dtype",
                param="model",
            )

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
    index = read_object(file)
    try:
        names = {str(k): str(v) for k, v in index["weight_map"].items()}
    except GARBLED as exc:
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
    with TensorFiles(path, dtype, device=device) as files:
        weights = _read_ends(files, config, num_positions)
        for index in range(depth):
            weights.layers.append(read_layer(files, config, index))
        final = read_final_head(files, config, weights.embed)
    at = [k for k in exits.layers if k <= depth] if exits is not None else []
    weights.heads[depth] = final
    if exits is not None and at:
        weights.kv_maps = kv_maps_of(
            path, config, weights.layers, at, fitted=fitted_maps, like=weights.embed
        )
        weights.heads.update(read_exit_heads(path, config, exits, at, final))
    return weights


def read_layer(files: TensorFiles, config: ModelConfig, index: int) -> LayerWeights:
    """Read layer `index`, from 0, into memory of its own. Raises: ConfigError as `into`."""
    read = _opt_layer if config.family == "opt" else _rope_family_layer
    with files.apart(config.layer_values * files.dtype.itemsize):
        return read(files, config, index)


def kv_maps_of(
    path: Path,
    config: ModelConfig,
    layers: list[LayerWeights],
    exits: list[int],
    *,
    fitted: bool,
    like: torch.Tensor,
    known: dict[int, list[KVMap]] | None = None,
) -> dict[int, list[KVMap]]:
    """For each exit, how K and V of every layer are made of the hidden state there.

    Args:
        fitted: Use the checkpoint's fitted maps where it has some.
        like: Any tensor of the model: its dtype, on its device.
        known: Maps that are loaded already; those layers are not read again.
    """
    maps = {k: list((known or {}).get(k, ())) for k in exits}
    for of_exit in maps.values():
        of_exit += [_own_map(layer, config) for layer in layers[len(of_exit) :]]
    if fitted and (path / SKIPPED_KV_WEIGHTS).is_file():
        have = {k: len(of_exit) for k, of_exit in (known or {}).items()}
        _read_fitted(path, config, maps, have, like)
    return maps


def read_exit_heads(
    path: Path, config: ModelConfig, exits: ExitSpec, at: list[int], final: Head
) -> dict[int, Head]:
    """Heads of some exits, none of them the end of the model; `final` is the model's own."""
    if exits.kind == "shared" or not at:
        return dict.fromkeys(at, final)
    weight = final.weight
    heads = {}
    with TensorFiles(path, weight.dtype, EXITS_WEIGHTS, weight.device) as files:
        for layer in at:
            with files.apart(config.vocab_size * config.hidden_size * weight.itemsize):
                heads[layer] = _exit_head(files, config, exits, layer, final)
    return heads


def _own_map(layer: LayerWeights, config: ModelConfig) -> KVMap:
    """The layer's own norm and projections."""
    assert layer.qkv.weight is not None
    bias = None if layer.qkv.bias is None else layer.qkv.bias[config.q_size :]
    return KVMap(layer.attn_norm, Affine(layer.qkv.weight[config.q_size :], bias))


def _read_fitted(
    path: Path,
    config: ModelConfig,
    kv_maps: dict[int, list[KVMap]],
    have: dict[int, int],
    like: torch.Tensor,
) -> None:
    """Put fitted maps in the place of own ones, for the exits and layers that have some.

    Args:
        have: Exit → layers whose maps are right already.
    """
    size, width = config.hidden_size, 2 * config.kv_size
    dtype, device = like.dtype, like.device
    unit = Affine(torch.ones(size, dtype=dtype, device=device))
    if config.norm == "layer":
        unit.bias = torch.zeros(size, dtype=dtype, device=device)
    with TensorFiles(path, dtype, SKIPPED_KV_WEIGHTS, device) as files:
        num_layers = max(len(maps) for maps in kv_maps.values())
        for layer in range(num_layers):
            names = {
                depth: f"exits.{depth}.kv.{layer}"
                for depth in kv_maps
                if max(depth, have.get(depth, 0)) <= layer
                and f"exits.{depth}.kv.{layer}.weight" in files
            }
            with files.apart(len(names) * width * (size + 1) * dtype.itemsize):
                for depth, name in names.items():
                    kv_maps[depth][layer] = KVMap(unit, _linear(files, name, width, size, True))


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


def _read_ends(files: TensorFiles, config: ModelConfig, num_positions: int) -> ModelWeights:
    """What lies before the first layer."""
    c = config
    if c.family != "opt":
        name = "model.embed_tokens.weight"
        return ModelWeights(files.read(name, c.vocab_size, c.hidden_size), {})
    embed = files.read(f"{_OPT}.embed_tokens.weight", c.vocab_size, c.embed_size)
    # OPT's position table starts with two rows that belong to padding.
    table = files.read(f"{_OPT}.embed_positions.weight", c.max_positions + 2, c.hidden_size)
    weights = ModelWeights(embed, {}, positions=table[2 : 2 + num_positions].clone())
    if c.embed_size != c.hidden_size:
        weights.project_in = files.read(f"{_OPT}.project_in.weight", c.hidden_size, c.embed_size)
    return weights


def read_final_head(
    files: TensorFiles,
    config: ModelConfig,
    embed: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> Head:
    """The model's own head, behind its last layer.

    Args:
        weight: Its largest part, where that is loaded already.
    """
    c = config
    if weight is None:
        weight = embed if c.tied_head else files.read("lm_head.weight", c.vocab_size, c.embed_size)
    if c.family != "opt":
        return Head(Affine(files.read("model.norm.weight", c.hidden_size)), weight)
    final = Head(
        _layer_norm(files, f"{_OPT}.final_layer_norm", c) if c.final_norm else None, weight
    )
    if c.embed_size != c.hidden_size:
        final.project = files.read(f"{_OPT}.project_out.weight", c.embed_size, c.hidden_size)
    return final


def _rope_family_layer(files: TensorFiles, config: ModelConfig, index: int) -> LayerWeights:
    c = config
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
    return layer


def _opt_layer(files: TensorFiles, config: ModelConfig, index: int) -> LayerWeights:
    c = config
    at = f"{_OPT}.layers.{index}"
    attn = f"{at}.self_attn"
    return LayerWeights(
        attn_norm=_layer_norm(files, f"{at}.self_attn_layer_norm", c),
        qkv=_qkv(files, c, attn),
        out=_linear(files, f"{attn}.out_proj", c.hidden_size, c.q_size, c.out_bias),
        mlp_norm=_layer_norm(files, f"{at}.final_layer_norm", c),
        up=_linear(files, f"{at}.fc1", c.ffn_size, c.hidden_size, c.mlp_bias),
        down=_linear(files, f"{at}.fc2", c.hidden_size, c.ffn_size, c.mlp_bias),
    )


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
