"""The relay batch's parts: dense buffers, rows of their own, grouping of prompts."""

from __future__ import annotations

from unittest.mock import DEFAULT, Mock, patch

import pytest
import torch

from quadriga.engine.baton.dense import DenseBatch
from quadriga.engine.baton.passes import StoreCache
from quadriga.engine.baton.prompts import MAX_PADDED_RATIO, PromptSpan, PromptStore, group_prompts
from quadriga.engine.baton.row_kv import CacheGeometry, RowKV
from quadriga.engine.baton.rows import RelayRows
from quadriga.errors import InvariantViolation
from quadriga.interfaces import PrefillChunk

GEOMETRY = CacheGeometry(num_layers=1, num_kv_heads=1, head_dim=1, vocab_size=0)
CPU = torch.device("cpu")
NO_LIMIT = 1 << 30


def batch(*, capacity: int = 100, release: int = 4, max_rows: int = 8) -> DenseBatch:
    return DenseBatch(
        GEOMETRY,
        torch.float32,
        CPU,
        max_rows=max_rows,
        row_capacity_tokens=capacity,
        release_columns=release,
    )


def kv(length: int, value: float) -> torch.Tensor:
    return torch.full((1, 2, 1, length, 1), value)


def step(dense: DenseBatch, value: float = 9.0) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """One step; returns rows, mask and what the model would see as keys, [rows, columns]."""
    inputs = dense.begin_step()
    new = torch.full((len(inputs.rows), 1, 1, 1), value)
    keys, _ = dense.append(0, new, new)
    mask, seen = inputs.mask.clone(), keys[:, 0, :, 0].clone()
    dense.end_step()
    return inputs.rows, mask, seen


def test_a_longer_row_extends_over_what_was_released() -> None:
    """The columns it takes again hold a departed row's values: they must read as padding."""
    dense = batch()
    dense.insert(0, kv(8, 1.0))
    dense.insert(4, kv(8, 1.0))
    dense.insert(1, kv(12, 2.0))
    dense.remove(1)
    step(dense)  # four columns are released
    assert dense.width == 9
    dense.insert(2, kv(2, 3.0))  # where row 1 was
    bytes_before = dense.num_bytes
    dense.insert(3, kv(12, 4.0))
    assert dense.num_bytes == bytes_before, "no new buffer: the released columns were taken"
    rows, mask, seen = step(dense)
    assert rows == [0, 4, 2, 3]
    assert mask.sum(dim=1).tolist() == [10, 10, 3, 13]
    assert (seen[mask == 0] == 0).all()
    assert seen[2].tolist() == [0.0] * 10 + [3.0, 3.0, 9.0]


def test_columns_never_outgrow_a_row() -> None:
    """Two columns are free in front, too few to release; but a ninth would be beyond the limit."""
    dense = batch(capacity=8)
    dense.insert(0, kv(5, 1.0))
    dense.insert(1, kv(7, 2.0))
    step(dense)
    dense.remove(1)
    assert dense.width == 8
    _, mask, seen = step(dense)
    assert mask.shape == (1, 7)
    assert seen.tolist() == [[1.0] * 5 + [9.0, 9.0]]
    step(dense)
    with pytest.raises(InvariantViolation, match="no room"):
        step(dense)


def test_a_newcomer_takes_the_place_of_the_one_that_left() -> None:
    dense = batch()
    for row in range(4):
        dense.insert(row, kv(2 + row, float(row)))
    dense.remove(1)
    dense.remove(2)
    dense.insert(7, kv(1, 7.0))
    rows, mask, _ = step(dense)
    assert rows == [0, 7, 3], "7 in the place of 1, then 3 moves up into the place of 2"
    assert mask.sum(dim=1).tolist() == [3, 2, 6]


def test_memory_grows_geometrically_and_comes_back() -> None:
    dense = batch(capacity=4096, release=64)
    dense.insert(0, kv(1, 1.0))
    sizes = set()
    for _ in range(1000):
        step(dense)
        sizes.add(dense.num_bytes)
    assert len(sizes) <= 8, "a new buffer every doubling, not every step"
    for row in range(1, 8):
        dense.insert(row, kv(1, 1.0))
    wide = dense.num_bytes
    for row in range(7):
        dense.remove(row)
    step(dense)
    assert dense.num_bytes < wide / 8
    assert dense.padding_cells == 0
    dense.remove(7)
    assert dense.num_bytes == 0


def test_a_row_is_in_the_batch_once() -> None:
    dense = batch()
    dense.insert(0, kv(1, 1.0))
    with pytest.raises(InvariantViolation, match="row 0 is in the batch"):
        dense.insert(0, kv(1, 1.0))


def test_reading_what_is_not_there() -> None:
    dense = batch()
    dense.insert(0, kv(3, 1.0))
    with pytest.raises(InvariantViolation, match=r"positions 1\.\.4"):
        dense.read(0, 0, 1, 1, 4)
    with pytest.raises(InvariantViolation, match=r"layers 0\.\.2"):
        dense.read(0, 0, 2, 0, 1)


@pytest.mark.parametrize(
    ("first_layer", "start", "shape", "message"),
    [
        (0, 0, (2, 2, 1, 3, 2), "does not fit"),
        (0, 0, (2, 2, 1, 3), "does not fit"),
        (0, 3, (1, 2, 1, 3, 1), "gap"),
        (0, 0, (1, 2, 1, 11, 1), "a row holds 10"),
        (1, 0, (2, 2, 1, 3, 1), "layers"),
        (-1, 0, (1, 2, 1, 3, 1), "layers"),
    ],
)
def test_rows_refuse_what_does_not_fit(
    first_layer: int, start: int, shape: tuple[int, ...], message: str
) -> None:
    geometry = CacheGeometry(num_layers=2, num_kv_heads=1, head_dim=1, vocab_size=0)
    row = RowKV(geometry, torch.float32, CPU, max_tokens=10)
    row.write(0, 0, torch.ones(2, 2, 1, 2, 1))
    with pytest.raises(InvariantViolation, match=message):
        row.write(first_layer, start, torch.ones(shape))
    assert row.length == 2
    with pytest.raises(InvariantViolation, match="not all computed"):
        row.read(0, 2, 0, 3)


def test_a_row_is_as_long_as_its_shortest_layer() -> None:
    geometry = CacheGeometry(num_layers=2, num_kv_heads=1, head_dim=1, vocab_size=0)
    row = RowKV(geometry, torch.float32, CPU, max_tokens=500)
    row.write(0, 0, torch.full((1, 2, 1, 100, 1), 1.0))
    row.write(0, 100, torch.full((1, 2, 1, 200, 1), 1.0))
    assert row.length == 0
    row.write(1, 0, torch.full((1, 2, 1, 200, 1), 2.0))
    assert row.length == 200
    assert row.read(0, 1, 0, 300).eq(1.0).all()
    row.write(0, 10, torch.full((1, 2, 1, 5, 1), 3.0))
    assert row.length == 200, "writing into the middle takes nothing away"
    row.crop(7)
    assert row.length == 7


def test_a_suspended_row_takes_its_memory_along() -> None:
    rows = RelayRows(
        GEOMETRY, torch.float32, CPU, num_rows=4, row_capacity_tokens=100, release_columns=4
    )
    rows.write(1, 0, 0, kv(10, 1.0))
    rows.begin_step({1: 10})
    rows.end_step()
    memory = rows.memory()
    assert memory.batch_bytes > 0
    assert memory.row_bytes == 0
    suspended = rows.suspend(1)
    assert rows.memory().kv_bytes == 0
    assert suspended.length == 11
    rows.write(1, 0, 0, kv(3, 5.0))
    with pytest.raises(InvariantViolation, match="row 1 holds 3 positions"):
        rows.restore(1, suspended)
    rows.restore(2, suspended)
    assert rows.read(2, 0, 1, 0, 10).eq(1.0).all()
    assert rows.read(1, 0, 1, 0, 3).eq(5.0).all()
    assert rows.suspend(3).length == 0, "a row that holds nothing"


@pytest.mark.parametrize("num_allocated", range(5))
def test_a_step_that_lacks_memory_may_be_begun_again(num_allocated: int) -> None:
    """Wherever it fails: rows are where they were, or where the step wants them."""
    rows = RelayRows(
        GEOMETRY, torch.float32, CPU, num_rows=4, row_capacity_tokens=99, release_columns=4
    )
    for row, length in ((0, 5), (1, 3), (2, 40)):
        rows.write(row, 0, 0, kv(length, 1.0 + row))
    rows.begin_step({0: 5, 1: 3})
    found = [*[DEFAULT] * num_allocated, torch.OutOfMemoryError]
    scarce = Mock(wraps=torch.zeros, side_effect=found)
    with patch.object(torch, "zeros", scarce), pytest.raises(torch.OutOfMemoryError):
        rows.begin_step({1: 3, 2: 40})
    assert sorted(rows.begin_step({1: 3, 2: 40}).rows) == [1, 2]
    for row, length in ((0, 5), (1, 3), (2, 40)):
        assert rows.read(row, 0, 1, 0, length).eq(1.0 + row).all()


def test_a_step_that_cannot_be_changes_nothing() -> None:
    rows = RelayRows(
        GEOMETRY, torch.float32, CPU, num_rows=4, row_capacity_tokens=12, release_columns=4
    )
    rows.write(0, 0, 0, kv(5, 1.0))
    rows.begin_step({0: 5})
    rows.end_step()
    rows.write(1, 0, 0, kv(3, 2.0))
    with pytest.raises(InvariantViolation, match="row 1 cannot decode position 4: 3 positions"):
        rows.begin_step({1: 4})
    rows.write(2, 0, 0, kv(12, 2.0))
    with pytest.raises(InvariantViolation, match="12 fit"):
        rows.begin_step({2: 12})
    assert rows.batch.rows == [0]
    assert rows.read(1, 0, 1, 0, 3).eq(2.0).all()


def test_the_cache_tells_its_length_as_transformers_expects() -> None:
    """Past before a layer's update, past and pass after it; layers apart from each other."""
    geometry = CacheGeometry(num_layers=2, num_kv_heads=1, head_dim=1, vocab_size=0)
    row = RowKV(geometry, torch.float32, CPU, max_tokens=20)
    row.write(0, 0, torch.ones(2, 2, 1, 5, 1))
    cache = StoreCache(PromptStore([PromptSpan(row, [1, 2, 3], 5)]), 2)
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    new = torch.full((1, 1, 3, 1), 2.0)
    keys, _ = cache.update(new, new, 0)
    assert keys.flatten().tolist() == [1.0] * 5 + [2.0] * 3
    assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (8, 5)


def chunk(row: int, length: int, start: int = 0) -> PrefillChunk:
    return PrefillChunk(row, [1] * length, start, True)


def test_prompts_of_similar_length_share_a_pass() -> None:
    lengths = [10, 300, 11, 9, 290, 2]
    groups = group_prompts([chunk(i, n) for i, n in enumerate(lengths)], max_padding=NO_LIMIT)
    assert sorted(map(sorted, groups)) == [[0, 2, 3], [1, 4], [5]]
    for group in groups:
        tokens = sum(lengths[i] for i in group)
        assert max(lengths[i] for i in group) * len(group) <= MAX_PADDED_RATIO * tokens


def test_prompts_that_continue_go_alone() -> None:
    chunks = [chunk(0, 8, start=4), chunk(1, 8), chunk(2, 8, start=4), chunk(3, 8)]
    groups = group_prompts(chunks, max_padding=NO_LIMIT)
    assert sorted(map(sorted, groups)) == [[0], [1, 3], [2]]


def test_padding_stays_inside_a_window() -> None:
    """A padding query further behind than the window would see nothing at all."""
    chunks = [chunk(0, 40), chunk(1, 36), chunk(2, 35)]
    assert group_prompts(chunks, max_padding=NO_LIMIT) == [[0, 1, 2]]
    assert group_prompts(chunks, max_padding=4) == [[0, 1], [2]]
    assert group_prompts(chunks, max_padding=0) == [[0], [1], [2]]
