"""A replica's line to the ingresses."""

from __future__ import annotations

import asyncio

import pytest

from actors.replica.output_dispatcher import MAX_SPACING_S, OutputDispatcher
from quadriga.clock import ManualClock, SystemClock
from quadriga.core.output import EngineOutput
from quadriga.core.request import FinishReason
from quadriga.errors import Cancelled


def token(index: int) -> EngineOutput:
    return EngineOutput("s", 0, first_index=index, token_ids=[index])


async def test_a_poll_waits_for_news_and_no_longer() -> None:
    mail = OutputDispatcher("x", SystemClock(), 2.0)
    waiting = asyncio.create_task(mail.poll("i", 0, 10.0))
    await asyncio.sleep(0)
    mail.put([("other", token(0))])
    await asyncio.sleep(0)
    assert not waiting.done()
    mail.put([("i", token(0))])
    async with asyncio.timeout(20):
        reply = await waiting
    assert [e.first_index for e in reply.emissions] == [0]
    empty = await mail.poll("i", reply.last_seq, 0.01)
    assert empty.emissions == []


async def test_a_lost_reply_is_given_again_at_once() -> None:
    mail = OutputDispatcher("x", SystemClock(), 2.0)
    mail.put([("i", token(0))])
    lost = await mail.poll("i", 0, 10.0)
    async with asyncio.timeout(20):
        again = await mail.poll("i", 0, 10.0)
    assert again.emissions == lost.emissions


def continuation(sequence_id: str, index: int) -> EngineOutput:
    return EngineOutput(sequence_id, 0, first_index=index, token_ids=[index])


async def a_reply_with_two_sequences(mail: OutputDispatcher) -> int:
    mail.put([("i", continuation("a", 1)), ("i", continuation("b", 1))])
    reply = await mail.poll("i", 0, 0.0)
    assert len(reply.emissions) == 2
    return reply.last_seq


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tokens_that_continue_are_gathered_while_the_ingress_is_busy() -> None:
    clock = ManualClock()
    mail = OutputDispatcher("x", clock, 2.0, spacing_s=0.005)
    ack = await a_reply_with_two_sequences(mail)
    waiting = asyncio.create_task(mail.poll("i", ack, 10.0))
    await settled()
    mail.put([("i", continuation("a", 2))])
    clock.advance(0.009)
    mail.put([("i", continuation("a", 3))])
    await settled()
    assert not waiting.done()
    clock.advance(0.002)
    async with asyncio.timeout(20):  # the timer of the event loop lets it go
        reply = await waiting
    assert [e.token_ids for e in reply.emissions] == [[2, 3]]


async def test_a_reply_that_comes_late_enough_is_not_held_back() -> None:
    clock = ManualClock()
    mail = OutputDispatcher("x", clock, 2.0, spacing_s=0.005)
    waiting = asyncio.create_task(mail.poll("i", await a_reply_with_two_sequences(mail), 10.0))
    await settled()
    clock.advance(0.010)
    mail.put([("i", continuation("a", 2))])
    await settled()
    assert waiting.done()


@pytest.mark.parametrize(
    "urgent",
    [
        token(0),
        EngineOutput("a", 0, 2, [2], finish=FinishReason.LENGTH),
        EngineOutput("a", 0, 2, error=Cancelled("gone")),
        EngineOutput("a", 0, 2, moved_to="other"),
    ],
    ids=["first token", "finish", "error", "move"],
)
async def test_what_somebody_waits_for_goes_out_at_once(urgent: EngineOutput) -> None:
    mail = OutputDispatcher("x", ManualClock(), 2.0, spacing_s=0.005)
    waiting = asyncio.create_task(mail.poll("i", await a_reply_with_two_sequences(mail), 10.0))
    await settled()
    mail.put([("i", continuation("b", 2))])
    await settled()
    assert not waiting.done()
    mail.put([("i", urgent)])
    await settled()
    assert waiting.done()
    assert len((await waiting).emissions) == 2


async def test_a_long_pause_is_cut() -> None:
    clock = ManualClock()
    mail = OutputDispatcher("x", clock, 2.0, spacing_s=1.0)
    waiting = asyncio.create_task(mail.poll("i", await a_reply_with_two_sequences(mail), 10.0))
    await settled()
    clock.advance(MAX_SPACING_S)
    mail.put([("i", continuation("a", 2))])
    await settled()
    assert waiting.done()


async def test_news_that_does_not_wake_goes_with_the_next() -> None:
    mail = OutputDispatcher("x", SystemClock(), 2.0)
    waiting = asyncio.create_task(mail.poll("i", 0, 10.0))
    await settled()
    mail.put([("i", EngineOutput("s", 0, moved_to="d"))], wakes=False)
    await settled()
    assert not waiting.done()
    mail.put([("i", token(0))])
    await settled()
    assert len((await waiting).emissions) == 2


async def test_closing_lets_polls_return() -> None:
    mail = OutputDispatcher("x", SystemClock(), 2.0)
    waiting = asyncio.create_task(mail.poll("i", 0, 10.0))
    await asyncio.sleep(0)
    mail.close()
    async with asyncio.timeout(20):
        assert (await waiting).emissions == []


async def test_silence_is_measured_by_ingress_and_over_all() -> None:
    clock = ManualClock()
    mail = OutputDispatcher("x", clock, 2.0)
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
    mail = OutputDispatcher("x", clock, 2.0)
    mail.put([("gone", token(0))])
    clock.advance(3.0)
    mail.put([("here", token(0))])
    clock.advance(1.5)
    mail.drop_absent()
    assert mail.has_pending
    reply = await mail.poll("here", 0, 0.0)
    await mail.poll("here", reply.last_seq, 0.0)
    assert not mail.has_pending


async def test_who_drains_does_not_wait_for_those_who_fetch_nothing_more() -> None:
    """An ingress whose last sequence here was cancelled polls no more, and lives on."""
    clock = ManualClock()
    mail = OutputDispatcher("x", clock, 2.0)
    mail.put([("i", token(0))])
    await mail.poll("i", 0, 0.0)
    mail.put([("i", token(1))])  # said before the cancellation came
    for _ in range(3):
        clock.advance(2.0)
        mail.hear("i")
        mail.drop_absent()
    assert not mail.has_pending


async def test_who_stood_still_heard_nobody() -> None:
    """A machine that was frozen for a minute has lost no ingress."""
    clock = ManualClock()
    mail = OutputDispatcher("x", clock, 2.0)
    mail.hear("a")
    clock.advance(63.0)
    mail.stood_still(61.0)
    assert mail.silence_s == 2.0
    assert mail.silent(longer_than_s=1.0) == {"a": 2.0}
    mail.stood_still(5.0)
    assert mail.silence_s == 0.0, "nobody was heard in the future"
