"""The KV of a sequence on its way from the rows to a peer."""

from __future__ import annotations

import asyncio

from actors.kv_feed import KVFeed, KVRange, StagingBudget


class Copy:
    """Stands for a tensor."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def span(i: int) -> KVRange:
    return KVRange(i, 1, 0, 10)


async def test_ranges_come_in_order_and_then_the_end() -> None:
    feed = KVFeed(StagingBudget())
    waiting = asyncio.create_task(feed.next(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.add(span(0), None)
    assert await waiting == span(0)
    feed.add(span(1), None)
    feed.complete()
    assert await feed.next(1) == span(1)
    assert await feed.next(2) is None
    assert await feed.next(0) == span(0), "a second try starts from the beginning"


async def test_copies_are_given_out_once_and_given_back() -> None:
    staging = StagingBudget(100)
    feed = KVFeed(staging)
    copy = Copy(60)
    staging.take(60)
    feed.add(span(0), copy)
    assert staging.has_room
    staging.take(60)
    feed.add(span(1), Copy(60))
    assert not staging.has_room
    assert feed.take_copy(0) is copy
    assert feed.take_copy(0) is None
    assert staging.held_bytes == 60
    feed.close()
    assert staging.held_bytes == 0


async def test_a_closed_feed_keeps_no_copy() -> None:
    staging = StagingBudget(100)
    feed = KVFeed(staging)
    feed.close()
    staging.take(60)
    feed.add(span(0), Copy(60))
    assert staging.held_bytes == 0
    assert feed.take_copy(0) is None
