"""Files that mean harm: whatever they hold, the reader names what is wrong and takes nothing."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from loadgen.load.json_lines import read_objects
from loadgen.load.traces import read_trace
from quadriga.catalogue.files import read_catalogue
from quadriga.catalogue.headers import read_header
from quadriga.checkpoint.exits import read_exits
from quadriga.checkpoint.folder import ASSETS, read_checkpoint
from quadriga.checkpoint.length_heads import read_length_heads
from quadriga.checkpoint.model_config import read_model_config
from quadriga.config.loader import load_config
from quadriga.engine.weights.tensor_files import WeightSource
from quadriga.errors import ConfigError
from quadriga.gguf.checkpoint_folder import Conversion
from serve_app.__main__ import _arguments
from tests.gguf_files import small_fields, small_tensors, write_file
from tests.hostile import DEEP, VALUES, broken, garbled, tried

MODEL = ASSETS / "quadriga-s"
CONFIG = json.loads((MODEL / "config.json").read_text())
GENERATION = {"eos_token_id": [0, 1], "do_sample": True, "temperature": 0.7, "top_k": 5}
EXITS = json.loads((MODEL / "exits.json").read_text())
HEADS = {"depths": [2, 4], "num_layers": 2, "quantiles": [0.1, 0.5, 0.9], "has_counts": True}
INDEX = {"weight_map": {"a.weight": "one.safetensors", "b": "two.safetensors"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of small files that the tests exchange; whoever reads it closes it again."""
    num_files = num_open_files() + 8  # a library may keep a few of its own
    made = tmp_path_factory.mktemp("hostile")
    (made / "config.json").write_text(json.dumps(CONFIG))
    yield made
    assert num_open_files() <= num_files, "files were left open"


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def refused(read: Callable[[], Any]) -> None:
    """It is read, or refused in words."""
    with contextlib.suppress(ConfigError):
        read()


JSON_FILES: dict[str, tuple[dict[str, Any], Callable[[Path], Any]]] = {
    "config.json": (CONFIG, lambda path: (read_checkpoint(str(path)), read_model_config(path))),
    "generation_config.json": (GENERATION, lambda path: read_checkpoint(str(path))),
    "exits.json": (EXITS, lambda path: read_exits(path, 8)),
    "length_heads.json": (HEADS, read_length_heads),
    "model.safetensors.index.json": (INDEX, lambda path: WeightSource(path, torch.float32).open()),
}


@pytest.mark.parametrize("name", JSON_FILES)
@tried(80)
@given(data=st.data())
def test_json_of_a_checkpoint(folder: Path, name: str, data: st.DataObject) -> None:
    whole, read = JSON_FILES[name]
    file = folder / name
    before = file.read_bytes() if file.is_file() else None
    file.write_bytes(data.draw(garbled(whole)))
    try:
        refused(lambda: read(folder))
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)


ODD = {
    "deep": DEEP,
    "deep object": b'{"a":' * 100_000,
    "not UTF-8": b'{"a": "\xff"}',
    "infinity": b'{"num_hidden_layers": 1e999, "depths": [1e999], "eos_token_id": 1e999}',
    "many layers": json.dumps(CONFIG | {"num_hidden_layers": 10**12}).encode(),
    "no heads": json.dumps(CONFIG | {"num_attention_heads": 0, "head_dim": None}).encode(),
    "a number of 10,000 digits": b'{"num_hidden_layers": ' + b"9" * 10_000 + b"}",
    "empty": b"",
    "a list": b"[]",
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", JSON_FILES)
def test_odd_json(tmp_path: Path, name: str, odd: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(ODD[odd])
    refused(lambda: JSON_FILES[name][1](tmp_path))


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/../../b", "..", "."])
def test_an_index_stays_in_its_folder(tmp_path: Path, shard: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(ConfigError), WeightSource(folder, torch.float32).open() as files:
        files.read("w", 2)


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("tensors") / "model.safetensors"
    save_file({"a.weight": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.float16)}, file)
    return file.read_bytes()


def read_tensors(folder: Path) -> None:
    with WeightSource(folder, torch.float32).open() as files:
        for name, shape in (("a.weight", (3, 2)), ("b", (4,))):
            files.read(name, *shape)


@tried(150)
@given(data=st.data())
def test_broken_safetensors(folder: Path, tensors: bytes, data: st.DataObject) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(data.draw(broken(tensors)))
    try:
        refused(lambda: read_tensors(folder))
        refused(lambda: read_header(file))
    finally:
        file.unlink()


ENTRY = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}


@tried(80)
@given(header=garbled(ENTRY))
def test_headers_that_lie(folder: Path, header: bytes) -> None:
    """Shapes and offsets that do not fit the file, negative ones, and numbers beyond all bounds."""
    text = b'{"a.weight":' + header + b"}"
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    try:
        refused(lambda: read_tensors(folder))
        for place in _places(file):
            assert all(n >= 0 for n in place.shape)
            assert 0 <= place.offset <= place.offset + place.num_bytes <= file.stat().st_size
    finally:
        file.unlink()


def _places(file: Path) -> list[Any]:
    try:
        return list(read_header(file))
    except ConfigError:
        return []


@pytest.mark.parametrize("size", [0, 2**40, 2**63, 2**64 - 1])
def test_a_header_as_large_as_the_world(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigError):
        read_tensors(tmp_path)
    refused(lambda: read_header(tmp_path / "model.safetensors"))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    fields = small_fields() | {"tokenizer.chat_template": "{{ messages }}", "general.tags": ["a"]}
    return write_file(file, "llama", fields, small_tensors()).read_bytes()


@tried(250)
@given(data=st.data())
def test_broken_gguf(folder: Path, gguf_file: bytes, data: st.DataObject) -> None:
    """Mostly in the header: what is wrong in the weights changes numbers."""
    header, weights = gguf_file[:-6000], gguf_file[-6000:]
    file = folder / "broken.gguf"
    content = data.draw(st.one_of(broken(header).map(lambda h: h + weights), broken(gguf_file)))
    file.write_bytes(content)
    target = folder / "converted"
    target.mkdir()
    try:
        refused(lambda: Conversion(file).write(target, "0" * 64, lambda count: None))
        written = sum(path.stat().st_size for path in target.iterdir())
        assert written < 32 * len(gguf_file)
    finally:
        shutil.rmtree(target)
        file.unlink()


@tried(150)
@given(data=st.data())
def test_gguf_of_numbers_beyond_all_bounds(
    folder: Path, gguf_file: bytes, data: st.DataObject
) -> None:
    """Counts, lengths, dimensions and offsets are eight bytes each."""
    content = bytearray(gguf_file)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, len(content) - 6008))
        number = data.draw(
            st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])
        )
        content[at : at + 8] = number.to_bytes(8, "little")
    file = folder / "numbers.gguf"
    file.write_bytes(content)
    try:
        refused(lambda: Conversion(file))
    finally:
        file.unlink()


TRACE = b"arrival_s,input_tokens,output_tokens\n0,10,20\n1.5,100,7\n2,3,4\n"
LINES = b'{"prompt": "a", "max_tokens": 3}\n{"prompt": "b"}\n'


@tried(120)
@given(data=st.data())
def test_traces_and_lines(folder: Path, data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from([TRACE, LINES]))
    text = data.draw(broken(whole))
    is_packed = data.draw(st.booleans())
    if is_packed:
        text = gzip.compress(text)
        if data.draw(st.booleans()):
            text = data.draw(broken(text))
    file = folder / ("input.gz" if is_packed else "input")
    file.write_bytes(text)
    refused(lambda: read_trace(file))
    refused(lambda: list(read_objects(file, param="prompts")))


def test_a_packed_file_is_read_a_line_at_a_time(tmp_path: Path) -> None:
    """A bomb is one long line, and refused when that is too long."""
    file = tmp_path / "bomb.csv.gz"
    file.write_bytes(gzip.compress(b"0" * 200_000_000, compresslevel=1))
    with pytest.raises(ConfigError, match="over 200 bytes"):
        read_trace(file)


SETTINGS: dict[str, Any] = {
    "model": "quadriga-s",
    "decode_replicas": 2,
    "engine": {"threads": 1, "max_model_len": 512},
    "decode": {"max_slots": 8},
    "scheduler": {"ares": {"mode": "ares"}},
}


@tried(80)
@given(data=st.data())
def test_settings(folder: Path, data: st.DataObject) -> None:
    text = yaml.safe_dump(SETTINGS | {data.draw(st.sampled_from(sorted(SETTINGS))): None})
    if data.draw(st.booleans()):
        garbled_settings = json.loads(json.dumps(SETTINGS))
        garbled_settings[data.draw(st.sampled_from(sorted(SETTINGS)))] = data.draw(VALUES)
        text = json.dumps(garbled_settings)
    file = folder / "settings.yaml"
    file.write_bytes(data.draw(broken(text.encode("utf-8", "replace"))))
    refused(lambda: load_config(_arguments(file, [])))


YAMLS = {
    "deep": DEEP[:700],
    "a date that there is not": b"model: 2001-99-99",
    "a mapping as a key": b"? {a: 1}\n: 2",
    "a number as a key": b"1: 2",
    "a tag that runs code": b"model: !!python/object/apply:os.system ['exit 3']",
    "applications that are none": b"applications: 5",
    "an application that is none": b"applications: [x]",
    "arguments that are none": b"applications: [{args: [1]}]",
    "a NUL": b"model: a\x00b",
}


@pytest.mark.parametrize("name", YAMLS)
def test_odd_yaml(tmp_path: Path, name: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(YAMLS[name])
    with pytest.raises(ConfigError):
        load_config(_arguments(file, []))
    with pytest.raises(ConfigError):
        read_catalogue(str(file))


def test_a_catalogue_of_aliases_of_aliases(tmp_path: Path) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    file = tmp_path / "catalogue.yaml"
    file.write_text("\n".join(["a0: &a0 [lol]", *levels, "version: 1", "models: *a11"]))
    with pytest.raises(ConfigError, match="aliases"):
        read_catalogue(str(file))


def test_the_bundled_files_are_read(tmp_path: Path) -> None:
    """The readers that refuse so much take what is right."""
    shutil.copytree(MODEL, tmp_path / "quadriga-s")
    assert read_checkpoint(str(tmp_path / "quadriga-s")).num_layers == CONFIG["num_hidden_layers"]
    assert read_catalogue().models
