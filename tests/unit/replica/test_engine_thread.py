"""The thread that owns a loop: commands between steps, failures that reach somebody."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from quadriga.errors import InvalidRequest, QuadrigaError, ReplicaError, Unavailable
from quadriga.replica.engine_thread import EngineBroken, EngineThread
from tests.waiting import until


class Core:
    """Counts its steps; works until told otherwise."""

    def __init__(self) -> None:
        self.has_work = False
        self.num_steps = 0
        self.num_published = 0
        self.fails = False

    def step(self) -> None:
        self.num_steps += 1
        if self.fails:
            raise RuntimeError("the device is lost")

    def publish(self) -> None:
        self.num_published += 1


async def start(
    core: Core | None = None, nice: int = 0
) -> tuple[EngineThread[Core], list[QuadrigaError]]:
    failures: list[QuadrigaError] = []
    engine = EngineThread(lambda: core or Core(), failures.append, nice)
    engine.start()
    await until(lambda: engine.is_ready)
    return engine, failures


async def end(engine: EngineThread[Core]) -> None:
    engine.stop()
    assert await engine.join(60)


async def test_commands_run_on_the_thread_and_are_published_before_their_answer() -> None:
    engine, _ = await start()

    def command(core: Core) -> tuple[int, str]:
        return core.num_published, threading.current_thread().name

    num_published, thread = await engine.call(command)
    assert thread == "engine"
    assert engine.require_core().num_published > num_published
    await end(engine)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness on Linux alone")
async def test_a_yielding_engine_lowers_the_priority_of_its_thread_alone() -> None:
    def niceness(core: Core | None = None) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    engine, _ = await start(nice=3)
    assert await engine.call(niceness) == min(before + 3, 19)
    assert niceness() == before
    await end(engine)


async def test_a_command_is_served_while_the_loop_works() -> None:
    core = Core()
    core.has_work = True
    engine, _ = await start(core)
    first = await engine.call(lambda c: c.num_steps)
    async with asyncio.timeout(20):
        while await engine.call(lambda c: c.num_steps) <= first:
            pass
    await end(engine)


async def test_errors_of_commands_reach_their_callers_alone() -> None:
    engine, failures = await start()

    def refuse(core: Core) -> None:
        raise InvalidRequest("no")

    def crash(core: Core) -> None:
        raise ZeroDivisionError

    with pytest.raises(InvalidRequest):
        await engine.call(refuse)
    with pytest.raises(ReplicaError, match="ZeroDivisionError"):
        await engine.call(crash)
    assert await engine.call(lambda c: 5) == 5
    assert failures == []
    await end(engine)


async def test_a_command_that_fails_half_way_ends_the_engine() -> None:
    engine, failures = await start()

    def half(core: Core) -> None:
        raise EngineBroken("half of it")

    with pytest.raises(EngineBroken, match="half of it"):
        await engine.call(half)
    assert await engine.join(60)
    await asyncio.sleep(0)
    assert "half of it" in str(failures[0])
    with pytest.raises(Unavailable, match="has failed"):
        await engine.call(lambda c: None)


async def test_a_failing_step_is_the_end_of_the_engine() -> None:
    core = Core()
    engine, failures = await start(core)
    core.fails = True
    core.has_work = True
    assert await engine.join(60)
    await asyncio.sleep(0)
    assert "the device is lost" in str(failures[0])
    assert engine.error is failures[0]
    with pytest.raises(Unavailable, match="has failed"):
        await engine.call(lambda c: None)


async def test_a_failing_load_is_reported() -> None:
    failures: list[QuadrigaError] = []

    def load() -> Core:
        raise OSError("no such checkpoint")

    engine = EngineThread(load, failures.append)
    engine.start()
    assert await engine.join(60)
    await asyncio.sleep(0)
    assert "no such checkpoint" in str(failures[0])
    assert not engine.is_ready


async def test_nothing_is_served_before_the_load_is_done() -> None:
    may_load = threading.Event()

    def load() -> Core:
        may_load.wait(60)
        return Core()

    engine = EngineThread(load, lambda error: None)
    engine.start()
    with pytest.raises(Unavailable, match="starting"):
        await engine.call(lambda c: None)
    may_load.set()
    await end(engine)


async def test_commands_that_come_with_the_end_do_not_hang() -> None:
    engine, _ = await start()
    calls = [asyncio.create_task(engine.call(lambda c: 1)) for _ in range(50)]
    await asyncio.sleep(0)
    engine.stop()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert set(map(type, results)) <= {int, Unavailable}
    assert await engine.join(60)


async def test_whoever_waits_behind_a_break_is_told() -> None:
    core, may_step = Core(), threading.Event()
    engine, _ = await start(core)
    calls = [asyncio.create_task(engine.call(lambda c: may_step.wait(20)))]
    await asyncio.sleep(0)
    core.fails = core.has_work = True
    engine.break_off("a rank is gone")
    calls.append(asyncio.create_task(engine.call(lambda c: 1)))
    await asyncio.sleep(0)
    may_step.set()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert list(map(type, results)) == [bool, Unavailable]


async def test_an_idle_thread_that_is_woken_looks_for_work() -> None:
    core = Core()
    engine, _ = await start(core)
    await engine.call(lambda core: None)
    before = core.num_steps
    core.has_work = True
    engine.wake()
    await until(lambda: core.num_steps > before + 1000)  # idle, it makes four steps a second
    await end(engine)
