"""Hidden states on a device, in pages as KV: a row takes memory for the states it keeps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from quadriga.engine.cuda.pages import PAGE_TOKENS, PageTable, pages_per_layer
from quadriga.engine.transfers import to_device

Ints = npt.NDArray[np.int64]


class PagedStates:
    """The GPU form of `quadriga.engine.early_exit.row_states.RowStates`.

    Args:
        budget_tokens: Tokens over all rows that pages are reserved for: as many as the KV cache's,
            since every token may have left early; 0 where none are kept.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        capacity: int,
        hidden_size: int,
        budget_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        num_pages = 0
        if budget_tokens:
            num_pages = pages_per_layer(budget_tokens, num_rows, capacity, page_tokens)
        self.pages = PageTable(
            segment_ends=(1,),
            num_rows=num_rows,
            capacity=capacity,
            num_pages=num_pages,
            page_tokens=page_tokens,
        )
        shape = ((num_pages + 1) * page_tokens, hidden_size)
        self._states = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self._states.device

    def put(self, rows: Ints, slots: Ints, states: torch.Tensor) -> None:
        """See `RowStates.put`. Raises: KVCacheExhausted: See `PageTable.ensure`."""
        self.pages.ensure(rows, slots + 1, range(1))
        self.pages.drop_changes()  # the table is read on the host alone
        self._states.index_copy_(0, self._places(rows, slots), states)

    def take(self, rows: Ints, slots: Ints) -> torch.Tensor:
        """See `RowStates.take`."""
        return self._states.index_select(0, self._places(rows, slots))

    def release(self, row: int) -> None:
        """See `RowStates.release`."""
        self.pages.release(row)

    def _places(self, rows: Ints, slots: Ints) -> torch.Tensor:
        size = self.pages.page_tokens
        pages = self.pages.table[0, rows, slots // size].astype(np.int64)
        return to_device(pages * size + slots % size, self._states.device)
