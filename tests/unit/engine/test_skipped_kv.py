"""What a store of skipped KV refuses, and what it says that rows owe."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from quadriga.checkpoint.exits import MAX_LAYERS
from quadriga.engine.early_exit.row_states import MappedStates
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.engine.kv_cache import RowKVCache
from quadriga.errors import ConfigError


def store(depth: int) -> SkippedKVStore:
    cache = RowKVCache(
        num_layers=1,
        num_rows=1,
        num_kv_heads=1,
        capacity=16,
        head_dim=4,
        dtype=torch.float32,
        budget_tokens=16,
    )
    states = MappedStates(1, 16, 8, torch.float32)
    return SkippedKVStore("linear", (2, depth), cache, states)


def test_a_depth_that_a_byte_cannot_say_is_refused() -> None:
    store(MAX_LAYERS)
    with pytest.raises(ConfigError, match=rf"{MAX_LAYERS + 1} layers are too many"):
        store(MAX_LAYERS + 1)


def test_nothing_is_owed_where_there_is_one_segment() -> None:
    kept = store(4)
    kept.start(0, 5)
    kept.resize((2,), Mock(), 0, {0: 5})
    kept.enter(Mock(), np.array([0]), np.array([7]), 0, 1)
    assert not kept.is_owed
