"""What a decoder-only checkpoint is made of, in terms shared by all native families.

`read_model_config` translates a Hugging Face `config.json` into a `ModelConfig`; everything it does
not know how to compute exactly is refused here, before a byte of weights is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quadriga.checkpoint.families import MAX_LAYERS, QWEN3_HEAD_DIM
from quadriga.checkpoint.json_files import GARBLED, read_object
from quadriga.checkpoint.quantisation import quantisation_of
from quadriga.errors import ConfigError

Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]

DEFAULT_WINDOW = 4096
"""Of Mistral's and Qwen's configurations in transformers, where a file names none."""
MAX_SIZE, MAX_NUMBER = 1 << 26, 1e12
"""No model has a width, or a base of RoPE, beyond these."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it is stretched.

    Attributes:
        factor: Every frequency is divided by it (`linear`), or only the low ones (`llama3`).
        low_freq_factor, high_freq_factor, original_positions: `llama3` only.
    """

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One architecture, family-neutral.

    Attributes:
        family: `llama`, `mistral`, `qwen2`, `qwen3` or `opt`.
        ffn_size: Width of the MLP's hidden layer.
        embed_size: Width of the token embedding; differs from `hidden_size` only in some OPTs,
            which project in and out.
        windows: For each layer, how many positions a token sees, itself included; 0 is all.
        rope: None where positions are learned.
        gated: The MLP multiplies an activated gate with a second projection.
        pre_norm: Normalise before attention and MLP; False normalises after the residual sum.
        final_norm: A norm stands between the last layer and the head.
        norm_affine: LayerNorm has weight and bias.
        qk_norm: RMSNorm over each head of Q and K, before the rotation.
        tied_head: The head is the token embedding.
        ranks: Equal parts of a model, of which this is one; heads, MLP and vocabulary are its own.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    embed_size: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Activation
    windows: tuple[int, ...]
    rope: RopeConfig | None
    gated: bool = True
    pre_norm: bool = True
    final_norm: bool = True
    norm_affine: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    ranks: int = 1

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def layer_values(self) -> int:
        """Numbers in one layer, matrices exactly, vectors (norms, biases) at most."""
        matrices = 2 * self.q_size + 2 * self.kv_size + (3 if self.gated else 2) * self.ffn_size
        vectors = 8 * self.hidden_size + self.q_size + 2 * self.kv_size + 2 * self.ffn_size
        return self.hidden_size * matrices + vectors


def read_model_config(path: Path) -> ModelConfig:
    """Read `path/config.json`.

    Raises:
        ConfigError: The family is not native, a field is missing or garbled, or the checkpoint
            wants something that would not be computed exactly (an unknown RoPE scaling, say).
    """
    file = path / "config.json"
    raw = read_object(file)
    architecture = _architecture(raw)
    parse = _FAMILIES.get(architecture)
    if parse is None:
        raise ConfigError(
            f"model: {path.name} is a {architecture}; the native engine runs "
            f"{', '.join(sorted(_FAMILIES))}",
            param="model",
        )
    quantisation_of(raw, path.name)  # says what cannot be read before anything is loaded
    try:
        config = parse(raw)
    except GARBLED as exc:
        raise ConfigError(
            f"model: {file} lacks or garbles a field: {type(exc).__name__} {exc}", param="model"
        ) from exc
    _check(config, path)
    return config


def _architecture(raw: dict[str, Any]) -> str:
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "unknown"


def _llama(raw: dict[str, Any]) -> ModelConfig:
    attention_bias = bool(raw.get("attention_bias", False))
    return _rope_family(
        raw,
        "llama",
        window=0,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
    )


def _mistral(raw: dict[str, Any]) -> ModelConfig:
    return _rope_family(raw, "mistral", window=int(raw.get("sliding_window", DEFAULT_WINDOW) or 0))


def _qwen2(raw: dict[str, Any]) -> ModelConfig:
    return _rope_family(raw, "qwen2", window=_qwen_window(raw), qkv_bias=True)


def _qwen3(raw: dict[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    return _rope_family(
        raw | {"head_dim": raw.get("head_dim") or QWEN3_HEAD_DIM},
        "qwen3",
        window=_qwen_window(raw),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
    )


def _qwen_window(raw: dict[str, Any]) -> int:
    if not raw.get("use_sliding_window"):
        return 0
    return int(raw.get("sliding_window", DEFAULT_WINDOW) or 0)


def _rope_family(raw: dict[str, Any], family: str, *, window: int, **features: bool) -> ModelConfig:
    hidden = int(raw["hidden_size"])
    heads = int(raw["num_attention_heads"])
    return ModelConfig(
        family=family,
        num_layers=int(raw["num_hidden_layers"]),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        ffn_size=int(raw["intermediate_size"]),
        vocab_size=int(raw["vocab_size"]),
        max_positions=int(raw.get("max_position_embeddings") or 2048),
        embed_size=hidden,
        norm="rms",
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=_activation(raw.get("hidden_act", "silu")),
        windows=_windows(raw, window),
        rope=_rope(raw),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        **features,
    )


def _windows(raw: dict[str, Any], window: int) -> tuple[int, ...]:
    """One window per layer; Qwen slides only in the layers that `layer_types` names."""
    num_layers = _num_layers(raw)
    types = raw.get("layer_types")
    if types is None and raw.get("use_sliding_window"):
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if i >= first else 0 for i in range(num_layers))
    if types is None:
        return (window,) * num_layers
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries for {num_layers} layers")
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types names {sorted(unknown)}")
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def _num_layers(raw: dict[str, Any]) -> int:
    num_layers = int(raw["num_hidden_layers"])
    if num_layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers: {num_layers} is above {MAX_LAYERS}")
    return num_layers


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Read both spellings: `rope_parameters` (new) and `rope_theta` with `rope_scaling` (old)."""
    new = dict(raw.get("rope_parameters") or {})
    scaling = dict(raw.get("rope_scaling") or new)  # the old one counts where both are there
    theta = float(
        scaling.get("rope_theta") or new.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    )
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1) != 1:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=float(scaling["factor"]))
    if kind == "llama3":
        original = scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]
        return RopeConfig(
            theta,
            "llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_positions=int(original),
        )
    raise ConfigError(
        f"model: RoPE scaling {kind!r} is not supported; default, linear and llama3 are, and "
        "runner: baton runs others at full depth",
        param="model",
    )


def _opt(raw: dict[str, Any]) -> ModelConfig:
    hidden = int(raw["hidden_size"])
    heads = int(raw["num_attention_heads"])
    num_layers = _num_layers(raw)
    pre_norm = bool(raw.get("do_layer_norm_before", True))
    bias = bool(raw.get("enable_bias", True))
    return ModelConfig(
        family="opt",
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=int(raw["ffn_dim"]),
        vocab_size=int(raw["vocab_size"]),
        max_positions=int(raw.get("max_position_embeddings") or 2048),
        embed_size=int(raw.get("word_embed_proj_dim") or hidden),
        norm="layer",
        norm_eps=1e-5,
        activation=_activation(raw.get("activation_function", "relu")),
        windows=(0,) * num_layers,
        rope=None,
        gated=False,
        pre_norm=pre_norm,
        final_norm=pre_norm and not raw.get("_remove_final_layer_norm", False),
        norm_affine=bool(raw.get("layer_norm_elementwise_affine", True)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied_head=bool(raw.get("tie_word_embeddings", True)),
    )


def _activation(name: Any) -> Activation:
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"model: activation {name!r} is not supported; {', '.join(sorted(_ACTIVATIONS))} are",
            param="model",
        )
    return _ACTIVATIONS[name]


def _check(config: ModelConfig, path: Path) -> None:
    sizes = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "vocab_size": config.vocab_size,
    }
    rope = config.rope or RopeConfig(1.0)
    numbers = {
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "factor of RoPE": rope.factor,
        "high_freq_factor - low_freq_factor": rope.high_freq_factor - rope.low_freq_factor,
    }
    for name, value in (sizes | numbers).items():
        most = MAX_SIZE if name in sizes else MAX_NUMBER
        if not 0 < value <= most:
            raise ConfigError(
                f"model: {path.name}: {name} is {value}; must be positive, {most:,.0f} at most; "
                "mend its config.json, or fetch it again",
                param="model",
            )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"model: {path.name}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} KV heads evenly",
            param="model",
        )
    if config.rope is not None and config.head_dim % 2:
        raise ConfigError(
            f"model: {path.name}: head_dim {config.head_dim} must be even for RoPE", param="model"
        )


_FAMILIES = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "OPTForCausalLM": _opt,
}
