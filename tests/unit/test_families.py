"""Facts of any decoder from its config.json, and who runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quadriga.checkpoint.families import NATIVE_ARCHITECTURES, read_facts
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.checkpoint.model_config import _FAMILIES
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.config.resolve import EngineSpec, Hardware, resolve
from quadriga.core.replica import Role
from quadriga.errors import ConfigError
from tests.equivalence.relay_models import FAMILIES, POSITIONS, VOCAB

CACHED_HEADS = {"falcon": 1, "gpt-bigcode": 1, "codegen": 4}
GQA_HEADS = 2
GROUPED = {
    "phi3",
    "gemma",
    "stablelm",
    "cohere",
    "starcoder2",
    "olmo2",
    "mixtral",
    "gemma2-window",
    "gemma3-window",
    "gpt-oss-window",
}


def save_config(path: Path, family: str) -> Path:
    config = FAMILIES[family]()
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(path / family)
    return path / family


def engines(path: Path, **config: Any) -> dict[Role, EngineSpec]:
    loaded = load_config({"model": str(path), "decode_replicas": 1} | config)
    deployment = resolve(loaded, Hardware(num_cpus=4))
    return {replica.role: replica.engine for replica in deployment.replicas}


def test_the_list_of_native_families_is_the_engines() -> None:
    assert set(_FAMILIES) == NATIVE_ARCHITECTURES


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_familys_sizes_are_found(family: str, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(save_config(tmp_path, family)))
    heads = GQA_HEADS if family in GROUPED else CACHED_HEADS.get(family, 6)
    assert checkpoint.num_kv_heads == heads
    assert checkpoint.num_layers == (4 if family == "gpt-neo-local" else 3)
    assert (checkpoint.hidden_size, checkpoint.vocab_size) == (48, VOCAB)
    assert checkpoint.max_model_len == POSITIONS
    assert checkpoint.head_dim == {"gemma": 16, "codegen": 12}.get(
        family, 16 if "window" in family else 8
    )


@pytest.mark.parametrize("missing", ["n_layer", "n_embd", "vocab_size"])
def test_a_missing_size_is_named(missing: str) -> None:
    raw = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 9}
    read_facts(raw)
    del raw[missing]
    with pytest.raises(KeyError):
        read_facts(raw)


def test_auto_takes_native_layers_where_there_are_some(tmp_path: Path) -> None:
    assert {e.runner for e in engines(save_config(tmp_path, "gpt2")).values()} == {"baton"}
    assert {e.runner for e in engines(Path("quadriga-s")).values()} == {"native"}
    assert {e.runner for e in engines(Path("quadriga-s"), runner="baton").values()} == {"baton"}


def test_the_native_engine_is_not_forced_on_a_stranger(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pools\.0\.runner: gpt2 is a GPT2ForCausalLM"):
        engines(save_config(tmp_path, "gpt2"), runner="native")


def test_the_relay_batch_has_no_partial_depth(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pools\.0\.depth: .* set it to 3, not 2"):
        engines(save_config(tmp_path, "gpt2"), depth=2)


def test_a_dense_batch_has_only_as_many_rows_as_fit_at_full_length(tmp_path: Path) -> None:
    path = save_config(tmp_path, "gpt2")
    bytes_per_row = read_checkpoint(str(path)).kv_bytes_per_token(3, 4) * POSITIONS
    memory = {"engine.kv_memory_bytes": int(5.5 * bytes_per_row)}
    found = engines(path, **memory)
    assert (found[Role.DECODE].num_rows, found[Role.DECODE].kv_capacity_tokens) == (5, 480)
    assert found[Role.PREFILL].num_rows == QuadrigaConfig().prefill.num_rows, "as long as prompts"
