"""A replica's line to the ingresses."""

from __future__ import annotations

import asyncio

from actors.mailroom import Mailroom
from quadriga.clock import ManualClock, SystemClock
from quadriga.types import Emission


def token(index: int) -> Emission:
    return Emission("s", 0, first_index=index, token_ids=[index])


async def test_a_poll_waits_for_news_and_no_longer() -> None:
    mail = Mailroom("x", SystemClock(), 2.0)
    waiting = asyncio.create_task(mail.poll("i", 0, 10.0))
    await asyncio.sleep(0)
    mail.put("other", token(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    mail.put("i", token(0))
    async with asyncio.timeout(20):
        reply = await waiting
    assert [e.first_index for e in reply.emissions] == [0]
    empty = await mail.poll("i", reply.last_seq, 0.01)
    assert empty.emissions == []


async def test_a_lost_reply_is_given_again_at_once() -> None:
    mail = Mailroom("x", SystemClock(), 2.0)
    mail.put("i", token(0))
    lost = await mail.poll("i", 0, 10.0)
    async with asyncio.timeout(20):
        again = await mail.poll("i", 0, 10.0)
    assert again.emissions == lost.emissions


async def test_closing_lets_polls_return() -> None:
    mail = Mailroom("x", SystemClock(), 2.0)
    waiting = asyncio.create_task(mail.poll("i", 0, 10.0))
    await asyncio.sleep(0)
    mail.close()
    async with asyncio.timeout(20):
        assert (await waiting).emissions == []


async def test_silence_is_measured_by_ingress_and_over_all() -> None:
    clock = ManualClock()
    mail = Mailroom("x", clock, 2.0)
    mail.expect("a")
    clock.advance(3.0)
    mail.hear("b")
    mail.expect("a")
    clock.advance(2.0)
    assert mail.silence_s == 2.0
    assert mail.silent(longer_than_s=4.0) == {"a": 5.0}
    assert mail.silent(longer_than_s=1.0) == {"a": 5.0, "b": 2.0}
    mail.heard_of_any(0.5)
    assert mail.silence_s == 0.5
    mail.drop("a")
    assert mail.silent(longer_than_s=4.0) == {}


async def test_who_drains_does_not_wait_for_the_absent() -> None:
    clock = ManualClock()
    mail = Mailroom("x", clock, 2.0)
    mail.put("gone", token(0))
    clock.advance(3.0)
    mail.put("here", token(0))
    clock.advance(1.5)
    mail.drop_absent()
    assert mail.has_pending
    reply = await mail.poll("here", 0, 0.0)
    await mail.poll("here", reply.last_seq, 0.0)
    assert not mail.has_pending
