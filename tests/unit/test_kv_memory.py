"""How much KV memory a replica has by itself, and how long a sequence may be with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import RayError

from actors.replica.replica import on_its_node
from quadriga.checkpoint.folder import Checkpoint
from quadriga.config.kv_memory import (
    KV_SHARE,
    REPLICA_BYTES,
    SERVICE_BYTES,
    UNKNOWN_KV_BYTES,
    KVShare,
    NodeMemory,
    WeightBytes,
    describe_length,
    fitting_length,
    weight_bytes,
)
from quadriga.config.loader import load_config
from quadriga.config.resolve import Deployment, Hardware, resolve
from quadriga.control.desired import resolve_on
from quadriga.core.replica import ReplicaInfo, Role
from quadriga.engine.baton.loading import fit
from quadriga.errors import ConfigError
from tests.equivalence.models import make_spec
from tests.own_models import LLAMA_1B, LLAMA_8B, sparse_checkpoint

GIB = 1 << 30
NODE = Hardware(num_cpus=2, nodes=(NodeMemory(2.0, 8 * GIB),))
TOKEN_BYTES_1B = 16 * 2 * 8 * 64 * 4  # in float32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of full size, without a byte of weights on the disk."""
    folder = tmp_path_factory.mktemp("own")
    return {
        "1B": sparse_checkpoint(folder / "Llama-3.2-1B", LLAMA_1B),
        "8B": sparse_checkpoint(folder / "Llama-3.1-8B", LLAMA_8B),
    }


def deployment(path: Path, hardware: Hardware = NODE, **settings: Any) -> Deployment:
    return resolve(load_config({"model": str(path), "decode_replicas": 2} | settings), hardware)


def test_weights_are_counted_from_their_headers(models: dict[str, Path]) -> None:
    for name, num_values in {"1B": 1.236e9, "8B": 8.03e9}.items():
        found = deployment(models[name]).checkpoints[0]
        written_out = weight_bytes(found, 4, matrices=4)
        assert written_out == pytest.approx(4 * num_values, rel=0.005)
        # Matrices stay bfloat16; only norms are float32.
        kept = weight_bytes(found, 4, matrices="stored")
        assert written_out / 2 < kept < 1.001 * written_out / 2
        assert written_out / 4 < weight_bytes(found, 4, matrices=1) < 1.001 * written_out / 4
    by_compile = (deployment(models["1B"], **{"engine.compile": c}) for c in ("off", "auto"))
    off, auto = (found.replicas[0].engine.kv_memory_bytes for found in by_compile)
    assert off is not None and auto is not None and off < auto


@pytest.mark.parametrize("name", ["1B", "8B"])
def test_the_command_of_the_readme_fits_two_cores_and_8_gib(
    models: dict[str, Path], name: str
) -> None:
    for settings in ({}, {"engine.threads": 4}):
        found = deployment(models[name], **settings)
        for replica in found.replicas:
            engine = replica.engine
            assert 1024 <= engine.row_capacity_tokens <= engine.kv_capacity_tokens
            assert engine.row_capacity_tokens < 131_072
            assert replica.num_cpus * len(found.replicas) <= 2


def test_more_memory_allows_longer_sequences(models: dict[str, Path]) -> None:
    lengths = []
    for memory in (8, 16, 32, 64, 128, 256):
        hardware = Hardware(num_cpus=8, nodes=(NodeMemory(8.0, memory * GIB),))
        lengths.append(deployment(models["1B"], hardware).replicas[0].engine.row_capacity_tokens)
    assert lengths == sorted(lengths) and lengths[-1] > 8 * lengths[0]
    assert lengths[-1] == 131_072
    unknown = deployment(models["1B"], Hardware(num_cpus=8)).replicas[0].engine
    assert unknown.row_capacity_tokens == 8192 == GIB // TOKEN_BYTES_1B // 2


def test_a_length_that_is_asked_for_must_fit(models: dict[str, Path]) -> None:
    memory = {"engine.kv_memory_bytes": 2048 * TOKEN_BYTES_1B}
    exact = deployment(models["1B"], **memory, **{"engine.max_model_len": 2048})
    assert exact.replicas[0].engine.row_capacity_tokens == 2048
    with pytest.raises(ConfigError, match=r"hold 2048 tokens .* less than one sequence of 4096"):
        deployment(models["1B"], **memory, **{"engine.max_model_len": 4096})
    with pytest.raises(ConfigError, match=r"hold 200 tokens .* raise it to 16777216"):
        deployment(models["1B"], **{"engine.kv_memory_bytes": 200 * TOKEN_BYTES_1B})


def test_a_models_length_does_not_depend_on_the_depth_that_is_loaded(
    models: dict[str, Path],
) -> None:
    memory = {"engine.kv_memory_bytes": GIB}
    lengths = {
        deployment(models["8B"], depth=depth, **memory).replicas[0].engine.row_capacity_tokens
        for depth in (8, 16, 32)
    }
    assert lengths == {2048}  # a quarter of which is more than half of 4,096


@pytest.mark.parametrize(
    ("positions", "kv_tokens", "runner", "expected"),
    [
        (2048, 1_000_000, "native", 2048),
        (131_072, 16_384, "native", 8192),
        (131_072, 16_000, "native", 7936),
        (131_072, 3000, "native", 2048),
        (131_072, 1500, "native", 1500),
        (96, 50, "native", 50),
        (131_072, 65_536, "baton", 8192),
        (131_072, 9000, "baton", 2048),
    ],
)
def test_how_long_a_sequence_may_be(
    positions: int, kv_tokens: int, runner: Any, expected: int
) -> None:
    assert fitting_length(positions, kv_tokens, runner) == expected


def test_memory_is_shared_by_the_replicas_that_a_node_may_have() -> None:
    weights = (WeightBytes(GIB, 1), WeightBytes(GIB // 2, 3))
    big, small = NodeMemory(8.0, 64 * GIB), NodeMemory(1.0, 8 * GIB)

    def share(*nodes: NodeMemory) -> int:
        return KVShare(weights, num_processes=3, cpus_each=1.0).bytes_on(nodes)

    left = 64 * GIB - SERVICE_BYTES - 3 * REPLICA_BYTES - GIB - 3 * GIB // 2
    assert share(big) == int(KV_SHARE * left / 3)
    alone = 8 * GIB - SERVICE_BYTES - REPLICA_BYTES - GIB - GIB // 2
    assert share(big, small) == share(small) == int(KV_SHARE * alone)


def test_replicas_that_scaling_may_add_have_their_share() -> None:
    """With a prefill replica and two scouts, 16 decode replicas on a node are 19 processes."""
    scaling = {"helios.scaling.enabled": True, "helios.scaling.max_replicas": 16}
    hardware = Hardware(num_cpus=32, nodes=(NodeMemory(32.0, 64 * GIB),))
    found = resolve(load_config({"helios.enabled": True, **scaling}), hardware).replicas
    assert 0 < 19 * max(r.engine.kv_memory_bytes or 0 for r in found) <= KV_SHARE * 64 * GIB


def test_the_sentence_says_why() -> None:
    def said(length: int, **changes: Any) -> str:
        facts: dict[str, Any] = {
            "kv_tokens": 16_384,
            "token_bytes": 65_536,
            "is_auto": True,
            "runner": "native",
        }
        return describe_length(length, 131_072, **(facts | changes))

    assert said(8192).startswith("8192 of 131072 positions: half of 1.0 GiB of KV memory; more")
    assert "an eighth of 1.0 GiB" in said(2048, runner="baton")
    assert "what fits into 64 MiB of KV memory" in said(1024, kv_tokens=1024)
    assert said(4096, is_auto=False) == "4096 of 131072 positions: engine.max_model_len"
    assert said(131_072) == "131072 tokens: all positions of the model"


def test_relay_rows_on_a_gpu_are_bounded_by_its_memory(models: dict[str, Path]) -> None:
    found = deployment(models["1B"], Hardware(8, 3), runner="baton")
    by_role = {r.role: r.engine for r in found.replicas}
    weights = 5 * GIB // 2
    big = {"weight_bytes": weights, "free_bytes": 39 * GIB, "total_bytes": 40 * GIB}
    decode = fit(by_role[Role.DECODE], **big)
    token_bytes = TOKEN_BYTES_1B // 2
    fitting = (34 * GIB - weights) // (2 * token_bytes)
    assert decode.row_capacity_tokens == fitting // 8 // 256 * 256
    assert decode.num_rows in (7, 8)  # the dense batch has some columns more than its rows
    assert 2 * decode.num_rows * decode.row_capacity_tokens * token_bytes < 34 * GIB - weights
    prefill = fit(by_role[Role.PREFILL], **big)
    assert prefill.row_capacity_tokens == decode.row_capacity_tokens
    assert prefill.kv_capacity_tokens == fitting
    with pytest.raises(ConfigError, match=r"hold 0 tokens .* less than one sequence of 256"):
        fit(by_role[Role.DECODE], **(big | {"free_bytes": GIB}))


def test_named_lengths_and_memory_of_the_relay_batch_are_kept() -> None:
    spec = make_spec(Path("quadriga-s"), runner="baton", num_rows=4, kv_memory_bytes=1 << 30)
    same = fit(spec, weight_bytes=0, free_bytes=1 << 40, total_bytes=1 << 40)
    assert (same.num_rows, same.row_capacity_tokens) == (4, 2048)


def test_facts_are_read_without_weights(tmp_path: Path) -> None:
    path = sparse_checkpoint(tmp_path / "m", LLAMA_1B)
    (path / "model.safetensors").unlink()
    found: Checkpoint = deployment(path).checkpoints[0]
    assert weight_bytes(found, 4, matrices="stored") == 0
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 16


def test_a_replica_has_the_share_of_the_node_where_it_is_placed(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Kubernetes no pod of replicas has joined when the service is resolved."""
    node, settings = NodeMemory(1.0, 64 * GIB), {"engine.resources_cpus": 1}
    early = deployment(models["1B"], Hardware(1), **settings)
    late = deployment(models["1B"], Hardware(1, nodes=(node,)), **settings)
    found: list[Any] = [{"here": node}, {"there": node}, RayError("away")]
    monkeypatch.setattr("actors.replica.replica.node_memory", Mock(side_effect=found))
    planned, known = early.replicas[-1], late.replicas[-1]
    assert planned.engine.kv_memory_bytes == UNKNOWN_KV_BYTES != known.engine.kv_memory_bytes
    sized = [on_its_node(planned, early.config, "here").engine for _ in found]
    assert sized == [known.engine, planned.engine, planned.engine]


def test_a_length_is_explained_by_the_runner_of_its_own_pool(models: dict[str, Path]) -> None:
    pools = [{"model": "quadriga-s"}, {"model": str(models["1B"]), "runner": "baton"}]
    desired = resolve_on({"pools": pools, "engine.kv_memory_bytes": GIB}, NODE)
    engine = desired.places[Role.DECODE, 2].engine
    info = ReplicaInfo("r", Role.DECODE, engine.depth_class, "n", "i", 8, engine.kv_capacity_tokens)
    told = desired.why_so_long(replace(info, max_model_len=engine.row_capacity_tokens))
    assert "an eighth of 1.0 GiB" in str(told)
