"""Adapters that cannot be served are refused before they cost anything, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadgen.bench.adapters import write_adapter
from quadriga.catalogue.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapters
from quadriga.checkpoint.model_config import read_model_config
from quadriga.config.loader import load_config
from quadriga.config.resolve import Hardware, resolve
from quadriga.core.adapters import Adapter, find_adapter
from quadriga.engine.weights.adapters import load_adapters
from quadriga.errors import ConfigError, UnknownModel
from tests.equivalence.models import build, save

RANK = 5
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one good adapter, `mine`."""
    return write_adapter(tmp_path / "adapters" / "mine", build("llama"), rank=RANK).parent


def test_what_is_read(folder: Path) -> None:
    write_adapter(folder / "b-second", build("llama"), rank=RANK, use_rslora=True)
    (folder / "notes").mkdir()
    second, mine = read_adapters(folder)
    assert (mine.name, mine.rank, mine.scale) == ("mine", RANK, 12 / RANK)
    assert second.scale == pytest.approx(12 / RANK**0.5)
    assert find_adapter((second, mine), "mine") == 1
    assert find_adapter((second, mine), "") == -1
    with pytest.raises(UnknownModel):
        find_adapter((second, mine), "other")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"r": 0}, "r is 0; it must be a whole number in 1..512"),
        ({"r": "8"}, "r is '8'"),
        ({"r": 10**9}, "in 1..512"),
        ({"r": 4}, "not rank 4"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": 10**400}, "it must be a number in ±1e"),
    ],
)
def test_a_config_that_is_not_served(folder: Path, change: dict[str, Any], says: str) -> None:
    file = folder / "mine" / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=says) as caught:
        read_adapters(folder)
    assert caught.value.param == "adapters"
    assert str(folder / "mine") in caught.value.message


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("base_model.model.lm_head.lora_A.weight", (RANK, 48), "none of a layer's projections"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (RANK, 130), "none of a layer"),
        (NAME.format("A").replace("q_proj", "router"), (RANK, 48), "none of a layer"),
        (NAME.format("A"), (RANK + 1, 48), "not rank"),
        (NAME.format("B"), (48,), "not rank"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", (48,), "none"),
    ],
)
def test_a_tensor_that_is_not_served(
    folder: Path, name: str, shape: tuple[int, ...], says: str
) -> None:
    file = folder / "mine" / WEIGHTS_FILE
    save_file(load_file(file) | {name: torch.zeros(shape)}, file)
    with pytest.raises(ConfigError, match=says):
        read_adapters(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        (NAME.format("A"), torch.zeros(RANK, 40), r"takes \[5, 48\]"),
        (NAME.format("B"), torch.zeros(40, RANK), r"takes \[48, 5\]"),
        (NAME.format("A"), torch.full((RANK, 48), torch.nan), "NaN"),
        (NAME.format("B"), torch.full((48, RANK), 3e38), "q_proj: NaN or infinity"),
        (NAME.format("B"), None, "lora_A alone"),
        (NAME.format("A").replace("layers.0", "layers.7"), torch.zeros(RANK, 48), "a layer 7"),
        (NAME.format("A").replace("q_proj", "fc1"), torch.zeros(RANK, 48), "has no fc1"),
    ],
)
def test_an_adapter_of_another_model(
    folder: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, says: str
) -> None:
    file = folder / "mine" / WEIGHTS_FILE
    tensors = load_file(file) | ({} if tensor is None else {name: tensor})
    if tensor is None:
        del tensors[name]
    save_file(tensors, file)
    config = read_model_config(save(build("llama"), tmp_path / "model"))
    with pytest.raises(ConfigError, match=says):
        load_adapters(read_adapters(folder), config, torch.float32)


def test_files_that_changed_since_the_start(folder: Path, tmp_path: Path) -> None:
    known = read_adapters(folder)
    config = read_model_config(save(build("llama"), tmp_path / "model"))
    loaded = load_adapters(known, config, torch.float32)
    assert len(loaded) == config.num_layers
    pairs = [pair for of in loaded for pair in (*of.qkv, *of.out, *of.up, *of.down) if pair]
    assert sum(p.down.nbytes + p.up.nbytes for p in pairs) == known[0].num_bytes
    file = folder / "mine" / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 1}))
    with pytest.raises(ConfigError, match="changed since the service was started"):
        load_adapters(known, config, torch.float32)


def test_pickled_weights_and_missing_folders(folder: Path, tmp_path: Path) -> None:
    file = folder / "mine" / WEIGHTS_FILE
    file.rename(file.with_name("adapter_model.bin"))
    with pytest.raises(ConfigError, match="pickled weights are not loaded"):
        read_adapters(folder)
    with pytest.raises(ConfigError, match="mine is an adapter itself; name the folder"):
        read_adapters(folder / "mine")
    with pytest.raises(ConfigError, match="is no folder"):
        read_adapters(tmp_path / "nowhere")


def served(folder: Path, **more: Any) -> tuple[Adapter, ...]:
    config = load_config({"model": "quadriga-s", "adapters": str(folder), **more})
    found = {r.engine.adapters for r in resolve(config, Hardware(4)).replicas}
    assert len(found) == 1, "both roles have them"
    return found.pop()


def test_the_share_of_memory_is_bounded(folder: Path) -> None:
    assert [adapter.name for adapter in served(folder)] == ["mine"]
    with pytest.raises(ConfigError, match="above the 0 that engine"):
        served(folder, **{"engine.adapter_memory_share": 0.0})


def test_where_adapters_do_not_run(folder: Path) -> None:
    with pytest.raises(ConfigError, match="in the relay batch"):
        served(folder, runner="baton")
    with pytest.raises(ConfigError, match="chooses the models"):
        served(folder, **{"helios.enabled": True})
