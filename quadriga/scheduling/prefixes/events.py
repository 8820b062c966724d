"""Which blocks a cache of prefixes keeps, told to readers in other processes.

A reader asks again and again, each time with the number of the last event that it was told, and is
told what has changed since. What came and went in between is left out. A reader that is new, or has
missed more than is remembered, is told to forget all (`AllBlocksCleared`), and then all that is
kept. So whoever applies the events in order knows what is kept, whatever was missed.

Neither tokens nor salts are told: a block is known by its key, which is a hash of both.

Source: the kinds of events and their fields are those of vLLM's KV events; differs: as said above.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from quadriga.clock import Clock
from quadriga.errors import Overloaded

MAX_REMOVED = 8_192
"""Blocks that were let go and are remembered; the oldest are forgotten first."""
SHARE, AHEAD_S = 0.05, 1.0
"""Of the engine's time, that telling may take; it may be spent ahead for so long."""


class KVEvents:
    """What became of the blocks of one cache, numbered; 1 is its beginning.

    Not thread-safe: the engine's thread owns it.
    """

    def __init__(self) -> None:
        self._seq = self._known_from = 1
        self._stored: dict[bytes, tuple[int, bytes | None]] = {}
        self._removed: deque[tuple[int, bytes]] = deque()

    def stored(self, key: bytes, parent: bytes | None) -> None:
        """A block is kept from now on; `parent` is the one before it in its prefix."""
        self._seq += 1
        self._stored[key] = self._seq, parent

    def removed(self, key: bytes) -> None:
        """A block was let go."""
        self._seq += 1
        del self._stored[key]
        self._removed.append((self._seq, key))
        if len(self._removed) > MAX_REMOVED:
            self._known_from, _ = self._removed.popleft()  # who was told of it lacks none

    def since(self, after: int) -> dict[str, Any]:
        """What has changed since event `after`, as plain values; 0: nothing is known.

        Returns:
            `seq`, which is `after` of the next question, and `events`, blocks before those behind
            them.
        """
        events: list[dict[str, Any]] = []
        if self._known_from <= after <= self._seq:
            removed = takewhile(lambda entry: entry[0] > after, reversed(self._removed))
            if hashes := [key.hex() for _, key in removed]:
                events.append({"type": "BlockRemoved", "block_hashes": hashes[::-1]})
        else:
            events.append({"type": "AllBlocksCleared"})
            after = 0
        stored = takewhile(lambda entry: entry[1][0] > after, reversed(self._stored.items()))
        last = None
        for key, (_, parent) in reversed([*stored]):
            if parent is None or parent != last:
                before = None if parent is None else parent.hex()
                events.append({"type": "BlockStored", "block_hashes": []})
                events[-1]["parent_block_hash"] = before
            events[-1]["block_hashes"].append(key.hex())
            last = key
        return {"seq": self._seq, "events": events}


class TimeShare:
    """Keeps what telling takes within its share of the time of an engine, whose thread owns it."""

    def __init__(self, replica: str, clock: Clock) -> None:
        self._replica, self._clock, self._due_s = replica, clock, 0.0

    def spend(self, tell: Callable[[int], dict[str, Any]], after: int) -> dict[str, Any]:
        """Tell, and count the time. Raises: Overloaded: Too much was; says when to come back."""
        began_s = self._clock.now_s()
        wait_s = self._due_s - began_s - AHEAD_S
        if wait_s > 0.0:
            why = f"{self._replica} has told of its blocks too often; ask again in {wait_s:.1f} s"
            raise Overloaded(why, retry_after_s=wait_s)
        told = tell(after)
        self._due_s = max(began_s, self._due_s) + (self._clock.now_s() - began_s) / SHARE
        return told
