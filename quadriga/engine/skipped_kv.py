"""KV of layers that a token skipped when it left early, for later tokens that run deeper.

A token that leaves after k layers has no K and V in the layers below. Nothing is done about it
until a token of the same sequence runs those layers and wants to attend to it; sequences that never
go deep cost no deep-layer KV at all. Then the missing positions are filled in at once, for all
sequences of the pass together:

- `project`: each skipped layer's norm, K and V projections and rotation of the hidden state with
  which the token left; a few per cent of the layers' own work.
- `copy`: K and V of the deepest layer that was run.
- `alias`: the same numbers, read where they lie: no copy, no memory. (The compiled kernels read
  through a byte per position; the eager decoder copies.)
- `replay`: the layers themselves, run on the hidden states: exact, and the whole work.

Source: mechanisms of DREX and of LayerSkip-like systems differ here and the DREX text names only
"a linear projection"; see EXPERIMENTS.md for what each costs and does to the answers.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quadriga.engine.kv_cache import KV_BLOCK, RowKVCache
from quadriga.engine.memory import reserve
from quadriga.engine.models.decoder import AnyDecoder
from quadriga.engine.models.layers import Span
from quadriga.exits import SkippedKV

_COMPLETE = 255  # depth byte of a position whose every layer was computed
MAX_LAYERS = _COMPLETE - 1

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SuspendedSkips:
    """One row of a `SkippedKVStore`, elsewhere."""

    filled: Ints
    base: int
    depths: npt.NDArray[np.uint8]
    states: torch.Tensor


class SkippedKVStore:
    """What early tokens left behind, per KV row.

    Segment s is the layers between exits s − 1 and s. A pass through a segment first fills in all
    that its rows miss there, so what a row has of a segment is a prefix: one number per (row,
    segment). A hidden state is kept until the last segment has had it.

    Args:
        ends: Layers run at the end of each segment, ascending, the loaded depth last.
    """

    def __init__(
        self, mode: SkippedKV, ends: Sequence[int], cache: RowKVCache, hidden_size: int
    ) -> None:
        self.mode = mode
        self.num_filled = 0
        self.copied_bytes = 0
        self._ends = tuple(ends)
        self._cache = cache
        self._filled = np.zeros((cache.num_rows, len(ends)), dtype=np.int64)
        self._base = np.zeros(cache.num_rows, dtype=np.int64)  # position of a row's state 0
        self._row_bytes = cache.capacity * hidden_size * cache.keys[0].dtype.itemsize
        self._map, memory = reserve(cache.num_rows * self._row_bytes, huge=False)
        self._states = memory.view(cache.keys[0].dtype).view(cache.num_rows, -1, hidden_size)
        self.depths = torch.full(
            (cache.num_rows, cache.num_blocks * KV_BLOCK), _COMPLETE, dtype=torch.uint8
        )
        self._depths = self.depths.numpy()

    def start(self, row: int, num_tokens: int) -> None:
        """A sequence takes the row; its first `num_tokens` positions have KV in every layer."""
        self._filled[row] = num_tokens
        self._base[row] = num_tokens
        self._depths[row] = _COMPLETE

    def release(self, row: int) -> None:
        """Forget what the row's sequence left behind."""
        self.start(row, 0)
        begin = -(-row * self._row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (row + 1) * self._row_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and self.mode not in ("alias", "copy"):
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Forget afterwards what passes inside have filled in."""
        filled, base, counts = self._filled.copy(), self._base.copy(), self.num_filled
        states = self._states.clone() if self.mode == "replay" else None
        yield
        self._filled, self._base, self.num_filled = filled, base, counts
        if states is not None:
            self._states.copy_(states)

    def computed(self, row: int, num_tokens: int) -> Ints:
        """Per segment, how many of a row's first `num_tokens` positions have KV there."""
        counts: Ints = np.minimum(self._filled[row], num_tokens)
        counts[0] = num_tokens
        return counts

    def suspend(self, row: int, num_tokens: int) -> SuspendedSkips:
        """Copy what a row's first `num_tokens` positions left behind."""
        kept = max(0, num_tokens - int(self._base[row]))
        return SuspendedSkips(
            self._filled[row].copy(),
            int(self._base[row]),
            self._depths[row, :num_tokens].copy(),
            self._states[row, : 0 if self.mode in ("alias", "copy") else kept].clone(),
        )

    def restore(self, row: int, suspended: SuspendedSkips) -> None:
        """Put a copy into a row that was just started."""
        self._filled[row] = suspended.filled
        self._base[row] = suspended.base
        self._depths[row, : len(suspended.depths)] = suspended.depths
        self._states[row, : len(suspended.states)] = suspended.states

    def leave(self, rows: Ints, positions: Ints, segment: int, states: torch.Tensor) -> None:
        """Keep what tokens at (rows, positions) leave behind at the end of a non-final segment.

        Args:
            states: [n, hidden], as they came out of the segment.
        """
        self._depths[rows, positions] = self._ends[segment]
        if self.mode in ("alias", "copy"):
            return
        slots = positions - self._base[rows]
        self._states[torch.from_numpy(rows), torch.from_numpy(slots)] = states
        self.copied_bytes += states.numel() * states.element_size()

    def enter(
        self, decoder: AnyDecoder, rows: Ints, positions: Ints, first: int, stop: int
    ) -> None:
        """Fill in what the tokens at (rows, positions) will attend to in segments [first, stop).

        Call it before their pass; the pass itself computes the positions given.
        """
        if stop <= 1:
            return
        for segment in range(max(1, first), stop):
            starts = self._filled[rows, segment]
            counts = np.maximum(positions - starts, 0)  # a pass may be run again
            if counts.any():
                self._fill(decoder, segment, rows, starts, counts)
        self._filled[rows, max(1, first) : stop] = positions[:, None] + 1
        if stop == len(self._ends):
            self._base[rows] = positions + 1

    def kept_bytes(self) -> int:
        """Bytes of hidden states that a deeper pass may still want."""
        if self.mode in ("alias", "copy") or len(self._ends) == 1:
            return 0
        pending = int((self._newest - self._base).clip(min=0).sum())
        return pending * self._states.shape[-1] * self._states.element_size()

    @property
    def _newest(self) -> Ints:
        """Per row, one past the newest position that left early."""
        early = self._depths != _COMPLETE
        last: Ints = early.shape[1] - early[:, ::-1].argmax(axis=1)
        return np.where(early.any(axis=1), last, 0)

    def _fill(
        self, decoder: AnyDecoder, segment: int, rows: Ints, starts: Ints, counts: Ints
    ) -> None:
        """Give segment `segment` its KV at positions [starts, starts + counts) of the rows."""
        some = counts > 0
        rows, starts, counts = rows[some], starts[some], counts[some]
        first, stop = self._ends[segment - 1], self._ends[segment]
        if self.mode == "alias" and decoder.reads_depths:
            return
        self.num_filled += int(counts.sum())
        at_rows, at_positions = _spread(rows, starts, counts)
        if self.mode in ("alias", "copy"):
            self._copy(at_rows, at_positions, first, stop)
            return
        index = torch.from_numpy(at_rows), torch.from_numpy(at_positions - self._base[at_rows])
        states = self._states[index]
        if self.mode == "project":
            batch = decoder.plan_tokens(at_rows, at_positions)
            decoder.project_kv(states, batch, first, stop)
            return
        ends = np.cumsum(counts)
        spans = [
            Span(row, end - count, end, start)
            for row, start, count, end in zip(
                rows.tolist(), starts.tolist(), counts.tolist(), ends.tolist(), strict=True
            )
        ]
        self._states[index] = decoder.run_layers(states, decoder.plan(spans), first, stop)

    def _copy(self, rows: Ints, positions: Ints, first: int, stop: int) -> None:
        """Copy K and V of the deepest layer that was run into layers [first, stop)."""
        depths = self._depths[rows, positions]
        for depth in np.unique(depths).tolist():
            chosen = depths == depth
            row = torch.from_numpy(rows[chosen])
            block = torch.from_numpy(positions[chosen] // KV_BLOCK)
            slot = torch.from_numpy(positions[chosen] % KV_BLOCK)
            for buffers in (self._cache.keys, self._cache.values):
                source = buffers[depth - 1][row, block, :, slot]
                for layer in range(first, stop):
                    buffers[layer][row, block, :, slot] = source


def _spread(rows: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Runs [start, start + count) of rows → row and position of every token in them."""
    before = np.cumsum(counts) - counts
    positions = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - before, counts)
    return np.repeat(rows, counts), positions
