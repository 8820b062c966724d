"""Memory promised as it is used: who is let in, who makes room, and who comes back first."""

from __future__ import annotations

import pytest

from quadriga.batching.slots import BLOCK_TOKENS
from quadriga.errors import ContextTooLong, KVCacheExhausted
from tests.crowded_replica import Replica


def test_many_fit_by_what_they_use_and_all_end() -> None:
    """By their longest, two would fit; ten run to their end, with pauses on the way."""
    replica = Replica(rows=10)
    for i in range(10):
        replica.take(f"s{i}", max_tokens=60 + 4 * i)
    assert replica.loop.num_running == 10
    replica.finish()
    assert replica.loop.num_pauses > 3
    assert replica.loop.num_resumes == replica.loop.num_pauses


def test_newcomers_are_let_in_up_to_the_mark() -> None:
    replica = Replica(rows=30)
    for i in range(288 // BLOCK_TOKENS):
        replica.take(f"s{i}", max_tokens=10)
    with pytest.raises(KVCacheExhausted, match="up to 288 tokens"):
        replica.take("one too many")
    assert replica.loop.num_pauses == 0
    replica.finish()


def test_nothing_is_paused_by_the_longest() -> None:
    replica = Replica(reservation="longest")
    assert replica.take("a").priority == 0
    assert replica.loop.least_priority is None
    replica.take("b", max_tokens=140)
    with pytest.raises(KVCacheExhausted, match="tokens are free"):
        replica.take("important", priority=-9, max_tokens=140)
    replica.finish()
    assert replica.loop.num_pauses == 0


def test_the_important_take_the_place_of_the_least_important() -> None:
    """Of three in three rows: first by priority, then the longest remaining."""
    replica = Replica(rows=3)
    replica.take("first", priority=1, max_tokens=50)
    replica.take("least", priority=5, max_tokens=40)
    replica.take("long", priority=1, max_tokens=90)
    assert replica.loop.least_priority == 5
    with pytest.raises(KVCacheExhausted, match="0 of 3 rows"):
        replica.take("equal", priority=5)
    replica.take("important", priority=0)
    assert replica.paused == {"least"}
    replica.take("more important", priority=-1)
    assert replica.paused == {"least", "long"}
    assert replica.loop.least_priority == 1
    replica.finish()


def test_the_paused_come_before_newcomers_of_their_rank() -> None:
    replica = Replica()
    replica.take("a")
    replica.take("b")
    assert replica.loop.pause("b")
    with pytest.raises(KVCacheExhausted, match="1 paused sequences wait"):
        replica.take("c")
    replica.take("urgent", priority=-1)
    assert replica.paused == {"b"}
    replica.finish()
    assert replica.loop.num_resumes == replica.loop.num_pauses >= 1


def test_who_cannot_be_paused_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(rows=1)
    replica.take("runs", priority=5, max_tokens=30)

    def full(row: int) -> object:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(replica.loop._preemption._runner, "suspend", full)
        with pytest.raises(MemoryError):
            replica.take("important", priority=0)
    assert replica.paused == set() and replica.loop.num_running == 1
    replica.finish()


def test_nobody_is_paused_in_vain() -> None:
    replica = Replica(rows=2)
    replica.take("important", prompt=150, max_tokens=5, priority=0)
    replica.take("other", prompt=60, max_tokens=5, priority=1)
    with pytest.raises(KVCacheExhausted):
        replica.take("large", prompt=140, max_tokens=10, priority=0)
    with pytest.raises(ContextTooLong):
        replica.take("larger than a row", prompt=150, max_tokens=11, priority=-1)
    assert replica.loop.num_pauses == 0
    replica.finish()


def test_an_engine_whose_room_is_all_promised_does_not_spin() -> None:
    """Who is paused for one on its way waits for it; until then there is nothing to do."""
    replica = Replica(rows=1)
    replica.take("low", max_tokens=20, priority=5)
    replica.loop.reserve("urgent", 160, 150, priority=-1)
    assert replica.paused == {"low"}
    assert not replica.loop.has_work
    replica.loop.leave("urgent")
    assert replica.loop.has_work
    replica.finish()
    assert replica.loop.num_resumes == 1
