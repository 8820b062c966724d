"""Weights that several processes of a machine read from one copy in memory."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quadriga.catalogue.headers import SINGLE_FILE
from quadriga.checkpoint.model_config import read_model_config
from quadriga.engine.weights.checkpoint_weights import ModelWeights
from quadriga.engine.weights.loading import load_weights
from quadriga.engine.weights.shared_memory import SharedParts, is_supported
from quadriga.engine.weights.tensor_files import WeightSource
from quadriga.errors import ConfigError
from tests.equivalence.models import build, save
from tests.unit.engine.test_weights import equal, rewrite

pytestmark = pytest.mark.skipif(not is_supported(), reason="needs memfd and /proc (Linux)")

HOLDER = """
import sys
from pathlib import Path
from tests.unit.engine.test_shared_memory import equal, load
weights = load(Path(sys.argv[1]), Path(sys.argv[2]))
assert equal(weights, weights), "every page is read"
print("loaded", flush=True)
sys.stdin.readline()
"""


def load(path: Path, shared_in: Path | None, depth: int = 3) -> ModelWeights:
    config = read_model_config(path)
    source = WeightSource(path, torch.float32, shared_in=shared_in)
    return load_weights(source, config, depth, 96)


def shared_maps() -> list[str]:
    """The lines of this process's memory map that are shared weights."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:quadriga-" in line]


def shared_pss_bytes() -> int:
    """This process's part of the shared weights, each page divided by those who have it."""
    areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    ours = [area for area in areas if "/memfd:quadriga-" in area]
    return sum(1024 * int(re.findall(r"^Pss: +(\d+)", area, flags=re.M)[0]) for area in ours)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return save(build("llama"), folder)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()  # what tests of other files left in this process is not counted here
    yield
    gc.collect()
    assert shared_maps() == []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            assert "memfd:quadriga-" not in os.readlink(descriptor)


def test_two_processes_read_one_copy_that_outlives_the_one_that_made_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    private = load(checkpoint, None)
    command = [sys.executable, "-c", HOLDER, str(checkpoint), str(tmp_path / "shared")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "loaded\n"
        weights = load(checkpoint, tmp_path / "shared")
        assert equal(weights, private)
        shared = shared_pss_bytes()
        holder.kill()
        holder.wait(30)
        alone = shared_pss_bytes()
    # While both had every page, half of each was this process's.
    assert 0 < shared < 0.6 * alone
    assert equal(weights, private)
    again = load(checkpoint, tmp_path / "shared")  # through this process's own descriptors
    assert equal(again, private)
    assert shared_pss_bytes() == pytest.approx(alone, rel=0.05)


def test_shared_weights_cannot_be_written(checkpoint: Path, tmp_path: Path) -> None:
    weights = load(checkpoint, tmp_path / "shared")
    joined = load(checkpoint, tmp_path / "shared")
    assert equal(weights, joined)
    assert {line.split()[1] for line in shared_maps()} == {"r--s"}


def test_a_part_that_another_depth_has_loaded_is_shared(checkpoint: Path, tmp_path: Path) -> None:
    deep = load(checkpoint, tmp_path / "shared", 3)
    before = shared_pss_bytes()
    shallow = load(checkpoint, tmp_path / "shared", 2)
    assert shared_pss_bytes() == pytest.approx(before, rel=0.05)
    assert torch.equal(shallow.layers[1].qkv.weight.rows, deep.layers[1].qkv.weight.rows)


def test_changed_files_are_read_anew(checkpoint: Path, tmp_path: Path) -> None:
    before = load(checkpoint, tmp_path / "shared")
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors[name].mul_(2))
    after = load(checkpoint, tmp_path / "shared")
    old, new = before.layers[1].down.weight, after.layers[1].down.weight
    assert torch.equal(2 * old.rows, new.rows)
    parts = set((tmp_path / "shared").iterdir())
    (checkpoint / "config.json").touch()  # it says what tensors mean
    load(checkpoint, tmp_path / "shared")
    assert len(set((tmp_path / "shared").iterdir()) - parts) == len(parts) / 2


def test_a_part_that_was_not_filled_to_its_end_is_not_shared(
    checkpoint: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(checkpoint / SINGLE_FILE)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, checkpoint / SINGLE_FILE)
    for _ in range(2):  # the second one would take what the first one left
        with pytest.raises(ConfigError, match="NaN"):
            load(checkpoint, tmp_path / "shared")


@pytest.mark.parametrize("damage", [b"", b"\0" * 64, b"[]", b'{"label": 3, "holders": [[1, 2]]}'])
def test_a_damaged_registry_costs_sharing_and_nothing_else(
    checkpoint: Path, tmp_path: Path, damage: bytes
) -> None:
    first = load(checkpoint, tmp_path / "shared")
    for file in (tmp_path / "shared").iterdir():
        file.write_bytes(damage)
    second = load(checkpoint, tmp_path / "shared")
    assert equal(first, second)


def test_a_registry_that_cannot_be_made_costs_sharing_and_nothing_else(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "shared").write_text("a file where the folder should be")
    assert equal(load(checkpoint, tmp_path / "shared"), load(checkpoint, None))
    assert shared_maps() == []


def test_tensors_in_another_order_go_into_private_memory(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    parts = SharedParts(tmp_path / "shared", [file], "float32")
    with parts.part("layer", 4096) as arena:
        first = arena.take((8, 8), torch.float32).fill_(1.0)
        arena.take((4,), torch.float32).fill_(2.0)
    with parts.part("layer", 4096) as arena:
        again = arena.take((8, 8), torch.float32)
        assert arena.is_filled
        other = arena.take((5,), torch.float32)
        assert not arena.is_filled
        last = arena.take((4,), torch.float32)
        assert not arena.is_filled
    assert torch.equal(first, again)
    assert not other.any()
    assert not last.any()


def test_more_than_was_announced_goes_into_private_memory(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x")
    parts = SharedParts(tmp_path / "shared", [file], "float32")
    for is_filled in (False, True):
        with parts.part("layer", 1024) as arena:
            small = arena.take((256,), torch.float32)
            assert arena.is_filled is is_filled
            if not is_filled:
                small.fill_(3.0)
            assert (small == 3.0).all()
            large = arena.take((1 << 20,), torch.float32)
            assert not arena.is_filled
            assert not large.any()
