"""Prefill: which prompts go through the model together, and where their K/V goes.

A prompt that starts from nothing shares a pass with others of similar length, padded behind; a
prompt that continues goes alone, over its row in place.

Source: BATON §4.2 (prefill grouped by similarity of length).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quadriga.engine.baton.row_kv import RowKV
from quadriga.interfaces import PrefillChunk

MAX_PADDED_RATIO = 1.25
"""A pass computes at most this many positions for every token in it."""
PASS_TOKENS = {"cpu": 16, "cuda": 512}
"""More padding than this for one prompt costs more than a pass of its own. (On CPUs a pass takes
about as long as 30 tokens of the small models there; for GPUs it is an estimate.)"""


def group_prompts(chunks: Sequence[PrefillChunk], *, max_padding: int) -> list[list[int]]:
    """Indices of the chunks that share a pass; every index once.

    Args:
        max_padding: Most padding behind the shortest.
    """
    groups: list[list[int]] = [[i] for i, chunk in enumerate(chunks) if chunk.start > 0]
    fresh = [i for i, chunk in enumerate(chunks) if chunk.start == 0]
    fresh.sort(key=lambda i: -len(chunks[i].token_ids))
    group: list[int] = []
    num_tokens = 0
    for i in fresh:
        length = len(chunks[i].token_ids)
        longest = len(chunks[group[0]].token_ids) if group else length
        padded = longest * (len(group) + 1)
        is_similar = padded <= MAX_PADDED_RATIO * (num_tokens + length)
        if group and not (is_similar and longest - length <= max_padding):
            groups.append(group)
            group, num_tokens = [], 0
        group.append(i)
        num_tokens += length
    return [*groups, group] if group else groups


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A chunk on its way through the model: `token_ids` at positions from `start` on."""

    row: RowKV
    token_ids: Sequence[int]
    start: int


class PromptStore:
    """A `KVStore` for one prefill pass: what is computed lands in the rows, layer by layer.

    Args:
        on_layer: Called with each layer whose K/V has just landed.
    """

    def __init__(
        self, spans: Sequence[PromptSpan], on_layer: Callable[[int], None] | None = None
    ) -> None:
        self._spans = spans
        self._on_layer = on_layer

    @property
    def num_past(self) -> int:
        """See `KVStore.num_past`."""
        return self._spans[0].start

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVStore.append`; padding is not stored."""
        for i, span in enumerate(self._spans):
            n = len(span.token_ids)
            span.row.put(layer, span.start, keys[i, :, :n], values[i, :, :n])
        if self._on_layer is not None:
            self._on_layer(layer)
        if self.num_past > 0:
            return self._spans[0].row.view(layer)
        return keys, values
