"""Hidden states that tokens left behind, per KV row: state s of a row is at (row, s)."""

from __future__ import annotations

from typing import Protocol

import torch

from quadriga.engine.kv_cache import Ints
from quadriga.engine.memory import give_back, reserve


class RowStates(Protocol):
    """Where `SkippedKVStore` keeps hidden states; one thread calls it."""

    @property
    def device(self) -> torch.device: ...

    def put(self, rows: Ints, slots: Ints, states: torch.Tensor) -> None:
        """Keep states [n, hidden] at (rows, slots)."""

    def take(self, rows: Ints, slots: Ints) -> torch.Tensor:
        """Copy of the states at (rows, slots): [n, hidden]."""

    def release(self, row: int) -> None:
        """The row's states are garbage from now on; their memory may be given back."""


class MappedStates:
    """The CPU form: dense rows, committed by the first write."""

    def __init__(self, num_rows: int, capacity: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._capacity = capacity
        self._row_bytes = capacity * hidden_size * dtype.itemsize
        self._map, memory = reserve(num_rows * self._row_bytes, huge=False)
        self._states = memory.view(dtype).view(-1, hidden_size)  # [num_rows · capacity, hidden]

    @property
    def device(self) -> torch.device:
        return self._states.device

    def put(self, rows: Ints, slots: Ints, states: torch.Tensor) -> None:
        """See `RowStates.put`."""
        self._states.index_copy_(0, torch.from_numpy(rows * self._capacity + slots), states)

    def take(self, rows: Ints, slots: Ints) -> torch.Tensor:
        """See `RowStates.take`."""
        return self._states.index_select(0, torch.from_numpy(rows * self._capacity + slots))

    def release(self, row: int) -> None:
        """See `RowStates.release`."""
        give_back(self._map, row * self._row_bytes, (row + 1) * self._row_bytes)
