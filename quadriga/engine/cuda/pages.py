"""Who owns which page of KV. Plain arrays: no torch, no device.

A page holds K and V of 256 positions of one sequence in one layer. A row takes pages
segment by segment (the layers between two exits): one page for each layer of the segment, when its
tokens first reach it. So a sequence whose tokens all leave early holds no page of a deep layer, and
all segments share one pool.

        table [num_layers, num_rows + 1, num_blocks]   page of each (layer, row, block of positions)

Page 0 belongs to no row: table entries that are not in use name it, and so does the whole of the
last row, which pads batches to a fixed size.

Rows that begin alike name the same pages, counted by reference. Nothing is ever written to a page
that is shared: whole pages of prompts alone are, and a row goes on behind them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quadriga.errors import InvariantViolation, KVCacheExhausted

PAGE_TOKENS = 256
"""The least that flash-attn's paged kernels take: multiples of 256. Tests use smaller pages."""

Ints = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]
"""[num_layers]: the pages of one block of a row, one in each layer."""


def pages_per_layer(
    budget_tokens: int, num_rows: int, capacity: int, page_tokens: int = PAGE_TOKENS
) -> int:
    """Pages with which `budget_tokens` over all rows never run out.

    A row of t tokens takes ceil(t / page) < t / page + 1 pages, so all rows together take fewer
    than budget / page + rows, and no row more than its capacity.
    """
    return min(-(-budget_tokens // page_tokens) + num_rows, num_rows * -(-capacity // page_tokens))


class PageTable:
    """Pages of all rows, handed out from one free list.

    Not thread-safe: `PagedKVCache` calls it under its lock.

    Args:
        segment_ends: Layers run at the end of each segment, ascending; the last is all of them.
        num_pages: Over all layers, page 0 not counted.
    """

    def __init__(
        self,
        *,
        segment_ends: Sequence[int],
        num_rows: int,
        capacity: int,
        num_pages: int,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        # A multiple of 4 entries, 16 bytes: wherever a row of the table begins, kernels find it
        # aligned alike, and are compiled once.
        num_blocks = -(-capacity // (4 * page_tokens)) * 4
        self.table = np.zeros((segment_ends[-1], num_rows + 1, num_blocks), dtype=np.int32)
        self._begins = (0, *segment_ends[:-1])
        self._ends = tuple(segment_ends)
        self._free = np.arange(num_pages, 0, -1, dtype=np.int32)  # a stack; its top is at the end
        self._num_free = num_pages
        self._uses = np.zeros(num_pages + 1, dtype=np.int32)  # table entries that name a page
        self._kept = np.zeros(num_pages + 1, dtype=np.int32)  # beside them
        self._blocks = np.zeros((num_rows, len(self._ends)), dtype=np.int64)  # held of a segment
        self._changes: list[tuple[int, int, int, int, int]] = []

    @property
    def num_free(self) -> int:
        return self._num_free

    def segments(self, first_layer: int, stop_layer: int) -> range:
        """Segments that layers [first, stop) touch."""
        return range(bisect_right(self._ends, first_layer), bisect_left(self._begins, stop_layer))

    def ensure(self, rows: Ints, num_tokens: Ints, segments: range) -> None:
        """Give rows the pages of their first `num_tokens` positions in some segments.

        A row may be named more than once.

        Raises:
            KVCacheExhausted: There are not enough; the rows before keep what they got. It cannot
                happen while rows hold no more tokens than `pages_per_layer` was asked for.
        """
        for segment in segments:
            is_short = self._blocks[rows, segment] * self.page_tokens < num_tokens
            for i in np.flatnonzero(is_short).tolist() if is_short.any() else ():
                wanted = -(-int(num_tokens[i]) // self.page_tokens)
                self._extend(int(rows[i]), segment, wanted)

    def _extend(self, row: int, segment: int, wanted: int) -> None:
        held = int(self._blocks[row, segment])
        begin, end = self._begins[segment], self._ends[segment]
        count = (end - begin) * (wanted - held)
        if count <= 0:
            return
        if count > self._num_free:
            raise KVCacheExhausted(
                f"{count} pages of KV are needed for row {row} at layers {begin + 1}..{end}, "
                f"{self._num_free} of {self.num_pages} are free"
            )
        taken = self._free[self._num_free - count : self._num_free][::-1]
        self.table[begin:end, row, held:wanted] = taken.reshape(wanted - held, end - begin).T
        self._num_free -= count
        self._uses[taken] = 1
        self._blocks[row, segment] = wanted
        self._changes.append((begin, end, row, held, wanted))

    def release(self, row: int) -> None:
        """Take back all pages of a row that nobody else has; it may be released again."""
        self._cut(row, 0)

    def _cut(self, row: int, block: int) -> None:
        """`release` for the blocks of a row from one on."""
        for segment, held in enumerate(self._blocks[row].tolist()):
            if held <= block:
                continue
            entries = self.table[self._begins[segment] : self._ends[segment], row, block:held]
            pages = entries.T.ravel()[::-1]
            self._uses[pages] -= 1
            self._free_unused(pages)
            entries[:] = 0
            self._blocks[row, segment] = block

    def keep(self, row: int, block: int) -> Pages:
        """Hold on to the pages of a row's block in all layers; `forget` lets them go.

        Raises: InvariantViolation: The row lacks some of them.
        """
        if not (self._blocks[row] > block).all():
            raise InvariantViolation(f"row {row} has no block {block} in some of its layers")
        pages = self.table[:, row, block].copy()
        self._kept[pages] += 1
        return pages

    def share(self, row: int, block: int, pages: Pages) -> None:
        """Let kept pages be a row's block, and its last: pages of a pass that failed go back.

        Raises: InvariantViolation: The row lacks some of the blocks before it.
        """
        if not (self._blocks[row] >= block).all():
            raise InvariantViolation(
                f"row {row} has {self._blocks[row].tolist()} blocks; {block} cannot be shared next"
            )
        self._cut(row, block)
        self.table[:, row, block] = pages
        self._uses[pages] += 1
        self._blocks[row] = block + 1
        self._changes.append((0, self._ends[-1], row, block, block + 1))

    def forget(self, pages: Pages) -> None:
        """Let kept pages go; rows that name them keep them."""
        self._kept[pages] -= 1
        self._free_unused(pages)

    def _free_unused(self, pages: Pages) -> None:
        unused = pages[(self._uses[pages] == 0) & (self._kept[pages] == 0)]
        self._free[self._num_free : self._num_free + unused.size] = unused
        self._num_free += unused.size

    def changes(self) -> tuple[Ints, npt.NDArray[np.int32]]:
        """What was handed out since `drop_changes`, for a copy of the table elsewhere.

        Entries that went back to page 0 are left out: no pass reads them before they are handed out
        again.

        Returns:
            Indices into the flat table, and the pages there.
        """
        _, num_rows, num_blocks = self.table.shape
        parts = [
            (
                np.arange(a, b)[:, None] * (num_rows * num_blocks)
                + (row * num_blocks + np.arange(c, d))
            ).ravel()
            for a, b, row, c, d in self._changes
        ]
        indices = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return indices, self.table.ravel()[indices]

    def drop_changes(self) -> None:
        """The copy has them."""
        self._changes.clear()

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def held_pages(self, row: int) -> int:
        """Pages of a row, over all layers."""
        layers = np.diff((0, *self._ends))
        return int((self._blocks[row] * layers).sum())

    def check(self) -> None:
        """Verify that every page is free or counted by its owners. Raises: InvariantViolation."""
        held = self.table[self.table > 0]
        free = self._free[: self._num_free]
        rows = sum(self.held_pages(row) for row in range(self._blocks.shape[0]))
        uses = np.bincount(held, minlength=self.num_pages + 1)
        owned = np.concatenate([np.flatnonzero(uses + self._kept), free])
        if (
            rows != held.size
            or not np.array_equal(uses, self._uses)
            or not np.array_equal(np.sort(owned), np.arange(1, self.num_pages + 1))
        ):
            raise InvariantViolation(
                f"page table is inconsistent: {held.size} pages in it, {rows} on the books, "
                f"{self._num_free} free, {self.num_pages} in all"
            )
