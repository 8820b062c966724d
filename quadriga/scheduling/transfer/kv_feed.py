"""The KV of one sequence in the order in which prefill completes it, until it is sent."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from quadriga.core.kv import KVSpan

MIN_PART_BYTES = 256 << 10
MAX_JOINED_BYTES = 1 << 20
STAGING_BYTES = 64 << 20
"""KV copied out of the rows ahead of its sending, over all sequences of a replica."""


@dataclass(frozen=True, slots=True)
class KVPiece:
    """What goes into one part of a transfer.

    Attributes:
        num_ranges: How many ranges of the feed it joins, and leaves out before them.
        copies: Their staged copies, in order of layers; None where one is missing.
    """

    span: KVSpan
    num_ranges: int
    copies: list[Any] | None


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

    Args:
        num_layers: Layers that the prompt is computed with.
        bytes_per_token_layer: KV bytes of one token in one layer.

    Attributes:
        wants_copies: Whether it is worth copying KV out while the pass goes on; read by the
            engine thread.
    """

    def __init__(self, staging: StagingBudget, num_layers: int, bytes_per_token_layer: int) -> None:
        self.wants_copies = True
        self._num_layers = num_layers
        self._bytes_per_token_layer = bytes_per_token_layer
        self._held: KVSpan | None = None  # of the engine thread alone
        self._staging = staging
        self._ranges: list[KVSpan] = []
        self._copies: dict[int, Any] = {}
        self._is_complete = False
        self._changed = asyncio.Event()

    def join(self, span: KVSpan) -> KVSpan | None:
        """Hold layers back until they are a part worth sending; on the engine thread.

        A short prompt's KV goes as one part, a long one's group by group while the next group is
        computed.

        Args:
            span: Follows the one before: the next layers of the same positions, or the first
                layers of the next positions, or of the same where their pass is run again.

        Returns:
            What is to be added to the feed now; None: nothing yet.
        """
        if self._held is not None and span.first_layer:
            span = replace(span, first_layer=self._held.first_layer)
        is_last = span.stop_layer == self._num_layers
        is_ready = is_last or self._bytes_of(span) >= MIN_PART_BYTES
        self._held = None if is_ready else span
        return span if is_ready else None

    def add(self, span: KVSpan, kv: Any) -> None:
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

    async def next(self, index: int, held_tokens: int = 0) -> KVPiece | None:
        """What to send from range number `index` on, when it is there; None after the last.

        Ranges that wait already are joined as far as they make one part of a sensible size: a
        short prompt goes in one piece, a long one layer group by layer group.

        Args:
            held_tokens: Positions, from the first on, that the destination has: they are left out.
        """
        begin = index
        while True:
            while index >= len(self._ranges):
                if self._is_complete:
                    return None
                self._changed.clear()
                await self._changed.wait()
            stop = self._end_of_part(index)
            first, last = self._ranges[index], self._ranges[stop - 1]
            copies = [self._take_copy(i) for i in range(index, stop)]
            index, start = stop, max(first.start, held_tokens)
            if start < first.stop:
                break
        span = KVSpan(first.first_layer, last.stop_layer, start, first.stop)
        # What the destination has in part is read again: copies are cut on no stream of a device.
        is_whole = None not in copies and start == first.start
        return KVPiece(span, stop - begin, copies if is_whole else None)

    def _end_of_part(self, index: int) -> int:
        """Ranges [index, end) make one part: the same positions, layer after layer."""
        first = self._ranges[index]
        end = index + 1
        layer = first.stop_layer
        num_bytes = self._bytes_of(first)
        while end < len(self._ranges):
            span = self._ranges[end]
            num_bytes += self._bytes_of(span)
            is_next = span.first_layer == layer
            is_here = (span.start, span.stop) == (first.start, first.stop)
            if not (is_next and is_here) or num_bytes > MAX_JOINED_BYTES:
                break
            layer = span.stop_layer
            end += 1
        return end

    def _bytes_of(self, span: KVSpan) -> int:
        return span.num_cells * self._bytes_per_token_layer

    def _take_copy(self, index: int) -> Any:
        """The staged copy of a range, once; None when there is none (any more)."""
        kv = self._copies.pop(index, None)
        if kv is not None:
            self._staging.give_back(kv.nbytes)
        return kv

    def close(self) -> None:
        """Drop what is staged and stage no more."""
        self.wants_copies = False
        for index in list(self._copies):
            self._take_copy(index)
