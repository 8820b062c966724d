"""One prompt pass and one decode step of a model, over our stores as its `transformers` cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from quadriga.engine.baton.dense import StepInputs
from quadriga.engine.baton.model import CausalModel
from quadriga.engine.baton.prompts import PromptSpan, PromptStore


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


@torch.no_grad()
def prompt_pass(
    model: CausalModel,
    num_layers: int,
    spans: Sequence[PromptSpan],
    keep: list[int] | None,
    on_layer: Callable[[int], None] | None = None,
    on_states: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Compute K/V of several prompts that start at 0, or of one that continues.

    Args:
        keep, on_states: See `CausalModel.__call__`; counted from the pass's first token.

    Returns:
        Logits, float32 [len(spans), len(keep), vocab].
    """
    start = spans[0].start
    longest = max(len(span.token_ids) for span in spans)
    ids = torch.zeros((len(spans), longest), dtype=torch.int64)
    mask = torch.ones((len(spans), start + longest), dtype=torch.int64)
    for i, span in enumerate(spans):
        n = len(span.token_ids)
        ids[i, :n] = torch.tensor(span.token_ids, dtype=torch.int64)
        mask[i, start + n :] = 0
        span.row.crop(span.start)
    positions = torch.arange(start, start + longest).expand(len(spans), -1)
    device = model.device
    cache = StoreCache(PromptStore(spans, on_layer), num_layers)
    return model(ids.to(device), mask.to(device), positions.to(device), cache, keep, on_states)


@torch.no_grad()
def decode_step(
    model: CausalModel,
    num_layers: int,
    batch: KVStore,
    inputs: StepInputs,
    token_ids: Sequence[int],
) -> torch.Tensor:
    """Run one token of every row of the batch, between its `begin_step` and `end_step`.

    Args:
        token_ids: Parallel to `inputs.rows`.

    Returns:
        Logits, float32 [num_rows, vocab].
    """
    ids = torch.tensor(token_ids, dtype=torch.int64, device=model.device)[:, None]
    cache = StoreCache(batch, num_layers)
    return model(ids, inputs.mask, inputs.positions, cache)[:, -1]
