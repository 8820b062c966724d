"""How a moment is reached: nothing is struck before it is truly there."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.runner import now_s
from tests.reliability.chaos.fault_matrix import IN_TRANSIT, MIGRATION, Cell, Moment, Victim
from tests.reliability.cluster.actor_patches import GO, HELD
from tests.reliability.cluster.agent_client import OrderFailed
from tests.reliability.cluster.stages import Process, Rig

FIRST_TOKEN_S = 0.15
"""About when the streams get their first tokens."""
MIN_TOKENS, MAX_TOKENS = 3, 60
"""Output of a sequence that is to move: it decodes, and will for longer than the move takes."""
REACHED_TIMEOUT_S = 20.0
HOLD_LIMIT_S = 12.0
LOOK_EVERY_S = 0.01
SHALLOW, DEEP = 4, 8
OTHER_MODEL, OTHER_DEPTH = "quadriga-l", 12
RESTORE_TIMEOUT_S = 60.0


class NotReached(Exception):
    """The moment did not come: the cell was not run."""


@dataclass(slots=True)
class Scene:
    """What is there when it is struck.

    Attributes:
        parts: Replica by its part: source, destination, or the one that changes.
        tasks: Orders under way; how they end is part of the cell.
        held: Where the protocol is held, if it is.
    """

    parts: dict[Victim, str] = field(default_factory=dict)
    tasks: list[asyncio.Task[str]] = field(default_factory=list)
    held: Path | None = None

    def let_go(self) -> None:
        """Let what is held go on."""
        if self.held is not None:
            (self.held / GO).touch()


@asynccontextmanager
async def reached(rig: Rig, cell: Cell, rng: random.Random, number: int) -> AsyncIterator[Scene]:
    """Wait for the cell's moment; the streams have just been sent.

    Args:
        number: Of the run, where a moment has two sides that are struck in turn.

    Raises:
        NotReached: It did not come.
    """
    scene = Scene()
    folder = Path(tempfile.mkdtemp(prefix="quadriga-hold-"))
    try:
        if cell.moment is Moment.BEFORE_FIRST_TOKEN:
            await asyncio.sleep(rng.uniform(0.0, FIRST_TOKEN_S))
        elif cell.moment is Moment.MID_STREAM:
            await asyncio.sleep(rng.uniform(0.4, 1.2))
        elif cell.moment in MIGRATION:
            await _begin_migration(rig, cell, scene, rng, folder, number)
        elif cell.moment is Moment.RESIZE:
            await _begin_resize(rig, cell, scene, rng, folder)
        else:
            await _begin_switch(rig, cell, scene)
        yield scene
    except OrderFailed as exc:
        raise NotReached(str(exc)) from exc
    finally:
        scene.let_go()
        for task in scene.tasks:
            with suppress(OrderFailed, TimeoutError):
                await asyncio.wait_for(task, HOLD_LIMIT_S)
        if cell.moment is Moment.SWITCH:
            await _restore(rig, "switch", "decode", 0, None, 0)
        await asyncio.to_thread(shutil.rmtree, folder, True)


async def make_deep(rig: Rig) -> str:
    """Give all replicas that serve their layers back. Returns what is wrong; empty: nothing."""
    give_up_s = now_s() + RESTORE_TIMEOUT_S
    while True:
        try:
            names = [
                n for role in ("prefill", "decode") for n in await rig.orders.order("serving", role)
            ]
            shallow = [n for n in names if await rig.orders.order("depth", n) != DEEP]
            for name in shallow:
                await rig.orders.order("resize", name, DEEP)
            if not shallow:
                return ""
            trouble = f"still shallow: {shallow}"
        except OrderFailed as exc:
            trouble = str(exc)
        if now_s() > give_up_s:
            return trouble
        await asyncio.sleep(0.5)


async def candidates(rig: Rig) -> dict[str, list[str]]:
    """Decode replicas, each with its sequences that could move now."""
    found: dict[str, list[str]] = {}
    for replica in await rig.orders.order("serving", "decode"):
        running = await rig.orders.order("running", replica)
        found[replica] = [s for s, n in running if MIN_TOKENS <= n <= MAX_TOKENS]
    return found


async def _begin_migration(
    rig: Rig, cell: Cell, scene: Scene, rng: random.Random, folder: Path, number: int
) -> None:
    give_up_s = now_s() + REACHED_TIMEOUT_S
    while True:
        here = await candidates(rig)
        if len(here) > 1 and any(here.values()):
            break
        if now_s() > give_up_s:
            raise NotReached("no sequence decodes that could move")
        await asyncio.sleep(LOOK_EVERY_S)
    source = max(here, key=lambda name: len(here[name]))
    destination = rng.choice([name for name in here if name != source])
    scene.parts |= {Victim.SOURCE: source, Victim.DESTINATION: destination}
    if cell.fault in IN_TRANSIT:
        return  # the transport is harmed first, then things move
    point = {
        Moment.RESERVE: "reserve",
        Moment.COPY: "copy",
        Moment.COMMIT: ("commit", "committed")[number % 2],
    }[cell.moment]
    at = source if point == "copy" else destination
    await rig.orders.order("do", at, "hold", point, str(folder), HOLD_LIMIT_S)
    scene.held = folder
    move = rig.orders.order("migrate", rng.choice(here[source]), source, destination)
    scene.tasks.append(asyncio.create_task(move))
    await _until_held(scene, folder)


async def _begin_resize(
    rig: Rig, cell: Cell, scene: Scene, rng: random.Random, folder: Path
) -> None:
    is_prefill = cell.victim is Victim.PREFILL and not cell.is_struck_first
    role = "prefill" if is_prefill else "decode"
    await asyncio.sleep(rng.uniform(0.3, 0.8))
    is_busy = role == "decode" and not cell.is_struck_first
    replica = (
        await _busy(rig, rng) if is_busy else rng.choice(await rig.orders.order("serving", role))
    )
    scene.parts[Victim(role)] = replica
    await rig.orders.order("do", replica, "hold", "change", str(folder), HOLD_LIMIT_S)
    scene.held = folder
    scene.tasks.append(asyncio.create_task(rig.orders.order("resize", replica, SHALLOW)))
    await _until_held(scene, folder)


async def _begin_switch(rig: Rig, cell: Cell, scene: Scene) -> None:
    """A place of decode is given to the other model; its new process is loading when struck."""
    old = next(n for n in await rig.orders.order("serving", "decode") if ":decode:0:" in n)
    scene.parts[Victim.DECODE] = old
    await rig.orders.order("switch", "decode", 0, OTHER_MODEL, OTHER_DEPTH)
    give_up_s = now_s() + REACHED_TIMEOUT_S
    while now_s() < give_up_s:
        status = await rig.orders.order("status")
        here = [r for r in status["replicas"] if ":decode:0:" in r["name"] and r["name"] != old]
        if here:
            return
        await asyncio.sleep(LOOK_EVERY_S)
    raise NotReached("no process of the other model was started")


async def _restore(rig: Rig, verb: str, *args: object) -> None:
    """Give an order that must not be lost; the controller may be away for a while."""
    give_up_s = now_s() + RESTORE_TIMEOUT_S
    while True:
        try:
            await rig.orders.order(verb, *args)
            return
        except OrderFailed:
            if now_s() > give_up_s:
                raise
        await asyncio.sleep(0.5)


async def _until_held(scene: Scene, folder: Path) -> None:
    give_up_s = now_s() + REACHED_TIMEOUT_S
    while not (folder / HELD).exists():
        if scene.tasks[-1].done():
            raise NotReached(f"it ended before: {scene.tasks[-1].result()}")
        if now_s() > give_up_s:
            raise NotReached("the protocol did not come to the step")
        await asyncio.sleep(LOOK_EVERY_S)


async def _busy(rig: Rig, rng: random.Random) -> str:
    """A decode replica that has streams. Raises: OrderFailed: None has any."""
    give_up_s = now_s() + REACHED_TIMEOUT_S
    while now_s() < give_up_s:
        names = await rig.orders.order("serving", "decode")
        busy: list[str] = [name for name in names if await rig.orders.order("running", name)]
        if busy:
            return rng.choice(busy)
        await asyncio.sleep(LOOK_EVERY_S)
    raise OrderFailed("no decode replica has a stream")


async def victim(rig: Rig, cell: Cell, scene: Scene, rng: random.Random) -> Process:
    """Who is struck. Raises: OrderFailed."""
    part = cell.victim
    if part is Victim.NODE:
        part = Victim.SOURCE if cell.moment in MIGRATION else Victim.DECODE
    if part in scene.parts:
        return await rig.process(scene.parts[part])
    kind = "decode" if part in (Victim.SOURCE, Victim.DESTINATION) else part.value
    if kind == "decode" and cell.moment is Moment.MID_STREAM:
        return await rig.process(await _busy(rig, rng))
    if kind in ("prefill", "decode"):
        return await rig.process(rng.choice(await rig.orders.order("serving", kind)))
    head = rig.nodes.cluster.nodes[0].address if rig.nodes is not None else None
    return rng.choice([p for p in await rig.processes(kind) if p.node != head])
