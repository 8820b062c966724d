"""Paged KV: what is written is read, by several threads at once; pages come and go with rows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from quadriga.engine.cuda import paged_cache
from quadriga.engine.cuda.paged_cache import PagedKVCache
from quadriga.engine.cuda.paged_states import PagedStates
from quadriga.errors import InvariantViolation, KVCacheExhausted
from tests.unit.engine.kv_caches import paged_cache as make


def test_what_was_never_computed_is_zero() -> None:
    cache = make()
    cache.store(torch.zeros(1, dtype=torch.int64), torch.ones(1, 2, 4), torch.ones(1, 2, 4))
    assert cache.keys[0].any(), "padding has left something"
    cache.write(0, 0, 0, torch.ones(1, 2, 2, 10, 4))
    kv = cache.read(0, 0, 3, 0, 10)
    assert (kv[0] == 1).all() and not kv[1:].any()
    assert cache.pages.held_pages(0) == 1


def test_passes_find_the_slots_that_threads_wrote() -> None:
    cache, kv = make(), torch.randn(3, 2, 2, 40, 4)
    cache.write(2, 0, 0, kv)
    rows, positions = np.array([2, 2, 0]), np.array([0, 39, 17])
    cache.prepare(rows, positions + 1, 0, 3)
    slots = cache.slots(1, 3, torch.from_numpy(rows), torch.from_numpy(positions))
    flat = cache.keys.view(-1, 2, 4)
    assert torch.equal(flat[slots[0, :2]], kv[1, 0][:, [0, 39]].transpose(0, 1))
    assert torch.equal(flat[slots[1, :2]], kv[2, 0][:, [0, 39]].transpose(0, 1))
    cache.store(slots[1], torch.ones(3, 2, 4), torch.full((3, 2, 4), 2.0))
    assert (cache.read(0, 2, 1, 17, 18)[0, 1] == 2).all()
    padding = torch.full((1,), cache.padding_row)
    assert int(cache.slots(0, 1, padding, torch.zeros(1, dtype=torch.int64))) == 0


def test_what_was_not_copied_to_the_device_is_copied_with_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, row = make(), np.array([1])
    lacks = torch.OutOfMemoryError("CUDA out of memory")
    with monkeypatch.context() as scarce:
        scarce.setattr(paged_cache, "to_device", Mock(side_effect=lacks))
        with pytest.raises(torch.OutOfMemoryError):
            cache.prepare(row, np.array([20]), 0, 3)
    cache.prepare(row, np.array([20]), 0, 3)
    assert cache.table[:, 1, :2].all() and np.array_equal(cache.table.numpy(), cache.pages.table)


def test_layers_are_copied_where_they_are_missing() -> None:
    cache, kv = make(), torch.randn(1, 2, 2, 40, 4)
    cache.write(1, 0, 0, kv)
    cache.copy_layers(np.array([1] * 3), np.array([3, 20, 39]), 0, 1, 3)
    for layer in (1, 2):
        got = cache.read(1, layer, 1, 0, 40)
        assert torch.equal(got[:, :, :, [3, 20, 39]], kv[:, :, :, [3, 20, 39]])


def test_more_than_there_are_pages_for() -> None:
    cache = make(budget=0)  # a page for each row and layer
    with pytest.raises(KVCacheExhausted):
        cache.write(0, 0, 0, torch.zeros(3, 2, 2, 50, 4))
    cache.pages.check()


def test_threads_write_and_read_rows_of_their_own() -> None:
    """While the engine's thread prepares passes of another row and lets rows go."""
    cache = make(num_rows=5, budget=250)
    rounds = 40

    def work(row: int) -> bool:
        generator = torch.Generator().manual_seed(row)
        fine = True
        for i in range(rounds):
            stop = 1 + (7 * i + row) % 50
            kv = torch.randn(3, 2, 2, stop, 4, generator=generator)
            cache.write(row, 0, 0, kv)
            fine &= torch.equal(cache.read(row, 0, 3, 0, stop), kv)
            cache.release(row)
        return fine

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work, row) for row in range(4)]
        for i in range(rounds):
            cache.prepare(np.array([4]), np.array([1 + i]), 0, 3)
            slots = cache.slots(0, 3, torch.tensor([4]), torch.tensor([i]))
            cache.store(slots[2], torch.full((1, 2, 4), float(i)), torch.zeros(1, 2, 4))
        assert all(future.result(timeout=60) for future in working)
    kept = cache.read(4, 2, 1, 0, rounds)[0, 0, 0, :, 0]
    assert torch.equal(kept, torch.arange(rounds, dtype=torch.float32))
    cache.release(4)
    cache.pages.check()
    assert cache.pages.num_free == cache.pages.num_pages


def test_a_row_is_released_when_its_copies_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a late write would land in a page that is another's by now."""
    cache = make()
    entered, go_on = threading.Event(), threading.Event()
    host_slots = PagedKVCache._host_slots

    def slow(self: PagedKVCache, *args: int) -> Any:
        found = host_slots(self, *args)
        entered.set()
        assert go_on.wait(30)
        return found

    monkeypatch.setattr(PagedKVCache, "_host_slots", slow)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(cache.write, 0, 0, 0, torch.ones(3, 2, 2, 20, 4))
        assert entered.wait(30)
        releasing = pool.submit(cache.release, 0)
        assert not releasing.done() and cache.pages.held_pages(0) == 6
        go_on.set()
        writing.result(timeout=30)
        releasing.result(timeout=30)
    assert cache.pages.held_pages(0) == 0


def test_a_copy_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "RELEASE_TIMEOUT_S", 0.01)
    cache = make()
    with cache._copying(1), pytest.raises(InvariantViolation, match="row 1: 1 copies"):
        cache.release(1)
    cache.release(1)


def test_states_are_kept_in_pages() -> None:
    states = PagedStates(
        num_rows=2,
        capacity=50,
        hidden_size=3,
        budget_tokens=60,
        dtype=torch.float32,
        device=torch.device("cpu"),
        page_tokens=16,
    )
    rows, slots = np.array([0, 1, 0, 0]), np.array([0, 5, 16, 49])
    kept = torch.randn(4, 3)
    states.put(rows, slots, kept)
    assert torch.equal(states.take(rows[::-1].copy(), slots[::-1].copy()), kept.flip(0))
    assert states.pages.held_pages(0) == 4 and states.pages.held_pages(1) == 1
    states.release(0)
    states.release(1)
    states.pages.check()
    assert states.pages.num_free == states.pages.num_pages
