"""The running batch: dense K/V whose rows end together, padded in front.

    columns:   released │ begin                          end │ room to grow
    row a               │ 0 0 0 a a a a a a a a a a a a a a a │
    row b               │ 0 0 0 0 0 0 0 0 0 0 0 b b b b b b b │
    mask b              │ 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 │

A prefilled sequence is embedded so that it ends where all end: the front of a short one is padded,
a long one moves `begin` to the left for everyone. Every step appends one column. When the longest
row has gone, the columns in front that are padding in all rows are released; growth is geometric,
so copying costs a constant a step.

Padding holds zeros and stays finite: a masked score weighs it with exactly 0. (The paper fills it
with −∞, but 0 · −∞ is not a number where it stands in V.)

Source: BATON §4.1, §4.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quadriga.engine.baton.row_kv import CacheGeometry
from quadriga.errors import InvariantViolation

RELEASE_COLUMNS = 64
"""Free columns in front are released when there are this many; also the unit of capacity."""
SHRINK_FACTOR = 8
"""Memory is given back when the batch fills less than one part in this many."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a decode step feeds to the model beside the tokens; rows in the batch's order.

    Attributes:
        mask: int64 [num_rows, width + 1]; its last column is the step's own token.
        positions: int64 [num_rows, 1]
    """

    rows: list[int]
    mask: torch.Tensor
    positions: torch.Tensor


class DenseBatch:
    """Rows that decode together; a `KVStore` for the step under way.

    Args:
        row_capacity_tokens: Most tokens of one row, and most columns a step may see: tables of
            positions or biases in the model may be no longer.
        release_columns: See `RELEASE_COLUMNS`.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        row_capacity_tokens: int,
        release_columns: int = RELEASE_COLUMNS,
    ) -> None:
        self._geometry = geometry
        self._dtype = dtype
        self._device = device
        self._max_rows = max_rows
        self._row_capacity = row_capacity_tokens
        self._release_columns = release_columns
        self._rows: list[int | None] = []  # by slot; None is a hole, gone before the next step
        self._lengths: list[int] = []  # by slot
        self._slots: dict[int, int] = {}  # row → slot
        self._begin = self._end = 0
        self._keys: list[torch.Tensor] = []  # per layer [slots, heads, columns, head_dim]
        self._values: list[torch.Tensor] = []
        self._mask = torch.zeros((0, 0), dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, row: int) -> bool:
        return row in self._slots

    @property
    def rows(self) -> list[int]:
        """The rows in the batch, in no particular order."""
        return list(self._slots)

    @property
    def width(self) -> int:
        """Columns in use, padding included."""
        return self._end - self._begin

    @property
    def num_past(self) -> int:
        """See `KVStore.num_past`."""
        return self.width

    @property
    def num_bytes(self) -> int:
        """K/V memory taken, capacity not in use included."""
        return sum(t.nbytes for t in self._keys) + sum(t.nbytes for t in self._values)

    @property
    def padding_cells(self) -> int:
        """Cells (row, column) of the batch that hold padding."""
        return len(self) * self.width - sum(self._lengths)

    def length(self, row: int) -> int:
        """Tokens whose K/V the row has."""
        return self._lengths[self._slots[row]]

    def insert(self, row: int, kv: torch.Tensor) -> None:
        """Embed a prefilled sequence, end-aligned, in place of one that left if there is a hole.

        Args:
            kv: [num_layers, 2, num_kv_heads, n, head_dim], on any device.
        """
        if row in self._slots:
            raise InvariantViolation(f"row {row} is in the batch already")
        length = kv.shape[3]
        holes = [slot for slot, held in enumerate(self._rows) if held is None]
        slot = holes[0] if holes else len(self._rows)
        extension = max(0, length - self.width)
        self._reserve(num_slots=slot + 1, left=extension, right=1)
        self._extend_left(extension)
        if slot == len(self._rows):
            self._rows.append(None)
            self._lengths.append(0)
        pad, begin, end = self._end - length, self._begin, self._end
        for layer in range(self._geometry.num_layers):
            for buffer, new in ((self._keys, kv[layer, 0]), (self._values, kv[layer, 1])):
                buffer[layer][slot, :, begin:pad] = 0
                buffer[layer][slot, :, pad:end] = new
        self._mask[slot, begin:pad] = 0
        self._mask[slot, pad:end] = 1
        self._rows[slot], self._lengths[slot], self._slots[row] = row, length, slot

    def remove(self, row: int) -> None:
        """Take a row out; the next one to join takes its place."""
        slot = self._slots.pop(row)
        self._rows[slot], self._lengths[slot] = None, 0
        if not self._slots:
            self._drop()

    def read(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """Copy of a row's positions [start, stop), as `RowKV.read`.

        Raises:
            InvariantViolation: Not all of it is here.
        """
        slot, last = self._slots[row], first_layer + num_layers
        if not (0 <= first_layer < last <= self._geometry.num_layers and 0 <= start <= stop):
            raise InvariantViolation(f"layers {first_layer}..{last}, positions {start}..{stop}")
        if stop > self._lengths[slot]:
            raise InvariantViolation(f"positions {start}..{stop} of row {row} are not all computed")
        offset = self._end - self._lengths[slot]
        columns = slice(offset + start, offset + stop)
        layers = range(first_layer, last)
        kv = [
            torch.stack((self._keys[i][slot, :, columns], self._values[i][slot, :, columns]))
            for i in layers
        ]
        return torch.stack(kv)

    def begin_step(self) -> StepInputs:
        """Close holes, release what is padding everywhere, make room for one more column."""
        self._close_holes()
        self._release()
        self._shrink()
        self._reserve(num_slots=len(self._rows), left=0, right=1)
        count = len(self._rows)
        self._mask[:count, self._end] = 1
        positions = torch.tensor(self._lengths, device=self._device)[:, None]
        rows = [row for row in self._rows if row is not None]
        return StepInputs(rows, self._mask[:count, self._begin : self._end + 1], positions)

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVStore.append`; the step's column is part of the rows only after `end_step`."""
        count, end = len(self._rows), self._end
        stop = end + keys.shape[2]
        self._keys[layer][:count, :, end:stop] = keys
        self._values[layer][:count, :, end:stop] = values
        span = slice(self._begin, stop)
        return self._keys[layer][:count, :, span], self._values[layer][:count, :, span]

    def end_step(self) -> None:
        """Make the column that was appended part of every row."""
        self._end += 1
        self._lengths = [length + 1 for length in self._lengths]

    def _extend_left(self, columns: int) -> None:
        """Add padding in front of every row. Released columns hold old values: zero them."""
        if columns == 0:
            return
        span = slice(self._begin - columns, self._begin)
        for buffer in (*self._keys, *self._values):
            buffer[:, :, span] = 0
        self._mask[:, span] = 0
        self._begin -= columns

    def _close_holes(self) -> None:
        """Move the last rows into the holes, so that the batch is dense."""
        while None in self._rows:
            last = len(self._rows) - 1
            hole = self._rows.index(None)
            if hole != last:
                row = self._rows[last]
                if row is None:
                    self._rows.pop()
                    self._lengths.pop()
                    continue
                span = slice(self._begin, self._end)
                for buffer in (*self._keys, *self._values):
                    buffer[hole, :, span] = buffer[last, :, span]
                self._mask[hole, span] = self._mask[last, span]
                self._rows[hole], self._lengths[hole] = row, self._lengths[last]
                self._slots[row] = hole
            self._rows.pop()
            self._lengths.pop()

    def _release(self) -> None:
        free = self.width - max(self._lengths, default=0)
        if free >= self._release_columns or self.width >= self._row_capacity:
            self._begin += free
        if self.width >= self._row_capacity:
            raise InvariantViolation(f"a row of {self.width} tokens has no room for another")

    def _shrink(self) -> None:
        """Give memory back when the batch has become much smaller than its buffers."""
        cells = self._mask.shape[0] * self._mask.shape[1]
        if cells > SHRINK_FACTOR * len(self._rows) * max(self.width, self._release_columns):
            self._rebuild(*self._sizes(len(self._rows), self.width + 1), begin=0)

    def _reserve(self, *, num_slots: int, left: int, right: int) -> None:
        """Have room for rows, for columns to the left of `begin`, and to the right of `end`."""
        slots, columns = self._mask.shape
        if slots >= num_slots and self._begin >= left and columns - self._end >= right:
            return
        slots = max(slots, self._sizes(num_slots, 0)[0])
        _, columns = self._sizes(0, left + self.width + right)
        self._rebuild(slots, columns, begin=left)

    def _sizes(self, num_slots: int, num_columns: int) -> tuple[int, int]:
        """Capacities for so many rows and columns: up to twice as much, within the limits."""
        slots = min(1 << max(0, num_slots - 1).bit_length(), self._max_rows)
        unit = self._release_columns
        columns = min(-(-2 * num_columns // unit) * unit, self._row_capacity + unit)
        return max(slots, num_slots), max(columns, num_columns)

    def _rebuild(self, slots: int, columns: int, *, begin: int) -> None:
        """Move everything into new buffers, where it starts at `begin`.

        All of them at once: where memory lacks for one, nothing has moved.
        """
        g, device = self._geometry, self._device
        shape = (slots, g.num_kv_heads, columns, g.head_dim)
        made = [
            torch.zeros(shape, dtype=self._dtype, device=device) for _ in range(2 * g.num_layers)
        ]
        mask = torch.zeros((slots, columns), dtype=torch.int64, device=device)
        count, width = len(self._rows), self.width
        old, new = slice(self._begin, self._end), slice(begin, begin + width)
        for buffer, before in zip(made, (*self._keys, *self._values), strict=False):
            buffer[:count, :, new] = before[:count, :, old]
        mask[:count, new] = self._mask[:count, old]
        self._keys, self._values, self._mask = made[: g.num_layers], made[g.num_layers :], mask
        self._begin, self._end = begin, begin + width

    def _drop(self) -> None:
        """An empty batch holds no memory."""
        self._rows.clear()
        self._lengths.clear()
        self._keys.clear()
        self._values.clear()
        self._mask = self._mask.new_zeros((0, 0))
        self._begin = self._end = 0
