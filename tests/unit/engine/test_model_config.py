"""Configurations that would not be computed exactly are refused before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.checkpoint.folder import read_checkpoint
from quadriga.checkpoint.model_config import RopeConfig, read_model_config
from quadriga.engine.models.rope import inverse_frequencies
from quadriga.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}


def read(tmp_path: Path, **changes: Any):  # type: ignore[no-untyped-def]
    raw = {k: v for k, v in (LLAMA | changes).items() if v is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM; the native engine runs"),
        ({"architectures": ...}, "unknown"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "quick_gelu"}, "'quick_gelu' is not supported"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "wide"}, "wide"),
        ({"num_hidden_layers": 0}, "must be positive"),
        ({"head_dim": 7}, "even"),
        ({"vocab_size": 1 << 27}, "vocab_size is 134217728; must be positive, 67,108,864 at most"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1e4}, "rope_theta is -10000"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor of RoPE is 0.0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "high_freq_factor - low_freq_factor"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **changes)


def test_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model_config(tmp_path)


def test_old_and_new_spelling_of_rope_agree(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 4.0})
    new = read(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0})
    assert old == new
    assert old.rope == RopeConfig(5e5, "linear", factor=4.0)


def test_a_scaling_that_was_added_to_a_newer_file_counts(tmp_path: Path) -> None:
    new = {"rope_type": "default", "rope_theta": 5e5}
    config = read(tmp_path, rope_parameters=new, rope_scaling={"type": "linear", "factor": 4.0})
    assert config.rope == RopeConfig(5e5, "linear", factor=4.0)


@pytest.mark.parametrize(("named", "window"), [(..., 4096), (None, 0), (7, 7)])
def test_a_window_that_no_file_names_is_transformers_own(
    tmp_path: Path, named: Any, window: int
) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=named)
    assert set(config.windows) == {window}


def test_memory_is_planned_for_the_heads_that_qwen3_has_unnamed(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert config.head_dim == read_checkpoint(str(tmp_path)).head_dim == 128


def test_windows_follow_the_layer_types(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["full_attention", "sliding_attention"],
    )
    assert config.windows == (0, 16)
    unused = read(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=16)
    assert unused.windows == (0, 0)


def test_layer_types_of_the_wrong_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layer_types has 1 entries for 2 layers"):
        read(tmp_path, architectures=["Qwen2ForCausalLM"], layer_types=["full_attention"])


def test_llama3_keeps_high_and_stretches_low_frequencies() -> None:
    rope = RopeConfig(
        1e4, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64
    )
    plain, scaled = inverse_frequencies(RopeConfig(1e4), 64), inverse_frequencies(rope, 64)
    turns = 64 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    assert torch.allclose(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
