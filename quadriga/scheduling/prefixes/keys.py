"""Names of prefixes: chained hashes of blocks of tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence


def block_keys(tokens: Sequence[int], size: int, root: str) -> Iterator[bytes]:
    """The key of every whole block of `size` tokens: of all tokens up to its end, and of `root`."""
    key = hashlib.blake2b(root.encode(), digest_size=32).digest()
    for stop in range(size, len(tokens) + 1, size):
        block = array("q", tokens[stop - size : stop]).tobytes()
        key = hashlib.blake2b(key + block, digest_size=32).digest()
        yield key
