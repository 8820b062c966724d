"""Lent GPU machines have no xxhash: another hash of 64 bits does for what tests compare."""

from __future__ import annotations

import hashlib
import sys
from types import ModuleType

try:
    import xxhash  # noqa: F401
except ImportError:

    def _digest(data: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    stand_in = ModuleType("xxhash")
    stand_in.xxh3_64_intdigest = _digest  # type: ignore[attr-defined]
    sys.modules["xxhash"] = stand_in
