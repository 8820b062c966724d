"""KV cache on CPUs: every sequence owns a row, every layer owns its buffers.

        keys[layer]    [num_rows, num_blocks, num_kv_heads, KV_BLOCK, head_dim]
        values[layer]  [num_rows, num_blocks, num_kv_heads, KV_BLOCK, head_dim]

Position p of a row is slot p % KV_BLOCK of its block p // KV_BLOCK. So a row grows from its start,
and memory is committed by the first write to a page: a short sequence in a long row costs what it
uses. And attention, head after head and block after block, reads one linear stream. Layers have
buffers of their own because a step that mutates one large [layers, …] tensor through views makes
compilers copy all of it.

Rows never move: a batch names the rows it works on, in any order.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quadriga.config.engine_spec import DTYPE_BYTES, EngineSpec
from quadriga.engine.memory import give_back, reserve
from quadriga.errors import InvariantViolation

Ints = npt.NDArray[np.int64]
KV_BLOCK = 16
"""Positions in a block; `kBlock` of the kernels."""
SHARE_TOKENS = 4 * KV_BLOCK
"""Positions that rows share at once: fewer would not be worth a copy in every layer."""


class KVCache(Protocol):
    """What the runner asks of a KV cache, on any device.

    `read` and `write` may be called from other threads for rows that no pass is working on.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Most tokens of one row."""

    def read(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """Copy of positions [start, stop): [num_layers, 2, num_kv_heads, stop - start, head_dim].

        Contiguous; index 0 of the second dimension is K, 1 is V.
        """

    def write(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """Store what `read` returned, from position `start` on."""

    def copy_layers(self, rows: Ints, positions: Ints, source: int, first: int, stop: int) -> None:
        """Copy K and V at (rows, positions) from layer `source` into layers [first, stop)."""

    def release(self, row: int) -> None:
        """The row's content is garbage from now on; its memory may be given back."""

    @property
    def share_tokens(self) -> int:
        """Positions of a block that rows may share."""

    def keep(self, row: int, start: int, over: object | None = None) -> object:
        """Keep the block of a row that begins at `start`, in all layers, beyond the row's life.

        Args:
            over: A kept block that is let go for it.
        """

    def blank(self) -> object | None:
        """Memory for a block to keep, touched; None where keeping takes none."""

    def share(self, row: int, start: int, kept: object) -> None:
        """Let a row have a kept block from position `start` on; it has all before it."""

    def forget(self, kept: object) -> None:
        """Let a kept block go; rows that have it keep it."""


class RowKVCache:
    """The CPU form: dense rows, committed lazily.

    Which layers there are never changes: `at_depth` makes another cache over the same buffers, so
    that other threads which copy rows meanwhile hold on to a whole one.

    Args:
        num_rows: Sequences held at once.
        capacity: Most tokens of one sequence.
        budget_tokens: Tokens whose pages may stay committed, of rows and of kept blocks. Where all
            rows and as many kept blocks have more, a row that is released gives its pages back.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        budget_tokens: int,
    ) -> None:
        self.capacity = capacity
        num_blocks = -(-capacity // KV_BLOCK)
        self._shape = (num_rows, num_blocks, num_kv_heads, KV_BLOCK, head_dim)
        self._row_bytes = num_blocks * num_kv_heads * KV_BLOCK * head_dim * dtype.itemsize
        self._is_overcommitted = budget_tokens < 2 * num_rows * capacity
        self._dtype = dtype
        # Of each layer: keys, then values.
        self._maps: list[tuple[mmap.mmap, mmap.mmap]] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._add_layers(num_layers)

    def at_depth(self, num_layers: int, budget_tokens: int) -> RowKVCache:
        """The cache of the first `num_layers` layers, on the same buffers as far as they go.

        Layers that are new are empty. The memory of layers that are left out goes back to the
        system with the last cache, decoder or copy under way that names them.

        Args:
            budget_tokens: Of so many layers.
        """
        other = copy.copy(self)
        other._is_overcommitted = budget_tokens < 2 * self.num_rows * self.capacity
        other._maps = self._maps[:num_layers]
        other.keys, other.values = self.keys[:num_layers], self.values[:num_layers]
        other._add_layers(num_layers - len(other.keys))
        return other

    def buffers(self, first_layer: int) -> Sequence[object]:
        """All that holds the memory of layers from `first_layer` on, one entry a layer."""
        return [*zip(self._maps, self.keys, self.values, strict=True)][first_layer:]

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def num_rows(self) -> int:
        return self._shape[0]

    @property
    def num_blocks(self) -> int:
        return self._shape[1]

    def read(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """See `KVCache.read`. Raises: InvariantViolation when out of range."""
        check_range(self, row, first_layer, num_layers, start, stop)
        _, _, heads, _, head_dim = self._shape
        kv = torch.empty((num_layers, 2, heads, stop - start, head_dim), dtype=self.keys[0].dtype)
        for ours, theirs in self._pieces(row, first_layer, kv, start):
            theirs.copy_(ours)
        return kv

    def write(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """See `KVCache.write`. Raises: InvariantViolation when out of range or misshapen."""
        _, _, heads, _, head_dim = self._shape
        check_shape(kv, heads, head_dim)
        check_range(self, row, first_layer, kv.shape[0], start, start + kv.shape[3])
        for ours, theirs in self._pieces(row, first_layer, kv, start):
            ours.copy_(theirs)

    def _pieces(
        self, row: int, first_layer: int, kv: torch.Tensor, start: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views on the same positions of the row and of `kv`: [heads, blocks, slots, head_dim]."""
        spans = list(_spans(start, start + kv.shape[3]))
        for i, layer_kv in enumerate(kv):
            for buffer, side_kv in zip(
                (self.keys[first_layer + i], self.values[first_layer + i]), layer_kv, strict=True
            ):
                for blocks, slots, tokens in spans:
                    ours = buffer[row, blocks, :, slots].transpose(0, 1)
                    yield ours, side_kv[:, tokens].unflatten(1, (ours.shape[1], ours.shape[2]))

    def copy_layers(self, rows: Ints, positions: Ints, source: int, first: int, stop: int) -> None:
        """See `KVCache.copy_layers`."""
        at = torch.from_numpy(rows)
        block, slot = (
            torch.from_numpy(positions // KV_BLOCK),
            torch.from_numpy(positions % KV_BLOCK),
        )
        for buffers in (self.keys, self.values):
            copied = buffers[source][at, block, :, slot]
            for layer in range(first, stop):
                buffers[layer][at, block, :, slot] = copied

    def release(self, row: int) -> None:
        """See `KVCache.release`; keeps the pages for the next sequence if all fits anyway."""
        if not self._is_overcommitted:
            return
        for maps, layer in zip(self._maps, zip(self.keys, self.values, strict=True), strict=True):
            for buffer, rows in zip(maps, layer, strict=True):
                first = int(rows[row].storage_offset()) * self._dtype.itemsize  # aligned, if huge
                give_back(buffer, first, first + self._row_bytes)

    @property
    def share_tokens(self) -> int:
        """See `KVCache.share_tokens`."""
        return SHARE_TOKENS

    def keep(self, row: int, start: int, over: object | None = None) -> npt.NDArray[np.uint8]:
        """See `KVCache.keep`: a copy, as rows are dense; [layers · 2, bytes of a block].

        The first touch of new memory costs four times what the copy does.
        """
        kept: npt.NDArray[np.uint8]
        if isinstance(over, np.ndarray) and over.shape == self._kept_shape:
            kept = over
        else:
            kept = np.empty(self._kept_shape, dtype=np.uint8)
        for ours, theirs in zip(self._block_bytes(row, start), kept, strict=True):
            theirs[:] = ours
        return kept

    def blank(self) -> npt.NDArray[np.uint8]:
        """See `KVCache.blank`."""
        return np.full(self._kept_shape, 0, dtype=np.uint8)  # `zeros` would touch nothing

    @property
    def _kept_shape(self) -> tuple[int, int]:
        return 2 * self.num_layers, self._share_bytes

    def share(self, row: int, start: int, kept: object) -> None:
        """See `KVCache.share`."""
        assert isinstance(kept, np.ndarray)
        for ours, theirs in zip(self._block_bytes(row, start), kept, strict=True):
            ours[:] = theirs

    @property
    def _share_bytes(self) -> int:
        return self._row_bytes // self.num_blocks * (SHARE_TOKENS // KV_BLOCK)

    def _block_bytes(self, row: int, start: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Where a row's block that begins at `start` lies: of each layer keys, then values."""
        check_range(self, row, 0, self.num_layers, start, start + SHARE_TOKENS)
        begin = row * self._row_bytes + start // SHARE_TOKENS * self._share_bytes
        stop = begin + self._share_bytes
        for layer in zip(self.keys, self.values, strict=True):
            for buffer in layer:
                yield buffer.view(-1).view(torch.uint8).numpy()[begin:stop]

    def forget(self, kept: object) -> None:
        """See `KVCache.forget`: it goes with its last name."""

    def _add_layers(self, count: int) -> None:
        for _ in range(count):
            (key_map, keys), (value_map, values) = self._reserve(), self._reserve()
            self._maps.append((key_map, value_map))
            self.keys.append(keys)
            self.values.append(values)

    def _reserve(self) -> tuple[mmap.mmap, torch.Tensor]:
        """Zeroed address space: a masked position must hold a number, not the heap's leavings.

        Huge pages only where all rows may be committed at once: they would commit far more than
        short sequences use.
        """
        num_bytes = self._shape[0] * self._row_bytes
        buffer, memory = reserve(num_bytes, huge=not self._is_overcommitted)
        return buffer, memory.view(self._dtype).view(self._shape)


def budget_tokens(spec: EngineSpec) -> int:
    """Tokens of KV, of rows and of kept blocks, that memory holds at a spec's depth."""
    if spec.kv_memory_bytes is None:
        return 2 * spec.kv_capacity_tokens
    token_bytes = spec.checkpoint.kv_bytes_per_token(spec.depth, DTYPE_BYTES[spec.dtype])
    return spec.kv_memory_bytes // token_bytes


def check_range(
    cache: KVCache, row: int, first_layer: int, num_layers: int, start: int, stop: int
) -> None:
    """Raises: InvariantViolation: Not all of it lies in the cache."""
    if not (
        0 <= row < cache.num_rows
        and 0 <= first_layer <= first_layer + num_layers <= cache.num_layers
        and 0 <= start <= stop <= cache.capacity
    ):
        raise InvariantViolation(
            f"row {row}, layers {first_layer}+{num_layers}, positions {start}..{stop} are "
            f"outside {cache.num_rows} rows, {cache.num_layers} layers, {cache.capacity} positions"
        )


def check_shape(kv: torch.Tensor, num_kv_heads: int, head_dim: int) -> None:
    """Raises: InvariantViolation: It is nothing that `KVCache.read` returns."""
    fits = kv.dim() == 5 and kv.shape[1:3] == (2, num_kv_heads) and kv.shape[4] == head_dim
    if not fits:
        raise InvariantViolation(
            f"KV of shape {tuple(kv.shape)} does not fit [layers, 2, {num_kv_heads}, n, {head_dim}]"
        )


def _spans(start: int, stop: int) -> Iterator[tuple[slice, slice, slice]]:
    """Split positions [start, stop) into runs of like blocks: at most three.

    Yields:
        Blocks, slots in each of them, offsets from `start`.
    """
    at = start
    while at < stop:
        block, slot = divmod(at, KV_BLOCK)
        num_whole = (stop - at) // KV_BLOCK if slot == 0 else 0
        if num_whole:
            end = at + num_whole * KV_BLOCK
            blocks, slots = slice(block, block + num_whole), slice(0, KV_BLOCK)
        else:
            end = min(stop, (block + 1) * KV_BLOCK)
            blocks, slots = slice(block, block + 1), slice(slot, slot + end - at)
        yield blocks, slots, slice(at - start, end - start)
        at = end
