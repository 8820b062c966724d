"""KV cache in pages, on a GPU (or anywhere else: without a GPU the copies are plain).

        keys, values   [num_pages + 1, page_tokens, num_kv_heads, head_dim]   one pool, all layers
        table          int32 [num_layers, num_rows + 1, num_blocks]           on the device

The host's page table (`pages.PageTable`) is the truth. The device has a copy of it, to which only
the engine's thread adds, before a pass; other threads that read or write a row look its pages up on
the host.

Other threads copy on a stream of their own. Such a copy first waits for what the engine's stream
was given before it, and is over when the call returns: so a reader sees what passes before it
computed, and a pass sees what was written before it was planned.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from quadriga.engine.cuda.pages import PAGE_TOKENS, Pages, PageTable, pages_per_layer
from quadriga.engine.kv_cache import check_range, check_shape
from quadriga.engine.transfers import to_device
from quadriga.errors import InvariantViolation

Ints = npt.NDArray[np.int64]

RELEASE_TIMEOUT_S = 10.0
"""A row is released when copies of it that other threads have under way are over."""


class PagedKVCache:
    """The GPU form of `quadriga.engine.kv_cache.KVCache`.

    Args:
        segment_ends: Layers run at the end of each segment; pages are taken a segment at a time.
        capacity: Most tokens of one sequence.
        budget_tokens: Tokens over all rows that pages are reserved for.
        host_copies: `read` returns CPU tensors; False: tensors on the device.
    """

    def __init__(
        self,
        *,
        segment_ends: Sequence[int],
        num_rows: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        budget_tokens: int,
        device: torch.device,
        host_copies: bool = True,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self._capacity = capacity
        self._num_rows = num_rows
        self._num_layers = segment_ends[-1]
        self._shape = (num_kv_heads, head_dim)
        num_pages = self._num_layers * pages_per_layer(
            budget_tokens, num_rows, capacity, page_tokens
        )
        self.pages = PageTable(
            segment_ends=segment_ends,
            num_rows=num_rows,
            capacity=capacity,
            num_pages=num_pages,
            page_tokens=page_tokens,
        )
        # Zeroed: a masked position must hold a number, not the memory's leavings.
        shape = (num_pages + 1, page_tokens, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.table = torch.zeros(self.pages.table.shape, dtype=torch.int32, device=device)
        self._host_copies = host_copies
        self._changed = threading.Condition()
        self._copies_of = [0] * num_rows
        self._streams: _Streams | None = _Streams(device) if device.type == "cuda" else None

    @property
    def num_layers(self) -> int:
        return self._num_layers

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def device(self) -> torch.device:
        return self.keys.device

    @property
    def padding_row(self) -> int:
        """A row that belongs to no sequence: what is stored there is lost."""
        return self._num_rows

    # The engine's thread, for passes.

    def prepare(self, rows: Ints, num_tokens: Ints, first: int, stop: int) -> None:
        """Have pages for the first `num_tokens` positions of rows in layers [first, stop).

        Call it before any pass that stores something there.

        Raises:
            KVCacheExhausted: See `PageTable.ensure`.
        """
        with self._changed:
            self.pages.ensure(rows, num_tokens, self.pages.segments(first, stop))
            if not self.pages.has_changes:
                return
            indices, entries = self.pages.changes()
            self.table.view(-1)[to_device(indices, self.device)] = to_device(entries, self.device)
            self.pages.drop_changes()  # none is lost where the device lacks the memory to copy

    def slots(
        self, first: int, stop: int, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Where tokens belong in the flat pools of layers [first, stop).

        Args:
            rows, positions: int64 [T], on the device.

        Returns:
            int64 [stop - first, T]
        """
        size = self.pages.page_tokens
        blocks = torch.div(positions, size, rounding_mode="floor")
        return self.table[first:stop, rows, blocks].long() * size + positions % size

    def store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V [T, num_kv_heads, head_dim] of one layer to its slots [T]."""
        self.flat(self.keys)[slots] = k
        self.flat(self.values)[slots] = v

    def copy_layers(self, rows: Ints, positions: Ints, source: int, first: int, stop: int) -> None:
        """See `KVCache.copy_layers`."""
        self.prepare(rows, positions + 1, first, stop)
        where = to_device(np.stack([rows, positions]), self.device)
        origin = self.slots(source, source + 1, where[0], where[1])[0]
        k, v = self.flat(self.keys)[origin], self.flat(self.values)[origin]
        for slots in self.slots(first, stop, where[0], where[1]):
            self.store(slots, k, v)

    def release(self, row: int) -> None:
        """See `KVCache.release`. Raises: InvariantViolation: A copy of the row does not end."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._copies_of[row], RELEASE_TIMEOUT_S):
                raise InvariantViolation(
                    f"row {row}: {self._copies_of[row]} copies did not end in {RELEASE_TIMEOUT_S} s"
                )
            self.pages.release(row)

    @property
    def share_tokens(self) -> int:
        """See `KVCache.share_tokens`: a page."""
        return self.pages.page_tokens

    def keep(self, row: int, start: int, over: object | None = None) -> Pages:
        """See `KVCache.keep`: nothing is copied."""
        if over is not None:
            self.forget(over)
        with self._changed:
            return self.pages.keep(row, start // self.pages.page_tokens)

    def blank(self) -> None:
        """See `KVCache.blank`: a row's pages are kept as they are."""

    def share(self, row: int, start: int, kept: object) -> None:
        """See `KVCache.share`: the row names the same pages."""
        assert isinstance(kept, np.ndarray)
        with self._changed:
            self.pages.share(row, start // self.pages.page_tokens, kept)

    def forget(self, kept: object) -> None:
        """See `KVCache.forget`."""
        assert isinstance(kept, np.ndarray)
        with self._changed:
            self.pages.forget(kept)

    # Any thread, for rows that no pass is working on.

    def read(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `KVCache.read`; what was never computed is zero."""
        check_range(self, row, first_layer, num_layers, start, stop)
        heads, head_dim = self._shape
        with self._copying(row):
            pages, slots = self._host_slots(row, first_layer, num_layers, start, stop)
            with self._on_copy_stream():
                at, missing = (to_device(a, self.device) for a in (slots, pages == 0))
                shape = (num_layers, 2, heads, stop - start, head_dim)
                kv = torch.empty(shape, dtype=self.keys.dtype, device=self.device)
                for side, pool in enumerate((self.keys, self.values)):
                    found = self.flat(pool)[at]  # [num_layers, n, heads, head_dim]
                    found = found.masked_fill(missing[:, :, None, None], 0)
                    kv[:, side] = found.transpose(1, 2)
                if self._host_copies and self._streams is not None:
                    staged = torch.empty(shape, dtype=kv.dtype, pin_memory=True)
                    kv = staged.copy_(kv, non_blocking=True)
        return kv

    def write(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """See `KVCache.write`. Raises: KVCacheExhausted: There are no pages for it."""
        check_shape(kv, *self._shape)
        num_layers, stop = kv.shape[0], start + kv.shape[3]
        check_range(self, row, first_layer, num_layers, start, stop)
        if stop == start or not num_layers:
            return
        with self._copying(row):
            with self._changed:
                segments = self.pages.segments(first_layer, first_layer + num_layers)
                self.pages.ensure(np.array([row]), np.array([stop]), segments)
            _, slots = self._host_slots(row, first_layer, num_layers, start, stop)
            with self._on_copy_stream():
                at = to_device(slots, self.device)
                here = kv.to(self.device, non_blocking=True)
                for side, pool in enumerate((self.keys, self.values)):
                    self.flat(pool)[at] = here[:, side].transpose(1, 2)

    def _host_slots(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> tuple[npt.NDArray[np.int32], Ints]:
        """Page and slot of every (layer, position): int [num_layers, stop - start]."""
        positions = np.arange(start, stop, dtype=np.int64)
        layers = self.pages.table[first_layer : first_layer + num_layers, row]
        size = self.pages.page_tokens
        pages = layers[:, positions // size]
        return pages, pages.astype(np.int64) * size + positions % size

    def flat(self, pool: torch.Tensor) -> torch.Tensor:
        """[(num_pages + 1) · page_tokens, num_kv_heads, head_dim]"""
        return pool.view(-1, *self._shape)

    @contextmanager
    def _copying(self, row: int) -> Iterator[None]:
        """Keep a row's pages from being released while they are copied."""
        with self._changed:
            self._copies_of[row] += 1
        try:
            yield
        finally:
            with self._changed:
                self._copies_of[row] -= 1
                self._changed.notify_all()

    @contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        """Run after what the engine was given so far, and be over at the end."""
        if self._streams is None:
            yield
            return
        with self._streams.copying():
            yield


class _Streams:
    """The engine's stream, on which the cache is made, and one for other threads' copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._engine = torch.cuda.current_stream(device)
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def copying(self) -> Iterator[None]:
        before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        before.record(self._engine)
        after = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(before)
            try:
                yield
            finally:
                after.record(self._copies)
                # Waits for the copy, so that the caller's next message may rely on it.
                after.synchronize()
