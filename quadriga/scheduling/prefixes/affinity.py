"""Which prefill replica has computed the beginning of a prompt, as far as the scheduler knows.

The ingress names a few beginnings of a prompt by *marks*: hashes of its first 64, 128, 256, …
tokens, of all its whole blocks of 64, and of its salt. The scheduler remembers where prompts with
these marks went last. What a replica has let go since, it does not know: a wrong guess costs the
computing that it would have cost anyway.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

MARK_TOKENS = 64
MAX_MARKS = 65_536
"""Remembered at once; the least recently used go."""
Mark = tuple[int, bytes]
"""Tokens of a prompt's beginning, and its name."""


def block_keys(tokens: Sequence[int], size: int, root: str) -> Iterator[bytes]:
    """The key of every whole block of `size` tokens: of all tokens up to its end, and of `root`."""
    key = hashlib.blake2b(root.encode(), digest_size=32).digest()
    for stop in range(size, len(tokens) + 1, size):
        block = array("q", tokens[stop - size : stop]).tobytes()
        key = hashlib.blake2b(key + block, digest_size=32).digest()
        yield key


def prefix_marks(prompt_ids: Sequence[int], cache_salt: str) -> tuple[Mark, ...]:
    """The marks of a prompt, the shortest first."""
    count = len(prompt_ids) // MARK_TOKENS
    return tuple(
        (number * MARK_TOKENS, key[:8])
        for number, key in enumerate(block_keys(prompt_ids, MARK_TOKENS, cache_salt), 1)
        if number == count or number & (number - 1) == 0
    )


class PrefixAffinity:
    """The replicas that prompts went to, by mark; each has the last that it went to.

    Not thread-safe: the scheduler's event loop owns it.
    """

    def __init__(self) -> None:
        self._replicas: OrderedDict[Mark, str] = OrderedDict()

    def sent(self, marks: Sequence[Mark], replica: str) -> None:
        """Note that a prompt was let in there."""
        for mark in marks:
            self._replicas[mark] = replica
            self._replicas.move_to_end(mark)
        while len(self._replicas) > MAX_MARKS:
            self._replicas.popitem(last=False)

    def cached_tokens(self, marks: Sequence[Mark]) -> dict[str, int]:
        """Tokens of a prompt that each replica may have computed before, where there are any."""
        found: dict[str, int] = {}
        for mark in marks:
            replica = self._replicas.get(mark)
            if replica is not None:
                found[replica] = max(mark[0], found.get(replica, 0))
        return found
