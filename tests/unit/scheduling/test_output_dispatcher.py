"""What a replica keeps for each ingress, when polls are answered, and who counts as silent."""

from __future__ import annotations

import asyncio

import pytest

from quadriga.clock import ManualClock, SystemClock
from quadriga.core.output import POLL_SLACK_S, EngineOutput
from quadriga.core.request import FinishReason
from quadriga.errors import Cancelled
from quadriga.scheduling.output_dispatcher import MAX_SPACING_S, OutputDispatcher
from tests.waiting import settled


def token(index: int, sequence_id: str = "s", token_id: int | None = None) -> EngineOutput:
    """A token whose id is its index, or a given one."""
    token_ids = [index if token_id is None else token_id]
    return EngineOutput(sequence_id, 0, first_index=index, token_ids=token_ids, exit_layers=[4])


async def test_a_poll_waits_for_news_and_no_longer() -> None:
    outputs = OutputDispatcher("x", SystemClock(), 2.0)
    waiting = asyncio.create_task(outputs.poll("i", 0, 10.0))
    await asyncio.sleep(0)
    outputs.put([("other", token(0))])
    await asyncio.sleep(0)
    assert not waiting.done()
    outputs.put([("i", token(0))])
    async with asyncio.timeout(20):
        reply = await waiting
    assert [e.first_index for e in reply.emissions] == [0]
    empty = await outputs.poll("i", reply.last_seq, 0.01)
    assert empty.emissions == []


async def test_a_lost_reply_is_given_again_at_once() -> None:
    outputs = OutputDispatcher("x", SystemClock(), 2.0)
    outputs.put([("i", token(0))])
    lost = await outputs.poll("i", 0, 10.0)
    async with asyncio.timeout(20):
        again = await outputs.poll("i", 0, 10.0)
    assert again.emissions == lost.emissions


async def two_sent(outputs: OutputDispatcher) -> int:
    outputs.put([("i", token(1, "a")), ("i", token(1, "b"))])
    reply = await outputs.poll("i", 0, 0.0)
    assert len(reply.emissions) == 2
    return reply.last_seq


async def test_tokens_that_continue_are_gathered_while_the_ingress_is_busy() -> None:
    clock = ManualClock()
    outputs = OutputDispatcher("x", clock, 2.0, spacing_s=0.005)
    ack = await two_sent(outputs)
    waiting = asyncio.create_task(outputs.poll("i", ack, 10.0))
    await settled()
    outputs.put([("i", token(2, "a"))])
    clock.advance(0.009)
    outputs.put([("i", token(3, "a"))])
    await settled()
    assert not waiting.done()
    clock.advance(0.002)
    async with asyncio.timeout(20):  # the timer of the event loop lets it go
        reply = await waiting
    assert [e.token_ids for e in reply.emissions] == [[2, 3]]


@pytest.mark.parametrize(
    ("spacing_s", "pause_s"),
    [(0.005, 0.010), (1.0, MAX_SPACING_S)],
    ids=["twice the spacing", "the longest there is"],
)
async def test_a_reply_that_comes_late_enough_is_not_held_back(
    spacing_s: float, pause_s: float
) -> None:
    clock = ManualClock()
    outputs = OutputDispatcher("x", clock, 2.0, spacing_s=spacing_s)
    waiting = asyncio.create_task(outputs.poll("i", await two_sent(outputs), 10.0))
    await settled()
    clock.advance(pause_s)
    outputs.put([("i", token(2, "a"))])
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
    clock = ManualClock()
    outputs = OutputDispatcher("x", clock, 2.0, spacing_s=0.005)
    waiting = asyncio.create_task(outputs.poll("i", await two_sent(outputs), 10.0))
    await settled()
    outputs.put([("i", token(2, "b"))])
    await settled()
    assert not waiting.done()
    outputs.put([("i", urgent)])
    await settled()
    assert waiting.done()
    reply = await waiting
    assert [e.sequence_id for e in reply.emissions] == [urgent.sequence_id], "the others wait"
    assert outputs.num_pending == 2
    waiting = asyncio.create_task(outputs.poll("i", reply.last_seq, 10.0))
    await settled()
    assert not waiting.done()
    clock.advance(0.010)
    async with asyncio.timeout(20):  # the timer of the event loop lets it go
        reply = await waiting
    assert [(e.sequence_id, e.token_ids) for e in reply.emissions] == [("b", [2])]


async def test_news_that_does_not_wake_goes_with_the_next() -> None:
    outputs = OutputDispatcher("x", SystemClock(), 2.0)
    waiting = asyncio.create_task(outputs.poll("i", 0, 10.0))
    await settled()
    outputs.put([("i", EngineOutput("s", 0, moved_to="d"))], wakes=False)
    await settled()
    assert not waiting.done()
    outputs.put([("i", token(0))])
    await settled()
    assert len((await waiting).emissions) == 2


async def test_closing_lets_polls_return() -> None:
    outputs = OutputDispatcher("x", SystemClock(), 2.0)
    waiting = asyncio.create_task(outputs.poll("i", 0, 10.0))
    await asyncio.sleep(0)
    outputs.close()
    async with asyncio.timeout(20):
        assert (await waiting).emissions == []


async def test_silence_is_measured_by_ingress_and_over_all() -> None:
    clock = ManualClock()
    outputs = OutputDispatcher("x", clock, 2.0)
    outputs.expect("a")
    clock.advance(3.0)
    outputs.hear("b")
    outputs.expect("a")
    clock.advance(2.0)
    assert outputs.silence_s == 2.0
    assert outputs.silent(longer_than_s=4.0) == {"a": 5.0}
    assert outputs.silent(longer_than_s=1.0) == {"a": 5.0, "b": 2.0}
    outputs.heard_of_any(0.5)
    assert outputs.silence_s == 0.5
    outputs.drop("a")
    assert outputs.silent(longer_than_s=4.0) == {}


async def test_who_drains_does_not_wait_for_the_absent() -> None:
    clock = ManualClock()
    outputs = OutputDispatcher("x", clock, 2.0)
    outputs.put([("gone", token(0))])
    clock.advance(7.0)
    outputs.put([("here", token(0))])
    clock.advance(1.5)
    outputs.drop_absent()
    assert outputs.num_pending
    reply = await outputs.poll("here", 0, 0.0)
    await outputs.poll("here", reply.last_seq, 0.0)
    assert not outputs.num_pending


async def test_who_drains_does_not_wait_for_those_who_fetch_nothing_more() -> None:
    """An ingress whose last sequence here was cancelled polls no more, and lives on."""
    clock = ManualClock()
    outputs = OutputDispatcher("x", clock, 2.0)
    outputs.put([("i", token(0))])
    await outputs.poll("i", 0, 0.0)
    outputs.put([("i", token(1))])  # said before the cancellation came
    for _ in range(5):
        clock.advance(2.0)
        outputs.hear("i")
        outputs.drop_absent()
    assert not outputs.num_pending


async def test_who_drains_waits_until_a_lost_reply_is_asked_for_again() -> None:
    clock = ManualClock()
    outputs = OutputDispatcher("x", clock, 2.0)
    outputs.put([("i", token(0))])
    await outputs.poll("i", 0, 0.0)
    clock.advance(2.0 + POLL_SLACK_S)
    outputs.drop_absent()
    assert len((await outputs.poll("i", 0, 0.0)).emissions) == 1


async def test_who_stood_still_heard_nobody() -> None:
    """A machine that was frozen for a minute has lost no ingress."""
    clock = ManualClock()
    outputs = OutputDispatcher("x", clock, 2.0)
    outputs.hear("a")
    clock.advance(63.0)
    outputs.stood_still(61.0)
    assert outputs.silence_s == 2.0
    assert outputs.silent(longer_than_s=1.0) == {"a": 2.0}
    outputs.stood_still(5.0)
    assert outputs.silence_s == 0.0, "nobody was heard in the future"


def test_unsent_tokens_are_put_together_and_sent_ones_never_change() -> None:
    outputs = OutputDispatcher("r1", ManualClock(), 2.0)
    outputs.put([("i", token(0, "a", 10))])
    outputs.put([("i", token(0, "b", 20))])
    outputs.put([("i", token(1, "a", 11))])
    first = outputs.collect("i", 0)
    assert [(e.sequence_id, e.token_ids) for e in first.emissions] == [("a", [10, 11]), ("b", [20])]
    outputs.put([("i", token(2, "a", 12))])
    second = outputs.collect("i", 0)
    assert [e.token_ids for e in second.emissions] == [[10, 11], [20], [12]]


def test_a_finish_is_merged_and_nothing_after_it() -> None:
    outputs = OutputDispatcher("r1", ManualClock(), 2.0)
    outputs.put([("i", token(0, "a"))])
    last = token(1, "a")
    last.finish = FinishReason.STOP
    outputs.put([("i", last)])
    outputs.put([("i", EngineOutput("a", epoch=1, moved_to="r2"))])
    emissions = outputs.collect("i", 0).emissions
    assert [e.finish for e in emissions] == [FinishReason.STOP, None]
    assert emissions[1].moved_to == "r2"


def test_a_gap_an_epoch_and_a_move_are_not_merged() -> None:
    outputs = OutputDispatcher("r1", ManualClock(), 2.0)
    outputs.put([("i", token(0, "a"))])
    outputs.put([("i", token(2, "a"))])
    later_epoch = token(3, "a")
    later_epoch.epoch = 1
    outputs.put([("i", later_epoch)])
    assert len(outputs.collect("i", 0).emissions) == 3


def test_a_partial_acknowledgement_keeps_the_rest() -> None:
    outputs = OutputDispatcher("r1", ManualClock(), 2.0)
    outputs.put([("i", token(0, "a"))])
    first = outputs.collect("i", 0)
    outputs.put([("i", token(1, "a"))])
    outputs.collect("i", 0)
    rest = outputs.collect("i", first.last_seq)
    assert [e.first_index for e in rest.emissions] == [1]
    assert outputs.num_pending == 1


def test_an_acknowledgement_of_what_was_never_sent_drops_nothing() -> None:
    outputs = OutputDispatcher("r1", ManualClock(), 2.0)
    outputs.put([("i", token(0, "a"))])
    assert len(outputs.collect("i", 99).emissions) == 1


def test_what_an_ingress_may_not_know_of_a_sequence() -> None:
    outputs = OutputDispatcher("r1", ManualClock(), 2.0)
    assert outputs.unacknowledged("i", "a") == []
    outputs.put([("i", token(0, "a", 10))])
    outputs.put([("i", token(0, "b", 20))])
    first = outputs.collect("i", 0)
    outputs.put([("i", token(1, "a", 11))])
    outputs.put([("i", EngineOutput("a", epoch=0, moved_to="r2", move="begun"))])
    outputs.put([("i", token(2, "a", 12))])
    assert [e.token_ids for e in outputs.unacknowledged("i", "a")] == [[10], [11], [12]]
    outputs.collect("i", first.last_seq)
    assert [e.token_ids for e in outputs.unacknowledged("i", "a")] == [[11], [12]]
    assert outputs.unacknowledged("another", "a") == []
