"""What a store of skipped KV refuses, and what it says that rows owe."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from quadriga.checkpoint.exits import MAX_LAYERS
from quadriga.engine.early_exit.row_states import MappedStates
from quadriga.engine.early_exit.skipped_kv import SkippedKVStore
from quadriga.errors import ConfigError
from tests.unit.engine.kv_caches import row_cache


def store(depth: int) -> SkippedKVStore:
    states = MappedStates(1, 16, 8, torch.float32)
    return SkippedKVStore("linear", (2, depth), row_cache(num_rows=1, capacity=16), states)


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
