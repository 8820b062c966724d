"""Where every row's K/V is: in the dense batch, or in a tensor of its own.

Rows of the last step are in the batch. Every other row (being filled by prefill or by a transfer,
sitting out, come back from host memory) has a tensor of its own and is embedded, end-aligned, when
it decodes next. So a row can be left out of any step; its return costs one copy of its K/V.

Source: BATON §4.2 (prefilled queries wait outside the batch), §4.3 (preemption to host memory).
"""

from __future__ import annotations

import threading

import torch

from quadriga.core.replica import RelayMemory
from quadriga.engine.baton.dense import DenseBatch, StepInputs
from quadriga.engine.baton.row_kv import CacheGeometry, RowKV
from quadriga.errors import InvariantViolation

HOST = torch.device("cpu")


class RelayRows:
    """K/V of all rows of one runner.

    Thread-safe; the lock is held for copies, never for a pass of the model. Between `begin_step`
    and `end_step` the rows of the step must be left alone.

    Args:
        release_columns: Padding columns in front of all rows that are worth a release.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_rows: int,
        row_capacity_tokens: int,
        release_columns: int,
    ) -> None:
        self._geometry = geometry
        self._dtype = dtype
        self._device = device
        self._capacity = row_capacity_tokens
        self.batch = DenseBatch(
            geometry,
            dtype,
            device,
            max_rows=num_rows,
            row_capacity_tokens=row_capacity_tokens,
            release_columns=release_columns,
        )
        self._outside: dict[int, RowKV] = {}
        self._lock = threading.Lock()
        self._attended_cells = 0
        self._idle_cells = 0

    def begin_step(self, past: dict[int, int]) -> StepInputs:
        """Make the batch hold exactly these rows, and begin a step.

        Args:
            past: Row → positions its step attends to, its own excepted. What a row holds beyond
                them is forgotten.

        Raises:
            InvariantViolation: A row lacks K/V of its past, or has no room for its step.
        """
        with self._lock:
            for row, num_past in past.items():
                held = self._length(row)
                if held < num_past or num_past >= self._capacity:
                    raise InvariantViolation(
                        f"row {row} cannot decode position {num_past}: {held} positions are "
                        f"computed, {self._capacity} fit"
                    )
            for row in self.batch.rows:
                if past.get(row) != self.batch.length(row):
                    self._unseat(row, self._device)
            joining = [row for row in past if row not in self.batch]
            for row in sorted(joining, key=lambda r: -past[r]):  # the longest extends it for all
                self.batch.insert(row, self._own(row).prefix(past[row]))
                del self._outside[row]
            return self.batch.begin_step()

    def end_step(self) -> None:
        """The step's column is computed: make it part of the rows."""
        with self._lock:
            self.batch.end_step()
            self._attended_cells += len(self.batch) * self.batch.width
            self._idle_cells += self.batch.padding_cells

    def own(self, row: int) -> RowKV:
        """The row's own tensor, for a prefill pass; it leaves the batch if it is there."""
        with self._lock:
            kv = self._own(row)
            kv.move(self._device)
            return kv

    def drop(self, row: int) -> None:
        """The row's K/V is garbage from now on."""
        with self._lock:
            self._outside.pop(row, None)
            if row in self.batch:
                self.batch.remove(row)

    def suspend(self, row: int) -> RowKV:
        """Take a row's K/V out, into host memory; the row is empty afterwards."""
        with self._lock:
            if row in self.batch:
                self._unseat(row, HOST)
            kv = self._own(row)
            kv.move(HOST)
            del self._outside[row]
            return kv

    def restore(self, row: int, kv: RowKV) -> None:
        """Put what `suspend` returned into an empty row; its next pass takes it to the device."""
        with self._lock:
            if self._length(row):
                raise InvariantViolation(f"row {row} holds {self._length(row)} positions already")
            self._outside[row] = kv

    @torch.no_grad()
    def read(
        self, row: int, first_layer: int, num_layers: int, start: int, stop: int
    ) -> torch.Tensor:
        """Copy of a row's K/V; see `RowKV.read`."""
        with self._lock:
            if row in self.batch:
                return self.batch.read(row, first_layer, num_layers, start, stop)
            return self._own(row).read(first_layer, num_layers, start, stop)

    @torch.no_grad()
    def write(self, row: int, first_layer: int, start: int, kv: torch.Tensor) -> None:
        """Store what `read` of a peer returned; see `RowKV.write`."""
        with self._lock:
            self._own(row).write(first_layer, start, kv)

    def memory(self) -> RelayMemory:
        """What is held now, and how much was idle so far."""
        with self._lock:
            return RelayMemory(
                num_batch_rows=len(self.batch),
                width=self.batch.width,
                batch_bytes=self.batch.num_bytes,
                row_bytes=sum(kv.num_bytes for kv in self._outside.values()),
                padding_cells=self.batch.padding_cells,
                attended_cells=self._attended_cells,
                idle_cells=self._idle_cells,
            )

    def _unseat(self, row: int, device: torch.device) -> None:
        """Take a row out of the batch, into a tensor of its own.

        Layer by layer: a device whose memory is full has none for two more copies of the row.
        """
        kv = RowKV(self._geometry, self._dtype, device, max_tokens=self._capacity)
        for layer in range(self._geometry.num_layers):
            kv.write(layer, 0, self.batch.read(row, layer, 1, 0, self.batch.length(row)))
        self.batch.remove(row)
        self._outside[row] = kv

    def _length(self, row: int) -> int:
        if row in self.batch:
            return self.batch.length(row)
        return self._outside[row].length if row in self._outside else 0

    def _own(self, row: int) -> RowKV:
        """The row's own tensor, out of the batch; an empty one if it has none."""
        if row in self.batch:
            self._unseat(row, self._device)
        if row not in self._outside:
            self._outside[row] = RowKV(
                self._geometry, self._dtype, self._device, max_tokens=self._capacity
            )
        return self._outside[row]
