"""KV in rows and in pages: what is written is read; in rows, memory comes and goes with use."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch

from quadriga.engine.kv_cache import KV_BLOCK, RowKVCache
from quadriga.errors import InvariantViolation
from tests.unit.engine.kv_caches import AnyCache, paged_cache
from tests.unit.engine.kv_caches import row_cache as make


def committed_bytes(cache: RowKVCache) -> int:
    """Memory that the cache's own buffers hold, whatever else the process does."""
    libc = ctypes.CDLL(None, use_errno=True)
    total = 0
    for buffer in (*cache.keys, *cache.values):
        begin = buffer.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        num_bytes = buffer.data_ptr() + buffer.nbytes - begin
        pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
        address, length = ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes)
        assert libc.mincore(address, length, pages) == 0, os.strerror(ctypes.get_errno())
        total += sum(page & 1 for page in pages) * mmap.PAGESIZE
    return total


@pytest.fixture(params=[make, paged_cache], ids=["rows", "pages"])
def cache(request: pytest.FixtureRequest) -> AnyCache:
    made: AnyCache = request.param()
    return made


@pytest.mark.parametrize(("start", "stop"), [(0, 50), (0, 1), (15, 17), (16, 32), (31, 50), (7, 7)])
def test_read_returns_what_was_written(cache: AnyCache, start: int, stop: int) -> None:
    kv = torch.randn(2, 2, 2, stop - start, 4)
    cache.write(1, 1, start, kv)
    assert torch.equal(cache.read(1, 1, 2, start, stop), kv)
    assert cache.read(1, 1, 2, start, stop).is_contiguous()


def test_a_write_touches_nothing_else(cache: AnyCache) -> None:
    before = torch.randn(3, 2, 2, 50, 4)
    for row in range(3):
        cache.write(row, 0, 0, before)
    cache.write(1, 1, 20, torch.ones(1, 2, 2, 9, 4))
    assert torch.equal(cache.read(0, 0, 3, 0, 50), before)
    assert torch.equal(cache.read(2, 0, 3, 0, 50), before)
    changed = cache.read(1, 0, 3, 0, 50)
    assert torch.equal(changed[0], before[0])
    assert torch.equal(changed[2], before[2])
    assert torch.equal(changed[1][:, :, 29:], before[1][:, :, 29:])
    assert torch.equal(changed[1][:, :, :20], before[1][:, :, :20])
    assert (changed[1][:, :, 20:29] == 1).all()


def test_parts_in_any_order_make_the_whole(cache: AnyCache) -> None:
    whole = torch.randn(3, 2, 2, 50, 4)
    for layer in (2, 0, 1):
        for start in range(49, -1, -7):
            first = max(0, start - 6)
            cache.write(0, layer, first, whole[layer : layer + 1, :, :, first : start + 1])
    assert torch.equal(cache.read(0, 0, 3, 0, 50), whole)


@pytest.mark.parametrize(
    ("row", "layer", "layers", "start", "stop"),
    [(3, 0, 1, 0, 1), (-1, 0, 1, 0, 1), (0, 2, 2, 0, 1), (0, 0, 1, 0, 51), (0, 0, 1, 5, 4)],
)
def test_out_of_range(
    cache: AnyCache, row: int, layer: int, layers: int, start: int, stop: int
) -> None:
    with pytest.raises(InvariantViolation):
        cache.read(row, layer, layers, start, stop)


def test_misshapen_write(cache: AnyCache) -> None:
    with pytest.raises(InvariantViolation, match="does not fit"):
        cache.write(0, 0, 0, torch.zeros(1, 2, 3, 5, 4))
    with pytest.raises(InvariantViolation):
        cache.write(0, 0, 48, torch.zeros(1, 2, 2, 5, 4))


def test_capacity_need_not_be_whole_blocks() -> None:
    cache = make(capacity=KV_BLOCK + 1)
    assert cache.capacity == KV_BLOCK + 1
    assert cache.num_blocks == 2


def test_rows_cost_what_they_use() -> None:
    """6 GiB of rows: reserving costs nothing, a short sequence what it has, and no longer."""
    cache = make(num_rows=32, capacity=1 << 17, budget=1 << 17, head_dim=32)
    assert committed_bytes(cache) == 0
    tokens = 1 << 15
    for start in range(0, tokens, 1 << 11):
        cache.write(7, 0, start, torch.ones(3, 2, 2, 1 << 11, 32))
    wanted = 3 * 2 * 2 * tokens * 32 * 4
    assert wanted <= committed_bytes(cache) < 1.05 * wanted
    cache.release(7)
    assert committed_bytes(cache) < 0.05 * wanted
    assert not cache.read(7, 0, 1, 0, 4).any()


def test_a_kept_block_takes_the_memory_of_the_one_that_goes_for_it() -> None:
    cache = make(capacity=200)
    for row in range(2):
        cache.write(row, 0, 0, torch.full((3, 2, 2, 200, 4), float(row + 1)))
    first = cache.keep(0, 0)
    second = cache.keep(1, 64, first)
    assert second is first
    cache.share(2, 128, second)
    assert torch.equal(cache.read(2, 0, 3, 128, 192), cache.read(1, 0, 3, 64, 128))
    fewer = cache.at_depth(2, 600)
    assert fewer.keep(0, 0, second) is not second, "it has another shape"


@pytest.mark.parametrize("times", [1, 2])
def test_rows_and_as_many_kept_blocks_stay_within_their_memory(times: int) -> None:
    """Where it holds the rows alone, a row's pages go with its sequence: blocks may need them."""
    cache = make(capacity=4096, budget=times * 3 * 4096, head_dim=32)
    cache.write(1, 0, 0, torch.ones(3, 2, 2, 4096, 32))
    before = committed_bytes(cache)
    cache.release(1)
    assert committed_bytes(cache) == (before if times == 2 else 0)


def test_rows_of_more_layers_give_back_what_those_of_fewer_kept() -> None:
    tokens = 3 * 4096
    cache = make(capacity=4096, budget=2 * tokens, head_dim=32).at_depth(6, tokens)
    kv = torch.randn(6, 2, 2, 4096, 32)
    for row in range(3):
        cache.write(row, 0, 0, kv)
    before = committed_bytes(cache)
    cache.release(1)
    assert committed_bytes(cache) == 2 * before // 3
    assert torch.equal(cache.read(0, 0, 6, 0, 4096), kv)
    assert torch.equal(cache.read(2, 0, 6, 0, 4096), kv)
