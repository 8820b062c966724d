"""One prompt pass and one decode step of a model over our stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quadriga.engine.baton.cache import KVStore, StoreCache
from quadriga.engine.baton.dense import StepInputs
from quadriga.engine.baton.model import CausalModel
from quadriga.engine.baton.prompts import PromptSpan, PromptStore


@torch.no_grad()
def prompt_pass(
    model: CausalModel,
    num_layers: int,
    spans: Sequence[PromptSpan],
    keep: list[int] | None,
    on_layer: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Compute K/V of several prompts that start at 0, or of one that continues.

    Args:
        keep: See `CausalModel.__call__`; counted from the pass's first token.

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
    return model(ids.to(device), mask.to(device), positions.to(device), cache, keep)


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
