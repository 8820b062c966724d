"""Which positions of which rows have KV in which segments: numbers, no tensors.

A token that left early has none in the layers that it skipped; see `skipped_kv`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quadriga.checkpoint.exits import MAX_LAYERS
from quadriga.errors import ConfigError

COMPLETE = MAX_LAYERS + 1
"""Depth byte of a position whose every layer was computed."""

Ints = npt.NDArray[np.int64]


class SkippedKVIndex:
    """What every row has and lacks.

    Segment s is the layers between exits s − 1 and s. A pass through a segment first fills in all
    that its rows miss there, so what a row has of a segment is a prefix: one number per (row,
    segment).

    Args:
        ends: Layers run at the end of each segment, ascending, the loaded depth last.
        keeps_states: Whether fills are made of hidden states: then a row can lack positions of
            which none was left, and owes them.

    Attributes:
        may_owe: Some row may owe positions; see `owed`.

    Raises:
        ConfigError: The model is too deep.
    """

    def __init__(
        self, ends: Sequence[int], num_rows: int, num_positions: int, *, keeps_states: bool
    ) -> None:
        if ends[-1] > MAX_LAYERS:
            raise ConfigError(
                f"exits: {ends[-1]} layers are too many for early exits, the most are "
                f"{MAX_LAYERS}; set exits.layers to 'none' or load less depth",
                param="exits.layers",
            )
        self.keeps_states = keeps_states
        self.may_owe = False
        self._ends = tuple(ends)
        self._filled = np.zeros((num_rows, len(ends)), dtype=np.int64)
        self._base = np.zeros(num_rows, dtype=np.int64)  # position of a row's state 0
        self._depths = np.full((num_rows, num_positions), COMPLETE, dtype=np.uint8)

    @property
    def ends(self) -> tuple[int, ...]:
        return self._ends

    def start(self, row: int, num_tokens: int, depth: int | None = None) -> None:
        """A sequence takes the row; its first `num_tokens` positions have KV.

        Args:
            depth: In this many layers, an exit; None: in every layer there is.
        """
        self._filled[row] = num_tokens
        self._base[row] = num_tokens
        self._depths[row] = COMPLETE
        if depth is not None and depth < self._ends[-1]:
            self._filled[row, np.array(self._ends) > depth] = 0
            self._depths[row, :num_tokens] = depth
            self.may_owe = self.keeps_states

    def owed(self, row: int) -> tuple[int, int]:
        """Positions [start, stop) that lack KV and left nothing to make it of."""
        base = int(self._base[row])
        return (int(self._filled[row, -1]), base) if self._owes(row) else (base, base)

    def depth_of(self, row: int) -> int:
        """Layers that a pass over the row may run before what it owes is paid."""
        if not self._owes(row):
            return self._ends[-1]
        paid = np.flatnonzero(self._filled[row, 1:] >= self._base[row])
        return self._ends[int(paid[-1]) + 1 if paid.size else 0]

    @property
    def is_owed(self) -> bool:
        """Whether some row owes positions."""
        return bool(self.keeps_states and (self._filled[:, -1] < self._base).any())

    def _owes(self, row: int) -> bool:
        deepest = len(self._ends) - 1
        return bool(deepest and self.keeps_states and self._filled[row, -1] < self._base[row])

    def paid(self, row: int, start: int, stop: int, depths: Ints | None) -> None:
        """The row's positions up to `stop` have KV everywhere.

        Args:
            depths: Layers run at [start, stop); None: all.
        """
        self._filled[row, 1:] = np.maximum(self._filled[row, 1:], stop)
        self._depths[row, start:stop] = COMPLETE
        if depths is not None:
            early = np.flatnonzero(depths < self._ends[-1])
            self._depths[row, start + early] = depths[early]

    def computed(self, row: int, num_tokens: int) -> Ints:
        """Per segment, how many of a row's first `num_tokens` positions have KV there."""
        counts: Ints = np.minimum(self._filled[row], num_tokens)
        counts[0] = num_tokens
        return counts

    def stretches(
        self, rows: Ints, positions: Ints, first: int, stop: int
    ) -> list[tuple[int, int]]:
        """Ranges of segments in [first, stop) in which the rows lack the same positions.

        To be entered and run one after the other; the first segment of all lacks nothing.

        Args:
            positions: Of the tokens whose pass it is.
        """
        inner = max(1, first)
        if stop <= inner:
            return [(first, stop)]
        filled = self._filled[rows, inner:stop]
        if not first and (filled >= positions[:, None]).all():
            return [(0, stop)]
        if stop - inner > 1 and (filled != filled[:, :1]).any():
            ranges = [(s, s + 1) for s in range(inner, stop)]
        else:
            ranges = [(inner, stop)]
        return ranges if first else [(0, 1), *ranges]

    def _newest_of(self, row: int, num_tokens: int | None = None) -> int:
        """One past the newest of a row's first positions that left early; 0 where none did."""
        early = np.flatnonzero(self._depths[row, :num_tokens] != COMPLETE)
        return int(early[-1]) + 1 if early.size else 0

    @property
    def _newest(self) -> Ints:
        """Per row, one past the newest position that left early."""
        early = self._depths != COMPLETE
        last: Ints = early.shape[1] - early[:, ::-1].argmax(axis=1)
        return np.where(early.any(axis=1), last, 0)

    def _deepen(self, row: int, before: tuple[int, ...], length: int) -> None:
        """Positions that were complete are complete no longer."""
        depths = self._depths[row, :length]
        depths[depths == COMPLETE] = before[-1]
        self.may_owe = self.keeps_states

    def _flatten(self, row: int, depth: int) -> None:
        """Positions that were run deeper than `depth` are complete there."""
        depths = self._depths[row]
        depths[(depths > depth) & (depths <= MAX_LAYERS)] = COMPLETE
