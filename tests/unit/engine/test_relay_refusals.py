"""What the relay batch does not serve is refused before it serves, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CTRLConfig,
    DeepseekV3Config,
    JambaConfig,
    Llama4TextConfig,
    MambaConfig,
    OpenAIGPTConfig,
    Phi3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from quadriga.engine import load_runner
from quadriga.engine.baton import probe as probing
from quadriga.engine.baton.loading import check_config, load_model
from quadriga.engine.baton.model import CausalModel
from quadriga.errors import ConfigError
from tests.equivalence.models import make_spec, save
from tests.equivalence.relay_models import FAMILIES, GPT, GQA, MHA, VOCAB, build_relay

SMALL = {k: v for k, v in GQA.items() if k != "max_position_embeddings"}
DEEPSEEK = MHA | {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "recurrent": (
        lambda: RecurrentGemmaConfig(
            vocab_size=VOCAB,
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=6,
            intermediate_size=88,
        ),
        "RecurrentGemmaForCausalLM keeps a recurrent state instead of K/V",
    ),
    "hybrid": (
        lambda: JambaConfig(**SMALL, num_experts=2),
        "JambaForCausalLM keeps a recurrent state",
    ),
    "linear-attention": (
        lambda: Qwen3NextConfig(**GQA, head_dim=8, num_experts=2),
        "Qwen3NextForCausalLM keeps a recurrent state",
    ),
    "latent": (lambda: DeepseekV3Config(**DEEPSEEK), r"\[1, 1, 3, 8\] and \[1, 1, 3, 16\]"),
    "chunked": (
        lambda: Llama4TextConfig(**GQA, head_dim=8, num_local_experts=2, attention_chunk_size=16),
        "its attention is chunked by position",
    ),
    "no-cache": (lambda: OpenAIGPTConfig(**GPT), "takes no past_key_values"),
    "both-ways": (lambda: BertConfig(**MHA), "ignores the mask or the positions .* or looks ahead"),
}


def refused(path: Path, message: str, **spec: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        load_runner(make_spec(path, runner="baton", **spec))


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    make, message = REFUSED[kind]
    path = save(build_relay(make()), tmp_path / "odd")
    refused(path, rf"odd cannot run in the relay batch: .*{message}")


def test_models_without_attention_are_refused_by_their_configuration(tmp_path: Path) -> None:
    MambaConfig(vocab_size=VOCAB, hidden_size=48, num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="without attention there is no K/V to serve"):
        make_spec(tmp_path, runner="baton")


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    refused(tmp_path, "encoder-decoder")


def test_layers_that_share_kv_are_refused() -> None:
    config = FAMILIES["gemma3-window"]()
    config.kv_sharing_modes = [None, None, "reuse"]
    with pytest.raises(ConfigError, match="layer 2 has no K/V cache of its own but a DummyLayer"):
        check_config(config, "shared")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return save(build_relay(FAMILIES["gpt2"]()), tmp_path / "gpt2")


def change_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_code_of_the_checkpoint_is_never_run(gpt2: Path) -> None:
    (gpt2 / "modeling_own.py").write_text("raise SystemExit('ran')")
    own = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    change_config(gpt2, model_type="own-model", auto_map=own)
    refused(gpt2, "transformers does not know its configuration")


def test_pickled_weights_are_not_loaded(gpt2: Path) -> None:
    torch.save(load_file(gpt2 / "model.safetensors"), gpt2 / "pytorch_model.bin")
    (gpt2 / "model.safetensors").unlink()
    refused(gpt2, "pickled weights are not loaded")


def test_quantised_weights_are_refused(gpt2: Path) -> None:
    change_config(gpt2, quantization_config={"quant_method": "fp8"})
    refused(gpt2, "quantised")


def test_a_missing_tensor_is_not_made_up(gpt2: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    dropped = next(name for name in tensors if name.endswith("h.1.attn.c_attn.weight"))
    del tensors[dropped]
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    refused(gpt2, r"tensors are missing, .*h\.1\.attn\.c_attn\.weight")


def test_blocks_of_a_gguf_file_are_not_called_missing_tensors(gpt2: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    name = next(name for name in tensors if name.endswith("h.1.attn.c_attn.weight"))
    tensors[f"{name}.Q8_0"] = torch.zeros(tensors.pop(name).shape[0], 34, dtype=torch.uint8)
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    refused(gpt2, "in blocks of a GGUF file; leave runner out")


def test_damaged_weights_are_refused(gpt2: Path) -> None:
    (gpt2 / "model.safetensors").write_bytes(b"garbage")
    refused(gpt2, "transformers cannot load it")


@pytest.mark.parametrize("family", ["gpt2", "mpt", "biogpt"])
def test_rows_beyond_the_position_table_are_refused(family: str, tmp_path: Path) -> None:
    path = save(build_relay(FAMILIES[family]()), tmp_path)
    refused(path, "cannot compute position 119", row_capacity_tokens=120)


def test_longrope_is_served_where_all_rows_are_treated_alike(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    config = Phi3Config(
        **GQA, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=32
    )
    path = save(build_relay(config), tmp_path)
    refused(path, r"beyond the 32 positions .*max_model_len to 32", row_capacity_tokens=33)
    load_runner(make_spec(path, runner="baton", row_capacity_tokens=32))


def test_a_cache_larger_than_planned_is_refused(tmp_path: Path) -> None:
    """Memory was promised by config.json's figures; a model that needs more must not start."""
    path = save(build_relay(FAMILIES["gpt-neox"]()), tmp_path)
    change_config(path, num_key_value_heads=1)
    refused(path, r"takes 288 numbers a token, config\.json lets expect 48")


class Stubborn(CausalModel):
    """Counts positions by columns, as some remote models do."""

    def __call__(self, input_ids: Any, mask: Any, positions: Any, *rest: Any) -> Any:
        past = mask.shape[1] - input_ids.shape[1]
        columns = torch.arange(past, mask.shape[1]).expand_as(positions)
        return super().__call__(input_ids, mask, columns, *rest)


class Blind(CausalModel):
    """Sees padding like anything else."""

    def __call__(self, input_ids: Any, mask: Any, positions: Any, *rest: Any) -> Any:
        return super().__call__(input_ids, torch.ones_like(mask), positions, *rest)


@pytest.mark.parametrize("kind", [Stubborn, Blind])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_probe_notices_what_is_ignored(
    kind: type[CausalModel], dtype: str, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(gpt2, runner="baton", dtype=dtype)
    model, geometry = probing.probe(spec, load_model(spec))
    assert probing.padding_error(model, geometry, spec) <= probing.TOLERANCE[dtype] / 2
    monkeypatch.setattr(probing, "CausalModel", kind)
    with pytest.raises(ConfigError, match="ignores the mask or the positions"):
        probing.probe(spec, load_model(spec))


def test_old_families_without_positions_of_their_own_still_pass(tmp_path: Path) -> None:
    """CTRL knows no attention interface; what counts is that the trial agrees."""
    config = CTRLConfig(vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=6, n_positions=96, dff=64)
    torch.manual_seed(0)
    path = save(AutoModelForCausalLM.from_config(config), tmp_path)
    assert load_runner(make_spec(path, runner="baton")).num_layers == 2
