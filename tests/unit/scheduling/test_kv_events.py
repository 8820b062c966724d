"""Events of a prefix cache: numbered, and enough for a reader whatever it has missed."""

from __future__ import annotations

from typing import Any

import pytest

from quadriga.clock import ManualClock
from quadriga.errors import Overloaded
from quadriga.scheduling.prefixes import events
from quadriga.scheduling.prefixes.events import KVEvents, TimeShare

A, B, C, D = (bytes([i]) for i in range(4))
CLEARED = {"type": "AllBlocksCleared"}


def stored(parent: str | None, *keys: str) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": [*keys], "parent_block_hash": parent}


def removed(*keys: str) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [*keys]}


def test_readers_are_told_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_REMOVED", 2)
    told = KVEvents()
    assert told.since(0) == {"seq": 1, "events": [CLEARED]} and not told.since(1)["events"]
    for key, parent in ((A, None), (B, A), (D, None), (C, B)):
        told.stored(key, parent)
    kept = [CLEARED, stored(None, "00", "01"), stored(None, "03"), stored("01", "02")]
    assert told.since(0) == {"seq": 5, "events": kept}
    told.removed(C)
    told.removed(B)
    told.stored(C, A)
    assert told.since(5)["events"] == [removed("02", "01"), stored("00", "02")]
    assert told.since(6)["events"] == [removed("01"), stored("00", "02")]
    assert told.since(8) == {"seq": 8, "events": []}
    told.removed(D)
    assert told.since(6)["events"] == [removed("01", "03"), stored("00", "02")]
    lost = [CLEARED, stored(None, "00", "02")]
    assert told.since(5)["events"] == lost, "more was let go than is remembered"
    assert told.since(10)["events"] == lost, "a number of another replica's"


def test_telling_takes_a_twentieth_of_the_engines_time_at_most() -> None:
    clock, waits_s, num_told = ManualClock(), [0.0], 0
    share = TimeShare("r", clock)
    while clock.now_s() < 40.0:
        try:
            share.spend(lambda after: clock.advance(0.04) or {}, 3)
            num_told += 1
        except Overloaded as exc:
            waits_s.append(exc.retry_after_s or 0.0)
        clock.advance(0.001)
    assert 50 <= num_told <= 53 and 0.5 < max(waits_s) < 1.0
    clock.advance(2.0)
    for _ in range(1000):  # what has changed is told whenever somebody asks
        share.spend(lambda after: clock.advance(0.00001) or {}, 3)
