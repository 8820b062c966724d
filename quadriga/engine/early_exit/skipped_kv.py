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

With `linear` and `project` the newest few of the missing positions may be replayed all the same.
Replayed positions are *carried*: they are rows of the very pass whose token wants them, so that
where weights' bytes decide what a pass takes they cost next to nothing.

A replica may load deeper layers later. Then every token so far has skipped those: the same thing,
as far as hidden states were kept. Where none were (the prompt was computed elsewhere, or more
states than `keep_tokens` came together), the row *owes* its first positions: they are run again,
(`recorded_pass.repay`) before its first deep pass.

Source: mechanisms of DREX and of LayerSkip-like systems differ here and the DREX text names only
"a linear projection"; see docs/experiments/drex.md for what each costs and does to the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quadriga.checkpoint.exits import MAX_LAYERS, SkippedKV
from quadriga.engine.early_exit.row_states import RowStates
from quadriga.engine.kv_cache import KV_BLOCK, Ints, KVCache
from quadriga.engine.models.decoder import AnyDecoder
from quadriga.engine.suspended_row import HostTensor, SuspendedSkips
from quadriga.errors import ConfigError, InvariantViolation

COMPLETE = MAX_LAYERS + 1
"""Depth byte of a position whose every layer was computed."""


@dataclass(frozen=True, slots=True)
class Carried:
    """Skipped positions that go through layers beside the tokens that will look at them.

    Attributes:
        rows, positions: int64 [n].
        states: [n, hidden], as they were left before those layers.
    """

    rows: Ints
    positions: Ints
    states: torch.Tensor


class SkippedKVStore:
    """What every KV row has and lacks of each segment, and what early tokens left behind.

    Segment s is the layers between exits s − 1 and s. A pass through a segment first fills in all
    that its rows miss there, so what a row has of a segment is a prefix: one number per (row,
    segment). A hidden state is kept until the last segment has been run for its position.

    Args:
        ends: Layers run at the end of each segment, ascending, the loaded depth last.
        keep_tokens: Per row, hidden states behind the last segment to keep, for layers that may be
            loaded later; 0 where there are none.
        replay_newest: With `linear` and `project`, so many positions right before a token that goes
            deep are run through the layers instead: it attends to them most.

    Attributes:
        num_filled: Positions × segments filled in so far.
        depths: uint8 [rows, positions]: layers run there, or `COMPLETE`.
        keeps_states: Whether fills are made of hidden states: then a row can lack positions of
            which none was kept, and owes them.
        may_owe: Some row may owe positions; see `owed`.

    Raises:
        ConfigError: The model is too deep.
    """

    def __init__(
        self,
        mode: SkippedKV,
        ends: Sequence[int],
        cache: KVCache,
        states: RowStates,
        keep_tokens: int = 0,
        replay_newest: int = 0,
    ) -> None:
        if ends[-1] > MAX_LAYERS:
            raise ConfigError(
                f"exits: {ends[-1]} layers are too many for early exits, the most are "
                f"{MAX_LAYERS}; set exits.layers to 'none' or load less depth",
                param="exits.layers",
            )
        self.mode = mode
        self.keeps_states = mode not in ("alias", "copy")
        self.may_owe = False
        self.num_filled = 0
        self.copied_bytes = 0
        self._keep_tokens = keep_tokens
        self._replay_newest = replay_newest if mode in ("linear", "project") else 0
        self._cache = cache
        self._states = states
        self.ends = tuple(ends)
        self._filled = np.zeros((cache.num_rows, len(ends)), dtype=np.int64)
        self._base = np.zeros(cache.num_rows, dtype=np.int64)  # position of a row's state 0
        num_positions = -(-cache.capacity // KV_BLOCK) * KV_BLOCK
        self._depths = np.full((cache.num_rows, num_positions), COMPLETE, dtype=np.uint8)
        self.depths = torch.from_numpy(self._depths)

    @property
    def keeps_last(self) -> bool:
        """Whether tokens that leave the last segment leave their states behind as well."""
        return self._keep_tokens > 0 and self.keeps_states

    def resize(
        self, ends: Sequence[int], cache: KVCache, keep_tokens: int, lengths: dict[int, int]
    ) -> None:
        """Follow the loaded depth: the segments of a shallower one begin those of a deeper one.

        Args:
            lengths: Row with a sequence → its positions that were run.
        """
        before, self.ends = self.ends, tuple(ends)
        self._cache, self._keep_tokens = cache, keep_tokens
        count = len(self.ends)
        if count <= len(before):
            for row, length in lengths.items():
                self._cut(row, before, length)
            self._filled = np.ascontiguousarray(self._filled[:, :count])
            return
        more = np.zeros((len(self._filled), count - len(before)), dtype=np.int64)
        self._filled = np.concatenate([self._filled, more], axis=1)
        for row, length in lengths.items():
            self._deepen(row, before, length)

    def _cut(self, row: int, before: tuple[int, ...], length: int) -> None:
        """Forget what a row's positions had in segments that are gone."""
        count = len(self.ends)
        if count < len(before) and self.keeps_states:
            # States of positions that were run deeper are of no use here.
            self._forget(row, min(length, int(self._filled[row, count])))
        self._flatten(row, self.ends[-1])

    def _forget(self, row: int, stop: int) -> None:
        """Give the states before position `stop` up; those behind move to the front."""
        if stop > self._base[row]:
            self._rebase(row, stop)

    def _rebase(self, row: int, base: int, front: torch.Tensor | None = None) -> None:
        """Have a row's states begin at another position.

        Args:
            front: Those of positions from there on, where they begin earlier.
        """
        before = int(self._base[row])
        kept = np.arange(max(base, before), self._newest_of(row), dtype=np.int64)
        states = self._states.take(np.full_like(kept, row), kept - before) if kept.size else None
        self._states.release(row)
        self._base[row] = base
        if states is not None:
            self._states.put(np.full_like(kept, row), kept - base, states)
        if front is not None:
            slots = np.arange(len(front), dtype=np.int64)
            self._states.put(np.full_like(slots, row), slots, front)

    def release(self, row: int) -> None:
        """Forget what the row's sequence left behind."""
        self.start(row, 0)
        if self.keeps_states:
            self._states.release(row)

    def suspend(self, row: int, num_tokens: int) -> SuspendedSkips:
        """Copy what a row's first `num_tokens` positions left behind."""
        states = None
        if self.keeps_states:
            # Of positions that left early alone: behind them nothing was kept.
            newest = self._newest_of(row, num_tokens)
            slots = np.arange(max(0, newest - int(self._base[row])), dtype=np.int64)
            states = HostTensor.of(self._states.take(np.full_like(slots, row), slots))
        return SuspendedSkips(
            self.ends,
            self._filled[row].copy(),
            int(self._base[row]),
            self._depths[row, :num_tokens].copy(),
            states,
        )

    def check_segments(self, suspended: SuspendedSkips, depth: int | None = None) -> int:
        """Return how many segments a copy has that there are here as well, the first ones.

        Args:
            depth: Layers whose KV is here; None for all.

        Raises: InvariantViolation: It comes from other segments.
        """
        theirs = suspended.ends
        came = [end for end in theirs if depth is None or end <= depth]
        common = min(len(came), len(self.ends))
        if not common or theirs[:common] != self.ends[:common]:
            raise InvariantViolation(
                f"a row of segments that end at {theirs} layers cannot go on in one of "
                f"{self.ends}, of which {depth or theirs[-1]} layers came"
            )
        return common

    def restore(
        self, row: int, suspended: SuspendedSkips, decoder: AnyDecoder, depth: int | None = None
    ) -> None:
        """Put a copy into a row that was just started and whose KV is there.

        It may come from another depth, where the segments begin alike.

        Args:
            depth: Layers whose KV is here, an exit; None for all that were there.

        Raises: InvariantViolation: It comes from other segments.
        """
        theirs, common = suspended.ends, self.check_segments(suspended, depth)
        self._filled[row] = 0
        self._filled[row, :common] = suspended.filled[:common]
        self._base[row] = suspended.base
        num_tokens = len(suspended.depths)
        self._depths[row, :num_tokens] = suspended.depths
        if self.mode == "alias" and not decoder.reads_depths:
            self._unalias(row)
        wants_states = len(self.ends) > 1 or self.keeps_last
        if not wants_states:  # no pass here would read them
            self._base[row] = max(suspended.base, num_tokens - 1)
        elif suspended.states is not None:
            slots = np.arange(suspended.states.shape[0], dtype=np.int64)
            states = suspended.states.tensor(self._states.device)
            self._states.put(np.full_like(slots, row), slots, states)
        if len(theirs) > common:
            if self.keeps_states and wants_states:
                self._forget(row, min(num_tokens - 1, int(suspended.filled[common])))
            self._flatten(row, self.ends[common - 1])
        if len(self.ends) > common:
            self._deepen(row, theirs[:common], num_tokens - 1)
        self.may_owe = self.may_owe or self._owes(row)

    def _unalias(self, row: int) -> None:
        """Copy what is aliased, for a decoder that reads each layer's own KV.

        Where the row comes from, kernels may have read it by the depth byte and copied nothing.
        """
        early = np.flatnonzero(self._depths[row] != COMPLETE)
        for segment in range(1, len(self.ends)):
            at = early[early < self._filled[row, segment]]
            at = at[self._depths[row, at] <= self.ends[segment - 1]]
            if at.size:
                first, stop = self.ends[segment - 1], self.ends[segment]
                self._copy(np.full_like(at, row), at, first, stop)

    def leave(self, rows: Ints, positions: Ints, segment: int, states: torch.Tensor) -> None:
        """Keep what tokens at (rows, positions) leave behind at the end of a segment.

        Of the last one only where `keeps_last`.

        Args:
            states: [n, hidden], as they came out of the segment.
        """
        self._depths[rows, positions] = self.ends[segment]
        if not self.keeps_states:
            return
        if segment == len(self.ends) - 1:
            over = positions - self._base[rows] >= self._keep_tokens
            for row, position in zip(rows[over].tolist(), positions[over].tolist(), strict=True):
                self._forget(row, position)
        self._states.put(rows, positions - self._base[rows], states)
        self.copied_bytes += states.numel() * states.element_size()

    def enter(
        self, decoder: AnyDecoder, rows: Ints, positions: Ints, first: int, stop: int
    ) -> Carried | None:
        """Fill in what the tokens at (rows, positions) will attend to in a stretch [first, stop).

        Call it before their pass; the pass itself computes the positions given.

        Returns:
            What the pass must compute as well, and `carried` take afterwards.
        """
        found = None
        inner = max(1, first)
        if stop > inner:
            starts = self._filled[rows, inner]
            counts = np.maximum(positions - starts, 0)  # a pass may be run again
            if counts.any():
                found = self._fill(decoder, inner, stop, rows, starts, counts)
            self._filled[rows, inner:stop] = positions[:, None] + 1
        if stop == len(self.ends) and not self.keeps_last:
            self._base[rows] = positions + 1
        return found

    def marks(self, rows: Ints) -> tuple[Ints, Ints]:
        """What is filled in of rows; for `take_back`."""
        return self._filled[rows], self._base[rows]

    def take_back(self, rows: Ints, marks: tuple[Ints, Ints]) -> None:
        """The pass that these rows entered since was not computed; it may be entered again."""
        self._filled[rows], self._base[rows] = marks

    def verified(self, rows: Ints, stops: Ints) -> None:
        """The rows' positions before `stops` went through all segments; those behind did not."""
        self._filled[rows, 1:] = stops[:, None]
        if not self.keeps_last:
            self._base[rows] = stops

    def carried(self, went: Carried, states: torch.Tensor, stop: int) -> None:
        """Positions went along up to segment `stop` and came out with these states, [n, hidden]."""
        if stop == len(self.ends) and not self.keeps_last:
            return  # nothing will ask for them again
        self._states.put(went.rows, went.positions - self._base[went.rows], states)
        if self.mode != "replay":
            self._depths[went.rows, went.positions] = self.ends[stop - 1]

    def num_kept(self, row: int) -> int:
        """Hidden states of the row that a deeper pass may still want."""
        if not self.keeps_states or (len(self.ends) == 1 and not self.keeps_last):
            return 0
        return max(0, self._newest_of(row) - int(self._base[row]))

    def _fill(
        self, decoder: AnyDecoder, begin: int, end: int, rows: Ints, starts: Ints, counts: Ints
    ) -> Carried | None:
        """Give segments [begin, end) their KV at positions [starts, starts + counts)."""
        if self.mode == "alias" and decoder.reads_depths:
            return None
        first, stop = self.ends[begin - 1], self.ends[end - 1]
        self.num_filled += int(counts.sum()) * (end - begin)
        if self.mode == "replay":
            return self._carry(rows, starts, counts)
        if not self._replay_newest:
            self._make_up(decoder, *_spread(rows, starts, counts), first, stop)
            return None
        newest = self._as_they_left(rows, starts + counts, counts, first)
        older = counts - newest
        if older.any():
            self._make_up(decoder, *_spread(rows, starts, older), first, stop)
        return self._carry(rows, starts + older, newest) if newest.any() else None

    def _carry(self, rows: Ints, starts: Ints, counts: Ints) -> Carried:
        at_rows, at_positions = _spread(rows, starts, counts)
        states = self._states.take(at_rows, at_positions - self._base[at_rows])
        return Carried(at_rows, at_positions, states)

    def _make_up(
        self, decoder: AnyDecoder, rows: Ints, positions: Ints, first: int, stop: int
    ) -> None:
        """Make K and V of layers [first, stop) out of what the tokens left behind."""
        if self.mode in ("alias", "copy"):
            self._copy(rows, positions, first, stop)
        elif self.mode == "project":
            self._project(decoder, rows, positions, first, stop, self.ends[0])
        else:
            for depth, of in _by_depth(self._depths[rows, positions]):
                self._project(decoder, rows[of], positions[of], first, stop, depth)

    def _as_they_left(self, rows: Ints, stops: Ints, counts: Ints, first: int) -> Ints:
        """Per row, how many of the positions right before `stops` can go on behind layer `first`.

        Their states are those of that layer; the states of others were left before it, and their KV
        in between was made up.
        """
        back = np.arange(1, self._replay_newest + 1)
        positions = np.maximum(stops[:, None] - back, 0)
        can = (back <= counts[:, None]) & (self._depths[rows[:, None], positions] == first)
        can &= positions >= self._base[rows, None]
        found: Ints = np.cumprod(can, axis=1).sum(axis=1)
        return found

    def _project(
        self, decoder: AnyDecoder, rows: Ints, positions: Ints, first: int, stop: int, depth: int
    ) -> None:
        """Make K and V of layers [first, stop) of what the tokens left behind at an exit."""
        states = self._states.take(rows, positions - self._base[rows])
        decoder.project_kv(states, decoder.plan_tokens(rows, positions), first, stop, depth)

    def _copy(self, rows: Ints, positions: Ints, first: int, stop: int) -> None:
        """Copy K and V of the deepest layer that was run into layers [first, stop)."""
        for depth, of in _by_depth(self._depths[rows, positions]):
            self._cache.copy_layers(rows[of], positions[of], depth - 1, first, stop)

    # Which positions of which rows have KV in which segments: numbers, no tensors.

    def start(self, row: int, num_tokens: int, depth: int | None = None, num_open: int = 0) -> None:
        """A sequence takes the row; its first `num_tokens` positions have KV.

        Args:
            depth: In this many layers, an exit; None: in every layer there is.
            num_open: The newest so many may be replayed with a later token, and their states are
                not here: as many as a token takes along are owed.
        """
        self._filled[row] = num_tokens
        self._filled[row, 1:] -= min(num_open, self._replay_newest)
        self._base[row] = num_tokens
        self._depths[row] = COMPLETE
        if depth is not None and depth < self.ends[-1]:
            self._filled[row, np.array(self.ends) > depth] = 0
            self._depths[row, :num_tokens] = depth
        self.may_owe = self.may_owe or self._owes(row)

    def owed(self, row: int) -> tuple[int, int]:
        """Positions [start, stop) that lack KV and left nothing to make it of."""
        base = int(self._base[row])
        return (int(self._filled[row, -1]), base) if self._owes(row) else (base, base)

    def depth_of(self, row: int) -> int:
        """Layers that a pass over the row may run before what it owes is paid."""
        if not self._owes(row):
            return self.ends[-1]
        paid = np.flatnonzero(self._filled[row, 1:] >= self._base[row])
        return self.ends[int(paid[-1]) + 1 if paid.size else 0]

    @property
    def is_owed(self) -> bool:
        """Whether some row owes positions."""
        deeper = len(self.ends) > 1 and self.keeps_states
        return bool(deeper and (self._filled[:, -1] < self._base).any())

    def _owes(self, row: int) -> bool:
        deepest = len(self.ends) - 1
        return bool(deepest and self.keeps_states and self._filled[row, -1] < self._base[row])

    def paid(
        self, row: int, start: int, stop: int, depths: Ints | None, states: torch.Tensor
    ) -> None:
        """The row's positions up to `stop` have KV everywhere.

        The newest of all that was owed leave their states behind again, if they left early: the
        next token that goes deeper takes them along, as it would have done before.

        Args:
            depths: Layers run at [start, stop); None: all.
            states: With which these positions were left, [n, hidden].
        """
        lacks = np.flatnonzero(self._filled[row, 1:] < self._base[row]) + 1
        self._filled[row, 1:] = np.maximum(self._filled[row, 1:], stop)
        self._depths[row, start:stop] = COMPLETE
        if depths is None:
            return
        early = np.flatnonzero(depths < self.ends[-1])
        self._depths[row, start + early] = depths[early]
        deep = np.flatnonzero(depths == self.ends[-1])
        skip = max(0, len(depths) - self._replay_newest, deep[-1] + 1 if deep.size else 0)
        if stop < self._base[row] or skip == len(depths):
            return
        first = start + skip
        self._rebase(row, first, states[skip:])
        for segment in lacks:
            deeper = np.flatnonzero(depths[skip:] > self.ends[segment - 1])
            self._filled[row, segment] = first + (deeper[-1] + 1 if deeper.size else 0)

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

    def _deepen(self, row: int, before: tuple[int, ...], length: int) -> None:
        """Positions that were complete are complete no longer."""
        depths = self._depths[row, :length]
        depths[depths == COMPLETE] = before[-1]
        self.may_owe = self.keeps_states

    def _flatten(self, row: int, depth: int) -> None:
        """Positions that were run deeper than `depth` are complete there."""
        depths = self._depths[row]
        depths[(depths > depth) & (depths <= MAX_LAYERS)] = COMPLETE


def _by_depth(depths: npt.NDArray[np.uint8]) -> list[tuple[int, Ints | slice]]:
    """Layers run → which of the positions; mostly one for all of them."""
    found = np.flatnonzero(np.bincount(depths)).tolist()
    if len(found) == 1:
        return [(found[0], slice(None))]
    return [(depth, np.flatnonzero(depths == depth)) for depth in found]


def _spread(rows: Ints, starts: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Runs [start, start + count) of rows → row and position of every token in them."""
    before = np.cumsum(counts) - counts
    positions = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - before, counts)
    return np.repeat(rows, counts), positions
