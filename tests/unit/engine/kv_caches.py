"""Small KV caches of three layers, in rows and in pages."""

from __future__ import annotations

from typing import Any

import torch

from quadriga.engine.cuda.paged_cache import PagedKVCache
from quadriga.engine.kv_cache import RowKVCache

AnyCache = RowKVCache | PagedKVCache


def row_cache(
    *, num_rows: int = 3, capacity: int = 50, budget: int | None = None, head_dim: int = 4
) -> RowKVCache:
    return RowKVCache(
        num_layers=3,
        num_rows=num_rows,
        num_kv_heads=2,
        capacity=capacity,
        head_dim=head_dim,
        dtype=torch.float32,
        budget_tokens=num_rows * capacity if budget is None else budget,
    )


def paged_cache(*, num_rows: int = 3, budget: int = 150, **overrides: Any) -> PagedKVCache:
    options: dict[str, Any] = {
        "segment_ends": (1, 3),
        "num_rows": num_rows,
        "num_kv_heads": 2,
        "capacity": 50,
        "head_dim": 4,
        "dtype": torch.float32,
        "budget_tokens": budget,
        "device": torch.device("cpu"),
        "page_tokens": 16,
    }
    return PagedKVCache(**(options | overrides))
