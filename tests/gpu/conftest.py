"""How a rehearsal runs; and, as lent GPU machines have no xxhash, another hash of 64 bits."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

try:
    import xxhash  # noqa: F401
except ImportError:

    def _digest(data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    stand_in = ModuleType("xxhash")
    stand_in.xxh3_64_intdigest = _digest  # type: ignore[attr-defined]
    sys.modules["xxhash"] = stand_in


from tests.gpu.devices import IS_REHEARSAL


@pytest.fixture(autouse=IS_REHEARSAL)
def one_thread() -> Iterator[None]:
    """Small products on cores that others use: a second thread is waited for more than it helps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
