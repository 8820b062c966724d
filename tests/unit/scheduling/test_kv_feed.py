"""The KV of a sequence on its way from the rows to a peer."""

from __future__ import annotations

import asyncio

import pytest

from quadriga.core.kv import KVSpan
from quadriga.scheduling.transfer.kv_feed import (
    MAX_JOINED_BYTES,
    MIN_PART_BYTES,
    KVFeed,
    KVPiece,
    StagingBudget,
)


class Copy:
    """Stands for a tensor."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def span(layer: int, start: int = 0, stop: int = 10) -> KVSpan:
    return KVSpan(layer, layer + 1, start, stop)


async def test_ranges_come_in_order_and_then_the_end() -> None:
    feed = KVFeed(StagingBudget(), 6, 1)
    waiting = asyncio.create_task(feed.next(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.add(span(0), None)
    assert await waiting == KVPiece(span(0), 1, None)
    feed.add(span(1), None)
    feed.complete()
    assert await feed.next(1) == KVPiece(span(1), 1, None)
    assert await feed.next(2) is None
    assert await feed.next(0) == KVPiece(KVSpan(0, 2, 0, 10), 2, None), "a second try joins them"


async def test_only_neighbours_at_the_same_positions_are_joined() -> None:
    feed = KVFeed(StagingBudget(), 6, 1)
    for piece in (span(0), span(1), span(0, 10, 20), span(1, 10, 20), span(3, 10, 20)):
        feed.add(piece, None)
    assert await feed.next(0) == KVPiece(KVSpan(0, 2, 0, 10), 2, None)
    assert await feed.next(2) == KVPiece(KVSpan(0, 2, 10, 20), 2, None)
    assert await feed.next(4) == KVPiece(span(3, 10, 20), 1, None)
    feed = KVFeed(StagingBudget(), 6, MAX_JOINED_BYTES // 20)
    for layer in range(3):
        feed.add(span(layer), None)
    assert await feed.next(0) == KVPiece(KVSpan(0, 2, 0, 10), 2, None)
    assert await feed.next(2) == KVPiece(span(2), 1, None)


async def test_copies_are_given_out_once_and_given_back() -> None:
    staging = StagingBudget(100)
    feed = KVFeed(staging, 6, 1)
    copies = [Copy(60), Copy(60)]
    for layer, copy in enumerate(copies):
        staging.take(60)
        feed.add(span(layer), copy)
    assert staging.held_bytes == 120, "the bound may be passed by one copy"
    assert not staging.has_room
    piece = await feed.next(0)
    assert piece is not None
    assert piece.copies == copies
    assert staging.held_bytes == 0
    piece = await feed.next(0)
    assert piece is not None
    assert piece.copies is None


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_missing_copy_sends_all_of_a_piece_to_its_row(is_closed: bool) -> None:
    staging = StagingBudget(100)
    feed = KVFeed(staging, 6, 1)
    staging.take(60)
    feed.add(span(0), Copy(60))
    if is_closed:
        feed.close()
        staging.take(60)
    feed.add(span(1), Copy(60) if is_closed else None)
    assert await feed.next(0) == KVPiece(KVSpan(0, 2, 0, 10), 2, None)
    assert staging.held_bytes == 0


async def test_what_a_destination_has_in_part_is_read_from_its_row() -> None:
    feed = KVFeed(StagingBudget(), 6, 1)
    feed.add(span(0), Copy(60))
    assert await feed.next(0, held_tokens=4) == KVPiece(KVSpan(0, 1, 4, 10), 1, None)


def groups(start: int, stop: int) -> list[KVSpan]:
    return [KVSpan(layer, layer + 2, start, stop) for layer in (0, 2, 4)]


def test_a_short_prompts_layers_make_one_part_and_each_chunk_its_own() -> None:
    feed = KVFeed(StagingBudget(), 6, 1)
    sent = [feed.join(span) for span in (*groups(0, 64), *groups(64, 100))]
    assert sent == [None, None, KVSpan(0, 6, 0, 64), None, None, KVSpan(0, 6, 64, 100)]
    feed.join(groups(100, 150)[0])  # its pass lacked memory: it is run again, shorter
    assert [feed.join(span) for span in groups(100, 110)][-1] == KVSpan(0, 6, 100, 110)


def test_a_long_prompts_layers_go_as_soon_as_they_are_worth_it() -> None:
    feed = KVFeed(StagingBudget(), 6, MIN_PART_BYTES // 128)
    sent = [feed.join(span) for span in groups(0, 64)]
    assert sent == [KVSpan(0, 2, 0, 64), KVSpan(2, 4, 0, 64), KVSpan(4, 6, 0, 64)]
    sent = [feed.join(span) for span in groups(0, 32)]
    assert sent == [None, KVSpan(0, 4, 0, 32), KVSpan(4, 6, 0, 32)]
