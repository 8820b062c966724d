"""Loading: depth by depth, sharded or not, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.catalogue.headers import INDEX_FILE, SINGLE_FILE
from quadriga.checkpoint.folder import read_checkpoint
from quadriga.checkpoint.model_config import read_model_config
from quadriga.config.kv_memory import weight_bytes
from quadriga.engine.weights.checkpoint_weights import ModelWeights
from quadriga.engine.weights.loading import load_weights
from quadriga.engine.weights.matrix import FORM_OF_DTYPE, Form, MatrixForm
from quadriga.engine.weights.tensor_files import WeightSource
from quadriga.errors import ConfigError
from quadriga.observability.load_progress import LoadProgress
from tests.equivalence.models import build, save


def load(path: Path, depth: int = 3, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(WeightSource(path, dtype), read_model_config(path), depth, 96)


def refused(message: str, path: Path, depth: int = 3) -> None:
    with pytest.raises(ConfigError, match=message):
        load(path, depth)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build("llama"), tmp_path)


def rewrite(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    """Apply `change` to the dict of tensors of a single-file checkpoint."""
    tensors = load_file(path / SINGLE_FILE)
    change(tensors)
    save_file(tensors, path / SINGLE_FILE)


def equal(a: ModelWeights, b: ModelWeights) -> bool:
    pairs = [(a.embed, b.embed), (a.heads[max(a.heads)].weight, b.heads[max(b.heads)].weight)]
    for x, y in zip(a.layers, b.layers, strict=True):
        assert torch.equal(x.attn_norm.weight, y.attn_norm.weight)  # type: ignore[arg-type]
        pairs += [(x.qkv.weight, y.qkv.weight), (x.up.weight, y.up.weight)]
        pairs += [(x.down.weight, y.down.weight)]
    return all(torch.equal(x.rows, y.rows) for x, y in pairs)


def test_depth_loads_the_first_layers_only(checkpoint: Path) -> None:
    def drop_last_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.2.")]:
            del tensors[name]

    whole = load(checkpoint)
    rewrite(checkpoint, drop_last_layer)  # reading it now would fail
    shallow = load(checkpoint, 2)
    assert len(shallow.layers) == 2
    whole.layers.pop()
    assert equal(shallow, whole)
    refused(r"model\.layers\.2\.", checkpoint)


def test_how_much_is_read_is_counted_up_to_all_of_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    read: list[int] = []
    monkeypatch.setattr(LoadProgress, "begin", lambda _, stage, total=0: begun.append(total))
    monkeypatch.setattr(LoadProgress, "add", lambda _, num_bytes: read.append(num_bytes))
    load(checkpoint)
    assert begun == [sum(read)] and len(read) == 5, "both ends, and every layer"
    files = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert begun[0] == pytest.approx(files, rel=0.2)


@pytest.mark.parametrize("depth", [0, 4])
def test_depth_beyond_the_model(checkpoint: Path, depth: int) -> None:
    refused(r"1\.\.3", checkpoint, depth)


def test_sharded_equals_single_file(tmp_path: Path) -> None:
    model = build("qwen2")
    single = load(save(model, tmp_path / "one"))
    sharded = save(model, tmp_path / "many", max_shard_size="40KB")
    assert (sharded / INDEX_FILE).is_file()
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert equal(load(sharded), single)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_is_converted(checkpoint: Path, stored: torch.dtype) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(stored)

    rewrite(checkpoint, halve)
    weights = load(checkpoint)
    original = load_file(checkpoint / SINGLE_FILE)["model.embed_tokens.weight"]
    assert torch.equal(weights.embed.rows, original.float())
    assert load(checkpoint, dtype=torch.bfloat16).embed.form is Form.BFLOAT16
    kept = WeightSource(checkpoint, torch.float32, form="stored")
    weights = load_weights(kept, read_model_config(checkpoint), 3, 96)
    assert weights.embed.form is weights.layers[2].qkv.weight.form is FORM_OF_DTYPE[stored]
    assert torch.equal(weights.embed.rows, original)
    assert weights.layers[0].attn_norm.weight is not None
    assert weights.layers[0].attn_norm.weight.dtype is torch.float32


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(64, 39, dtype=torch.uint8), r"torch.uint8 of shape \[64, 39\]"),
        (torch.zeros(64, 40), r"torch.float32 of shape \[64, 40\]"),
        (torch.full((64, 40), 0xFF, dtype=torch.uint8), "NaN or infinity as Q4_1"),
    ],
    ids=["of another size", "of numbers", "not finite"],
)
@pytest.mark.parametrize("form", ["dtype", "stored", Form.INT8])
def test_blocks_that_are_none(
    tmp_path: Path, rows: torch.Tensor, message: str, form: MatrixForm
) -> None:
    save_file({"w.Q4_1": rows}, tmp_path / SINGLE_FILE)
    source = WeightSource(tmp_path, torch.float32, form=form)
    with source.open() as files, pytest.raises(ConfigError, match=message):
        files.matrix("w", 64, 64)


def test_a_gpus_numbers_are_those_of_its_dtype(tmp_path: Path) -> None:
    save_file({"w": torch.full((2, 32), 7e4)}, tmp_path / SINGLE_FILE)
    source = WeightSource(tmp_path, torch.float16, torch.device("meta"))
    with source.open() as files, pytest.raises(ConfigError, match=r"infinity as torch\.float16"):
        files.matrix("w", 2, 32)


def test_matrices_of_several_forms_become_one(tmp_path: Path) -> None:
    """What is stacked has one form: theirs, or else float32."""
    ones = {"a": torch.ones(2, 32), "b": torch.ones(2, 32, dtype=torch.bfloat16)}
    save_file(ones | {"c.Q8_0": torch.zeros(2, 34, dtype=torch.uint8)}, tmp_path / SINGLE_FILE)
    with WeightSource(tmp_path, torch.float32, form="stored").open() as files:
        assert files.matrix("c", 2, 32).form is Form.Q8_0
        mixed = files.stack(["a", "b", "c"], [2, 2, 2], 32)
    assert mixed.form is Form.FLOAT32
    assert torch.equal(mixed.rows, torch.cat((torch.ones(4, 32), torch.zeros(2, 32))))


def test_missing_shard(tmp_path: Path) -> None:
    path = save(build("llama"), tmp_path, max_shard_size="40KB")
    sorted(path.glob("*.safetensors"))[-1].unlink()
    refused("cannot be read", path)


def test_truncated_file(checkpoint: Path) -> None:
    file = checkpoint / SINGLE_FILE
    file.write_bytes(file.read_bytes()[:5000])
    refused(r"model\.safetensors", checkpoint)


def test_pickled_weights_are_not_opened(checkpoint: Path) -> None:
    (checkpoint / SINGLE_FILE).unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused("pickled weights are not loaded", checkpoint)


def test_wrong_shape(checkpoint: Path) -> None:
    wide = {"model.layers.1.mlp.down_proj.weight": torch.zeros(48, 90)}
    rewrite(checkpoint, lambda tensors: tensors.update(wide))
    refused(r"down_proj.*\[48, 90\].*\[48, 88\]", checkpoint)


def test_integer_weights(checkpoint: Path) -> None:
    whole = {"lm_head.weight": torch.zeros(130, 48, dtype=torch.int8)}
    rewrite(checkpoint, lambda tensors: tensors.update(whole))
    refused(r"lm_head\.weight is torch\.int8", checkpoint)


@pytest.mark.parametrize("variant", ["qwen2-tied", "opt-pre-norm"])
def test_a_tied_head_that_is_not_the_embedding_is_refused(tmp_path: Path, variant: str) -> None:
    whole = load(save(build(variant), tmp_path))
    embedding = whole.embed.rows.clone()
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    weights = load(tmp_path)  # a copy is no other head
    assert weights.heads[3].weight is weights.embed
    embedding[5, 7] += 1
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    refused(r"tie_word_embeddings true, and lm_head\.weight", tmp_path)


@pytest.mark.parametrize(
    "index", ["[]", '{"weight_map": 3}', "not json", '{"weight_map": {"a": "../../etc/passwd"}}']
)
def test_bad_index(checkpoint: Path, index: str) -> None:
    (checkpoint / INDEX_FILE).write_text(index)
    load(checkpoint)  # of shards that were there before: the one file counts
    (checkpoint / SINGLE_FILE).unlink()
    refused("index", checkpoint)


@pytest.mark.parametrize("extra", [torch.tensor(1.0), torch.ones(1, 4, 4, dtype=torch.bool)])
def test_tensors_that_are_no_weights_do_not_hide_the_others_size(
    checkpoint: Path, extra: torch.Tensor
) -> None:
    def size() -> int:
        return weight_bytes(read_checkpoint(str(checkpoint)), 4, matrices="stored")

    before = size()
    rewrite(checkpoint, lambda tensors: tensors.update({"model.layers.0.extra": extra}))
    assert before <= size() < 2.2 * before


MEASURE = """
import sys
from pathlib import Path
import torch
from quadriga.checkpoint.model_config import read_model_config
from quadriga.engine.weights.loading import load_weights
from quadriga.engine.weights.tensor_files import WeightSource

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

path, depth = Path(sys.argv[1]), int(sys.argv[2])
config = read_model_config(path)
before = peak()
weights = load_weights(WeightSource(path, torch.float32), config, depth, 64)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_grows_with_depth(tmp_path: Path) -> None:
    """A layer of 4 MiB in float16: depth d costs about d · 8 MiB, not the whole model's 96."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=2388,
        num_hidden_layers=12,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    save(LlamaForCausalLM(config).half(), tmp_path)
    layer_bytes = 4 * (4 * 256 * 256 + 3 * 256 * 2388)
    peaks = {}
    for depth in (1, 12):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), str(depth)]
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        peaks[depth] = int(out.stdout)
    per_layer = (peaks[12] - peaks[1]) / 11
    # The float32 copy, and at most the mapped file beside it.
    assert 0.8 * layer_bytes < per_layer < 1.8 * layer_bytes
    assert peaks[1] < 4 * layer_bytes


def test_index_with_a_missing_tensor(tmp_path: Path) -> None:
    path = save(build("llama"), tmp_path, max_shard_size="40KB")
    index = json.loads((path / INDEX_FILE).read_text())
    del index["weight_map"]["model.norm.weight"]
    (path / INDEX_FILE).write_text(json.dumps(index))
    refused(r"no tensor model\.norm\.weight", path)
