"""The KV of one sequence as prefill completes it, in order, for whoever sends it on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

STAGING_BYTES = 64 << 20
"""KV copied out of the rows ahead of its sending, over all sequences of a replica."""


@dataclass(frozen=True, slots=True)
class KVRange:
    """Layers [first_layer, first_layer + num_layers) at positions [start, stop)."""

    first_layer: int
    num_layers: int
    start: int
    stop: int


class StagingBudget:
    """Bounds the copies in flight; beyond it KV is read from its row when its turn comes.

    Taken on the engine thread, given back on the event loop: adding to an int that only one
    thread reads for a decision needs no lock, as the bound may be passed by one copy.
    """

    def __init__(self, limit_bytes: int = STAGING_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._given_bytes = 0

    @property
    def has_room(self) -> bool:
        return self._taken_bytes - self._given_bytes < self._limit_bytes

    def take(self, num_bytes: int) -> None:
        self._taken_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._given_bytes += num_bytes

    @property
    def held_bytes(self) -> int:
        return self._taken_bytes - self._given_bytes


class KVFeed:
    """Ranges of one sequence in the order they became complete; on the event loop.

    Attributes:
        wants_copies: Whether it is worth copying KV out while the pass goes on; read by the
            engine thread.
    """

    def __init__(self, staging: StagingBudget) -> None:
        self.wants_copies = True
        self._staging = staging
        self._ranges: list[KVRange] = []
        self._copies: dict[int, Any] = {}
        self._is_complete = False
        self._changed = asyncio.Event()

    def add(self, span: KVRange, kv: Any) -> None:
        """Append a range, with its copy where one was made."""
        if kv is not None and self.wants_copies:
            self._copies[len(self._ranges)] = kv
        elif kv is not None:
            self._staging.give_back(kv.nbytes)
        self._ranges.append(span)
        self._changed.set()

    def complete(self) -> None:
        """No range follows any more."""
        self._is_complete = True
        self._changed.set()

    async def next(self, index: int) -> KVRange | None:
        """Range number `index`, when it is there; None after the last."""
        while index >= len(self._ranges):
            if self._is_complete:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._ranges[index]

    def take_copy(self, index: int) -> Any:
        """The staged copy of a range, once; None when there is none (any more)."""
        kv = self._copies.pop(index, None)
        if kv is not None:
            self._staging.give_back(kv.nbytes)
        return kv

    def close(self) -> None:
        """Drop what is staged and stage no more."""
        self.wants_copies = False
        for index in list(self._copies):
            self.take_copy(index)
