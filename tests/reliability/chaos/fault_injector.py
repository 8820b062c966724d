"""The faults: how each is done to a victim, and undone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass, field

from loadgen.runner import now_s
from tests.reliability.chaos.fault_matrix import Cell, Fault, Moment, Victim
from tests.reliability.chaos.injection_points import Scene, candidates
from tests.reliability.cluster.agent_client import OrderFailed
from tests.reliability.cluster.stages import Process, Rig

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
class Blow:
    """What was done, and to whom.

    Attributes:
        pids: Processes outside of the hand's sight that were stopped with their node.
        node: That was cut off or struck as a whole.
    """

    cell: Cell
    victim: Process
    struck_s: float = 0.0
    pids: list[int] = field(default_factory=list)
    node: str | None = None


async def prepare(rig: Rig, cell: Cell, rng: random.Random) -> Process | None:
    """Harm the transport of a replica before the streams come, where that is the cell's moment.

    Raises: OrderFailed.
    """
    is_early = cell.moment is Moment.BEFORE_FIRST_TOKEN
    if cell.fault not in (Fault.STALL, Fault.CORRUPTION) or not is_early:
        return None
    name = rng.choice(await rig.orders.order("serving", cell.victim.value))
    await _harm_transport(rig, cell, name, rng)
    return await rig.process(name)


async def strike(rig: Rig, cell: Cell, victim: Process, scene: Scene, rng: random.Random) -> Blow:
    """Do it. Raises: OrderFailed."""
    blow = Blow(cell, victim, now_s())
    if cell.victim is Victim.NODE or cell.fault is Fault.PARTITION:
        await _strike_node(rig, blow)
    elif cell.fault in (Fault.KILL, Fault.STOP):
        await rig.orders.order("signal", victim.pid, int(cell.fault.number))
    elif cell.fault is Fault.MEMORY:
        with suppress(OrderFailed):  # it may die of it at once
            await rig.orders.order("do", victim.name, "eat")
    elif cell.fault is Fault.DISK:
        await rig.orders.order("do", victim.name, "fill_logs")
    elif cell.moment is not Moment.BEFORE_FIRST_TOKEN:
        await _harm_transport(rig, cell, victim.name, rng)
        await again(rig, blow, scene)
    return blow


async def again(rig: Rig, blow: Blow, scene: Scene) -> None:
    """Have things move that the fault may meet, where nothing moves by itself.

    Raises: OrderFailed.
    """
    cell = blow.cell
    if cell.fault in (Fault.STALL, Fault.CORRUPTION) and cell.moment is Moment.COPY:
        await _move_until_hit(rig, scene, blow.victim.name)


async def _harm_transport(rig: Rig, cell: Cell, name: str, rng: random.Random) -> None:
    seed = rng.randrange(1 << 30)
    if cell.fault is Fault.CORRUPTION:
        await rig.orders.order("do", name, "harm_sending", "corrupt", seed, STALL_S)
    elif cell.victim in (Victim.DESTINATION, Victim.DECODE):
        await rig.orders.order("do", name, "harm_receiving", STALL_S)
    else:
        await rig.orders.order("do", name, "harm_sending", "stall", seed, STALL_S)


async def _move_until_hit(rig: Rig, scene: Scene, name: str) -> None:
    """Move sequences from source to destination until one meets the fault."""
    source, destination = scene.parts[Victim.SOURCE], scene.parts[Victim.DESTINATION]
    for _ in range(MAX_MOVES):
        if await rig.orders.order("do", name, "num_hits"):
            return
        here = (await candidates(rig))[source]
        if not here:
            await asyncio.sleep(LOOK_EVERY_S)
            continue
        move = rig.orders.order("migrate", here[0], source, destination)
        task = asyncio.create_task(move)
        scene.tasks.append(task)
        await asyncio.wait({task}, timeout=1.0)


async def _strike_node(rig: Rig, blow: Blow) -> None:
    blow.node = rig.node_of(blow.victim.node)
    if blow.cell.fault is Fault.PARTITION:
        await rig.on_nodes("set_link", blow.node, is_up=False)
        return
    if blow.cell.fault is Fault.DISK:
        await rig.on_nodes("fill_disk", blow.node)
        return
    blow.pids = await rig.on_nodes("processes", blow.node)
    if not blow.pids:
        raise OrderFailed(f"nothing runs on {blow.node}")
    for pid in blow.pids:
        _signal(pid, blow.cell.fault.number)


async def has_met_nothing(rig: Rig, blow: Blow) -> bool:
    """Whether none of the parts that it is about has come yet. Raises: OrderFailed."""
    if blow.cell.fault not in (Fault.STALL, Fault.CORRUPTION):
        return False
    return not await rig.orders.order("do", blow.victim.name, "num_hits")


async def until_it_may_wake(rig: Rig, blow: Blow) -> None:
    """Leave it as it is until it was replaced, or for long enough; the streams have ended."""
    cell = blow.cell
    if cell.fault is Fault.PARTITION:
        await asyncio.sleep(max(0.0, blow.struck_s + CUT_S - now_s()))
        while now_s() - blow.struck_s < MAX_CUT_S:
            if not await _is_member(rig, blow.victim.node):
                return
            await asyncio.sleep(LOOK_EVERY_S)
        return
    if cell.fault is not Fault.STOP or cell.moment is Moment.BEFORE_FIRST_TOKEN:
        return
    while now_s() - blow.struck_s < WAKE_AFTER_S:
        with suppress(OrderFailed):
            if not await rig.orders.order("lives", blow.victim.pid):
                return
        await asyncio.sleep(LOOK_EVERY_S)


async def undo(rig: Rig, blow: Blow) -> str:
    """Make everything as it was, as far as it is there still.

    Returns:
        What is wrong with the blow: that it met nothing. Empty when all is well.
    """
    cell, victim = blow.cell, blow.victim
    if blow.node is not None:
        await _undo_node(rig, blow)
        return ""
    if cell.fault is Fault.STOP:
        await rig.orders.order("signal", victim.pid, int(signal.SIGCONT))
    elif cell.fault is Fault.MEMORY:
        await rig.orders.order("unlimit", victim.pid)
        with suppress(OrderFailed):
            await rig.orders.order("do", victim.name, "digest")
    elif cell.fault is Fault.DISK:
        with suppress(OrderFailed):
            await rig.orders.order("do", victim.name, "empty_logs")
    elif cell.fault in (Fault.STALL, Fault.CORRUPTION):
        hits = await rig.orders.order("do", victim.name, "be_well")
        return "" if hits else "the fault has met no part of any KV"
    return ""


async def _undo_node(rig: Rig, blow: Blow) -> None:
    assert blow.node is not None
    if blow.cell.fault is Fault.PARTITION:
        await rig.on_nodes("set_link", blow.node, is_up=True)
    elif blow.cell.fault is Fault.DISK:
        await rig.on_nodes("free_disk", blow.node)
        return
    elif blow.cell.fault is Fault.STOP:
        for pid in blow.pids:
            _signal(pid, signal.SIGCONT)
    # A node that was taken for dead ends its own processes when it hears of it.
    give_up_s = now_s() + END_TIMEOUT_S
    looks = 0
    while now_s() < give_up_s and await rig.on_nodes("processes", blow.node):
        await asyncio.sleep(3.0)  # it may be taken for dead just now
        looks = looks + 1 if await _is_member(rig, blow.victim.node) else 0
        if looks == MEMBER_LOOKS:
            return
    for pid in await rig.on_nodes("processes", blow.node):
        _signal(pid, signal.SIGKILL)
    await rig.on_nodes("start_node", blow.node)


async def _is_member(rig: Rig, address: str) -> bool:
    """Whether Ray counts a node as alive."""
    try:
        return bool(await rig.orders.order("is_member", address))
    except OrderFailed:
        return False


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
