"""A model from a GGUF file computes what `transformers` makes of the same file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quadriga.engine import load_runner
from quadriga.engine.model_runner import NativeRunner
from quadriga.engine.models.layers import TokenSpan
from quadriga.engine.weights.tensor_files import WeightSource
from quadriga.gguf.cache import converted_folder, plain_folder
from quadriga.text import load_tokenizer
from tests.equivalence.models import make_spec, make_state
from tests.gguf_files import LARGEST_VALUE, READABLE, smollm2, write_model

TOLERANCE = 1e-4
LENGTH = 48
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-3),
    "llama-one-kv-head": LlamaConfig(**(SIZES | {"num_key_value_heads": 1})),
    "llama-all-kv-heads": LlamaConfig(**(SIZES | {"num_key_value_heads": 4})),
    "llama-head-dim": LlamaConfig(**SIZES, head_dim=32),
    "llama-theta": LlamaConfig(**SIZES, rope_parameters={"rope_theta": 500_000.0}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=128),  # the only one that transformers' loader takes
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=128, tie_word_embeddings=True),
}
FREQUENCIES = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ORIGINALS: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "biases": (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), {}),
    "qwen3 with biases": (Qwen3Config(**SIZES, head_dim=64, attention_bias=True), {}),
    "linear": (
        LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
        ),
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0},
    ),
    "linear as old files say it": (
        LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
        ),
        {"llama.rope.scale_linear": 3.0},
    ),
    "no scaling": (
        LlamaConfig(**SIZES),
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0},
    ),
    "window": (MistralConfig(**SIZES, sliding_window=9), {"llama.attention.sliding_window": 9}),
}
"""What `transformers` leaves out of a GGUF file: the model is the one that the file was made of."""


def logits_of(folder: Path, ids: list[int], **spec: Any) -> torch.Tensor:
    """What the native engine makes of a prompt. [tokens, vocabulary]"""
    runner = load_runner(make_spec(folder, num_rows=1, row_capacity_tokens=len(ids) + 1, **spec))
    assert isinstance(runner, NativeRunner)
    runner.attach(0, make_state(ids))
    decoder = runner.model.fastest()
    batch = decoder.plan([TokenSpan(0, 0, len(ids), 0)])
    with torch.inference_mode():
        x = decoder.run_layers(decoder.embed(ids, batch), batch, 0, runner.num_layers)
        return decoder.logits(x, runner.num_layers).clone()


def of_transformers(file: Path) -> PreTrainedModel:
    """The file, as its loader in `transformers` reads it.

    Its parts, because `from_pretrained` asks for a further package before it calls them.
    """
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    model.tie_weights()
    return model.eval()


def assert_same_logits(
    folder: Path, model: PreTrainedModel, ids: list[int], specs: tuple[dict[str, Any], ...] = ({},)
) -> None:
    """The engine's logits, with each spec, are within `TOLERANCE` of the model's, the model's own
    rounding apart.

    Two computations in fp32 are apart by the rounding of both; the model's own is measured in fp64.
    """
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0]
        exact = copy.deepcopy(model).double()(torch.tensor([ids])).logits[0]
    assert wanted.abs().max() > 0.1
    own_rounding = float((wanted - exact).abs().max())
    assert own_rounding < TOLERANCE
    for spec in specs:
        found = logits_of(folder, ids, **spec)
        assert float((found - wanted).abs().max()) < TOLERANCE + own_rounding


def some_ids(vocab_size: int) -> list[int]:
    ids: list[int] = np.random.default_rng(3).integers(0, vocab_size, LENGTH).tolist()
    return ids


def made(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with small weights, of the size that quantised ones have in these tests."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.uniform_(-LARGEST_VALUE, LARGEST_VALUE)
    return model


def test_many_types_are_known() -> None:
    """The library that reads them was not exchanged for one that reads fewer."""
    assert {Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_K, Kind.Q6_K, Kind.IQ4_XS} <= set(READABLE)
    assert len(READABLE) >= 26


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_every_type(kind: Kind, tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", made(LlamaConfig(**SIZES)), kind=kind)
    folder = converted_folder(file, tmp_path / "cache")
    model = of_transformers(file)
    with WeightSource(folder, torch.float32).open() as files:
        for name, theirs in model.state_dict().items():
            ours = (
                files.matrix(name, *theirs.shape).values(torch.float32)
                if theirs.ndim == 2
                else files.read(name, *theirs.shape)
            )
            assert torch.equal(ours, theirs), name
    plain = load_file(plain_folder(file, tmp_path / "plain") / "model.safetensors")
    for name, theirs in model.state_dict().items():
        assert torch.equal(plain[name].float(), theirs), name
    assert_same_logits(folder, model, some_ids(320))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", made(ARCHITECTURES[architecture]), kind=Kind.Q8_0)
    folder = converted_folder(file, tmp_path / "cache")
    assert_same_logits(folder, of_transformers(file), some_ids(320))


@pytest.mark.parametrize("original", ORIGINALS)
def test_what_transformers_leaves_out(original: str, tmp_path: Path) -> None:
    config, extra = ORIGINALS[original]
    model = made(config)
    folder = converted_folder(write_model(tmp_path / "m.gguf", model, extra=extra), tmp_path / "c")
    assert_same_logits(folder, model, some_ids(320))


@pytest.mark.parametrize("positions", [8192, 64])
def test_the_rope_scaling_of_llama3(positions: int, tmp_path: Path) -> None:
    """The file has a factor for each rotation, from which the scaling's parameters follow."""
    scaling = FREQUENCIES | {"original_max_position_embeddings": positions}
    model = made(LlamaConfig(**SIZES, rope_parameters=scaling))
    plain = 1.0 / 500_000.0 ** (np.arange(0, 64, 2) / 64)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert len(set(factors.tolist())) > 1
    file = write_model(
        tmp_path / "m.gguf",
        model,
        extra={"llama.rope.scaling.original_context_length": positions},
        more_tensors={"rope_freqs.weight": factors},
    )
    assert_same_logits(converted_folder(file, tmp_path / "cache"), model, some_ids(320))


@pytest.fixture(scope="module")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_folder(smollm2(), tmp_path_factory.mktemp("cache"))


@pytest.mark.timeout(600)
def test_smollm2(smol: Path) -> None:
    tokenizer = load_tokenizer(smol, "smollm2")
    question = tokenizer.render_chat([{"role": "user", "content": "What is the capital of Peru?"}])
    ids = tokenizer.encode(question, add_special_tokens=False)
    assert_same_logits(smol, of_transformers(smollm2()), ids, ({}, {"compile": "wait"}))
