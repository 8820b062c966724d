"""Sequences that find no decode room ask one after the other, the most important first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from quadriga.core.forecast import LengthPrediction
from quadriga.core.request import SamplingParams, SequenceState
from quadriga.scheduling.prefill_queue import STARVING_S
from quadriga.scheduling.sequence import RunningSequence
from quadriga.scheduling.transfer.placement_turns import PlacementTurns
from tests.waiting import settled


class Turns:
    """Sequences of one replica that wait for their turns, and keep them until a gate opens.

    Attributes:
        served: In the order in which they got their turns.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.sequences: dict[str, RunningSequence] = {}
        self.line = PlacementTurns(self.sequences, now_s)
        self.served: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    def add(self, name: str, priority: int) -> RunningSequence:
        params = SamplingParams(max_tokens=4)
        state = SequenceState(name, name, "m", [1], params, "i", 0.0, 1e12, priority=priority)
        sequence = self.sequences[name] = RunningSequence(state)
        return sequence

    async def wait(self, name: str, priority: int) -> None:
        gate = self.gates[name] = asyncio.Event()
        async with self.line.turn(self.add(name, priority)):
            self.served.append(name)
            await gate.wait()


async def test_important_sequences_first_and_equals_in_order_of_arrival() -> None:
    turns = Turns()
    served, line = turns.served, turns.line
    assert line.is_free_for(0)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for name, priority in (("a", 0), ("b", 1), ("c", 0)):
            tasks.create_task(turns.wait(name, priority))
            await settled()
        assert served == ["a"]
        assert not line.is_free_for(0)
        assert line.is_free_for(-1)
        tasks.create_task(turns.wait("urgent", -1))
        await settled()
        assert served == ["a", "urgent"], "beside the one that is being served"
        for name in ("urgent", "a", "c", "b"):
            turns.gates[name].set()
            await settled()
        assert served == ["a", "urgent", "c", "b"]
    assert line.is_free_for(10**9)


async def test_of_equal_importance_the_shortest_by_its_prediction_is_first() -> None:
    turns = Turns()
    served, gates = turns.served, turns.gates
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for name in ("first", "long", "short", "unknown"):
            tasks.create_task(turns.wait(name, 0))
            await settled()
        for name, tokens in (("long", 3.0), ("short", 1.0)):
            turns.sequences[name].state.prediction = LengthPrediction(tokens, 0.0, 4.0)
        assert served == ["first"]
        turns.line.call_heads()
        await settled()
        assert served == ["first", "short"], "its prompt is done: beside the one before it"
        for name in ("first", "short", "long", "unknown"):
            gates[name].set()
            await settled()
        assert served == ["first", "short", "long", "unknown"]


async def test_a_sequence_that_gives_up_lets_the_next_have_its_turn() -> None:
    turns = Turns()
    line = turns.line
    async with asyncio.timeout(60), line.turn(turns.add("a", 0)):
        gone = asyncio.create_task(line.turn(turns.add("b", 1)).__aenter__())
        after = asyncio.create_task(line.turn(turns.add("c", 2)).__aenter__())
        await settled()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert not after.done()
    await asyncio.wait_for(after, 60)


async def test_a_starving_sequence_comes_before_important_ones() -> None:
    now_s = [0.0]
    turns = Turns(lambda: now_s[0])
    served, line, gates = turns.served, turns.line, turns.gates

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for name, priority in (("first", 0), ("humble", 9), ("important", 0)):
            tasks.create_task(turns.wait(name, priority))
            await settled()
        gates["first"].set()
        await settled()
        assert served == ["first", "important"]
        tasks.create_task(turns.wait("more important", -5))
        await settled()
        assert served[2:] == ["more important"]
        assert line.is_free_for(-9)
        now_s[0] = STARVING_S + 0.5
        gates["important"].set()
        await settled()
        assert served[3:] == ["humble"], "it has waited for long enough"
        assert not line.is_free_for(-9)
        for gate in gates.values():
            gate.set()


async def test_a_sequence_gets_its_turn_when_it_begins_to_starve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, now_s = asyncio.get_running_loop(), [0.0]
    monkeypatch.setattr(loop, "time", lambda: now_s[0])
    turns = Turns(loop.time)
    served, gates = turns.served, turns.gates

    async with asyncio.TaskGroup() as tasks:
        for name, priority in (("first", 5), ("humble", 5), ("important", 0)):
            tasks.create_task(turns.wait(name, priority))
            await settled()
        gates["first"].set()
        now_s[0] = STARVING_S - 0.5
        await settled()
        assert served == ["first", "important"]
        now_s[0] = STARVING_S
        await settled()
        assert served[2:] == ["humble"], "beside the important one, for whom there is no room"
        for gate in gates.values():
            gate.set()
