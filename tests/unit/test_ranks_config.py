"""`engine.tensor_parallel`: what a replica of several ranks reserves, holds, and cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quadriga.config.kv_memory import NodeMemory
from quadriga.config.loader import load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.errors import ConfigError
from tests.unit.test_config import checkpoint

__all__ = ["checkpoint"]

NODE = NodeMemory(16, 32 << 30)
CPU = Hardware(num_cpus=16, nodes=(NODE,))


def test_each_rank_reserves_its_own_cpus_and_memory() -> None:
    config: dict[str, Any] = {"model": "quadriga-s", "prefill_replicas": 1, "decode_replicas": 1}
    one = resolve(load_config(config), CPU).replicas
    two = resolve(load_config(config | {"engine.tensor_parallel": 2}), CPU).replicas
    assert [r.num_cpus for r in two] == [r.num_cpus for r in one] == [1.0, 1.0]
    assert {r.engine.tensor_parallel for r in two} == {2}
    crowded = replace(CPU, num_cpus=4)
    assert resolve(load_config(config | {"engine.tensor_parallel": 2}), crowded).replicas[
        0
    ].num_cpus == pytest.approx(4 / 2 / 4), "four processes share half of them"
    # Four processes where there were two: each has less beside the service, all have nearly it all.
    memory = [r[0].engine.kv_memory_bytes for r in (one, two)]
    assert memory[0] is not None and memory[1] is not None
    assert 0.9 * memory[0] < memory[1] < memory[0]


def test_named_memory_is_that_of_all_ranks() -> None:
    settings = {"model": "quadriga-s", "engine.kv_memory_bytes": 64 << 20}
    specs = [
        resolve(load_config(settings | {"engine.tensor_parallel": k}), CPU).replicas[0].engine
        for k in (1, 2)
    ]
    assert specs[0].kv_capacity_tokens == specs[1].kv_capacity_tokens


@pytest.mark.parametrize(
    ("settings", "hardware", "message"),
    [
        (
            {"engine.tensor_parallel": 4},
            CPU,
            r"4 ranks cannot share the 2 KV heads .* one of 1, 2$",
        ),
        ({"helios.enabled": True}, CPU, "helios.enabled, and ranks keep the layers"),
        ({"adapters": "/nowhere"}, CPU, "ranks take no LoRA adapters"),
        ({"engine.device": "cuda"}, Hardware(16, num_gpus=8), "engine.device cuda, and ranks meet"),
        ({"pools": [{"model": "quadriga-s", "runner": "baton"}], "model": None}, CPU, "relay"),
    ],
)
def test_what_ranks_cannot_do_is_refused(
    settings: dict[str, Any], hardware: Hardware, message: str
) -> None:
    base = {"model": "quadriga-s", "engine.tensor_parallel": 2}
    given = {name: value for name, value in (base | settings).items() if value is not None}
    with pytest.raises(ConfigError, match=message) as refusal:
        resolve(load_config(given), hardware)
    assert refusal.value.param == "engine.tensor_parallel"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"intermediate_size": 641}, "641 columns of the MLP"),
        ({"vocab_size": 615}, "615 tokens"),
        ({"hidden_size": 65, "head_dim": 16}, "65 columns of the hidden states"),
    ],
)
def test_what_does_not_divide_is_named(checkpoint: Path, change: dict[str, int], what: str) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    config = load_config({"model": str(checkpoint), "engine.tensor_parallel": 2})
    with pytest.raises(ConfigError, match=what):
        resolve(config, CPU)


@pytest.mark.parametrize(
    ("change", "what"),
    [({"head_dim": 24}, "rows of the keys"), ({"intermediate_size": 48}, "rows of the MLP")],
)
def test_rows_whose_groups_do_not_divide_are_named(
    checkpoint: Path, change: dict[str, int], what: str
) -> None:
    """48 rows are three groups of 16; half of them would stay float32 in int8."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    given = {"model": str(checkpoint), "engine.tensor_parallel": 2}
    with pytest.raises(ConfigError, match=rf"3 groups of 16 {what} .* one of 1$"):
        resolve(load_config(given | {"engine.weights": "int8"}), CPU)
    assert resolve(load_config(given), CPU).replicas
