"""Our stores, dressed as a `transformers` cache: models are fed through its public classes."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class KVStore(Protocol):
    """Where a pass finds the past and leaves what it computes."""

    @property
    def num_past(self) -> int:
        """Columns, padding included, that stand before the pass's own."""

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the pass's K and V [batch, num_kv_heads, n, head_dim] of one layer.

        Returns:
            K and V of past and pass together: [batch, num_kv_heads, num_past + n, head_dim].
        """


class StoreLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of a store, for one pass.

    A full-attention layer also where the model has a window: the model's own mask hides what lies
    outside it, and a difference of columns is a difference of positions, as rows end together.
    """

    is_croppable = False

    def __init__(self, store: KVStore, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store
        self._index = index
        self._num_new = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._num_new = key_states.shape[-2]
        self.keys, self.values = self._store.append(self._index, key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._store.num_past + self._num_new


class StoreCache(DynamicCache):
    """What a model is given as `past_key_values`, for one pass."""

    def __init__(self, store: KVStore, num_layers: int) -> None:
        Cache.__init__(self, layers=[StoreLayer(store, i) for i in range(num_layers)])
