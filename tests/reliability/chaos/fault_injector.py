"""The faults: how each is done to a victim, and undone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass, field

from loadgen.wire.capture import now_s
from tests.reliability.chaos.fault_matrix import Cell, Fault, Moment, Victim
from tests.reliability.chaos.injection_points import InjectionPoint, candidates
from tests.reliability.cluster.agent_client import AgentError
from tests.reliability.cluster.stages import Process, ServiceUnderTest

WAKE_AFTER_S = 25.0
"""A process that is stopped in mid-stream sleeps until it was replaced, and for so long at most.
One that is stopped earlier is woken as soon as the streams have ended. What either does then is
part of the test."""
STALL_S = 8.0
"""Longer than a hand-off may take."""
CUT_S = 12.0
MAX_CUT_S = 45.0
"""A node is cut off until Ray has found out, between these two."""
MAX_MOVES = 30
END_TIMEOUT_S = 12.0
LOOK_EVERY_S = 0.25
MEMBER_LOOKS = 3
"""A node is let go on that is found alive so often."""


@dataclass(slots=True)
class InjectedFault:
    """What was done, and to whom.

    Attributes:
        pids: Processes outside of the hand's sight that were stopped with their node.
        node: That was cut off or struck as a whole.
    """

    cell: Cell
    victim: Process
    injected_s: float = 0.0
    pids: list[int] = field(default_factory=list)
    node: str | None = None


async def prepare(under_test: ServiceUnderTest, cell: Cell, rng: random.Random) -> Process | None:
    """Harm the transport of a replica before the streams come, where that is the cell's moment.

    Raises: OrderFailed.
    """
    is_early = cell.moment is Moment.BEFORE_FIRST_TOKEN
    if cell.fault not in (Fault.STALL, Fault.CORRUPTION) or not is_early:
        return None
    name = rng.choice(await under_test.agent.call("serving", cell.victim.value))
    await _harm_transport(under_test, cell, name, rng)
    return await under_test.process(name)


async def inject(
    under_test: ServiceUnderTest,
    cell: Cell,
    victim: Process,
    injection: InjectionPoint,
    rng: random.Random,
) -> InjectedFault:
    """Do it. Raises: OrderFailed."""
    injected = InjectedFault(cell, victim, now_s())
    if cell.victim is Victim.NODE or cell.fault is Fault.PARTITION:
        await _strike_node(under_test, injected)
    elif cell.fault in (Fault.KILL, Fault.STOP):
        await under_test.agent.call("signal", victim.pid, int(cell.fault.number))
    elif cell.fault is Fault.MEMORY:
        with suppress(AgentError):  # it may die of it at once
            await under_test.agent.call("do", victim.name, "eat")
    elif cell.fault is Fault.DISK:
        await under_test.agent.call("do", victim.name, "fill_logs")
    elif cell.moment is not Moment.BEFORE_FIRST_TOKEN:
        await _harm_transport(under_test, cell, victim.name, rng)
        await again(under_test, injected, injection)
    return injected


async def again(
    under_test: ServiceUnderTest, injected: InjectedFault, injection: InjectionPoint
) -> None:
    """Have things move that the fault may meet, where nothing moves by itself.

    Raises: OrderFailed.
    """
    cell = injected.cell
    if cell.fault in (Fault.STALL, Fault.CORRUPTION) and cell.moment is Moment.COPY:
        await _move_until_hit(under_test, injection, injected.victim.name)


async def _harm_transport(
    under_test: ServiceUnderTest, cell: Cell, name: str, rng: random.Random
) -> None:
    seed = rng.randrange(1 << 30)
    if cell.fault is Fault.CORRUPTION:
        await under_test.agent.call("do", name, "harm_sending", "corrupt", seed, STALL_S)
    elif cell.victim in (Victim.DESTINATION, Victim.DECODE):
        await under_test.agent.call("do", name, "harm_receiving", STALL_S)
    else:
        await under_test.agent.call("do", name, "harm_sending", "stall", seed, STALL_S)


async def _move_until_hit(
    under_test: ServiceUnderTest, injection: InjectionPoint, name: str
) -> None:
    """Move sequences from source to destination until one meets the fault."""
    source, destination = injection.parts[Victim.SOURCE], injection.parts[Victim.DESTINATION]
    for _ in range(MAX_MOVES):
        if await under_test.agent.call("do", name, "num_hits"):
            return
        here = (await candidates(under_test))[source]
        if not here:
            await asyncio.sleep(LOOK_EVERY_S)
            continue
        move = under_test.agent.call("migrate", here[0], source, destination)
        task = asyncio.create_task(move)
        injection.tasks.append(task)
        await asyncio.wait({task}, timeout=1.0)


async def _strike_node(under_test: ServiceUnderTest, injected: InjectedFault) -> None:
    injected.node = under_test.node_of(injected.victim.node)
    if injected.cell.fault is Fault.PARTITION:
        await under_test.on_nodes("set_link", injected.node, is_up=False)
        return
    if injected.cell.fault is Fault.DISK:
        await under_test.on_nodes("fill_disk", injected.node)
        return
    injected.pids = await under_test.on_nodes("processes", injected.node)
    if not injected.pids:
        raise AgentError(f"nothing runs on {injected.node}")
    for pid in injected.pids:
        _signal(pid, injected.cell.fault.number)


async def has_met_nothing(under_test: ServiceUnderTest, injected: InjectedFault) -> bool:
    """Whether none of the parts that it is about has come yet. Raises: OrderFailed."""
    if injected.cell.fault not in (Fault.STALL, Fault.CORRUPTION):
        return False
    return not await under_test.agent.call("do", injected.victim.name, "num_hits")


async def until_it_may_wake(under_test: ServiceUnderTest, injected: InjectedFault) -> None:
    """Leave it as it is until it was replaced, or for long enough; the streams have ended."""
    cell = injected.cell
    if cell.fault is Fault.PARTITION:
        await asyncio.sleep(max(0.0, injected.injected_s + CUT_S - now_s()))
        while now_s() - injected.injected_s < MAX_CUT_S:
            if not await _is_member(under_test, injected.victim.node):
                return
            await asyncio.sleep(LOOK_EVERY_S)
        return
    if cell.fault is not Fault.STOP or cell.moment is Moment.BEFORE_FIRST_TOKEN:
        return
    while now_s() - injected.injected_s < WAKE_AFTER_S:
        with suppress(AgentError):
            if not await under_test.agent.call("signal", injected.victim.pid, 0):
                return
        await asyncio.sleep(LOOK_EVERY_S)


async def undo(under_test: ServiceUnderTest, injected: InjectedFault) -> str:
    """Make everything as it was, as far as it is there still.

    Returns:
        What is wrong with the blow: that it met nothing. Empty when all is well.
    """
    cell, victim = injected.cell, injected.victim
    if injected.node is not None:
        await _undo_node(under_test, injected)
        return ""
    if cell.fault is Fault.STOP:
        await under_test.agent.call("signal", victim.pid, int(signal.SIGCONT))
    elif cell.fault is Fault.MEMORY:
        await under_test.agent.call("unlimit", victim.pid)
        with suppress(AgentError):
            await under_test.agent.call("do", victim.name, "digest")
    elif cell.fault is Fault.DISK:
        with suppress(AgentError):
            await under_test.agent.call("do", victim.name, "empty_logs")
    elif cell.fault in (Fault.STALL, Fault.CORRUPTION):
        hits = await under_test.agent.call("do", victim.name, "be_well")
        return "" if hits else "the fault has met no part of any KV"
    return ""


async def _undo_node(under_test: ServiceUnderTest, injected: InjectedFault) -> None:
    assert injected.node is not None
    if injected.cell.fault is Fault.PARTITION:
        await under_test.on_nodes("set_link", injected.node, is_up=True)
    elif injected.cell.fault is Fault.DISK:
        await under_test.on_nodes("free_disk", injected.node)
        return
    elif injected.cell.fault is Fault.STOP:
        for pid in injected.pids:
            _signal(pid, signal.SIGCONT)
    # A node that was taken for dead ends its own processes when it hears of it.
    give_up_s = now_s() + END_TIMEOUT_S
    looks = 0
    while now_s() < give_up_s and await under_test.on_nodes("processes", injected.node):
        await asyncio.sleep(3.0)  # it may be taken for dead just now
        looks = looks + 1 if await _is_member(under_test, injected.victim.node) else 0
        if looks == MEMBER_LOOKS:
            return
    for pid in await under_test.on_nodes("processes", injected.node):
        _signal(pid, signal.SIGKILL)
    await under_test.on_nodes("start_node", injected.node)


async def _is_member(under_test: ServiceUnderTest, address: str) -> bool:
    """Whether Ray counts a node as alive."""
    try:
        return bool(await under_test.agent.call("is_member", address))
    except AgentError:
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
