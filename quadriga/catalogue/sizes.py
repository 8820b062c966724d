"""How many parameters a model has, layer by layer, from its `config.json` alone.

Weights and KV memory at any depth follow by multiplication, before a byte of weights is read; so a
planner needs no checkpoint, and a catalogue can find a file that does not fit its configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quadriga.checkpoint.exits import NO_EXITS, ExitSpec
from quadriga.checkpoint.families import NATIVE_ARCHITECTURES, read_facts
from quadriga.checkpoint.json_files import GARBLED
from quadriga.errors import ConfigError

_OPT = "OPTForCausalLM"
_OPT_SPARE_POSITIONS = 2
"""Rows of OPT's position table that belong to padding."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Parameters of a model by where they are, and its KV cache.

    Attributes:
        embed_params: Token embedding, learned positions, projections in and out.
        layer_params: Of each layer, [num_layers].
        head_params: Final norm, and the head where it is not the embedding.
        exit_params: Layers run at a non-final exit → what that exit adds.
        kv_values_per_layer: Values of one token's K and V in one layer.
        max_positions: Most positions the model was made for.
    """

    embed_params: int
    layer_params: tuple[int, ...]
    head_params: int
    kv_values_per_layer: int
    max_positions: int
    exit_params: tuple[tuple[int, int], ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layer_params)

    @property
    def total_params(self) -> int:
        """Of the model itself, without exits."""
        return self.embed_params + sum(self.layer_params) + self.head_params

    def params(self, depth: int) -> int:
        """Parameters held where layers 1..depth are loaded, with the exits up to there.

        Raises:
            ConfigError: `depth` is outside the model.
        """
        if not 1 <= depth <= self.num_layers:
            raise ConfigError(
                f"depth: {depth} must lie in 1..{self.num_layers}, the layers of the model",
                param="depth",
            )
        exits = sum(size for layer, size in self.exit_params if layer <= depth)
        return self.embed_params + sum(self.layer_params[:depth]) + self.head_params + exits

    def weight_bytes(self, depth: int, bytes_per_value: int) -> int:
        """Bytes of weights at a depth. Raises: ConfigError as `params`."""
        return self.params(depth) * bytes_per_value

    def kv_bytes_per_token(self, depth: int, bytes_per_value: int) -> int:
        """Bytes of KV cache one token takes in the first `depth` layers."""
        return depth * self.kv_values_per_layer * bytes_per_value


def sizes_of(config: dict[str, Any], exits: ExitSpec = NO_EXITS) -> ModelSizes:
    """Count the parameters of a parsed `config.json`.

    Args:
        exits: What the model's `exits.json` says; own norms and heads are counted.

    Raises:
        ConfigError: The family is not one whose layers are known here, or a field is missing.
    """
    try:
        architecture = str((config.get("architectures") or ["unknown"])[0])
        if architecture == _OPT:
            return _opt(config, exits)
        if architecture in NATIVE_ARCHITECTURES:
            return _gated(config, architecture, exits)
    except GARBLED as exc:
        raise ConfigError(f"config.json lacks or garbles the field {exc}") from exc
    raise ConfigError(
        f"config.json: the layers of {architecture} are not known; parameters are counted for "
        f"{', '.join(sorted(NATIVE_ARCHITECTURES))}",
        param="architectures",
    )


def _gated(config: dict[str, Any], architecture: str, exits: ExitSpec) -> ModelSizes:
    """Llama and its kin: RMS norms, grouped queries, a gated MLP, rotary positions."""
    facts = read_facts(config)
    hidden, ffn = facts.hidden_size, int(config["intermediate_size"])
    q_size = int(config["num_attention_heads"]) * facts.head_dim
    kv_size = facts.num_kv_heads * facts.head_dim
    layer = 2 * hidden * (q_size + kv_size) + 3 * hidden * ffn + 2 * hidden
    if config.get("attention_bias") or architecture == "Qwen2ForCausalLM":
        layer += q_size + 2 * kv_size
        layer += hidden if architecture == "LlamaForCausalLM" else 0
    if config.get("mlp_bias"):
        layer += 2 * ffn + hidden
    if architecture == "Qwen3ForCausalLM":
        layer += 2 * facts.head_dim
    embed = facts.vocab_size * hidden
    return ModelSizes(
        embed_params=embed,
        layer_params=(layer,) * facts.num_layers,
        head_params=hidden + (0 if config.get("tie_word_embeddings") else embed),
        kv_values_per_layer=2 * kv_size,
        max_positions=facts.max_positions,
        exit_params=_exit_params(exits, norm=hidden, head=embed),
    )


def _opt(config: dict[str, Any], exits: ExitSpec) -> ModelSizes:
    """OPT: layer norms with bias, plain MLP, learned positions, head tied to the embedding."""
    facts = read_facts(config)
    hidden, ffn = facts.hidden_size, int(config["ffn_dim"])
    embed_size = int(config.get("word_embed_proj_dim") or hidden)
    biases = 5 * hidden + ffn if config.get("enable_bias", True) else 0
    norm = 2 * hidden if config.get("layer_norm_elementwise_affine", True) else 0
    layer = 4 * hidden * hidden + 2 * hidden * ffn + biases + 2 * norm
    embed = facts.vocab_size * embed_size
    embed += (facts.max_positions + _OPT_SPARE_POSITIONS) * hidden
    embed += 2 * hidden * embed_size if embed_size != hidden else 0
    is_tied = config.get("tie_word_embeddings", True)
    has_final_norm = config.get("do_layer_norm_before", True) and not config.get(
        "_remove_final_layer_norm"
    )
    return ModelSizes(
        embed_params=embed,
        layer_params=(layer,) * facts.num_layers,
        head_params=(norm if has_final_norm else 0)
        + (0 if is_tied else facts.vocab_size * embed_size),
        kv_values_per_layer=2 * facts.num_kv_heads * facts.head_dim,
        max_positions=facts.max_positions,
        exit_params=_exit_params(exits, norm=2 * hidden, head=facts.vocab_size * hidden),
    )


def _exit_params(exits: ExitSpec, *, norm: int, head: int) -> tuple[tuple[int, int], ...]:
    """What each non-final exit holds of its own, but for an MLP's, whose width is in its file."""
    norm_after = norm if exits.has_norm else 0
    own = {
        "shared": 0,
        "norm": norm,
        "mlp": norm + norm_after + (head if exits.own_head else 0),
        "head": norm_after + head,
    }[exits.kind]
    return tuple((layer, own) for layer in exits.layers if own)
