"""KV of layers that a token skipped when it left early, for later tokens that run deeper.

A token that leaves after k layers has no K and V in the layers below. Nothing is done about it
until a token of the same sequence runs those layers and wants to attend to it; sequences that never
go deep cost no deep-layer KV at all. Then the missing positions are filled in at once, for all
sequences of the pass together:

- `linear`: linear maps, one per exit and layer, fitted on the model's own text, from the hidden
  state with which the token left to the K and V that the layer would have made; a few per cent of
  the layers' own work. Where a checkpoint has no map, `project`.
- `project`: each skipped layer's own norm, K and V projections of that hidden state; the same work.
- `copy`: K and V of the deepest layer that was run.
- `alias`: the same numbers, read where they lie: no copy, no memory. (The compiled kernels read
  through a byte per position; the eager decoder copies.)
- `replay`: the layers themselves, run on the hidden states: exact, and the whole work.

Source: mechanisms of DREX and of LayerSkip-like systems differ here and the DREX text names only
"a linear projection"; see EXPERIMENTS.md for what each costs and does to the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quadriga.engine.kv_cache import KV_BLOCK, KVCache
from quadriga.engine.models.decoder import AnyDecoder
from quadriga.engine.models.layers import Span
from quadriga.engine.row_states import RowStates
from quadriga.errors import ConfigError
from quadriga.exits import MAX_LAYERS, SkippedKV

_COMPLETE = MAX_LAYERS + 1  # depth byte of a position whose every layer was computed

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SuspendedSkips:
    """One row of a `SkippedKVStore`, elsewhere."""

    filled: Ints
    base: int
    depths: npt.NDArray[np.uint8]
    states: torch.Tensor | None


class SkippedKVStore:
    """What early tokens left behind, per KV row.

    Segment s is the layers between exits s − 1 and s. A pass through a segment first fills in all
    that its rows miss there, so what a row has of a segment is a prefix: one number per (row,
    segment). A hidden state is kept until the last segment has had it.

    Args:
        ends: Layers run at the end of each segment, ascending, the loaded depth last.

    Raises:
        ConfigError: The model is too deep.
    """

    def __init__(
        self, mode: SkippedKV, ends: Sequence[int], cache: KVCache, states: RowStates
    ) -> None:
        if ends[-1] > MAX_LAYERS:
            raise ConfigError(
                f"exits: {ends[-1]} layers are too many for early exits, the most are "
                f"{MAX_LAYERS}; set exits.layers to 'none' or load less depth",
                param="exits.layers",
            )
        self.mode = mode
        self.num_filled = 0
        self.copied_bytes = 0
        self._ends = tuple(ends)
        self._cache = cache
        self._filled = np.zeros((cache.num_rows, len(ends)), dtype=np.int64)
        self._base = np.zeros(cache.num_rows, dtype=np.int64)  # position of a row's state 0
        self._states = states
        num_positions = -(-cache.capacity // KV_BLOCK) * KV_BLOCK
        self.depths = torch.full((cache.num_rows, num_positions), _COMPLETE, dtype=torch.uint8)
        self._depths = self.depths.numpy()

    def start(self, row: int, num_tokens: int) -> None:
        """A sequence takes the row; its first `num_tokens` positions have KV in every layer."""
        self._filled[row] = num_tokens
        self._base[row] = num_tokens
        self._depths[row] = _COMPLETE

    def release(self, row: int) -> None:
        """Forget what the row's sequence left behind."""
        self.start(row, 0)
        if self.mode not in ("alias", "copy"):
            self._states.release(row)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Forget afterwards what passes inside have filled in."""
        filled, base, counts = self._filled.copy(), self._base.copy(), self.num_filled
        states = self._states.snapshot() if self.mode == "replay" else None
        yield
        self._filled, self._base, self.num_filled = filled, base, counts
        if states is not None:
            self._states.reset(states)

    def computed(self, row: int, num_tokens: int) -> Ints:
        """Per segment, how many of a row's first `num_tokens` positions have KV there."""
        counts: Ints = np.minimum(self._filled[row], num_tokens)
        counts[0] = num_tokens
        return counts

    def suspend(self, row: int, num_tokens: int) -> SuspendedSkips:
        """Copy what a row's first `num_tokens` positions left behind."""
        states = None
        if self.mode not in ("alias", "copy"):
            # Of positions that left early alone: behind them nothing was kept.
            early = np.flatnonzero(self._depths[row, :num_tokens] != _COMPLETE)
            newest = int(early[-1]) + 1 if early.size else 0
            slots = np.arange(max(0, newest - int(self._base[row])), dtype=np.int64)
            states = self._states.take(np.full_like(slots, row), slots).cpu()
        return SuspendedSkips(
            self._filled[row].copy(),
            int(self._base[row]),
            self._depths[row, :num_tokens].copy(),
            states,
        )

    def restore(self, row: int, suspended: SuspendedSkips) -> None:
        """Put a copy into a row that was just started."""
        self._filled[row] = suspended.filled
        self._base[row] = suspended.base
        self._depths[row, : len(suspended.depths)] = suspended.depths
        if suspended.states is not None:
            slots = np.arange(len(suspended.states), dtype=np.int64)
            self._states.put(np.full_like(slots, row), slots, suspended.states)

    def leave(self, rows: Ints, positions: Ints, segment: int, states: torch.Tensor) -> None:
        """Keep what tokens at (rows, positions) leave behind at the end of a non-final segment.

        Args:
            states: [n, hidden], as they came out of the segment.
        """
        self._depths[rows, positions] = self._ends[segment]
        if self.mode in ("alias", "copy"):
            return
        self._states.put(rows, positions - self._base[rows], states)
        self.copied_bytes += states.numel() * states.element_size()

    def enter(
        self, decoder: AnyDecoder, rows: Ints, positions: Ints, first: int, stop: int
    ) -> None:
        """Fill in what the tokens at (rows, positions) will attend to in segments [first, stop).

        Call it before their pass; the pass itself computes the positions given.
        """
        if stop <= 1:
            return
        first = max(1, first)
        filled = self._filled[rows, first:stop]
        missing = np.maximum(positions[:, None] - filled, 0)  # a pass may be run again
        if (filled == filled[:, :1]).all():  # all segments lack the same: one go for all of them
            self._fill(decoder, first, stop, rows, filled[:, 0], missing[:, 0])
        else:
            for i in range(stop - first):
                at = first + i
                self._fill(decoder, at, at + 1, rows, filled[:, i], missing[:, i])
        self._filled[rows, first:stop] = positions[:, None] + 1
        if stop == len(self._ends):
            self._base[rows] = positions + 1

    def kept_bytes(self) -> int:
        """Bytes of hidden states that a deeper pass may still want."""
        if self.mode in ("alias", "copy") or len(self._ends) == 1:
            return 0
        pending = int((self._newest - self._base).clip(min=0).sum())
        return pending * self._states.state_bytes

    @property
    def _newest(self) -> Ints:
        """Per row, one past the newest position that left early."""
        early = self._depths != _COMPLETE
        last: Ints = early.shape[1] - early[:, ::-1].argmax(axis=1)
        return np.where(early.any(axis=1), last, 0)

    def _fill(
        self, decoder: AnyDecoder, begin: int, end: int, rows: Ints, starts: Ints, counts: Ints
    ) -> None:
        """Give segments [begin, end) their KV at positions [starts, starts + counts)."""
        some = np.flatnonzero(counts)
        if not some.size or (self.mode == "alias" and decoder.reads_depths):
            return
        if some.size < rows.size:
            rows, starts, counts = rows[some], starts[some], counts[some]
        first, stop = self._ends[begin - 1], self._ends[end - 1]
        self.num_filled += int(counts.sum()) * (end - begin)
        at_rows, at_positions = _spread(rows, starts, counts)
        if self.mode in ("alias", "copy"):
            self._copy(at_rows, at_positions, first, stop)
            return
        if self.mode == "project":
            self._project(decoder, at_rows, at_positions, first, stop, self._ends[0])
            return
        if self.mode == "linear":
            depths = self._depths[at_rows, at_positions]
            for depth in self._ends[:begin]:
                of = np.flatnonzero(depths == depth)
                if of.size:
                    self._project(decoder, at_rows[of], at_positions[of], first, stop, depth)
            return
        slots = at_positions - self._base[at_rows]
        states = self._states.take(at_rows, slots)
        ends = np.cumsum(counts)
        spans = [
            Span(row, end - count, end, start)
            for row, start, count, end in zip(
                rows.tolist(), starts.tolist(), counts.tolist(), ends.tolist(), strict=True
            )
        ]
        states = decoder.run_layers(states, decoder.plan(spans), first, stop)
        self._states.put(at_rows, slots, states)

    def _project(
        self, decoder: AnyDecoder, rows: Ints, positions: Ints, first: int, stop: int, depth: int
    ) -> None:
        """Make K and V of layers [first, stop) of what the tokens left behind at an exit."""
        states = self._states.take(rows, positions - self._base[rows])
        decoder.project_kv(states, decoder.plan_tokens(rows, positions), first, stop, depth)

    def _copy(self, rows: Ints, positions: Ints, first: int, stop: int) -> None:
        """Copy K and V of the deepest layer that was run into layers [first, stop)."""
        depths = self._depths[rows, positions]
        for depth in np.unique(depths).tolist():
            chosen = depths == depth
            self._cache.copy_layers(rows[chosen], positions[chosen], depth - 1, first, stop)


def _spread(rows: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Runs [start, start + count) of rows → row and position of every token in them."""
    before = np.cumsum(counts) - counts
    positions = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - before, counts)
    return np.repeat(rows, counts), positions
