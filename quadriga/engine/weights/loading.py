"""Read a checkpoint's weights a layer at a time, so that depth k costs k layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quadriga.checkpoint.exits import EXITS_WEIGHTS, SKIPPED_KV_WEIGHTS, ExitSpec
from quadriga.checkpoint.model_config import ModelConfig
from quadriga.config.engine_spec import EngineSpec
from quadriga.engine.weights.adapters import load_adapters
from quadriga.engine.weights.checkpoint_weights import (
    ExitMLP,
    Head,
    KVMap,
    LayerWeights,
    Linear,
    ModelWeights,
    Norm,
)
from quadriga.engine.weights.matrix import Form, Matrix, MatrixForm
from quadriga.engine.weights.tensor_files import CPU, TensorFiles, WeightSource
from quadriga.errors import ConfigError
from quadriga.observability.load_progress import LOADING

if TYPE_CHECKING:
    from quadriga.engine.weights.shards import Shard

_OPT = "model.decoder"
FORM_OF_SETTING: dict[str, MatrixForm] = {
    "float32": Form.FLOAT32,
    "bfloat16": Form.BFLOAT16_PAIRS,
    "float16": Form.FLOAT16,
    "int8": Form.INT8,
}
"""By `engine.weights`, without `auto`."""


def load_spec(
    spec: EngineSpec,
    config: ModelConfig,
    *,
    device: torch.device = CPU,
    has_kernels: bool = False,
    shard: Shard | None = None,
) -> ModelWeights:
    """Read the weights that an engine needs; see `load_weights`.

    Args:
        has_kernels: They compute, and read matrices as they are stored; plain torch wants numbers.
        shard: The part to read, whose own `config` is given; None reads all.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    form = FORM_OF_SETTING.get(spec.weights, "stored" if has_kernels else "dtype")
    weights = load_weights(
        WeightSource(
            spec.checkpoint.path,
            dtype,
            device,
            spec.shared_in,
            form,
            spec.checkpoint.heads_path,
            shard,
        ),
        config,
        spec.depth,
        spec.row_capacity_tokens,
        spec.checkpoint.exits,
        fitted_maps=spec.skipped_kv == "linear",
    )
    weights.adapters = load_adapters(spec.adapters, config, dtype)
    return weights


def load_weights(
    source: WeightSource,
    config: ModelConfig,
    depth: int,
    num_positions: int,
    exits: ExitSpec | None = None,
    *,
    fitted_maps: bool = False,
) -> ModelWeights:
    """Read embedding, layers 1..depth, and the heads of all exits up to there.

    The head behind the last loaded layer is that layer's exit head where it is an exit, else the
    model's own.

    Args:
        num_positions: Learned positions to keep, for the families that have them.
        exits: None where the model has none.
        fitted_maps: Make K and V of skipped layers by the fitted maps where the checkpoint has
            some, instead of the layers' own projections.

    Raises:
        ConfigError: `depth` is beyond the model, or the files do not fit `config`.
    """
    if not 1 <= depth <= config.num_layers:
        raise ConfigError(
            f"depth: {depth} must be in 1..{config.num_layers}, the layers of {source.path.name}",
            param="depth",
        )
    table = config.vocab_size * config.embed_size * source.dtype.itemsize
    head = 0 if config.tied_head else table
    LOADING.begin(
        f"reads the weights of {depth} layers",
        table + depth * config.layer_values * source.dtype.itemsize + head,
    )
    with source.open() as files:
        with files.part("embedding", table):
            weights = _read_ends(files, config, num_positions)
        for index in range(depth):
            weights.layers.append(read_layer(files, config, index))
        with files.part("head", head):
            final = read_final_head(files, config, weights.embed)
    at = [k for k in exits.layers if k <= depth] if exits is not None else []
    weights.heads[depth] = final
    if exits is not None and at:
        LOADING.begin("reads the exits")
        weights.kv_maps = kv_maps_of(source, config, weights.layers, at, fitted=fitted_maps)
        weights.heads.update(read_exit_heads(source, config, exits, at, final))
    return weights


def read_layer(files: TensorFiles, config: ModelConfig, index: int) -> LayerWeights:
    """Read layer `index`, from 0, into memory of its own. Raises: ConfigError as `into`."""
    read = _opt_layer if config.family == "opt" else _rope_family_layer
    with files.part(f"layer {index}", config.layer_values * files.dtype.itemsize):
        return read(files, config, index)


def kv_maps_of(
    source: WeightSource,
    config: ModelConfig,
    layers: list[LayerWeights],
    exits: list[int],
    *,
    fitted: bool,
    known: dict[int, list[KVMap]] | None = None,
) -> dict[int, list[KVMap]]:
    """For each exit, how K and V of every layer are made of the hidden state there.

    Args:
        fitted: Use the checkpoint's fitted maps where it has some.
        known: Maps that are loaded already; those layers are not read again.
    """
    maps = {k: list((known or {}).get(k, ())) for k in exits}
    for of_exit in maps.values():
        of_exit += [_own_map(layer, config) for layer in layers[len(of_exit) :]]
    if fitted and (source.heads.path / SKIPPED_KV_WEIGHTS).is_file():
        have = {k: len(of_exit) for k, of_exit in (known or {}).items()}
        _read_fitted(source.heads, config, maps, have)
    return maps


def read_exit_heads(
    source: WeightSource, config: ModelConfig, exits: ExitSpec, at: list[int], final: Head
) -> dict[int, Head]:
    """Heads of some exits, none of them the end of the model; `final` is the model's own."""
    if exits.kind == "shared" or not at:
        return dict.fromkeys(at, final)
    heads = {}
    with source.heads.open(EXITS_WEIGHTS) as files:
        for layer in at:
            name = f"exits.{layer}.mlp.down.weight"
            size = 2 + (config.vocab_size if exits.has_own_head else 0)
            size += 3 * files.shape(name)[1] if exits.kind == "mlp" else 0
            with files.part(f"exit {layer}", size * config.hidden_size * source.dtype.itemsize):
                heads[layer] = _exit_head(files, config, exits, layer, final)
    return heads


def _own_map(layer: LayerWeights, config: ModelConfig) -> KVMap:
    """The layer's own norm and projections."""
    bias = None if layer.qkv.bias is None else layer.qkv.bias[config.q_size :]
    return KVMap(layer.attn_norm, Linear(layer.qkv.weight[config.q_size :], bias))


def _read_fitted(
    source: WeightSource, config: ModelConfig, kv_maps: dict[int, list[KVMap]], have: dict[int, int]
) -> None:
    """Put fitted maps in the place of own ones, for the exits and layers that have some.

    Args:
        have: Exit → layers whose maps are right already.
    """
    size, width = config.hidden_size, 2 * config.kv_size
    dtype, device = source.dtype, source.device
    unit = Norm(torch.ones(size, dtype=dtype, device=device))
    if config.norm == "layer":
        unit.bias = torch.zeros(size, dtype=dtype, device=device)
    with source.open(SKIPPED_KV_WEIGHTS) as files:
        num_layers = max(len(maps) for maps in kv_maps.values())
        for layer in range(num_layers):
            names = {
                depth: f"exits.{depth}.kv.{layer}"
                for depth in kv_maps
                if max(depth, have.get(depth, 0)) <= layer
                and f"exits.{depth}.kv.{layer}.weight" in files
            }
            part = f"maps {layer} of exits {sorted(names)}"
            with files.part(part, len(names) * width * (size + 1) * dtype.itemsize):
                for depth, name in names.items():
                    kv_maps[depth][layer] = KVMap(unit, _linear(files, name, width, size, True))


def _exit_head(
    files: TensorFiles, config: ModelConfig, exits: ExitSpec, layer: int, final: Head
) -> Head:
    name, size = f"exits.{layer}", config.hidden_size
    norm = _exit_norm(files, config, f"{name}.norm") if exits.has_norm else None
    weight, project = final.weight, final.project
    if exits.has_own_head:
        weight, project = files.matrix(f"{name}.head.weight", config.vocab_size, size), None
    if exits.kind != "mlp":
        return Head(norm, weight, project)
    width = files.shape(f"{name}.mlp.down.weight")[1]
    rows = width * (2 if config.gated else 1)
    has_bias = f"{name}.mlp.up.bias" in files
    mlp = ExitMLP(
        _exit_norm(files, config, f"{name}.mlp.norm"),
        _linear(files, f"{name}.mlp.up", rows, size, has_bias, parts=2 if config.gated else 0),
        _linear(files, f"{name}.mlp.down", size, width, has_bias),
    )
    return Head(norm, weight, project, mlp)


def _exit_norm(files: TensorFiles, config: ModelConfig, name: str) -> Norm:
    norm = Norm(files.read(f"{name}.weight", config.hidden_size))
    if config.norm == "layer":
        norm.bias = files.read(f"{name}.bias", config.hidden_size)
    return norm


def _read_ends(files: TensorFiles, config: ModelConfig, num_positions: int) -> ModelWeights:
    """What lies before the first layer."""
    c = config
    source, embed = files.source, files.matrix(_embedding(c), c.vocab_size, c.embed_size)
    weights = ModelWeights(source.dtype, source.device, source.form, embed)
    if c.family != "opt":
        return weights
    # OPT's position table starts with two rows that belong to padding.
    table = files.read(f"{_OPT}.embed_positions.weight", c.max_positions + 2, c.hidden_size)
    weights.positions = table[2 : 2 + num_positions].clone()
    if c.embed_size != c.hidden_size:
        weights.project_in = files.matrix(f"{_OPT}.project_in.weight", c.hidden_size, c.embed_size)
    return weights


def _embedding(config: ModelConfig) -> str:
    return f"{_OPT if config.family == 'opt' else 'model'}.embed_tokens.weight"


def read_final_head(
    files: TensorFiles, config: ModelConfig, embed: Matrix, weight: Matrix | None = None
) -> Head:
    """The model's own head, behind its last layer.

    Args:
        weight: Its largest part, where that is loaded already.
    """
    c = config
    if weight is None and c.tied_head:
        files.check_tied("lm_head.weight", _embedding(c))
        weight = embed
    elif weight is None:
        weight = files.matrix("lm_head.weight", c.vocab_size, c.embed_size)
    if c.family != "opt":
        return Head(Norm(files.read("model.norm.weight", c.hidden_size)), weight)
    norm = _layer_norm(files, f"{_OPT}.final_layer_norm", c) if c.final_norm else None
    final = Head(norm, weight)
    if c.embed_size != c.hidden_size:
        final.project = files.matrix(f"{_OPT}.project_out.weight", c.embed_size, c.hidden_size)
    return final


def _rope_family_layer(files: TensorFiles, config: ModelConfig, index: int) -> LayerWeights:
    c = config
    at = f"model.layers.{index}"
    attn, mlp = f"{at}.self_attn", f"{at}.mlp"
    layer = LayerWeights(
        attn_norm=Norm(files.read(f"{at}.input_layernorm.weight", c.hidden_size)),
        qkv=_qkv(files, c, attn),
        out=_linear_back(files, f"{attn}.o_proj", c, c.q_size, c.out_bias),
        mlp_norm=Norm(files.read(f"{at}.post_attention_layernorm.weight", c.hidden_size)),
        up=_stacked(
            files,
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            [c.ffn_size, c.ffn_size],
            c.hidden_size,
            c.mlp_bias,
        ),
        down=_linear_back(files, f"{mlp}.down_proj", c, c.ffn_size, c.mlp_bias),
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
        out=_linear_back(files, f"{attn}.out_proj", c, c.q_size, c.out_bias),
        mlp_norm=_layer_norm(files, f"{at}.final_layer_norm", c),
        up=_linear(files, f"{at}.fc1", c.ffn_size, c.hidden_size, c.mlp_bias),
        down=_linear_back(files, f"{at}.fc2", c, c.ffn_size, c.mlp_bias),
    )


def _qkv(files: TensorFiles, config: ModelConfig, attn: str) -> Linear:
    return _stacked(
        files,
        [f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"],
        [config.q_size, config.kv_size, config.kv_size],
        config.hidden_size,
        config.qkv_bias,
    )


def _stacked(
    files: TensorFiles, names: list[str], sizes: list[int], inputs: int, bias: bool
) -> Linear:
    return Linear(
        files.stack([f"{n}.weight" for n in names], sizes, inputs),
        files.join([f"{n}.bias" for n in names], sizes) if bias else None,
    )


def _linear(
    files: TensorFiles, name: str, outputs: int, inputs: int, bias: bool, *, parts: int = 0
) -> Linear:
    return Linear(
        files.matrix(f"{name}.weight", outputs, inputs, parts=parts),
        files.read(f"{name}.bias", outputs) if bias else None,
    )


def _linear_back(
    files: TensorFiles, name: str, config: ModelConfig, inputs: int, bias: bool
) -> Linear:
    """A projection into the hidden states: a part of them, of the inputs of all ranks."""
    return _linear(files, name, config.hidden_size // config.ranks, inputs * config.ranks, bias)


def _layer_norm(files: TensorFiles, name: str, config: ModelConfig) -> Norm:
    if not config.norm_affine:
        return Norm(None)
    size = config.hidden_size
    return Norm(files.read(f"{name}.weight", size), files.read(f"{name}.bias", size))
