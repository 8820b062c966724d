"""Sequences that find no decode room wait in one line, the most important first."""

from __future__ import annotations

import asyncio

import pytest

from actors.kv_transfer.prefill_handoff import STARVING_S, PlacementQueue


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served_among_equals_and_the_important_first() -> None:
    line, served = PlacementQueue(), []
    gates = {name: asyncio.Event() for name in ("a", "b", "c", "urgent")}

    async def wait(name: str, priority: int) -> None:
        async with line.turn(priority):
            served.append(name)
            await gates[name].wait()

    assert line.is_free_for(0)
    async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
        for name, priority in (("a", 0), ("b", 1), ("c", 0)):
            tasks.create_task(wait(name, priority))
            await settle()
        assert served == ["a"]
        assert not line.is_free_for(0)
        assert line.is_free_for(-1)
        tasks.create_task(wait("urgent", -1))
        await settle()
        assert served == ["a", "urgent"], "beside the one that is being served"
        for name in ("urgent", "a", "c", "b"):
            gates[name].set()
            await settle()
        assert served == ["a", "urgent", "c", "b"]
    assert line.is_free_for(10**9)


async def test_whoever_gives_up_makes_way() -> None:
    line = PlacementQueue()
    async with asyncio.timeout(5.0), line.turn(0):
        gone = asyncio.create_task(line.turn(1).__aenter__())
        after = asyncio.create_task(line.turn(2).__aenter__())
        await settle()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert not after.done()
    await asyncio.wait_for(after, 5.0)


async def test_nobody_waits_for_ever_behind_the_important() -> None:
    now_s = [0.0]
    line, served = PlacementQueue(lambda: now_s[0]), []
    names = ("first", "important", "more important", "humble")
    gates = {name: asyncio.Event() for name in names}

    async def wait(name: str, priority: int) -> None:
        async with line.turn(priority):
            served.append(name)
            await gates[name].wait()

    async with asyncio.timeout(5.0), asyncio.TaskGroup() as tasks:
        for name, priority in (("first", 0), ("humble", 9), ("important", 0)):
            tasks.create_task(wait(name, priority))
            await settle()
        gates["first"].set()
        await settle()
        assert served == ["first", "important"]
        tasks.create_task(wait("more important", -5))
        await settle()
        assert served[2:] == ["more important"]
        assert line.is_free_for(-9)
        now_s[0] = STARVING_S + 0.5
        gates["important"].set()
        await settle()
        assert served[3:] == ["humble"], "it has waited for long enough"
        assert not line.is_free_for(-9)
        for gate in gates.values():
            gate.set()


async def test_whoever_starves_is_called_though_nobody_comes_or_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, now_s = asyncio.get_running_loop(), [0.0]
    monkeypatch.setattr(loop, "time", lambda: now_s[0])
    line, served = PlacementQueue(loop.time), []
    gates = {name: asyncio.Event() for name in ("first", "humble", "important")}

    async def wait(name: str, priority: int) -> None:
        async with line.turn(priority):
            served.append(name)
            await gates[name].wait()

    async with asyncio.TaskGroup() as tasks:
        for name, priority in (("first", 5), ("humble", 5), ("important", 0)):
            tasks.create_task(wait(name, priority))
            await settle()
        gates["first"].set()
        now_s[0] = STARVING_S - 0.5
        await settle()
        assert served == ["first", "important"]
        now_s[0] = STARVING_S
        await settle()
        assert served[2:] == ["humble"], "beside the important one, for whom there is no room"
        for gate in gates.values():
            gate.set()
