"""Catalogues: what is read, what is refused and how it is said."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from quadriga.catalogue.files import read_catalogue, write_catalogue
from quadriga.catalogue.headers import SINGLE_FILE, check_finite, read_checkpoint_headers
from quadriga.catalogue.inspection import tokenizer_fingerprint
from quadriga.catalogue.records import DepthRecord, Measurement
from quadriga.checkpoint import json_files
from quadriga.checkpoint.exits import EXITS_WEIGHTS
from quadriga.checkpoint.folder import ASSETS, bundled_models
from quadriga.errors import ConfigError, UnknownModel


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of a bundled checkpoint that may be damaged."""
    return Path(shutil.copytree(ASSETS / "quadriga-s", tmp_path / "models" / "small"))


def write_yaml(path: Path, *models: dict[str, Any], **more: Any) -> str:
    path.write_text(yaml.safe_dump({"version": 1, "models": list(models), **more}))
    return str(path)


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write_tensors(file: Path, header: dict[str, Any], body: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def split_in_shards(folder: Path) -> None:
    """Turn a single file into two shards and an index."""
    header, body = header_of(folder / SINGLE_FILE)
    header.pop("__metadata__", None)
    shards: list[tuple[dict[str, Any], bytes]] = [({}, b""), ({}, b"")]
    weight_map = {}
    for place, (name, entry) in enumerate(header.items()):
        held, blob = shards[place % 2]
        first, stop = entry["data_offsets"]
        held[name] = entry | {"data_offsets": [len(blob), len(blob) + stop - first]}
        shards[place % 2] = held, blob + body[first:stop]
        weight_map[name] = f"model-{place % 2}.safetensors"
    for number, (held, blob) in enumerate(shards):
        write_tensors(folder / f"model-{number}.safetensors", held, blob)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / SINGLE_FILE).unlink()


def refused(source: Path | str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_catalogue(str(source))


# What is read


def test_the_bundled_family_is_the_default_and_is_on_record() -> None:
    catalogue = read_catalogue()
    assert sorted(catalogue.ids) == bundled_models()
    assert len({m.tokenizer for m in catalogue.models}) == 1
    for model in catalogue.models:
        assert [r.depth for r in model.depths] == list(model.exit_depths)
        for record in model.depths:
            assert record.best_tokens_per_s
            assert record.accuracy is not None
            assert record.perplexity is not None
            assert record.load_s is not None
        by_depth = [r.step_s[0][1] for r in model.depths]
        assert by_depth == sorted(by_depth), "a deeper step takes longer"


def test_a_folder_is_scanned(checkpoint: Path) -> None:
    catalogue = read_catalogue(str(checkpoint.parent))
    assert catalogue.ids == ("small",)
    assert catalogue.models[0].exit_depths == (2, 4, 8)
    assert catalogue.models[0].depths == ()


def test_a_file_names_folders_beside_it_and_bundled_ids(checkpoint: Path, tmp_path: Path) -> None:
    source = write_yaml(
        tmp_path / "c.yaml",
        {"model": "models/small", "depths": [{"depth": 4, "step_s": {8: 0.004, 1: 0.001}}]},
        {"model": "quadriga-l"},
    )
    catalogue = read_catalogue(source)
    assert catalogue.ids == ("small", "quadriga-l")
    record = catalogue.find("small").record(4)
    assert record is not None
    assert record.step_s == ((1, 0.001), (8, 0.004))
    assert record.best_tokens_per_s == pytest.approx(2000)
    assert read_catalogue(source, only=["quadriga-l"]).ids == ("quadriga-l",)
    with pytest.raises(ConfigError, match=r"helios\.models: 'nobody'.*small, quadriga-l"):
        read_catalogue(source, only=["nobody"])
    with pytest.raises(UnknownModel, match="nobody"):
        catalogue.find("nobody")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    model = read_catalogue(None).find("quadriga-s")
    record = DepthRecord(2, ((1, 0.0005),), 0.01, 64, 0.5, 1.25, 0.75, 4096, 0.125, 0.25, "rapl")
    record = replace(record, coverage=0.625, token_s=0.0003)
    path = tmp_path / "deep" / "c.yaml"
    measured = Measurement("2026-11-21", "a machine", "abc")
    write_catalogue(path, [("quadriga-s", replace(model, depths=(record,)))], measured)
    again = read_catalogue(str(path))
    assert again.find("quadriga-s").depths == (record,)
    assert yaml.safe_load(path.read_text())["measured"] == asdict(measured)
    assert [p.name for p in path.parent.iterdir()] == ["c.yaml"], "no temporary file is left"
    assert path.stat().st_mode & 0o777 == 0o644, "others may read it"


def test_a_folder_with_the_name_of_a_bundled_model_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quadriga-s").symlink_to(ASSETS / "quadriga-l")
    write_yaml(tmp_path / "own.yaml", {"model": "./quadriga-s"})
    monkeypatch.chdir(tmp_path)
    for source in (".", "own.yaml"):
        assert read_catalogue(source).models[0].num_layers == 12


def test_a_tokenizer_that_is_too_large_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "MAX_BYTES", 10_000)
    with pytest.raises(ConfigError, match=r"tokenizer\.json has .* above the limit of 10000"):
        tokenizer_fingerprint(checkpoint)


def test_shards_are_read_as_one(checkpoint: Path) -> None:
    split_in_shards(checkpoint)
    assert read_catalogue(str(checkpoint.parent)).ids == ("small",)


# What is refused: files


@pytest.mark.parametrize("name", ["config.json", SINGLE_FILE, "tokenizer.json", EXITS_WEIGHTS])
def test_a_missing_file_is_named(checkpoint: Path, tmp_path: Path, name: str) -> None:
    (checkpoint / name).unlink()
    refused(write_yaml(tmp_path / "c.yaml", {"model": "models/small"}), name)


@pytest.mark.parametrize("missing", [1, 100, 1_000_000, 7_957_136 - 100, 7_957_136])
def test_a_file_that_was_cut_short_is_found_by_arithmetic(checkpoint: Path, missing: int) -> None:
    file = checkpoint / SINGLE_FILE
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) - missing])
    refused(checkpoint.parent, r"model\.safetensors (was cut short|cannot be served)")


def test_bytes_that_no_tensor_owns_are_found(checkpoint: Path) -> None:
    with (checkpoint / SINGLE_FILE).open("ab") as stream:
        stream.write(b"more")
    refused(checkpoint.parent, "no tensor owns")


def test_a_missing_or_robbed_shard_is_found(checkpoint: Path) -> None:
    split_in_shards(checkpoint)
    header, body = header_of(checkpoint / "model-1.safetensors")
    last = max(header, key=lambda n: header[n]["data_offsets"][1])
    first, _ = header.pop(last)["data_offsets"]
    write_tensors(checkpoint / "model-1.safetensors", header, body[:first])
    refused(checkpoint.parent, f"lack 1 tensors.*{last}")
    (checkpoint / "model-1.safetensors").unlink()
    refused(checkpoint.parent, r"lacks the shard model-1\.safetensors")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.3.mlp.down_proj.weight"])
def test_a_weight_that_is_no_number_is_found(checkpoint: Path, name: str, bad: float) -> None:
    place = read_checkpoint_headers(checkpoint)[name]
    with place.file.open("r+b") as stream:
        stream.seek(place.offset + place.num_bytes - 2)
        stream.write(np.float16(bad).tobytes())
    refused(checkpoint.parent, f"{name} holds NaN or infinite")


def test_of_large_checkpoints_only_vectors_are_read(checkpoint: Path) -> None:
    places = read_checkpoint_headers(checkpoint)
    matrix = places["model.layers.3.mlp.down_proj.weight"]
    with matrix.file.open("r+b") as stream:
        stream.seek(matrix.offset)
        stream.write(np.float16("nan").tobytes())
    check_finite(places.values(), whole_below_bytes=0)
    with pytest.raises(ConfigError, match="down_proj"):
        check_finite(places.values(), whole_below_bytes=1 << 30)


def test_weights_of_another_model_are_found(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    refused(checkpoint.parent, "says 9 layers, the weights hold 8")
    (checkpoint / "config.json").write_text(json.dumps(config | {"intermediate_size": 641}))
    refused(checkpoint.parent, "layer 0 holds")


def test_an_exit_without_weights_is_found(checkpoint: Path) -> None:
    exits = json.loads((checkpoint / "exits.json").read_text())
    (checkpoint / "exits.json").write_text(json.dumps(exits | {"layers": [2, 4, 6]}))
    refused(checkpoint.parent, r"lacks exits\.6\.norm\.weight")


# What is refused: the catalogue itself


@pytest.mark.parametrize(
    ("depth", "text"),
    [
        ({"depth": 9}, "depth 9 is beyond its 8 layers"),
        ({"depth": 3}, r"depth 3 is none of its exits \(2, 4, 8\)"),
        ({"depth": 2, "accuracy": 1.5}, r"depths\.0\.accuracy"),
        ({"depth": 2, "step_s": {0: 1.0}}, r"depths\.0\.step_s"),
        ({"depth": 2, "load_s": float("nan")}, r"depths\.0\.load_s"),
        ({"depth": 2, "speed": 1}, r"depths\.0\.speed"),
        ({"depth": 2, "coverage": 1.01}, r"depths\.0\.coverage"),
        ({"depth": 2, "token_s": 0}, r"depths\.0\.token_s"),
        ({"depth": 8, "coverage": 0.9}, "coverage 0.9 at depth 8, all of its layers"),
    ],
)
def test_records_are_checked(tmp_path: Path, depth: dict[str, Any], text: str) -> None:
    source = write_yaml(tmp_path / "c.yaml", {"model": "quadriga-s", "depths": [depth]})
    refused(source, text)


def test_coverage_does_not_fall(tmp_path: Path) -> None:
    depths = [{"depth": 4, "coverage": 0.7}, {"depth": 2, "coverage": 0.75}]
    source = write_yaml(tmp_path / "c.yaml", {"model": "quadriga-s", "depths": depths})
    refused(source, "coverage falls from 0.75 at depth 2 to 0.7 at 4")
    depths[0]["coverage"] = 0.75
    read_catalogue(write_yaml(tmp_path / "c.yaml", {"model": "quadriga-s", "depths": depths}))


def test_whole_catalogues_are_checked(tmp_path: Path, checkpoint: Path) -> None:
    path = tmp_path / "c.yaml"
    refused(tmp_path / "none.yaml", "cannot be read")
    refused(tmp_path, "holds no catalogue.yaml")
    path.write_text("models: [")
    refused(path, "is no YAML")
    refused(write_yaml(path), "models")
    path.write_text(yaml.safe_dump({"version": 2, "models": [{"model": "quadriga-s"}]}))
    refused(path, "version 2")
    refused(write_yaml(path, {"model": "quadriga-s"}, {"model": "quadriga-s"}), "two models")
    twice = {"model": "quadriga-s", "depths": [{"depth": 2}, {"depth": 2}]}
    refused(write_yaml(path, twice), "on record twice")
    refused(write_yaml(path, {"model": "quadriga-s", "tokenizer": "0" * 16}), "promises")
    refused(write_yaml(path, {"model": "no-such-model"}), "no-such-model")


def test_named_models_must_share_a_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer | {"padding": {"pad_id": 1}}))
    source = write_yaml(tmp_path / "c.yaml", {"model": "models/small"}, {"model": "quadriga-l"})
    assert read_catalogue(source, only=["small", "quadriga-l"]).ids == ("small", "quadriga-l")
    vocab = tokenizer["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert len(read_catalogue(source).models) == 2, "they may stand side by side"
    with pytest.raises(ConfigError, match="small and quadriga-l have different tokenizers"):
        read_catalogue(source, only=["small", "quadriga-l"])


def blocks(folder: Path, form: str, num_rows: int, row_bytes: int, byte: int = 0) -> Path:
    """A checkpoint of one matrix in blocks, all of whose bytes are the same."""
    size = num_rows * row_bytes
    entry = {"dtype": "U8", "shape": [num_rows, row_bytes], "data_offsets": [0, size]}
    write_tensors(folder / SINGLE_FILE, {f"w.{form}": entry}, bytes([byte]) * size)
    return folder


@pytest.mark.parametrize(("form", "block_bytes"), [("Q8_0", 34), ("Q4_0", 18), ("Q4_1", 20)])
def test_a_matrix_in_blocks_is_known_by_its_name(
    tmp_path: Path, form: str, block_bytes: int
) -> None:
    place = read_checkpoint_headers(blocks(tmp_path, form, 3, 2 * block_bytes))["w"]
    assert (place.dtype, place.shape, place.num_values) == (form, (3, 64), 192)
    check_finite([place], whole_below_bytes=1 << 20)
    with pytest.raises(ConfigError, match="no matrix in blocks"):
        read_checkpoint_headers(blocks(tmp_path, form, 3, 2 * block_bytes - 1))
    damaged = read_checkpoint_headers(blocks(tmp_path, form, 3, 2 * block_bytes, byte=0xFF))
    with pytest.raises(ConfigError, match="tensor w holds NaN"):
        check_finite(damaged.values(), whole_below_bytes=1 << 20)
