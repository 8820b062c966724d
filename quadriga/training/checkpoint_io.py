"""The family's checkpoints on disk: ordinary Hugging Face directories plus two files for the exits.

`exits.json` says where the exits are and how they decide; `exits.safetensors` holds each exit's
norm as `exits.{layer}.norm.weight`. Plain `transformers` ignores both and runs the full depth.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from quadriga.checkpoint.exits import EXITS_FILE, EXITS_WEIGHTS, ExitSpec, to_json
from quadriga.training.model import EarlyExitLlama
from quadriga.training.recipe.family import FamilyMember, ModelShape
from quadriga.training.recipe.model_card import model_card
from quadriga.training.tokenizer import END_ID, PAD_ID, build_tokenizer, save_tokenizer
from quadriga.tune.folder import save_halves


def to_llama_state(model: EarlyExitLlama) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights by their Hugging Face names, and the exits' norms."""
    state = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.exit_norm[-1],
        "lm_head.weight": model.head,
    }
    roles = {
        "self_attn.q_proj": model.q,
        "self_attn.k_proj": model.k,
        "self_attn.v_proj": model.v,
        "self_attn.o_proj": model.o,
        "mlp.gate_proj": model.gate,
        "mlp.up_proj": model.up,
        "mlp.down_proj": model.down,
        "input_layernorm": model.attention_norm,
        "post_attention_layernorm": model.mlp_norm,
    }
    for role, stack in roles.items():
        for layer, weight in enumerate(stack.unbind()):
            state[f"model.layers.{layer}.{role}.weight"] = weight
    exits = {
        f"exits.{layer}.norm.weight": model.exit_norm[index]
        for index, layer in enumerate(model.shape.exits)
    }
    return state, exits


def save_checkpoint(
    model: EarlyExitLlama, member: FamilyMember, folder: Path, *, facts: dict[str, Any]
) -> None:
    """Write a checkpoint directory, replacing an older one as a whole.

    Args:
        model: Weights to store; they are rounded to fp16.
        member: Whose they are.
        folder: Target, e.g. `quadriga/assets/quadriga-s`.
        facts: Stated in the model card: "steps", "tokens", optionally "figures".

    Raises:
        ConfigError: A weight does not fit fp16.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state, exits = to_llama_state(model)
    save_halves(partial / "model.safetensors", state)
    save_halves(partial / EXITS_WEIGHTS, exits)
    shape = model.shape
    spec = ExitSpec(
        shape.exits, "norm", threshold=member.exit_threshold, replay_newest=member.replay_newest
    )
    _write_json(partial / EXITS_FILE, to_json(spec))
    _write_json(partial / "config.json", _llama_config(shape, model.vocab_size))
    _write_json(
        partial / "generation_config.json",
        {"do_sample": False, "eos_token_id": END_ID, "pad_token_id": PAD_ID},
    )
    save_tokenizer(partial)
    (partial / "README.md").write_text(model_card(member, model, facts))
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def _llama_config(shape: ModelShape, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        # Stored in fp16, meant to be computed in fp32: this is what loaders upcast to.
        "torch_dtype": "float32",
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def load_checkpoint(folder: Path) -> EarlyExitLlama:
    """Read a checkpoint directory of the family, upcast to fp32.

    Raises:
        ValueError: Its vocabulary is not the family's.
    """
    config = json.loads((folder / "config.json").read_text())
    layers = json.loads((folder / EXITS_FILE).read_text())["layers"]
    shape = ModelShape(
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        ff=config["intermediate_size"],
        exits=tuple(layers),
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    vocab_size = build_tokenizer().get_vocab_size()
    if config["vocab_size"] != vocab_size:
        raise ValueError(
            f"{folder}: vocab_size is {config['vocab_size']}, the family's tokenizer has "
            f"{vocab_size}; export the checkpoint again from its training state"
        )
    model = EarlyExitLlama(shape, vocab_size)
    halves = load_file(folder / "model.safetensors")
    exits = load_file(folder / EXITS_WEIGHTS)
    stored, exit_norms = to_llama_state(model)  # names only; the tensors are replaced
    if halves.keys() != stored.keys() or exits.keys() != exit_norms.keys():
        raise ValueError(f"{folder}: tensors are not those of {config['architectures']} with exits")

    def stack(role: str) -> Tensor:
        return torch.stack(
            [halves[f"model.layers.{layer}.{role}.weight"] for layer in range(shape.layers)]
        )

    norms = [exits[f"exits.{layer}.norm.weight"] for layer in shape.exits]
    model.load_state_dict(
        {
            "embed": halves["model.embed_tokens.weight"],
            "head": halves["lm_head.weight"],
            "exit_norm": torch.stack([*norms, halves["model.norm.weight"]]),
            "q": stack("self_attn.q_proj"),
            "k": stack("self_attn.k_proj"),
            "v": stack("self_attn.v_proj"),
            "o": stack("self_attn.o_proj"),
            "gate": stack("mlp.gate_proj"),
            "up": stack("mlp.up_proj"),
            "down": stack("mlp.down_proj"),
            "attention_norm": stack("input_layernorm"),
            "mlp_norm": stack("post_attention_layernorm"),
        }
    )
    return model.eval()
