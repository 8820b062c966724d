"""The configuration tree and how "auto" is filled in."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quadriga.checkpoint.exits import MAX_LAYERS, SKIPPED_KV_WEIGHTS
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.config.engine_spec import EngineSpec
from quadriga.config.loader import QuadrigaConfig, load_config
from quadriga.config.resolve import Hardware, num_replicas, resolve
from quadriga.core.replica import Role
from quadriga.errors import ConfigError

CPU = Hardware(num_cpus=8)
CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 100,
    "eos_token_id": 2,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG_JSON))
    return path


def test_the_embedded_default_needs_no_configuration() -> None:
    (pool,) = load_config({}).pools
    assert num_replicas(pool) == {Role.PREFILL: 1, Role.DECODE: 2}


def test_command_line_strings_and_dotted_keys() -> None:
    config = load_config({"model": "m", "decode_replicas": "3", "engine.threads": "2"})
    assert config.pools[0].decode_replicas == 3
    assert config.engine.threads == 2


def test_every_fault_is_named_with_its_value() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"modl": "x", "engine": {"threads": 0}, "decode_replicas": -1})
    for text in ("modl", "engine.threads", "got 0", "; decode_replicas: ", "got -1"):
        assert text in caught.value.message
    with pytest.raises(ConfigError, match=r"pools\.1\.decode_replicas: "):
        load_config({"pools": [{"model": "a"}, {"model": "b", "decode_replicas": -1}]})


@pytest.mark.parametrize(
    ("setting", "meant"),
    [
        ("modle", "modle: there is no such setting; did you mean model?"),
        ("decode.max_slotz", "did you mean max_slots?"),
        ("threads", "threads: there is no such setting; did you mean engine.threads?"),
        ("tensor_parallel_size", "did you mean engine.tensor_parallel?"),
        ("scheduler.ares.moed", "did you mean mode?"),
        ("exits.treshold", "exits.treshold: .* did you mean threshold?"),
    ],
)
def test_what_an_unknown_setting_was_meant_to_be(setting: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(meant).replace(r"\.\*", ".*")):
        load_config({setting: 1})


def test_a_pool_at_fault_is_one_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"depth": 0})
    assert caught.value.message.count("got") == 1


def test_shorthand_and_pools_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude `pools`"):
        load_config({"model": "a", "pools": [{"model": "b"}]})


def test_a_value_is_not_a_section() -> None:
    with pytest.raises(ConfigError, match="not a section"):
        load_config({"engine": 3, "engine.threads": 2})


def test_a_section_whose_lines_are_comments_is_none_left_out() -> None:
    """As YAML reads it: null."""
    given = {"decode": None, "decode.max_slots": "4", "scheduler": {"ares": None}, "exits": None}
    assert load_config(given) == load_config({"decode.max_slots": 4})
    with pytest.raises(ConfigError, match="pools"):
        load_config({"pools": [None]})


@pytest.mark.parametrize("key", ["exits.layers", "auth.api_keys"])
def test_a_list_is_asked_for_in_the_words_of_the_documentation(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key}: [^:]*(, or: )?[^:]*a list \(YAML\) \(got '4,8'"
    ):
        load_config({key: "4,8"})


def test_it_survives_json() -> None:
    config = load_config({"decode.max_slots": 7})
    assert QuadrigaConfig.model_validate_json(config.model_dump_json()) == config


def test_resolve_fills_every_auto(checkpoint: Path) -> None:
    config = load_config({"model": str(checkpoint), "decode.max_slots": 4})
    deployment = resolve(config, CPU)
    assert [r.role for r in deployment.replicas] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    engine = deployment.replicas[1].engine
    assert (engine.depth, engine.device, engine.dtype) == (4, "cpu", "float32")
    assert (engine.num_rows, engine.row_capacity_tokens) == (4, 128)
    assert engine.kv_capacity_tokens == 4 * 128
    assert deployment.checkpoint("tiny") is not None
    assert deployment.replicas[0].num_cpus == 1.0
    assert resolve(config, Hardware(num_cpus=2)).replicas[0].num_cpus < 1.0


@pytest.mark.parametrize(
    ("change", "num_gpus", "batches"),
    [
        ({}, 0, "256 32"),
        ({}, 2, "2048 256"),
        ({}, 1, "2048 256"),  # mixed
        ({"prefill.chunk_tokens": 64, "decode.max_slots": 4}, 2, "64 4"),
    ],
)
def test_batches_are_as_large_as_the_device_is_wide(
    checkpoint: Path, change: dict[str, object], num_gpus: int, batches: str
) -> None:
    config = load_config({"model": str(checkpoint)} | change)
    engines = [r.engine for r in resolve(config, replace(CPU, num_gpus=num_gpus)).replicas]
    assert f"{engines[0].pass_tokens} {engines[-1].num_rows}" == batches


def test_a_replica_of_more_than_one_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.resources_gpus.*1"):
        load_config({"engine.resources_gpus": 2.0})


@pytest.mark.parametrize(
    ("change", "num_gpus", "roles"),
    [
        ({"mixed_replicas": 2}, 0, "mixed mixed"),
        ({}, 0, "prefill decode decode"),
        ({}, 1, "mixed"),
        ({}, 2, "prefill decode"),
        ({}, 3, "prefill decode decode"),
        ({"prefill_replicas": 2}, 4, "prefill prefill decode decode"),
        ({"mixed_replicas": 0}, 1, "prefill decode"),
        ({"decode_replicas": 1}, 1, "prefill decode"),
        ({"engine.resources_gpus": 0.5}, 1, "prefill decode"),
        ({"engine.resources_gpus": 0.25}, 1, "prefill decode decode"),
        ({"engine.device": "cpu"}, 1, "prefill decode decode"),
        ({"helios.enabled": True}, 1, "prefill decode"),
    ],
)
def test_which_roles_the_replicas_have(
    checkpoint: Path, change: dict[str, object], num_gpus: int, roles: str
) -> None:
    config = load_config({"model": str(checkpoint), "decode.max_slots": 4} | change)
    hardware = replace(CPU, num_gpus=num_gpus)
    replicas = resolve(config, hardware).replicas
    assert " ".join(r.role for r in replicas) == roles
    again = QuadrigaConfig.model_validate_json(config.model_dump_json())
    assert resolve(again, hardware).replicas == replicas, "as stored by the controller"
    for replica in replicas:
        decodes = replica.role is not Role.PREFILL
        assert replica.engine.can_exit == decodes
        assert (replica.engine.num_rows == 4) == decodes


def test_pools_of_one_model_have_the_same_adapters(checkpoint: Path) -> None:
    pools = [{"model": str(checkpoint)}, {"model": str(checkpoint), "adapters": str(checkpoint)}]
    with pytest.raises(ConfigError, match=r"pools\.1\.adapters.*give both the same"):
        resolve(load_config({"pools": pools}), CPU)


def test_mixed_replicas_exclude_others_of_their_pool_and_helios(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="mixed_replicas 2 and decode_replicas 1 exclude each"):
        load_config({"mixed_replicas": 2, "decode_replicas": 1})
    config = load_config({"model": str(checkpoint), "mixed_replicas": 1, "helios.enabled": True})
    with pytest.raises(ConfigError, match=r"mixed_replicas: 1 is not possible with helios"):
        resolve(config, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 5}, "5 is beyond the 4 layers"),
        ({"engine.device": "cuda"}, "the cluster has no GPU"),
        ({"engine.max_model_len": 1}, "engine.max_model_len: .*or equal to 2"),
        ({"engine.max_model_len": 129}, "129 is beyond the 128 positions"),
        ({"engine.kv_memory_bytes": 1024}, "less than one sequence of 128"),
        ({"engine.weights": "int8", "engine.dtype": "bfloat16"}, "'int8' is a form of the native"),
        ({"engine.weights": "int8", "runner": "baton"}, "runs in the relay batch; use 'auto'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "'yarn' is not supported.*runner: baton"),
    ],
)
def test_what_cannot_be_served_is_refused(
    checkpoint: Path, change: dict[str, object], message: str
) -> None:
    if "rope_scaling" in change:
        raw = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(raw | change))
        assert resolve(load_config({"model": str(checkpoint), "runner": "baton"}), CPU).replicas
        change = {}
    with pytest.raises(ConfigError, match=message):
        resolve(load_config({"model": str(checkpoint)} | change), CPU)


def test_two_checkpoints_of_one_name(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "tiny"
    other.mkdir(parents=True)
    (other / "config.json").write_text(json.dumps(CONFIG_JSON))
    config = load_config({"pools": [{"model": str(checkpoint)}, {"model": str(other)}]})
    with pytest.raises(ConfigError, match="two checkpoints are called 'tiny'"):
        resolve(config, CPU)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "cannot be read"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", "{}", "num_hidden_layers"),
        ("exits.json", '{"layers": [4]}', r"1\.\.3"),
    ],
)
def test_a_garbled_checkpoint_is_refused(
    checkpoint: Path, file: str, content: str, message: str
) -> None:
    (checkpoint / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        resolve(load_config({"model": str(checkpoint)}), CPU)


def test_a_model_that_is_nowhere() -> None:
    with pytest.raises(ConfigError, match="neither bundled"):
        resolve(load_config({"model": "nowhere"}), CPU)


def skipped_kv_of(checkpoint: Path, **exits: Any) -> str:
    config = load_config({"model": str(checkpoint), "exits": exits, "decode.rebatching": "drex"})
    return resolve(config, CPU).replicas[-1].engine.skipped_kv


def test_skipped_kv_is_linear_where_there_are_maps(checkpoint: Path) -> None:
    assert skipped_kv_of(checkpoint) == "project"
    with pytest.raises(ConfigError, match=r"exits\.skipped_kv: tiny has no skipped_kv"):
        skipped_kv_of(checkpoint, skipped_kv="linear")
    (checkpoint / SKIPPED_KV_WEIGHTS).touch()
    assert skipped_kv_of(checkpoint) == skipped_kv_of(checkpoint, skipped_kv="linear") == "linear"
    assert skipped_kv_of(checkpoint, skipped_kv="replay") == "replay"


def test_models_too_deep_for_early_exits_are_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    deep = config | {"num_hidden_layers": MAX_LAYERS + 1}
    (checkpoint / "config.json").write_text(json.dumps(deep))
    with pytest.raises(ConfigError, match=r"exits\.layers: tiny at depth 255 is too deep"):
        skipped_kv_of(checkpoint, layers=[2])
    assert skipped_kv_of(checkpoint, layers="none") == "project"


@pytest.mark.parametrize("exits", [{"layers": [3]}, {"kind": "mlp"}])
def test_exits_without_weights_are_refused_before_a_replica_starts(exits: dict[str, Any]) -> None:
    config = load_config({"model": "quadriga-s", "exits": exits})
    with pytest.raises(ConfigError, match=r"pools\.0\.exits: .* lacks exits\.\d\."):
        resolve(config, Hardware(num_cpus=8))


def test_replicas_carry_the_labels_of_the_nodes_they_may_be_on() -> None:
    config = load_config(
        {
            "pools": [
                {"decode_replicas": 1, "decode_labels": {"quadriga/role": "decode", "gpu": "h100"}},
                {"prefill_labels": {"quadriga/role": "prefill"}, "decode_replicas": 1},
            ]
        }
    )
    labels = [(r.role, dict(r.node_labels)) for r in resolve(config, CPU).replicas]
    assert labels == [
        (Role.PREFILL, {}),
        (Role.DECODE, {"quadriga/role": "decode", "gpu": "h100"}),
        (Role.PREFILL, {"quadriga/role": "prefill"}),
        (Role.DECODE, {}),
    ]


@pytest.mark.parametrize("labels", [{"a b": "x"}, {"x/": "y"}, {"x": ""}, {"x": "in(a,b)"}])
def test_what_is_no_label_is_refused(labels: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="decode_labels"):
        load_config({"decode_labels": labels})


def test_gpus_that_are_counted_may_come_later() -> None:
    later = load_config({"engine": {"device": "cuda", "resources_gpus": 1, "resources_cpus": 1}})
    assert all(r.num_gpus == 1 for r in resolve(later, CPU).replicas)
    with pytest.raises(ConfigError, match=r"engine\.resources_gpus"):
        resolve(load_config({"engine": {"device": "cuda"}}), CPU)


def test_prefill_knows_the_exits_at_which_rebuilt_tokens_left() -> None:
    def specs(**settings: Any) -> dict[Role, EngineSpec]:
        config = load_config({"model": "quadriga-s"} | settings)
        return {r.role: r.engine for r in resolve(config, Hardware(8)).replicas}

    with_exits = specs()
    prefill, decode = with_exits[Role.PREFILL], with_exits[Role.DECODE]
    assert prefill.exits == decode.exits
    assert prefill.exits.layers
    assert prefill.skipped_kv == decode.skipped_kv
    assert (prefill.can_exit, decode.can_exit) == (False, True)
    without = specs(**{"decode.rebatching": "off"})
    assert not any(spec.exits.layers for spec in without.values())


def test_skipped_positions_are_run_again_as_the_checkpoint_says_or_the_configuration() -> None:
    def newest(**settings: Any) -> int:
        config = load_config({"model": "quadriga-l", "decode.rebatching": "drex"} | settings)
        return resolve(config, Hardware(8)).replicas[-1].engine.replay_newest

    assert newest() == read_checkpoint("quadriga-l").exits.replay_newest > 0
    assert newest(exits={"replay_newest": 3}) == 3
    fixed = {"deterministic": True, "helios.enabled": True}
    assert newest(**fixed) == newest()
    assert newest(**fixed, exits={"replay_newest": 0}) == 0
